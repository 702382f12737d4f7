"""What every reward manager does: takes ready rewards, or scores a batch, places the scores and shows examples."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.reward_manager.batches import (
    Floats,
    Placed,
    RewardBatch,
    as_tensor,
    entries_of,
    names_of,
    tensors_of,
)
from reward_kit.rl.reward_manager.reports import Column, Echo, ExampleLog, Tokenizer
from reward_kit.rl.reward_manager.statistics import RunningStatistics

logger = logging.getLogger("reward_kit.rl")


class Scores(NamedTuple):
    """What a manager found for a batch.

    Attributes:
        scores_B: what is placed on each row's last valid token; NaN where nothing is.
        info: facts for each row, (B,) each.
        step_rewards: rewards besides; None where there are none.
        statistics: those that now hold; None where none are kept.
    """

    scores_B: Floats
    info: dict[str, Column]
    step_rewards: Placed | None = None
    statistics: RunningStatistics | None = None


class RewardManager(ABC):
    """What all reward managers do: take ready rewards as they are, else score, place, and show examples.

    Args:
        tokenizer: decodes what is shown, and what is scored.
        num_examine: how many rows of each data source are shown of a batch, at most.
        seed: of the generator that chooses them.
        echo: takes each line that is shown; by default the logger "reward_kit.rl", at the level INFO.

    Raises:
        ConfigError: an option is wrong.
    """

    skips_special_tokens = True

    def __init__(self, tokenizer: Tokenizer, num_examine: int, *, seed: int = 0, echo: Echo | None = None) -> None:
        self.tokenizer = tokenizer
        self.statistics = RunningStatistics()
        self._examples = ExampleLog(tokenizer, num_examine, seed, echo)

    @overload
    def __call__(self, data: Any, return_dict: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, data: Any, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: Any, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """The rewards of a batch: float32, shaped like `responses` (in our names: `action_mask`), on its device.

        Args:
            data: a batch (`reward_managers.batches`). Where it has `rm_scores`, they are the rewards.
            return_dict: give `reward_tensor`, and `reward_extra_info`: for each fact an array with one item per row.

        Raises:
            ConfigError: the batch lacks something; nothing is kept of such a call.
            RewardError: the tokenizer cannot decode what is to be shown.
        """
        rewards, info = _given(data) if "rm_scores" in names_of(data) else self._rewarded(data)
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards

    def _rewarded(self, data: Any) -> tuple[Tensor, dict[str, Column]]:
        batch = RewardBatch.of(data)
        found = self._score(batch)
        rewards = batch.placed(found.scores_B, found.step_rewards)
        if empty := int(batch.is_empty_B.sum()):
            logger.info("%d of %d rows have no valid token and get no reward", empty, len(batch))
        self._examples.show(batch, found.scores_B, self.skips_special_tokens)
        # Last, so that a call that fails leaves nothing behind, and can be made again.
        self.statistics = found.statistics or self.statistics
        return rewards, {**found.info, "score": found.scores_B, "is_empty": batch.is_empty_B}

    @abstractmethod
    def _score(self, batch: RewardBatch) -> Scores:
        """The scores of a batch. It changes nothing."""


def _given(data: Any) -> tuple[Tensor, dict[str, Column]]:
    """Rewards that the batch brings along as `rm_scores`, and the facts that it names as belonging to them."""
    rewards = as_tensor("rm_scores", data.batch["rm_scores"])
    wanted = tensors_of(data, ("responses", "action_mask"))
    shape = next((tuple(mask.shape) for mask in wanted.values()), tuple(rewards.shape))
    if rewards.dim() != 2 or tuple(rewards.shape) != shape:
        raise ConfigError(f"'rm_scores' are rewards on tokens, {shape}; got {tuple(rewards.shape)}")
    scores = rewards.detach().reshape(len(rewards), -1).sum(dim=1).to("cpu", torch.float64).numpy()
    keys = (getattr(data, "meta_info", None) or {}).get("reward_extra_keys", ())
    others = entries_of(data)
    if missing := [key for key in keys if key not in others]:
        raise ConfigError(f"reward_extra_keys names {missing[0]!r}{did_you_mean(missing[0], others)}")
    named = {key: others[key] for key in keys}
    return rewards, {"score": scores, "is_scored": ~np.isnan(scores), **named}
