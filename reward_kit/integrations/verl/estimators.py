"""Advantage estimators for verl's registry, such as `algorithm.adv_estimator=reward_kit_gigpo`.

verl passes only the rewards, the mask, `uid` and the configuration to an estimator. These estimators need further
columns of the batch, which `use_row_columns(columns)` provides within its block. `compute_advantage` does this for a
`DataProto`, and `trainers` does it in verl's trainer. `row_credit` does not need verl.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from reward_kit.agent.models import StepData
from reward_kit.credit.options import check_choice
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.rl.reward_manager import RowsWithScore
from reward_kit.rl_helpers import ESTIMATORS
from reward_kit.rl_processing import CreditAssigner
from reward_kit.tokens.columns import Array

ROW_ESTIMATORS = tuple(name for name in ESTIMATORS if name != "gae")
"""The estimators that use rewards, groups and states. verl has its own critic and token-level GAE."""
PREFIX = "reward_kit_"
OPTIONS = "reward_kit"
"""The section of verl's `algorithm` with the estimator's options, such as `+algorithm.reward_kit.omega=0.5`."""
_STATES = ("gigpo",)  # Estimators that use the states.
_ROW_COLUMNS: ContextVar[Mapping[str, Any] | None] = ContextVar("reward_kit_rows", default=None)
Estimate = Callable[..., tuple[Tensor, Tensor]]


class _Action(NamedTuple):
    """An action of a row: the columns of its tokens, and the data of its step."""

    row: int
    columns: Array
    state_key: Any
    reward: float | None
    is_valid: bool


@dataclass(frozen=True, slots=True)
class _Trajectory:
    group: Hashable
    rows: list[int]
    actions: list[_Action]


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

    A trajectory consists of all rows with the same `traj_uid` or, without that column, of one row. Trajectories with
    the same `uid` form a group. The steps of a trajectory are the actions in its rows. Its score is the sum of the
    `token_level_rewards` of the row that ends it according to `ends_episode` or, without that column, of all its rows.
    If every row of a trajectory contains its whole score (`rows="each"`, as in verl-agent), it is the mean of these
    sums instead. This includes the KL penalty if verl has applied one. If the score equals `episode_rewards` in
    float32, the exact value is used. A trajectory whose `episode_rewards` or `token_level_rewards` are NaN is unscored:
    it gets zeros, and is excluded from its group.

    Args:
        estimator: a name in `ROW_ESTIMATORS`.
        token_level_rewards: (B, T) the rewards of the response tokens.
        response_mask: (B, T) 1 for tokens to train on. Advantages and returns are 0 elsewhere.
        columns: the columns `uid` and, as created by `step_columns`, `traj_uid`, `state_keys`, `step_rewards`,
            `valid_actions`, `action_lengths` and `steps`. For rows of one action, `anchor_obs`, `rewards` and
            `is_action_valid` are accepted instead of the lists, as in verl-agent. Without `action_lengths`, an action
            is a contiguous run of sampled tokens. If `response_mask` no longer marks the sampled tokens, `sampled_mask`
            (B, T) must.
        options: the options of the estimator, by name.
        rows: the rows that contain the score of a trajectory: "last", or "each". If None, it is "each" for a trajectory
            without `ends_episode` whose rows all sum up to `episode_rewards`, and otherwise "last".

    Raises:
        ConfigError: If the estimator or an option is unknown, or the columns are incomplete or inconsistent.
        InvalidResultError: If a reward is not finite.
    """
    if estimator not in ROW_ESTIMATORS:
        raise ConfigError(f"unknown row estimator {estimator!r}{did_you_mean(estimator, ROW_ESTIMATORS)}")
    if rows is not None:
        check_choice("rows", rows, get_args(RowsWithScore))
    resolved = CreditAssigner(estimator, **(options or {})).options
    trajectories = _trajectories(estimator, response_mask, columns)
    batch = [
        [
            StepData(
                system_step_index=number,
                observation_data=action.state_key,
                action_taken={},
                # Estimators use only the number of tokens.
                policy_logprobs={"token_ids": [0] * len(action.columns)},
                base_reward=action.reward,
                step_info={"state_key": action.state_key, "is_action_valid": action.is_valid},
            )
            for number, action in enumerate(trajectory.actions)
        ]
        for trajectory in trajectories
    ]
    summed_B = token_level_rewards.detach().to("cpu", torch.float64).sum(dim=1).numpy()
    scores = [_score(trajectory, summed_B, columns, rows) for trajectory in trajectories]
    credit = ESTIMATORS[estimator](batch, scores, group_ids=[each.group for each in trajectories], **resolved)
    actions = [action for trajectory in trajectories for action in trajectory.actions]

    def on_tokens(values_S: Array) -> Tensor:
        values_BT = np.zeros(tuple(token_level_rewards.shape))
        for action, value in zip(actions, values_S.tolist(), strict=True):
            if value == value:  # NaN if unscored
                values_BT[action.row, action.columns] = value
        values = torch.from_numpy(values_BT).to(token_level_rewards.device, token_level_rewards.dtype)
        return values * response_mask.to(token_level_rewards.dtype)

    return on_tokens(credit.advantages_S), on_tokens(credit.returns_S)


