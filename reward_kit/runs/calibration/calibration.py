"""A reward against human labels: scored as in a run, set against the labels, and shown with the worst disagreements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reward_kit.errors import RewardError
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.runs.calibration.labels import LabelledRow, Pairs
from reward_kit.runs.calibration.measures import (
    Figure,
    Pairwise,
    Pointwise,
    Scale,
    Settings,
    pairwise_figures,
    pointwise_figures,
    scale_of,
)

_LONGEST_SHOWN = 160


class Disagreement(NamedTuple):
    """One row in which reward and person differ, with its texts cut."""

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
    """How far a reward agrees with labels.

    Attributes:
        rows: how many there are.
        unscored: the class of each failure, and how many rows have it; they are in no figure, and none counts as 0.
        first_error: of them.
        clipped: scores outside of [0, 1], taken as its nearer end for the figures.
        scale: of the labels; None for pairs.
        figures: agreement, correlation, bias.
        worst: the largest disagreements first.
    """

    rows: int
    unscored: Mapping[str, int]
    first_error: str | None
    clipped: int
    scale: Scale | None
    figures: Sequence[Figure]
    worst: Sequence[Disagreement]

    @property
    def scored(self) -> int:
        """The rows that the figures are made of."""
        return self.rows - sum(self.unscored.values())

    def to_json(self) -> dict[str, Any]:
        """The whole as plain values."""
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
    rows: Sequence[LabelledRow],
    scorer: Scorer,
    settings: Settings | None = None,
    *,
    pairs: Pairs = "scores",
    worst: int = 5,
    max_concurrency: int = 16,
) -> Calibration:
    """Score rows and set the scores against their labels.

    Args:
        rows: of labels, all pairs or all single answers.
        scorer: where the reward is called.
        settings: how figures are made.
        pairs: "scores" compares the scores of two answers; "judge" takes each score as the preference over the other.
        worst: how many disagreements are kept.
        max_concurrency: calls of the reward in flight.

    Raises:
        ConfigError: all labels are the same.
        RewardError: no row could be scored.
    """
    settings, is_pairs = settings or Settings(), rows[0].is_pair
    scale = None if is_pairs else scale_of([row.label for row in rows], settings.levels)
    results = await _scored(rows, scorer, max_concurrency)
    failures = [next((s.failure for s in found if s.failure is not None), None) for found in results]
    broken = [failure for failure in failures if failure is not None]
    if len(broken) == len(rows):
        raise RewardError(f"no row of {len(rows)} could be scored; the first: {broken[0].message}")
    kept = [_Row.of(row, found, pairs) for row, found, bad in zip(rows, results, failures, strict=True) if bad is None]
    figures = _pointwise(kept, scale, settings) if scale is not None else _pairwise(kept, settings)
    return Calibration(
        rows=len(rows),
        unscored=dict(Counter(failure.failure_class for failure in broken)),
        first_error=broken[0].message if broken else None,
        clipped=sum(row.clipped for row in kept),
        scale=scale,
        figures=figures,
        worst=_worst(kept, scale, worst),
    )


async def _scored(rows: Sequence[LabelledRow], scorer: Scorer, max_concurrency: int) -> list[list[Scored]]:
    """What each row's requests scored."""
    requests = [request for row in rows for request in row.requests]
    async with AsyncRewardAgent(scorer, max_concurrency=max_concurrency) as agent:
        found = iter(await agent.score_all(requests))
    return [[next(found) for _ in row.requests] for row in rows]


class _Row(NamedTuple):
    """A scored row: `score` is the reward's, or for a pair its preference for A."""

    row: LabelledRow
    score: float
    margin: float
    first: float | None
    lengths: tuple[int, ...]
    reason: str
    clipped: int

    @classmethod
    def of(cls, row: LabelledRow, found: Sequence[Scored], pairs: Pairs) -> _Row:
        results = [scored.result for scored in found if scored.result is not None]
        scores = [min(1.0, max(0.0, result.score)) for result in results]
        clipped = sum(score != result.score for score, result in zip(scores, results, strict=True))
        lengths = tuple(len(_answer(request)) for request in row.requests)
        reason = results[0].reason or ""
        if not row.is_pair:
            return cls(row, scores[0], scores[0], None, lengths, reason, clipped)
        if pairs == "judge":
            preference = (scores[0] + 1.0 - scores[1]) / 2.0
            first = sum(map(_first, results)) / len(results)
            return cls(row, preference, preference, first, lengths, reason, clipped)
        margin = results[0].score - results[1].score
        preference = 0.5 if margin == 0 else float(margin > 0)
        return cls(row, preference, margin, None, lengths, reason, 0)


def _first(result: EvaluateResult) -> float:
    """How often the first place won a comparison: told by `pairwise_judge`, else the rollout stood first."""
    first, second = result.metrics.get("won_as_first"), result.metrics.get("won_as_second")
    if first is None or second is None:
        return min(1.0, max(0.0, result.score))
    return (first.score + 1.0 - second.score) / 2.0


def _pointwise(kept: Sequence[_Row], scale: Scale, settings: Settings) -> list[Figure]:
    rows = Pointwise(
        labels=[row.row.label for row in kept],
        scores=[row.score for row in kept],
        lengths=[row.lengths[0] for row in kept],
        clusters=[row.row.id for row in kept],
    )
    return pointwise_figures(rows, scale, settings)


def _pairwise(kept: Sequence[_Row], settings: Settings) -> list[Figure]:
    rows = Pairwise(
        labels=[row.row.label for row in kept],
        scores=[row.score for row in kept],
        margins=[row.margin for row in kept],
        lengths=[row.lengths[0] - row.lengths[1] for row in kept],
        firsts=[row.first for row in kept],
        clusters=[row.row.id for row in kept],
    )
    return pairwise_figures(rows, settings)


def _worst(kept: Sequence[_Row], scale: Scale | None, count: int) -> list[Disagreement]:
    found = []
    for row in kept:
        label = row.row.label
        share = label if scale is None else (label - scale.levels[0]) / (scale.levels[-1] - scale.levels[0])
        requests = row.row.requests
        texts = (_cut(_prompt(requests[0])), tuple(_cut(_answer(request)) for request in requests))
        found.append(
            Disagreement(row.row.where, row.row.id, label, row.score, row.score - share, *texts, _cut(row.reason))
        )
    found = [item for item in found if not math.isclose(item.difference, 0.0, abs_tol=1e-12)]
    return sorted(found, key=lambda item: -abs(item.difference))[:count]


def _answer(request: ScoringRequest) -> str:
    """The last assistant message."""
    return next((message.text for message in reversed(request.messages) if message.role == "assistant"), "")


def _prompt(request: ScoringRequest) -> str:
    """The last user message."""
    return next((message.text for message in reversed(request.messages) if message.role == "user"), "")


def _cut(text: str) -> str:
    """A text on one line, cut: strangers wrote it, and it goes to a terminal."""
    line = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * _LONGEST_SHOWN])
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_SHOWN else f"{line[: _LONGEST_SHOWN - 1]}…"
