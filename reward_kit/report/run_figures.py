"""Figures on a run's page that are not in `summary.json`: distributions, counts, durations, cost and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from reward_kit.agent.models import StopReason
from reward_kit.display_text import escape_text
from reward_kit.report.rendering import NAME_LENGTH, Drawing, number, r2
from reward_kit.report.run_data import EpisodeOutline, RunFacts, curves_of, grouped
from reward_kit.report.run_slices import SEPARATOR, slice_names
from reward_kit.report.timeline import RunTimeline, groups_complete
from reward_kit.runs.counterfactual_file import RunCurves
from reward_kit.runs.label_file import EpisodeLabels, display_label
from reward_kit.runs.statistics import safe_mean
from reward_kit.runs.summary import token_details

_BINS = 20
_EXTREMES = 10
_TOKENS = {"prompt_tokens": "prompt", "completion_tokens": "completion"}


def policy_names(episodes: Iterable[EpisodeOutline]) -> list[str]:
    """Return the sorted names of the policies."""
    return sorted({facts.row.policy for facts in episodes})


def _scores(episodes: Iterable[EpisodeOutline]) -> list[float]:
    return [facts.row.score for facts in episodes if facts.row.score is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    return float(sum(known)) if known else None


# Distribution of scores


class ScoreHistogram(NamedTuple):
    """The number of scores in each of the equal bins from `low` to `high` (inclusive)."""

    policy: str
    low: float
    high: float
    counts: Sequence[int]
    scored: int
    unscored: int


def histograms(episodes: Sequence[EpisodeOutline]) -> list[ScoreHistogram]:
    """Return a histogram of each policy's scores. All have the same bins, which cover [0, 1] or all scores."""
    every = _scores(episodes)
    low, high = min([0.0, *every]), max([1.0, *every])
    if every and (low < 0.0 or high > 1.0):
        low, high = min(every), max(every)
        if low == high:
            low, high = low - abs(low) / 2 - 0.5, high + abs(high) / 2 + 0.5
    found = []
    for policy, own in sorted(grouped(episodes, lambda facts: facts.row.policy).items()):
        scores = np.array(_scores(own), dtype=np.float64)
        # Divide by 2 first, since the difference between two floats may overflow.
        places = (scores / 2 - low / 2) / (high / 2 - low / 2) * _BINS
        counts = np.bincount(np.clip(places.astype(int), 0, _BINS - 1), minlength=_BINS)
        found.append(ScoreHistogram(policy, low, high, counts.tolist(), len(scores), len(own) - len(scores)))
    return found


def draw_histogram(histogram: ScoreHistogram) -> Drawing:
    """Draw the scores of a policy as bars, which are labeled with counts if there is enough space."""
    width, height, left, base, top = 420.0, 168.0, 8.0, 140.0, 22.0
    low, high, counts = histogram.low, histogram.high, list(histogram.counts)
    description = f"Distribution of {histogram.scored} scores from {number(low)} to {number(high)}"
    drawing = Drawing(description, width, height)
    bin_width, most = (width - 2 * left) / len(counts), max([1, *counts])
    step = (high / 2 - low / 2) / len(counts) * 2
    for index, count in enumerate(counts):
        if not count:
            continue
        x, tall, begin = left + index * bin_width, max(1.5, (base - top) * count / most), low + index * step
        note = f"{number(begin)} to {number(begin + step)}: {count:,}"
        drawing.rect(x + 1, base - tall, bin_width - 2, tall, "score", note)
        # Three-digit labels would overlap their neighbors; the highest bar always has one.
        beside = counts[max(0, index - 1) : index] + counts[index + 1 : index + 2]
        if most < 100 or count == most or not any(beside):
            text = f"{count:,}" if count < 10_000 else f"{count / 1000:.0f}k"
            drawing.label(x + bin_width / 2, base - tall - 4, text, "middle", "count")
    drawing.path(f"M{left} {base}H{width - left}", "axis")
    for at, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        drawing.label(r2(left + at * (width - 2 * left)), base + 18, number(low * (1 - at) + high * at), anchor)
    return drawing


# Counts


class Count(NamedTuple):
    """The number of occurrences, keyed by policy; `is_limit` marks configured limits."""

    name: str
    by_policy: Sequence[int]
    is_limit: bool = False

    @property
    def total(self) -> int:
        """The sum over all policies."""
        return sum(self.by_policy)


