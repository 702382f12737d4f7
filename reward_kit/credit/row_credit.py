"""Per-token credit: `token_advantages` for any trainer's arrays, and `row_credit` for rows with named columns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from reward_kit.agent.models import StepData
from reward_kit.credit.estimators import ESTIMATORS, resolve_options
from reward_kit.credit.options import RowsWithScore
from reward_kit.credit.step_arrays import Flags, Floats
from reward_kit.errors import ConfigError
from reward_kit.validation import check_choice

Array = npt.NDArray[Any]
ROW_ESTIMATORS = tuple(name for name in ESTIMATORS if name not in ("gae", "vine"))
"""The estimators that use only rewards, groups and states. GAE and vine need values, so they are excluded."""
STATE_ESTIMATORS = ("gigpo", "hgpo", "gagpo", "g2po", "graphgpo")
"""The estimators that use states."""


class TokenCredit(NamedTuple):
    """Per-token credit for a batch of rows.

    Attributes:
        advantages: (B, T) float64, the advantage of the action that contains the token, or 0 if the token is not part
            of an action.
        returns: (B, T) float64, the return of the action that contains the token, or 0 if the token is not part of an
            action.
        loss_mask: (B, T) int8, 1 for the tokens of actions that have an advantage, and 0 for all other tokens. For an
            unscored trajectory, whose advantages are unknown, the mask and the advantages are 0 for all tokens.
    """

    advantages: Floats
    returns: Floats
    loss_mask: npt.NDArray[np.int8]


def token_advantages(
    action_mask: npt.ArrayLike,
    step_rewards: npt.ArrayLike | Sequence[Sequence[float | None]] | None,
    uid: Sequence[Hashable],
    *,
    traj_uid: Sequence[Hashable] | None = None,
    scores: Sequence[float | None] | None = None,
    state_keys: Sequence[Sequence[Hashable]] | None = None,
    valid_actions: Sequence[Sequence[bool]] | None = None,
    action_lengths: Sequence[Sequence[int]] | None = None,
    estimator: str = "gigpo",
    **options: Any,
) -> TokenCredit:
    """Compute the advantage of each token from a trainer's padded rows.

    A trajectory consists of all rows with the same `traj_uid`, in the order in which they are passed. Trajectories with
    the same `uid` form a group. An action is a run of consecutive tokens whose `action_mask` is 1. Rows without action
    tokens are ignored.

    Args:
        action_mask: (B, T) 1 for sampled tokens, 0 for all others.
        step_rewards: the rewards of the actions. In a (B, T) array, such as the `step_rewards` that `build_rows`
            returns, the values on an action's tokens are summed. Alternatively, pass a list of rewards for each row,
            with one item for each action. None means that the action has no reward. If `step_rewards` is `None`, only
            `scores` is used.
        uid: the group of each row.
        traj_uid: the trajectory of each row. If None, every row is a separate trajectory.
        scores: for each row, the score of its trajectory; None or NaN if the trajectory is unscored. If `scores` is
            None, the score of a trajectory is the sum of its step rewards.
        state_keys: for each row, a list of keys that identify the state before each action; equal keys mean equal
            states. Required by the estimators in `STATE_ESTIMATORS`.
        valid_actions: for each row, a list of flags, one for each action. A flag is False if the environment could not
            parse the action.
        action_lengths: for each row, a list of the number of tokens in each action. Use this argument if two actions
            can be adjacent, with no other tokens between them.
        estimator: a name in `ROW_ESTIMATORS`.
        **options: options of the estimator, such as `gamma`.

    Raises:
        ConfigError: If the estimator or an option is unknown, or the arguments are incomplete or inconsistent.
        InvalidResultError: If a reward is not finite.
    """
    mask = np.asarray(action_mask)
    if mask.ndim != 2 or not np.isin(mask, (0, 1)).all():
        raise ConfigError(f"action_mask must be a (B, T) array of 0 and 1, got {mask!r:.80} of shape {mask.shape}")
    given = {
        "uid": uid,
        "traj_uid": traj_uid,
        "state_keys": state_keys,
        "valid_actions": valid_actions,
        "action_lengths": action_lengths,
        "step_rewards": step_rewards,
        "episode_rewards": scores,
    }
    columns: dict[str, Any] = {name: values for name, values in given.items() if values is not None}
    for name in {"uid", "traj_uid"} & columns.keys():  # the items of a tensor are not hashed by value
        columns[name] = columns[name].tolist() if hasattr(columns[name], "tolist") else columns[name]
    check_lengths(columns, len(mask))
    if step_rewards is not None:
        columns["step_rewards"] = _rewards_of_actions(step_rewards, mask != 0, columns)
    if scores is None:
        if step_rewards is None:
            raise ConfigError("there are neither step_rewards nor scores; pass at least one of them")
        if any(reward is None for rewards in columns["step_rewards"] for reward in rewards):
            raise ConfigError("step_rewards has no reward for some actions, so its sum is not the score; pass scores")
        scores_B = np.array([sum(rewards) for rewards in columns["step_rewards"]], dtype=np.float64)
    else:
        scores_B = columns["episode_rewards"] = np.array(list(scores), dtype=np.float64)  # None becomes NaN
        _check_same_scores(scores_B, columns)
    rewards_BT = np.zeros(mask.shape)
    rewards_BT[:, :1] = scores_B[:, None]
    return row_credit(estimator, rewards_BT, mask, columns, options, rows="last" if scores is None else "each")


def _rewards_of_actions(given: Any, mask_BT: Flags, columns: Mapping[str, Any]) -> list[list[float | None]]:
    """Convert rewards, passed as a (B, T) array or as lists, to a list of action rewards for each row."""
    is_array = hasattr(given, "ndim") and given.ndim == 2
    if not is_array:
        return [list(rewards) for rewards in given]
    rewards_BT = np.asarray(given, dtype=np.float64)
    if rewards_BT.shape != mask_BT.shape:
        raise ConfigError(f"step_rewards has shape {rewards_BT.shape}, but action_mask has shape {mask_BT.shape}")
    if (outside := np.argwhere((rewards_BT != 0) & ~mask_BT)).size:
        row, column = outside[0].tolist()
        raise ConfigError(
            f"step_rewards[{row}, {column}] is {rewards_BT[row, column]:g}, but the token is not part of an action; "
            "put the reward of an action on its last token"
        )
    actions = (action_tokens(row, mask_T, columns) or [] for row, mask_T in enumerate(mask_BT))
    return [[float(rewards_BT[row, tokens].sum()) for tokens in each] for row, each in enumerate(actions)]


def _check_same_scores(scores_B: Floats, columns: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the rows of a trajectory have different scores."""
    first: dict[Hashable, int] = {}
    for row, group in enumerate(columns["uid"]):
        key = (group, columns["traj_uid"][row] if "traj_uid" in columns else row)
        other = first.setdefault(key, row)
        if not np.array_equal(scores_B[row], scores_B[other], equal_nan=True):
            raise ConfigError(
                f"rows {other} and {row} of one trajectory have the scores {scores_B[other]:g} and {scores_B[row]:g}; "
                "pass the score of the whole trajectory for each of its rows"
            )


