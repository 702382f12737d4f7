"""Does it stand odd rollouts? Those that models bring about, and those that only a fault does."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from reward_kit.reward_checks.bench import Seen
from reward_kit.reward_checks.checkup import Checkup, told
from reward_kit.reward_checks.grounds import LITTLE, Ground
from reward_kit.reward_checks.report import Severity
from reward_kit.reward_checks.rollouts import long_texts, odd_histories, odd_texts, with_messages

_ERROR_WORDS = re.compile(
    r"\b[A-Z]\w*(Error|Exception)\b|(?i:\b(error|exception)\s*:|an (error|exception)|traceback|NoneType|errno"
    r"|list index out of range|not subscriptable|has no attribute|invalid literal|timed out)"
)
_SLOW_S = 1.0


async def odd(checkup: Checkup) -> None:
    """Odd histories and odd answers: none may raise, since a model could then escape a bad score."""
    broken: dict[str, list[tuple[str, Seen]]] = defaultdict(list)
    for history in odd_histories(checkup.first.blank.messages):
        seen = await checkup.see(history.name, with_messages(checkup.first.blank, history.messages))
        _sort(broken, history.name, seen, "raises" if history.is_models else "raises-on-faults")
        _note_zero(checkup, history.name, seen)
    for name, text in odd_texts():
        for wrapped in dict.fromkeys((text, checkup.first.form.write(text) if checkup.first.form else text)):
            seen = await checkup.see(name, checkup.first.answered(wrapped))
            _sort(broken, name, seen, "raises")
            _note_zero(checkup, name, seen)
    for name, text in long_texts():
        seen = await checkup.see(name, checkup.first.answered(text))
        _sort(broken, name, seen, "raises")
        _note_slow(checkup, name, seen)
    _tell_broken(checkup, broken)
    _tell_swallowed(checkup)


def _sort(broken: dict[str, list[tuple[str, Seen]]], name: str, seen: Seen, otherwise: str) -> None:
    """Keep a rollout that could not be scored, by the kind of mistake."""
    if seen.failure is None:
        return
    message = seen.failure.message
    if seen.failure.failure_class == "timeout":
        broken["hangs"].append((name, seen))
    elif seen.failure.where == "AlignmentError":
        broken["misaligned-steps"].append((name, seen))
    elif "result_kb" in message:
        broken["large-result"].append((name, seen))
    elif "finite" in message:
        broken["not-finite"].append((name, seen))
    elif seen.failure.failure_class == "invalid_result" and "declared no valid score" in message:
        broken["unscored"].append((name, seen))
    elif seen.failure.failure_class == "invalid_result":
        broken["invalid-result"].append((name, seen))
    else:
        broken[otherwise].append((name, seen))


_BROKEN: dict[str, tuple[Severity, str]] = {
    "raises": (
        "error",
        "raises on {n} that a model brings about; what is unscored is out of reach of a bad score",
    ),
    "raises-on-faults": ("warning", "raises on {n} that only a fault brings about"),
    "hangs": ("error", "does not come back in time on {n}"),
    "misaligned-steps": (
        "error",
        "gives step_outputs that fit no step on {n}; index steps by assistant_turns",
    ),
    "not-finite": ("error", "makes a score that is no finite number on {n}"),
    "invalid-result": ("error", "returns no valid result on {n}"),
    "large-result": (
        "info",
        "its result outgrows sandbox.limits.result_kb on {n}; cut what the reason repeats of an answer",
    ),
    "unscored": ("info", "declares {n} unscored"),
}


def _tell_broken(checkup: Checkup, broken: dict[str, list[tuple[str, Seen]]]) -> None:
    for code, (severity, text) in _BROKEN.items():
        if cases := broken.get(code):
            lines = list(dict.fromkeys(told(name, seen) for name, seen in cases))
            count = len({name for name, _ in cases})
            checkup.report.add(code, severity, text.format(n=f"{count} rollout{'s' if count > 1 else ''}"), lines[:6])


def _note_zero(checkup: Checkup, name: str, seen: Seen) -> None:
    """A zero whose reason tells of an error was no judgement."""
    reason = seen.result.reason if seen.result is not None and seen.score is not None else None
    if reason and seen.score is not None and seen.score <= LITTLE and _ERROR_WORDS.search(reason):
        checkup.report.facts.setdefault("zeros that tell of an error", []).append(f"{name}: {reason[:100]}")


def _note_slow(checkup: Checkup, name: str, seen: Seen) -> None:
    if seen.cpu_s > _SLOW_S:
        text = f"takes {seen.cpu_s:.1f} s on {name}; a model that rambles holds up the batch"
        checkup.report.add("slow", "warning", text)


def _tell_swallowed(checkup: Checkup) -> None:
    zeros = checkup.report.facts.pop("zeros that tell of an error", [])
    lines = [f"line {line}: a score is returned where any exception is caught" for line in checkup.source.zeros]
    lines += list(dict.fromkeys(zeros))
    if lines:
        text = (
            "an exception becomes a score: what could not be judged counts as wrong; let it raise, or return "
            "is_score_valid=False, and the rollout is unscored"
        )
        checkup.report.add("swallowed-exception", "warning", text, lines[:6])


async def missing_truth(checkup: Checkup) -> None:
    """A sample without a ground truth is not wrong, it is unscored; and none that cannot be read is right."""
    ground = checkup.first
    if checkup.bench.parameters is not None and not checkup.bench.takes("ground_truth"):
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
    await _tell_unread(checkup, ground, answers)
    seen = {name: await _without_truth(checkup, ground, text) for name, text in answers.items()}
    scored = {name: one for name, one in seen.items() if one.score is not None}
    if not scored:
        return
    lines = [told(f"ground_truth None, answer: {name}", one, answers[name]) for name, one in scored.items()]
    if any((one.score or 0.0) > (ground.floor or 0.0) + LITTLE for one in scored.values()):
        text = "a rollout without a ground truth earns a reward: nothing is compared with nothing"
        checkup.report.add("missing-truth-earns", "error", text, lines)
    else:
        text = "a rollout without a ground truth scores 0, as a wrong answer does; raise, and it is unscored"
        checkup.report.add("missing-truth-is-zero", "warning", text, lines[:2])


async def _without_truth(checkup: Checkup, ground: Ground, text: str) -> Seen:
    blank = replace(ground.answered(text), ground_truth=None)
    return await checkup.bench.see(blank)


async def _tell_unread(checkup: Checkup, ground: Ground, answers: dict[str, str]) -> None:
    """Ground truths that no parser reads: nothing is right then."""
    if not isinstance(ground.truth, str):
        return
    lines = []
    for truth in ("", "\\frac{{", "n/a"):
        for text in (answers["wrong"], answers["no answer"]):
            seen = await checkup.bench.see(replace(ground.answered(text), ground_truth=truth))
            if (seen.score or 0.0) > (ground.floor or 0.0) + LITTLE:
                lines.append(told(f"ground_truth {truth!r}", seen, text))
    if lines:
        text = "a ground truth that cannot be read makes any answer right; leave such a rollout unscored"
        checkup.report.add("unreadable-truth-earns", "error", text, lines[:4])


async def changes_inputs(checkup: Checkup) -> None:
    """What it was given is as it was. Asked last, of all calls."""
    if checkup.changed:
        lines = [f"{name}{how}" for name, how in checkup.changed.items()]
        text = "changes what it is given; the next reward of the same rollout judges something else"
        checkup.report.add("mutates-input", "error", text, lines)
