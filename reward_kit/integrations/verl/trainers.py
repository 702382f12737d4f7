"""verl's trainers with credit for each step: `trainer.v1.trainer_mode=reward_kit_sync` and two similar modes.

They differ from verl's own trainers (`sync`, `colocate_async`, `separate_async`) only before advantages are computed.
They fetch the columns that an agent loop has put into `extra_fields`, because reward-kit's estimators need these
columns. They also exclude unscored rows, whose `rm_scores` are NaN, from the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import STEP_COLUMNS, objects
from reward_kit.integrations.verl.estimators import PREFIX, is_ours, use_row_columns
from reward_kit.integrations.verl.trainer_rewards import TrainerRewards, import_verl_queue, parse_sessions
from reward_kit.tokens.columns import Array

MODES = ("sync", "colocate_async", "separate_async")


def register_trainers() -> None:
    """Add `reward_kit_sync`, `reward_kit_colocate_async` and `reward_kit_separate_async` to verl's registry."""
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

    for mode in MODES:
        register_trainer(PREFIX + mode)(trainer_with_credit(get_trainer_cls(mode), mode))


@functools.cache
def trainer_with_credit(base: Any, mode: str) -> Any:
    """Return a verl trainer with credit for each step.

    verl uses `mode` to find the buffer and the options of the trainer.
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
            columns = _row_columns(batch, with_steps=is_ours(estimator))
            unscored_B = np.array([isinstance(reward, float) for reward in columns["episode_rewards"]], dtype=np.bool_)
            if unscored_B.any():
                _leave_out_of_loss(batch, unscored_B, estimator)
            metrics["reward_kit/unscored_rows"] = int(unscored_B.sum())
            with use_row_columns(columns):
                return super()._compute_advantage(batch, metrics)

    TrainerWithCredit.__name__ = TrainerWithCredit.__qualname__ = f"{base.__name__}WithCredit"
    return TrainerWithCredit


def _row_columns(batch: Any, *, with_steps: bool) -> dict[str, Any]:
    """Return the columns of a batch in verl's queue in the form that `row_credit` requires.

    A trajectory is a session. Its rows are the outputs of its agent loop, which are numbered in their keys
    (`uid_session_output`). `episode_rewards` is NaN for a session whose `rm_scores` contain NaN. For other sessions, it
    is None.
    """
    data = _fetch(batch, batch.keys, "response_mask", "rm_scores")
    sessions, ends = parse_sessions(batch.keys)
    scores = zip(sessions, data["rm_scores"].unbind(), strict=True)
    unscored = {session for session, score in scores if torch.isnan(score).any()}
    columns: dict[str, Any] = {
        "traj_uid": sessions,
        "ends_episode": ends,
        "episode_rewards": objects([float("nan") if session in unscored else None for session in sessions]),
        "sampled_mask": torch.nn.utils.rnn.pad_sequence(list(data["response_mask"].unbind()), batch_first=True),
    }
    if not with_steps:
        return columns
    fetched = _fetch(batch, batch.keys, "extra_fields")
    if "extra_fields" not in set(fetched.keys()):
        raise ConfigError(
            "the rows in verl's queue have no 'extra_fields'; for each output, the agent loop must store in them "
            "the state before each action ('state_keys'), the reward of each action ('step_rewards') "
            "and the number of tokens of each action ('action_lengths')"
        )
    rows: list[Mapping[str, Any]] = [dict(fields or {}) for fields in fetched["extra_fields"]]
    for name in STEP_COLUMNS:
        if any(fields.get(name) is not None for fields in rows):
            columns[name] = objects([fields.get(name) for fields in rows])
    if "state_keys" in columns and "steps" not in columns:
        # If the steps have no numbers, they are numbered across the rows of a session.
        steps: list[list[int]] = [[] for _ in rows]
        reached: dict[str, int] = {}
        for row in sorted(range(len(rows)), key=lambda row: int(batch.keys[row].rsplit("_", 1)[1])):
            start = reached.get(sessions[row], 0)
            reached[sessions[row]] = start + len(columns["state_keys"][row] or ())
            steps[row] = list(range(start, reached[sessions[row]]))
        columns["steps"] = objects(steps)
    return columns


def _fetch(batch: Any, keys: list[str], *fields: str) -> Any:
    return import_verl_queue().kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(fields))


def _leave_out_of_loss(batch: Any, unscored_B: Array, estimator: Any) -> None:
    """Mask unscored rows in verl's queue, because the actor reads its rows from the queue."""
    if not is_ours(estimator):
        raise ConfigError(
            f"{int(unscored_B.sum())} rows are unscored, but verl's estimator {estimator!r} would count them as 0.0; "
            "use an estimator from reward_kit, or set on_unscored: raise, which removes the rows of such rollouts"
        )
    from tensordict import TensorDict

    keys = [key for key, is_unscored in zip(batch.keys, unscored_B, strict=True) if is_unscored]
    data = _fetch(batch, keys, "response_mask", "rm_scores")
    masks, scores = (
        torch.nested.as_nested_tensor([torch.zeros_like(row) for row in data[name].unbind()], layout=torch.jagged)
        for name in ("response_mask", "rm_scores")
    )
    fields = TensorDict({"response_mask": masks, "loss_mask": masks, "rm_scores": scores}, batch_size=len(keys))
    import_verl_queue().kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)
