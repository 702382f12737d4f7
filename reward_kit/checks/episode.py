"""`check_episode`: the contract of episodes and their tokens as a program, in messages that name the likely cause.

It finds what trains a model on something it never did: a history that was tokenised again, a mask beside its tokens,
the log-probability of another token, credit on an observation, groups whose starts differ, stale weights. One fault is
one finding: what only follows from it is not reported. `check_group` compares episodes, `check_rows` proves a batch.
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
from reward_kit.agent.policy_interface import tool_calls_of
from reward_kit.checks.findings import Finding, Found
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, ActionSpan, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, did_you_mean

Array = npt.NDArray[Any]
LogprobsOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""(T,) ids -> (T,) log p(ids[t] | ids[:t]) under the weights that sampled; the first entry is not looked at."""

LARGEST_ID = 2**31 - 1
ROUNDING = 1e-4
"""Most by which a log-probability may lie above 0: float32 and bfloat16 soft-maxes end a little above it."""
TOLERANCE = 1e-2
"""Most by which a recomputed log-probability may differ from the recorded one."""
_FARTHEST_SHIFT = 8
Credited = StepData | Mapping[str, Any]
"""A step with its credit: `StepData`, or a line of `credit.jsonl`."""

_SAME = 1e-9


def check_episode(
    episode: SingleAgentEpisode,
    steps: Sequence[Credited] | None = None,
    *,
    scored: bool | None = None,
    logprobs_of: LogprobsOf | None = None,
    tolerance: float = TOLERANCE,
    current_version: int | None = None,
    max_staleness: int = 0,
) -> list[Finding]:
    """Prove the contract of one episode.

    Args:
        episode: the record.
        steps: its credited steps, or its lines of `credit.jsonl`; None where no credit was assigned.
        scored: whether the episode has a score; None where that is not known.
        logprobs_of: (T,) ids -> (T,) the log-probability of each id after those before it, under the weights that
            sampled. With it a shifted or permuted track is found; without it only what the zeros betray.
        tolerance: how far a recomputed log-probability may differ.
        current_version: the weights in training; None where versions are only compared with one another.
        max_staleness: how many versions behind them an action may have been sampled.

    Returns:
        The problems, [] if there are none. "error" breaks the contract.
    """
    found, tokens = Found.about_episode(episode.id_), episode.tokens
    check_end(found, episode)
    try:
        episode.validate()
    except EpisodeError as error:
        found.error(
            "track-lengths",
            f"{error}; the last observation was left out, or an action was recorded without its outcome",
        )
        return found.findings
    for t, reward in enumerate(episode.environment_rewards()):
        if reward is not None and not math.isfinite(reward):
            found.error(
                "reward-not-finite",
                f"the environment's reward is {reward}; it would make every sum and baseline {reward}: leave it None",
                step=t,
            )
    is_part = episode.t_started > 0 or episode.rewards.lookback > 0
    if not is_part:
        check_messages(found, episode)
    if is_in_segments(found, tokens, None if is_part else len(episode)):
        check_prefixes(found, tokens)
        check_versions(found, tokens.spans, current_version, max_staleness)
        for row in rows_of(tokens):
            check_tokens(found, row, logprobs_of=logprobs_of, tolerance=tolerance)
    if steps is not None:
        check_credit(found, episode, steps, scored)
    return found.findings


def check_group(episodes: Sequence[SingleAgentEpisode]) -> list[Finding]:
    """Prove that episodes are one group: unique ids, one group id, one sample and policy, one start, one seed.

    Each is compared with the first. What is wrong inside an episode is `check_episode`'s to find.
    """
    checks = BatchChecks()
    findings = [finding for episode in episodes for finding in checks.add(episode)]
    expected = facts_of(episodes[0]).get("group_id") if episodes else None
    for episode in episodes[1:]:
        if (group_id := facts_of(episode).get("group_id")) != expected:
            found = Found.about_episode(episode.id_)
            found.error(
                "mixed-groups",
                f"its group id is {group_id!r} and that of {episodes[0].id_} {expected!r}; groups were cut by "
                "position, and an episode before them is missing",
            )
            findings += found.findings
    return findings


