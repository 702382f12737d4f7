"""Calibration: the agreement of a reward with human labels, and the largest disagreements.

The functions that compute figures are pure and return NaN if a figure is undefined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from reward_kit.agreement import cohens_kappa, kendall_tau_b, spearman
from reward_kit.display_text import truncate
from reward_kit.errors import ConfigError, Failure, RewardError, did_you_mean
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.runs.files import SCORES_FILE
from reward_kit.runs.labels import LabeledRow, Pairs
from reward_kit.runs.results import read_results
from reward_kit.runs.statistics import Bounds, Floats, Integers, bootstrap_bounds, wilson_bounds
from reward_kit.typed_interface import EvaluationMode

# Figures of labels and scores


_Figures = Callable[[Integers], Floats]
_MOST_LEVELS = 10
_BINS = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a calibration."""

    threshold: float = 0.5
    levels: tuple[float, ...] | None = None
    seed: int = 0
    resamples: int = 1_000
    confidence: float = 0.95


class Figure(NamedTuple):
    """A figure and the bounds of its interval; each is `None` if it is undefined for these rows."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    meaning: str


class LabelScale(NamedTuple):
    """The levels of the labels in ascending order or, for more than ten distinct labels, the edges of five bins."""

    levels: tuple[float, ...]
    is_binned: bool

    @property
    def size(self) -> int:
        """The number of categories."""
        return _BINS if self.is_binned else len(self.levels)

    def shares(self, labels_N: Floats) -> Floats:
        """Scale labels to [0, 1], so that the lowest level becomes 0 and the highest becomes 1."""
        shares: Floats = (labels_N - self.levels[0]) / (self.levels[-1] - self.levels[0])
        return shares

    def categories(self, shares_N: Floats, threshold: float | None = None) -> Integers:
        """Return the category of each share: its bin, or the nearest level.

        If there are two levels, `threshold` separates them.
        """
        if self.is_binned:
            return np.clip((shares_N * _BINS).astype(np.int64), 0, _BINS - 1)
        if len(self.levels) == 2 and threshold is not None:
            return (shares_N >= threshold).astype(np.int64)
        levels = self.shares(np.array(self.levels))
        return np.searchsorted((levels[1:] + levels[:-1]) / 2.0, shares_N, side="right").astype(np.int64)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Scored rows of single answers: the labels, scores in [0, 1], answer lengths and samples, each of shape (N,)."""

    labels: Sequence[float]
    scores: Sequence[float]
    lengths: Sequence[int]
    clusters: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Pairwise:
    """Scored rows of pairs.

    Attributes:
        labels: (N,) 1 if the human preferred A, 0 if B, 0.5 for a tie.
        scores: (N,) the share of the reward's verdicts that preferred A.
        margins: (N,) the score of A minus the score of B, for rank correlation.
        lengths: (N,) the length of A minus the length of B.
        firsts: (N,) the share of comparisons won by the answer in the first position; None without a judge.
        clusters: (N,) the sample of each row.
    """

    labels: Sequence[float]
    scores: Sequence[float]
    margins: Sequence[float]
    lengths: Sequence[int]
    firsts: Sequence[float | None]
    clusters: Sequence[Hashable]


def infer_scale(labels: Sequence[float], given: tuple[float, ...] | None = None) -> LabelScale:
    """Derive the scale of the labels from their values."""
    found = sorted(set(given if given is not None else labels))
    if given is not None and (odd := sorted(set(labels) - set(given))):
        raise ConfigError(f"the label {odd[0]:g} is not among the levels {', '.join(f'{level:g}' for level in found)}")
    if len(found) < 2:
        raise ConfigError(
            "all labels are the same, so agreement is undefined; pass --levels or add rows with other labels"
        )
    return LabelScale(tuple(found), given is None and len(found) > _MOST_LEVELS)


