"""An episode's tracks, its conversation and its end against the contract: one message for each action, one end."""

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
from reward_kit.models import Message

__all__ = ["Finding", "check_episode", "check_group"]


def are_tracks_whole(found: Found, episode: SingleAgentEpisode) -> bool:
    """Whether T steps have T + 1 observations; what else is asked of the episode makes no sense before."""
    try:
        episode.validate()
    except EpisodeError as error:
        found.error(
            "track-lengths",
            f"{error}; the last observation was left out, or an action was recorded without its outcome",
        )
        return False
    return True


def check_rewards(found: Found, episode: SingleAgentEpisode) -> None:
    """The environment's rewards are numbers, or None."""
    for t, reward in enumerate(episode.environment_rewards()):
        if reward is not None and not math.isfinite(reward):
            found.error(
                "reward-not-finite",
                f"the environment's reward is {reward}; it would make every sum and baseline {reward}: leave it None",
                step=t,
            )


def check_end(found: Found, episode: SingleAgentEpisode) -> None:
    """Terminated or truncated, as the stop reason says, with a failure where something broke."""
    facts = facts_of(episode)
    reason, failure = facts.get("stop_reason"), facts.get("failure")
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
            f"and is marked {_marked(episode)}; one of them was changed by hand",
        )
    elif reason is not None and not episode.is_done:
        found.error("stop-reason", f"it stopped by {reason!r} and is marked as going on; its end was not recorded")
    elif failure and reason != StopReason.ERROR:
        found.error("stop-reason", f"it carries a failure ({failure.get('where')}) and says it stopped by {reason!r}")
    elif reason == StopReason.ERROR and not failure:
        found.error("stop-reason", "it stopped by 'error' and carries no failure; what broke cannot be told")


def _marked(episode: SingleAgentEpisode) -> str:
    return "terminated" if episode.is_terminated else "truncated" if episode.is_truncated else "as going on"


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
    called, done = [call.function.name for call in said.tool_calls or ()], _names(episode, t)
    if done is not None and called != done:
        found.error(
            "action-and-message",
            f"the action calls {json.dumps(done)} and its message {json.dumps(called)}; the message was written anew, "
            "or belongs to another step",
            step=t,
        )
    _check_answers(found, episode, t, said, answers)


def _names(episode: SingleAgentEpisode, t: int) -> list[str] | None:
    """The tools that the action calls; None where it is no action of ours, as in an episode made by hand."""
    action = episode.get_actions(t)
    if not isinstance(action, dict) or "type" not in action:
        return None
    return [str(call.get("name")) for call in tool_calls_of(action)]


def _check_answers(
    found: Found, episode: SingleAgentEpisode, t: int, said: Message, answers: Sequence[Message]
) -> None:
    calls = [call.id for call in said.tool_calls or ()]
    told = [message.tool_call_id for message in answers if message.role == "tool"]
    open_calls = [call for call in calls if call not in told]
    twice = [call for call in dict.fromkeys(calls) if told.count(call) > calls.count(call)]
    # An answer without an id can be to any call; a transcript may end, or an agent of its own be stopped, on a call.
    unnamed = sum(answer is None for answer in told)
    if len(open_calls) > unnamed and not (t == len(episode) - 1 and _may_end_on_a_call(episode, t)):
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


def _may_end_on_a_call(episode: SingleAgentEpisode, t: int) -> bool:
    outputs = episode.extra_model_outputs
    own = episode.get_extra_model_outputs("own_account", t) if "own_account" in outputs else None
    return bool(own) or facts_of(episode).get("stop_reason") == StopReason.RECORDED


Credited = StepData | Mapping[str, Any]
"""A step with its credit: `StepData`, or a line of `credit.jsonl`."""
_SAME = 1e-9


