"""The segments and action spans of an episode's tokens against the contract: what was seen and sampled concatenates."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, ActionSpan, EpisodeTokens
from reward_kit.tokens.checking.findings import Found
from reward_kit.tokens.checking.tokens import Action, CheckedTokens


def is_in_segments(found: Found, tokens: EpisodeTokens, steps: int | None) -> bool:
    """Whether segments and spans lie as they must; what is wrong is added to `found`.

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
    _check_bounds(found, tokens)
    if len(found.findings) == before:
        _check_spans(found, tokens, steps)
    return len(found.findings) == before


def _bounds(tokens: EpisodeTokens) -> list[tuple[int, int]]:
    starts = [segment.start for segment in tokens.segments]
    return list(zip(starts, [*starts[1:], len(tokens.ids)], strict=False))


def _check_bounds(found: Found, tokens: EpisodeTokens) -> None:
    """Segments follow one another from the first id to the last, and each says why it began."""
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
    """A context that was rewritten although nobody said why: most often the history was tokenised again."""
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
        owner = _owner(tokens, bounds[number - 1][0] + place)
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


def _owner(tokens: EpisodeTokens, place: int) -> int | None:
    """The step that sampled the token at `place`, None for an observation's."""
    return next((span.step for span in tokens.spans if span.start <= place < span.stop), None)


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
            "nobody recorded which weights sampled it, so how far off policy it is cannot be told; return "
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
