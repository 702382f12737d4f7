"""From scores on episodes or answers to rewards on tokens, in the shape of verl's reward managers."""

from reward_kit.rl.reward_manager.base import RewardManager
from reward_kit.rl.reward_manager.episode import EpisodeRewardManager
from reward_kit.rl.reward_manager.registry import load_reward_manager
from reward_kit.rl.reward_manager.single_turn import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "EpisodeRewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardManager",
    "load_reward_manager",
]
