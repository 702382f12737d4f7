"""Which scores does it give, and what moves them that should not?"""

from __future__ import annotations

from dataclasses import replace

from reward_kit.reward_checks.answers import FORMS, equal_forms, is_number, text_of
from reward_kit.reward_checks.checkup import Checkup, told
from reward_kit.reward_checks.grounds import LITTLE, Ground
from reward_kit.reward_checks.report import Severity
from reward_kit.reward_checks.rollouts import clearly_different

_WORKING = "First, 3 and 4 make 7, and 12 more make 19."
_MORE = "This is what was to be found, and nothing else is needed. "
_NO_TEXT_AROUND = ("the answer alone", "a code block", "a JSON block", "JSON with an answer")


async def right_and_wrong(checkup: Checkup) -> None:
    """What is right earns 1, and what is wrong less."""
    given = [ground for ground in checkup.grounds if ground.is_given and ground.gold_seen is not None]
    _tell_low(checkup, given)
    alike = [g for g in given if g.gold_score is not None and g.floor is not None and not g.tells_apart]
    unclear = [g for g in checkup.grounds if g.alike and g.is_truth_given and not g.tells_apart and g not in given]
    if alike or unclear:
        lines = [g.alike for g in unclear]
        lines += [
            f"right: {g.gold_score:.4g}, wrong: {g.floor:.4g} (ground truth {text_of(g.truth)[:40]!r})" for g in alike
        ]
        checkup.report.add("right-and-wrong-alike", "error", "a wrong answer earns as much as a right one", lines[:4])
    if not given:
        checkup.report.cannot("that a right answer scores 1", "none is given; --gold TEXT, or gold_answer in --data")
    found = [ground for ground in checkup.known if not ground.is_given and ground.form is not None]
    if found:
        checkup.report.facts["answers found to be right"] = [
            f"{ground.written(ground.truth)[:60]} → {ground.gold_score:.4g}" for ground in found
        ]
        _tell_low(checkup, found)


def _tell_low(checkup: Checkup, grounds: list[Ground]) -> None:
    low = [ground for ground in grounds if ground.gold_score is None or ground.gold_score < 1.0 - LITTLE]
    if not low:
        return
    lines = [told(f"ground truth {text_of(g.truth)[:40]!r}", g.gold_seen) for g in low if g.gold_seen is not None]
    if any(ground.is_given for ground in low):
        checkup.report.add("gold-below-one", "error", "an answer that is given as right does not score 1", lines[:4])
    elif len(low) == len(grounds):
        checkup.report.add("never-one", "warning", "the best answer that was found scores less than 1", lines[:4])


async def scores(checkup: Checkup) -> None:
    """The range of all scores that were seen, of clearly different answers too."""
    different = {}
    for index, text in enumerate(clearly_different()):
        different[text] = await checkup.see(f"different answer {index}", checkup.first.answered(text))
    for index, rollout in enumerate(checkup.rollouts):
        await checkup.see(f"rollout {index + 1} of the data", rollout)
    known = {name: seen.score for name, seen in checkup.scores.items() if seen.score is not None}
    known |= {f"right answer {i}": g.gold_score for i, g in enumerate(checkup.grounds) if g.gold_score is not None}
    known |= {f"wrong answer {i}": g.floor for i, g in enumerate(checkup.grounds) if g.floor is not None}
    if not known:
        checkup.report.add("never-scores", "error", "not one of the rollouts could be scored", _why(checkup))
        return
    low, high = min(known.values()), max(known.values())
    values = {round(score, 6) for score in known.values()}
    checkup.report.facts["scores"] = {"lowest": low, "highest": high, "different": len(values), "rollouts": len(known)}
    if low < -LITTLE or high > 1.0 + LITTLE:
        outside = [name for name, score in known.items() if not -LITTLE <= score <= 1.0 + LITTLE]
        lines = [f"{name}: {known[name]:.4g}" for name in outside[:4]]
        text = "gives scores outside [0, 1]; weights, gates and means of rewards count on that range"
        checkup.report.add("out-of-range", "error", text, lines)
    if len(values) == 1:
        _tell_constant(checkup, low, len(known))


