"""Probes of a reward's behavior: reproducibility, errors on unusual rollouts, time and memory use, and more.

Each public coroutine is a probe. A probe calls the reward through a `CheckContext` and adds findings to the report.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from reward_kit.checks.findings import Level
from reward_kit.checks.reward_bench import ATTACK_CPU_S, LITTLE, CallOutcome, CheckContext, evidence, quoted
from reward_kit.checks.reward_cases import (
    clearly_different,
    long_texts,
    make_request,
    odd_histories,
    odd_texts,
    said,
    truth_text,
    user,
    with_messages,
)
from reward_kit.display_text import pluralize
from reward_kit.errors import Failure
from reward_kit.reward_agent.scoring import ScoringRequest

_REPEATS = 3
_SLOW_CALL_S = 0.05
_FRESH_EVERY = 3
_LATE_CALLS = 100
_LATE_S = 3.0
"""The time for repeated calls, in seconds. Slow rewards are called less often."""
_KEPT = "the score depends on earlier calls, because the reward keeps state between calls"
_Scores = list[float | None]


async def steady(context: CheckContext) -> None:
    """Score the same rollouts repeatedly, in reverse order, and in new workers."""
    question, bench = context.first, context.bench
    texts = [*clearly_different()[1:8], " ".join(question.written(value) for value in question.wrong)]
    for known in context.known:
        right, wrong = truth_text(known.truth), truth_text(known.wrong[0]) if known.wrong else "nothing"
        texts += [" ".join([right, wrong] * 2), f"{wrong} and {right}"]
    rollouts = [question.answered(text) for text in texts]
    rollouts += [
        known.answered(f"{truth_text(known.truth)} {word}") for known in context.known for word in ("and", "or", "so")
    ]
    rollouts += [question.gold for question in context.questions if question.gold is not None]
    rollouts += context.rollouts[:8]

    is_slow = any(one.gold_seen is not None and one.gold_seen.wall_s > _SLOW_CALL_S for one in context.questions)
    repeats = 1 if is_slow else _REPEATS  # Each rollout is also scored in reverse order and in new workers

    async def in_worker(worker: int) -> list[_Scores]:
        """Score each rollout multiple times in one worker."""
        return [[(await bench.see(one, worker=worker)).score for _ in range(repeats)] for one in rollouts]

    here = await in_worker(0)
    context.early = [(rollout, scores[0]) for rollout, scores in zip(rollouts, here, strict=True)]
    for rollout, scores in zip(reversed(rollouts), reversed(here), strict=True):
        scores.append((await bench.see(rollout)).score)
    why = f" (its file uses {', '.join(context.source.chance)})" if context.source.chance else ""
    by_chance = (
        f"repeated scores of the same rollout differ{why}; the differences add noise to the advantages in a group"
    )
    if not bench.is_confined:
        missing = "the reward runs in this process; pass --sandbox warm to score in new workers"
        context.report.cannot("state kept between calls", missing)
        lines = [_line(rollout, scores) for rollout, scores in zip(rollouts, here, strict=True) if _differ(scores)]
        context.report.note("nondeterministic", "error", by_chance, lines)
        return
    # A fresh worker costs as much as fifty calls, so only some rollouts get a fresh worker unless scores differ.
    fresh = {}
    for index in range(0, len(rollouts), _FRESH_EVERY):
        fresh[index] = (await bench.see(rollouts[index], is_fresh=True)).score
    if not context.source.has_sets and not any(
        _differ([*scores, fresh[index]] if index in fresh else scores) for index, scores in enumerate(here)
    ):
        return
    for index in range(len(rollouts)):
        if index not in fresh:
            fresh[index] = (await bench.see(rollouts[index], is_fresh=True)).score
    one, other = await in_worker(1), await in_worker(2)
    moved = [i for i in range(len(rollouts)) if _differ([*here[i], fresh[i], *one[i], *other[i]])]
    lines = [_line(rollouts[i], here[i], fresh[i], one[i], other[i]) for i in moved]
    # Two other interpreters make the same calls. Equal scores in both indicate that state is kept between calls.
    # Constant scores within each indicate that the score depends on the order of a set.
    if not any(_differ(pair) for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)):
        context.report.note("hidden-state", "error", _KEPT, lines)
    elif not any(_differ(scores) for scores in (*here, *one, *other)):
        text = (
            "the score differs between interpreters but not within one interpreter, because it depends on the "
            "order of a set or "
            "on hash(); sort the set, or use hashlib"
        )
        context.report.note("depends-on-hash-seed", "error", text, lines)
    else:
        context.report.note("nondeterministic", "error", by_chance, lines)


async def still(context: CheckContext) -> None:
    """Score the first rollouts again after all other probes and a hundred more calls."""
    if any(context.report.has(code) for code in ("nondeterministic", "hidden-state", "depends-on-hash-seed")):
        return
    began = time.monotonic()
    for _ in range(_LATE_CALLS):
        await context.bench.see(context.early[0][0])
        if time.monotonic() - began > _LATE_S:
            break
    lines = []
    for rollout, first in context.early:
        last = (await context.bench.see(rollout)).score
        if _differ([first, last]):
            lines.append(f"{_line(rollout, [first])} at first, but {_words([last])} after many calls")
    context.report.note("hidden-state", "error", _KEPT, lines)


def _differ(scores: Sequence[float | None]) -> bool:
    """Return True if the scores differ, or if some but not all are missing."""
    known = [score for score in scores if score is not None]
    return 0 < len(known) < len(scores) or bool(known and max(known) - min(known) > LITTLE)


def _line(rollout: ScoringRequest, here: _Scores, fresh: float | None = None, *elsewhere: _Scores) -> str:
    text = quoted(rollout.messages[-1].text, 60) if rollout.messages else ""
    parts = [f'"{text}": {_words(here)}']
    if elsewhere:
        parts += [f"in a fresh worker {_words([fresh])}", *(f"in another {_words(scores)}" for scores in elsewhere)]
    return "; ".join(parts)


def _words(scores: Sequence[float | None]) -> str:
    return ", ".join("unscored" if score is None else f"{score:.4g}" for score in scores)


_REGEX_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_SIGNS = "a1 ,.;:-_<>{}()[]\\/#*\"'\n\tAzZ9é"
_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
_EXPONENTIAL = 32
_QUADRATIC = 20_000
_NEVER = "\x01\x02"


def attacks(patterns: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield an attack on each repeat in each pattern, as a tuple (pattern, short string, long string).

    The strings match the repeat many times and then fail. Nested repeats may take exponential time on the short string,
    and adjacent repeats may take quadratic time on the long string.
    """
    done = set()
    for pattern in patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError):  # Compiling the expression reports the error
            continue
        for prefix, body in _loops(tree, ""):
            if body and (prefix, body) not in done:
                done.add((prefix, body))
                short, long = prefix + body * _EXPONENTIAL, prefix + body * (_QUADRATIC // len(body))
                yield pattern, short + _NEVER, long + _NEVER


def _loops(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield, for each unbounded repeat, a string that matches the part before it and a string that matches its body."""
    for code, argument in tree:
        if code in _REGEX_REPEATS:
            _, most, body = argument
            if most is codes.MAXREPEAT or most > 8:
                yield prefix, _example(body, rounds=1)
            yield from _loops(body, prefix)
        elif code is codes.SUBPATTERN:
            yield from _loops(argument[-1], prefix)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                yield from _loops(branch, prefix)
        prefix += _example([(code, argument)])


def _example(tree: Any, rounds: int = 0) -> str:
    """Return a string that matches part of an expression, with at least `rounds` iterations of each repeat."""
    return "".join(_one(code, argument, rounds) for code, argument in tree)


def _one(code: Any, argument: Any, rounds: int) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        is_negated = argument[0][0] is codes.NEGATE
        return next((sign for sign in _SIGNS if any(_holds(sign, item) for item in argument) != is_negated), "a")
    if code in _REGEX_REPEATS:
        least, _, body = argument
        return _example(body, rounds) * max(int(least), rounds)
    if code is codes.SUBPATTERN:
        return _example(argument[-1], rounds)
    if code is codes.BRANCH:
        return _example(argument[1][0], rounds)
    return ""


def _holds(char: str, item: tuple[Any, Any]) -> bool:
    code, argument = item
    if code is codes.LITERAL:
        return bool(ord(char) == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    return code is codes.CATEGORY and bool(re.match(_CATEGORIES[argument], char))


_CANARY = "rk_canary"
_WORDS = {"file": "files opened", "environment": "environment variables", "network": "network", "process": "programs"}


async def runs_answers(context: CheckContext) -> None:
    """Check that the reward does not execute code from an answer or a question in its own process."""
    code = f"__import__('{_CANARY}')"
    texts = {
        code,
        f"{code} * \\pi",
        f"\\boxed{{{code}}}",
        f"<answer>{code}</answer>",
        f"[{code}, 1]",
        f"{{'a': {code}}}",
    }
    texts |= {question.form.write(code) for question in context.questions if question.form is not None}
    calls = [("code in the answer", f"the answer {text!r}", context.first.answered(text)) for text in sorted(texts)]
    question = make_request((user(code), said("42")), context.first.truth)
    lines = []
    for name, subject, request in (*calls, ("code in the question", "a user's message", question)):
        seen = await context.see(name, request)
        if any(kind == "code" and _CANARY in what for kind, what in seen.events):
            lines.append(f"{subject} was compiled as Python")
    text = (
        "the reward executes text written by the model as Python code in its process; parse the text, or execute it in "
        "a separate sandbox"
    )
    context.report.note("evaluates-answer", "error", text, lines)


async def reads(context: CheckContext) -> None:
    """Report the files, environment variables, network addresses and programs that the reward used in any call."""
    names: dict[str, list[str]] = defaultdict(list)
    for kind, what in context.events:
        if kind in _WORDS:
            names[kind].append(what)
    for kind, known in names.items():
        context.report.facts[_WORDS[kind]] = sorted(set(known))[:10]
    outward, inward = (
        [f"{kind}: {what}" for kind in kinds for what in names[kind][:3]]
        for kinds in (("network", "process"), ("file", "environment"))
    )
    text = "the reward uses the network or starts programs, which a sandbox may block"
    context.report.note("reaches-out", "info", text, outward, most=6)
    if not outward:
        text = "the score may depend on files or environment variables of this machine"
        context.report.note("reads-outside", "info", text, inward, most=6)


_CALLS = 30
_LENGTH = 10_000
_WORTH_S = 0.02
_STEEP = 3.0
_LONGEST_ATTACKS = 24
_MUCH_MB = 200.0


async def cost(context: CheckContext) -> None:
    """Measure a call's time and memory use for an ordinary answer and for a long answer."""
    question = context.first
    request = question.gold or question.answered("The answer is 42.")
    began = time.monotonic()
    seen: list[CallOutcome] = []
    while len(seen) < _CALLS and time.monotonic() - began < _LATE_S:
        seen.append(await context.bench.see(request))
    times = sorted(one.wall_s for one in seen if one.wall_s)
    if not times:
        return
    short = await context.bench.see(request, memory=True)
    long = await context.bench.see(question.answered("word " * 20_000), memory=True)
    context.report.facts["time of a call, ms"] = {
        "p50": _round(1000 * times[len(times) // 2]),
        "p95": _round(1000 * times[int(len(times) * 0.95)]),
    }
    context.report.facts["memory of a call, MiB"] = {
        "on ordinary answers": _round(short.peak_mb),
        "on 100,000 characters": _round(long.peak_mb),
    }
    if long.peak_mb > _MUCH_MB:
        text = f"the reward uses {long.peak_mb:.0f} MiB of memory on an answer of 100,000 characters"
        context.report.note("much-memory", "warning", text)


async def growth(context: CheckContext) -> None:
    """Check that the time grows roughly linearly with the length of the answer."""
    question = context.first
    pieces = _PIECES
    if question.truth is not None and question.form is not None and question.wrong:
        pieces = {**_PIECES, "wrong answers": question.written(question.wrong[0]) + "\n"}
    for name, piece in pieces.items():
        seen = await _at(context, piece, 1)
        if seen.cpu_s < _WORTH_S / 4 and not _is_late(seen):
            continue
        double, line = await _at(context, piece, 2), ""
        if _is_late(seen) or _is_late(double):
            line = f"{name}, {_LENGTH:,} or {2 * _LENGTH:,} characters: timed out"
        elif double.cpu_s > _WORTH_S:
            # Other load on the machine slows individual calls, so use the fastest of multiple calls.
            once = min([seen.cpu_s, *[(await _at(context, piece, 1)).cpu_s for _ in range(2)]])
            twice = min([double.cpu_s, *[(await _at(context, piece, 2)).cpu_s for _ in range(2)]])
            if twice > _STEEP * once:
                line = (
                    f"{name}: {1000 * once:.0f} ms on {_LENGTH:,} characters, {1000 * twice:.0f} ms on {2 * _LENGTH:,}"
                )
        if line:
            text = "the time grows faster than the length of the answer, so a long answer delays the whole batch"
            context.report.note("slow-growth", "error", text, [line])
            return


_PIECES = {
    "words": "some words and more ",
    "digits": "1234567890",
    "one letter": "a",
    "spaces": " ",
    "line breaks": "\n",
    "opened tags": "<answer>",
    "opened thoughts": "<think> ",
    "opened boxes": "\\boxed{",
    "opened brackets": "([{",
    "commas and digits": "1,",
    "code fences": "```python\n",
    "quotes": '"',
    "sentences with numbers": "Then 12 and 7 make 19. ",
}
"""The strings that are repeated to make long answers, keyed by name."""


async def _at(context: CheckContext, piece: str, times: int) -> CallOutcome:
    text = piece * (times * _LENGTH // len(piece))
    return await context.bench.see(context.first.answered(text))


async def patterns(context: CheckContext) -> None:
    """Apply the reward's regular expressions to strings that may cause catastrophic backtracking."""
    found, first, bench = context.source.patterns, context.first, context.bench
    if not found:
        return
    if not bench.is_confined:
        why = "the reward runs in this process, where a match cannot be interrupted; pass --sandbox warm"
        context.report.cannot("time of the regular expressions", why)
        return

    async def attack(text: str) -> CallOutcome:
        return await bench.see(first.answered(text), is_fresh=True, cpu_s=ATTACK_CPU_S)

    tried = list(attacks(found))[:_LONGEST_ATTACKS]
    over = f"more than {ATTACK_CPU_S:.0f} s on"
    exponential: dict[str, str] = {}
    for pattern, short, _ in tried:
        for text in dict.fromkeys((short, first.form.write(short) if first.form else short)):
            if pattern not in exponential and _is_late(await attack(text)):
                name, line = quoted(pattern, 60), quoted(text, 50)
                exponential[pattern] = f"{name}: {over} {len(text)} characters: {line}"
    text = "a regular expression takes exponential time on a short string that a model can write; do not nest repeats"
    context.report.note("catastrophic-regex", "error", text, exponential.values())
    slow: dict[str, str] = {}
    for pattern, short, long in tried:
        if pattern in exponential or pattern in slow or not _is_late(await attack(long)):
            continue
        part = long[: len(long) // 16] + short[-2:]
        seen = await attack(part)
        took = f"more than {ATTACK_CPU_S:.0f} s" if _is_late(seen) else f"{1000 * seen.cpu_s:.0f} ms"
        slow[pattern] = f"{quoted(pattern, 40)}: {took} on {len(part):,} characters, {over} {len(long):,}"
    text = (
        "a regular expression takes at least quadratic time on a long string that a model can write; do not let "
        "adjacent "
        r"repeats match the same characters (as in \s*.*?\s*; call strip() instead), or limit their length"
    )
    context.report.note("slow-regex", "error", text, slow.values())


def _is_late(seen: CallOutcome) -> bool:
    return seen.failure is not None and seen.failure.failure_class == "timeout"


def _round(value: float) -> float:
    return float(f"{value:.3g}")


_ERROR_WORDS = re.compile(
    r"\b[A-Z]\w*(Error|Exception)\b|(?i:\b(error|exception)\s*:|an (error|exception)|traceback|NoneType|errno"
    r"|list index out of range|not subscriptable|has no attribute|invalid literal|timed out)"
)
_SLOW_S = 1.0
_FAULT = "raises-on-faults"


async def odd(context: CheckContext) -> None:
    """Check that the reward does not raise on unusual histories and answers. A model could exploit such errors."""
    report, first = context.report, context.first
    tried = [
        (history.name, with_messages(first.blank, history.messages), "raises" if history.is_models else _FAULT)
        for history in odd_histories(first.blank.messages)
    ]
    for name, text in odd_texts():
        wrapped = dict.fromkeys((text, first.form.write(text) if first.form else text))
        tried += [(name, first.answered(one), "raises") for one in wrapped]
    long = [(name, first.answered(text), "raises") for name, text in long_texts()]
    long_names = {name for name, _, _ in long}
    broken: dict[str, list[tuple[str, CallOutcome]]] = defaultdict(list)
    zeros = []
    for name, request, otherwise in (*tried, *long):
        seen = await context.see(name, request)
        if seen.failure is not None:
            broken[_kind_of(seen.failure, otherwise)].append((name, seen))
        # A score of zero counts as an error if its reason names an error.
        reason = seen.result.reason if seen.result is not None and seen.score is not None else None
        if reason and seen.score is not None and seen.score <= LITTLE and _ERROR_WORDS.search(reason):
            zeros.append(f"{name}: {reason[:100]}")
        if name in long_names and seen.cpu_s > _SLOW_S:
            text = f"the reward takes {seen.cpu_s:.1f} s on {name}; a single long answer delays the whole batch"
            report.note("slow", "warning", text)
    for kind, (level, text) in _BROKEN.items():
        if cases := broken.get(kind):
            count = pluralize(len({name for name, _ in cases}), "rollout")
            report.note(kind, level, text.format(n=count), [evidence(*case) for case in cases], most=6)
    lines = [f"line {line}: a broad except clause returns a score" for line in context.source.zeros]
    text = (
        "exceptions are turned into scores, so errors count as wrong answers; let exceptions propagate, or return "
        "is_score_valid=False to leave the rollout unscored"
    )
    report.note("swallowed-exception", "warning", text, [*lines, *zeros], most=6)


def _kind_of(failure: Failure, otherwise: str) -> str:
    """Return the kind of finding for a failure, or `otherwise` for an exception."""
    if failure.failure_class == "timeout":
        return "hangs"
    if failure.where == "AlignmentError":
        return "misaligned-steps"
    if "result_kb" in failure.message:
        return "large-result"
    if "finite" in failure.message:
        return "not-finite"
    if failure.failure_class == "invalid_result":
        return "unscored" if "declared no valid score" in failure.message else "invalid-result"
    return otherwise


_BROKEN: dict[str, tuple[Level, str]] = {
    "raises": (
        "error",
        "the reward raises on {n} that a model can cause, so a model could avoid a bad score by being unscored",
    ),
    _FAULT: ("warning", "the reward raises on {n} that only a bug can cause"),
    "hangs": ("error", "the reward times out on {n}"),
    "misaligned-steps": (
        "error",
        "on {n}, the reward returns step_outputs for steps that do not exist; index steps by assistant_turns",
    ),
    "not-finite": ("error", "the reward returns a score that is not finite on {n}"),
    "invalid-result": ("error", "the reward returns an invalid result on {n}"),
    "large-result": (
        "info",
        "on {n}, the result exceeds sandbox.limits.result_kb; quote a shorter part of the answer in the reason",
    ),
    "unscored": ("info", "the reward leaves {n} unscored"),
}


async def missing_truth(context: CheckContext) -> None:
    """Check that rollouts without a ground truth stay unscored.

    Rollouts with an invalid ground truth must score 0.
    """
    question = context.first
    if context.bench.parameters is not None and "ground_truth" not in context.bench.parameters:
        return
    if question.truth is None or not question.separates_answers:
        context.report.cannot("a missing ground truth", "no known answer earns more than a wrong answer")
        return
    wrong = question.written(question.wrong[0]) if question.wrong else "I do not know."
    right = question.written(question.truth)
    answers = {"wrong": wrong, "the right one": right, "no words": "", "no answer": "I do not know."}
    if isinstance(question.truth, str):
        lines = []
        for truth in ("", "\\frac{{", "n/a"):  # No parser can read these, so no answer is correct
            for text in (wrong, answers["no answer"]):
                seen = await context.bench.see(replace(question.answered(text), ground_truth=truth))
                if (seen.score or 0.0) > (question.floor or 0.0) + LITTLE:
                    lines.append(evidence(f"ground_truth {truth!r}", seen, text))
        text = "any answer counts as correct if the ground truth cannot be parsed; leave such rollouts unscored"
        context.report.note("unreadable-truth-earns", "error", text, lines)
    lines, earns = [], False
    for name, text in answers.items():
        seen = await context.bench.see(replace(question.answered(text), ground_truth=None))
        if seen.score is not None:
            lines.append(evidence(f"ground_truth None, answer: {name}", seen, text))
            earns = earns or seen.score > (question.floor or 0.0) + LITTLE
    if earns:
        text = "a rollout without a ground truth earns a reward; raise an exception to leave it unscored"
        context.report.note("missing-truth-earns", "error", text, lines)
    else:
        text = (
            "a rollout without a ground truth scores 0, as a wrong answer does; raise an exception to leave it unscored"
        )
        context.report.note("missing-truth-is-zero", "warning", text, lines, most=2)


async def changes_inputs(context: CheckContext) -> None:
    """Check that no call changed its inputs. This probe must run after all other probes."""
    lines = [f"{name}{how}" for name, how in context.changed.items()]
    text = "the reward changes its inputs, so the next reward would score changed data; copy the inputs first"
    context.report.note("mutates-input", "error", text, lines, most=8)