def stop_reasons(episodes: Sequence[EpisodeOutline]) -> list[Count]:
    """Count the stop reasons of episodes; the most frequent come first."""
    limits = {reason.value for reason in StopReason if reason.is_limit}
    counts = _counts(episodes, lambda facts: facts.row.stop_reason)
    return [count._replace(is_limit=count.name in limits) for count in counts]


def failure_classes(episodes: Sequence[EpisodeOutline]) -> list[Count]:
    """Count the failure classes of episodes and scores; the most frequent come first."""
    return _counts(episodes, lambda facts: error_class(facts) or None)


def error_class(facts: EpisodeOutline) -> str:
    """Return the failure class of an episode or of its scoring, or "" if neither of them failed."""
    return facts.row.error_class or facts.row.score_error or ""


def _counts(episodes: Sequence[EpisodeOutline], key: Callable[[EpisodeOutline], str | None]) -> list[Count]:
    policies = policy_names(episodes)
    counts = Counter((name, facts.row.policy) for facts in episodes if (name := key(facts)) is not None)
    found = [Count(name, [counts[name, policy] for policy in policies]) for name in {name for name, _ in counts}]
    return sorted(found, key=lambda count: (-count.total, count.name))


# Cost and time


class Percentiles(NamedTuple):
    """Percentiles of durations in seconds."""

    title: str
    n: int
    p50: float
    p90: float
    p99: float
    most: float


