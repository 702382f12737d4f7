"""Does the same rollout always get the same score? In one worker, in fresh ones, and whatever was scored before."""

from __future__ import annotations

from collections.abc import Sequence

from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_checks.answers import text_of
from reward_kit.reward_checks.bench import Seen
from reward_kit.reward_checks.checkup import Checkup
from reward_kit.reward_checks.grounds import LITTLE
from reward_kit.reward_checks.report import shown
from reward_kit.reward_checks.rollouts import clearly_different

_REPEATS = 3
_FRESH_EVERY = 3
_LATE_CALLS = 100
_CHANCE = "the same rollout gets different scores{why}; a group's advantages become noise"
_Scores = list[float | None]


async def steady(checkup: Checkup) -> None:
    """Score the same rollouts again and again, forwards and backwards, and in fresh workers."""
    rollouts = _rollouts(checkup)
    again = [await _repeated(checkup, rollout) for rollout in rollouts]
    backwards = [await checkup.bench.see(rollout) for rollout in reversed(rollouts)][::-1]
    here = [[*_scores(seen), last.score] for seen, last in zip(again, backwards, strict=True)]
    checkup.early = [(rollout, seen[0].score) for rollout, seen in zip(rollouts, again, strict=True)]
    if not checkup.bench.is_confined:
        why = "it runs in this process, which has no fresh worker; --sandbox warm has"
        checkup.report.cannot("what it keeps from call to call, against a fresh worker", why)
        if moved := [index for index, scores in enumerate(here) if _differ(scores)]:
            lines = [_line(rollouts[index], here[index]) for index in moved[:3]]
            checkup.report.add("nondeterministic", "error", _CHANCE.format(why=_why(checkup)), lines)
        return
    # A fresh worker costs fifty calls, so that some rollouts stand for all of them where nothing moves.
    some = {i: (await checkup.bench.see_fresh(rollouts[i])).score for i in range(0, len(rollouts), _FRESH_EVERY)}
    moved = [i for i, scores in enumerate(here) if _differ([*scores, *([some[i]] if i in some else [])])]
    if moved or checkup.source.has_sets:
        fresh = [some[i] if i in some else (await checkup.bench.see_fresh(r)).score for i, r in enumerate(rollouts)]
        _judge(checkup, rollouts, here, fresh, await _elsewhere(checkup, rollouts))


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
        checkup.report.add("hidden-state", "error", text, lines[:3])


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


async def _repeated(checkup: Checkup, rollout: ScoringRequest) -> list[Seen]:
    return [await checkup.bench.see(rollout) for _ in range(_REPEATS)]


async def _elsewhere(checkup: Checkup, rollouts: Sequence[ScoringRequest]) -> list[list[_Scores]]:
    """The scores of the same calls in the same order, in two further interpreters."""
    found = []
    for worker in (1, 2):
        found.append([_scores([await checkup.bench.see(r, worker=worker) for _ in range(_REPEATS)]) for r in rollouts])
    return found


def _judge(
    checkup: Checkup,
    rollouts: Sequence[ScoringRequest],
    here: Sequence[_Scores],
    fresh: _Scores,
    elsewhere: Sequence[Sequence[_Scores]],
) -> None:
    """Chance, memory or the order of a set: told apart by what the same calls give in two other interpreters."""
    one, other = elsewhere
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
        checkup.report.add("hidden-state", "error", text, lines)
    elif is_steady_there and not any(_differ(scores) for scores in here):
        text = (
            "the score differs between interpreters and not within one: it depends on the order of a set or on hash(); "
            "sort, or use hashlib"
        )
        checkup.report.add("depends-on-hash-seed", "error", text, lines)
    else:
        checkup.report.add("nondeterministic", "error", _CHANCE.format(why=_why(checkup)), lines)


def _why(checkup: Checkup) -> str:
    return f" (its file uses {', '.join(checkup.source.chance)})" if checkup.source.chance else ""


def _scores(seen: Sequence[Seen]) -> _Scores:
    return [one.score for one in seen]


def _differ(scores: Sequence[float | None]) -> bool:
    """Not all alike; scored beside unscored is different too."""
    known = [score for score in scores if score is not None]
    return 0 < len(known) < len(scores) or bool(known and max(known) - min(known) > LITTLE)


def _line(rollout: ScoringRequest, here: _Scores, fresh: float | None = None, *elsewhere: _Scores) -> str:
    text = shown(rollout.messages[-1].text, 60) if rollout.messages else ""
    parts = [f'"{text}": {_words(here)}']
    if elsewhere:
        parts += [f"in a fresh worker {_words([fresh])}", *(f"in another {_words(scores)}" for scores in elsewhere)]
    return "; ".join(parts)


def _words(scores: _Scores) -> str:
    return ", ".join("unscored" if score is None else f"{score:.4g}" for score in scores)
