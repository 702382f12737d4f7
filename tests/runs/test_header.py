"""Test the round trip of `run.json`, and errors that name unreadable parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.run_folder import RunFolder, RunHeader


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "run.json").read_text())
    return found


def test_header_round_trip_omits_unset_fields(tmp_path: Path) -> None:
    store = RunFolder.create(tmp_path / "run", RunHeader(task_name="t", limit=None, run_limits={"cost": None}))
    assert RunHeader.read(store.path) == store.header
    assert written(store.path).keys() == {
        *("schema_version", "task_name", "limit", "run_limits", "versions", "status", "timing")
    }
    assert written(store.path)["run_limits"] == {"cost": None}, "no limit, and said so"


def test_key_of_a_later_release_is_kept_on_resume(tmp_path: Path) -> None:
    store = RunFolder.create(tmp_path / "run", RunHeader(task_name="t"))
    later = {**written(store.path), "colour": "green"}
    (store.path / "run.json").write_text(json.dumps(later))
    with RunFolder(store.path) as again:
        again.update_status(status="complete", worked_s=again.header.timing.worked_s + 2.5)
    timing = {**later["timing"], "worked_s": 2.5}
    assert written(store.path) == {**later, "status": "complete", "timing": timing}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "has schema version 2, but this release reads only version 1"),
        ({"total": "many"}, r"total: .*\(got 'many'\)"),
        ({"task_name": None}, "task_name: "),
        ({"timing": {}}, "timing.started_at: missing"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    store = RunFolder.create(tmp_path / "run", RunHeader(task_name="t"))
    (store.path / "run.json").write_text(json.dumps({**written(store.path), **change}))
    with pytest.raises(StoreError, match=rf"run\.json.*{said}"):
        RunHeader.read(store.path)


def test_folder_without_run_suggests_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(Path("runs") / "lake-1", RunHeader(task_name="t")).path
    assert RunHeader.read_folder(run) == RunHeader.read(run)
    for named in ("lake-1", "runs/lake-2", "runs/lake-1/episodes.jsonl"):
        with pytest.raises(ConfigError, match=r"not a run directory: .* no run\.json; did you mean 'runs/lake-1'"):
            RunHeader.read_folder(Path(named))
    with pytest.raises(ConfigError, match=r"no run\.json; `reward-kit runs list` lists the runs$"):
        RunHeader.read_folder(Path("elsewhere/something"))
    (run / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run\.json"):
        RunHeader.read_folder(run)


@pytest.mark.parametrize(
    ("status", "is_open", "told"),
    [("running", True, "running"), ("running", False, "killed"), ("failed", False, "failed")],
)
def test_running_status_without_a_process_is_killed(status: str, is_open: bool, told: str) -> None:
    assert RunHeader(task_name="t", status=status).status_now(is_open) == told
