"""The figures on the page that `summary.json` does not have: distributions, percentiles, counts and what was spent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reward_kit.agent.models import StopReason
from reward_kit.runs.report.reading import EpisodeOutline, RunFacts
from reward_kit.runs.report.timeline import Timeline, groups_complete
from reward_kit.runs.statistics import mean_of

_BINS = 20
_EXTREMES = 10
_TOKENS = {"prompt_tokens": "prompt", "completion_tokens": "completion"}


class Histogram(NamedTuple):
    """How scores are spread over equal bins from `low` to `high`, the last of which includes `high`."""

    policy: str
    low: float
    high: float
    counts: Sequence[int]
    scored: int
    unscored: int


class Percentiles(NamedTuple):
    """Of durations, in seconds."""

    title: str
    n: int
    p50: float
    p90: float
    p99: float
    most: float


class Count(NamedTuple):
    """How often something occurred, for each policy; `is_limit` where it is a bound that somebody set."""

    name: str
    by_policy: Sequence[int]
    is_limit: bool = False

    @property
    def total(self) -> int:
        """Over all policies."""
        return sum(self.by_policy)


class Spent(NamedTuple):
    """What the episodes of one policy took; None where nobody knows.

    Attributes:
        policy: whose they are.
        tokens: by kind.
        cost: US dollars.
        unpriced: episodes that used tokens and have no price.
        episode_s: seconds of all episodes together.
        policy_s: of these, in the policy.
        environment_s: of these, in the environment.
        lengths: percentiles of one episode.
    """

    policy: str
    tokens: Mapping[str, int]
    cost: float | None
    unpriced: int
    episode_s: float | None
    policy_s: float | None
    environment_s: float | None
    lengths: Percentiles | None


class ScoringFigures(NamedTuple):
    """What the reward was asked, and what that took.

    Attributes:
        times: percentiles of waits, calls, scores and groups, as far as they are known.
        calls: calls that were made; None where no line tells.
        retries: of these, those made again.
        known: scores for which no call was made, since the answer was there already.
        cost: dollars that judges say they took; None where none says so.
        unpriced: judges' answers at a price that is not known.
        groups: how many there are, and how many of them are complete.
        untimed: scores whose lines tell no times.
    """

    times: Sequence[Percentiles]
    calls: int | None
    retries: int
    known: int
    cost: float | None
    unpriced: int
    groups: tuple[int, int]
    untimed: int


def policies_of(episodes: Iterable[EpisodeOutline]) -> list[str]:
    """The policies, by name."""
    return sorted({facts.row.policy for facts in episodes})


def histograms(episodes: Sequence[EpisodeOutline]) -> list[Histogram]:
    """The distribution of each policy's scores, over the same bins: of [0, 1] where no score leaves it."""
    scores = [facts.row.score for facts in episodes if facts.row.score is not None]
    low, high = min([0.0, *scores]), max([1.0, *scores])
    if scores and (low < 0.0 or high > 1.0):
        low, high = min(scores), max(scores)
        if low == high:
            low, high = low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5
    return [_histogram(policy, episodes, low, high) for policy in policies_of(episodes)]


def _histogram(policy: str, episodes: Iterable[EpisodeOutline], low: float, high: float) -> Histogram:
    own = [facts.row.score for facts in episodes if facts.row.policy == policy]
    scores = np.array([score for score in own if score is not None], dtype=np.float64)
    # Halves, since the distance of two floats may be beyond every float.
    places = (scores / 2 - low / 2) / (high / 2 - low / 2) * _BINS
    counts = np.bincount(np.clip(places.astype(int), 0, _BINS - 1), minlength=_BINS)
    return Histogram(policy, low, high, counts.tolist(), len(scores), len(own) - len(scores))


def stop_reasons(episodes: Sequence[EpisodeOutline]) -> list[Count]:
    """Why episodes ended, the most frequent reason first."""
    limits = {reason.value for reason in StopReason if reason.is_limit}
    counts = _counts(episodes, lambda facts: facts.row.stop_reason)
    return [count._replace(is_limit=count.name in limits) for count in counts]


