"""A comparison: every run beside the first, sample by sample, with how sure each difference is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from reward_kit.errors import ConfigError
from reward_kit.runs.comparison.mismatches import Mismatch, mismatches
from reward_kit.runs.comparison.pairing import Pairing, SamplePair, paired
from reward_kit.runs.comparison.sides import Side
from reward_kit.runs.statistics import (
    PairedFigures,
    benjamini_hochberg,
    holm,
    mcnemar_test,
    mean_of,
    paired_figures,
)

CONFIDENCE = 0.95
ALPHA = 0.05
Verdict = Literal["better", "worse", "doubtful", "not shown"]


class LeftOut(NamedTuple):
    """How many samples are in no comparison: with no score in one run or both, or in one run only.

    `no_rollout_in_both` are those that both scored, where rollouts are paired and none of theirs has both scores.
    """

    unscored_in_baseline: int
    unscored_in_run: int
    only_in_baseline: int
    only_in_run: int
    no_rollout_in_both: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A run beside the baseline, on the samples that have a score in both.

    Attributes:
        side: the run.
        pairing: the common samples, and how they are paired.
        left_out: the others.
        baseline_mean: of the common samples, each counted once.
        run_mean: as `baseline_mean`.
        figures: of the differences, run less baseline.
        p_mcnemar: of the samples that flipped.
        p_holm: the permutation's p, corrected for all comparisons (Holm).
        p_bh: the same after Benjamini and Hochberg.
        mismatches: what else differs.
    """

    side: Side
    pairing: Pairing
    left_out: LeftOut
    baseline_mean: float
    run_mean: float
    figures: PairedFigures
    p_mcnemar: float
    p_holm: float
    p_bh: float
    mismatches: Sequence[Mismatch]

    @property
    def pairs(self) -> Sequence[SamplePair]:
        """The common samples, by name."""
        return self.pairing.samples

    def flipped(self, way: Literal["won", "lost"]) -> list[SamplePair]:
        """The samples that were won or lost, the largest difference first."""
        found = [pair for pair in self.pairs if pair.flip == way]
        return sorted(found, key=lambda pair: (-abs(pair.difference), pair.sample_id))

    @property
    def verdict(self) -> Verdict:
        """What can be said: better or worse where the interval leaves 0 out and the corrected p is small enough too.

        It is doubtful where only one of the two says so, and not shown where neither does.
        """
        low, high = self.figures.interval.low, self.figures.interval.high
        leaves_out = low is not None and high is not None and not low <= 0.0 <= high
        is_small = self.p_holm <= ALPHA
        if leaves_out and is_small:
            return "better" if self.figures.interval.mean > 0 else "worse"
        return "doubtful" if leaves_out or is_small else "not shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The baseline, and every other run beside it.

    Attributes:
        baseline: the first side.
        differences: of the others, in order.
        seed: of what was drawn.
    """

    baseline: Side
    differences: Sequence[Difference]
    seed: int

    @property
    def sides(self) -> list[Side]:
        """All of them, the baseline first."""
        return [self.baseline, *(difference.side for difference in self.differences)]


def compare(sides: Sequence[Side], seed: int = 0) -> Comparison:
    """Set every side beside the first.

    Args:
        sides: two or more.
        seed: of the bootstrap, and of permutations where there are too many to try all.

    Raises:
        ConfigError: a side has no sample with a score in common with the first.
    """
    baseline, *others = sides
    found = [_difference(baseline, side, seed) for side in others]
    p_values = [difference.figures.permutation.p for difference in found]
    corrected = zip(found, holm(p_values), benjamini_hochberg(p_values), strict=True)
    return Comparison(baseline, [replace(one, p_holm=p_holm, p_bh=p_bh) for one, p_holm, p_bh in corrected], seed)


def _difference(baseline: Side, side: Side, seed: int) -> Difference:
    pairing = paired(baseline, side)
    pairs = pairing.samples
    if not pairs:
        raise ConfigError(_why_nothing_is_common(baseline, side))
    figures = paired_figures([pair.difference for pair in pairs], reach=_reach(baseline, side), seed=seed)
    flips = [pair.flip for pair in pairs]
    return Difference(
        side=side,
        pairing=pairing,
        left_out=_left_out(baseline, side, pairing),
        baseline_mean=mean_of([pair.baseline.mean for pair in pairs]),
        run_mean=mean_of([pair.run.mean for pair in pairs]),
        figures=figures,
        p_mcnemar=mcnemar_test(flips.count("won"), flips.count("lost")),
        p_holm=figures.permutation.p,
        p_bh=figures.permutation.p,
        mismatches=mismatches(baseline, side),
    )


def _reach(baseline: Side, side: Side) -> float | None:
    """How far apart two scores can be: 1 where every one is between 0 and 1; None where nobody knows."""
    return 1.0 if baseline.is_unit and side.is_unit else None


def _left_out(baseline: Side, side: Side, pairing: Pairing) -> LeftOut:
    one, other = ({*each.samples, *each.unscored} for each in (baseline, side))
    return LeftOut(
        unscored_in_baseline=len(baseline.unscored & other),
        unscored_in_run=len(side.unscored & one),
        only_in_baseline=len(one - other),
        only_in_run=len(other - one),
        no_rollout_in_both=pairing.without_rollout,
    )


def _why_nothing_is_common(baseline: Side, side: Side) -> str:
    one, other = ({*each.samples, *each.unscored} for each in (baseline, side))
    told = f"{side.label} and the baseline {baseline.label} have no sample in common that has a score in both"
    if shared := baseline.samples.keys() & side.samples.keys():
        return f"{told}: of {len(shared)} that both scored, each rollout is unscored in one of them"
    if shared := one & other:
        return f"{told}: of {len(shared)} that both ran, each is unscored in one of them"
    return f"{told}: the one has {_examples(other)}, the other {_examples(one)}; compare runs of the same dataset"


def _examples(samples: set[str]) -> str:
    names = sorted(samples)
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All of it, every flipped sample included."""
    return {
        "schema_version": 1,
        "confidence": CONFIDENCE,
        "seed": comparison.seed,
        "runs": [_side_to_json(side) for side in comparison.sides],
        "comparisons": [_difference_to_json(difference) for difference in comparison.differences],
    }