_POINTWISE = {
    "accuracy": "share of rows in the label's category",
    "kappa": "Cohen's kappa: agreement beyond chance",
    "kappa_quadratic": "Cohen's kappa with smaller weights for near misses",
    "spearman": "rank correlation of score and label",
    "kendall_tau_b": "concordant minus discordant pairs, adjusted for ties",
    "mean_difference": "mean of score − label; above 0, the reward is too generous",
    "length_correlation": "rank correlation of (score − label) and length; above 0, long answers are favored",
    "length_gap": "mean of (score − label): longer answers minus shorter answers",
}


def pointwise_figures(rows: Pointwise, scale: LabelScale, settings: Settings) -> list[Figure]:
    """Return the figures for single answers, in the order in which they are reported."""
    shares, scores = scale.shares(np.array(rows.labels, float)), np.array(rows.scores, float)
    labeled, judged = scale.categories(shares), scale.categories(scores, settings.threshold)
    lengths, residuals = np.array(rows.lengths, float), scores - shares

    def figures(at: Integers) -> Floats:
        one, other = labeled[at], judged[at]
        return np.array(
            [
                float((one == other).mean()),
                cohens_kappa(one, other, scale.size),
                cohens_kappa(one, other, scale.size, quadratic=True),
                spearman(scores[at], shares[at]),
                kendall_tau_b(scores[at], shares[at]),
                float(residuals[at].mean()),
                spearman(residuals[at], lengths[at]),
                _gap(residuals[at], lengths[at]),
            ]
        )

    return _with_intervals(figures, _POINTWISE, rows.clusters, settings)


_PAIRWISE = {
    "accuracy": "share of pairs with the label's winner, or tie",
    "kappa": "Cohen's kappa over A, tie, B: agreement beyond chance",
    "kappa_quadratic": "Cohen's kappa with a smaller weight for ties than for wrong winners",
    "spearman": "rank correlation between A's margin and the label",
    "kendall_tau_b": "concordant minus discordant pairs, adjusted for ties",
    "a_wins": "share of pairs that A wins, by the scores",
    "a_wins_labels": "share of pairs that A wins, by the labels",
    "length_correlation": "rank correlation between (preference − label) and the difference in length",
    "length_gap": "preference for the longer answer, minus that of the labels",
}
_FIRST = {"first_place_wins": "share of comparisons won by the first position; 0.5 without position bias"}


def pairwise_figures(rows: Pairwise, settings: Settings) -> list[Figure]:
    """Return the figures for pairs, in the order in which they are reported."""
    labels, scores, margins = (np.array(values, float) for values in (rows.labels, rows.scores, rows.margins))
    labeled, judged = _thirds(labels), _thirds(scores)
    lengths, residuals = np.array(rows.lengths, float), scores - labels
    firsts = np.array([math.nan if value is None else value for value in rows.firsts], float)
    by_place = bool(np.isfinite(firsts).any())

    def figures(at: Integers) -> Floats:
        one, other, longer = labeled[at], judged[at], np.sign(lengths[at])
        found = [
            float((one == other).mean()),
            cohens_kappa(one, other, 3),
            cohens_kappa(one, other, 3, quadratic=True),
            spearman(margins[at], labels[at]),
            kendall_tau_b(margins[at], labels[at]),
            float(scores[at].mean()),
            float(labels[at].mean()),
            spearman(residuals[at], lengths[at]),
            float((residuals[at] * longer).sum() / max(np.abs(longer).sum(), 1.0)),
        ]
        placed = firsts[at][np.isfinite(firsts[at])]
        return np.array([*found, *([float(placed.mean()) if len(placed) else math.nan] if by_place else [])])

    return _with_intervals(figures, _PAIRWISE | (_FIRST if by_place else {}), rows.clusters, settings)


def _thirds(values_N: Floats) -> Integers:
    """Encode B as 0, a tie as 1, and A as 2."""
    return (np.sign(values_N - 0.5) + 1).astype(np.int64)


def _gap(residuals_N: Floats, lengths_N: Floats) -> float:
    """Return the mean residual of the rows longer than the median minus that of the shorter rows.

    Rows of median length are excluded.
    """
    middle = float(np.median(lengths_N))
    longer, shorter = residuals_N[lengths_N > middle], residuals_N[lengths_N < middle]
    return float(longer.mean() - shorter.mean()) if len(longer) and len(shorter) else math.nan