def check_end(found: Found, episode: SingleAgentEpisode) -> None:
    """Terminated or truncated, as the stop reason says, with a failure where something broke."""
    facts = facts_of(episode)
    reason, failure = facts.get("stop_reason"), facts.get("failure")
    marked = "terminated" if episode.is_terminated else "truncated" if episode.is_truncated else "as going on"
    if episode.is_terminated and episode.is_truncated:
        found.error(
            "terminated-and-truncated",
            "the episode is terminated and truncated; the future after its end is worth nothing (terminated) or was "
            "cut off (truncated), and a critic must know which",
        )
    elif reason is not None and reason not in list(StopReason):
        found.error("stop-reason", f"no stop reason is called {reason!r}{did_you_mean(str(reason), list(StopReason))}")
    elif reason is not None and StopReason(reason).is_terminal != episode.is_terminated:
        found.error(
            "stop-reason",
            f"it stopped by {reason!r}, which {'ends the task' if StopReason(reason).is_terminal else 'cuts it off'}, "
            f"and is marked {marked}; one of them was changed by hand",
        )
    elif reason is not None and not episode.is_done:
        found.error("stop-reason", f"it stopped by {reason!r} and is marked as going on; its end was not recorded")
    elif failure and reason != StopReason.ERROR:
        found.error("stop-reason", f"it carries a failure ({failure.get('where')}) and says it stopped by {reason!r}")
    elif reason == StopReason.ERROR and not failure:
        found.error("stop-reason", "it stopped by 'error' and carries no failure; what broke is unknown")


def check_messages(found: Found, episode: SingleAgentEpisode) -> None:
    """Each action is one assistant message, in order, and its tool calls are answered before the next."""
    if not episode.messages and not episode.assistant_turns:
        return
    turns, messages = list(episode.assistant_turns), episode.messages
    if len(turns) != len(episode):
        found.error(
            "assistant-turns",
            f"{len(episode)} actions and {len(turns)} assistant turns; each action appends exactly one assistant "
            "message, and rewards find it by its turn",
            step=min(len(turns), len(episode)),
        )
        return
    for t, turn in enumerate(turns):
        if not 0 <= turn < len(messages) or (t and turn <= turns[t - 1]) or messages[turn].role != "assistant":
            role = messages[turn].role if 0 <= turn < len(messages) else "missing"
            found.error(
                "assistant-turns",
                f"its turn points at message {turn}, which is {role}; messages were put in or taken out without moving "
                "the turns",
                step=t,
            )
            return
    for t in range(len(turns)):
        _check_turn(found, episode, t)


def _check_turn(found: Found, episode: SingleAgentEpisode, t: int) -> None:
    said, answers = episode.messages[episode.assistant_turns[t]], episode.answers_to(t)
    if any(message.role == "assistant" for message in answers):
        found.error(
            "two-assistant-messages",
            "a second assistant message follows before the next action; two sampled messages are two steps, and a "
            "retry that was thrown away is none",
            step=t,
        )
    calls, action = [call.id for call in said.tool_calls or ()], episode.get_actions(t)
    called = [call.function.name for call in said.tool_calls or ()]
    # An episode made by hand may have actions of any form.
    is_ours = isinstance(action, dict) and "type" in action
    if is_ours and called != (done := [str(call.get("name")) for call in tool_calls_of(action)]):
        found.error(
            "action-and-message",
            f"the action calls {json.dumps(done)} and its message {json.dumps(called)}; the message was rewritten, "
            "or belongs to another step",
            step=t,
        )
    told = [message.tool_call_id for message in answers if message.role == "tool"]
    open_calls = [call for call in calls if call not in told]
    twice = [call for call in dict.fromkeys(calls) if told.count(call) > calls.count(call)]
    # An answer without an id can be to any call; a transcript may end, or an agent of its own be stopped, on a call.
    unnamed, may_end = sum(answer is None for answer in told), False
    if t == len(episode) - 1:
        own = "own_account" in episode.extra_model_outputs and episode.get_extra_model_outputs("own_account", t)
        may_end = bool(own) or facts_of(episode).get("stop_reason") == StopReason.RECORDED
    if len(open_calls) > unnamed and not may_end:
        found.error(
            "unanswered-call",
            f"no tool message answers the call {open_calls[0]!r}; endpoints refuse such a conversation: the answer was "
            "dropped, or its tool_call_id changed",
            step=t,
        )
    elif stray := [answer for answer in told if answer is not None and answer not in calls]:
        found.error(
            "unanswered-call",
            f"a tool message answers {stray[0]!r}, which this action did not call (it called {calls or 'nothing'})",
            step=t,
        )
    elif twice:
        found.error(
            "call-answered-twice",
            f"{told.count(twice[0])} tool messages answer the call {twice[0]!r}; endpoints refuse such a conversation: "
            "an answer was recorded again, by a retry perhaps",
            step=t,
        )


