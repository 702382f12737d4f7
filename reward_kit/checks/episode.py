"""Checks for episodes and their tokens: `check_episode` and `check_group`.

The checks detect data that would train a model on actions that it did not take. Examples are a retokenized history, a
mask that is shifted relative to its tokens, log-probabilities that belong to other tokens, groups with different
initial states, and stale weights. Each fault is reported once. Problems that result from a reported fault are not
reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.agent.models import StepData, StopReason
from reward_kit.agent.policy_interface import get_tool_calls
from reward_kit.checks.findings import Finding, Findings
from reward_kit.episodes.record import get_facts
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, ActionSpan, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, did_you_mean

Array = npt.NDArray[Any]
LogprobsOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""A function that maps token ids (T,) to log p(ids[t] | ids[:t]) (T,) under the sampling weights.

Entry 0 is unused.
"""
Credited = StepData | Mapping[str, Any]
"""A step with assigned credit, which is a `StepData` or a parsed line of `credit.jsonl`."""

LARGEST_ID = 2**31 - 1
ROUNDING = 1e-4
"""Tolerance for log-probabilities above 0. A softmax in float32 or bfloat16 may round to slightly above 0."""
TOLERANCE = 1e-2
"""Default tolerance between recomputed and recorded log-probabilities."""
_FARTHEST_SHIFT = 8
_SAME = 1e-9


def check_episode(
    episode: SingleAgentEpisode,
    steps: Sequence[Credited] | None = None,
    *,
    scored: bool | None = None,
    token_logprobs: LogprobsOf | None = None,
    tolerance: float = TOLERANCE,
    current_version: int | None = None,
    max_staleness: int = 0,
) -> list[Finding]:
    """Check that an episode is consistent and that its tokens can be used for training.

    Args:
        episode: the episode to check.
        steps: the steps with their credit, or the lines of `credit.jsonl`. None if no credit was assigned.
        scored: whether the episode has a score. None if this is unknown.
        token_logprobs: a function that maps a (T,) array of token ids to a (T,) array with the log-probability of each
            id given the preceding ids, under the weights that sampled the actions. It is required to detect shifted and
            permuted log-probabilities. Without it, only misplaced zeros are detected.
        tolerance: the maximum difference between recomputed and recorded log-probabilities.
        current_version: the version of the model's current weights. If None, the versions in the episode are compared
            only with each other.
        max_staleness: the maximum number of versions by which an action's weights may lag behind `current_version`.

    Returns:
        The problems found. A problem with level "error" makes the episode unfit for training.
    """
    findings, tokens = Findings.about_episode(episode.id_), episode.tokens
    _check_end(findings, episode)
    try:
        episode.validate()
    except EpisodeError as error:
        cause = "the last observation was left out, or an action was recorded without its outcome"
        findings.error("track-lengths", f"{error}; {cause}")
        return findings
    for t, reward in enumerate(episode.environment_rewards()):
        if reward is not None and not math.isfinite(reward):
            findings.error("reward-not-finite", f"the environment's reward is {reward}", step=t)
    is_part = episode.t_started > 0 or episode.rewards.lookback > 0
    if not is_part:
        _check_messages(findings, episode)
    if _has_sound_segments(findings, tokens, None if is_part else len(episode)):
        check_prefixes(findings, tokens)
        _check_versions(findings, tokens.spans, current_version, max_staleness)
        for row in segment_rows(tokens):
            check_tokens(findings, row, token_logprobs=token_logprobs, tolerance=tolerance)
    if steps is not None:
        _check_credit(findings, episode, [_credit_row(step) for step in steps], scored)
    return findings


def check_group(episodes: Sequence[SingleAgentEpisode]) -> list[Finding]:
    """Check that episodes form one group.

    The episodes must have different ids but the same group id, sample, policy, initial state and environment seed.
    Each episode is compared with the first one. Use `check_episode` to check the individual episodes.

    Returns:
        The problems found.
    """
    checks = BatchChecks()
    findings = [finding for episode in episodes for finding in checks.add(episode)]
    expected = get_facts(episodes[0]).get("group_id") if episodes else None
    for episode in episodes[1:]:
        if (group_id := get_facts(episode).get("group_id")) != expected:
            own = Findings.about_episode(episode.id_)
            own.error(
                "mixed-groups",
                f"the group id is {group_id!r}, but the group id of episode {episodes[0].id_} is {expected!r}; the "
                "batch may have been split into groups by position although an episode was missing",
            )
            findings += own
    return findings


