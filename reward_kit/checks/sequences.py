"""The tokens of one sequence, and the segments of an episode, against their contract.

Ids, mask and log-probabilities lie on each other, and what was seen and sampled concatenates. A `CheckedTokens` is one
sequence that a model saw: a segment of an episode, a row of a batch, a row of TRL's rollout dict,
a branch of a verifiers trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.checks.findings import Found
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, ActionSpan, EpisodeTokens

Array = npt.NDArray[Any]
LogprobsOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""(T,) ids -> (T,) log p(ids[t] | ids[:t]) under the weights that sampled; the first entry is not looked at."""

LARGEST_ID = 2**31 - 1
ROUNDING = 1e-4
"""Most by which a log-probability may lie above 0: float32 and bfloat16 soft-maxes end a little above it."""
TOLERANCE = 1e-2
"""Most by which a recomputed log-probability may differ from the recorded one."""
_FARTHEST_SHIFT = 8


class Action(NamedTuple):
    """Position of the tokens of one action in a sequence."""

    step: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CheckedTokens:
    """One sequence that a model saw.

    Attributes:
        ids: (T,) everything it saw and sampled.
        action_mask: (T,) 1 where the policy sampled.
        logprobs: (T,) 0.0 where `action_mask` is 0, NaN where unknown; None if they were not recorded.
        actions: in order; () where the mask alone tells.
        first: the place of `ids[0]` in the ids that messages count in.
    """

    ids: Array
    action_mask: Array
    logprobs: Array | None
    actions: tuple[Action, ...] = ()
    first: int = 0

    def spans(self) -> tuple[Action, ...]:
        """Its actions; where they are not known, the runs of the mask, counted from 0."""
        return self.actions or tuple(Action(n, a, b) for n, (a, b) in enumerate(runs(self.action_mask)))

    def step_at(self, token: int) -> int | None:
        """The action that a token belongs to, None off the actions, and where the actions are not known."""
        return next((action.step for action in self.actions if action.start <= token < action.stop), None)


