"""The record of what happened: episodes, the columns they are made of, and their exact tokens."""

from reward_kit.episodes.columns import Column
from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.episodes.segments import ActionSpan, EpisodeTokens, Segment, TokenRow, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.episodes.storage import RaggedNumbers, RaggedText

__all__ = [
    "ActionSpan",
    "Column",
    "EpisodeTokens",
    "MultiAgentEpisode",
    "RaggedNumbers",
    "RaggedText",
    "Segment",
    "SingleAgentEpisode",
    "TokenRow",
    "Turn",
]
