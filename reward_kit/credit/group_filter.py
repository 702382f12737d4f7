"""Filtering of groups that provide no learning signal, and collection of replacements (dynamic sampling, as in DAPO).

`filter_groups` checks the groups from one collection. `GroupRefill` accumulates accepted groups over multiple
collections, and returns a `RefillOutcome` at the end.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from reward_kit.credit.step_arrays import check_scores
from reward_kit.errors import ConfigError, did_you_mean

Unscored = Literal["ignore", "drop"]


class DropReason(StrEnum):
    """The reason why a group was dropped."""

    NO_SIGNAL = "no_signal"
    """Fewer than two members of the group are scored, so their scores cannot be compared."""
    UNSCORED_MEMBER = "unscored_member"
    """A member of the group is unscored, and the filter drops such groups."""
    TIED = "tied"
    """All scores are equal, and the step advantages give no reason to keep the group."""
    BELOW_BAND = "below_band"
    """The mean score is below the band: the sample is too difficult."""
    ABOVE_BAND = "above_band"
    """The mean score is above the band: the sample is too easy."""


@dataclass(frozen=True, slots=True)
class FilteredGroups:
    """The kept and dropped groups in a batch.

    Attributes:
        kept: the ids of the accepted groups, in order of first appearance.
        dropped: a mapping from the id of each dropped group to the reason why it was dropped.
        members: a mapping from the id of each group to the positions of its trajectories in the batch.
    """

    kept: list[Hashable]
    dropped: dict[Hashable, DropReason]
    members: dict[Hashable, list[int]]

    @property
    def kept_B(self) -> list[int]:
        """The positions in the batch of all trajectories in kept groups, in ascending order."""
        return sorted(index for group in self.kept for index in self.members[group])


def filter_groups(
    scores: Sequence[float | None],
    group_ids: Sequence[Hashable],
    *,
    band: tuple[float, float] | None = None,
    keep_step_signal: bool = False,
    step_advantages: Sequence[Sequence[float | None]] | None = None,
    unscored: Unscored = "ignore",
    trajectory_ids: Sequence[Hashable] | None = None,
) -> FilteredGroups:
    """Drop groups that provide no learning signal.

    Args:
        scores: (B,) the scores; None or NaN for an unscored trajectory. Scores are compared as float64.
        group_ids: (B,) the group of each trajectory. The members of a group need not be adjacent.
        band: the lowest and the highest mean score for which a group is kept. If None, the mean score is not checked.
        keep_step_signal: True to keep a group with equal scores if any of its step advantages (the A_S of GiGPO) is
            nonzero, which means that the same outcome was reached in different ways.
        step_advantages: (B,) the step advantages of each trajectory, which `keep_step_signal` requires. None or NaN
            marks a step advantage that is not set.
        unscored: "ignore" to judge a group by its scored members, or "drop" to drop every group that has an unscored
            member. A group with fewer than two scored members is always dropped.
        trajectory_ids: (B,) the trajectory of each position. Required if a trajectory can have multiple positions; in
            verl, for example, it can have multiple rows with the same `traj_uid`. A trajectory counts only once, and
            its first score is used. If None, each position is a separate trajectory.

    Raises:
        ConfigError: If the arguments are inconsistent.
        InvalidResultError: If a score is not finite.
    """
    if len(group_ids) != len(scores):
        raise ConfigError(f"expected {len(scores)} group ids, one for each score, got {len(group_ids)}")
    scores = [None if isinstance(score, float | np.floating) and math.isnan(score) else score for score in scores]
    check_scores(scores)
    if trajectory_ids is not None and len(trajectory_ids) != len(scores):
        raise ConfigError(f"expected {len(scores)} trajectory ids, one for each score, got {len(trajectory_ids)}")
    limits: Any = band
    is_band = isinstance(limits, tuple | list) and len(limits) == 2 and all(isinstance(x, int | float) for x in limits)
    if band is not None and not (is_band and band[0] <= band[1]):
        raise ConfigError(f"band must be two numbers, the lowest and highest mean score to keep, got {band!r}")
    if unscored not in ("ignore", "drop"):
        raise ConfigError(f"unknown value for unscored: {unscored!r}{did_you_mean(str(unscored), ('ignore', 'drop'))}")
    if keep_step_signal and (step_advantages is None or len(step_advantages) != len(scores)):
        count = "none" if step_advantages is None else str(len(step_advantages))
        raise ConfigError(f"keep_step_signal needs step_advantages for {len(scores)} trajectories, got {count}")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    kept, dropped = [], {}
    for group, indices in members.items():
        owners: Sequence[Hashable] = indices
        if trajectory_ids is not None:
            owners = [trajectory_ids[index] for index in indices]
        trajectories = list(dict(zip(owners[::-1], indices[::-1], strict=True)).values())
        scored = [index for index in trajectories if scores[index] is not None]
        values = [float(score) for index in scored if (score := scores[index]) is not None]
        mean = math.fsum(values) / len(values) if values else 0.0
        # float64 converts None to NaN, which counts as unset.
        has_step_signal = keep_step_signal and any(
            (np.abs(np.array(step_advantages[index], dtype=np.float64)) > 0.0).any()  # type: ignore[index]
            for index in indices
            if scores[index] is not None
        )
        if unscored == "drop" and len(scored) < len(trajectories):
            dropped[group] = DropReason.UNSCORED_MEMBER
        elif len(scored) < 2:
            dropped[group] = DropReason.NO_SIGNAL
        elif band is not None and mean < band[0]:
            dropped[group] = DropReason.BELOW_BAND
        elif band is not None and mean > band[1]:
            dropped[group] = DropReason.ABOVE_BAND
        elif min(values) == max(values) and not has_step_signal:
            dropped[group] = DropReason.TIED
        else:
            kept.append(group)
    return FilteredGroups(kept, dropped, members)


@dataclass(frozen=True, slots=True)
class RefillOutcome:
    """The groups that were kept over multiple collections.

    Attributes:
        groups: the kept groups, in order of arrival, up to the requested number.
        missing: the number of groups that are still missing.
        tries: the number of collections so far.
        dropped: a mapping from each reason to the number of groups that were dropped for that reason.
        surplus: kept groups beyond the requested number, in order of arrival, for use in the next batch.
    """

    groups: list[Any]
    missing: int
    tries: int
    dropped: dict[DropReason, int]
    surplus: list[Any]

    @property
    def is_complete(self) -> bool:
        """True if no group is missing."""
        return not self.missing

    def describe(self) -> str:
        """Return a one-line summary of the kept and missing groups, and of the reasons why groups were dropped."""
        wanted = len(self.groups) + self.missing
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return f"{len(self.groups)} of {wanted} groups after {self.tries} collections; dropped: {reasons}"


@dataclass(slots=True)
class GroupRefill:
    """Accumulate kept groups until there are enough or the maximum number of collections is reached.

    Only the groups that are still missing have to be collected. Kept groups are never collected again.

    Attributes:
        wanted: the number of groups in a batch.
        max_tries: the maximum number of collections.
        surplus: groups left over from the previous batch, which count towards `wanted`.

    Example:
        ```python
        refill = GroupRefill(wanted=8, max_tries=4)
        while refill.missing and not refill.is_exhausted:
            groups = collect(refill.missing)              # group id -> any value for the group
            refill.add(groups, filter_groups(scores, group_ids))
        outcome = refill.outcome()                        # if incomplete, raise or train on a smaller batch
        ```
    """

    wanted: int
    max_tries: int
    surplus: Sequence[Any] = ()
    _kept: list[Any] = field(init=False, repr=False)
    _tries: int = field(default=0, init=False)
    _dropped: dict[DropReason, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, value in (("wanted", self.wanted), ("max_tries", self.max_tries)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        self._kept = list(self.surplus)

    @property
    def missing(self) -> int:
        """The number of groups that still have to be collected."""
        return max(self.wanted - len(self._kept), 0)

    @property
    def is_exhausted(self) -> bool:
        """True if the maximum number of collections has been reached."""
        return self._tries >= self.max_tries

    def add(self, groups: dict[Hashable, Any], verdict: FilteredGroups) -> None:
        """Add the kept groups from one collection.

        Args:
            groups: a mapping from each group id to any value for the group, such as its episodes or rows.
            verdict: the result of `filter_groups` for these groups.

        Raises:
            ConfigError: If all collections have been used, or if `verdict` does not cover exactly these groups.
        """
        if self.is_exhausted:
            raise ConfigError(f"all {self.max_tries} collections have been used; call outcome() to get the groups")
        if groups.keys() != verdict.members.keys():
            differing = sorted(map(str, groups.keys() ^ verdict.members.keys()))
            raise ConfigError(
                f"the verdict and the collection contain different groups; groups in only one of them: {differing}"
            )
        self._tries += 1
        self._kept += [groups[group] for group in verdict.kept]
        for reason in verdict.dropped.values():
            self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def outcome(self) -> RefillOutcome:
        """Return the groups that have been kept so far."""
        groups, surplus = self._kept[: self.wanted], self._kept[self.wanted :]
        return RefillOutcome(groups, self.missing, self._tries, dict(self._dropped), surplus)
