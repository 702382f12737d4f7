"""Datasets: the same rows from every kind of file, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.datasets import read_rows, read_samples


def write(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"id": "a", "q": "1"}\n\n{"id": "b", "q": "2"}\n'),
        ("rows.csv", "id,q\na,1\nb,2\n"),
        ("rows.yaml", "- {id: a, q: '1'}\n- {id: b, q: '2'}\n"),
    ],
)
def test_rows_read_the_same_from_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    rows = list(read_rows(write(tmp_path, text, name)))
    assert [row for _, row in rows] == [{"id": "a", "q": "1"}, {"id": "b", "q": "2"}]
    assert [where.rpartition(":")[2] for where, _ in rows] in (["1", "3"], ["2", "3"], ["1", "2"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.jsonl", '{"a": 1}\nnot json\n', r"r\.jsonl:2: not JSON"),
        ("r.jsonl", "[1]\n", r"r\.jsonl:1: expected a mapping"),
        ("r.csv", "id,q,r\na,b\n", r"r\.csv:2: the row does not have the header's 3 columns"),
        ("r.csv", "id,q\na,b,c\n", r"r\.csv:2: the row does not have the header's 2 columns"),
        ("r.yaml", "a: 1\n", "a list of rows"),
        ("r.txt", "x", "unknown format '.txt'"),
    ],
)
def test_invalid_row_is_reported_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_rows(write(tmp_path, text, name)))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 101 + "]" * 101, "a value is nested more than 100 levels deep"),
        ('{"a":' * 900 + "1" + "}" * 900, "a value is nested more than 100 levels deep"),
        ("[" * 100_000 + "]" * 100_000, "a value is nested more than 100 levels deep"),
        ("1" * 5_000, "Exceeds the limit (4300 digits)"),
    ],
    ids=["list", "objects", "endless", "digits"],
)
def test_deeply_nested_row_is_rejected_with_its_line(tmp_path: Path, value: str, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": {"[" * 99}{"]" * 99}}}\n{{"a": {value}}}\n')
    rows = read_rows(path)
    next(rows)
    with pytest.raises(ConfigError) as raised:
        next(rows)
    assert str(raised.value).startswith(f"{path}:2: {problem}")


def test_tags_of_the_task_are_added_to_the_tags_of_rows(tmp_path: Path) -> None:
    write(
        tmp_path, '{"id": "a", "tags": ["hard", "sql"]}\n{"id": "b"}\n{"id": "c", "tags": "sql, long"}\n', "rows.jsonl"
    )
    task = {"name": "t", "resource_type": "python_state", "reward_function_path": "r.py:r"}
    definition = TaskDefinitionModel(**task, tags=["sql"], dataset_path="rows.jsonl")
    samples = read_samples(definition, tmp_path)
    assert [sample.row["tags"] for sample in samples] == [["sql", "hard"], ["sql"], ["sql", "long"]]
    (alone,) = read_samples(TaskDefinitionModel(**task, tags=["sql"]), tmp_path)
    assert alone.row == {"tags": ["sql"]}
    untagged = TaskDefinitionModel(**task, dataset_path="rows.jsonl")
    assert [sample.row.get("tags") for sample in read_samples(untagged, tmp_path)] == [
        ["hard", "sql"],
        None,
        "sql, long",
    ], "rows are unchanged without tags of the task"


@pytest.mark.parametrize("tags", [5, True, {"a": 1}, ["refund", 5], [["a"]]])
def test_tags_that_are_not_strings_are_rejected(tmp_path: Path, tags: object) -> None:
    rows = [{"id": "a", "tags": "ok"}, {"id": "b", "tags": tags}]
    write(tmp_path, "\n".join(map(json.dumps, rows)), "rows.jsonl")
    definition = TaskDefinitionModel(name="t", initial_user_prompt="?", dataset_path="rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: tags must be a list of strings"):
        list(read_samples(definition, tmp_path))