class _Credit(NamedTuple):
    """The credit of one step; a field is None if it is unknown."""

    step: Any
    advantage: float | None
    return_to_go: float | None
    episode_advantage: float | None
    group_id: str | None
    reward: float | None = None
    environment_reward: float | None = None
    is_view: bool = False


def _credit(step: Credited) -> _Credit:
    if not isinstance(step, StepData):
        step_index, advantage, return_to_go = step.get("step"), step.get("A"), step.get("return_to_go")
        return _Credit(step_index, advantage, return_to_go, step.get("A_E"), step.get("group_id"))
    info = step.step_info
    return _Credit(
        step=step.system_step_index,
        advantage=step.advantage,
        return_to_go=step.return_to_go,
        episode_advantage=info.get("A_E"),
        group_id=info.get("group_id"),
        reward=step.base_reward,
        environment_reward=info.get("environment_reward"),
        is_view="environment_reward" in info,
    )


def check_credit(found: Found, episode: SingleAgentEpisode, steps: Sequence[Credited], scored: bool | None) -> None:
    """Check the credit of one episode.

    Args:
        found: gets the findings.
        episode: the record.
        steps: its steps with credit.
        scored: whether the episode has a score; None where that is not known.
    """
    per_step = [_credit(step) for step in steps]
    if [credit.step for credit in per_step] != list(range(len(episode))):
        named = [credit.step for credit in per_step[:8]]
        found.error(
            "credit-steps",
            f"{len(episode)} steps and credit for {len(per_step)} of them, in the order {named}; the credit belongs to "
            "another episode, or to an earlier attempt",
        )
        return
    facts, rewards = facts_of(episode), episode.environment_rewards()
    group = facts.get("group_id")
    for t, credit in enumerate(per_step):
        are_nan = credit.environment_reward != credit.environment_reward and rewards[t] != rewards[t]
        if group is not None and credit.group_id is not None and credit.group_id != group:
            found.error(
                "group-id",
                f"credited in group {credit.group_id!r}, and the episode is of {group!r}; its baseline is another's",
                step=t,
            )
            break
        if credit.is_view and credit.environment_reward != rewards[t] and not are_nan:
            found.error(
                "environment-reward",
                f"the step has the environment's reward {credit.environment_reward} and the record {rewards[t]}; "
                "rewards moved by one step, or were changed after the episode (a view is never written back)",
                step=t,
            )
            break
    if scored is False or facts.get("failure"):
        for t, credit in enumerate(per_step):
            if credit.advantage is not None:
                found.error(
                    "advantage-unscored",
                    f"the episode is unscored and the step has the advantage {credit.advantage:.4g}; a missing score "
                    "counted as 0: unscored is None and takes no part",
                    step=t,
                )
                return
    elif scored or any(one.advantage is not None or one.return_to_go is not None for one in per_step):
        _check_scored(found, per_step)


