"""The tables at the end of the page as data for its script: samples, groups and episodes, with what can be chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reward_kit.display_text import shown
from reward_kit.runs.report.figures import GroupRow, SampleRow, error_of, outcome_of, tokens_of
from reward_kit.runs.report.reading import EpisodeOutline

NAME_LENGTH = 120
_REASON_LENGTH = 400
_REASONS_IN_ALL = 1_500_000  # characters; a page of more than a few megabytes is slow to open
_SHORTEST_REASON = 60
_MOST_CHOICES = 60
_TEXTS = ("id", "link", "word", "text")
Cell = str | float | list[str] | None
"""A list is what is shown and what it stands for, where they differ."""
Rows = Sequence[Sequence[Cell]]


class Column(NamedTuple):
    """A column.

    Attributes:
        key: its name in the data.
        label: its heading.
        kind: how its values are written.
        filters: the column of the episodes' table in which a value of it is chosen by a click.
        view: what a value of it opens: "episode" or "group".
    """

    key: str
    label: str
    kind: str
    filters: str | None = None
    view: str | None = None

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
        key: how many of the first columns tell a row from all others.
        is_optional: it is not shown while it has no rows.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Rows
    filters: Sequence[tuple[Column, Sequence[str]]] = field(default=())
    key: int = 1
    is_optional: bool = False


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
_GROUP_COLUMNS = (
    Column("group", "group", "id", view="group"),
    Column("sample", "sample", "id", "sample"),
    Column("policy", "policy", "word"),
    Column("episodes", "episodes", "count"),
    Column("scored", "scored", "count"),
    Column("mean", "mean score", "score"),
    Column("least", "lowest", "score"),
    Column("most", "highest", "score"),
    Column("spread", "difference", "score"),
    Column("steps", "steps", "mean"),
)
_EPISODE_COLUMNS = (
    Column("rollout", "episode", "id", view="episode"),
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
    return with_choices(DataTable("samples", "Samples", _SAMPLE_COLUMNS, cells, key=2), ("policy",))


def groups_table(rows: Iterable[GroupRow]) -> DataTable:
    """A row for each group of several episodes."""
    cells = [
        [_named(row.group_id), shown(row.sample_id, NAME_LENGTH), shown(row.policy, NAME_LENGTH), *map(_short, row[3:])]
        for row in rows
    ]
    return with_choices(DataTable("groups", "Groups", _GROUP_COLUMNS, cells, is_optional=True), ("policy",))


def episodes_table(episodes: Sequence[EpisodeOutline], pass_threshold: float) -> DataTable:
    """A row for each episode, by name."""
    length = max(_SHORTEST_REASON, min(_REASON_LENGTH, _REASONS_IN_ALL // max(1, len(episodes))))
    ordered = sorted(episodes, key=lambda facts: facts.row.rollout_id)
    cells = [_episode_cells(facts, pass_threshold, length) for facts in ordered]
    table = DataTable("episodes", "Episodes", _EPISODE_COLUMNS, cells)
    return with_choices(table, ("policy", "outcome", "stop", "error"))


def _episode_cells(facts: EpisodeOutline, pass_threshold: float, length: int) -> list[Cell]:
    row = facts.row
    return [
        _named(row.rollout_id),
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


def _named(name: str) -> Cell:
    """A name as it is shown, and where that differs also as it is stored."""
    told = shown(name, NAME_LENGTH)
    return told if told == name else [told, name]


def _short(value: float | None) -> float | None:
    """A number with as many digits as anybody reads."""
    return None if value is None else float(f"{value:.9g}")


def with_choices(table: DataTable, keys: Iterable[str]) -> DataTable:
    """The table with a choice for each of these columns that has not too many; one of a single value is hidden."""
    filters = []
    for place, column in enumerate(table.columns):
        if column.key in keys:
            values = sorted({str(row[place]) for row in table.rows if row[place]})
            filters += [(column, values)] if len(values) <= _MOST_CHOICES or column.key == "error" else []
    return replace(table, filters=filters)


def as_script_data(tables: Iterable[DataTable]) -> str:
    """JSON that no HTML parser takes for markup, whatever the texts in it say."""
    document: Mapping[str, Any] = {
        table.name: {
            "columns": [{key: value for key, value in column._asdict().items() if value} for column in table.columns],
            "rows": table.rows,
            "key": table.key,
        }
        for table in tables
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
