"""A conversation with a simulated user as an episode of two agents, so that either side can be looked at or trained.

The environment's time goes on with each action of either. The agent's part is the recorded episode itself: its steps,
its conversation, its tokens. The user's observations are what the agent said to them, their actions what they answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from reward_kit.agent.log_probs import write_log_probs
from reward_kit.agent.simulated_user import GREETING, NO_ANSWER, heard_by_user
from reward_kit.episodes.episode_data import REWARD
from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message

AGENT, USER = "agent", "user"


class _Turn(NamedTuple):
    """One message of the user as it is recorded: what the agent read of it, None where they left without a word."""

    message: Message | None
    facts: Mapping[str, Any]

    def action(self) -> dict[str, Any]:
        """What the user did."""
        return {"type": "text", "content": self.message.text} if self.message else {"type": "terminate"}


def dialogue_of(episode: SingleAgentEpisode) -> MultiAgentEpisode:
    """The recorded conversation as an episode of the agents "agent" and "user".

    What the user said carries its raw text, usage and token ids, where they are known, as extra model outputs and in
    the tokens of the user's own episode. Where the user spoke last, that action is complete if the task ended with it,
    and hangs if the conversation was cut off or goes on. Nobody rewards the user: their rewards are unknown.

    Args:
        episode: as the worker records it, or read from a run. Its conversation and tokens are shared, not copied. A
            user who never came to speak is not in the dialogue.

    Raises:
        EpisodeError: what is recorded of the user's tokens contradicts itself.
    """
    dialogue = MultiAgentEpisode(episode.id_, agent_module_ids={AGENT: AGENT, USER: USER})
    if not episode.is_reset:
        return dialogue
    opening = _opening(episode)
    if opening is None:
        dialogue.add_env_reset(observations={AGENT: episode.get_observations(0)}, infos={AGENT: episode.get_infos(0)})
    else:
        dialogue.add_env_reset(observations={USER: GREETING})
        _add_turn(dialogue, episode, opening, t=-1)
    for t in range(len(episode)):
        _add_step(dialogue, episode, t)
    dialogue.is_terminated, dialogue.is_truncated = episode.is_terminated, episode.is_truncated
    dialogue.custom_data = episode.custom_data
    _share(dialogue.agent_episodes[AGENT], episode)
    if USER in dialogue.agent_ids:
        _write_conversation(dialogue.agent_episodes[USER], episode)
    return dialogue


def _opening(episode: SingleAgentEpisode) -> _Turn | None:
    """The user's first message, where they began."""
    facts = episode.get_infos(0).get(USER)
    if facts is None:
        return None
    before = _first_messages(episode)
    return _Turn(before[-1] if before and before[-1].role == "user" else None, facts)


def _first_messages(episode: SingleAgentEpisode) -> list[Message]:
    """What was said before the agent's first action. A policy may have made a prompt of its own of it."""
    if given := episode.get_infos(0).get("given_messages"):
        return [Message.model_validate(message) for message in given]
    turns = episode.assistant_turns
    return episode.messages[: turns[0] if len(turns) else len(episode.messages)]


def _turn_after(episode: SingleAgentEpisode, t: int) -> _Turn | None:
    """The user's answer to the t-th action; None where somebody else answered it."""
    facts = episode.get_infos(t + 1).get(USER)
    if facts is None:
        return None
    answers = episode.answers_to(t)
    return _Turn(answers[-1] if answers and answers[-1].role == "user" else None, facts)


def _add_step(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, t: int) -> None:
    """One recorded step: the agent's action alone, or that and the user's answer to it."""
    acts: dict[str, Any] = {"actions": {AGENT: episode.get_actions(t)}}
    outputs = {key: column.get(t) for key, column in episode.extra_model_outputs.items()}
    acts["extra_model_outputs"] = {AGENT: {key: value for key, value in outputs.items() if value is not None}}
    turn = _turn_after(episode, t)
    if turn is not None:
        dialogue.add_env_step({USER: _said(episode, t)}, rewards={}, **acts)
        _add_turn(dialogue, episode, turn, t)
        return
    is_last = t == len(episode) - 1
    heard = {USER: _said(episode, t)} if is_last and episode.get_actions(t).get("type") == "text" else {}
    waits = not heard and USER in dialogue.hanging_actions
    _add_answered(dialogue, episode, t, heard if USER in dialogue.agent_ids else {}, user_waits=waits, **acts)