def _check_scored(found: Found, per_step: Sequence[_Credit]) -> None:
    without = [t for t, credit in enumerate(per_step) if credit.advantage is None]
    if without and len(without) < len(per_step):
        found.error(
            "credit-missing",
            f"the step has no advantage and {len(per_step) - len(without)} others have; all steps of a scored episode "
            "are credited, those of an unscored one are not",
            step=without[0],
        )
        return
    for t, credit in enumerate(per_step):
        numbers = {"advantage": credit.advantage, "return": credit.return_to_go, "base reward": credit.reward}
        for name, value in numbers.items():
            if value is not None and not math.isfinite(value):
                found.error(
                    "credit-not-finite",
                    f"its {name} is {value}; a score was NaN, or a spread of 0 was divided by",
                    step=t,
                )
                return
    known = [(t, credit.episode_advantage) for t, credit in enumerate(per_step) if credit.episode_advantage is not None]
    for t, value in known:
        if abs(value - known[0][1]) > _SAME * max(1.0, abs(value)):
            found.error(
                "episode-advantage-varies",
                f"A_E is {value:.6g} here and {known[0][1]:.6g} in step {known[0][0]}; it is one number for the whole "
                "trajectory: the baseline was taken over steps",
                step=t,
            )
            return


class _Member(NamedTuple):
    """The facts of a group's first episode, with which the others are compared."""

    rollout_id: str
    sample_id: Any
    policy: Any
    environment_seed: int | None
    start_key: str | None


class BatchChecks:
    """Sees episodes one after another and keeps a line of each group, so that a run of any length can be checked."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._groups: dict[str, _Member] = {}

    def add(self, episode: SingleAgentEpisode) -> list[Finding]:
        """Return what is wrong with an episode beside those that were added before."""
        found, facts = Found.about_episode(episode.id_), facts_of(episode)
        if (name := (episode.id_, facts.get("attempt") or 0)) in self._seen:
            found.error(
                "duplicate-rollout",
                "another episode of the batch has this id; scores and credit are joined by it: a row was repeated to "
                "fill a batch, or two runs share a seed",
            )
            return found.findings
        self._seen.add(name)
        start, seeds = facts.get("start") or {}, facts.get("seeds") or {}
        key, first_key = start.get("state_key"), episode.get_infos(0).get("state_key") if len(episode) else None
        if key is not None and first_key is not None and key != first_key:
            found.error(
                "start-moved",
                f"it starts from the state {key} and acts first in {first_key}; something acted between the fork and "
                "the first action, or the key covers what should not count (time, session ids, noise)",
                step=0,
            )
        member = _Member(episode.id_, facts.get("sample_id"), facts.get("policy"), seeds.get("environment"), key)
        group_id = facts.get("group_id")
        if group_id is not None and (first := self._groups.setdefault(group_id, member)) is not member:
            _check_group(found, group_id, first, member, start.get("verified") is not False)
        return found.findings


def _check_group(found: Found, group_id: str, first: _Member, member: _Member, is_verified: bool) -> None:
    """A group is one policy on one sample from one start; the first thing that differs explains the rest."""
    if member.sample_id != first.sample_id:
        found.error(
            "mixed-groups",
            f"it is of sample {member.sample_id!r} and {first.rollout_id} of {first.sample_id!r}, both in group "
            f"{group_id!r}; their scores are compared although the tasks differ",
        )
    elif member.policy != first.policy:
        found.error(
            "mixed-groups",
            f"it is by {member.policy!r} and {first.rollout_id} by {first.policy!r}, both in group {group_id!r}; the "
            "baseline of one policy is another's",
        )
    elif None not in (member.start_key, first.start_key) and member.start_key != first.start_key:
        report = found.error if is_verified else found.warn
        report(
            "mixed-starts",
            f"it starts from the state {member.start_key} and {first.rollout_id} from {first.start_key}, both in group "
            f"{group_id!r}; the world was reset with another seed, or a fork does not copy its state",
        )
    elif None not in (member.environment_seed, first.environment_seed) and (
        member.environment_seed != first.environment_seed
    ):
        found.error(
            "mixed-seeds",
            f"its environment seed is {member.environment_seed} and that of {first.rollout_id} {first.environment_seed}"
            f", both in group {group_id!r}; the seed of the environment belongs to the group",
        )


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
