"""The HTML page of a comparison, as a single self-contained file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError
from reward_kit.report.rendering import NAME_LENGTH, Drawing, as_script_data, bundle, href, r2, render, round_step
from reward_kit.report.run_figures import Cell, DataTable, TableColumn, digits, tables_data
from reward_kit.runs.comparison import CONFIDENCE, Comparison, Difference, SampleScores, Side
from reward_kit.runs.comparison_table import comparison_notes, lines, metric_lines, sentence
from reward_kit.runs.display import signed
from reward_kit.runs.files import REPORT_FILE, write_atomically
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
LinkedSide = tuple[Side, str]
"""A side and the address of its report."""


def write_comparison(comparison: Comparison, target: Path) -> Path:
    """Write the page of a comparison, and return the path of the file."""
    if not target.parent.is_dir():
        raise ConfigError(f"-o {target}: directory {target.parent} does not exist; create it first")
    write_atomically(target, comparison_page(comparison, target.parent).encode("utf-8"), is_private=False)
    return target


def comparison_page(comparison: Comparison, folder: Path) -> str:
    """Return the page of a comparison as HTML, for a file in `folder`."""
    sides, samples = comparison.sides, samples_table(comparison, folder)
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
        else f"{escape_text(sides[1].label, NAME_LENGTH)} compared with {baseline}",
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
        "metrics": metric_lines(comparison.differences),
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
    """Draw the interval of each run's difference below the run's name, relative to a line at 0.

    The drawing fits the screen of a phone.
    """
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


def samples_table(comparison: Comparison, folder: Path) -> DataTable:
    """Return a table with a row for each sample and compared run.

    Samples that flipped come first, and the others are sorted by the size of the change. The scores link to the
    transcripts in the runs' reports by addresses relative to `folder`.
    """
    baseline = comparison.baseline, _report_link(comparison.baseline, folder)
    rows = [
        row
        for difference in comparison.differences
        for row in _rows(baseline, (difference.side, _report_link(difference.side, folder)), difference)
    ]
    rows.sort(key=lambda row: (_CHANGES.index(str(row[0])), -abs(row[5] if isinstance(row[5], float) else 0.0), row[1]))
    title = "Samples" if len(rows) <= _MOST_ROWS else f"Samples (the first {_MOST_ROWS:,} of {len(rows):,})"
    table = DataTable("samples", title, _COLUMNS, rows[:_MOST_ROWS], key=3)
    if len(comparison.differences) == 1:  # drop the column with one value
        index = [column.key for column in _COLUMNS].index("run")
        columns = [*table.columns[:index], *table.columns[index + 1 :]]
        table = replace(table, columns=columns, rows=[[*row[:index], *row[index + 1 :]] for row in table.rows], key=2)
    return table.with_choices("change", "run")


def _rows(baseline: LinkedSide, run: LinkedSide, difference: Difference) -> list[list[Cell]]:
    sides = (baseline, run)
    changes = {
        pair.sample_id: (
            pair.flip or ("same" if pair.difference == 0.0 else "better" if pair.difference > 0.0 else "worse"),
            (pair.baseline, pair.run),
        )
        for pair in difference.pairs
    }
    every = {name for side, _ in sides for name in (*side.samples, *side.unscored)}
    rows = [_row(change, name, sides, scores) for name, (change, scores) in changes.items()]
    for name in sorted(every - changes.keys()):
        rows.append(_row("left out", name, sides, [side.samples.get(name) for side, _ in sides]))
    return rows


def _row(change: str, sample: str, sides: Sequence[LinkedSide], both: Sequence[SampleScores | None]) -> list[Cell]:
    before, after = both
    difference = after.mean - before.mean if before and after else None
    means: list[Cell] = []
    for scores, (side, report) in zip(both, sides, strict=True):
        mean, rollouts = digits(scores.mean if scores else None), list(side.rollouts.get(sample, ()))
        view = href("episode", *rollouts) if len(rollouts) == 1 else href("sample", sample, side.policy)
        means.append([mean, report + view] if report and rollouts else mean)
    passed = [f"{scores.passed} of {scores.scored}" if scores else "" for scores in both]
    label = escape_text(sides[1][0].label, NAME_LENGTH)
    return [change, escape_text(sample, NAME_LENGTH), label, *means, digits(difference), *passed]


def _report_link(side: Side, folder: Path) -> str:
    """Return the address of a run's report relative to `folder`, or "" if the run has no report."""
    file = side.path / REPORT_FILE
    if not file.is_file():
        return ""
    try:
        path = os.path.relpath(file.resolve(), folder.resolve())
    except ValueError:  # on another drive
        return ""
    return f"./{quote(path.replace(os.sep, '/'))}"
