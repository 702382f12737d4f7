"""Probes of how a reward behaves: steady scores, odd rollouts, time and memory, regular expressions, and what it reads.

Each public function is one probe: it calls the reward through a `Checkup` and notes what it finds in the report.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from reward_kit.checks.findings import Level
from reward_kit.checks.reward_bench import ATTACK_CPU_S, LITTLE, Checkup, Ground, Seen, quoted, told
from reward_kit.checks.reward_cases import (
    clearly_different,
    long_texts,
    odd_histories,
    odd_texts,
    request_of,
    said,
    text_of,
    user,
    with_messages,
)
from reward_kit.display_text import counted
from reward_kit.errors import Failure
from reward_kit.reward_agent.scoring import ScoringRequest

_REPEATS = 3
_FRESH_EVERY = 3
_LATE_CALLS = 100
_CHANCE = "the same rollout gets different scores{why}; a group's advantages become noise"
_Scores = list[float | None]


async def steady(checkup: Checkup) -> None:
    """Score the same rollouts again and again, forwards and backwards, and in fresh workers."""
    rollouts = _rollouts(checkup)
    here = await _in_worker(checkup, rollouts, 0)
    checkup.early = [(rollout, scores[0]) for rollout, scores in zip(rollouts, here, strict=True)]
    for rollout, scores in zip(reversed(rollouts), reversed(here), strict=True):
        scores.append((await checkup.bench.see(rollout)).score)
    if not checkup.bench.is_confined:
        why = "it runs in this process, which has no fresh worker; --sandbox warm has"
        checkup.report.cannot("what it keeps from call to call, against a fresh worker", why)
        if moved := [index for index, scores in enumerate(here) if _differ(scores)]:
            lines = [_line(rollouts[index], here[index]) for index in moved[:3]]
            checkup.report.note("nondeterministic", "error", _CHANCE.format(why=_why(checkup)), lines)
        return
    # A fresh worker costs fifty calls, so that some rollouts stand for all of them unless something moves.
    fresh = {index: await _fresh(checkup, rollouts[index]) for index in range(0, len(rollouts), _FRESH_EVERY)}
    if checkup.source.has_sets or any(
        _differ([*scores, *([fresh[index]] if index in fresh else [])]) for index, scores in enumerate(here)
    ):
        for index in range(len(rollouts)):
            if index not in fresh:
                fresh[index] = await _fresh(checkup, rollouts[index])
        one, other = [await _in_worker(checkup, rollouts, worker) for worker in (1, 2)]
        _judge(checkup, rollouts, here, fresh, one, other)


async def _fresh(checkup: Checkup, rollout: ScoringRequest) -> float | None:
    return (await checkup.bench.see(rollout, is_fresh=True)).score


async def _in_worker(checkup: Checkup, rollouts: Sequence[ScoringRequest], worker: int) -> list[_Scores]:
    """Return the scores of the same calls in the same order, in a further interpreter."""
    return [[(await checkup.bench.see(one, worker=worker)).score for _ in range(_REPEATS)] for one in rollouts]


async def still(checkup: Checkup) -> None:
    """Score the first rollouts again, after all that was asked since; asked late, and again after many more calls."""
    if any(checkup.report.has(code) for code in ("nondeterministic", "hidden-state", "depends-on-hash-seed")):
        return
    for _ in range(_LATE_CALLS):
        await checkup.bench.see(checkup.early[0][0])
    lines = []
    for rollout, first in checkup.early:
        last = (await checkup.bench.see(rollout)).score
        if _differ([first, last]):
            lines.append(f"{_line(rollout, [first])} at first, {_words([last])} after some hundreds of calls")
    if lines:
        text = "the score depends on what was scored before: something is kept from call to call"
        checkup.report.note("hidden-state", "error", text, lines[:3])


def _rollouts(checkup: Checkup) -> list[ScoringRequest]:
    ground = checkup.first
    texts = [*clearly_different()[1:8], " ".join(ground.written(value) for value in ground.wrong)]
    for known in checkup.known:
        right, wrong = text_of(known.truth), text_of(known.wrong[0]) if known.wrong else "nothing"
        texts += [" ".join([right, wrong] * 2), f"{wrong} and {right}"]
    found = [ground.answered(text) for text in texts]
    found += [
        known.answered(f"{text_of(known.truth)} {word}") for known in checkup.known for word in ("and", "or", "so")
    ]
    found += [ground.gold for ground in checkup.grounds if ground.gold is not None]
    return [*found, *checkup.rollouts[:8]]


def _judge(
    checkup: Checkup,
    rollouts: Sequence[ScoringRequest],
    here: Sequence[_Scores],
    fresh: Mapping[int, float | None],
    one: Sequence[_Scores],
    other: Sequence[_Scores],
) -> None:
    """Tell chance, memory and the order of a set apart by the scores of the same calls in two other interpreters."""
    is_steady_there = not any(_differ(scores) for scores in (*one, *other))
    is_same_there = not any(
        _differ([a, b]) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
    moved = [i for i in range(len(rollouts)) if _differ([*here[i], fresh[i], *one[i], *other[i]])]
    if not moved:
        return
    lines = [_line(rollouts[i], here[i], fresh[i], one[i], other[i]) for i in moved[:3]]
    if is_same_there:
        text = "the score depends on what was scored before: something is kept from call to call"
        checkup.report.note("hidden-state", "error", text, lines)
    elif is_steady_there and not any(_differ(scores) for scores in here):
        text = (
            "the score differs between interpreters and not within one: it depends on the order of a set or on hash(); "
            "sort, or use hashlib"
        )
        checkup.report.note("depends-on-hash-seed", "error", text, lines)
    else:
        checkup.report.note("nondeterministic", "error", _CHANCE.format(why=_why(checkup)), lines)


def _why(checkup: Checkup) -> str:
    return f" (its file uses {', '.join(checkup.source.chance)})" if checkup.source.chance else ""


def _differ(scores: Sequence[float | None]) -> bool:
    """Return whether scores differ; scored beside unscored differs too."""
    known = [score for score in scores if score is not None]
    return 0 < len(known) < len(scores) or bool(known and max(known) - min(known) > LITTLE)


def _line(rollout: ScoringRequest, here: _Scores, fresh: float | None = None, *elsewhere: _Scores) -> str:
    text = quoted(rollout.messages[-1].text, 60) if rollout.messages else ""
    parts = [f'"{text}": {_words(here)}']
    if elsewhere:
        parts += [f"in a fresh worker {_words([fresh])}", *(f"in another {_words(scores)}" for scores in elsewhere)]
    return "; ".join(parts)


def _words(scores: _Scores) -> str:
    return ", ".join("unscored" if score is None else f"{score:.4g}" for score in scores)


_REGEX_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT)
_SIGNS = "a1 ,.;:-_<>{}()[]\\/#*\"'\n\tAzZ9é"
_CATEGORIES = {
    codes.CATEGORY_DIGIT: "19",
    codes.CATEGORY_SPACE: " \n\t",
    codes.CATEGORY_WORD: "a1_AzZ9é",
}
_NEGATED = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
}
_EXPONENTIAL = 32
_QUADRATIC = 20_000
_NEVER = "\x01\x02"


def attacks(patterns: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """For each repeat in each pattern: the pattern, and a short and a long text that go through it and then fail.

    A pattern with a repeat inside of a repeat may take exponential time on the short one.
    """
    done = set()
    for pattern in patterns:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern)
        except (re.error, RecursionError, OverflowError):  # reported where it is compiled
            continue
        for prefix, body in _loops(tree, ""):
            if body and (prefix, body) not in done:
                done.add((prefix, body))
                short, long = prefix + body * _EXPONENTIAL, prefix + body * (_QUADRATIC // len(body))
                yield pattern, short + _NEVER, long + _NEVER


def _loops(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the text that leads to each unbounded repeat, and one round of it."""
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
    """A text that a part of an expression matches; a repeat in one is gone through as often as it must, or `rounds`."""
    return "".join(_one(code, argument, rounds) for code, argument in tree)