class _Credit(NamedTuple):
    """What is said of one step; None where nothing is."""

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
    """Check what an estimator said of one episode.

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
    _check_joined(found, episode, per_step)
    if facts_of(episode).get("failure"):
        scored = False
    if scored is False:
        _check_unscored(found, per_step)
    elif any(_is_credited(credit) for credit in per_step) or scored:
        _check_scored(found, per_step)


def _is_credited(credit: _Credit) -> bool:
    return credit.advantage is not None or credit.return_to_go is not None


def _check_joined(found: Found, episode: SingleAgentEpisode, per_step: Sequence[_Credit]) -> None:
    """The credit is this episode's."""
    group, rewards = facts_of(episode).get("group_id"), episode.environment_rewards()
    for t, credit in enumerate(per_step):
        if group is not None and credit.group_id is not None and credit.group_id != group:
            found.error(
                "group-id",
                f"credited in group {credit.group_id!r}, and the episode is of {group!r}; its baseline is another's",
                step=t,
            )
            return
        if credit.is_view and credit.environment_reward != rewards[t] and not _are_nan(credit, rewards[t]):
            found.error(
                "environment-reward",
                f"the step has the environment's reward {credit.environment_reward} and the record {rewards[t]}; "
                "rewards moved by one step, or were changed after the episode (a view is never written back)",
                step=t,
            )
            return


def _are_nan(credit: _Credit, reward: float | None) -> bool:
    return credit.environment_reward != credit.environment_reward and reward != reward


def _check_unscored(found: Found, per_step: Sequence[_Credit]) -> None:
    for t, credit in enumerate(per_step):
        if credit.advantage is not None:
            found.error(
                "advantage-unscored",
                f"the episode is unscored and the step has the advantage {credit.advantage:.4g}; a missing score "
                "counted as 0: unscored is None and takes no part",
                step=t,
            )
            return


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
    """What is kept of the first episode of a group, to compare the others with."""

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
        """What is wrong with an episode beside those that were added before."""
        found, facts = Found.about_episode(episode.id_), facts_of(episode)
        if (name := (episode.id_, facts.get("attempt") or 0)) in self._seen:
            found.error(
                "duplicate-rollout",
                "another episode of the batch has this id; scores and credit are joined by it: a row was repeated to "
                "fill a batch, or two runs share a seed",
            )
            return found.findings
        self._seen.add(name)
        _check_own_start(found, episode)
        group_id, member = facts.get("group_id"), _member(episode)
        if group_id is not None and (first := self._groups.setdefault(group_id, member)) is not member:
            is_verified = (facts.get("start") or {}).get("verified") is not False
            _check_group(found, group_id, first, member, is_verified)
        return found.findings


def _member(episode: SingleAgentEpisode) -> _Member:
    facts = facts_of(episode)
    seeds, start = facts.get("seeds") or {}, facts.get("start") or {}
    known = (facts.get("sample_id"), facts.get("policy"), seeds.get("environment"), start.get("state_key"))
    return _Member(episode.id_, *known)


def _check_own_start(found: Found, episode: SingleAgentEpisode) -> None:
    """The state in which the first action was taken is the one that the group's start was verified by."""
    key = (facts_of(episode).get("start") or {}).get("state_key")
    first = episode.get_infos(0).get("state_key") if len(episode) else None
    if key is not None and first is not None and key != first:
        found.error(
            "start-moved",
            f"it starts from the state {key} and acts first in {first}; something acted between the fork and the first "
            "action, or the key covers what should not count (time, session ids, noise)",
            step=0,
        )


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
        What is wrong, [] where nothing was found. "error" breaks the contract.
    """
    found, tokens = Found.about_episode(episode.id_), episode.tokens
    check_end(found, episode)
    if not are_tracks_whole(found, episode):
        return found.findings
    is_part = episode.t_started > 0 or episode.rewards.lookback > 0
    check_rewards(found, episode)
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
    first = episodes[0] if episodes else None
    for episode in episodes[1:]:
        group_id, expected = facts_of(episode).get("group_id"), facts_of(episodes[0]).get("group_id")
        if first is not None and group_id != expected:
            found = Found.about_episode(episode.id_)
            found.error(
                "mixed-groups",
                f"its group id is {group_id!r} and that of {first.id_} {expected!r}; groups were cut by position, and "
                "an episode before them is missing",
            )
            findings += found.findings
    return findings