def percentiles(title: str, values: Iterable[float | None]) -> Percentiles | None:
    """Return the percentiles of the known values, or None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = np.percentile(known, (50, 90, 99))
    return Percentiles(title, len(known), float(p50), float(p90), float(p99), max(known))


class PolicyUsage(NamedTuple):
    """The tokens, US dollars and seconds that the episodes of a policy used; None if unknown."""

    policy: str
    tokens: Mapping[str, int]
    details: Mapping[str, int]  # the parts of these tokens; see `token_details`
    cost: float | None
    unpriced: int  # the number of episodes that used tokens whose price is unknown
    judge_cost: float | None  # None if there is no judge or its price is unknown
    judge_unpriced: int  # the number of judge responses whose price is unknown
    episode_s: float | None  # the duration of all episodes together
    policy_s: float | None  # the part of `episode_s` in the policy
    environment_s: float | None  # the part of `episode_s` in the environment
    lengths: Percentiles | None  # the durations of episodes


def policy_usage(policy: str, episodes: Iterable[EpisodeOutline]) -> PolicyUsage:
    """Add up the tokens, US dollars and seconds that the episodes of a policy used."""
    own = [facts for facts in episodes if facts.row.policy == policy]
    usages = [facts.row.usage for facts in own]
    judge_costs = _judge_costs(own)
    return PolicyUsage(
        policy=policy,
        tokens={name: int(sum(usage.get(key, 0) for usage in usages)) for key, name in _TOKENS.items()},
        details=token_details(usages),
        cost=_sum(usage.get("cost") for usage in usages),
        unpriced=sum("cost" not in usage and any(usage.get(key) for key in _TOKENS) for usage in usages),
        judge_cost=_sum(judge_costs),
        judge_unpriced=judge_costs.count(None),
        episode_s=_sum(facts.duration_s for facts in own),
        policy_s=_sum(facts.policy_s for facts in own),
        environment_s=_sum(facts.environment_s for facts in own),
        lengths=percentiles("one episode", (facts.duration_s for facts in own)),
    )


def _judge_costs(episodes: Iterable[EpisodeOutline]) -> list[float | None]:
    """Return the cost of each response from the judge. Episodes judged in one call share its cost."""
    scores = (facts.score for facts in episodes if facts.score is not None)
    return list({(score.unit, score.usage): score.cost_usd for score in scores if score.usage}.values())


def episode_tokens(facts: EpisodeOutline) -> int:
    """Return the number of tokens that an episode used."""
    return int(sum(facts.row.usage.get(key, 0) for key in _TOKENS))


class ScoringFigures(NamedTuple):
    """The number, the durations and the cost of calls to the reward."""

    times: Sequence[Percentiles]  # the percentiles of waits, calls, scores and groups
    calls: int | None  # None if unknown
    retries: int
    known: int  # the number of scores that needed no call
    cost: float | None  # the US dollars reported by judges; None if no judge reports a cost
    unpriced: int  # the number of judge responses whose price is unknown
    groups: tuple[int, int]  # the numbers of complete groups and of all groups
    untimed: int  # the number of scores without times


def scoring_figures(run: RunFacts, timeline: RunTimeline | None) -> ScoringFigures:
    """Return the figures of scoring."""
    calls = timeline.calls if timeline is not None else []
    scores = [facts.score for facts in run.episodes if facts.score is not None]
    complete, groups = groups_complete(run.episodes)
    judge_costs = _judge_costs(run.episodes)
    group_times = []
    for group in grouped(run.episodes, lambda facts: facts.group_id).values():
        done, _ = groups_complete(group)
        begins = [facts.begin_s for facts in group if facts.begin_s is not None]
        group_times += [done[0] - min(begins)] if done and begins else []
    times = [
        percentiles("wait before the first call", (c.attempts[0].begin_s - c.submitted_s for c in calls if c.attempts)),
        percentiles("one call", (span.end_s - span.begin_s for call in calls for span in call.attempts)),
        percentiles("from request to score", (call.done_s - call.submitted_s for call in calls)),
        percentiles("a group, from its first episode", group_times),
    ]
    if not calls:
        times = [percentiles("one score", (score.duration_s for score in scores))]
    return ScoringFigures(
        times=[found for found in times if found is not None],
        calls=sum(len(call.attempts) for call in calls) if calls else None,
        retries=sum(max(0, len(call.attempts) - 1) for call in calls),
        known=sum(not call.attempts for call in calls),
        cost=_sum(judge_costs),
        unpriced=judge_costs.count(None),
        groups=(len(complete), groups),
        untimed=sum(score.submitted_s is None for score in scores),
    )


# Short lists


def slowest(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """Return the episodes that took longest."""
    timed = [facts for facts in episodes if facts.duration_s is not None]
    return sorted(timed, key=lambda facts: (-(facts.duration_s or 0.0), facts.row.rollout_id))[:_EXTREMES]


def worst(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """Return the scored episodes with the lowest scores; unscored episodes are excluded."""
    scored = [facts for facts in episodes if facts.row.score is not None]
    return sorted(scored, key=lambda facts: (facts.row.score or 0.0, facts.row.rollout_id))[:_EXTREMES]


def broken(episodes: Sequence[EpisodeOutline]) -> list[EpisodeOutline]:
    """Return the first episodes that ended with an error or whose scoring failed."""
    failed = (facts for facts in episodes if facts.row.is_error)
    return sorted(failed, key=lambda facts: facts.row.rollout_id)[:_EXTREMES]


# Tables filled by the page's script

_REASON_LENGTH = 400
_REASONS_IN_ALL = 1_500_000  # characters of all reasons; a larger page is slow to open
_SHORTEST_REASON = 60
_MOST_CHOICES = 60
_TEXTS = ("id", "link", "word", "text", "tags")
Cell = str | float | Sequence[str | float | None] | None
"""A list holds the displayed text and the value if they differ."""
Rows = Sequence[Sequence[Cell]]


class TableColumn(NamedTuple):
    """A column of a table."""

    key: str
    label: str
    kind: str
    filters: str | None = None  # the column of the episode table that is filtered by a click on a cell
    view: str | None = None  # the view that a click on a cell opens: "episode" or "group"
    below: str | None = (
        None  # the column in which its values are shown as second lines, instead of in a separate column
    )

    @property
    def is_figure(self) -> bool:
        """True if the grid of samples can show the values of the column."""
        return self.key == "score" or self.key.startswith(METRIC_KEY)

    @property
    def is_number(self) -> bool:
        """True if the column is right-aligned."""
        return self.kind not in _TEXTS


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table that the script of the page fills."""

    name: str
    title: str
    columns: Sequence[TableColumn]
    rows: Rows
    filters: Sequence[tuple[TableColumn, Sequence[str]]] = field(default=())  # columns with a drop-down filter
    key: int = 1  # the number of leading columns that identify a row
    is_optional: bool = False  # hidden if there are no rows
    has_matrix: bool = False  # shown below the grid of samples and policies

    def with_choices(self, *keys: str) -> DataTable:
        """Return the table with drop-down filters for columns that have few distinct values."""
        filters = []
        for index, column in enumerate(self.columns):
            if column.key in keys:
                texts = {displayed(row[index]) for row in self.rows if row[index]}
                if column.kind == "tags":
                    texts = {name for text in texts for name in text.split(SEPARATOR)}
                values = sorted(texts)
                filters += [(column, values)] if len(values) <= _MOST_CHOICES or column.key in ("error", "tags") else []
        return replace(self, filters=filters)


