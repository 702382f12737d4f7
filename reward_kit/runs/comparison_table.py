"""The table that compares runs in a terminal, followed by a sentence for each run and the samples that flipped."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from reward_kit.display_text import escape_text
from reward_kit.runs.comparison import Comparison, Difference, Gate, Side
from reward_kit.runs.display import FigureTable, cost_lines, difference_text, figure, interval_text, small_table

_NAMES_SHOWN = 10
_NAME_LENGTH = 60
_LINE_LENGTH = 2_000
_DASH = "–"
_SEEN = 5e-4
_MOST_METRICS = 40


def comparison_table(comparison: Comparison, *, plain: bool = False) -> RenderableType:
    """Return the table and the sentences below the table; `plain` omits lines and colors."""
    baseline, *others = (escape_text(side.label, _NAME_LENGTH) for side in comparison.sides)
    table = FigureTable([f"{baseline}\n(baseline)", *others], lines(comparison), is_plain=plain)
    sentences = [Text(line) for difference in comparison.differences for line in _below(comparison, difference)]
    return Group(table, *_metrics_table(comparison, plain), *sentences)


def _metrics_table(comparison: Comparison, plain: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for difference in comparison.differences:
        columns, rows = metric_lines([difference])
        cells = [[escape_text(cell, _NAME_LENGTH) for cell in row] for row in rows]
        label = escape_text(difference.side.label, _NAME_LENGTH)
        title = "\nMetrics" if len(comparison.differences) == 1 else f"\nMetrics of {label}"
        parts += small_table(title, columns, cells, is_plain=plain, full_list="--json")
    return parts


def metric_lines(differences: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the metrics that both the baseline and another run have."""
    pairs = [(metric, each) for each in differences for metric in each.metrics]
    columns = {
        "metric": [metric.name for metric, _ in pairs],
        "run": [each.side.label for _, each in pairs] if len(differences) > 1 else [],
        "baseline": [_DASH if metric.baseline_mean is None else figure(metric.baseline_mean) for metric, _ in pairs],
        "mean": [_DASH if metric.run_mean is None else figure(metric.run_mean) for metric, _ in pairs],
        "difference": [difference_text(metric.interval) for metric, _ in pairs],
        "samples": [f"{metric.samples:,}" for metric, _ in pairs],
        "missing": [f"{m.missing:,}" for m, _ in pairs] if any(m.missing for m, _ in pairs) else [],
    }
    filled = {name: cells for name, cells in columns.items() if cells}
    return [*filled], [list(cells) for cells in zip(*filled.values(), strict=True)]


