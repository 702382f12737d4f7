"""The two tables at the end of the page as data for its script: episodes and samples, with what can be chosen there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_kit.runs.report.figures import SampleRow, error_of, outcome_of, tokens_of
from reward_kit.runs.report.reading import EpisodeFacts
from reward_kit.runs.report.wording import shown

NAME_LENGTH = 120
_REASON_LENGTH = 400
_REASONS_IN_ALL = 1_500_000  # characters; a page of more than a few megabytes is slow to open
_SHORTEST_REASON = 60
_MOST_CHOICES = 60
_TEXTS = ("id", "word", "text")
Rows = Sequence[Sequence[str | float | None]]


class Column(NamedTuple):
    """A column; `filters` names the one of the episodes' table that a value of it selects."""

    key: str
    label: str
    kind: str
    filters: str | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is set to the right."""
        return self.kind not in _TEXTS


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table that the script fills.

    Attributes:
        name: its anchor on the page.
        title: above it.
        columns: in order.
        rows: one value for each column.
        filters: the columns in which a value can be chosen, with their values.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Rows
    filters: Sequence[tuple[Column, Sequence[str]]] = field(default=())


_SAMPLE_COLUMNS = (
    Column("sample", "sample", "id", "sample"),
    Column("policy", "policy", "word"),
    Column("episodes", "episodes", "count"),
    Column("scored", "scored", "count"),
    Column("passed", "passed", "count"),
    Column("errors", "errors", "count"),
    Column("mean", "mean score", "score"),
    Column("least", "lowest", "score"),
    Column("most", "highest", "score"),
    Column("steps", "steps", "mean"),
    Column("tokens", "tokens", "count"),
    Column("cost", "cost", "cost"),
    Column("seconds", "took", "seconds"),
)
_EPISODE_COLUMNS = (
    Column("rollout", "episode", "id"),
    Column("sample", "sample", "id"),
    Column("policy", "policy", "word"),
    Column("score", "score", "score"),
    Column("outcome", "outcome", "word"),
    Column("stop", "ended by", "word"),
    Column("error", "error", "word"),
    Column("reason", "reason or error", "text"),
    Column("steps", "steps", "count"),
    Column("tokens", "tokens", "count"),
    Column("cost", "cost", "cost"),
    Column("took", "took", "seconds"),
    Column("scoring", "scoring took", "seconds"),
)


def samples_table(rows: Iterable[SampleRow]) -> DataTable:
    """A row for each sample of each policy."""
    cells = [[shown(row.sample_id, NAME_LENGTH), shown(row.policy, NAME_LENGTH), *map(_short, row[2:])] for row in rows]
    return _with_choices(DataTable("samples", "Samples", _SAMPLE_COLUMNS, cells), ("policy",))


def episodes_table(episodes: Sequence[EpisodeFacts], pass_threshold: float) -> DataTable:
    """A row for each episode, by name."""
    length = max(_SHORTEST_REASON, min(_REASON_LENGTH, _REASONS_IN_ALL // max(1, len(episodes))))
    ordered = sorted(episodes, key=lambda facts: facts.row.rollout_id)
    cells = [_episode_cells(facts, pass_threshold, length) for facts in ordered]
    table = DataTable("episodes", "Episodes", _EPISODE_COLUMNS, cells)
    return _with_choices(table, ("policy", "outcome", "stop", "error"))


def _episode_cells(facts: EpisodeFacts, pass_threshold: float, length: int) -> list[str | float | None]:
    row = facts.row
    return [
        shown(row.rollout_id, NAME_LENGTH),
        shown(row.sample_id, NAME_LENGTH),
        shown(row.policy, NAME_LENGTH),
        _short(row.score),
        outcome_of(facts, pass_threshold),
        shown(row.stop_reason, NAME_LENGTH),
        shown(error_of(facts), NAME_LENGTH),
        shown(facts.said.text, length, facts.said.length),
        row.num_steps,
        tokens_of(facts),
        _short(row.usage.get("cost")),
        _short(facts.duration_s),
        _short(facts.score.duration_s if facts.score is not None else None),
    ]


def _short(value: float | None) -> float | None:
    """A number with as many digits as anybody reads."""
    return None if value is None else float(f"{value:.9g}")


def _with_choices(table: DataTable, keys: Iterable[str]) -> DataTable:
    """The table with a choice for each of these columns that has several values, and not too many."""
    filters = []
    for place, column in enumerate(table.columns):
        if column.key in keys:
            values = sorted({str(row[place]) for row in table.rows if row[place]})
            is_choice = 1 < len(values) <= _MOST_CHOICES or column.key == "error"
            filters += [(column, values)] if values and is_choice else []
    return DataTable(table.name, table.title, table.columns, table.rows, filters)


def as_script_data(tables: Iterable[DataTable]) -> str:
    """JSON that no HTML parser takes for markup, whatever the texts in it say."""
    document: Mapping[str, Any] = {
        table.name: {
            "columns": [{key: value for key, value in column._asdict().items() if value} for column in table.columns],
            "rows": table.rows,
        }
        for table in tables
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
