"""Our reward manager for verl's reward loop: each finished rollout is scored at once, many at a time.

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
from reward_kit.integrations.verl.held_reward import SECTION, HeldReward, RewardOptions, RowRequests, told
from reward_kit.rl.reward_batches import RewardBatch

NAME = "reward_kit"
_numbers = itertools.count()


def register_manager() -> None:
    """Puts the manager into the registry of verl's reward loop, under "reward_kit"."""
    from verl.experimental.reward_loop.reward_manager import register

    register(NAME)(RewardKitManager)


class RewardKitManager:
    """Scores the rows that verl's reward loop brings, as soon as each is there.

    Calls run concurrently in an `AsyncRewardAgent`, with its limits and deadlines. The reward sees the prompt's chat
    and the answer, or the whole episode where the rollout brings it along (`reward_kit_episode`, in the row or in the
    `extra_fields` of its agent loop). A rollout without a score raises, and verl goes on without it; or its score is
    NaN (`on_unscored: mask`), and reward_kit's trainers leave it out of the loss. It is never 0.0.

    Args:
        config: verl's. `reward.reward_kit` has `reward`, `folder` and the keys of `RewardOptions`; without `reward`
            verl's own `reward.custom_reward_function` is taken, which runs in this process.
        tokenizer: decodes prompts and answers.
        compute_score: what verl has loaded.
        reward_router_address: of verl's reward model, which our rewards do not use.
        reward_model_tokenizer: likewise.

    Raises:
        ConfigError: no reward is named or it cannot be loaded, or a key of the section is unknown.
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
        named, folder = section.pop("reward", None), section.pop("folder", None)
        options = RewardOptions.of(section, SECTION)
        if named is None:
            named, options = _loaded_by_verl(config, compute_score, options)
        self.held = HeldReward(named, options, Path(folder) if folder else None)
        self._requests = RowRequests(tokenizer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """What verl asks of one rollout: `reward_score` and `reward_extra_info`, of its last row.

        Raises:
            RewardError: it is unscored, and `on_unscored` is "raise".
        """
        # A tokenizer is slow, and this loop serves all the other rollouts meanwhile.
        request = (await asyncio.to_thread(self._requests.of, data[-1:]))[0]
        request = replace(request, rollout_id=f"{request.rollout_id}/{next(_numbers)}")
        found = told(await self.held.score(request), self.held.options, f"reward {self.held.name!r}")
        scored = float(not np.isnan(found["score"]))
        return {"reward_score": found["score"], "reward_extra_info": {**found, "is_scored": scored}}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Tensor:
        """(B,T) each score on the last token that was sampled in its row; where none was, a row gets nothing.

        A score of NaN stands there as NaN, so that nobody takes it for a zero.
        """
        batch, scores_B = RewardBatch.of(data), np.array(scores, dtype=np.float64)
        rewards = batch.placed(scores_B)
        lost = torch.from_numpy(np.isnan(scores_B)).to(rewards.device)
        last = torch.from_numpy(batch.last_B).to(rewards.device).clamp(min=0)
        rewards[lost, last[lost]] = float("nan")
        return rewards


def _loaded_by_verl(config: Any, compute_score: Any, options: RewardOptions) -> tuple[Any, RewardOptions]:
    """The reward that verl has loaded of the user's file, and its `reward_kwargs` as options."""
    if not config.reward.custom_reward_function.path:
        raise ConfigError(
            f"name a reward: +{SECTION}.reward=file.py:function, or reward.custom_reward_function.path and .name"
        )
    if not isinstance(compute_score, functools.partial):
        return compute_score, options
    function, kwargs = compute_score.args
    return function, replace(options, options={**kwargs, **options.options})
