"""The page of a run. The functions create its content in reading order."""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary
from reward_kit.report import run_figures as figures
from reward_kit.report.episode_chunks import MOST_INLINE, ChunkData, ChunkReader, beside, forget_others, within
from reward_kit.report.rendering import (
    DASH,
    NAME_LENGTH,
    RUN_SCRIPTS,
    RUN_STYLES,
    as_script_data,
    bundle,
    dollars,
    render,
    seconds,
    share,
    status_text,
)
from reward_kit.report.run_data import RunFacts, curves_of, read_run
from reward_kit.report.run_slices import slice_columns, slice_rows
from reward_kit.report.timeline import MOST_BARS, RunTimeline, build_timeline, covered_seconds, draw_timeline
from reward_kit.report.training_data import read_training
from reward_kit.report.training_page import training_page
from reward_kit.runs.card import CardSection, card_sections, run_card
from reward_kit.runs.display import metric_rows
from reward_kit.runs.files import COUNTERFACTUALS_FILE, REPORT_FILE, write_atomically
from reward_kit.runs.label_file import EpisodeLabels
from reward_kit.runs.run_folder import RunHeader, current_status, resume_command
from reward_kit.runs.statistics import Interval
from reward_kit.runs.summary import TOKEN_DETAILS, PolicySummary, summarize

_CARD_LENGTH = 400
logger = logging.getLogger("reward_kit.runs")


def write_report(run: Path, target: Path | None = None) -> Path:
    """Write the page of a run or a training run. Episodes of a large run are stored in separate files."""
    header = RunHeader.read_folder(run)
    is_private, target = target is None, target or run / REPORT_FILE
    if not target.parent.is_dir():
        raise ConfigError(f"-o {target}: directory {target.parent} does not exist; create it first")
    if header.training is not None:
        page = training_page(read_training(run))
        write_atomically(target, page.encode("utf-8"), is_private=is_private)
        return target
    facts = read_run(run)
    with ChunkReader(facts) as reader:
        is_small = reader.stored_bytes <= MOST_INLINE
        data = within(run, reader) if is_small else beside(run, reader, target, is_private=is_private)
    write_atomically(target, run_page(facts, data).encode("utf-8"), is_private=is_private)
    forget_others(target, data)
    return target


def write_page(run: Path) -> tuple[Path | None, RewardKitError | None]:
    """Write `report.html`. Errors are only logged, since `reward-kit view RUN -o` can write the file later."""
    try:
        with boundary(StoreError, "the report"):
            return write_report(run), None
    except RewardKitError as error:
        logger.warning("the report was not written: %s", error)
        return None, error