def _check_end(findings: Findings, episode: SingleAgentEpisode) -> None:
    """Check that the end of an episode is consistent with its stop reason and failure."""
    facts = get_facts(episode)
    reason, failure = facts.get("stop_reason"), facts.get("failure")
    if episode.is_terminated and episode.is_truncated:
        findings.error("terminated-and-truncated", "the episode is both terminated and truncated")
        return
    problem = ""
    if reason is not None and reason not in list(StopReason):
        problem = f"unknown stop reason {reason!r}{did_you_mean(str(reason), list(StopReason))}"
    elif reason is not None and StopReason(reason).is_terminal != episode.is_terminated:
        marked = "terminated" if episode.is_terminated else "truncated" if episode.is_truncated else "unfinished"
        expected = "terminated" if StopReason(reason).is_terminal else "truncated"
        problem = (
            f"stop reason {reason!r} requires a {expected} episode, but the episode is marked {marked}; either the "
            "reason or the mark was edited"
        )
    elif reason is not None and not episode.is_done:
        problem = f"the stop reason is {reason!r}, but the episode is marked unfinished; the end was not recorded"
    elif failure and reason != StopReason.ERROR:
        problem = f"the episode has a failure ({failure.get('where')}), but its stop reason is {reason!r}"
    elif reason == StopReason.ERROR and not failure:
        problem = "the stop reason is 'error', but no failure was recorded; the cause is unknown"
    if problem:
        findings.error("stop-reason", problem)


def _check_messages(findings: Findings, episode: SingleAgentEpisode) -> None:
    """Check that each action has one assistant message, and that its tool calls are answered before the next action."""
    turns, messages = list(episode.assistant_turns), episode.messages
    if not messages and not turns:
        return
    if len(turns) != len(episode):
        text = f"the episode has {len(episode)} actions but {len(turns)} assistant turns"
        findings.error("assistant-turns", text, step=min(len(turns), len(episode)))
        return
    for t, turn in enumerate(turns):
        if not 0 <= turn < len(messages) or (t and turn <= turns[t - 1]) or messages[turn].role != "assistant":
            role = messages[turn].role if 0 <= turn < len(messages) else "missing"
            text = f"the assistant turn refers to message {turn}, whose role is {role}"
            text = text if role != "missing" else f"the assistant turn refers to message {turn}, which does not exist"
            findings.error("assistant-turns", text, step=t)
            return
    for t, turn in enumerate(turns):
        _check_turn(findings, episode, t, messages[turn].tool_calls or [])


def _check_turn(findings: Findings, episode: SingleAgentEpisode, t: int, tool_calls: Sequence[Any]) -> None:
    answers, action = episode.answers_to(t), episode.get_actions(t)
    if any(message.role == "assistant" for message in answers):
        text = "there is a second assistant message before the next action"
        findings.error("two-assistant-messages", text, step=t)
    called = [call.function.name for call in tool_calls]
    # Episodes created by hand may have actions of any form.
    is_ours = isinstance(action, dict) and "type" in action
    if is_ours and called != (done := [str(call.get("name")) for call in get_tool_calls(action)]):
        text = f"the action calls {json.dumps(done)}, but its assistant message calls {json.dumps(called)}"
        findings.error("action-and-message", text, step=t)
    calls = [call.id for call in tool_calls]
    answered = [message.tool_call_id for message in answers if message.role == "tool"]
    missing = [call for call in calls if call not in answered]
    stray = [answer for answer in answered if answer is not None and answer not in calls]
    twice = [call for call in dict.fromkeys(calls) if answered.count(call) > calls.count(call)]
    may_end = False  # A transcript, or an agent that was stopped, may end with an unanswered call
    if t == len(episode) - 1:
        own = "own_account" in episode.extra_model_outputs and episode.get_extra_model_outputs("own_account", t)
        may_end = bool(own) or get_facts(episode).get("stop_reason") == StopReason.RECORDED
    if len(missing) > answered.count(None) and not may_end:  # A result without an id may match any call
        findings.error("unanswered-call", f"no tool message answers the call {missing[0]!r}", step=t)
    elif stray:
        text = (
            f"a tool message answers the call {stray[0]!r}, which this action did not make; its calls are "
            f"{calls or 'none'}"
        )
        findings.error("unanswered-call", text, step=t)
    elif twice:
        text = f"{answered.count(twice[0])} tool messages answer the call {twice[0]!r}"
        findings.error("call-answered-twice", text, step=t)