class _RowAction(NamedTuple):
    """An action in a row: the columns of its tokens, and the data of its step."""

    row: int
    columns: Array
    state_key: Any
    reward: float | None
    is_valid: bool


@dataclass(frozen=True, slots=True)
class _Trajectory:
    group: Hashable
    rows: list[int]
    actions: list[_RowAction]


def row_credit(
    estimator: str,
    rewards_BT: Floats,
    mask_BT: Array,
    columns: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    rows: RowsWithScore | None = None,
) -> TokenCredit:
    """Compute the credit for rows with named columns. The columns are documented in `integrations.verl.row_credit`."""
    check_choice("row estimator", estimator, ROW_ESTIMATORS)
    if rows is not None:
        check_choice("rows", rows, get_args(RowsWithScore))
    resolved = resolve_options(estimator, options or {})
    trajectories = _trajectories(estimator, mask_BT, columns)
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
    summed_B = rewards_BT.sum(axis=1)
    scores = [_score(trajectory, summed_B, columns, rows) for trajectory in trajectories]
    credit = ESTIMATORS[estimator](batch, scores, group_ids=[each.group for each in trajectories], **resolved)
    actions = [action for trajectory in trajectories for action in trajectory.actions]
    is_trained = mask_BT != 0
    advantages_BT, returns_BT, loss_mask_BT = (np.zeros(mask_BT.shape) for _ in range(3))
    for action, advantage, return_ in zip(
        actions, credit.advantages_S.tolist(), credit.returns_S.tolist(), strict=True
    ):
        if advantage == advantage:  # NaN if unscored
            advantages_BT[action.row, action.columns] = advantage
            returns_BT[action.row, action.columns] = return_
            loss_mask_BT[action.row, action.columns] = 1
    return TokenCredit(advantages_BT * is_trained, returns_BT * is_trained, (loss_mask_BT * is_trained).astype(np.int8))


