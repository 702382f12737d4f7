"""`check_episode`: the contract of episodes and their tokens as a program, in messages that name the likely cause.

It finds what trains a model on something it never did: a history that was tokenised again, a mask beside its tokens,
the log-probability of another token, credit on an observation, groups whose starts differ, stale weights. One fault is
one finding: what only follows from it is not reported. `check_group` compares episodes, `check_rows` proves a batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.agent.models import StepData, StopReason
from reward_kit.agent.policy_interface import tool_calls_of
from reward_kit.checks.findings import Finding, Found
from reward_kit.checks.sequences import (
    TOLERANCE,
    LogprobsOf,
    check_prefixes,
    check_tokens,
    check_versions,
    is_in_segments,
    rows_of,
)
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, did_you_mean


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


Credited = StepData | Mapping[str, Any]
"""A step with its credit: `StepData`, or a line of `credit.jsonl`."""

_SAME = 1e-9


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