def runs(mask: Array) -> Iterator[tuple[int, int]]:
    """`start, stop` of each stretch of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (mask == 1).astype(np.int8), [0]])))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def check_tokens(
    found: Found, row: CheckedTokens, *, logprobs_of: LogprobsOf | None = None, tolerance: float = TOLERANCE
) -> None:
    """Check one sequence; what follows from a fault that was found is not reported again."""
    if not _is_well_formed(found, row):
        return
    if row.logprobs is None:
        return
    before = len(found.findings)
    _check_off_actions(found, row, row.logprobs)
    if len(found.findings) > before:
        return
    _check_values(found, row, row.logprobs)
    if logprobs_of is not None and len(found.findings) == before:
        _check_recomputed(found, row, row.logprobs, logprobs_of, tolerance)


def _is_well_formed(found: Found, row: CheckedTokens) -> bool:
    """Return whether lengths, ids and mask are sound enough for the rest to make sense."""
    before, size = len(found.findings), len(row.ids)
    for name, values in (("action mask", row.action_mask), ("logprobs", row.logprobs)):
        if values is not None and len(values) != size:
            found.error(
                "length-mismatch",
                f"{size} token ids but {len(values)} entries of {name}; they are written by different code, or one of "
                "them leaves the prompt out",
            )
    wrong = np.flatnonzero((row.ids < 0) | (row.ids > LARGEST_ID))
    if len(wrong):
        at = int(wrong[0])
        found.error(
            "token-id",
            f"{row.ids[at]} is not a token id ({len(wrong)} such); padding, or a label of -100, was taken for a token",
            step=row.step_at(at),
            token=row.first + at,
        )
    strange = np.flatnonzero((row.action_mask != 0) & (row.action_mask != 1))
    if len(strange):
        at = int(strange[0])
        found.error(
            "mask-values",
            f"the action mask is {row.action_mask[at]} ({len(strange)} such); it is 1 where the policy sampled and "
            "else 0",
            token=row.first + at,
        )
    return len(found.findings) == before


def _check_off_actions(found: Found, row: CheckedTokens, logprobs: Array) -> None:
    """Check that the log-probability is 0.0 off the actions, where nothing was sampled."""
    mask = row.action_mask == 1
    known = logprobs != 0
    stray = np.flatnonzero(known & ~mask)
    if not len(stray):
        return
    at = int(stray[0])
    if not (known & mask).any() and mask.any():
        found.error(
            "inverted-mask",
            "every log-probability stands where the mask is 0 and none where it is 1; the mask is the other way round: "
            "here 1 means that the policy sampled the token",
            token=row.first + at,
        )
    elif distance := displacement(mask, known):
        found.error(
            "shifted-mask",
            f"mask and log-probabilities lie {abs(distance)} apart: the log-probabilities stand {abs(distance)} "
            f"{'after' if distance > 0 else 'before'} the tokens that the mask calls actions; one of them was made for "
            "next-token targets, or lacks a begin-of-sequence token",
            step=row.actions[0].step if row.actions else None,
            token=row.first + at,
        )
    else:
        found.error(
            "logprob-off-action",
            f"the log-probability is {logprobs[at]:.4g} where the policy sampled nothing ({len(stray)} such); 0.0 "
            "stands there: the prompt was scored too, or an action is missing in the mask",
            token=row.first + at,
        )


def displacement(mask: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_]) -> int:
    """By how many places `known` is `mask` moved to the right, 0 where it is not; the edges do not count."""
    # A track that moved leaves a gap in the mask; without one, something was added and nothing moved.
    if not (mask & ~known).any():
        return 0
    for size in range(1, min(_FARTHEST_SHIFT, len(mask) - 1) + 1):
        for distance in (size, -size):
            inner = slice(size, len(mask) - size)
            moved = np.roll(mask, distance)[inner]
            if moved.any() and np.array_equal(moved, known[inner]):
                return distance
    return 0


def _check_values(found: Found, row: CheckedTokens, logprobs: Array) -> None:
    """On the actions: not above 0, finite, and known for all tokens of an action or for none."""
    for step, start, stop in row.spans():
        part = logprobs[start:stop]
        unknown = np.isnan(part)
        step_or_none = step if row.actions else None
        if infinite := np.flatnonzero(np.isinf(part)).tolist():
            found.error(
                "logprob-not-finite",
                f"the log-probability is {part[infinite[0]]}; a token with no chance cannot be sampled: the "
                "distribution was masked or cut (top-k, grammar) after sampling",
                step=step_or_none,
                token=row.first + start + infinite[0],
            )
        elif unknown.any() and not unknown.all():
            found.error(
                "logprob-not-finite",
                f"{int(unknown.sum())} of the action's {len(part)} log-probabilities are NaN; an action's are all "
                "known or all unknown",
                step=step_or_none,
                token=row.first + start + int(np.argmax(unknown)),
            )
        elif (part > ROUNDING).any():
            at = int(np.argmax(part > ROUNDING))
            found.error(
                "logprob-positive",
                f"the log-probability is {part[at]:.4g}; above 0 there is none: a negative log-likelihood, a logit or "
                "a probability was recorded",
                step=step_or_none,
                token=row.first + start + at,
            )


def _check_recomputed(
    found: Found, row: CheckedTokens, logprobs: Array, logprobs_of: LogprobsOf, tolerance: float
) -> None:
    """The recorded log-probabilities against the model's own."""
    own = np.asarray(logprobs_of(row.ids.astype(np.int64)), dtype=np.float64)
    if own.shape != row.ids.shape:
        found.error("length-mismatch", f"logprobs_of gave shape {own.shape} for {len(row.ids)} ids; it gives one each")
        return
    places = np.flatnonzero((row.action_mask == 1) & ~np.isnan(logprobs))
    places = places[places > 0]
    recorded, expected = logprobs[places], own[places]
    differs = np.abs(recorded - expected) > tolerance
    if not differs.any():
        return
    worst = int(np.argmax(differs))
    at = int(places[worst])
    kind, cause = _cause(recorded, expected, tolerance)
    found.error(
        kind,
        f"the recorded log-probability is {recorded[worst]:.4f} and the model's own {expected[worst]:.4f} "
        f"({int(differs.sum())} of {len(places)} differ by more than {tolerance:g}); {cause}",
        step=row.step_at(at),
        token=row.first + at,
    )