def tables_data(tables: Iterable[DataTable]) -> dict[str, object]:
    """Return the tables as data for the script of the page."""
    return {
        table.name: {
            "columns": [{key: value for key, value in column._asdict().items() if value} for column in table.columns],
            "rows": table.rows,
            "key": table.key,
        }
        for table in tables
    }


_SAMPLE_COLUMNS = (
    TableColumn("sample", "sample", "id", "sample"),
    TableColumn("policy", "policy", "word"),
    TableColumn("episodes", "episodes", "count"),
    TableColumn("scored", "scored", "count"),
    TableColumn("passed", "passed", "count"),
    TableColumn("errors", "errors", "count"),
    TableColumn("mean", "mean score", "score"),
    TableColumn("least", "lowest", "score"),
    TableColumn("most", "highest", "score"),
    TableColumn("steps", "steps", "mean"),
    TableColumn("tokens", "tokens", "count"),
    TableColumn("cost", "cost", "cost"),
    TableColumn("seconds", "took", "seconds"),
)
_GROUP_COLUMNS = (
    TableColumn("group", "group", "id", view="group"),
    TableColumn("sample", "sample", "id", "sample"),
    TableColumn("policy", "policy", "word"),
    TableColumn("episodes", "episodes", "count"),
    TableColumn("scored", "scored", "count"),
    TableColumn("mean", "mean score", "score"),
    TableColumn("least", "lowest", "score"),
    TableColumn("most", "highest", "score"),
    TableColumn("spread", "difference", "score"),
    TableColumn("steps", "steps", "mean"),
)
_SCORE_COLUMN = TableColumn("score", "score", "score")
_EPISODE_COLUMNS = (
    TableColumn("rollout", "episode", "id", view="episode"),
    TableColumn("sample", "sample", "id"),
    TableColumn("policy", "policy", "word"),
    _SCORE_COLUMN,
    TableColumn("outcome", "outcome", "word"),
    TableColumn("stop", "stop reason", "word"),
    TableColumn("error", "error", "word", below="outcome"),
    TableColumn("reason", "reason or error", "text"),
    TableColumn("steps", "steps", "count"),
    TableColumn("tokens", "tokens", "count"),
    TableColumn("cost", "cost", "cost"),
    TableColumn("took", "took", "seconds"),
    TableColumn("scoring", "scoring took", "seconds"),
)
_TAG_COLUMN = TableColumn("tags", "tags", "tags", below="sample")
_LOST_COLUMN = TableColumn("lost", "lost from step", "count")
_LABEL_COLUMNS = (TableColumn("label", "label", "word"), TableColumn("note", "note", "text"))


METRIC_KEY = "metric "
"""The beginning of the keys of the columns with metrics."""
_MOST_METRICS = 12


def metric_columns(episodes: Iterable[EpisodeOutline]) -> list[str]:
    """Return the names of the metrics that have a column in the table of episodes."""
    return list(dict.fromkeys(name for facts in episodes for name in facts.row.metrics))[:_MOST_METRICS]


def samples_table(episodes: Iterable[EpisodeOutline], pass_threshold: float) -> DataTable:
    """Return a table with a row for each sample and policy, sorted by name."""
    rows: list[list[Cell]] = []
    groups = grouped(episodes, lambda facts: (str(facts.row.sample_id), facts.row.policy))
    for (sample_id, policy), own in sorted(groups.items()):
        scores = _scores(own)
        figures = (
            len(own),
            len(scores),
            sum(score >= pass_threshold for score in scores),
            sum(facts.row.is_error for facts in own),
            safe_mean(scores) if scores else None,
            min(scores, default=None),
            max(scores, default=None),
            sum(facts.row.num_steps for facts in own) / len(own),
            sum(map(episode_tokens, own)),
            _sum(facts.row.usage.get("cost") for facts in own),
            _sum(facts.duration_s for facts in own),
        )
        rows.append([escape_text(sample_id, NAME_LENGTH), escape_text(policy, NAME_LENGTH), *map(digits, figures)])
    return DataTable("samples", "Samples", _SAMPLE_COLUMNS, rows, key=2).with_choices("policy")


