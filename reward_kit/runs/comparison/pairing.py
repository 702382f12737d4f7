"""What of one run is set beside what of the other: rollouts of one name where both runs have the same, else samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from reward_kit.runs.comparison.sides import SampleScores, Side, scores_of_sample

_Rollouts = Mapping[str, float | None]


class SamplePair(NamedTuple):
    """One sample in both runs."""

    sample_id: str
    baseline: SampleScores
    run: SampleScores

    @property
    def difference(self) -> float:
        """The mean score of the run less that of the baseline."""
        return self.run.mean - self.baseline.mean

    @property
    def flip(self) -> Literal["won", "lost"] | None:
        """Whether it passes in one of the two and not in the other."""
        if self.run.passes == self.baseline.passes:
            return None
        return "won" if self.run.passes else "lost"


@dataclass(frozen=True, slots=True)
class Pairing:
    """The samples of two sides that are compared.

    Attributes:
        samples: by name.
        by: whether a sample's mean is of the rollouts that both scored, or of all that each scored.
        is_rescoring: whether both scored the very same episodes.
        rollouts: how many have a score in both; 0 where samples are paired.
        single_rollouts: how many of the samples that both scored have one in one run only, and count in neither.
        without_rollout: how many of those samples have none that both scored.
    """

    samples: Sequence[SamplePair]
    by: Literal["rollout", "sample"] = "sample"
    is_rescoring: bool = False
    rollouts: int = 0
    single_rollouts: int = 0
    without_rollout: int = 0


def paired(baseline: Side, side: Side) -> Pairing:
    """Pair what two sides have in common.

    By rollout where one is a rescoring of the other, or where both have rollouts of the same names: a rollout that only
    one of them scored would else count in that one's mean alone.
    """
    common = sorted(baseline.samples.keys() & side.samples.keys())
    is_rescoring = _is_rescoring(baseline, side)
    if not is_rescoring and not _have_same_rollouts(baseline, side):
        return Pairing([SamplePair(name, baseline.samples[name], side.samples[name]) for name in common])
    pairs, rollouts, single = [], 0, 0
    for name in common:
        one, other = baseline.rollouts[name], side.rollouts[name]
        both = sorted(_scored(one) & _scored(other))
        rollouts += len(both)
        single += len(_scored(one) ^ _scored(other))
        if both:
            before, after = _of(one, both, baseline.pass_threshold), _of(other, both, side.pass_threshold)
            pairs.append(SamplePair(name, before, after))
    return Pairing(pairs, "rollout", is_rescoring, rollouts, single, len(common) - len(pairs))


def _is_rescoring(baseline: Side, side: Side) -> bool:
    """Whether one run has the episodes of the other, or both have those of a third."""
    if baseline.policy != side.policy:
        return False
    one, other = ((each.header.rescored_from or {}).get("run_id") for each in (baseline, side))
    return other == baseline.run_id or one == side.run_id or (one is not None and one == other)


def _have_same_rollouts(baseline: Side, side: Side) -> bool:
    """Whether every sample of both has rollouts of the same names; names come from the seed, sample and policy."""
    common = baseline.rollouts.keys() & side.rollouts.keys()
    return all(baseline.rollouts[name].keys() == side.rollouts[name].keys() for name in common)


def _scored(rollouts: _Rollouts) -> set[str]:
    return {name for name, score in rollouts.items() if score is not None}


def _of(rollouts: _Rollouts, names: Sequence[str], threshold: float) -> SampleScores:
    return scores_of_sample([score for name in names if (score := rollouts[name]) is not None], threshold)