def _side_to_json(side: Side) -> dict[str, Any]:
    summary = side.summary
    interval = summary.score
    return {
        "label": side.label,
        "run": str(side.path),
        "run_id": side.run_id,
        "policy": side.policy,
        "status": side.header.status,
        "missing_episodes": side.unfinished,
        "mean": interval.mean if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "standard_error": interval.standard_error if interval else None,
        "samples": len(side.samples) + len(side.unscored),
        "unscored_samples": len(side.unscored),
        "episodes": summary.episodes,
        "scored": summary.scored,
        "pass_threshold": side.pass_threshold,
        "pass_at_1": summary.pass_at_1,
        "k": summary.k,
        "pass_at_k": summary.pass_at_k,
        "pass_hat_k": summary.pass_hat_k,
        "errors": dict(summary.errors),
        "tokens": summary.tokens,
        "cost": summary.cost,
    }


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    figures = difference.figures
    return {
        "run": difference.side.label,
        "verdict": difference.verdict,
        "common_samples": len(difference.pairs),
        "paired_by": difference.pairing.by,
        "paired_rollouts": difference.pairing.rollouts,
        "single_rollouts": difference.pairing.single_rollouts,
        "left_out": difference.left_out._asdict(),
        "baseline_mean": difference.baseline_mean,
        "run_mean": difference.run_mean,
        "difference": figures.interval.mean,
        "low": figures.interval.low,
        "high": figures.interval.high,
        "standard_error": figures.interval.standard_error,
        "bootstrap_low": figures.bootstrap.low,
        "bootstrap_high": figures.bootstrap.high,
        "p": figures.permutation.p,
        "p_is_exact": figures.permutation.is_exact,
        "p_holm": difference.p_holm,
        "p_bh": difference.p_bh,
        "p_t": figures.p_t,
        "p_mcnemar": difference.p_mcnemar,
        "cohens_dz": figures.cohens_dz,
        "cliffs_delta": figures.cliffs_delta,
        "detectable_difference": figures.detectable,
        "won": [_pair_to_json(pair) for pair in difference.flipped("won")],
        "lost": [_pair_to_json(pair) for pair in difference.flipped("lost")],
        "mismatches": [mismatch._asdict() for mismatch in difference.mismatches],
    }


def _pair_to_json(pair: SamplePair) -> dict[str, Any]:
    return {
        "sample": pair.sample_id,
        "difference": pair.difference,
        "baseline": pair.baseline._asdict(),
        "run": pair.run._asdict(),
    }
