"""Changes in a run's scores when its episodes are scored by a different reward."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from reward_kit.runs.run_folder import placed_scores
from reward_kit.runs.scoring import SourceRun
from reward_kit.runs.statistics import Interval, bounded_interval, mean_interval
from reward_kit.runs.summary import EpisodeRow

_MOST_EXAMPLES = 10
_SAME = 1e-12  # rounding error


class Counts(NamedTuple):
    """The number of episodes by kind of change.

    `lost` episodes are no longer scored; `gained` ones are newly scored.
    """

    up: int
    down: int
    same: int
    to_passed: int
    to_failed: int
    lost: int
    gained: int


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The changes in the scores of a policy."""

    policy: str
    before: Interval | None
    after: Interval | None
    difference: Interval | None
    paired: int
    episodes: Counts
    samples_up: int
    samples_down: int
    samples_same: int


class ChangedScore(NamedTuple):
    """An episode whose score changed."""

    rollout_id: str
    sample_id: str
    policy: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class ScoreChanges:
    """The changes made by a rescoring: the changes of each policy, and the episodes that changed most."""

    policies: Sequence[PolicyChange]
    moved: Sequence[ChangedScore]

    def to_json(self) -> dict[str, Any]:
        """Return the changes in the format of `summary.json`."""
        policies = [{**asdict(change), "episodes": change.episodes._asdict()} for change in self.policies]
        return {"policies": policies, "moved": [score._asdict() for score in self.moved]}


def earlier_scores(source: SourceRun) -> dict[str, float | None]:
    """Return the scores of the earlier run; None for unscored episodes."""
    scores: dict[str, float | None] = dict.fromkeys(source.index.episodes)
    for offset, line in placed_scores(source.path):
        if source.index.scores.get(line["rollout_id"]) == offset:
            scores[line["rollout_id"]] = line.get("score")
    return scores


def compare_scores(
    before: Mapping[str, float | None], rows: Iterable[EpisodeRow], pass_threshold: float
) -> ScoreChanges:
    """Compare two scorings of the same episodes."""
    by_policy: dict[str, list[EpisodeRow]] = defaultdict(list)
    moved = []
    for row in rows:
        by_policy[row.policy].append(row)
        earlier = before.get(row.rollout_id)
        if row.score is not None and earlier is not None and abs(row.score - earlier) > _SAME:
            moved.append(ChangedScore(row.rollout_id, row.sample_id, row.policy, earlier, row.score))
    changes = [_change(name, before, by_policy[name], pass_threshold) for name in sorted(by_policy)]
    moved.sort(key=lambda score: (-abs(score.after - score.before), score.rollout_id))
    return ScoreChanges(changes, moved[:_MOST_EXAMPLES])


def _change(
    policy: str, before: Mapping[str, float | None], rows: Sequence[EpisodeRow], threshold: float
) -> PolicyChange:
    earlier, later = [before.get(row.rollout_id) for row in rows], [row.score for row in rows]
    samples = [row.sample_id for row in rows]
    pairs = [(now, was, sample) for now, was, sample in zip(later, earlier, samples, strict=True)]
    both = [(now, was, sample) for now, was, sample in pairs if now is not None and was is not None]
    differences = [now - was for now, was, _ in both]
    of_sample: dict[str, float] = defaultdict(float)
    for (_, _, sample), difference in zip(both, differences, strict=True):
        of_sample[sample] += difference
    directions, of_samples = Counter(map(_direction, differences)), Counter(map(_direction, of_sample.values()))
    passes = Counter((now >= threshold, was >= threshold) for now, was, _ in both)
    difference_interval = None
    if both:
        interval = mean_interval(differences, [sample for _, _, sample in both])
        if interval.standard_error is not None and interval.standard_error < _SAME:
            # All episodes changed by the same amount, so the interval is a single point.
            interval = replace(interval, low=interval.mean, high=interval.mean)
        elif all(0.0 <= score <= 1.0 for now, was, _ in both for score in (now, was)):
            interval = interval.clipped(-1.0, 1.0)
        difference_interval = interval
    return PolicyChange(
        policy=policy,
        before=bounded_interval(earlier, samples) if any(score is not None for score in earlier) else None,
        after=bounded_interval(later, samples) if any(score is not None for score in later) else None,
        difference=difference_interval,
        paired=len(both),
        episodes=Counts(
            up=directions[1],
            down=directions[-1],
            same=directions[0],
            to_passed=passes[True, False],
            to_failed=passes[False, True],
            lost=sum(now is None and was is not None for now, was, _ in pairs),
            gained=sum(now is not None and was is None for now, was, _ in pairs),
        ),
        samples_up=of_samples[1],
        samples_down=of_samples[-1],
        samples_same=of_samples[0],
    )


def _direction(difference: float) -> int:
    return 0 if abs(difference) <= _SAME else (1 if difference > 0 else -1)
