"""A reward manager for verl's reward loop. It scores each rollout as soon as the rollout is finished.

Many rollouts are scored concurrently.

reward.reward_manager.source=importlib
reward.reward_manager.module.path=pkg://reward_kit.integrations.verl.reward_loop
reward.reward_manager.name=RewardKitManager
+reward.reward_kit.reward=rewards.py:graded
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.compute_score import SECTION, PersistentReward, RewardOptions
from reward_kit.integrations.verl.row_format import RowRequests
from reward_kit.rl.reward_batches import RewardBatch

NAME = "reward_kit"
_numbers = itertools.count()


def register_manager() -> None:
    """Add the manager to the registry of verl's reward loop as "reward_kit"."""
    from verl.experimental.reward_loop.reward_manager import register

    register(NAME)(RewardKitManager)


class RewardKitManager:
    """A reward manager that scores the rows of verl's reward loop as soon as they arrive.

    An `AsyncRewardAgent` calls rewards concurrently and applies its limits and deadlines. The reward receives the chat
    of the prompt and the answer. If the row or the `extra_fields` of its agent loop contain the whole episode
    (`reward_kit_episode`), the reward receives the episode. For an unscored rollout, an error is raised, and verl
    continues without the rollout. If `on_unscored: mask` is set, the score is NaN instead, and reward-kit's trainers
    exclude the rollout from the loss. The score is never 0.0.

    Args:
        config: verl's configuration. `reward.reward_kit` contains `reward`, `folder` and the keys of `RewardOptions`.
            If `reward` is missing, verl's own `reward.custom_reward_function` is used. It runs in this process.
        tokenizer: the tokenizer that decodes prompts and answers.
        compute_score: the reward function that verl has loaded.
        reward_router_address: the address of verl's reward model. It is not used.
        reward_model_tokenizer: the tokenizer of verl's reward model. It is not used.

    Raises:
        ConfigError: If no reward is set, if it cannot be loaded, or if a key of the section is unknown.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        section = dict(config.reward.get(NAME) or {})
        reward, folder = section.pop("reward", None), section.pop("folder", None)
        options = RewardOptions.of(section, SECTION)
        if reward is None:
            if not config.reward.custom_reward_function.path:
                raise ConfigError(
                    f"no reward is set; set +{SECTION}.reward=file.py:function, or "
                    "reward.custom_reward_function.path and .name"
                )
            reward = compute_score
            if isinstance(compute_score, functools.partial):  # verl passes its `reward_kwargs` in this way
                reward, kwargs = compute_score.args
                options = replace(options, options={**kwargs, **options.options})
        self.held = PersistentReward(reward, options, Path(folder) if folder else None)
        self._requests = RowRequests(tokenizer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the `reward_score` and the `reward_extra_info` of a rollout, based on its last row.

        Raises:
            RewardError: If the rollout is unscored and `on_unscored` is "raise".
        """
        # Tokenizers are slow, and this loop must serve all other rollouts in the meantime.
        request = (await asyncio.to_thread(self._requests.of, data[-1:]))[0]
        request = replace(request, rollout_id=f"{request.rollout_id}/{next(_numbers)}")
        score = await self.held.score(request)
        is_scored = float(not np.isnan(score["score"]))
        return {"reward_score": score["score"], "reward_extra_info": {**score, "is_scored": is_scored}}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Tensor:
        """Return a (B, T) array with each score at the last sampled token of its row.

        A row without sampled tokens gets no score. NaN remains NaN, so it is not treated as zero.
        """
        batch, scores_B = RewardBatch.of(data), np.array(scores, dtype=np.float64)
        rewards = batch.placed(scores_B)
        lost = torch.from_numpy(np.isnan(scores_B)).to(rewards.device)
        last = torch.from_numpy(batch.last_B).to(rewards.device).clamp(min=0)
        rewards[lost, last[lost]] = float("nan")
        return rewards
