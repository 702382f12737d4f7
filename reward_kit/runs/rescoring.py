"""The changes that another reward makes to the scores of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from reward_kit.runs.run_folder import placed_scores
from reward_kit.runs.scoring import Source
from reward_kit.runs.statistics import Interval, mean_interval
from reward_kit.runs.summary import EpisodeRow, score_interval

_MOST_EXAMPLES = 10
_SAME = 1e-12  # what differs by less differs by rounding


class Counts(NamedTuple):
    """The number of episodes that went each way; all but the last two count those that are scored before and after."""

    up: int
    down: int
    same: int
    to_passed: int
    to_failed: int
    lost: int
    gained: int


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The change that another reward makes to one policy's scores."""

    policy: str
    before: Interval | None
    after: Interval | None
    difference: Interval | None
    paired: int
    episodes: Counts
    samples_up: int
    samples_down: int
    samples_same: int


class Moved(NamedTuple):
    """An episode whose score is another one now."""

    rollout_id: str
    sample_id: str
    policy: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class ScoreChanges:
    """The changes from scoring again: for each policy, and the episodes that moved most."""

    policies: Sequence[PolicyChange]
    moved: Sequence[Moved]

    def to_json(self) -> dict[str, Any]:
        """As it stands in `summary.json`."""
        policies = [{**asdict(one), "episodes": one.episodes._asdict()} for one in self.policies]
        return {"policies": policies, "moved": [one._asdict() for one in self.moved]}


def scores_of(source: Source) -> dict[str, float | None]:
    """The scores of the earlier run; None where an episode has none."""
    scores: dict[str, float | None] = dict.fromkeys(source.places.episodes)
    for offset, line in placed_scores(source.path):
        if source.places.scores.get(line["rollout_id"]) == offset:
            scores[line["rollout_id"]] = line.get("score")
    return scores


def changes_of(before: Mapping[str, float | None], rows: Iterable[EpisodeRow], pass_threshold: float) -> ScoreChanges:
    """Set the scores of the same episodes side by side."""
    by_policy: dict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        by_policy[row.policy].append(row)
    changes = [_change(name, before, by_policy[name], pass_threshold) for name in sorted(by_policy)]
    moved = [
        Moved(row.rollout_id, row.sample_id, row.policy, earlier, row.score)
        for policy in by_policy.values()
        for row, earlier in _paired(before, policy)
        if row.score is not None and abs(row.score - earlier) > _SAME
    ]
    moved.sort(key=lambda one: (-abs(one.after - one.before), one.rollout_id))
    return ScoreChanges(changes, moved[:_MOST_EXAMPLES])


def _paired(before: Mapping[str, float | None], rows: Iterable[EpisodeRow]) -> list[tuple[EpisodeRow, float]]:
    return [
        (row, earlier) for row in rows if row.score is not None and (earlier := before.get(row.rollout_id)) is not None
    ]


def _change(
    policy: str, before: Mapping[str, float | None], rows: Sequence[EpisodeRow], threshold: float
) -> PolicyChange:
    earlier = [before.get(row.rollout_id) for row in rows]
    samples = [row.sample_id for row in rows]
    pairs = _paired(before, rows)
    differences = [(row.score or 0.0) - score for row, score in pairs]
    of_sample: dict[str, float] = defaultdict(float)
    for (row, _), difference in zip(pairs, differences, strict=True):
        of_sample[row.sample_id] += difference
    directions = Counter(map(_direction, of_sample.values()))
    return PolicyChange(
        policy=policy,
        before=score_interval(earlier, samples) if any(score is not None for score in earlier) else None,
        after=score_interval([row.score for row in rows], samples) if any(r.score is not None for r in rows) else None,
        difference=_difference(pairs),
        paired=len(pairs),
        episodes=_counts(before, rows, pairs, threshold),
        samples_up=directions[1],
        samples_down=directions[-1],
        samples_same=directions[0],
    )


def _difference(pairs: Sequence[tuple[EpisodeRow, float]]) -> Interval | None:
    """The mean with its interval; what moved all episodes by the same amount is sure, also where that is 0 or 1."""
    if not pairs:
        return None
    values = [((row.score or 0.0), earlier) for row, earlier in pairs]
    interval = mean_interval([now - earlier for now, earlier in values], [row.sample_id for row, _ in pairs])
    if interval.standard_error is not None and interval.standard_error < _SAME:
        return replace(interval, low=interval.mean, high=interval.mean)
    is_share = all(0.0 <= score <= 1.0 for both in values for score in both)
    return interval.clipped(-1.0, 1.0) if is_share else interval


def _counts(
    before: Mapping[str, float | None],
    rows: Sequence[EpisodeRow],
    pairs: Sequence[tuple[EpisodeRow, float]],
    threshold: float,
) -> Counts:
    directions = Counter(_direction((row.score or 0.0) - earlier) for row, earlier in pairs)
    passes = Counter(((row.score or 0.0) >= threshold, earlier >= threshold) for row, earlier in pairs)
    known = [(row.score is not None, before.get(row.rollout_id) is not None) for row in rows]
    return Counts(
        up=directions[1],
        down=directions[-1],
        same=directions[0],
        to_passed=passes[True, False],
        to_failed=passes[False, True],
        lost=known.count((False, True)),
        gained=known.count((True, False)),
    )


def _direction(difference: float) -> int:
    return 0 if abs(difference) <= _SAME else (1 if difference > 0 else -1)