def failure_classes(episodes: Sequence[EpisodeOutline]) -> list[Count]:
    """What broke, by its class, the most frequent first; episodes and scores alike."""
    return _counts(episodes, lambda facts: error_of(facts) or None)


def error_of(facts: EpisodeOutline) -> str:
    """The class of what broke in an episode or in its scoring; "" where nothing did."""
    return facts.row.error_class or facts.row.score_error or ""


def _counts(episodes: Sequence[EpisodeOutline], key: Callable[[EpisodeOutline], str | None]) -> list[Count]:
    policies = policies_of(episodes)
    counts = Counter((name, facts.row.policy) for facts in episodes if (name := key(facts)) is not None)
    found = [Count(name, [counts[name, policy] for policy in policies]) for name in {name for name, _ in counts}]
    return sorted(found, key=lambda count: (-count.total, count.name))


def percentiles(title: str, values: Iterable[float | None]) -> Percentiles | None:
    """Of the known values; None where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, (50, 90, 99))
    return Percentiles(title, len(known), float(p50), float(p90), float(p99), max(known))


def spent_by(policy: str, episodes: Iterable[EpisodeOutline]) -> Spent:
    """What one policy's episodes took."""
    own = [facts for facts in episodes if facts.row.policy == policy]
    usages = [facts.row.usage for facts in own]
    costs = [usage["cost"] for usage in usages if "cost" in usage]
    return Spent(
        policy=policy,
        tokens={told: int(sum(usage.get(key, 0) for usage in usages)) for key, told in _TOKENS.items()},
        cost=float(sum(costs)) if costs else None,
        unpriced=sum("cost" not in usage and any(usage.get(key) for key in _TOKENS) for usage in usages),
        episode_s=_sum(facts.duration_s for facts in own),
        policy_s=_sum(facts.policy_s for facts in own),
        environment_s=_sum(facts.environment_s for facts in own),
        lengths=percentiles("one episode", (facts.duration_s for facts in own)),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def tokens_of(facts: EpisodeOutline) -> int:
    """The tokens that an episode used."""
    return int(sum(facts.row.usage.get(key, 0) for key in _TOKENS))


def scoring_figures(run: RunFacts, timeline: Timeline | None) -> ScoringFigures:
    """What the reward was asked, and what that took."""
    calls = timeline.calls if timeline is not None else []
    scores = [facts.score for facts in run.episodes if facts.score is not None]
    complete, groups = groups_complete(run.episodes)
    # Rollouts of a group that were judged together all say what that took, which is taken once.
    usages = {(score.unit, score.usage): score.cost_usd for score in scores if score.usage}
    costs = [cost for cost in usages.values() if cost is not None]
    times = [
        percentiles("wait for the first call", (c.attempts[0].begin_s - c.submitted_s for c in calls if c.attempts)),
        percentiles("one call", (span.end_s - span.begin_s for call in calls for span in call.attempts)),
        percentiles("from asked for to there", (call.done_s - call.submitted_s for call in calls)),
        percentiles("a group, from its first episode on", _group_times(run.episodes)),
    ]
    if not calls:
        times = [percentiles("one score", (score.duration_s for score in scores))]
    return ScoringFigures(
        times=[found for found in times if found is not None],
        calls=sum(len(call.attempts) for call in calls) if calls else None,
        retries=sum(max(0, len(call.attempts) - 1) for call in calls),
        known=sum(not call.attempts for call in calls),
        cost=sum(costs) if costs else None,
        unpriced=len(usages) - len(costs),
        groups=(len(complete), groups),
        untimed=sum(score.submitted_s is None for score in scores),
    )


def _group_times(episodes: Iterable[EpisodeOutline]) -> list[float]:
    """From the begin of its first episode until a group was complete."""
    groups: dict[str, list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[facts.group_id].append(facts)
    found = []
    for group in groups.values():
        complete, _ = groups_complete(group)
        begins = [facts.begin_s for facts in group if facts.begin_s is not None]
        if complete and begins:
            found.append(complete[0] - min(begins))
    return found


def slowest(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """The episodes that took longest."""
    timed = [facts for facts in episodes if facts.duration_s is not None]
    return sorted(timed, key=lambda facts: (-(facts.duration_s or 0.0), facts.row.rollout_id))[:_EXTREMES]


def worst(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """The scored episodes with the lowest scores; what broke is not among them, since unscored is not zero."""
    scored = [(facts.row.score, facts.row.rollout_id, facts) for facts in episodes if facts.row.score is not None]
    return [facts for _, _, facts in sorted(scored, key=lambda item: item[:2])[:_EXTREMES]]


def broken(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """The first episodes that broke, or whose scoring did."""
    return sorted((facts for facts in episodes if facts.row.is_error), key=lambda facts: facts.row.rollout_id)[
        :_EXTREMES
    ]


def outcome_of(facts: EpisodeOutline, pass_threshold: float) -> str:
    """What became of an episode, in one word."""
    if facts.row.score is not None:
        return "passed" if facts.row.score >= pass_threshold else "failed"
    return "error" if facts.row.is_error else "unscored"


class SampleRow(NamedTuple):
    """The episodes of one sample and policy together; `mean` is None where none of them is scored."""

    sample_id: str
    policy: str
    episodes: int
    scored: int
    passed: int
    errors: int
    mean: float | None
    least: float | None
    most: float | None
    steps: float
    tokens: int
    cost: float | None
    seconds: float | None


def sample_rows(episodes: Iterable[EpisodeOutline], pass_threshold: float) -> list[SampleRow]:
    """One row for each sample of each policy, by name."""
    groups: dict[tuple[str, str], list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[str(facts.row.sample_id), facts.row.policy].append(facts)
    return [_sample_row(*key, groups[key], pass_threshold) for key in sorted(groups)]


def _sample_row(sample_id: str, policy: str, own: Sequence[EpisodeOutline], pass_threshold: float) -> SampleRow:
    scores = [facts.row.score for facts in own if facts.row.score is not None]
    costs = [facts.row.usage["cost"] for facts in own if "cost" in facts.row.usage]
    return SampleRow(
        sample_id=sample_id,
        policy=policy,
        episodes=len(own),
        scored=len(scores),
        passed=sum(score >= pass_threshold for score in scores),
        errors=sum(facts.row.is_error for facts in own),
        mean=mean_of(scores) if scores else None,
        least=min(scores, default=None),
        most=max(scores, default=None),
        steps=sum(facts.row.num_steps for facts in own) / len(own),
        tokens=sum(map(tokens_of, own)),
        cost=float(sum(costs)) if costs else None,
        seconds=_sum(facts.duration_s for facts in own),
    )


class GroupRow(NamedTuple):
    """The episodes of one group together; figures of scores are None where none of them is scored."""

    group_id: str
    sample_id: str
    policy: str
    episodes: int
    scored: int
    mean: float | None
    least: float | None
    most: float | None
    spread: float | None
    steps: float


def group_rows(episodes: Iterable[EpisodeOutline]) -> list[GroupRow]:
    """One row for each group of several episodes, those first whose scores differ most: there credit says most."""
    groups: dict[str, list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[facts.group_id].append(facts)
    rows = [_group_row(group_id, own) for group_id, own in groups.items() if len(own) > 1]
    return sorted(rows, key=lambda row: (1.0 if row.spread is None else -row.spread, *row[1:3], row.group_id))


def _group_row(group_id: str, own: Sequence[EpisodeOutline]) -> GroupRow:
    scores = [facts.row.score for facts in own if facts.row.score is not None]
    spread = max(scores) - min(scores) if scores else math.inf
    return GroupRow(
        group_id=group_id,
        sample_id=str(own[0].row.sample_id),
        policy=", ".join(policies_of(own)),
        episodes=len(own),
        scored=len(scores),
        mean=mean_of(scores) if scores else None,
        least=min(scores, default=None),
        most=max(scores, default=None),
        spread=spread if math.isfinite(spread) else None,
        steps=sum(facts.row.num_steps for facts in own) / len(own),
    )
