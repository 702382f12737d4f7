"""Which groups are worth training on, and how many are still to be collected (dynamic sampling, as in DAPO).

`filter_groups` judges the groups of one collection. `GroupRefill` keeps those that pass over several collections, says
how many are missing, and in the end what there is: `RefillOutcome`.
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
    """Why a group was not kept."""

    NO_SIGNAL = "no_signal"
    """Fewer than two of its members are scored, so there is nothing to compare."""
    UNSCORED_MEMBER = "unscored_member"
    """A member is unscored, and the filter was told to drop such groups."""
    TIED = "tied"
    """All its scores are equal, and no step advantage of it is kept for."""
    BELOW_BAND = "below_band"
    """Its mean score is below the band: too hard."""
    ABOVE_BAND = "above_band"
    """Its mean score is above the band: too easy."""


@dataclass(frozen=True, slots=True)
class FilteredGroups:
    """The verdict on a batch.

    Attributes:
        kept: the group ids that passed, in order of appearance.
        dropped: the others, each with its reason.
        members: of every group, the positions of its trajectories in the batch, wherever they stand.
    """

    kept: list[Hashable]
    dropped: dict[Hashable, DropReason]
    members: dict[Hashable, list[int]]

    @property
    def kept_B(self) -> list[int]:
        """The positions of the trajectories of kept groups, in the order of the batch."""
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
    """Drop the groups that teach nothing.

    Args:
        scores: (B,) None where unscored. Equal means equal as float64.
        group_ids: (B,) the group of each trajectory; members of a group need not be neighbours.
        band: keep groups whose mean score is within [low, high] only.
        keep_step_signal: keep a group with equal scores where one of its step advantages is not 0 (GiGPO's A_S: equal
            outcomes reached by different ways).
        step_advantages: (B,) the step advantages of each trajectory, for `keep_step_signal`; None or NaN where unset.
        unscored: "ignore" judges a group by its scored members, "drop" drops a group with an unscored one. A group with
            fewer than two scored members is dropped in both.

    Raises:
        ConfigError: the arguments do not fit together.
        InvalidResultError: a score is not finite.
    """
    _check(scores, group_ids, band, unscored)
    if keep_step_signal and (step_advantages is None or len(step_advantages) != len(scores)):
        given = "none" if step_advantages is None else str(len(step_advantages))
        raise ConfigError(f"keep_step_signal needs step_advantages of {len(scores)} trajectories; got {given}")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    kept, dropped = [], {}
    for group, indices in members.items():
        ways = [step_advantages[i] for i in indices] if keep_step_signal and step_advantages is not None else []
        reason = _reason([scores[i] for i in indices], ways, band, unscored)
        if reason is None:
            kept.append(group)
        else:
            dropped[group] = reason
    return FilteredGroups(kept, dropped, members)


def _check(scores: Sequence[float | None], group_ids: Sequence[Hashable], band: Any, unscored: str) -> None:
    if len(group_ids) != len(scores):
        raise ConfigError(f"{len(scores)} scores need {len(scores)} group ids; got {len(group_ids)}")
    check_scores(scores)
    is_band = isinstance(band, tuple | list) and len(band) == 2 and all(isinstance(x, int | float) for x in band)
    if band is not None and not (is_band and band[0] <= band[1]):
        raise ConfigError(f"band is two numbers, the lowest and the highest mean score kept; got {band!r}")
    if unscored not in ("ignore", "drop"):
        raise ConfigError(f"unknown unscored {unscored!r}{did_you_mean(str(unscored), ('ignore', 'drop'))}")


def _reason(
    scores: Sequence[float | None],
    step_advantages: Sequence[Sequence[float | None]],
    band: tuple[float, float] | None,
    unscored: Unscored,
) -> DropReason | None:
    scored = [float(score) for score in scores if score is not None]
    if unscored == "drop" and len(scored) < len(scores):
        return DropReason.UNSCORED_MEMBER
    if len(scored) < 2:
        return DropReason.NO_SIGNAL
    mean = math.fsum(scored) / len(scored)
    if band is not None and mean < band[0]:
        return DropReason.BELOW_BAND
    if band is not None and mean > band[1]:
        return DropReason.ABOVE_BAND
    ways = zip(scores, step_advantages, strict=True) if step_advantages else ()
    if min(scored) == max(scored) and not any(score is not None and _any_signal(steps) for score, steps in ways):
        return DropReason.TIED
    return None


def _any_signal(advantages: Sequence[float | None]) -> bool:
    # As float64, None is NaN, which counts as unset.
    return bool((np.abs(np.array(advantages, dtype=np.float64)) > 0.0).any())


# Collecting until there are enough


@dataclass(frozen=True, slots=True)
class RefillOutcome:
    """What the collections gave.

    Attributes:
        groups: what was kept, in order of arrival; never more than wanted.
        missing: how many groups are missing from what was wanted.
        tries: collections made.
        dropped: how many groups were dropped for each reason.
        surplus: kept groups beyond what was wanted, in order, for the next batch.
    """

    groups: list[Any]
    missing: int
    tries: int
    dropped: dict[DropReason, int]
    surplus: list[Any]

    @property
    def is_complete(self) -> bool:
        """There are as many groups as wanted."""
        return not self.missing

    def describe(self) -> str:
        """One line: what there is, what is missing and why groups were dropped."""
        wanted = len(self.groups) + self.missing
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        return f"{len(self.groups)} of {wanted} groups after {self.tries} collections; dropped: {reasons}"


@dataclass(slots=True)
class GroupRefill:
    """Collects groups until there are enough, or the tries are used up; what was kept is never collected again.

    Attributes:
        wanted: groups in a batch.
        max_tries: collections.
        surplus: groups left over from the last batch; they count from the start.

    Example:
        ```python
        refill = GroupRefill(wanted=8, max_tries=4)
        while refill.missing and not refill.is_exhausted:
            groups = collect(refill.missing)              # group id -> whatever stands for the group
            refill.add(groups, filter_groups(scores, group_ids))
        outcome = refill.outcome()                        # an incomplete one is an error or a smaller batch: yours
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
                raise ConfigError(f"{name} is a positive whole number; got {value!r}")
        self._kept = list(self.surplus)

    @property
    def missing(self) -> int:
        """How many groups are still to be collected."""
        return max(self.wanted - len(self._kept), 0)

    @property
    def is_exhausted(self) -> bool:
        """No try is left."""
        return self._tries >= self.max_tries

    def add(self, groups: dict[Hashable, Any], verdict: FilteredGroups) -> None:
        """Take the kept groups of one collection.

        Args:
            groups: what stands for each group (its episodes, its rows), by group id.
            verdict: of the filter on them; the last try is judged like every other.

        Raises:
            ConfigError: no try is left, or the verdict is on other groups.
        """
        if self.is_exhausted:
            raise ConfigError(f"all {self.max_tries} tries are used up; ask for the outcome")
        if groups.keys() != verdict.members.keys():
            differing = sorted(map(str, groups.keys() ^ verdict.members.keys()))
            raise ConfigError(f"the verdict is on other groups than were collected; only in one: {differing}")
        self._tries += 1
        self._kept += [groups[group] for group in verdict.kept]
        for reason in verdict.dropped.values():
            self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def outcome(self) -> RefillOutcome:
        """What there is now."""
        groups, surplus = self._kept[: self.wanted], self._kept[self.wanted :]
        return RefillOutcome(groups, self.missing, self._tries, dict(self._dropped), surplus)