def _credit_row(step: Credited) -> dict[str, Any]:
    """Return a step's credit with the keys of `credit.jsonl`.

    If the step is a `StepData`, the result also contains its rewards.
    """
    if not isinstance(step, StepData):
        return {name: step.get(name) for name in ("step", "group_id", "A", "A_E", "return_to_go")}
    info = step.step_info
    row = {"step": step.system_step_index, "group_id": info.get("group_id"), "A_E": info.get("A_E")}
    row |= {"A": step.advantage, "return_to_go": step.return_to_go, "base_reward": step.base_reward}
    return row | {name: info[name] for name in ("environment_reward",) if name in info}


def _check_credit(
    findings: Findings, episode: SingleAgentEpisode, rows: Sequence[Mapping[str, Any]], scored: bool | None
) -> None:
    """Check the credit of one episode, and report the first problem of each kind."""
    if (order := [row["step"] for row in rows]) != list(range(len(episode))):
        findings.error(
            "credit-steps",
            f"the episode has {len(episode)} steps, but the credit contains {len(rows)} steps in the order "
            f"{order[:8]}; the credit belongs to a different episode or to an earlier attempt",
        )
        return
    facts, rewards = get_facts(episode), episode.environment_rewards()
    group = facts.get("group_id")
    for t, row in enumerate(rows):
        if group is not None and row["group_id"] not in (None, group):
            text = f"the credit is for group {row['group_id']!r}, but the episode belongs to group {group!r}"
            findings.error("group-id", text, step=t)
            break
        own = row.get("environment_reward", rewards[t])
        if own != rewards[t] and not (own != own and rewards[t] != rewards[t]):  # Two NaNs count as equal
            text = f"the environment reward of the step is {own}, but the episode recorded {rewards[t]}"
            findings.error("environment-reward", text, step=t)
            break
    credited = [t for t, row in enumerate(rows) if row["A"] is not None]
    if scored is False or facts.get("failure"):
        for t in credited[:1]:
            text = f"the episode is unscored, but the advantage of the step is {rows[t]['A']:.4g}"
            findings.error("advantage-unscored", text, step=t)
        return
    if 0 < len(credited) < len(rows):
        first = next(t for t, row in enumerate(rows) if row["A"] is None)
        text = f"the step has no advantage, but {len(credited)} other steps have an advantage"
        findings.error("credit-missing", text, step=first)
        return
    if not scored and not credited and all(row["return_to_go"] is None for row in rows):
        return
    for t, row in enumerate(rows):
        for key, name in (("A", "advantage"), ("return_to_go", "return"), ("base_reward", "base reward")):
            if (value := row.get(key)) is not None and not math.isfinite(value):
                findings.error("credit-not-finite", f"the {name} is {value}", step=t)
                return
    known = [(t, row["A_E"]) for t, row in enumerate(rows) if row["A_E"] is not None]
    for t, value in known:
        if abs(value - known[0][1]) > _SAME * max(1.0, abs(value)):
            text = f"A_E is {value:.6g}, but A_E is {known[0][1]:.6g} in step {known[0][0]}"
            findings.error("episode-advantage-varies", text, step=t)
            return


class _Member(NamedTuple):
    """The properties of an episode that must be identical in all episodes of its group."""

    rollout_id: str
    sample: Any
    policy: Any
    start_state: str | None
    environment_seed: int | None


_MIXED = {
    "sample": ("mixed-groups", "scores of different tasks would be compared"),
    "policy": ("mixed-groups", "the baseline would combine the scores of different policies"),
    "start_state": (
        "mixed-starts",
        "the resource was reset with a different seed, or a fork does not copy the whole state",
    ),
    "environment_seed": ("mixed-seeds", "all episodes of a group must use the same environment seed"),
}
"""The properties that must be the same in a group.

Each property is mapped to the kind of finding that is reported if it differs, and to the effect or the cause.
"""