def groups_table(episodes: Iterable[EpisodeOutline]) -> DataTable:
    """Return a table with a row for each group of at least two episodes; the largest score differences come first."""
    rows: list[tuple[tuple[float, str, str, str], list[Cell]]] = []
    for group_id, own in grouped(episodes, lambda facts: facts.group_id).items():
        if len(own) == 1:
            continue
        scores, sample_id, policy = _scores(own), str(own[0].row.sample_id), ", ".join(policy_names(own))
        spread = max(scores) - min(scores) if scores else math.inf
        figures = (
            len(own),
            len(scores),
            safe_mean(scores) if scores else None,
            min(scores, default=None),
            max(scores, default=None),
            spread if math.isfinite(spread) else None,
            sum(facts.row.num_steps for facts in own) / len(own),
        )
        names: list[Cell] = [_named(group_id), escape_text(sample_id, NAME_LENGTH), escape_text(policy, NAME_LENGTH)]
        order = (-spread if math.isfinite(spread) else 1.0, sample_id, policy, group_id)
        rows.append((order, [*names, *map(digits, figures)]))
    cells = [row for _, row in sorted(rows, key=lambda row: row[0])]
    return DataTable("groups", "Groups", _GROUP_COLUMNS, cells, is_optional=True).with_choices("policy")


def episodes_table(
    episodes: Sequence[EpisodeOutline],
    pass_threshold: float,
    labels: Mapping[str, EpisodeLabels] | None = None,
    slices: Collection[str] | None = None,
    metrics: Sequence[str] = (),
    curves: RunCurves | None = None,
) -> DataTable:
    """Return a table with a row for each episode, sorted by name.

    Args:
        episodes: the episodes.
        pass_threshold: the lowest score that passes.
        labels: the users' labels. If the run has labels, the table has columns for labels and notes.
        slices: the dataset columns whose values are shown together with the tags in an additional column.
        metrics: the metrics that have columns after the score.
        curves: the measured success probabilities. If the run has them, a column shows the step with the largest
            decrease.
    """
    length = max(_SHORTEST_REASON, min(_REASON_LENGTH, _REASONS_IN_ALL // max(1, len(episodes))))
    rows: list[list[Cell]] = []
    for facts in sorted(episodes, key=lambda facts: facts.row.rollout_id):
        row, passed = facts.row, facts.row.score is not None and facts.row.score >= pass_threshold
        outcome = "error" if row.is_error else "unscored"
        rows.append(
            [
                _named(row.rollout_id),
                _named(row.sample_id),
                _named(row.policy),
                digits(row.score),
                *(digits(row.metrics.get(name)) for name in metrics),
                outcome if row.score is None else "passed" if passed else "failed",
                escape_text(row.stop_reason, NAME_LENGTH),
                escape_text(error_class(facts), NAME_LENGTH),
                escape_text(facts.said.text, length, facts.said.length),
                row.num_steps,
                episode_tokens(facts),
                digits(row.usage.get("cost")),
                digits(facts.duration_s),
                digits(facts.score.duration_s if facts.score is not None else None),
            ]
        )
        if slices is not None:
            names = (escape_text(name, NAME_LENGTH) for name in slice_names(facts, slices))
            rows[-1].append(SEPARATOR.join(names))
        if curves is not None:
            lost = [one for curve in curves_of(facts, curves) if (one := curve.lost_at) is not None]
            rows[-1].append(max(lost)[1] if lost else None)
        if labels is not None:
            word, note = display_label(labels.get(row.rollout_id, {}))
            rows[-1] += [word, escape_text(note, _REASON_LENGTH)]
    of_metrics = (
        TableColumn(f"{METRIC_KEY}{index}", escape_text(name, NAME_LENGTH), "score")
        for index, name in enumerate(metrics)
    )
    after = _EPISODE_COLUMNS.index(_SCORE_COLUMN) + 1
    columns = [
        *_EPISODE_COLUMNS[:after],
        *of_metrics,
        *_EPISODE_COLUMNS[after:],
        *((_TAG_COLUMN,) if slices is not None else ()),
        *((_LOST_COLUMN,) if curves is not None else ()),
    ]
    columns += _LABEL_COLUMNS if labels is not None else ()
    table = DataTable("episodes", "Episodes", columns, rows, has_matrix=True)
    return table.with_choices("policy", "outcome", "stop", "error", "tags", "label")


def _named(name: str) -> Cell:
    """Return a name as it is displayed, followed by the stored name if the two differ."""
    text = escape_text(name, NAME_LENGTH)
    return text if text == name else [text, name]


def displayed(cell: Cell) -> str:
    """Return the displayed text of a cell."""
    return cell[0] if isinstance(cell, list) else str(cell)


def digits(value: float | None) -> float | None:
    """Round a number for display."""
    return None if value is None else float(f"{value:.9g}")