def _with_intervals(
    figures: _Figures, meanings: dict[str, str], clusters: Sequence[Hashable], settings: Settings
) -> list[Figure]:
    values = figures(np.arange(len(clusters)))
    bounds = [Bounds(None, None)] * len(values)
    if settings.resamples:
        seed, resamples, confidence = settings.seed, settings.resamples, settings.confidence
        bounds = bootstrap_bounds(figures, clusters, seed=seed, resamples=resamples, confidence=confidence)
        # If all rows agree, or no row does, all resamples are equal. Wilson's interval (1927) is used then.
        if bounds[0].low is None and (accuracy := float(values[0])) in (0.0, 1.0):
            bounds[0] = Bounds(*wilson_bounds(accuracy, len(set(clusters)), confidence))
    return [
        Figure(name, float(value) if math.isfinite(value) else None, low, high, len(clusters), meaning)
        for (name, meaning), value, (low, high) in zip(meanings.items(), values, bounds, strict=True)
    ]


# Scoring


_LONGEST_SHOWN = 160


class Disagreement(NamedTuple):
    """A row on which the reward and the human disagree. The texts of the row are truncated."""

    where: str
    id: str
    label: float
    score: float
    difference: float
    prompt: str
    answers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The agreement of a reward with human labels."""

    rows: int
    unscored: Mapping[str, int]
    first_error: str | None
    clipped: int
    scale: LabelScale | None
    figures: Sequence[Figure]
    worst: Sequence[Disagreement]

    @property
    def scored(self) -> int:
        """The number of scored rows."""
        return self.rows - sum(self.unscored.values())

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as JSON-serializable data."""
        return {
            "rows": self.rows,
            "scored": self.scored,
            "unscored": dict(self.unscored),
            "first_error": self.first_error,
            "clipped": self.clipped,
            "levels": list(self.scale.levels) if self.scale is not None and not self.scale.is_binned else None,
            "figures": {figure.name: {**figure._asdict()} for figure in self.figures},
            "worst": [{**item._asdict(), "answers": list(item.answers)} for item in self.worst],
        }


async def calibrate(
    rows: Sequence[LabeledRow],
    scorer: Scorer,
    settings: Settings | None = None,
    *,
    pairs: Pairs = "scores",
    worst: int = 5,
    max_concurrency: int = 16,
) -> Calibration:
    """Score rows and compare the scores with their labels."""
    settings, is_pairs = settings or Settings(), rows[0].is_pair
    scale = None if is_pairs else infer_scale([row.label for row in rows], settings.levels)
    async with AsyncRewardAgent(scorer, max_concurrency=max_concurrency) as agent:
        scored = iter(await agent.score_all([request for row in rows for request in row.requests]))
    results = [[next(scored) for _ in row.requests] for row in rows]
    failures = [next((s.failure for s in found if s.failure is not None), None) for found in results]
    broken = [failure for failure in failures if failure is not None]
    if len(broken) == len(rows):
        raise RewardError(f"none of the {len(rows)} rows could be scored; the first failed with: {broken[0].message}")
    kept = [_Row.of(row, found, pairs) for row, found, bad in zip(rows, results, failures, strict=True) if bad is None]
    labels, scores = [row.row.label for row in kept], [row.score for row in kept]
    lengths, clusters = [row.lengths for row in kept], [row.row.id for row in kept]
    if scale is not None:
        answers = Pointwise(labels, scores, [length for (length,) in lengths], clusters)
        figures = pointwise_figures(answers, scale, settings)
    else:
        longer, margins, firsts = [a - b for a, b in lengths], [row.margin for row in kept], [row.first for row in kept]
        figures = pairwise_figures(Pairwise(labels, scores, margins, longer, firsts, clusters), settings)
    differing = []
    for row in kept:
        share = row.row.label if scale is None else float(scale.shares(np.array(row.row.label)))
        if not math.isclose(row.score, share, rel_tol=0.0, abs_tol=1e-12):
            requests, reason = row.row.requests, _cut(row.reason)
            prompt, texts = _cut(_last(requests[0], "user")), tuple(_cut(_last(request)) for request in requests)
            known = (row.row.where, row.row.id, row.row.label, row.score, row.score - share)
            differing.append(Disagreement(*known, prompt, texts, reason))
    return Calibration(
        rows=len(rows),
        unscored=dict(Counter(failure.failure_class for failure in broken)),
        first_error=broken[0].message if broken else None,
        clipped=sum(row.clipped for row in kept),
        scale=scale,
        figures=figures,
        worst=sorted(differing, key=lambda item: -abs(item.difference))[:worst],
    )


