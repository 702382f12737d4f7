"""Selection of groups that are useful for training, with refills for dropped groups (dynamic sampling, as in DAPO).

`filter_groups` checks the groups of one collection. `GroupRefill` accumulates accepted groups over several collections
and returns a `RefillOutcome` at the end.
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
    """Fewer than two members are scored, so they cannot be compared."""
    UNSCORED_MEMBER = "unscored_member"
    """A member is unscored, and the filter drops such groups."""
    TIED = "tied"
    """All scores are equal, and no step advantage justifies keeping the group."""
    BELOW_BAND = "below_band"
    """The mean score is below the band: the sample is too difficult."""
    ABOVE_BAND = "above_band"
    """The mean score is above the band: the sample is too easy."""


@dataclass(frozen=True, slots=True)
class FilteredGroups:
    """The result of filtering a batch.

    Attributes:
        kept: the ids of the accepted groups, in order of appearance.
        dropped: the ids of the dropped groups, with the reasons.
        members: for every group, the positions of its trajectories in the batch.
    """

    kept: list[Hashable]
    dropped: dict[Hashable, DropReason]
    members: dict[Hashable, list[int]]

    @property
    def kept_B(self) -> list[int]:
        """The positions of the trajectories in kept groups, in the order of the batch."""
        return sorted(index for group in self.kept for index in self.members[group])


def filter_groups(
    scores: Sequence[float | None],
    group_ids: Sequence[Hashable],
    *,
    band: tuple[float, float] | None = None,
    keep_step_signal: bool = False,
    step_advantages: Sequence[Sequence[float | None]] | None = None,
    unscored: Unscored = "ignore",
) -> FilteredGroups:
    """Drop groups without a learning signal.

    Args:
        scores: (B,) the scores, None if unscored; compared as float64.
        group_ids: (B,) the group of each trajectory; members of a group need not be adjacent.
        band: keep only groups whose mean score is within [low, high].
        keep_step_signal: keep a group with equal scores if any of its step advantages is not 0, that is, if equal
            outcomes were reached in different ways (A_S of GiGPO).
        step_advantages: (B,) the step advantages of each trajectory, for `keep_step_signal`; None or NaN if unset.
        unscored: "ignore" evaluates a group by its scored members; "drop" drops a group with an unscored member. A
            group with fewer than two scored members is always dropped.

    Raises:
        ConfigError: the arguments are inconsistent.
        InvalidResultError: a score is not finite.
    """
    if len(group_ids) != len(scores):
        raise ConfigError(f"{len(scores)} scores require {len(scores)} group ids, got {len(group_ids)}")
    check_scores(scores)
    given: Any = band
    is_band = isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(x, int | float) for x in given)
    if band is not None and not (is_band and band[0] <= band[1]):
        raise ConfigError(f"band must be two numbers, the lowest and highest mean score to keep, got {band!r}")
    if unscored not in ("ignore", "drop"):
        raise ConfigError(f"unknown option for unscored: {unscored!r}{did_you_mean(str(unscored), ('ignore', 'drop'))}")
    if keep_step_signal and (step_advantages is None or len(step_advantages) != len(scores)):
        count = "none" if step_advantages is None else str(len(step_advantages))
        raise ConfigError(f"keep_step_signal needs step_advantages of {len(scores)} trajectories, got {count}")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    kept, dropped = [], {}
    for group, indices in members.items():
        scored = [index for index in indices if scores[index] is not None]
        values = [float(score) for index in scored if (score := scores[index]) is not None]
        mean = math.fsum(values) / len(values) if values else 0.0
        # As float64, None is NaN, which counts as unset.
        has_step_signal = keep_step_signal and any(
            (np.abs(np.array(step_advantages[index], dtype=np.float64)) > 0.0).any()  # type: ignore[index]
            for index in scored
        )
        if unscored == "drop" and len(scored) < len(indices):
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
    """The result of several collections.

    Attributes:
        groups: the kept groups, in order of arrival, at most the requested number.
        missing: the number of groups still missing.
        tries: the number of collections so far.
        dropped: the number of groups dropped for each reason.
        surplus: additional kept groups, in order, for the next batch.
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
        """Return one line with the numbers of kept, missing and dropped groups."""
        wanted = len(self.groups) + self.missing
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return f"{len(self.groups)} of {wanted} groups after {self.tries} collections; dropped: {reasons}"


@dataclass(slots=True)
class GroupRefill:
    """Accumulates kept groups until there are enough or no collections are left; a kept group is never collected again.

    Attributes:
        wanted: the number of groups in a batch.
        max_tries: the maximum number of collections.
        surplus: groups left over from the previous batch, which count from the start.

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
                raise ConfigError(f"{name} must be a positive whole number, got {value!r}")
        self._kept = list(self.surplus)

    @property
    def missing(self) -> int:
        """The number of groups that are still to be collected."""
        return max(self.wanted - len(self._kept), 0)

    @property
    def is_exhausted(self) -> bool:
        """True if no collection is left."""
        return self._tries >= self.max_tries

    def add(self, groups: dict[Hashable, Any], verdict: FilteredGroups) -> None:
        """Add the kept groups of one collection.

        Args:
            groups: maps a group id to the value of the group (its episodes, its rows).
            verdict: the result of the filter for these groups.

        Raises:
            ConfigError: no collection is left, or the verdict is for other groups.
        """
        if self.is_exhausted:
            raise ConfigError(f"all {self.max_tries} collections have been used; call outcome()")
        if groups.keys() != verdict.members.keys():
            differing = sorted(map(str, groups.keys() ^ verdict.members.keys()))
            raise ConfigError(f"the verdict and the collection have different groups; only in one of them: {differing}")
        self._tries += 1
        self._kept += [groups[group] for group in verdict.kept]
        for reason in verdict.dropped.values():
            self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def outcome(self) -> RefillOutcome:
        """Return the result so far."""
        groups, surplus = self._kept[: self.wanted], self._kept[self.wanted :]
        return RefillOutcome(groups, self.missing, self._tries, dict(self._dropped), surplus)