class BatchChecks:
    """Checks that compare episodes with each other. The episodes are added one at a time.

    Only the ids and one `_Member` per group are kept.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._groups: dict[str, _Member] = {}

    def add(self, episode: SingleAgentEpisode) -> list[Finding]:
        """Compare an episode with the episodes that were added before it, and return the problems."""
        findings, facts = Findings.about_episode(episode.id_), get_facts(episode)
        if (name := (episode.id_, facts.get("attempt") or 0)) in self._seen:
            text = "a different episode in the batch has the same id, but scores and credit are looked up by id"
            findings.error("duplicate-rollout", text)
            return findings
        self._seen.add(name)
        start, seeds = facts.get("start") or {}, facts.get("seeds") or {}
        key, first_key = start.get("state_key"), episode.get_infos(0).get("state_key") if len(episode) else None
        if None not in (key, first_key) and key != first_key:
            text = f"the initial state is {key}, but the state before the first action is {first_key}"
            findings.error("start-moved", text, step=0)
        member = _Member(episode.id_, facts.get("sample_id"), facts.get("policy"), key, seeds.get("environment"))
        group_id = facts.get("group_id")
        if group_id is None or (first := self._groups.setdefault(group_id, member)) is member:
            return findings
        for fact, (kind, cause) in _MIXED.items():  # Only the first difference is reported
            own, other = getattr(member, fact), getattr(first, fact)
            if own == other or (None in (own, other) and kind != "mixed-groups"):
                continue
            findings.error(
                kind,
                f"the {fact.replace('_', ' ')} is {own!r}, but it is {other!r} in episode "
                f"{first.rollout_id} of the "
                f"same group {group_id!r}; {cause}",
                level="warning" if kind == "mixed-starts" and start.get("verified") is False else "error",
            )
            break
        return findings


class ActionRange(NamedTuple):
    """The position of an action's tokens in a token sequence."""

    step: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CheckedTokens:
    """A sequence of observed and sampled tokens."""

    ids: Array  # (T,) all tokens, observed and sampled
    action_mask: Array  # (T,) 1 for sampled tokens
    logprobs: Array | None  # (T,) 0.0 if `action_mask` is 0, NaN if unknown; None if they were not recorded
    actions: tuple[ActionRange, ...] = ()  # In order; () if only the mask is known
    first: int = 0  # The offset that messages add to positions in `ids`

    def spans(self) -> tuple[ActionRange, ...]:
        """Return the actions. If they are unknown, return the runs of ones in the mask, numbered from 0."""
        if self.actions:
            return self.actions
        edges = np.flatnonzero(np.diff(np.concatenate([[0], (self.action_mask == 1).astype(np.int8), [0]])))
        starts, stops = edges[::2].tolist(), edges[1::2].tolist()
        return tuple(map(ActionRange, range(len(starts)), starts, stops))

    def step_at(self, token: int) -> int | None:
        """Return the step whose action contains a token, or None if no known action contains it."""
        return next((action.step for action in self.actions if action.start <= token < action.stop), None)


def segment_rows(tokens: EpisodeTokens) -> Iterator[CheckedTokens]:
    """Yield one token sequence per segment."""
    ids, logprobs = np.array(tokens.ids, dtype=np.int64), np.array(tokens.logprobs, dtype=np.float64)
    mask = np.zeros(len(ids), dtype=np.int8)
    for span in tokens.spans:
        mask[span.start : span.stop] = 1
    for number, (start, stop) in enumerate(_bounds(tokens)):
        actions = tuple(
            ActionRange(span.step, span.start - start, span.stop - start)
            for span in tokens.spans
            if span.segment == number
        )
        part = slice(start, stop)
        yield CheckedTokens(ids[part], mask[part], logprobs[part], actions, start)


def check_tokens(
    findings: Findings, row: CheckedTokens, *, token_logprobs: LogprobsOf | None = None, tolerance: float = TOLERANCE
) -> None:
    """Check one token sequence. Problems that result from a reported problem are not reported."""
    before = len(findings)
    _check_form(findings, row)
    if row.logprobs is None or len(findings) > before:
        return
    _check_off_actions(findings, row, row.logprobs)
    if len(findings) > before:
        return
    _check_values(findings, row, row.logprobs)
    if token_logprobs is not None and len(findings) == before:
        _check_recomputed(findings, row, row.logprobs, token_logprobs, tolerance)