def _score(
    trajectory: _Trajectory, summed_B: Array, columns: Mapping[str, Any], rows: RowsWithScore | None
) -> float | None:
    """Return the score of a trajectory, or None if it is unscored. `summed_B` are the sums of the rewards of rows."""
    exact = columns["episode_rewards"][trajectory.rows[0]] if "episode_rewards" in columns else None
    ends = [row for row in trajectory.rows if columns["ends_episode"][row]] if "ends_episode" in columns else []
    acting = list(dict.fromkeys(action.row for action in trajectory.actions))
    sums = summed_B[acting]
    if rows is None and not ends and exact is not None and len(acting) > 1:
        rows = "each" if (sums.astype(np.float32) == np.float32(exact)).all() else "last"
    score = float(sums.mean() if rows == "each" and acting else summed_B[ends or trajectory.rows].sum())
    if np.isnan(score) or (exact is not None and np.isnan(exact)):
        return None
    return float(exact) if exact is not None and np.float32(exact) == np.float32(score) else score


def _trajectories(estimator: str, response_mask: Tensor, columns: Mapping[str, Any]) -> list[_Trajectory]:
    size = len(response_mask)
    wanted = {"uid": columns.get("uid")}
    if estimator in _STATES:
        wanted["state_keys"] = columns.get("state_keys", columns.get("anchor_obs"))
    for name, values in wanted.items():
        if values is None:
            known = ", ".join(map(str, columns)) or "nothing"
            raise ConfigError(
                f"{estimator} needs {name!r} for every row in addition to verl's tensors, got {known}. verl itself "
                "does not pass such columns to an estimator; use reward_kit's trainers, or compute_advantage of "
                "reward_kit.integrations.verl.estimators"
            )
    for name, values in columns.items():
        if len(values) != size:
            raise ConfigError(f"{name!r} has {len(values)} items, but there are {size} rows")
    sampled = np.asarray(torch.as_tensor(columns.get("sampled_mask", response_mask)).cpu()) != 0
    order: Sequence[int] = range(size)
    if "steps" in columns:  # the rows of each trajectory, in the order of their steps
        order = sorted(order, key=lambda row: min(columns["steps"][row], default=-1))
    trajectories: dict[Hashable, _Trajectory] = {}
    for row in order:
        actions = _actions(row, sampled[row], columns)
        if actions is None:
            continue
        group = columns["uid"][row]
        key: Hashable = (group, columns["traj_uid"][row] if "traj_uid" in columns else row)
        trajectory = trajectories.setdefault(key, _Trajectory(group, [], []))
        trajectory.rows.append(row)
        trajectory.actions.extend(actions)
    for key, trajectory in trajectories.items() if "steps" in columns else ():
        # Returns and states of a partial trajectory differ from those of the whole.
        steps = [step for row in trajectory.rows for step in columns["steps"][row]]
        if steps != list(range(len(steps))):
            raise ConfigError(
                f"trajectory {key!r} has the steps {steps!s:.80} in this batch; credit needs whole trajectories, with "
                "each row once. If response_mask excludes whole rows, pass 'sampled_mask' too"
            )
    return list(trajectories.values())


