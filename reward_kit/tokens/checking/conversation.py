"""An episode's tracks, its conversation and its end against the contract: one message for each action, one end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from reward_kit.agent.models import StopReason
from reward_kit.agent.policy_interface import tool_calls_of
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, did_you_mean
from reward_kit.models import Message
from reward_kit.tokens.checking.findings import Found


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