def _check_form(findings: Findings, row: CheckedTokens) -> None:
    """Check the lengths, the ids and the mask, on which all other checks rely."""
    for name, values in (("action mask", row.action_mask), ("logprobs", row.logprobs)):
        if values is not None and len(values) != len(row.ids):
            cause = "the two arrays come from different code, or one of them omits the prompt"
            text = f"got {len(row.ids)} token ids but {len(values)} entries in the {name}; {cause}"
            findings.error("length-mismatch", text)
    wrong = np.flatnonzero((row.ids < 0) | (row.ids > LARGEST_ID))
    for at in wrong[:1].tolist():
        text = f"{row.ids[at]} is not a valid token id ({len(wrong)} such tokens)"
        findings.error("token-id", text, step=row.step_at(at), token=row.first + at)
    wrong = np.flatnonzero((row.action_mask != 0) & (row.action_mask != 1))
    for at in wrong[:1].tolist():
        text = f"the action mask is {row.action_mask[at]} ({len(wrong)} such tokens)"
        findings.error("mask-values", text, token=row.first + at)


def _check_off_actions(findings: Findings, row: CheckedTokens, logprobs: Array) -> None:
    """Check that the log-probabilities are 0.0 outside the actions."""
    mask, known = row.action_mask == 1, logprobs != 0
    stray = np.flatnonzero(known & ~mask)
    if not len(stray):
        return
    at = int(stray[0])
    if not (known & mask).any() and mask.any():
        text = "all log-probabilities are at positions where the mask is 0"
        findings.error("inverted-mask", text, token=row.first + at)
    elif distance := _displacement(mask, known):
        side, step = "after" if distance > 0 else "before", row.actions[0].step if row.actions else None
        text = f"the log-probabilities are {abs(distance)} tokens {side} the actions in the mask"
        findings.error("shifted-mask", text, step=step, token=row.first + at)
    else:
        text = f"the log-probability of a token outside the actions is {logprobs[at]:.4g} ({len(stray)} such tokens)"
        findings.error("logprob-off-action", text, token=row.first + at)


def _displacement(mask: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_]) -> int:
    """Return the number of positions by which `known` is shifted to the right relative to `mask`.

    The edges are ignored.
    """
    # A shift leaves a gap in the mask. Without a gap, values were added rather than shifted.
    if not (mask & ~known).any():
        return 0
    for size in range(1, min(_FARTHEST_SHIFT, len(mask) - 1) + 1):
        for distance in (size, -size):
            inner = slice(size, len(mask) - size)
            moved = np.roll(mask, distance)[inner]
            if moved.any() and np.array_equal(moved, known[inner]):
                return distance
    return 0


def _check_values(findings: Findings, row: CheckedTokens, logprobs: Array) -> None:
    """Check that the log-probabilities of an action are finite, at most 0, and either all known or all unknown."""
    for step, start, stop in row.spans():
        part = logprobs[start:stop]
        unknown, infinite, positive = np.isnan(part), np.isinf(part), part > ROUNDING
        if infinite.any():
            kind, at = "logprob-not-finite", int(np.argmax(infinite))
            text = (
                f"the log-probability is {part[at]}, but a token with probability 0 cannot be sampled; the "
                "distribution was masked or truncated (top-k, grammar) after sampling"
            )
        elif unknown.any() and not unknown.all():
            kind, at = "logprob-not-finite", int(np.argmax(unknown))
            text = (
                f"{int(unknown.sum())} of the {len(part)} log-probabilities of the action are NaN; record all of "
                "them or none of them"
            )
        elif positive.any():
            kind, at = "logprob-positive", int(np.argmax(positive))
            text = f"the log-probability is {part[at]:.4g}, which is above 0"
        else:
            continue
        findings.error(kind, text, step=step if row.actions else None, token=row.first + start + at)