def run_page(
    run: RunFacts,
    data: ChunkData,
    extra_script: str = "",
    *,
    has_rows: bool = True,
    columns: Collection[str] | None = None,
    metrics: Sequence[str] | None = None,
) -> str:
    """Return the page of a run as HTML.

    The page shows slices for the columns in `slices`; by default, these are the dataset columns with few values. The
    table of episodes has a column for each of the `metrics`; by default, these are the metrics of the episodes.
    """
    header, timeline = run.header, build_timeline(run)
    listed = run.episodes if has_rows else []
    summaries = summarize((facts.row for facts in run.episodes), run.pass_threshold)
    scoring = figures.scoring_figures(run, timeline)
    policies = figures.policy_names(run.episodes)
    labels = run.labels if run.labels or data.mode == "server" else None
    columns = slice_columns(run.episodes) if columns is None else columns
    metrics = figures.metric_columns(run.episodes) if metrics is None else metrics
    slices = slice_rows(run.episodes, columns, policies, run.pass_threshold)
    has_tags = bool(slices) or data.mode == "server"
    curves = run.curves if run.curves.curves or data.mode == "server" else None
    tags = columns if has_tags else None
    episodes = figures.episodes_table(listed, run.pass_threshold, labels, tags, metrics, curves)
    tables = (figures.samples_table(listed, run.pass_threshold), figures.groups_table(listed))
    spent = [figures.policy_usage(policy, run.episodes) for policy in policies]
    has_judge = any(one.judge_cost is not None or one.judge_unpriced for one in spent)
    status = status_text(current_status(run.path, header))
    page = {
        "title": escape_text(header.task_name, NAME_LENGTH),
        "run_id": escape_text(header.run_id or run.path.name, NAME_LENGTH),
        "status": status,
        "version": header.versions.get("reward_kit", ""),
        "facts": _facts(run),
        "notes": _notes(run, summaries, status),
        "policies": [escape_text(policy, NAME_LENGTH) for policy in policies],
        "summaries": [(one, _is_share(one.score)) for one in summaries],
        "histograms": [
            (
                escape_text(found.policy, NAME_LENGTH),
                figures.draw_histogram(found),
                f"{found.scored:,} scores" + (f", {found.unscored:,} unscored" if found.unscored else ""),
            )
            for found in figures.histograms(run.episodes)
        ],
        "metrics": metric_rows(summaries),
        "stop_reasons": figures.stop_reasons(run.episodes),
        "failure_classes": figures.failure_classes(run.episodes),
        "slices": slices,
        "spent": [(one, _costs(one, has_judge=has_judge)) for one in spent],
        "has_judge": has_judge,
        "token_details": {key: name for key, name in TOKEN_DETAILS.items() if any(key in one.details for one in spent)},
        "card": _card(run, summaries),
        "timeline": draw_timeline(timeline) if timeline is not None else None,
        "timeline_notes": _timeline_notes(run, timeline, scoring),
        "scoring": scoring,
        "scoring_lines": _scoring_lines(timeline, scoring),
        "broken": figures.broken(run.episodes),
        "worst": figures.worst(run.episodes),
        "slowest": figures.slowest(run.episodes),
        "has_groups": bool(tables[1].rows),
        "episodes": episodes,
        "tables": tables,
    }
    tables_data = figures.tables_data((episodes, *tables))
    if data.mode != "server":
        tables_data["labels"] = {name: labels_data(own) for name, own in run.labels.items()}
    return render(
        "report.html.j2",
        page,
        styles=RUN_STYLES if curves is None else (*RUN_STYLES, "success.css"),
        script=bundle(RUN_SCRIPTS if curves is None else (*RUN_SCRIPTS, "success.js")) + extra_script,
        trusted={
            "data": as_script_data(tables_data),
            "index": data.index,
            "chunks": data.texts,
        },
        script_sources=" 'self' file:" if data.mode == "files" else "",
        may_connect=data.mode == "server",
        mode=data.mode,
    )


def _card(run: RunFacts, summaries: Sequence[PolicySummary]) -> list[CardSection]:
    card = run_card(run.header, [facts.row for facts in run.episodes], summaries, run.repeated_cost)
    return [
        CardSection(
            escape_text(title, NAME_LENGTH),
            [(escape_text(name, NAME_LENGTH), escape_text(text, _CARD_LENGTH)) for name, text in lines],
        )
        for title, lines in card_sections(card)
    ]


def labels_data(labels: EpisodeLabels) -> dict[str, dict[str, str | float | None]]:
    """Return the labels of an episode for the page, keyed by step; the key "episode" stands for the episode itself."""
    return {"episode" if step is None else str(step): label._asdict() for step, label in labels.items()}


def _facts(run: RunFacts) -> list[str]:
    header = run.header
    facts = [
        escape_text(header.run_id or run.path.name, NAME_LENGTH),
        f"began {header.timing.started_at:%Y-%m-%d %H:%M} UTC",
        *([f"took {seconds(header.timing.worked_s)}"] if header.timing.worked_s else []),  # unknown until a run stops
        f"{len(run.episodes):,} of {header.total:,} episodes",
        f"pass threshold {run.pass_threshold:g}",
    ]
    if header.data is not None:
        return [*facts, f"scored with {escape_text(header.reward, NAME_LENGTH)}"]
    facts.append(f"seed {header.seed}")
    return [*facts, f"concurrency {header.max_concurrency}"] if header.max_concurrency is not None else facts