def _cause(recorded: Array, expected: Array, tolerance: float) -> tuple[str, str]:
    """Return the kind and the cause of log-probabilities that are not the model's own."""
    for distance in (1, -1, 2, -2):
        kept = slice(max(distance, 0), len(recorded) + min(distance, 0))
        moved = np.roll(expected, distance)[kept]
        if len(moved) > 1 and np.all(np.abs(recorded[kept] - moved) <= tolerance):
            side = "before" if distance > 0 else "after"
            return "logprob-of-other-token", f"they are those of the token {abs(distance)} {side}: the track is shifted"
    if np.all(np.abs(np.sort(recorded) - np.sort(expected)) <= tolerance):
        return "logprob-of-other-token", "they are those of other tokens of the sequence: the track is permuted"
    return (
        "logprob-differs",
        "they come from other weights, or from another distribution than was sampled from (temperature, top-p, a "
        "system prompt that is missing)",
    )


def is_in_segments(found: Found, tokens: EpisodeTokens, steps: int | None) -> bool:
    """Return whether segments and spans lie as they must; what is wrong is added to `found`.

    Args:
        found: gets the findings.
        tokens: of the episode.
        steps: how many steps the episode has; None where it is a part of one.
    """
    before = len(found.findings)
    if len(tokens.logprobs) != len(tokens.ids):
        found.error(
            "length-mismatch",
            f"{len(tokens.ids)} token ids but {len(tokens.logprobs)} log-probabilities; 0.0 stands off the actions",
        )
    # Segments follow one another from the first id to the last, and each has a reason to begin.
    if tokens.ids and (not tokens.segments or tokens.segments[0].start != 0):
        found.error("segment", "the first segment does not begin at token 0; ids were cut off at the front", token=0)
    for number, (segment, (start, stop)) in enumerate(zip(tokens.segments, _bounds(tokens), strict=True)):
        if not 0 <= segment.prompt_length <= stop - start:
            found.error(
                "segment",
                f"segment {number} has {stop - start} tokens and a prompt of {segment.prompt_length}; segments were "
                "joined or cut without their lengths",
                token=start,
            )
        if not segment.reason:
            found.error("segment", f"segment {number} does not say why the context was rewritten", token=start)
    if len(found.findings) == before:
        _check_spans(found, tokens, steps)
    return len(found.findings) == before


def _bounds(tokens: EpisodeTokens) -> list[tuple[int, int]]:
    starts = [segment.start for segment in tokens.segments]
    return list(zip(starts, [*starts[1:], len(tokens.ids)], strict=False))


def _check_spans(found: Found, tokens: EpisodeTokens, steps: int | None) -> None:
    """Actions ascend, lie inside their segments, and fill them: a prompt before the first, nothing after the last."""
    per_segment: dict[int, list[ActionSpan]] = {number: [] for number in range(len(tokens.segments))}
    for span in tokens.spans:
        if span.segment not in per_segment:
            found.error("action-span", f"the action is in segment {span.segment}, which is not there", step=span.step)
            return
        per_segment[span.segment].append(span)
    if moved := _moved_by(tokens, per_segment):
        found.error(
            "shifted-mask",
            f"every action lies {abs(moved)} {'after' if moved > 0 else 'before'} what was sampled: the mask was "
            "made for next-token targets, or a begin-of-sequence token is counted in one place only",
            step=tokens.spans[0].step,
            token=tokens.spans[0].start,
        )
        return
    for number, (start, stop) in enumerate(_bounds(tokens)):
        _check_segment(found, tokens, number, start, stop, per_segment[number])
    for one, two in pairwise(tokens.spans):
        if two.step <= one.step or two.start < one.stop:
            found.error("action-span", f"the action overlaps or precedes that of step {one.step}", step=two.step)
    if steps is not None and tokens.spans and not 0 <= tokens.spans[-1].step < steps:
        found.error(
            "action-span",
            f"there are tokens of this step, and the episode has {steps} steps; an action was sampled and never taken",
            step=tokens.spans[-1].step,
        )


def _moved_by(tokens: EpisodeTokens, per_segment: dict[int, list[ActionSpan]]) -> int:
    """By how many tokens the spans of every segment lie beside where they belong, 0 where they do not all do so."""
    distances = set()
    for number, (_, stop) in enumerate(_bounds(tokens)):
        spans, segment = per_segment[number], tokens.segments[number]
        if not spans:
            return 0
        distances |= {spans[0].start - segment.start - segment.prompt_length, spans[-1].stop - stop}
    return distances.pop() if len(distances) == 1 else 0


