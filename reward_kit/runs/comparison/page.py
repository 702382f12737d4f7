"""The page of a comparison: one file that loads nothing, in the manner of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.display_text import shown
from reward_kit.errors import ConfigError
from reward_kit.runs.comparison.comparing import CONFIDENCE, Comparison, Difference
from reward_kit.runs.comparison.drawing import draw_forest
from reward_kit.runs.comparison.pairing import SamplePair
from reward_kit.runs.comparison.sides import SampleScores, Side
from reward_kit.runs.comparison.table import lines, notes_of, sentence
from reward_kit.runs.files import write_atomically
from reward_kit.runs.report.bundling import bundle, digest
from reward_kit.runs.report.data import NAME_LENGTH, Column, DataTable, as_script_data, with_choices
from reward_kit.runs.report.drawing import Drawing
from reward_kit.runs.run_folder import this_software

_STYLES, _SCRIPTS = ("page.css",), ("base.js", "tables.js")
_OWN, _REPORTS = files("reward_kit.runs.comparison"), files("reward_kit.runs.report")
_MOST_ROWS = 60_000  # of samples; a page of more than a few megabytes is slow to open
_SENTENCE_LENGTH = 1_000
_CHANGES = ("lost", "won", "worse", "better", "same", "left out")
_COLUMNS = (
    Column("change", "change", "word"),
    Column("sample", "sample", "id"),
    Column("run", "run", "word"),
    Column("baseline", "baseline", "score"),
    Column("score", "this run", "score"),
    Column("difference", "difference", "signed"),
    Column("before", "passed in the baseline", "word"),
    Column("after", "passed in this run", "word"),
)


class Said(NamedTuple):
    """A sentence, and what it comes to."""

    verdict: str
    told: str


@dataclass(frozen=True, slots=True)
class ComparisonPage:
    """What the template shows; texts of strangers went through `shown`."""

    title: str
    version: str
    facts: Sequence[str]
    notes: Sequence[str]
    sentences: Sequence[Said]
    forest: Drawing
    labels: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]
    samples: DataTable


def write_comparison(comparison: Comparison, target: Path) -> Path:
    """Write the page of a comparison, and return where it is.

    Raises:
        ConfigError: the file's folder is missing.
        StoreError: the page cannot be written.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"-o {target}: there is no folder {target.parent}; make it first")
    write_atomically(target, rendered(page_of(comparison)).encode("utf-8"), is_private=False)
    return target


def rendered(page: ComparisonPage) -> str:
    """The page as HTML."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FunctionLoader(_part)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    style, script = bundle(_STYLES) + _part("compare.css"), bundle(_SCRIPTS)
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    own: dict[str, Any] = {"policy": policy, "style": style, "script": script, "data": as_script_data([page.samples])}
    own = {name: Markup(text) for name, text in own.items()}  # our own, or made for it
    return environment.get_template("compare.html.j2").render(page=page, **own)


def _part(name: str) -> str:
    """A template of this package, or one that reports are made of."""
    own = _OWN / name
    return (own if own.is_file() else _REPORTS / name).read_text(encoding="utf-8")


def page_of(comparison: Comparison) -> ComparisonPage:
    """What the page of a comparison says."""
    sides = comparison.sides
    baseline = shown(comparison.baseline.label, NAME_LENGTH)
    told = [(each.verdict, sentence(comparison, each)) for each in comparison.differences]
    figures = [*_facts_of(sides), *lines(comparison)]
    return ComparisonPage(
        title=f"{len(sides)} runs compared"
        if len(sides) > 2
        else f"{shown(sides[1].label, NAME_LENGTH)} beside {baseline}",
        version=this_software()["reward_kit"],
        facts=[
            f"baseline {baseline}",
            f"{CONFIDENCE:.0%} intervals, paired by sample",
            f"seed of what is drawn: {comparison.seed}",
        ],
        notes=[shown(note, _SENTENCE_LENGTH) for note in notes_of(comparison)],
        sentences=[Said(verdict.replace(" ", "-"), shown(text, _SENTENCE_LENGTH)) for verdict, text in told],
        forest=draw_forest(comparison),
        labels=[shown(side.label, NAME_LENGTH) for side in sides],
        lines=[(name, [shown(cell, NAME_LENGTH) for cell in cells]) for name, cells in figures],
        samples=samples_table(comparison),
    )


def _facts_of(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """Which runs these are."""
    return [
        ("run", [side.run_id for side in sides]),
        ("policy", [side.policy for side in sides]),
        ("status", [side.header.status for side in sides]),
        ("seed", [str(side.header.seed) if side.header.task_path is not None else "–" for side in sides]),
    ]


def samples_table(comparison: Comparison) -> DataTable:
    """A row for each sample of each run beside the baseline; those that flipped first, the largest change before."""
    rows = [row for difference in comparison.differences for row in _rows(comparison.baseline, difference)]
    rows.sort(key=lambda row: (_CHANGES.index(str(row[0])), -abs(float(row[5] or 0.0)), str(row[1])))
    title = "Samples" if len(rows) <= _MOST_ROWS else f"Samples (the first {_MOST_ROWS:,} of {len(rows):,})"
    table = DataTable("samples", title, _COLUMNS, rows[:_MOST_ROWS], key=3)
    return with_choices(_without_run(table) if len(comparison.differences) == 1 else table, ("change", "run"))


def _without_run(table: DataTable) -> DataTable:
    """The table without the column that says the same in each row."""
    place = [column.key for column in table.columns].index("run")
    columns = [*table.columns[:place], *table.columns[place + 1 :]]
    return replace(table, columns=columns, rows=[[*row[:place], *row[place + 1 :]] for row in table.rows], key=2)


def _rows(baseline: Side, difference: Difference) -> list[list[Any]]:
    label = shown(difference.side.label, NAME_LENGTH)
    rows = [_row(_change(pair), pair.sample_id, label, pair.baseline, pair.run) for pair in difference.pairs]
    side = difference.side
    everyone = {*baseline.samples, *baseline.unscored, *side.samples, *side.unscored}
    others = sorted(everyone - {pair.sample_id for pair in difference.pairs})
    return rows + [_row("left out", name, label, baseline.samples.get(name), side.samples.get(name)) for name in others]


def _row(
    change: str, sample: str, label: str, before: SampleScores | None, after: SampleScores | None
) -> list[str | float | None]:
    difference = after.mean - before.mean if before and after else None
    means = [scores.mean if scores else None for scores in (before, after)]
    shares = [f"{scores.passed} of {scores.scored}" if scores else "" for scores in (before, after)]
    numbers = [None if value is None else float(f"{value:.9g}") for value in (*means, difference)]
    return [change, shown(sample, NAME_LENGTH), label, *numbers, *shares]


def _change(pair: SamplePair) -> str:
    if pair.flip:
        return pair.flip
    return "same" if pair.difference == 0.0 else "better" if pair.difference > 0.0 else "worse"
