"""The tokens of one episode, exactly as the model read and sampled them. Text is never tokenized again.

Each turn consists of the whole prompt that the model read and the tokens that it sampled. If the prompt extends the
stored sequence, only the new part is stored, so the stored ids `p a1 o1 a2 o2 … aN` concatenate to the model's input.
Otherwise the context was rewritten (stripped reasoning, truncation): a new segment begins, and the reason for the
rewrite is recorded. Each segment is a training row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.episodes.allowed_ids import Allowed, AllowedTrack, check_allowed_ids
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.errors import EpisodeError

FIRST_SEGMENT = "start"
REWRITTEN = "context rewritten"
UNKNOWN_VERSION = -1


class ActionSpan(NamedTuple):
    """The position of one action's tokens: `start:stop` in the flat ids, within segment `segment`."""

    step: int
    segment: int
    start: int
    stop: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous sequence of tokens: its start in the flat ids, and the reason why the segment began."""

    start: int
    prompt_length: int
    reason: str


class Turn(NamedTuple):
    """The tokens of one action.

    Attributes:
        prompt_ids: (P,) the whole prompt that the model read.
        token_ids: (N,) the sampled ids.
        logprobs: (N,) log-probabilities under the sampling distribution; None if unknown.
        policy_version: the version of the weights that sampled the tokens; None if unknown.
        segment_reason: the reason why the context was rewritten before this turn; None if it was not rewritten.
        allowed_ids: (N,) the ids that were allowed for each token, where None means all ids; None if no token was
            restricted.
    """

    prompt_ids: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64] | None
    policy_version: int | None
    segment_reason: str | None
    allowed_ids: list[list[int] | None] | None = None


class TokenRow(NamedTuple):
    """A segment as a training row.

    Attributes:
        prompt_ids: (P,) the tokens before the first action.
        completion_ids: (C,) `a1 o1 a2 o2 … aN`.
        action_mask: (C,) 1 for sampled tokens, otherwise 0.
        logprobs: (C,) log-probabilities under the sampling distribution; 0.0 if `action_mask` is 0.
        steps: (C,) the step of each action token; -1 if `action_mask` is 0.
        policy_versions: (C,) the version of the weights that sampled each token; -1 if unknown or `action_mask` is 0.
    """

    prompt_ids: npt.NDArray[np.int64]
    completion_ids: npt.NDArray[np.int64]
    action_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]
    policy_versions: npt.NDArray[np.int64]


class EpisodeTokens:
    """All tokens of one episode, in segments."""

    __slots__ = ("allowed", "ids", "logprobs", "segments", "spans")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.logprobs: array[float] = array("d")
        self.segments: list[Segment] = []
        self.spans: list[ActionSpan] = []
        self.allowed = AllowedTrack()

    def __len__(self) -> int:
        return len(self.ids)

    def __bool__(self) -> bool:
        """Return True if any action is recorded, even one without tokens."""
        return bool(self.ids or self.segments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpisodeTokens) and self.get_state() == other.get_state()

    __hash__ = None  # type: ignore[assignment]

    def add_turn(
        self,
        step: int,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        policy_version: int = UNKNOWN_VERSION,
        reason: str = REWRITTEN,
        allowed_ids: Sequence[Allowed] | None = None,
    ) -> None:
        """Record one action.

        Args:
            step: the action's index in its episode.
            prompt_ids: (P,) the whole prompt that the model read.
            token_ids: (N,) the sampled ids.
            logprobs: (N,) log-probabilities under the sampling distribution; if they are unknown, pass None, and NaN is
                stored.
            policy_version: the version of the weights that sampled the tokens.
            reason: the reason why the context was rewritten. It is used only if `prompt_ids` does not extend the stored
                ids.
            allowed_ids: (N,) the ids that were allowed for each token, where None means all ids; None if no token was
                restricted.

        Raises:
            EpisodeError: the numbers of ids and log-probabilities differ, the steps are not in ascending order, or a
                sampled token was not allowed.
        """
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise EpisodeError(f"step {step} has {len(token_ids)} token ids but {len(logprobs)} log-probabilities")
        if self.spans and step <= self.spans[-1].step:
            raise EpisodeError(f"step {step} must be greater than the last step {self.spans[-1].step}")
        # Convert the arguments first so that an invalid value changes nothing.
        prompt, sampled = array("i", prompt_ids), array("i", token_ids)
        known = array("d", logprobs if logprobs is not None else [float("nan")] * len(sampled))
        sets = check_allowed_ids(allowed_ids, sampled, step) if allowed_ids is not None else None
        stored = self.ids[self.segments[-1].start :] if self.segments else None
        if stored is not None and prompt[: len(stored)] == stored:
            if not (self.spans and self.spans[-1].segment == len(self.segments) - 1):
                # Continue a cut chunk: everything before its first action is prompt.
                self.segments[-1] = replace(self.segments[-1], prompt_length=len(prompt))
            new = prompt[len(stored) :]
        else:
            self.segments.append(Segment(len(self.ids), len(prompt), reason if self.segments else FIRST_SEGMENT))
            new = prompt
        self.ids.extend(new)
        self.logprobs.extend([0.0] * len(new))
        start = len(self.ids)
        self.ids.extend(sampled)
        self.logprobs.extend(known)
        if sets is not None:
            self.allowed.add_sets(start, sets)
        self.spans.append(ActionSpan(step, len(self.segments) - 1, start, len(self.ids), policy_version))

    def turns(self) -> dict[int, Turn]:
        """Return the prompt and the sampled tokens of each action, keyed by step; the arrays are views of one copy."""
        ids, logprobs = np.array(self.ids, dtype=np.int64), np.array(self.logprobs, dtype=np.float64)
        turns, before = {}, 0
        sets, positions, which = [ids.tolist() for ids in self.allowed.sets], self.allowed.places, self.allowed.which
        for span in self.spans:
            segment, sampled = self.segments[span.segment], logprobs[span.start : span.stop]
            first, last = bisect_left(positions, span.start), bisect_left(positions, span.stop)
            allowed: list[list[int] | None] = [None] * (span.stop - span.start)
            for position, number in zip(positions[first:last], which[first:last], strict=True):
                allowed[position - span.start] = sets[number]
            turns[span.step] = Turn(
                ids[segment.start : span.start],
                ids[span.start : span.stop],
                None if len(sampled) and np.isnan(sampled).all() else sampled,
                None if span.policy_version == UNKNOWN_VERSION else span.policy_version,
                segment.reason if span.segment != before else None,
                allowed if first < last else None,
            )
            before = span.segment
        return turns

    def rows(self) -> Iterator[TokenRow]:
        """Yield one training row for each segment that contains sampled tokens."""
        ids = np.array(self.ids, dtype=np.int64)
        logprobs = np.array(self.logprobs, dtype=np.float64)
        steps = np.full(len(ids), -1, dtype=np.int64)
        versions = np.full(len(ids), -1, dtype=np.int64)
        for span in self.spans:
            steps[span.start : span.stop] = span.step
            versions[span.start : span.stop] = span.policy_version
        firsts = {span.segment: span.start for span in reversed(self.spans)}
        ends = [segment.start for segment in self.segments[1:]] + [len(ids)]
        for number, first in sorted(firsts.items()):
            segment, end = self.segments[number], ends[number]
            part = slice(first, end)
            mask = (steps[part] >= 0).astype(np.int8)
            yield TokenRow(ids[segment.start : first], ids[part], mask, logprobs[part], steps[part], versions[part])

    def part(self, start: int, stop: int | None) -> EpisodeTokens:
        """Return the tokens up to the end of step `stop - 1`, or all tokens if `stop` is None.

        Tokens before step `start` become context.
        """
        before = [span for span in self.spans if stop is None or span.step < stop]
        end = len(self.ids) if stop is None else max((span.stop for span in before), default=0)
        tokens = EpisodeTokens()
        tokens.ids, tokens.logprobs = self.ids[:end], array("d", bytes(8 * end))
        for span in before:
            if span.step >= start:
                tokens.spans.append(span._replace(step=span.step - start))
                tokens.logprobs[span.start : span.stop] = self.logprobs[span.start : span.stop]
        if tokens.spans:
            tokens.allowed = self.allowed.kept(tokens.spans[0].start, end)
        # The actions before a segment's first kept action are now part of its prompt.
        firsts = {span.segment: span.start for span in reversed(tokens.spans)}
        kept = self.segments if stop is None else self.segments[: before[-1].segment + 1 if before else 0]
        ends = [segment.start for segment in kept[1:]] + [end]
        for number, segment in enumerate(kept):
            prompt_end = firsts.get(number, ends[number])
            tokens.segments.append(replace(segment, prompt_length=prompt_end - segment.start))
        return tokens

    def continued(self, other: EpisodeTokens, steps: int) -> EpisodeTokens:
        """Return these tokens followed by the tokens of `other`, a later part whose step 0 becomes step `steps`.

        Raises:
            EpisodeError: `other` does not begin with these tokens.
        """
        known = len(self.ids)
        if other.ids[:known] != self.ids:
            raise EpisodeError("the tokens of a chunk do not begin with the tokens of the preceding chunk")
        tokens = EpisodeTokens()
        tokens.ids, tokens.logprobs = other.ids[:], self.logprobs + other.logprobs[known:]
        tokens.allowed = self.allowed.kept(0, known)
        tokens.allowed.extend(other.allowed, known, len(other.ids))
        tokens.spans = [*self.spans, *(span._replace(step=span.step + steps) for span in other.spans)]
        # If both parts contain a segment, the earlier part has the shorter prompt.
        shared = zip(self.segments, other.segments, strict=False)
        tokens.segments = [a if a.prompt_length < b.prompt_length else b for a, b in shared]
        tokens.segments += other.segments[len(tokens.segments) :]
        return tokens

    def get_state(self) -> dict[str, Any]:
        """Return a JSON-safe form.

        Unknown log-probabilities become None, and log-probabilities of tokens that were not sampled are omitted.
        """
        logprobs = [
            [None if value != value else to_json_value(value) for value in self.logprobs[span.start : span.stop]]
            for span in self.spans
        ]
        state: dict[str, Any] = {
            "ids": self.ids.tolist(),
            "segments": [[s.start, s.prompt_length, s.reason] for s in self.segments],
            "actions": [list(span) for span in self.spans],
            "logprobs": logprobs,
        }
        return state | ({"allowed_ids": self.allowed.get_state()} if self.allowed else {})

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> EpisodeTokens:
        """Restore the tokens from the result of `get_state`."""
        tokens = cls()
        tokens.ids = array("i", state["ids"])
        tokens.logprobs = array("d", bytes(8 * len(tokens.ids)))
        tokens.segments = [Segment(*segment) for segment in state["segments"]]
        tokens.spans = [ActionSpan(*span) for span in state["actions"]]
        for span, values in zip(tokens.spans, state["logprobs"], strict=True):
            restored = [float("nan") if value is None else from_json_value(value) for value in values]
            tokens.logprobs[span.start : span.stop] = array("d", restored)
        if "allowed_ids" in state:
            tokens.allowed = AllowedTrack.from_state(state["allowed_ids"])
        return tokens
