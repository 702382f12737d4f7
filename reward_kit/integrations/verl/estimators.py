"""Advantage estimators for verl's registry. Select one with, for example, `algorithm.adv_estimator=reward_kit_gigpo`.

verl passes only the rewards, the mask, `uid` and the configuration to an estimator. These estimators need additional
batch columns, which `with use_row_columns(columns):` makes available. `compute_advantage` does this for a `DataProto`,
and `trainers` does it in verl's trainer. `row_credit` does not need verl.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reward_kit.credit.estimators import ESTIMATORS
from reward_kit.credit.options import RowsWithScore
from reward_kit.credit.row_credit import ROW_ESTIMATORS, STATE_ESTIMATORS
from reward_kit.credit.row_credit import row_credit as credit_of_rows
from reward_kit.errors import ConfigError

PREFIX = "reward_kit_"
OPTIONS = "reward_kit"
"""The section of verl's `algorithm` that contains the estimator options, such as `+algorithm.reward_kit.omega=0.5`."""
_ROW_COLUMNS: ContextVar[Mapping[str, Any] | None] = ContextVar("reward_kit_rows", default=None)
Estimate = Callable[..., tuple[Tensor, Tensor]]


def row_credit(
    estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    columns: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    rows: RowsWithScore | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns for the tokens of rows. All tokens of an action have the same advantage.

    A trajectory consists of all rows with the same `traj_uid`. If this column is missing, each row is a trajectory.
    Trajectories with the same `uid` form a group. The steps of a trajectory are the actions in its rows.

    The score of a trajectory is the sum of the `token_level_rewards` of the row that ends it according to
    `ends_episode`. If this column is missing, the sum is taken over all its rows. If every row of a trajectory
    contains the whole score (`rows="each"`, as in verl-agent), the score is the mean of the row sums instead. If verl
    has applied a KL penalty, the score includes the penalty. If the score equals `episode_rewards` in float32, the
    exact value is used.

    A trajectory is unscored if its `episode_rewards` or `token_level_rewards` are NaN. An unscored trajectory gets
    zeros and is excluded from its group.

    Args:
        estimator: a name in `ROW_ESTIMATORS`.
        token_level_rewards: a (B, T) array with the rewards of the response tokens.
        response_mask: a (B, T) array that is 1 for tokens to train on. Advantages and returns are 0 elsewhere.
        columns: the columns `uid` and, as created by `step_columns`, `traj_uid`, `state_keys`, `step_rewards`,
            `valid_actions`, `action_lengths` and `steps`. For rows of one action, `anchor_obs`, `rewards` and
            `is_action_valid` are accepted instead of the lists, as in verl-agent. Without `action_lengths`, an action
            is a contiguous run of sampled tokens. If `response_mask` no longer marks the sampled tokens, there must be
            a (B, T) column `sampled_mask` that marks them.
        options: the options of the estimator, keyed by name.
        rows: the rows that contain the score of a trajectory: "last", or "each". If None, the value is "each" for a
            trajectory that has no `ends_episode` and whose rows all sum to `episode_rewards`. Otherwise, it is "last".

    Raises:
        ConfigError: If the estimator or an option is unknown, or if the columns are incomplete or inconsistent.
        InvalidResultError: If a reward is not finite.
    """
    columns = {name: values.cpu() if isinstance(values, Tensor) else values for name, values in columns.items()}
    rewards_BT = token_level_rewards.detach().cpu().double().numpy()
    credit = credit_of_rows(estimator, rewards_BT, (response_mask != 0).cpu().numpy(), columns, options, rows=rows)
    device, dtype = token_level_rewards.device, token_level_rewards.dtype
    advantages, returns = (
        torch.from_numpy(values).to(device, dtype) * response_mask.to(dtype)
        for values in (credit.advantages, credit.returns)
    )
    return advantages, returns


@contextmanager
def use_row_columns(columns: Mapping[str, Any]) -> Iterator[None]:
    """Make row columns available to the estimators during the block. `row_credit` lists the columns."""
    token = _ROW_COLUMNS.set(columns)
    try:
        yield
    finally:
        _ROW_COLUMNS.reset(token)


def is_ours(adv_estimator: object) -> bool:
    """Return True if `algorithm.adv_estimator` is the name of one of these estimators."""
    return adv_estimator in {PREFIX + name for name in ROW_ESTIMATORS}


def compute_advantage(data: Any, adv_estimator: Any, **options: Any) -> Any:
    """Call verl's `compute_advantage`, and provide the `non_tensor_batch` to reward-kit's estimators.

    Unscored rows, whose `episode_rewards` or `token_level_rewards` are NaN, get advantages and returns of 0. No
    estimator sees these rows, so they do not count as 0 in their group.

    Args:
        data: a `DataProto` with `token_level_rewards` and `response_mask`.
        adv_estimator: a name in verl's registry.
        **options: the options of verl's function. `config` is its `algorithm` section.

    Raises:
        ConfigError: As for `row_credit`.
    """
    from verl.trainer.ppo import ray_trainer

    register_estimators()
    is_scored_B = ~data.batch["token_level_rewards"].isnan().any(dim=1).cpu().numpy()
    if "episode_rewards" in data.non_tensor_batch:
        is_scored_B &= ~np.isnan(data.non_tensor_batch["episode_rewards"].astype(np.float64))
    scored = data if is_scored_B.all() else data.select_idxs(is_scored_B)
    if len(scored):
        with use_row_columns(scored.non_tensor_batch):
            scored = ray_trainer.compute_advantage(scored, adv_estimator, **options)
    if scored is data:
        return data
    for name in ("advantages", "returns"):
        values = torch.zeros_like(data.batch["token_level_rewards"])
        if len(scored):
            values[torch.from_numpy(is_scored_B)] = scored.batch[name].to(values.dtype)
        data.batch[name] = values
    return data


def register_estimators() -> None:
    """Add `reward_kit_gigpo` and the other estimators to verl's registry. A second call has no effect."""
    from verl.trainer.ppo.core_algos import register_adv_est

    for name in ROW_ESTIMATORS:
        register_adv_est(PREFIX + name)(estimator_for_verl(name))


@functools.cache
def estimator_for_verl(name: str) -> Estimate:
    """Return an estimator of `ROW_ESTIMATORS` that has the signature required by verl's registry."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        columns = dict(non_tensor_batch or _ROW_COLUMNS.get() or {})
        if not columns and name in STATE_ESTIMATORS:
            raise ConfigError(
                f"{name} needs the states of the rows, but verl itself does not pass these columns to an "
                "estimator; use "
                "reward_kit's trainers, or compute_advantage from reward_kit.integrations.verl.estimators"
            )
        if index is not None:
            columns["uid"] = index
        return row_credit(name, token_level_rewards, response_mask, columns, estimator_options(name, config))

    estimate.__name__ = estimate.__qualname__ = PREFIX + name
    return estimate


def estimator_options(name: str, config: Any) -> dict[str, Any]:
    """Return the options of an estimator.

    They are the options under `algorithm.reward_kit` and verl's `algorithm.gamma`.
    """
    given = dict((config.get(OPTIONS) if config is not None else None) or {})
    if any(not isinstance(key, str) for key in given):
        raise ConfigError(f"algorithm.{OPTIONS} must be a mapping of options of {name!r}, got {given!r:.80}")
    gamma = config.get("gamma") if config is not None else None
    if gamma is not None and "gamma" in inspect.signature(ESTIMATORS[name]).parameters:
        given.setdefault("gamma", float(gamma))
    return given
