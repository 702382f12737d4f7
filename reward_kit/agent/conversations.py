"""A conversation that one already has as an episode: each assistant message is a step, and nobody rewarded any."""

from __future__ import annotations

from collections.abc import Sequence

from reward_kit.agent.chat_actions import action_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message


def episode_of(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    """The episode, terminated. Its `custom_data` is left to the caller.

    What was said before the first action is its first observation, and what followed an action the next one.
    """
    episode = SingleAgentEpisode(rollout_id)
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    episode.add_messages(messages)
    episode.assistant_turns.extend(turns)
    episode.add_env_reset(_shown(messages[: turns[0] if turns else len(messages)]))
    for t, turn in enumerate(turns):
        episode.add_env_step(_shown(episode.answers_to(t)), action_of(messages[turn]), None)
    episode.is_terminated = True
    return episode


def _shown(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages)