def _check_segment(
    found: Found, tokens: EpisodeTokens, number: int, start: int, stop: int, spans: list[ActionSpan]
) -> None:
    if not spans:
        found.error("segment", f"segment {number} has no action, so there is nothing to learn from it", token=start)
        return
    first = start + tokens.segments[number].prompt_length
    if outside := [span for span in spans if not first <= span.start <= span.stop <= stop]:
        span = outside[0]
        found.error(
            "action-span",
            f"the action is at {span.start}:{span.stop}, outside the completion of its segment, {first}:{stop}",
            step=span.step,
            token=span.start,
        )
    elif spans[0].start != first:
        found.error(
            "action-span",
            f"the prompt ends at {first} and the first action begins at {spans[0].start}; it is missing in the mask",
            step=spans[0].step,
            token=first,
        )
    elif spans[-1].stop != stop:
        found.error(
            "action-span",
            f"{stop - spans[-1].stop} tokens follow the last action of segment {number}; a sequence ends with what was "
            "sampled: an action is missing in the mask",
            step=spans[-1].step,
            token=spans[-1].stop,
        )


def check_prefixes(found: Found, tokens: EpisodeTokens) -> None:
    """Find contexts that were rewritten without a reason: most often the history was tokenised again."""
    ids = np.array(tokens.ids, dtype=np.int64)
    bounds = _bounds(tokens)
    for number in range(1, len(tokens.segments)):
        segment = tokens.segments[number]
        if segment.reason != REWRITTEN:
            continue
        seen = ids[slice(*bounds[number - 1])]
        prompt = ids[segment.start : segment.start + segment.prompt_length]
        shared = min(len(seen), len(prompt))
        differs = np.flatnonzero(seen[:shared] != prompt[:shared])
        place = int(differs[0]) if len(differs) else shared
        at = bounds[number - 1][0] + place
        owner = next((span.step for span in tokens.spans if span.start <= at < span.stop), None)
        next_step = next((span.step for span in tokens.spans if span.segment == number), None)
        if place == len(prompt):
            what = f"the prompt ends after {place} of the {len(seen)} tokens that were there before"
        else:
            told = "which the observation gave" if owner is None else f"which step {owner} sampled"
            what = f"the prompt has {prompt[place]} where {seen[place]} stood, {told}"
        report = found.warn if owner is None else found.error
        report(
            "drifted-prefix",
            f"{what}; the history was tokenised again from its text (keep the ids), or its template rewrites it (say "
            "so with segment_reason)",
            step=next_step,
            token=segment.start + place,
        )


def check_versions(found: Found, spans: list[ActionSpan], current_version: int | None, max_staleness: int) -> None:
    """Weights only get newer while an episode goes on, and the trainer knows them.

    Args:
        found: gets the findings.
        spans: the actions.
        current_version: the weights in training; None where they are not known.
        max_staleness: how many versions behind them an action may have been sampled.
    """
    known = [span for span in spans if span.policy_version != UNKNOWN_VERSION]
    unknown = next((span for span in spans if span.policy_version == UNKNOWN_VERSION), None)
    if unknown is not None and (known or current_version is not None):
        found.error(
            "unknown-version",
            "the weights that sampled it were not recorded, so how far off policy it is is unknown; return "
            "policy_version with every action",
            step=unknown.step,
        )
    for one, two in pairwise(known):
        if two.policy_version < one.policy_version:
            found.error(
                "stale-version",
                f"sampled by version {two.policy_version} after version {one.policy_version}; an old engine was asked, "
                "or steps of two episodes were mixed",
                step=two.step,
            )
            return
    if current_version is None:
        return
    for span in known:
        if not current_version - max_staleness <= span.policy_version <= current_version:
            found.error(
                "stale-version",
                f"sampled by version {span.policy_version} and the trainer has version {current_version} (at most "
                f"{max_staleness} behind); drop it, or correct for it with importance weights",
                step=span.step,
            )
            return


def rows_of(tokens: EpisodeTokens) -> Iterator[CheckedTokens]:
    """One sequence for each segment."""
    ids, logprobs = np.array(tokens.ids, dtype=np.int64), np.array(tokens.logprobs, dtype=np.float64)
    mask = np.zeros(len(ids), dtype=np.int8)
    for span in tokens.spans:
        mask[span.start : span.stop] = 1
    for number, (start, stop) in enumerate(_bounds(tokens)):
        actions = tuple(
            Action(span.step, span.start - start, span.stop - start) for span in tokens.spans if span.segment == number
        )
        part = slice(start, stop)
        yield CheckedTokens(ids[part], mask[part], logprobs[part], actions, start)
