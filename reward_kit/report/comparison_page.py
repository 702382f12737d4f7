"""The page of a comparison: one self-contained file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError
from reward_kit.report.rendering import NAME_LENGTH, Drawing, as_script_data, bundle, r2, render, round_step
from reward_kit.report.run_figures import Cell, DataTable, TableColumn, digits, tables_data
from reward_kit.runs.comparison import CONFIDENCE, Comparison, Difference, SampleScores, Side
from reward_kit.runs.comparison_table import comparison_notes, lines, sentence
from reward_kit.runs.display import signed
from reward_kit.runs.files import write_atomically
from reward_kit.runs.run_folder import software_versions

_MOST_ROWS = 60_000  # the number of samples; larger pages are slow to open
_SENTENCE_LENGTH = 1_000
_CHANGES = ("lost", "won", "worse", "better", "same", "left out")
_COLUMNS = (
    TableColumn("change", "change", "word"),
    TableColumn("sample", "sample", "id"),
    TableColumn("run", "run", "word"),
    TableColumn("baseline", "baseline", "score"),
    TableColumn("score", "this run", "score"),
    TableColumn("difference", "difference", "signed"),
    TableColumn("before", "passed in the baseline", "word"),
    TableColumn("after", "passed in this run", "word"),
)
_WIDTH, _EDGE, _ROW, _TOP = 480.0, 24.0, 64.0, 4.0
_BAR, _HALF = 48.0, 10.0  # y of the bar within a row, and how far lines extend beyond it
_LABEL_LENGTH = 70
_TICKS = 3


def write_comparison(comparison: Comparison, target: Path) -> Path:
    """Write the page of a comparison, and return its file."""
    if not target.parent.is_dir():
        raise ConfigError(f"-o {target}: directory {target.parent} does not exist; create it first")
    write_atomically(target, comparison_page(comparison).encode("utf-8"), is_private=False)
    return target


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML."""
    sides, samples = comparison.sides, samples_table(comparison)
    baseline = escape_text(comparison.baseline.label, NAME_LENGTH)
    figures = [
        ("run", [side.run_id for side in sides]),
        ("policy", [side.policy for side in sides]),
        ("status", [side.header.status for side in sides]),
        ("seed", [str(side.header.seed) if side.header.task_path is not None else "–" for side in sides]),
        *lines(comparison),
    ]
    page = {
        "title": f"{len(sides)} runs compared"
        if len(sides) > 2
        else f"{escape_text(sides[1].label, NAME_LENGTH)} beside {baseline}",
        "version": software_versions()["reward_kit"],
        "facts": [
            f"baseline {baseline}",
            f"{CONFIDENCE:.0%} intervals, paired by sample",
            f"seed:  {comparison.seed}",
        ],
        "notes": [escape_text(note, _SENTENCE_LENGTH) for note in comparison_notes(comparison)],
        "sentences": [
            (one.verdict.replace(" ", "-"), escape_text(sentence(comparison, one), _SENTENCE_LENGTH))
            for one in comparison.differences
        ],
        "forest": draw_forest(comparison),
        "labels": [escape_text(side.label, NAME_LENGTH) for side in sides],
        "lines": [(name, [escape_text(cell, NAME_LENGTH) for cell in cells]) for name, cells in figures],
        "samples": samples,
    }
    return render(
        "compare.html.j2",
        page,
        styles=("page.css", "compare.css"),
        script=bundle(("base.js", "tables.js")),
        trusted={"data": as_script_data(tables_data([samples]))},
    )