def _add_turn(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, turn: _Turn, t: int) -> None:
    """The user's answer to the t-th action, and what the agent sees then; for t = -1 the opening."""
    info: dict[str, Any] = {}
    tokens = write_log_probs(turn.facts, dialogue.agent_episodes[USER], info)
    outputs = {"raw_policy_output": turn.facts.get("raw"), **info, **tokens}
    outputs = {key: value for key, value in outputs.items() if value is not None}
    acts = {"actions": {USER: turn.action()}, "extra_model_outputs": {USER: outputs}}
    _add_answered(dialogue, episode, t, {}, user_waits=True, **acts)


def _add_answered(
    dialogue: MultiAgentEpisode,
    episode: SingleAgentEpisode,
    t: int,
    heard: dict[str, Any],
    *,
    user_waits: bool,
    **acts: Any,
) -> None:
    """The environment's step with which the agent sees what came of its t-th action."""
    is_last = t == len(episode) - 1
    agents = {AGENT, USER} if t >= 0 else {USER}
    dialogue.add_env_step(
        {AGENT: episode.get_observations(t + 1), **heard},
        rewards={AGENT: _reward(episode, t)} if t >= 0 else {},
        infos={AGENT: episode.get_infos(t + 1)},
        terminateds=dict.fromkeys(agents, is_last and episode.is_terminated),
        # An action that hangs has no last observation to be cut off at.
        truncateds=dict.fromkeys(agents - {USER} if user_waits else agents, is_last and episode.is_truncated),
        **acts,
    )


def _reward(episode: SingleAgentEpisode, t: int) -> float | None:
    reward: float | None = episode.get_rewards(t)
    return reward if episode.get_infos(t + 1).get(REWARD, reward) is not None else None


def _said(episode: SingleAgentEpisode, t: int) -> str:
    return episode.messages[episode.assistant_turns[t]].text or NO_ANSWER


def _share(agent: SingleAgentEpisode, episode: SingleAgentEpisode) -> None:
    """Let the agent's part have the recorded conversation and tokens."""
    agent.id_, agent.custom_data = episode.id_, episode.custom_data
    agent.messages, agent.assistant_turns, agent.tokens = episode.messages, episode.assistant_turns, episode.tokens
    agent.is_terminated, agent.is_truncated = episode.is_terminated, episode.is_truncated


def _write_conversation(user: SingleAgentEpisode, episode: SingleAgentEpisode) -> None:
    """The conversation from the user's side: their instructions, what they heard, and their own messages as turns."""
    user.id_ = f"{episode.id_}-{USER}"
    opening, before = _opening(episode), _first_messages(episode)
    turns = [opening, *(_turn_after(episode, t) for t in range(len(episode)))]
    instructions = next((turn.facts.get("instructions") for turn in turns if turn is not None), None)
    if instructions:
        user.add_messages([Message(role="system", content=instructions)])
    if opening is not None:
        user.add_messages([Message(role="user", content=GREETING)])
    _write_stretch(user, episode, before, opening)
    for t, turn in enumerate(turns[1:]):
        _write_stretch(user, episode, [episode.messages[episode.assistant_turns[t]], *episode.answers_to(t)], turn)


def _write_stretch(
    user: SingleAgentEpisode, episode: SingleAgentEpisode, said: list[Message], turn: _Turn | None
) -> None:
    """Some messages of the conversation, the last of which may be the user's turn."""
    own = turn.message if turn is not None else None
    start = (episode.custom_data.get("start") or {}).get("fork")
    shown = episode.get_observations(0) if start is not None else ""
    heard = (heard_by_user(message, shown) for message in (said if own is None else said[:-1]))
    user.add_messages(message for message in heard if message is not None)
    if turn is not None:
        user.add_assistant_message(Message(role="assistant", content=own.text if own is not None else ""))