def lines(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return the rows of the table. Each row consists of a name and a cell for each run."""
    sides, differences = comparison.sides, comparison.differences
    corrected = len(differences) > 1
    # Show the means of the common samples if they differ from the means of all episodes.
    means = [
        (side.summary.score, mean)
        for each in differences
        for side, mean in ((comparison.baseline, each.baseline_mean), (each.side, each.run_mean))
    ]
    are_others = any(interval is None or abs(mean - interval.mean) > _SEEN for interval, mean in means)
    common = [f"{figure(each.run_mean)} (baseline {figure(each.baseline_mean)})" for each in differences]
    rows = [
        ("mean score", [interval_text(side.summary.score) for side in sides]),
        ("common samples", ["", *(f"{len(each.pairs):,}" for each in differences)]),
        *([("mean of common", ["", *common])] if are_others else []),
        ("difference", ["", *(difference_text(each.figures.interval) for each in differences)]),
        ("p (permutation)", ["", *(p_text(each.figures.permutation.p) for each in differences)]),
        *([("p, corrected (Holm)", ["", *(p_text(each.p_holm) for each in differences)])] if corrected else []),
        ("effect (Cohen's d_z)", ["", *(signed_short(each.figures.cohens_dz) for each in differences)]),
        ("samples won, lost", ["", *(f"{len(e.flipped('won'))}, {len(e.flipped('lost'))}" for e in differences)]),
        ("p (McNemar)", ["", *(p_text(each.p_mcnemar) for each in differences)]),
        ("pass@1", [share_text(side.summary.pass_at_1) for side in sides]),
        ("episodes (scored)", [f"{side.summary.episodes:,} ({side.summary.scored:,})" for side in sides]),
    ]
    if any(side.summary.tokens for side in sides):
        rows.append(("tokens (per episode)", [tokens_text(side) for side in sides]))
    return rows + cost_lines([side.summary for side in sides])


def sentence(comparison: Comparison, difference: Difference) -> str:
    """Return a sentence that states the conclusion about a run."""
    label, base = difference.side.label, comparison.baseline.label
    figures = difference.figures
    found = difference_text(figures.interval)
    if difference.verdict in ("better", "worse"):
        return f"{label} is {difference.verdict} than {base}: {found}, p {p_text(difference.p_holm)}"
    if difference.verdict == "doubtful":
        p = p_text(difference.p_holm)
        return f"{label} and {base} may differ: {found}, p {p}; the interval and the test disagree; add samples"
    return f"the results do not show a difference between {label} and {base}: {found}"


def _left_out_text(difference: Difference) -> str | None:
    """Describe the samples that are not compared, or return None if all are compared."""
    left = difference.left_out
    parts = [
        (left.unscored_in_baseline, "unscored in the baseline"),
        (left.unscored_in_run, "unscored in the run"),
        (left.only_in_baseline, "only in the baseline"),
        (left.only_in_run, "only in the run"),
        (left.no_rollout_in_both, "without a rollout that is scored in both runs"),
    ]
    text = ", ".join(f"{count:,} {what}" for count, what in parts if count)
    return f"{difference.side.label}: left out: {text}" if text else None


def _paired_text(difference: Difference) -> str | None:
    """Describe why rollouts are paired and how many pairs there are, or return None if they are not paired."""
    pairing = difference.pairing
    if not pairing.is_rescoring and not pairing.single_rollouts:
        return None
    why = "the same episodes are scored in both" if pairing.is_rescoring else "both runs have the same rollouts"
    text = (
        f"{difference.side.label}: {why}, so they are paired by rollout: {pairing.rollouts:,} have a score in both runs"
    )
    if pairing.single_rollouts:
        text += f"; {pairing.single_rollouts:,} have a score in only one run and are excluded"
    return text


def _below(comparison: Comparison, difference: Difference) -> list[str]:
    texts = [sentence(comparison, difference)]
    directions: tuple[Literal["won", "lost"], ...] = ("won", "lost")
    for direction in directions:
        if pairs := difference.flipped(direction):
            names = ", ".join(escape_text(pair.sample_id, _NAME_LENGTH) for pair in pairs[:_NAMES_SHOWN])
            more = f" and {len(pairs) - _NAMES_SHOWN:,} more" if len(pairs) > _NAMES_SHOWN else ""
            texts.append(f"  {direction} ({len(pairs):,}): {names}{more}")
    return [escape_text(text, _LINE_LENGTH) for text in texts]


def comparison_notes(comparison: Comparison) -> list[str]:
    """Return notes about the limitations of the figures."""
    notes = []
    for difference in comparison.differences:
        notes += [f"{difference.side.label}: {mismatch.message}" for mismatch in difference.mismatches]
        notes += [text for text in (_paired_text(difference), _left_out_text(difference)) if text is not None]
    for side in comparison.sides:
        summary = side.summary
        if side.unfinished:
            notes.append(f"{side.label}: {side.unfinished:,} episodes of the run are missing")
        if unscored := summary.episodes - summary.scored:
            counts = f"{unscored:,} of {summary.episodes:,} episodes are unscored"
            notes.append(f"{side.label}: {counts} and are excluded from the means")
        if len(side.scorers) > 1:
            notes.append(f"{side.label}: the scores come from different rewards: {', '.join(sorted(side.scorers))}")
    return [escape_text(note, _LINE_LENGTH) for note in notes]


_MARKUP = re.compile(r"([\\`*_\[\]<>|#~&])")


def comparison_markdown(comparison: Comparison, gates: Sequence[Gate] = ()) -> str:
    """Return the comparison as Markdown: the conclusions, the gates, the table, and the notes."""
    conclusions = [line.strip() for difference in comparison.differences for line in _below(comparison, difference)]
    for gate in gates:
        conclusions.append(f"Gate {'failed' if gate.failed else 'passed'}: {escape_text(gate.message, _LINE_LENGTH)}")
    names = [escape_text(side.label, _NAME_LENGTH) for side in comparison.sides]
    columns = ["", f"{names[0]} (baseline)", *names[1:]]
    table = markdown_table(columns, [[name, *cells] for name, cells in lines(comparison)], left=[""])
    above, below = (
        "\n".join(f"- {_escape_markdown(text)}" for text in texts)
        for texts in (conclusions, comparison_notes(comparison))
    )
    columns, metrics = metric_lines(comparison.differences)
    cut = [[escape_text(cell, _NAME_LENGTH) for cell in cells] for cells in metrics[:_MOST_METRICS]]
    of_metrics = markdown_table(columns, cut, left=["metric", "run"]) if metrics else ""
    return "\n\n".join(block for block in ("### Evaluation", above, table, of_metrics, below) if block)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str]) -> str:
    """Return a Markdown table. The columns in `left` are aligned to the left, and the others to the right."""
    header, *body = ("| " + " | ".join(map(_escape_markdown, cells)) + " |" for cells in [columns, *rows])
    rule = "|" + "".join("---|" if column in left else "---:|" for column in columns)
    return "\n".join([header, rule, *body])


def _escape_markdown(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)


def p_text(p: float) -> str:
    """Format a p-value for a table."""
    return "<0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def signed_short(value: float | None) -> str:
    """Format an effect size."""
    return _DASH if value is None else f"{value:+.2f}".replace("-", "−")


def share_text(value: float | None) -> str:
    """Format a share as a percentage."""
    return _DASH if value is None else f"{value:.1%}"


def tokens_text(side: Side) -> str:
    """Format the number of tokens of all episodes, and the number per episode."""
    tokens = side.summary.tokens
    return f"{tokens:,} ({tokens / side.summary.episodes:,.0f})"
