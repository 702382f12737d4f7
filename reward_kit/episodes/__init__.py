"""Episodes: records, compact storage and exact tokens.

The modules of this package are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.episodes.allowed_ids import AllowedIds, Ids
    from reward_kit.episodes.columns import InfiniteLookbackBuffer
    from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
    from reward_kit.episodes.record import episode_from_record, episode_to_record, get_attempt
    from reward_kit.episodes.segments import ActionSpan, EpisodeTokens, Segment, TokenRow, Turn
    from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
    from reward_kit.episodes.storage import RaggedNumbers, RaggedText

__all__ = [
    "ActionSpan",
    "AllowedIds",
    "EpisodeTokens",
    "Ids",
    "InfiniteLookbackBuffer",
    "MultiAgentEpisode",
    "RaggedNumbers",
    "RaggedText",
    "Segment",
    "SingleAgentEpisode",
    "TokenRow",
    "Turn",
    "episode_from_record",
    "episode_to_record",
    "get_attempt",
]
_MODULES = {
    "allowed_ids": "AllowedIds Ids",
    "columns": "InfiniteLookbackBuffer",
    "multi_agent_episode": "MultiAgentEpisode",
    "record": "get_attempt episode_from_record episode_to_record",
    "segments": "ActionSpan EpisodeTokens Segment TokenRow Turn",
    "single_agent_episode": "SingleAgentEpisode",
    "storage": "RaggedNumbers RaggedText",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