def _tell_constant(checkup: Checkup, score: float, count: int) -> None:
    has_right = any(ground.is_given for ground in checkup.grounds)
    has_truth = any(ground.truth is not None for ground in checkup.grounds)
    severity: Severity = "error" if has_right or (has_truth and score > LITTLE) else "warning"
    hint = "" if has_right else "; a right answer may differ: --gold TEXT"
    text = f"gives {score:.4g} to all {count} rollouts, which differ clearly: there is nothing to learn from it{hint}"
    checkup.report.add("constant", severity, text)


def _why(checkup: Checkup) -> list[str]:
    reasons = [seen.text for seen in checkup.scores.values() if seen.score is None]
    return list(dict.fromkeys(reasons))[:3]


async def equal_answers(checkup: Checkup) -> None:
    """Other ways to write the right answer, and the same answer with other white space."""
    if not checkup.known:
        why = "no answer is known to earn more than a wrong one; --gold TEXT, --ground-truth JSON or --data"
        checkup.report.cannot("how it takes white space, case and other ways to write an answer", why)
        return
    moved: dict[str, str] = {}
    for ground in checkup.known:
        await _white_space(checkup, ground)
        if ground.form is None:
            continue
        for name, text in equal_forms(ground.truth):
            seen = await checkup.see(f"right answer {name}", ground.answered(ground.form.write(text)))
            if seen.score is None or seen.score < (ground.gold_score or 0.0) - LITTLE:
                moved.setdefault(name, told(name, seen, ground.form.write(text)))
        await _order(checkup, ground)
    if moved:
        # Who takes only numbers out of texts means their values; who compares texts may mean just those.
        numbers = [ground for ground in checkup.known if is_number(ground.truth)]
        reads = any(ground.form != FORMS[0] or not isinstance(ground.truth, str) for ground in numbers)
        is_for_numbers = reads and len(numbers) == len(checkup.known)
        severity: Severity = "warning" if is_for_numbers and "with thousands separators" in moved else "info"
        text = f"a right answer loses where it is written otherwise: {', '.join(moved)}"
        checkup.report.add("refuses-equal-form", severity, text, list(moved.values())[:4])


async def text_around(checkup: Checkup) -> None:
    """A right answer after its working, and before more text, is as right."""
    lost: dict[str, str] = {}
    for ground in checkup.known:
        if ground.truth is None or ground.form is None or ground.form.name in _NO_TEXT_AROUND:
            continue
        right = ground.written(ground.truth)
        for name, text in (
            ("after its working", f"{_WORKING}\n{right}"),
            ("before more text", f"{right}\n{_MORE * 12}"),
        ):
            seen = await checkup.see(f"right answer {name}", ground.answered(text))
            if seen.score is None or seen.score < (ground.gold_score or 0.0) - LITTLE:
                lost.setdefault(name, told(f"{name}:", seen, text))
    if lost:
        text = f"a right answer loses where it stands {' or '.join(lost)}"
        checkup.report.add("text-around-matters", "warning", text, list(lost.values()))


async def _white_space(checkup: Checkup, ground: Ground) -> None:
    if ground.gold is None or not ground.gold.messages:
        return
    last = ground.gold.messages[-1]
    if not isinstance(last.content, str) or last.role != "assistant":
        return
    for name, text in (("a line break after", f"{last.content}\n"), ("spaces around", f"  {last.content}  ")):
        messages = (*ground.gold.messages[:-1], last.model_copy(update={"content": text}))
        seen = await checkup.see(f"right answer with {name}", replace(ground.gold, messages=messages))
        if seen.score is None or abs(seen.score - (ground.gold_score or 0.0)) > LITTLE:
            line = told(f"with {name} (was {ground.gold_score:.4g})", seen, text)
            if not checkup.report.has("sensitive-to-whitespace"):
                text = "white space around a right answer moves its score, and models write some"
                checkup.report.add("sensitive-to-whitespace", "warning", text, [line])


async def _order(checkup: Checkup, ground: Ground) -> None:
    if not isinstance(ground.truth, list) or len(ground.truth) < 2 or ground.form is None:
        return
    seen = await checkup.see("right items in another order", ground.answered(ground.written(ground.truth[::-1])))
    takes = seen.score is not None and seen.score >= (ground.gold_score or 0.0) - LITTLE
    checkup.report.facts["order of a list"] = "does not count" if takes else "counts"
