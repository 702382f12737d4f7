"""What the page says: all that its template shows, in words and figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reward_kit.display_text import shown
from reward_kit.runs.report import figures
from reward_kit.runs.report.data import NAME_LENGTH, DataTable, episodes_table, groups_table, samples_table
from reward_kit.runs.report.drawing import Drawing, draw_histogram, draw_timeline
from reward_kit.runs.report.figures import Count, ScoringFigures, Spent
from reward_kit.runs.report.reading import EpisodeOutline, RunFacts
from reward_kit.runs.report.timeline import MOST_BARS, Timeline, length_of, timeline_of
from reward_kit.runs.report.wording import DASH, counted, dollars, number, seconds, share
from reward_kit.runs.summary import PolicySummary, summarise

_REASON_LENGTH = 300


class Card(NamedTuple):
    """The headline of one policy; `has_scale` where its mean lies between 0 and 1."""

    policy: str
    summary: PolicySummary
    unscored: int
    errors: int
    has_scale: bool


class EpisodeLine(NamedTuple):
    """An episode in one of the short lists, in words; `key` is its id as it is stored, `rollout_id` as it is shown."""

    key: str
    rollout_id: str
    score: str
    took: str
    steps: int
    ended_by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Page:
    """What the template shows; texts of strangers went through `shown`."""

    title: str
    run_id: str
    status: str
    version: str
    facts: Sequence[str]
    notes: Sequence[str]
    policies: Sequence[str]
    cards: Sequence[Card]
    histograms: Sequence[tuple[str, Drawing, str]]
    stop_reasons: Sequence[Count]
    failure_classes: Sequence[Count]
    spent: Sequence[Spent]
    timeline: Drawing | None
    timeline_notes: Sequence[str]
    scoring: ScoringFigures
    scoring_lines: Sequence[tuple[str, str]]
    broken: Sequence[EpisodeLine]
    worst: Sequence[EpisodeLine]
    slowest: Sequence[EpisodeLine]
    samples: DataTable
    groups: DataTable
    episodes: DataTable

    @property
    def tables(self) -> Sequence[DataTable]:
        """Those that the script fills, in order."""
        return self.samples, self.groups, self.episodes

    def cost_of(self, spent: Spent) -> str:
        """What a policy cost, and whether that is all of it."""
        return _cost(spent.cost, spent.unpriced, has_tokens=any(spent.tokens.values()))


def page_of(run: RunFacts, *, has_rows: bool = True) -> Page:
    """What the page of a run says; without its rows the tables are empty, and somebody else fills them."""
    header, timeline = run.header, timeline_of(run)
    listed = run.episodes if has_rows else []
    summaries = summarise((facts.row for facts in run.episodes), run.pass_threshold)
    scoring = figures.scoring_figures(run, timeline)
    return Page(
        title=shown(header.task_name, NAME_LENGTH),
        run_id=shown(header.run_id or run.path.name, NAME_LENGTH),
        status=header.status if header.status in ("complete", "failed", "interrupted", "running") else "unknown",
        version=header.versions.get("reward_kit", ""),
        facts=_facts(run),
        notes=_notes(run, summaries),
        policies=[shown(policy, NAME_LENGTH) for policy in figures.policies_of(run.episodes)],
        cards=[_card(summary) for summary in summaries],
        histograms=[
            (shown(found.policy, NAME_LENGTH), draw_histogram(found), _spread(found))
            for found in figures.histograms(run.episodes)
        ],
        stop_reasons=_shown_counts(figures.stop_reasons(run.episodes)),
        failure_classes=_shown_counts(figures.failure_classes(run.episodes)),
        spent=[_spent(policy, run.episodes) for policy in figures.policies_of(run.episodes)],
        timeline=draw_timeline(timeline) if timeline is not None else None,
        timeline_notes=_timeline_notes(run, timeline, scoring),
        scoring=scoring,
        scoring_lines=_scoring_lines(timeline, scoring),
        broken=_lines(figures.broken(run.episodes)),
        worst=_lines(figures.worst(run.episodes)),
        slowest=_lines(figures.slowest(run.episodes)),
        samples=samples_table(figures.sample_rows(listed, run.pass_threshold)),
        groups=groups_table(figures.group_rows(listed)),
        episodes=episodes_table(listed, run.pass_threshold),
    )


def _facts(run: RunFacts) -> list[str]:
    header = run.header
    told = [
        shown(header.run_id or run.path.name, NAME_LENGTH),
        f"began {header.timing.started_at:%Y-%m-%d %H:%M} UTC",
        f"worked {seconds(header.timing.worked_s)}",
        f"{len(run.episodes):,} of {header.total:,} episodes",
        f"passes at {run.pass_threshold:g}",
    ]
    if header.data is not None:
        return [*told, f"scored with {shown(header.reward, NAME_LENGTH)}"]
    width = f"{header.max_concurrency} at a time" if header.max_concurrency is not None else ""
    return [*told, f"seed {header.seed}", *([width] if width else [])]


def _notes(run: RunFacts, summaries: Iterable[PolicySummary]) -> list[str]:
    """What a reader must know before believing the figures."""
    notes = []
    missing = run.header.total - len(run.episodes)
    if missing > 0:
        notes.append(
            f"{missing:,} of {run.header.total:,} episodes are missing: the figures are of those that are there."
        )
    if run.unfinished:
        notes.append(f"{run.unfinished:,} episodes were cut off by a limit of the run, and are no results.")
    if run.earlier_attempts:
        notes.append(f"{run.earlier_attempts:,} earlier attempts of episodes were run again; the latest ones count.")
    for summary in summaries:
        unscored = summary.episodes - summary.scored
        if unscored:
            policy = shown(summary.policy, NAME_LENGTH)
            notes.append(f"{policy}: {unscored:,} of {summary.episodes:,} episodes are unscored, and in no average.")
    return notes


def _card(summary: PolicySummary) -> Card:
    has_scale = summary.score is not None and all(
        bound is None or 0.0 <= bound <= 1.0 for bound in (summary.score.mean, summary.score.low, summary.score.high)
    )
    unscored = summary.episodes - summary.scored
    return Card(shown(summary.policy, NAME_LENGTH), summary, unscored, counted(summary.errors), has_scale)


def _spread(found: figures.Histogram) -> str:
    return f"{found.scored:,} scores" + (f", {found.unscored:,} unscored" if found.unscored else "")


def _spent(policy: str, episodes: Sequence[EpisodeOutline]) -> Spent:
    return figures.spent_by(policy, episodes)._replace(policy=shown(policy, NAME_LENGTH))


def _shown_counts(counts: Iterable[Count]) -> list[Count]:
    return [count._replace(name=shown(count.name, NAME_LENGTH)) for count in counts]


def _cost(cost: float | None, unpriced: int, *, has_tokens: bool) -> str:
    if cost is None:
        return "unknown" if has_tokens else DASH
    return f"at least {dollars(cost)} ({unpriced:,} without a price)" if unpriced else dollars(cost)


def _lines(episodes: Iterable[EpisodeOutline]) -> list[EpisodeLine]:
    return [
        EpisodeLine(
            key=facts.row.rollout_id,
            rollout_id=shown(facts.row.rollout_id, NAME_LENGTH),
            score=number(facts.row.score),
            took=seconds(facts.duration_s),
            steps=facts.row.num_steps,
            ended_by=shown(facts.row.stop_reason, NAME_LENGTH),
            reason=shown(facts.said.text, _REASON_LENGTH, facts.said.length),
        )
        for facts in episodes
    ]


def _timeline_notes(run: RunFacts, timeline: Timeline | None, scoring: ScoringFigures) -> list[str]:
    """What the picture leaves out, and what nobody knows."""
    notes = []
    if run.header.data is not None:
        notes.append("These episodes were collected elsewhere; what is drawn is how they were scored.")
    if scoring.untimed:
        notes.append(
            f"{scoring.untimed:,} scores have no times: their lines are of a release that did not keep them. "
            "When they were asked for, waited and were there is not known."
        )
    if timeline is None:
        return [*notes, "The files of this run tell no times, so there is nothing to draw."]
    if not timeline.bands:
        notes.append(f"For more than about {MOST_BARS} bars, or more slots than fit, the sums are drawn alone.")
    elif any("without what waits" in band.title for band in timeline.bands):
        notes.append("Calls alone are in the lanes of scoring: what waits would take more lanes than fit.")
    return notes


def _scoring_lines(timeline: Timeline | None, scoring: ScoringFigures) -> list[tuple[str, str]]:
    complete, groups = scoring.groups
    lines = [("groups complete", f"{complete:,} of {groups:,}")] if timeline is not None and timeline.calls else []
    if scoring.calls is not None:
        lines.append(("calls of the reward", f"{scoring.calls:,}"))
        lines.append(("of these, made again", f"{scoring.retries:,}"))
        lines.append(("answered without a call", f"{scoring.known:,}"))
    if scoring.cost is not None or scoring.unpriced:
        lines.append(("cost of scoring", _cost(scoring.cost, scoring.unpriced, has_tokens=True)))
    if timeline is not None:
        lines += [(strip.title.lower(), f"at most {strip.peak:,} at once") for strip in timeline.strips]
        lines += _overlap_lines(timeline)
    return lines or [("scoring", "nothing is known of it")]


def _overlap_lines(timeline: Timeline) -> list[tuple[str, str]]:
    called_s = length_of(timeline.calling)
    if timeline.alone_s is None or not called_s:
        return []
    return [
        ("calls while episodes went on", f"{share(timeline.overlap_s / called_s)} of {seconds(called_s)}"),
        ("scoring after the last episode", seconds(timeline.alone_s)),
    ]
