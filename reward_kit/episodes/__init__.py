"""The record of what happened: episodes, the columns they are made of, and their exact tokens."""

from reward_kit.episodes.columns import Column, RaggedNumbers, RaggedText
from reward_kit.episodes.segments import ActionSpan, EpisodeTokens, Segment, TokenRow, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "ActionSpan",
    "Column",
    "EpisodeTokens",
    "RaggedNumbers",
    "RaggedText",
    "Segment",
    "SingleAgentEpisode",
    "TokenRow",
    "Turn",
]
