"""verl's trainers with credit for steps: `trainer.v1.trainer_mode=reward_kit_sync` and its two siblings.

They are verl's own (`sync`, `colocate_async`, `separate_async`) but for the moment before advantages. There the row
columns that an agent loop put into `extra_fields` are fetched for our estimators, and rows that a reward could not
score, whose `rm_scores` are NaN, are taken out of the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import STEP_COLUMNS, objects
from reward_kit.integrations.verl.estimators import PREFIX, is_ours, rows_beside
from reward_kit.integrations.verl.trainer_rewards import TrainerRewards, queue_of_verl, sessions_of
from reward_kit.tokens.columns import Array

MODES = ("sync", "colocate_async", "separate_async")


def register_trainers() -> None:
    """Puts `reward_kit_sync`, `reward_kit_colocate_async` and `reward_kit_separate_async` into verl's registry."""
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

    for mode in MODES:
        register_trainer(PREFIX + mode)(trainer_with_credit(get_trainer_cls(mode), mode))


@functools.cache
def trainer_with_credit(base: Any, mode: str) -> Any:
    """A trainer of verl with credit for steps.

    Args:
        base: verl's class.
        mode: its name, by which verl finds the class of its buffer and its options.
    """

    class TrainerWithCredit(base):
        def __init__(self, config: Any) -> None:
            config.trainer.v1.trainer_mode = mode
            super().__init__(config)

        def _setup(self) -> None:
            super()._setup()
            if (self.config.reward.get("reward_kit") or {}).get("in_trainer"):
                self.reward_loop_manager = TrainerRewards(self.config, self.tokenizer)

        def _compute_reward_colocate(self, batch: Any, metrics: dict[str, Any] | None = None) -> Any:
            manager: Any = self.reward_loop_manager
            if isinstance(manager, TrainerRewards):
                manager.score(batch)
                return batch
            return super()._compute_reward_colocate(batch, metrics)

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            estimator = self.config.algorithm.adv_estimator
            columns = row_columns_of(batch, with_steps=is_ours(estimator))
            unscored = unscored_rows(columns)
            if unscored.any():
                _leave_out_of_loss(batch, unscored, estimator)
            metrics["reward_kit/unscored_rows"] = int(unscored.sum())
            with rows_beside(columns):
                return super()._compute_advantage(batch, metrics)

    TrainerWithCredit.__name__ = TrainerWithCredit.__qualname__ = f"{base.__name__}WithCredit"
    return TrainerWithCredit


def row_columns_of(batch: Any, *, with_steps: bool) -> dict[str, Any]:
    """The row columns of a batch in verl's queue, as `row_credit` wants them.

    A trajectory is a session, and its rows are the outputs of its agent loop, numbered in their keys
    (`uid_session_output`). `episode_rewards` are NaN for a session with a row whose `rm_scores` are, else None.

    Args:
        batch: verl's `KVBatchMeta`.
        with_steps: also what `extra_fields` says of the steps.

    Raises:
        ConfigError: a row has no `extra_fields`.
    """
    data = _fetch(batch, ["response_mask", "rm_scores"])
    masks, scores = list(data["response_mask"].unbind()), list(data["rm_scores"].unbind())
    sessions, ends = sessions_of(batch.keys)
    lost = {session for session, score in zip(sessions, scores, strict=True) if torch.isnan(score).any()}
    columns = {
        "traj_uid": sessions,
        "ends_episode": ends,
        "episode_rewards": objects([np.nan if session in lost else None for session in sessions]),
        "sampled_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
    }
    return {**columns, **_step_columns(batch)} if with_steps else columns


def unscored_rows(columns: Mapping[str, Any]) -> Array:
    """(B,) whether a row is of a session without a score, whose `episode_rewards` are NaN and not None."""
    return np.array([said is not None and np.isnan(said) for said in columns["episode_rewards"]], dtype=np.bool_)


def _fetch(batch: Any, fields: list[str]) -> Any:
    return queue_of_verl().kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _step_columns(batch: Any) -> dict[str, Array]:
    """What the rows' `extra_fields` say of their actions; steps that they do not number count on from row to row."""
    fetched = _fetch(batch, ["extra_fields"])
    if "extra_fields" not in set(fetched.keys()):
        raise ConfigError(
            "the rows in verl's queue have no 'extra_fields'; the agent loop says there, for each output, in which "
            "state each action was taken ('state_keys'), what it earned ('step_rewards') and its tokens "
            "('action_lengths')"
        )
    said: list[Mapping[str, Any]] = [dict(fields or {}) for fields in fetched["extra_fields"]]
    columns = {
        name: objects([fields.get(name) for fields in said])
        for name in STEP_COLUMNS
        if any(fields.get(name) is not None for fields in said)
    }
    if "state_keys" in columns and "steps" not in columns:
        columns["steps"] = _numbered(batch.keys, [len(states or ()) for states in columns["state_keys"]])
    return columns


def _numbered(keys: Sequence[str], counts: Sequence[int]) -> Array:
    steps: list[list[int]] = [[] for _ in keys]
    reached: dict[str, int] = {}
    for row in sorted(range(len(keys)), key=lambda row: int(keys[row].rsplit("_", 1)[1])):
        session = keys[row].rsplit("_", 1)[0]
        start = reached.get(session, 0)
        steps[row] = list(range(start, start + counts[row]))
        reached[session] = start + counts[row]
    return objects(steps)


def _leave_out_of_loss(batch: Any, unscored_B: Array, estimator: Any) -> None:
    """Masks rows without a score, in verl's queue, from where its actor reads them."""
    if not is_ours(estimator):
        raise ConfigError(
            f"{int(unscored_B.sum())} rows are unscored, and verl's estimator {estimator!r} would count them as 0.0: "
            "use one of reward_kit's, or let the reward raise (on_unscored: raise), so that they have no rows"
        )
    from tensordict import TensorDict

    keys = [key for key, is_lost in zip(batch.keys, unscored_B, strict=True) if is_lost]
    data = queue_of_verl().kv_batch_get(
        keys=keys, partition_id=batch.partition_id, select_fields=["response_mask", "rm_scores"]
    )
    empty = [torch.zeros_like(mask) for mask in data["response_mask"].unbind()]
    masks = torch.nested.as_nested_tensor(empty, layout=torch.jagged)
    zeros = torch.nested.as_nested_tensor(
        [torch.zeros_like(score) for score in data["rm_scores"].unbind()], layout=torch.jagged
    )
    fields = TensorDict({"response_mask": masks, "loss_mask": masks, "rm_scores": zeros}, batch_size=len(keys))
    queue_of_verl().kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
