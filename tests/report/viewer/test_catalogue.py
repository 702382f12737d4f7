"""The catalog of runs: complete, running, damaged, added and removed runs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from reward_kit.report.run_data import read_run
from reward_kit.report.viewer_runs import RunCatalog, RunRow
from reward_kit.runs.run_folder import RunFolder, RunHeader
from reward_kit.runs.summary import summarize, summary_to_json
from tests.report.run_factory import episode, make_run, random_run, score


def run_named(folder: Path, name: str, **header: Any) -> Path:
    """Write a run of two episodes, one of them scored."""
    path = make_run(folder, [episode("a"), episode("b")], [score("a", 1.0)], **header)
    return path.rename(folder / name)


def row_of(catalog: RunCatalog, name: str) -> RunRow:
    (row,) = [row for row in catalog.rows if row.run == name]
    return row


def test_row_of_a_complete_run_matches_its_summary(tmp_path: Path) -> None:
    path = random_run(tmp_path, 80)
    facts = read_run(path)
    summaries = summarize((one.row for one in facts.episodes), facts.pass_threshold)
    (path / "summary.json").write_text(json.dumps(summary_to_json(summaries)))
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    rows = sorted(catalog.rows, key=lambda row: row.policy)
    assert [(row.policy, row.status, row.total) for row in rows] == [("a", "complete", 80), ("b", "complete", 80)]
    for row, summary in zip(rows, summaries, strict=True):
        assert summary.score is not None and row.began == "2026-01-02 03:04:05"
        assert (row.episodes, row.mean, row.low, row.high) == (
            summary.episodes,
            summary.score.mean,
            summary.score.low,
            summary.score.high,
        )


def test_row_without_a_summary_is_computed_from_the_episodes(tmp_path: Path) -> None:
    path = random_run(tmp_path, 80)
    counted, summed = RunCatalog(tmp_path), RunCatalog(tmp_path)
    counted.poll()
    facts = read_run(path)
    summaries = summarize((one.row for one in facts.episodes), facts.pass_threshold)
    (path / "summary.json").write_text(json.dumps(summary_to_json(summaries)))
    summed.poll()
    assert counted.rows == summed.rows


def test_row_of_a_running_run_is_updated_with_new_lines(tmp_path: Path) -> None:
    catalog = RunCatalog(tmp_path)
    store = RunFolder.create(tmp_path / "now", RunHeader(task_name="t", total=2))
    with store:
        catalog.poll()
        assert row_of(catalog, "now")[3:7] == ("running", None, 2, None)
        with (tmp_path / "now" / "episodes.jsonl").open("a") as file:
            file.write(json.dumps(episode("a")) + "\n")
        store.append_score(score("a", 0.5))
        row = _poll_until(catalog, lambda: row_of(catalog, "now").mean is not None)
        assert row_of(catalog, "now")[3:7] == ("running", 1, 2, 0.5), row
    catalog.poll()
    assert row_of(catalog, "now").status == "killed", "it says running, and no process has it open"
    store.write_header(store.header.replace(status="interrupted"))
    catalog.poll()
    assert row_of(catalog, "now")[3:5] == ("interrupted", 1)


def _poll_until(catalog: RunCatalog, holds: Any) -> list[RunRow]:
    """Poll, since the figures of a running run are refreshed only occasionally."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        catalog.poll()
        if holds():
            break
        time.sleep(0.01)
    return catalog.rows


def test_changed_since_returns_changed_rows_only(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_named(tmp_path, name)
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    change = catalog.change
    catalog.poll()
    assert catalog.change == change and catalog.changed_since(change) == []
    header = RunHeader.read(tmp_path / "two")
    (tmp_path / "two" / "run.json").write_bytes(header.replace(task_name="other").to_bytes())
    catalog.poll()
    assert [(row.run, row.task) for row in catalog.changed_since(change)] == [("two", "other")]


def test_added_and_removed_runs_are_noticed(tmp_path: Path) -> None:
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    assert catalog.rows == []
    run_named(tmp_path, "one")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    catalog.poll()
    assert catalog.names == ["one"]
    change = catalog.change
    shutil.rmtree(tmp_path / "one")
    catalog.poll()
    assert catalog.names == [] and catalog.rows == [] and catalog.change > change
    shutil.rmtree(tmp_path)
    catalog.poll()
    assert catalog.rows == []


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("run.json", "{", "cannot read"),
        ("run.json", '{"schema_version": 99}', "version 99"),
        ("summary.json", '{"policies": 3}', "summary.json is damaged"),
        ("summary.json", '{"policies": [{}]}', "summary.json is damaged"),
        ("summary.json", "[]", "is not a JSON object"),
        ("episodes.jsonl", "no\n", "episodes.jsonl:1: not JSON"),
        ("scores.jsonl", '{"rollout_id": "a", "score": "x"}\n', "finite number"),
    ],
)
def test_damaged_run_is_listed_as_unreadable_without_hiding_other_runs(
    tmp_path: Path, file: str, content: str, told: str
) -> None:
    run_named(tmp_path, "good")
    damaged = run_named(tmp_path, "damaged")
    (damaged / file).write_text(content)
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    row = row_of(catalog, "damaged")
    assert row.status == "unreadable" and told in row.note
    assert row_of(catalog, "good").status == "complete"
    shutil.rmtree(damaged)
    run_named(tmp_path, "damaged")
    catalog.poll()
    assert row_of(catalog, "damaged").status == "complete"


def test_run_damaged_while_watched_keeps_its_task_name(tmp_path: Path) -> None:
    path = run_named(tmp_path, "one", task_name="walk")
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    (path / "run.json").write_text("")
    catalog.poll()
    assert row_of(catalog, "one")[1:4] == ("walk", "", "unreadable")


def test_row_of_a_training_run_shows_its_progress(tmp_path: Path) -> None:
    path = run_named(tmp_path, "learns", training={"train_path": "x", "updates": 12})
    figures = [{"update": 10, "held_out/score": 0.25}, {"update": 11, "held_out/score": 0.75}, {"update": 12}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures) + '{"update": 13, "held')
    catalog = RunCatalog(tmp_path)
    catalog.poll()
    row = row_of(catalog, "learns")
    assert (row.policy, row.mean, row.total) == ("in training, 12 updates", 0.75, None)


def test_only_option_lists_a_single_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_named(tmp_path, name)
    catalog = RunCatalog(tmp_path, only="one")
    catalog.poll()
    assert catalog.names == ["one"] and catalog.title == "one"
    assert catalog.run_path("two") is None