class RecordedScorer:
    """A scorer that returns the scores recorded by a run instead of calling a reward.

    Args:
        run: the run's directory.
        metric: a metric of the run's reward, or "score" for the score itself.

    Raises:
        ConfigError: the run has no such metric.
    """

    mode: EvaluationMode = "pointwise"

    def __init__(self, run: Path, metric: str) -> None:
        if not (run / SCORES_FILE).exists():
            raise ConfigError(
                f"--metric {metric}: {run} has no scores.jsonl; use the labels of a scored run, or pass --reward"
            )
        self._metric = metric
        self._results = {result.episode["rollout_id"]: result.to_result() for result in read_results(run)}
        known = {name for result in self._results.values() if result is not None for name in result.metrics}
        if metric not in {*known, "score"}:
            raise ConfigError(f"--metric: unknown metric {metric!r}{did_you_mean(metric, {*known, 'score'})}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def score(self, request: ScoringRequest) -> Scored:
        """Return the recorded score of a rollout."""
        result = self._results.get(request.rollout_id)
        metric = None if result is None else result.metrics.get(self._metric)
        if result is not None and metric is not None and metric.is_score_valid:
            return Scored(request.rollout_id, EvaluateResult(score=metric.score, reason=metric.reason))
        if result is not None and metric is None and self._metric == "score" and result.is_score_valid:
            return Scored(request.rollout_id, result)
        message = f"the run has no {self._metric!r} of rollout {request.rollout_id}"
        return Scored(request.rollout_id, failure=Failure("invalid_result", "InvalidResultError", message))

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Return the recorded score of each rollout."""
        return [await self.score(request) for request in requests]


class _Row(NamedTuple):
    """A scored row. `score` is the score from the reward or, for a pair, the preference of the reward for A."""

    row: LabeledRow
    score: float
    margin: float
    first: float | None
    lengths: tuple[int, ...]
    reason: str
    clipped: int

    @classmethod
    def of(cls, row: LabeledRow, found: Sequence[Scored], pairs: Pairs) -> _Row:
        results = [scored.result for scored in found if scored.result is not None]
        scores = [min(1.0, max(0.0, result.score)) for result in results]
        clipped = sum(score != result.score for score, result in zip(scores, results, strict=True))
        lengths = tuple(len(_last(request)) for request in row.requests)
        reason = results[0].reason or ""
        if not row.is_pair:
            return cls(row, scores[0], scores[0], None, lengths, reason, clipped)
        if pairs == "judge":
            preference = (scores[0] + 1.0 - scores[1]) / 2.0
            firsts = []  # The share of comparisons that the first position won
            for result, score in zip(results, scores, strict=True):
                one, other = result.metrics.get("won_as_first"), result.metrics.get("won_as_second")
                # Only `pairwise_judge` reports this metric; for other rewards, the rollout comes first.
                firsts.append(score if one is None or other is None else (one.score + 1.0 - other.score) / 2.0)
            first = sum(firsts) / len(firsts)
            return cls(row, preference, preference, first, lengths, reason, clipped)
        margin = results[0].score - results[1].score
        preference = 0.5 if margin == 0 else float(margin > 0)
        return cls(row, preference, margin, None, lengths, reason, 0)


def _last(request: ScoringRequest, role: str = "assistant") -> str:
    """Return the text of the last message that has the given role."""
    return next((message.text for message in reversed(request.messages) if message.role == role), "")


def _cut(text: str) -> str:
    """Format untrusted text as one short line for a terminal."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * _LONGEST_SHOWN])
    return truncate(" ".join(line.split()), _LONGEST_SHOWN)
