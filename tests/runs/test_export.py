"""Test exported tables: values round-trip through other programs' formats."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.runs.export import (
    EPISODES,
    SCORES,
    STEPS,
    TABLES,
    CreditLines,
    ExportColumn,
    Row,
    Selection,
    Table,
    TableWriter,
    escape_formula,
    open_table,
    selected,
    table_rows,
)
from reward_kit.runs.results import read_results
from tests.runs.stored_run import episode, make_run, score

HOSTILE = '=HYPERLINK("http://x")\n,\t\'é\ud83d\x00\u202e'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three episodes: one scored, one whose scoring failed, and one of another policy that is pending."""
    made = [episode(f"r{place}", ["a", "b"], index=place) for place in range(3)]
    made[0].messages[0].content = HOSTILE
    made[2].custom_data["policy"] = "other"
    result = {
        "score": 0.5,
        "reason": "=cmd",
        "metrics": {"form": {"score": 0.25, "is_score_valid": True, "reason": "-1"}},
    }
    first = {**score("r0", 0.5, s1=0.125), "scorer": {"id": "mine", "hash": "ab"}}
    first["result"] = {**first["result"], **result}
    first["result"]["step_outputs"][0]["step_index"] = "1"  # as combined rewards write it
    path = make_run(tmp_path, made, [first, score("r1", None)])
    lines = [
        {"rollout_id": f"r{e}", "step": t, "A": e + t / 2, "A_E": None, "anchor": t} for e in range(2) for t in range(2)
    ]
    (path / "credit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table_of(run: Path, table: Table, pass_threshold: float = 1.0) -> list[Row]:
    credit = CreditLines(run)
    return [
        row
        for result in read_results(run)
        for row in table_rows(table, result, pass_threshold, credit.read(result.episode["rollout_id"]))
    ]


def cells(run: Path, table: Table, name: str, **options: Any) -> list[Any]:
    place = [column.name for column in table.columns].index(name)
    return [row[place] for row in table_of(run, table, **options)]


def test_episode_is_a_row_and_unscored_is_not_zero(run: Path) -> None:
    assert cells(run, EPISODES, "score") == [0.5, None, None]
    assert cells(run, EPISODES, "passed", pass_threshold=0.5) == [True, None, None]
    assert cells(run, EPISODES, "error_class") == [None, "crash", None]
    assert cells(run, EPISODES, "policy") == ["p", "p", "other"]
    assert json.loads(cells(run, EPISODES, "messages")[1])[0] == {"role": "user", "content": "at a"}


def test_a_score_is_a_row_and_so_is_each_metric(run: Path) -> None:
    assert cells(run, SCORES, "name") == ["score", "form", "score"]
    assert cells(run, SCORES, "score") == [0.5, 0.25, None]
    assert cells(run, SCORES, "scorer") == ["mine", "mine", None]
    assert cells(run, SCORES, "failure_class") == [None, None, "crash"]


def test_step_row_has_its_credit(run: Path) -> None:
    assert cells(run, STEPS, "step") == [0, 1] * 3
    assert cells(run, STEPS, "observation")[2:4] == ["at a", "at b"]
    assert cells(run, STEPS, "action")[:2] == ["r0.0", "r0.1"]
    assert cells(run, STEPS, "step_score") == [None, 0.125, None, None, None, None]
    assert cells(run, STEPS, "A") == [0.0, 0.5, 1.0, 1.5, None, None]
    assert cells(run, STEPS, "is_action_valid") == [False, True] * 3


@pytest.mark.parametrize("name", TABLES)
def test_parquet_gives_every_cell_back(run: Path, tmp_path: Path, name: str) -> None:
    table, path = TABLES[name], tmp_path / "table.parquet"
    with open_table(path, "parquet", table, {"run": "mine"}) as sink:
        for row in table_of(run, table):
            sink.write(row)
    read = parquet.read_table(path)
    kinds = {"text": "string", "number": "double", "count": "int64", "flag": "bool"}
    assert [(field.name, str(field.type)) for field in read.schema] == [(c.name, kinds[c.kind]) for c in table.columns]
    assert [list(row.values()) for row in read.to_pylist()] == table_of(run, table)
    assert read.schema.metadata[b"run"] == b"mine"


@pytest.mark.parametrize("name", TABLES)
def test_csv_gives_every_cell_back(run: Path, tmp_path: Path, name: str) -> None:
    table, path = TABLES[name], tmp_path / "table.csv"
    with open_table(path, "csv", table, {}) as sink:
        for row in table_of(run, table):
            sink.write(row)
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [column.name for column in table.columns]
    read = {"text": lambda cell: cell.removeprefix("'"), "number": float, "count": int, "flag": "true".__eq__}
    assert [
        [read[column.kind](cell) if cell else None for column, cell in zip(table.columns, row, strict=True)]
        for row in rows
    ] == [[None if cell == "" else cell for cell in row] for row in table_of(run, table)]


@given(
    st.text(st.characters(codec="utf-8"), max_size=8)
    | st.sampled_from(["=1+1", "+1", "-1", "@x", "\t=1", "'=1", "＝1"])
)
def test_escaped_text_is_not_a_formula_and_is_recoverable(text: str) -> None:
    escaped = escape_formula(text)
    assert not escaped.startswith(("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠"))
    assert escaped.removeprefix("'") == text


def test_raw_csv_leaves_texts_as_they_are() -> None:
    table, file = Table("t", [ExportColumn("a", "text"), ExportColumn("b", "number")]), io.BytesIO()
    for is_raw in (False, True):
        writer = TableWriter(file, "csv", table, {}, is_raw=is_raw)
        writer.write(["=1", -1.5])
        writer.close()
    assert file.getvalue().decode().splitlines() == ['"a","b"', '"\'=1",-1.5', '"a","b"', '"=1",-1.5']


def test_file_replacement_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("earlier")
    with pytest.raises(KeyboardInterrupt), open_table(path, "csv", STEPS, {}) as sink:
        sink.write([None] * len(STEPS.columns))
        raise KeyboardInterrupt
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("chosen", "taken", "left_out"),
    [
        ({}, ["r0", "r1", "r2"], {}),
        ({"min_score": 0.5}, ["r0"], {"unscored": 2}),
        ({"min_score": 0.75}, [], {"unscored": 2, "below 0.75": 1}),
        ({"only_passed": True}, [], {"unscored": 2, "below the pass threshold 1": 1}),
        ({"policies": ("other",)}, ["r2"], {"from another policy": 2}),
    ],
)
def test_left_out_episodes_are_counted(run: Path, chosen: dict[str, Any], taken: list[str], left_out: Any) -> None:
    selection = Selection(pass_threshold=1.0, **chosen)
    assert [result.episode["rollout_id"] for result in selected(run, selection)] == taken
    assert selection.left_out == left_out