def _actions(row: int, sampled_T: Array, columns: Mapping[str, Any]) -> list[_Action] | None:
    """Return the actions of a row, or None for a row that verl added to fill a batch."""
    places = np.flatnonzero(sampled_T)
    if "action_lengths" in columns:
        lengths = list(columns["action_lengths"][row])
        if not len(places) and sum(lengths):
            return None
        if sum(lengths) != len(places):
            raise ConfigError(
                f"row {row}: action_lengths {lengths} have a total of {sum(lengths)} tokens, but the row's "
                f"mask has {len(places)}; if response_mask excludes tokens, pass 'sampled_mask' too"
            )
        if not lengths:  # Its score still counts.
            return []
        ends = np.cumsum(lengths)
    elif len(places):
        ends = np.append(np.flatnonzero(np.diff(places) > 1) + 1, len(places))
    else:
        return None
    count = len(ends)
    keys, rewards, valid = (_per_action(name, columns, row, count) for name in _SINGLE)
    parts = zip(
        np.split(places, ends[:-1]),
        keys or [None] * count,
        [None if reward is None else float(reward) for reward in rewards or [None] * count],
        [bool(one) for one in valid or [True] * count],
        strict=True,
    )
    return [_Action(row, *part) for part in parts]


_SINGLE = {"state_keys": "anchor_obs", "step_rewards": "rewards", "valid_actions": "is_action_valid"}
"""Columns with a list for each row, and verl-agent's columns with one item for each row."""


def _per_action(name: str, columns: Mapping[str, Any], row: int, count: int) -> Sequence[Any] | None:
    if name not in columns or columns[name][row] is None:
        if (single := columns.get(_SINGLE[name])) is None:
            return None
        if count != 1:
            raise ConfigError(
                f"row {row} has {count} actions, but {_SINGLE[name]!r} has one item for each row; pass {name!r}, a list"
            )
        return [single[row]]
    values = columns[name][row]
    if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != count:
        raise ConfigError(
            f"{name}[{row}] must be a list with one item for each of the row's {count} actions, got {values!r:.80}"
        )
    return list(values)


@contextmanager
def use_row_columns(columns: Mapping[str, Any]) -> Iterator[None]:
    """Provide columns of the rows to the estimators during the block. `row_credit` lists the columns."""
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
    estimator sees them, so they do not count as 0 in their group.

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
    """Return an estimator of `ROW_ESTIMATORS` with the signature that verl's registry requires."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        config: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        columns = dict(non_tensor_batch or _ROW_COLUMNS.get() or {})
        if index is not None:
            columns["uid"] = index
        return row_credit(name, token_level_rewards, response_mask, columns, estimator_options(name, config))

    estimate.__name__ = estimate.__qualname__ = PREFIX + name
    return estimate


def estimator_options(name: str, config: Any) -> dict[str, Any]:
    """Return the options of an estimator: those under `algorithm.reward_kit`, and verl's own `algorithm.gamma`."""
    given = dict((config.get(OPTIONS) if config is not None else None) or {})
    if any(not isinstance(key, str) for key in given):
        raise ConfigError(f"algorithm.{OPTIONS} must be a mapping of options of {name!r}, got {given!r:.80}")
    gamma = config.get("gamma") if config is not None else None
    if gamma is not None and "gamma" in inspect.signature(ESTIMATORS[name]).parameters:
        given.setdefault("gamma", float(gamma))
    return given