def _score(
    trajectory: _Trajectory, summed_B: Array, columns: Mapping[str, Any], rows: RowsWithScore | None
) -> float | None:
    """Return the score of a trajectory, or None if it is unscored.

    `summed_B` contains the sum of the rewards in each row.
    """
    exact = columns["episode_rewards"][trajectory.rows[0]] if "episode_rewards" in columns else None
    ends = [row for row in trajectory.rows if columns["ends_episode"][row]] if "ends_episode" in columns else []
    acting = list(dict.fromkeys(action.row for action in trajectory.actions)) or trajectory.rows
    sums = summed_B[acting]
    if rows is None and not ends and exact is not None and len(acting) > 1:
        rows = "each" if (sums.astype(np.float32) == np.float32(exact)).all() else "last"
    score = float(sums.mean() if rows == "each" else summed_B[ends or trajectory.rows].sum())
    if np.isnan(score) or (exact is not None and np.isnan(exact)):
        return None
    return float(exact) if exact is not None and np.float32(exact) == np.float32(score) else score


def check_lengths(columns: Mapping[str, Any], size: int) -> None:
    """Raise a ConfigError if a column does not have one item for each row."""
    for name, values in columns.items():
        if len(values) != size:
            raise ConfigError(f"{name!r} has {len(values)} items, but there are {size} rows")


def _trajectories(estimator: str, mask_BT: Array, columns: Mapping[str, Any]) -> list[_Trajectory]:
    size = len(mask_BT)
    needs_states = estimator in STATE_ESTIMATORS and not {"state_keys", "anchor_obs"} & columns.keys()
    missing = [name for name, lacks in (("uid", "uid" not in columns), ("state_keys", needs_states)) if lacks]
    if missing:
        remedy = " or use an estimator without states, such as 'turn_level_grpo'" if "uid" in columns else ""
        known = ", ".join(map(str, columns)) or "nothing"
        raise ConfigError(f"{estimator} needs {missing[0]!r} for every row, got {known}; pass the column{remedy}")
    check_lengths(columns, size)
    sampled = np.asarray(columns.get("sampled_mask", mask_BT)) != 0
    order: Sequence[int] = range(size)
    if "steps" in columns:  # sort the rows of each trajectory by step
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
        # The returns and states of a partial trajectory differ from those of the whole trajectory.
        steps = [step for row in trajectory.rows for step in columns["steps"][row]]
        if steps != list(range(len(steps))):
            raise ConfigError(
                f"trajectory {key!r} has the steps {steps!s:.80} in this batch; credit needs whole trajectories in "
                "which each row occurs once. If response_mask excludes whole rows, pass 'sampled_mask' too"
            )
    return list(trajectories.values())


def action_tokens(row: int, sampled_T: Flags, columns: Mapping[str, Any]) -> list[Array] | None:
    """Return the column indices of each action's tokens in a row, or None if the row only fills up the batch."""
    places = np.flatnonzero(sampled_T)
    if "action_lengths" in columns:
        lengths = list(columns["action_lengths"][row])
        if not len(places) and sum(lengths):
            return None
        if sum(lengths) != len(places):
            raise ConfigError(
                f"row {row}: action_lengths {lengths} add up to {sum(lengths)} tokens, but the "
                f"row's mask has {len(places)}; if response_mask excludes tokens, pass 'sampled_mask' too"
            )
        if not lengths:  # The score of the row still counts.
            return []
        ends = np.cumsum(lengths)
    elif len(places):
        ends = np.append(np.flatnonzero(np.diff(places) > 1) + 1, len(places))
    else:
        return None
    return np.split(places, ends[:-1])


def _actions(row: int, sampled_T: Flags, columns: Mapping[str, Any]) -> list[_RowAction] | None:
    parts = action_tokens(row, sampled_T, columns)
    if not parts:
        return None if parts is None else []
    count = len(parts)
    keys, rewards, valid = (_per_action(name, columns, row, count) for name in _SINGLE)
    items = zip(
        parts,
        keys or [None] * count,
        [None if reward is None else float(reward) for reward in rewards or [None] * count],
        [bool(one) for one in valid or [True] * count],
        strict=True,
    )
    return [_RowAction(row, *item) for item in items]


_SINGLE = {"state_keys": "anchor_obs", "step_rewards": "rewards", "valid_actions": "is_action_valid"}
"""A mapping from columns that have a list for each row to verl-agent's columns that have one item for each row."""


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
