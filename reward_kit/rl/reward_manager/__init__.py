"""From scores on episodes or answers to rewards on tokens, in the shape of verl's reward managers."""

from reward_kit.rl.reward_manager.managers import (
    BatchRewardManager,
    DAPORewardManager,
    EpisodeRewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    RewardManager,
    load_reward_manager,
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