def _notes(run: RunFacts, summaries: Iterable[PolicySummary], status: str) -> list[str]:
    """Return the notes that are shown before the figures."""
    notes = []
    missing = run.header.total - len(run.episodes)
    if missing > 0:
        notes.append(f"{missing:,} of {run.header.total:,} episodes are missing; the figures cover the others.")
        if command := resume_command(run.path, run.header, status):
            notes.append(f"Resume the run with: {escape_text(shlex.join(command), 400)}")
    if run.unfinished:
        notes.append(f"{run.unfinished:,} episodes were cut off by a run limit and are not counted.")
    if run.earlier_attempts:
        notes.append(f"{run.earlier_attempts:,} attempts were replaced by later ones; only the latest attempt counts.")
    if repeated := run.repeated_cost:
        notes.append(f"The costs below do not include {dollars(repeated)} for replaced and unfinished attempts.")
    if run.curves.problem is not None:
        notes.append(f"The success probabilities cannot be read: {escape_text(run.curves.problem, 400)}")
    measured = sum(map(len, run.curves.curves.values()))
    if foreign := measured - sum(len(curves_of(facts, run.curves)) for facts in run.episodes):
        lines = f"{foreign:,} of {measured:,} lines of {COUNTERFACTUALS_FILE} are not shown"
        notes.append(f"{lines}: they belong to a different run, or to an earlier attempt or score of the episode.")
    for summary in summaries:
        if unscored := summary.episodes - summary.scored:
            policy = escape_text(summary.policy, NAME_LENGTH)
            notes.append(
                f"{policy}: {unscored:,} of {summary.episodes:,} episodes are unscored and are excluded from the means."
            )
    return notes


def _is_share(score: Interval | None) -> bool:
    """Return True if a mean and its interval are between 0 and 1."""
    bounds = () if score is None else (score.mean, score.low, score.high)
    return bool(bounds) and all(bound is None or 0.0 <= bound <= 1.0 for bound in bounds)


def _cost(cost: float | None, unpriced: int, tokens: int) -> str:
    if cost is None:
        return "unknown" if tokens else DASH
    return f"at least {dollars(cost)} ({unpriced:,} without a price)" if unpriced else dollars(cost)


def _costs(used: figures.PolicyUsage, *, has_judge: bool) -> list[str]:
    """Return the cost of a policy and, in a run with a judge, also the cost of the judge and the total cost."""
    tokens = sum(used.tokens.values())
    costs = [_cost(used.cost, used.unpriced, tokens)]
    if has_judge:
        known = [cost for cost in (used.cost, used.judge_cost) if cost is not None]
        unpriced = used.unpriced + used.judge_unpriced
        costs.append(_cost(used.judge_cost, used.judge_unpriced, used.judge_unpriced))
        costs.append(_cost(math.fsum(known) if known else None, unpriced, unpriced))
    return costs


def _timeline_notes(run: RunFacts, timeline: RunTimeline | None, scoring: figures.ScoringFigures) -> list[str]:
    """Return the notes that are shown with the timeline."""
    notes = []
    if run.header.data is not None:
        notes.append("These episodes were collected elsewhere; the timeline shows only scoring.")
    if scoring.untimed:
        notes.append(
            f"{scoring.untimed:,} scores have no request and arrival times, because an older release wrote them."
        )
    if timeline is None:
        return [*notes, "The files of this run contain no times, so there is no timeline."]
    if not timeline.bands:
        notes.append(
            f"Only totals are drawn, because there are more than about {MOST_BARS} bars or more lanes than fit."
        )
    elif any("without waiting requests" in band.title for band in timeline.bands):
        notes.append("The scoring lanes show only calls, because waiting requests would need more lanes than fit.")
    return notes


def _scoring_lines(timeline: RunTimeline | None, scoring: figures.ScoringFigures) -> Sequence[tuple[str, str]]:
    complete, groups = scoring.groups
    lines = [("groups complete", f"{complete:,} of {groups:,}")] if timeline is not None and timeline.calls else []
    if scoring.calls is not None:
        lines.append(("reward calls", f"{scoring.calls:,}"))
        lines.append(("retries", f"{scoring.retries:,}"))
        lines.append(("scored without a call", f"{scoring.known:,}"))
    if scoring.cost is not None or scoring.unpriced:
        lines.append(("scoring cost", _cost(scoring.cost, scoring.unpriced, tokens=1)))
    if timeline is not None:
        lines += [(strip.title.lower(), f"peak {strip.peak:,}") for strip in timeline.strips]
        called_s = covered_seconds(timeline.calling)
        if timeline.alone_s is not None and called_s:
            overlap = f"{share(timeline.overlap_s / called_s)} of {seconds(called_s)}"
            lines.append(("calls during episodes", overlap))
            lines.append(("scoring after the last episode", seconds(timeline.alone_s)))
    return lines or [("scoring", "unknown")]