def draw_forest(comparison: Comparison) -> Drawing:
    """Draw the interval of each run's difference below its name, around the line at 0; it fits a phone."""
    differences = comparison.differences
    intervals = [each.figures.interval for each in differences]
    ends = [abs(end) for one in intervals for end in (one.low, one.mean, one.high) if end is not None]
    reach = max(1.05 * max(ends), 1e-9)
    step = round_step(reach / _TICKS)
    marks = [count * step for count in range(-int(reach / step), int(reach / step) + 1)]

    def x(value: float) -> float:
        return r2(_WIDTH / 2 + (value / reach) * (_WIDTH / 2 - _EDGE))

    text = "; ".join(f"{each.side.label}: {_interval_text(each)}" for each in differences)
    height = _TOP + _ROW * len(differences) + 20
    drawing = Drawing(f"Differences from the baseline: {escape_text(text, 2_000)}", _WIDTH, height)
    for index, (each, interval) in enumerate(zip(differences, intervals, strict=True)):
        top = _TOP + index * _ROW
        y = top + _BAR
        drawing.label(_EDGE, top + 14, escape_text(each.side.label, _LABEL_LENGTH), "start", "title")
        drawing.label(_EDGE, top + 30, _interval_text(each))
        for mark in marks:
            drawing.path(f"M{x(mark)} {y - _HALF}V{y + _HALF}", "grid" if mark else "zero")
        if interval.low is not None and interval.high is not None:
            kind = each.verdict if each.verdict in ("better", "worse") else "open"
            drawing.path(f"M{x(interval.low)} {y}H{x(interval.high)}", f"range {kind}")
        at = x(interval.mean)
        drawing.path(f"M{at} {y - 6}L{r2(at + 6)} {y}L{at} {y + 6}L{r2(at - 6)} {y}Z", "point")
    for mark in marks:
        drawing.label(x(mark), height - 6, signed(mark), "middle", "faint")
    return drawing


def _interval_text(difference: Difference) -> str:
    interval = difference.figures.interval
    return f"{signed(interval.mean)} [{signed(interval.low)}, {signed(interval.high)}]"


def samples_table(comparison: Comparison) -> DataTable:
    """Return a row per sample and run compared with the baseline: flips first, then by size of change."""
    rows = [row for difference in comparison.differences for row in _rows(comparison.baseline, difference)]
    rows.sort(key=lambda row: (_CHANGES.index(str(row[0])), -abs(row[5] if isinstance(row[5], float) else 0.0), row[1]))
    title = "Samples" if len(rows) <= _MOST_ROWS else f"Samples (the first {_MOST_ROWS:,} of {len(rows):,})"
    table = DataTable("samples", title, _COLUMNS, rows[:_MOST_ROWS], key=3)
    if len(comparison.differences) == 1:  # drop the column with one value
        index = [column.key for column in _COLUMNS].index("run")
        columns = [*table.columns[:index], *table.columns[index + 1 :]]
        table = replace(table, columns=columns, rows=[[*row[:index], *row[index + 1 :]] for row in table.rows], key=2)
    return table.with_choices("change", "run")


def _rows(baseline: Side, difference: Difference) -> list[list[Cell]]:
    side, label, rows = difference.side, escape_text(difference.side.label, NAME_LENGTH), []
    for pair in difference.pairs:
        change = pair.flip or ("same" if pair.difference == 0.0 else "better" if pair.difference > 0.0 else "worse")
        rows.append(_row(change, pair.sample_id, label, pair.baseline, pair.run))
    every = {*baseline.samples, *baseline.unscored, *side.samples, *side.unscored}
    for name in sorted(every - {pair.sample_id for pair in difference.pairs}):
        rows.append(_row("left out", name, label, baseline.samples.get(name), side.samples.get(name)))
    return rows


def _row(change: str, sample: str, label: str, before: SampleScores | None, after: SampleScores | None) -> list[Cell]:
    both: Sequence[SampleScores | None] = (before, after)
    difference = after.mean - before.mean if before and after else None
    means = [digits(scores.mean if scores else None) for scores in both]
    passed = [f"{scores.passed} of {scores.scored}" if scores else "" for scores in both]
    return [change, escape_text(sample, NAME_LENGTH), label, *means, digits(difference), *passed]