def _check_recomputed(
    findings: Findings, row: CheckedTokens, logprobs: Array, token_logprobs: LogprobsOf, tolerance: float
) -> None:
    """Compare the recorded log-probabilities with the recomputed log-probabilities."""
    own = np.asarray(token_logprobs(row.ids.astype(np.int64)), dtype=np.float64)
    if own.shape != row.ids.shape:
        text = f"token_logprobs returned shape {own.shape} for {len(row.ids)} ids; return one number per id"
        findings.error("length-mismatch", text)
        return
    at = np.flatnonzero((row.action_mask == 1) & ~np.isnan(logprobs))
    at = at[at > 0]
    recorded, expected = logprobs[at], own[at]
    differs = np.abs(recorded - expected) > tolerance
    if not differs.any():
        return
    kind = "logprob-of-other-token"
    for distance in (1, -1, 2, -2):
        kept = slice(max(distance, 0), len(recorded) + min(distance, 0))
        moved = np.roll(expected, distance)[kept]
        if len(moved) > 1 and np.all(np.abs(recorded[kept] - moved) <= tolerance):
            side = "before" if distance > 0 else "after"
            cause = f"the log-probabilities are shifted: they match the token {abs(distance)} {side}"
            break
    else:
        if np.all(np.abs(np.sort(recorded) - np.sort(expected)) <= tolerance):
            cause = "the log-probabilities are permuted: they match other tokens in the sequence"
        else:
            kind = "logprob-differs"
            cause = (
                "they were computed with different weights, or for a distribution other than the sampled one "
                "(temperature, top-p, a missing system prompt)"
            )
    worst = int(np.argmax(differs))
    findings.error(
        kind,
        f"the recorded log-probability is {recorded[worst]:.4f}, but the recomputed value is {expected[worst]:.4f} "
        f"({int(differs.sum())} of {len(at)} values differ by more than {tolerance:g}); {cause}",
        step=row.step_at(int(at[worst])),
        token=row.first + int(at[worst]),
    )


def _bounds(tokens: EpisodeTokens) -> list[tuple[int, int]]:
    starts = [segment.start for segment in tokens.segments]
    return list(zip(starts, [*starts[1:], len(tokens.ids)], strict=False))


def _has_sound_segments(findings: Findings, tokens: EpisodeTokens, steps: int | None) -> bool:
    """Return True if the segments and spans are valid.

    `steps` is the length of the episode, or None if the episode is partial.
    """
    before = len(findings)
    if len(tokens.logprobs) != len(tokens.ids):
        text = (
            f"got {len(tokens.ids)} token ids but {len(tokens.logprobs)} log-probabilities; record 0.0 for tokens "
            "outside the actions"
        )
        findings.error("length-mismatch", text)
    # The segments must cover all ids in order, and each segment must have a reason for its start.
    if tokens.ids and (not tokens.segments or tokens.segments[0].start != 0):
        findings.error("segment", "the first segment does not begin at token 0; the first ids are missing", token=0)
    for number, (segment, (start, stop)) in enumerate(zip(tokens.segments, _bounds(tokens), strict=True)):
        if not 0 <= segment.prompt_length <= stop - start:
            text = (
                f"segment {number} has {stop - start} tokens, but its prompt_length is {segment.prompt_length}; the "
                "segments were joined or truncated without updating the lengths"
            )
            findings.error("segment", text, token=start)
        if not segment.reason:
            text = f"segment {number} does not record the reason why the context was rewritten"
            findings.error("segment", text, token=start)
    if len(findings) == before:
        _check_spans(findings, tokens, steps)
    return len(findings) == before


