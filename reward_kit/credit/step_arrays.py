"""A batch of trajectories as flat arrays, and the array operations that estimators use.

`StepArrays` is the input of every estimator. Estimators are built from two operations: `discounted`, which computes
discounted sums, and `relative`, which compares each value with its group. Only `relative` subtracts a baseline or
divides by a scale.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.agent.models import StepData
from reward_kit.errors import ConfigError, InvalidResultError

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Batch = Sequence[Sequence[StepData]]
_FEW = 64


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A batch of B trajectories with S steps in total, stored as flat arrays in batch order.

    Attributes:
        steps: (S,) the steps.
        lengths_B: (B,) the number of steps in each trajectory.
        scores_B: (B,) the scores; NaN for an unscored trajectory.
        groups_B: (B,) the group number of each trajectory. Numbers count from 0, in order of first appearance.
        rewards_S: (S,) the base rewards; NaN for a reward that is not set.
    """

    steps: list[StepData]
    lengths_B: Codes
    scores_B: Floats
    groups_B: Codes
    rewards_S: Floats

    @classmethod
    def from_batch(
        cls, batch: Batch, scores: Sequence[float | None], group_ids: Sequence[Hashable] | None = None
    ) -> StepArrays:
        """Create the arrays for a batch.

        Args:
            batch: B trajectories.
            scores: (B,) the scores; None for an unscored trajectory.
            group_ids: (B,) the group of each trajectory. If None, `step_info["group_id"]` of the first step of each
                trajectory is used. If no group is recorded, all trajectories form a single group.

        Raises:
            ConfigError: If `batch` is not a list of trajectories, if the number of scores or group ids differs from the
                number of trajectories, or if only some of the trajectories record a group.
            InvalidResultError: If a score or a base reward is not finite.
        """
        if any(isinstance(steps, StepData) for steps in batch):
            raise ConfigError("batch must be a list of trajectories (lists of steps), got a single list of steps")
        for name, values in (("scores", scores), ("group ids", group_ids)):
            if values is not None and len(values) != len(batch):
                raise ConfigError(f"expected {len(batch)} {name}, one for each trajectory, got {len(values)}")
        check_scores(scores)
        scores_B = np.array([math.nan if score is None else score for score in scores], dtype=np.float64)
        if group_ids is None:
            group_ids = [steps[0].step_info.get("group_id") if steps else None for steps in batch]
            # A trajectory that failed before its first step records no group and earns no credit.
            without = [index for index, steps in enumerate(batch) if steps and group_ids[index] is None]
            if without and any(group_id is not None for group_id in group_ids):
                raise ConfigError(f"trajectory {without[0]} has no group_id, but other trajectories do; pass group_ids")
        lengths_B = np.fromiter(map(len, batch), dtype=np.int64, count=len(batch))
        steps = list(chain.from_iterable(batch))
        rewards = [step.base_reward for step in steps]
        rewards_S = np.array(rewards, dtype=np.float64)
        if not np.isfinite(rewards_S).all():
            is_unset_S = np.array([reward is None for reward in rewards], dtype=np.bool_)
            check_finite(rewards_S, lengths_B, "a base reward", missing_S=is_unset_S)
        return cls(steps, lengths_B, scores_B, factorize(group_ids), rewards_S)

    @property
    def is_scored_S(self) -> Flags:
        """An (S,) mask that is true for the steps of scored trajectories."""
        return self.to_steps(~np.isnan(self.scores_B))

    @property
    def turns_S(self) -> Codes:
        """The index of each step within its trajectory (S,)."""
        starts_B: Codes = np.cumsum(self.lengths_B) - self.lengths_B
        return np.asarray(np.arange(len(self.steps)) - self.to_steps(starts_B), dtype=np.int64)

    @property
    def values_S(self) -> Floats:
        """The policy's value estimates (S,). NaN marks a missing estimate."""
        # float64 converts None to NaN.
        return np.array([step.policy_value_estimate for step in self.steps], dtype=np.float64)

    @property
    def is_valid_S(self) -> Flags:
        """An (S,) mask that is false for steps whose `step_info["is_action_valid"]` is False, and otherwise true."""
        flags = [step.step_info.get("is_action_valid") is not False for step in self.steps]
        return np.array(flags, dtype=np.bool_)

    @property
    def is_truncated_B(self) -> Flags:
        """A (B,) mask that is true for truncated trajectories.

        The result depends on the `step_info` of the last step. A trajectory is truncated if `truncated` is true or
        `terminated` is False. It is not truncated if `terminated` is true or if neither key is recorded.
        """
        truncated_B = np.zeros(len(self.lengths_B), dtype=np.bool_)
        ends_B = np.cumsum(self.lengths_B)
        for index in np.flatnonzero(self.lengths_B).tolist():
            info = self.steps[ends_B[index] - 1].step_info
            is_cut = bool(info.get("truncated")) or info.get("terminated") is False
            truncated_B[index] = is_cut and not info.get("terminated")
        return truncated_B

    def to_steps(self, values_B: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an (S,) array that contains, for each step, the value of its trajectory."""
        return np.repeat(values_B, self.lengths_B)

    def describe_step(self, position: int) -> str:
        """Return a description of the step at a position in the flat arrays, for example "trajectory 2, step 0"."""
        trajectory, step = locate_step(position, self.lengths_B)
        return f"trajectory {trajectory}, step {step}"

    def sums_B(self, values_S: Floats) -> Floats:
        """Return the sum of the step values in each trajectory (B,)."""
        codes_S = self.to_steps(np.arange(len(self.lengths_B)))
        return np.bincount(codes_S, values_S, minlength=len(self.lengths_B)).astype(np.float64, copy=False)

    def returns_S(self, gamma: float, default: float = 0.0, penalties_S: Floats | None = None) -> Floats:
        """Return the discounted return of each step (S,): G_k = r_k + gamma G_{k+1}.

        The return is NaN for steps of an unscored trajectory.

        Args:
            gamma: the discount factor.
            default: the value used for a base reward that is not set.
            penalties_S: (S,) penalties that are subtracted from r_k before discounting. If None, nothing is subtracted.

        Raises:
            InvalidResultError: If a return is not finite.
        """
        rewards_S = self.earned_S(default)
        if penalties_S is not None:
            rewards_S = rewards_S - penalties_S
        returns_S = discounted(rewards_S, self.lengths_B, gamma)
        check_finite(returns_S, self.lengths_B, "a return", missing_S=~self.is_scored_S)
        return returns_S

    def earned_S(self, default: float = 0.0) -> Floats:
        """Return the reward r_k of each step (S,).

        If all base rewards of a trajectory are set, r_k is the base reward. Otherwise, a base reward that is not set
        counts as `default`, and the score is added to the reward of the last step. The reward is NaN for steps of an
        unscored trajectory.
        """
        unset_S = np.isnan(self.rewards_S)
        rewards_S = np.where(unset_S, default, self.rewards_S)
        ends_B = np.cumsum(self.lengths_B)
        is_incomplete_B = np.diff(np.cumsum(unset_S)[ends_B[self.lengths_B > 0] - 1], prepend=0) > 0
        lasts_B = ends_B[self.lengths_B > 0][is_incomplete_B] - 1
        with overflow_allowed():
            rewards_S[lasts_B] += self.scores_B[self.lengths_B > 0][is_incomplete_B]
        return np.where(self.is_scored_S, rewards_S, np.nan)


def discounted(values_S: Floats, lengths_B: Codes, decay: float) -> Floats:
    """Return x_k + decay x_{k+1} + decay² x_{k+2} + … for each step (S,), summed to the end of its trajectory."""
    out_S = values_S.copy()
    # Sort by length, longest first. The trajectories that have a step at a given distance from their end then come
    # first.
    order_B = np.argsort(-lengths_B, kind="stable")
    ends_B, lengths = np.cumsum(lengths_B)[order_B], lengths_B[order_B]
    # Go backwards from the ends of all trajectories simultaneously until so few are left that a loop over them is
    # faster.
    together = int(lengths[_FEW]) if len(lengths) > _FEW else 1
    with overflow_allowed():
        for back in range(1, together):
            at = ends_B[: np.searchsorted(-lengths, -back, side="left")] - 1 - back
            out_S[at] += decay * out_S[at + 1]
    for end, length in zip(ends_B[:_FEW].tolist(), lengths[:_FEW].tolist(), strict=True):
        if length > together:
            backwards = out_S[end - length : end + 1 - max(together, 1)][::-1]
            backwards[:] = list(accumulate(backwards.tolist(), lambda after, here: here + decay * after))
    return out_S


def following(values_S: npt.NDArray[Any], lengths_B: Codes) -> npt.NDArray[Any]:
    """Return, for each step (S,), the value of the next step in the trajectory, or 0 if there is no next step."""
    out_S = np.roll(values_S, -1)
    out_S[np.cumsum(lengths_B)[lengths_B > 0] - 1] = 0
    return out_S


def overflow_allowed() -> np.errstate:
    """Return a context in which sums may overflow. `check_finite` checks them afterwards."""
    return np.errstate(over="ignore", invalid="ignore")


def check_finite(values_S: Floats, lengths_B: Codes, what: str, *, missing_S: Flags) -> None:
    """Raise an InvalidResultError if a value is neither finite nor missing.

    The message names the trajectory and the step.
    """
    bad_S = ~np.isfinite(values_S) & ~missing_S
    if bad_S.any():
        trajectory, step = locate_step(int(np.argmax(bad_S)), lengths_B)
        raise InvalidResultError(f"trajectory {trajectory}, step {step}: {what} is not finite")


def locate_step(position: int, lengths_B: Codes) -> tuple[int, int]:
    """Convert a position in the flat arrays to the index of a trajectory and the index of a step within it."""
    ends_B = np.cumsum(lengths_B)
    trajectory = int(np.searchsorted(ends_B, position, side="right"))
    return trajectory, position - int(ends_B[trajectory] - lengths_B[trajectory])


def factorize(keys: Iterable[Hashable]) -> Codes:
    """Return an (N,) array of numbers, one for each key. Equal keys have equal numbers.

    Numbers count from 0, in order of first appearance.
    """
    keys = list(keys)
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.fromiter(map(numbers.__getitem__, keys), dtype=np.int64, count=len(keys))


def check_scores(scores: Sequence[float | None]) -> None:
    """Raise a ConfigError if a score is neither a number nor None, or an InvalidResultError if it is not finite."""
    for index, score in enumerate(scores):
        try:
            is_finite = score is None or math.isfinite(score)
        except (TypeError, OverflowError):
            problem = f"must be a number, or None if the trajectory is unscored; got {score!r:.80}"
            raise ConfigError(f"the score of trajectory {index} {problem}") from None
        if not is_finite:
            raise InvalidResultError(f"the score of trajectory {index} is {score}; use None for an unscored trajectory")


# Values between these limits, and their differences, can be squared and summed without overflow or underflow.
_SMALL, _LARGE = 1e-100, 1e140


def relative(
    values_N: Floats,
    groups_N: Codes,
    normalization: str = "std",
    epsilon: float = 1e-6,
    *,
    normalization_constant: float | None = None,
    weights_N: Floats | None = None,
    min_group_size: int = 1,
) -> Floats:
    """Return each value relative to its group (N,). NaN values are ignored and remain NaN.

    The mean and the unbiased standard deviation are computed over the group. Each value counts as many times as its
    weight in `weights_N`:

        "std"            (x - mean) / (std + epsilon)
        "mean"           x - mean
        "constant"       (x - mean) / normalization_constant
        "leave_one_out"  x - the mean of the others = (x - mean) n / (n - 1)

    In each group, the first value with a nonzero weight is subtracted from all values before the computation. As a
    result, equal values become exactly zero, and a large offset does not reduce precision. The value in a group of one
    becomes zero. If the squares of a group's values would overflow or underflow, the values are also scaled. A result
    is therefore infinite only if it is too large for a float.

    Args:
        values_N: (N,) the values.
        groups_N: (N,) the non-negative group number of each value.
        normalization: one of the four names above.
        epsilon: a constant that is added to each standard deviation.
        normalization_constant: the divisor for "constant".
        weights_N: (N,) the number of times that each value counts; "leave_one_out" omits all copies of the value. If
            None, each value counts once.
        min_group_size: the minimum size of a group; values in smaller groups become zero.
    """
    valued_N = ~np.isnan(values_N)
    values, groups = values_N[valued_N], renumber_groups(groups_N[valued_N])
    weights = np.ones(len(values)) if weights_N is None else weights_N[valued_N]
    units = _units(values, groups)
    centered = values / units
    firsts = first_positions(groups)
    if weights_N is not None:
        weighted = np.flatnonzero(weights > 0.0)[::-1]
        firsts[groups[weighted]] = weighted  # if a position is written twice, the last write wins
    centered -= centered[firsts][groups]
    totals = np.bincount(groups, weights)
    # If all weights are zero, for example because the trajectories have no steps, nothing is subtracted.
    centered -= (np.bincount(groups, weights * centered) / np.where(totals > 0, totals, 1.0))[groups]
    scales = _scales(centered, groups, weights, normalization, epsilon / units, normalization_constant)
    counts = (scales > 0) & (np.bincount(groups) >= min_group_size)[groups]
    out_N = np.full(len(values_N), np.nan)
    measured = np.divide(centered, scales, out=np.zeros_like(centered), where=counts)
    with np.errstate(over="ignore"):
        out_N[valued_N] = measured if normalization == "std" else measured * units
    return out_N


def _units(values: Floats, groups: Codes) -> Floats:
    """Return the unit in which each value is expressed during the computation.

    The unit is 1 or, if squares could overflow or underflow, a power of two close to the group's largest value.
    """
    sizes = np.abs(values)
    if not ((sizes > _LARGE) | ((sizes < _SMALL) & (sizes > 0.0))).any():
        return np.ones(1)
    largest = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(largest, groups, sizes)
    exponents = np.clip(np.frexp(largest)[1] - 1, -1000, 1023)
    return np.asarray(np.ldexp(1.0, exponents)[groups], dtype=np.float64)


def _scales(
    centered: Floats, groups: Codes, weights: Floats, normalization: str, epsilons: Floats, constant: float | None
) -> Floats:
    """Return the divisor for each centered value, or zero if its group contains no other value to compare it with."""
    if normalization == "mean":
        return np.ones_like(centered)
    if normalization == "constant":
        return np.full_like(centered, constant)
    totals = np.bincount(groups, weights)
    if normalization == "leave_one_out":
        return np.asarray((totals[groups] - weights) / np.where(totals > 0, totals, 1.0)[groups], dtype=np.float64)
    variances = np.bincount(groups, weights * centered**2) / np.maximum(totals - 1.0, 1.0)
    return np.asarray(np.sqrt(variances)[groups] + epsilons, dtype=np.float64)


def group_sizes(values_N: Floats, groups_N: Codes) -> Codes:
    """Return, for each value (N,), the number of values in its group. NaN values are not counted."""
    groups = renumber_groups(groups_N)
    return np.bincount(groups[~np.isnan(values_N)], minlength=int(groups.max(initial=-1)) + 1)[groups]


def first_positions(groups: Codes) -> Codes:
    """Return the position of the first value of each group."""
    first = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    # If a position is written twice, the last write wins.
    first[groups[::-1]] = np.arange(len(groups))[::-1]
    return first


def renumber_groups(groups: Codes) -> Codes:
    """Renumber the groups if a table indexed by group number would be much longer than the array of values."""
    if int(groups.max(initial=0)) <= 4 * len(groups):
        return groups
    return np.asarray(np.unique(groups, return_inverse=True)[1], dtype=np.int64)