def _one(code: Any, argument: Any, rounds: int) -> str:
    if code is codes.LITERAL:
        return chr(argument)
    if code is codes.NOT_LITERAL:
        return "a" if argument != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return _member(argument)
    if code in _REGEX_REPEATS:
        least, _, body = argument
        return _example(body, rounds) * max(int(least), rounds)
    if code is codes.SUBPATTERN:
        return _example(argument[-1], rounds)
    if code is codes.BRANCH:
        return _example(argument[1][0], rounds)
    return ""


def _member(items: Any) -> str:
    """One sign of a set of them."""
    is_negated = items[0][0] is codes.NEGATE
    return next((char for char in _SIGNS if any(_holds(char, item) for item in items) != is_negated), "a")


def _holds(char: str, item: tuple[Any, Any]) -> bool:
    code, argument = item
    if code is codes.LITERAL:
        return bool(ord(char) == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    if code is codes.CATEGORY:
        signs = _CATEGORIES.get(_NEGATED.get(argument, argument), "")
        return bool((char in signs) != (argument in _NEGATED))
    return False


_CANARY = "rk_canary"
_WORDS = {"file": "files opened", "environment": "environment variables", "network": "network", "process": "programs"}


async def runs_answers(checkup: Checkup) -> None:
    """Check that code in an answer, or in a question, is not run in the process that scores."""
    code = f"__import__('{_CANARY}')"
    forms = {
        code,
        f"{code} * \\pi",
        f"\\boxed{{{code}}}",
        f"<answer>{code}</answer>",
        f"[{code}, 1]",
        f"{{'a': {code}}}",
    }
    texts = sorted(forms | {ground.form.write(code) for ground in checkup.grounds if ground.form is not None})
    lines: dict[str, None] = {}
    for text in texts:
        seen = await checkup.see("code in the answer", checkup.first.answered(text))
        if any(kind == "code" and _CANARY in what for kind, what in seen.events):
            lines[f"the answer {text!r} was compiled as Python"] = None
    asked = request_of((user(code), said("42")), checkup.first.truth)
    seen = await checkup.see("code in the question", asked)
    if any(kind == "code" and _CANARY in what for kind, what in seen.events):
        lines["a user's message was compiled as Python"] = None
    if lines:
        text = (
            "runs what a model writes as Python, beside the reward itself; parse it, or run it in a sandbox of its own"
        )
        checkup.report.note("evaluates-answer", "error", text, list(lines)[:4])


async def reads(checkup: Checkup) -> None:
    """Report all that was opened, asked for and started in any call; for information, it prevents nothing."""
    found: dict[str, list[str]] = defaultdict(list)
    for kind, what in checkup.events:
        if kind in _WORDS:
            found[kind].append(what)
    for kind, names in found.items():
        checkup.report.facts[_WORDS[kind]] = sorted(set(names))[:10]
    if found["network"] or found["process"]:
        text = "asks for the network or starts programs in its calls; where it is confined that may be refused"
        lines = [f"{kind}: {what}" for kind in ("network", "process") for what in found[kind][:3]]
        checkup.report.note("reaches-out", "info", text, lines)
    elif found["file"] or found["environment"]:
        lines = [f"{kind}: {what}" for kind in ("file", "environment") for what in found[kind][:3]]
        checkup.report.note("reads-outside", "info", "its score may depend on files or variables of the machine", lines)


_CALLS = 30
_LENGTH = 10_000
_WORTH_S = 0.02
_STEEP = 3.0
_LONGEST_ATTACKS = 24
_MUCH_MB = 200.0


async def cost(checkup: Checkup) -> None:
    """Measure time and memory of an ordinary call, and of one on a long answer."""
    ground = checkup.first
    request = ground.gold or ground.answered("The answer is 42.")
    seen = [await checkup.bench.see(request) for _ in range(_CALLS)]
    times = sorted(one.wall_s for one in seen if one.wall_s)
    if not times:
        return
    short = await checkup.bench.see(request, memory=True)
    long = await checkup.bench.see(ground.answered("word " * 20_000), memory=True)
    checkup.report.facts["time of a call, ms"] = {
        "p50": _round(1000 * times[len(times) // 2]),
        "p95": _round(1000 * times[int(len(times) * 0.95)]),
    }
    checkup.report.facts["memory of a call, MiB"] = {
        "as a rule": _round(short.peak_mb),
        "on 100,000 characters": _round(long.peak_mb),
    }
    if long.peak_mb > _MUCH_MB:
        text = f"holds {long.peak_mb:.0f} MiB on an answer of 100,000 characters"
        checkup.report.note("much-memory", "warning", text)


async def growth(checkup: Checkup) -> None:
    """Score answers of twice the length: they may take twice the time, not four times."""
    for name, piece in _pieces(checkup.first):
        seen = await _at(checkup, piece, 1)
        if seen.cpu_s < _WORTH_S / 4 and not _is_late(seen):
            continue
        double, line = await _at(checkup, piece, 2), ""
        if _is_late(seen) or _is_late(double):
            line = f"{name}, {_LENGTH:,} or {2 * _LENGTH:,} characters: does not come back in time"
        elif double.cpu_s > _WORTH_S:
            # A busy machine slows single calls, so that the fastest of several counts.
            once = min([seen.cpu_s, *[(await _at(checkup, piece, 1)).cpu_s for _ in range(2)]])
            twice = min([double.cpu_s, *[(await _at(checkup, piece, 2)).cpu_s for _ in range(2)]])
            if twice > _STEEP * once:
                line = (
                    f"{name}: {1000 * once:.0f} ms on {_LENGTH:,} characters, {1000 * twice:.0f} ms on {2 * _LENGTH:,}"
                )
        if line:
            text = "its time grows faster than the answer: a long one holds up the batch"
            checkup.report.note("slow-growth", "error", text, [line])
            return


def _pieces(ground: Ground) -> Iterator[tuple[str, str]]:
    """Yield pieces of long answers, each with its name; also written as the reward wants an answer."""
    yield from {
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
    }.items()
    if ground.truth is not None and ground.form is not None and ground.wrong:
        yield "wrong answers", ground.written(ground.wrong[0]) + "\n"


async def _at(checkup: Checkup, piece: str, times: int) -> Seen:
    text = piece * (times * _LENGTH // len(piece))
    return await checkup.bench.see(checkup.first.answered(text))


async def patterns(checkup: Checkup) -> None:
    """Try the reward's own regular expressions on texts that they may never come back from."""
    found = checkup.source.patterns
    if not found:
        return
    if not checkup.bench.is_confined:
        why = "it runs in this process, where nothing can stop an expression; --sandbox warm can"
        checkup.report.cannot("whether its regular expressions come back", why)
        return
    lines: dict[str, str] = {}
    for pattern, short, _ in list(attacks(found))[:_LONGEST_ATTACKS]:
        if pattern in lines:
            continue
        for text in dict.fromkeys((short, checkup.first.form.write(short) if checkup.first.form else short)):
            seen = await checkup.bench.attack(checkup.first.answered(text))
            if _is_late(seen):
                lines[pattern] = (
                    f"{quoted(pattern, 60)}: over {ATTACK_CPU_S:.0f} s on {len(text)} characters: {quoted(text, 50)}"
                )
                break
    if lines:
        text = (
            "a regular expression takes exponential time on a short text that a model may write; repeat nothing that "
            "repeats"
        )
        checkup.report.note("catastrophic-regex", "error", text, list(lines.values())[:3])
    if slow := await _long_attacks(checkup, lines):
        text = (
            "a regular expression takes quadratic time or more on a long text that a model may write; let no two "
            r"repeats beside each other match the same signs (\s*.*?\s*: strip() afterwards), or bound them"
        )
        checkup.report.note("slow-regex", "error", text, slow[:3])


async def _long_attacks(checkup: Checkup, known: dict[str, str]) -> list[str]:
    """Find those that take long without being exponential, with the times of shorter texts."""
    found: dict[str, str] = {}
    for pattern, short, long in list(attacks(checkup.source.patterns))[:_LONGEST_ATTACKS]:
        if (
            pattern in known
            or pattern in found
            or not _is_late(await checkup.bench.attack(checkup.first.answered(long)))
        ):
            continue
        text = long[: len(long) // 16] + short[-2:]
        seen = await checkup.bench.attack(checkup.first.answered(text))
        took = f"over {ATTACK_CPU_S:.0f} s" if _is_late(seen) else f"{1000 * seen.cpu_s:.0f} ms"
        found[pattern] = (
            f"{quoted(pattern, 40)}: {took} on {len(text):,} characters, over {ATTACK_CPU_S:.0f} s on {len(long):,}"
        )
    return list(found.values())


def _is_late(seen: Seen) -> bool:
    return seen.failure is not None and seen.failure.failure_class == "timeout"


def _round(value: float) -> float:
    return float(f"{value:.3g}")


_ERROR_WORDS = re.compile(
    r"\b[A-Z]\w*(Error|Exception)\b|(?i:\b(error|exception)\s*:|an (error|exception)|traceback|NoneType|errno"
    r"|list index out of range|not subscriptable|has no attribute|invalid literal|timed out)"
)
_SLOW_S = 1.0
_FAULT = "raises-on-faults"


async def odd(checkup: Checkup) -> None:
    """Score odd histories and odd answers: none may raise, since a model could then escape a bad score."""
    report, first = checkup.report, checkup.first
    tried = [
        (history.name, with_messages(first.blank, history.messages), "raises" if history.is_models else _FAULT)
        for history in odd_histories(first.blank.messages)
    ]
    for name, text in odd_texts():
        wrapped = dict.fromkeys((text, first.form.write(text) if first.form else text))
        tried += [(name, first.answered(one), "raises") for one in wrapped]
    long = [(name, first.answered(text), "raises") for name, text in long_texts()]
    long_names = {name for name, _, _ in long}
    broken: dict[str, list[tuple[str, Seen]]] = defaultdict(list)
    zeros = []
    for name, request, otherwise in (*tried, *long):
        seen = await checkup.see(name, request)
        if seen.failure is not None:
            broken[_kind_of(seen.failure, otherwise)].append((name, seen))
        # A zero whose reason tells of an error was no judgement.
        reason = seen.result.reason if seen.result is not None and seen.score is not None else None
        if reason and seen.score is not None and seen.score <= LITTLE and _ERROR_WORDS.search(reason):
            zeros.append(f"{name}: {reason[:100]}")
        if name in long_names and seen.cpu_s > _SLOW_S:
            text = f"takes {seen.cpu_s:.1f} s on {name}; a model that rambles holds up the batch"
            report.note("slow", "warning", text)
    for kind, (level, text) in _BROKEN.items():
        if cases := broken.get(kind):
            lines = list(dict.fromkeys(told(name, seen) for name, seen in cases))
            count = counted(len({name for name, _ in cases}), "rollout")
            report.note(kind, level, text.format(n=count), lines[:6])
    lines = [f"line {line}: a score is returned where any exception is caught" for line in checkup.source.zeros]
    if lines := [*lines, *dict.fromkeys(zeros)]:
        text = (
            "an exception becomes a score: what could not be judged counts as wrong; let it raise, or return "
            "is_score_valid=False, and the rollout is unscored"
        )
        report.note("swallowed-exception", "warning", text, lines[:6])


def _kind_of(failure: Failure, otherwise: str) -> str:
    """Return the kind of mistake that left a rollout unscored."""
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
        "raises on {n} that a model brings about; what is unscored is out of reach of a bad score",
    ),
    _FAULT: ("warning", "raises on {n} that only a fault brings about"),
    "hangs": ("error", "does not come back in time on {n}"),
    "misaligned-steps": (
        "error",
        "gives step_outputs that fit no step on {n}; index steps by assistant_turns",
    ),
    "not-finite": ("error", "makes a score that is not a finite number on {n}"),
    "invalid-result": ("error", "returns no valid result on {n}"),
    "large-result": (
        "info",
        "its result outgrows sandbox.limits.result_kb on {n}; cut what the reason repeats of an answer",
    ),
    "unscored": ("info", "declares {n} unscored"),
}


async def missing_truth(checkup: Checkup) -> None:
    """Check that a sample is unscored if its ground truth is missing, and earns nothing if it cannot be read."""
    ground = checkup.first
    if checkup.bench.parameters is not None and "ground_truth" not in checkup.bench.parameters:
        return
    if ground.truth is None or not ground.tells_apart:
        checkup.report.cannot("what a missing ground truth gets", "no answer is known to earn more than a wrong one")
        return
    wrong = ground.written(ground.wrong[0]) if ground.wrong else "I do not know."
    answers = {
        "wrong": wrong,
        "the right one": ground.written(ground.truth),
        "no words": "",
        "no answer": "I do not know.",
    }
    if isinstance(ground.truth, str):
        lines = []
        for truth in ("", "\\frac{{", "n/a"):  # no parser reads them, so that no answer is right
            for text in (answers["wrong"], answers["no answer"]):
                seen = await checkup.bench.see(replace(ground.answered(text), ground_truth=truth))
                if (seen.score or 0.0) > (ground.floor or 0.0) + LITTLE:
                    lines.append(told(f"ground_truth {truth!r}", seen, text))
        if lines:
            text = "a ground truth that cannot be read makes any answer right; leave such a rollout unscored"
            checkup.report.note("unreadable-truth-earns", "error", text, lines[:4])
    lines, earns = [], False
    for name, text in answers.items():
        seen = await checkup.bench.see(replace(ground.answered(text), ground_truth=None))
        if seen.score is not None:
            lines.append(told(f"ground_truth None, answer: {name}", seen, text))
            earns = earns or seen.score > (ground.floor or 0.0) + LITTLE
    if earns:
        text = "a rollout without a ground truth earns a reward: nothing is compared with nothing"
        checkup.report.note("missing-truth-earns", "error", text, lines)
    elif lines:
        text = "a rollout without a ground truth scores 0, as a wrong answer does; raise, and it is unscored"
        checkup.report.note("missing-truth-is-zero", "warning", text, lines[:2])


async def changes_inputs(checkup: Checkup) -> None:
    """Check that no call changed its inputs. Asked last, of all calls."""
    if checkup.changed:
        lines = [f"{name}{how}" for name, how in checkup.changed.items()]
        text = "changes what it is given; the next reward of the same rollout judges something else"
        checkup.report.note("mutates-input", "error", text, lines)