def _check_spans(findings: Findings, tokens: EpisodeTokens, steps: int | None) -> None:
    """Check that the actions are in order and that no token is missing at the start or the end of a completion."""
    per_segment: dict[int, list[ActionSpan]] = {number: [] for number in range(len(tokens.segments))}
    for span in tokens.spans:
        if span.segment not in per_segment:
            text = f"the action belongs to segment {span.segment}, which does not exist"
            findings.error("action-span", text, step=span.step)
            return
        per_segment[span.segment].append(span)
    bounds = [
        (start + tokens.segments[number].prompt_length, stop) for number, (start, stop) in enumerate(_bounds(tokens))
    ]
    if tokens.spans and all(per_segment.values()):
        ends = [(per_segment[number][0].start - first, first) for number, (first, _) in enumerate(bounds)]
        ends += [(per_segment[number][-1].stop - stop, stop) for number, (_, stop) in enumerate(bounds)]
        moved = {distance for distance, _ in ends}
        if len(moved) == 1 and (distance := moved.pop()):
            text = f"all actions are shifted by {distance:+} tokens relative to the sampled tokens"
            findings.error("shifted-mask", text, step=tokens.spans[0].step, token=tokens.spans[0].start)
            return
    for number, (first, stop) in enumerate(bounds):
        if not (spans := per_segment[number]):
            text = f"segment {number} has no action, so it cannot be used for training"
            findings.error("segment", text, token=tokens.segments[number].start)
        elif outside := [span for span in spans if not first <= span.start <= span.stop <= stop]:
            span = outside[0]
            text = f"the action is at {span.start}:{span.stop}, outside the completion of its segment, {first}:{stop}"
            findings.error("action-span", text, step=span.step, token=span.start)
        elif (span := spans[0]).start != first:
            text = (
                f"the prompt ends at {first}, but the first action begins at {span.start}; an action is missing from "
                "the mask"
            )
            findings.error("action-span", text, step=span.step, token=first)
        elif (span := spans[-1]).stop != stop:
            text = (
                f"{stop - span.stop} tokens follow the last action of segment {number}; an action is missing from the "
                "mask"
            )
            findings.error("action-span", text, step=span.step, token=span.stop)
    for one, two in pairwise(tokens.spans):
        if two.step <= one.step or two.start < one.stop:
            findings.error(
                "action-span", f"the action overlaps or precedes the action of step {one.step}", step=two.step
            )
    if steps is not None and tokens.spans and not 0 <= (last := tokens.spans[-1].step) < steps:
        text = f"this step has tokens, but the episode has only {steps} steps; an action was sampled but not taken"
        findings.error("action-span", text, step=last)


def check_prefixes(findings: Findings, tokens: EpisodeTokens) -> None:
    """Report contexts that were rewritten without a recorded reason. The usual cause is a retokenized history."""
    ids = np.array(tokens.ids, dtype=np.int64)
    bounds = _bounds(tokens)
    for number, segment in enumerate(tokens.segments[1:], 1):
        if segment.reason != REWRITTEN:
            continue
        seen = ids[slice(*bounds[number - 1])]
        prompt = ids[segment.start : segment.start + segment.prompt_length]
        length = first_mismatch(seen, prompt)
        at = bounds[number - 1][0] + length
        owner = next((span.step for span in tokens.spans if span.start <= at < span.stop), None)
        if length == len(prompt):
            what = f"the prompt contains only {length} of the {len(seen)} earlier tokens"
        elif length == len(seen):
            what = "the prompt extends the earlier tokens, so it belongs to the same segment"
        else:
            source = "an observation" if owner is None else f"the action of step {owner}"
            what = f"the prompt has token id {prompt[length]} instead of {seen[length]}, which is part of {source}"
        findings.error(
            "drifted-prefix",
            what,
            step=next((span.step for span in tokens.spans if span.segment == number), None),
            token=segment.start + length,
            level="warning" if owner is None else "error",
        )


def first_mismatch(one: Array, two: Array) -> int:
    """Return the length of the longest common prefix of two arrays."""
    shared = min(len(one), len(two))
    differs = np.flatnonzero(one[:shared] != two[:shared])
    return int(differs[0]) if len(differs) else shared


def _check_versions(
    findings: Findings, spans: Sequence[ActionSpan], current_version: int | None, max_staleness: int
) -> None:
    """Check that the policy versions do not decrease during an episode and are neither too old nor too new."""
    known = [span for span in spans if span.policy_version != UNKNOWN_VERSION]
    unknown = next((span for span in spans if span.policy_version == UNKNOWN_VERSION), None)
    if unknown is not None and (known or current_version is not None):
        findings.error("unknown-version", "the policy version was not recorded", step=unknown.step)
    for one, two in pairwise(known):
        if two.policy_version < one.policy_version:
            text = (
                f"the action was sampled by version {two.policy_version} after an action by the newer version "
                f"{one.policy_version}; an engine has old weights"
            )
            findings.error("stale-version", text, step=two.step)
            return
    if current_version is None:
        return
    for span in known:
        if not current_version - max_staleness <= span.policy_version <= current_version:
            text = (
                f"the action was sampled by version {span.policy_version}, but the trainer has version "
                f"{current_version} (maximum staleness {max_staleness})"
            )
            findings.error("stale-version", text, step=span.step)
            return
