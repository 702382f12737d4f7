"""Reinforcement learning: losses, the PPO learner, the trainer, reward managers, small models and supervised training.

Names are imported on first use. The submodules are not public.
"""

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.rl.checkpoint import save_batch_for_study
    from reward_kit.rl.kl import AdaptiveKLCoefficient, kl_loss
    from reward_kit.rl.learner.config import LoRAOptions, OffPolicyLimits, PPOConfig
    from reward_kit.rl.loss_terms import GlobalBatch, merge_diagnostics
    from reward_kit.rl.losses import (
        cispo_loss,
        decoupled_ppo_loss,
        entropy_loss,
        gspo_loss,
        ppo_clip_loss,
        truncated_importance_weights,
        value_loss,
    )
    from reward_kit.rl.model_kit.models import (
        TERSE_TEMPLATE,
        build_decoder,
        build_tokenizer,
        compose_embeddings,
        describe,
        load_model,
        save_model,
    )
    from reward_kit.rl.model_kit.sft import (
        DemonstratingPolicy,
        Demonstrations,
        SFTConfig,
        SFTProgress,
        episode_texts,
        fit,
    )
    from reward_kit.rl.ppo import PPOLearner
    from reward_kit.rl.reward_manager import (
        BatchRewardManager,
        DAPORewardManager,
        EpisodeRewardManager,
        NaiveRewardManager,
        PrimeRewardManager,
        load_reward_manager,
    )
    from reward_kit.rl.served_policy import ServedPolicy
    from reward_kit.rl.training.pipelines import Pipeline
    from reward_kit.rl.training.plan import load_plan
    from reward_kit.rl.training.train_file import train
    from reward_kit.rl.training.trainer import Trainer

__all__ = [
    "TERSE_TEMPLATE",
    "AdaptiveKLCoefficient",
    "BatchRewardManager",
    "DAPORewardManager",
    "DemonstratingPolicy",
    "Demonstrations",
    "EpisodeRewardManager",
    "GlobalBatch",
    "LoRAOptions",
    "NaiveRewardManager",
    "OffPolicyLimits",
    "PPOConfig",
    "PPOLearner",
    "Pipeline",
    "PrimeRewardManager",
    "SFTConfig",
    "SFTProgress",
    "ServedPolicy",
    "Trainer",
    "build_decoder",
    "build_tokenizer",
    "cispo_loss",
    "compose_embeddings",
    "decoupled_ppo_loss",
    "describe",
    "entropy_loss",
    "episode_texts",
    "fit",
    "gspo_loss",
    "kl_loss",
    "load_model",
    "load_plan",
    "load_reward_manager",
    "merge_diagnostics",
    "ppo_clip_loss",
    "save_batch_for_study",
    "save_model",
    "train",
    "truncated_importance_weights",
    "value_loss",
]
_MODULES = {
    "checkpoint": "save_batch_for_study",
    "loss_terms": "GlobalBatch merge_diagnostics",
    "kl": "AdaptiveKLCoefficient kl_loss",
    "losses": "cispo_loss decoupled_ppo_loss entropy_loss gspo_loss ppo_clip_loss truncated_importance_weights "
    "value_loss",
    "model_kit.models": "TERSE_TEMPLATE build_decoder build_tokenizer compose_embeddings describe load_model "
    "save_model",
    "model_kit.sft": "DemonstratingPolicy Demonstrations SFTConfig SFTProgress episode_texts fit",
    "learner.config": "LoRAOptions OffPolicyLimits PPOConfig",
    "ppo": "PPOLearner",
    "reward_manager": "BatchRewardManager DAPORewardManager EpisodeRewardManager NaiveRewardManager PrimeRewardManager "
    "load_reward_manager",
    "served_policy": "ServedPolicy",
    "training.pipelines": "Pipeline",
    "training.plan": "load_plan",
    "training.train_file": "train",
    "training.trainer": "Trainer",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
