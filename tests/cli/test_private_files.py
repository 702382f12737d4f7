"""Test file permissions: runs are private, and files named with -o follow the umask."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward_kit.providers.cassette import Cassette
from reward_kit.report import run_page
from reward_kit.report.run_page import write_report
from reward_kit.rewards.judge_client import AnswerCache
from tests.cli.project import Project
from tests.report.run_factory import random_run
from tests.rl.training.frozen_lake import lake_folder
from tests.runs.stored_run import episode, make_run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set an umask under which files would be accessible to all users."""
    before = os.umask(0)
    yield
    os.umask(before)


def called(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, which inherits the umask."""
    command, environment = project.command(*arguments), project.environment()
    return subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, check=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(run: Path) -> list[str]:
    """Return the files of a run, including its folder, that others may read or write."""
    return sorted(str(path) for path in (run, *run.rglob("*")) if mode(path) & 0o077)


def test_run_files_are_private(tmp_path: Path) -> None:
    project = Project(tmp_path, credit={"estimator": "grpo"}, reward_function_path="reward.py:broken")
    assert called(project, "run", "task.yaml").returncode == 3  # so that there is a run.log
    run = project.run_path()
    assert called(project, "score", str(run), "--reward", "reward.py:right", "--log-dir", "again").returncode == 0
    (again,) = (tmp_path / "again").iterdir()
    for form in ("csv", "openai-jsonl"):
        assert called(project, "export", str(again), "--format", form).returncode == 0
    assert {path.name for path in run.iterdir()} >= {"run.json", "run.log", "report.html", "inputs", "summary.json"}
    assert {path.name for path in again.iterdir()} >= {"export", "episodes.jsonl", "scores.jsonl"}
    assert open_to_others(run) == open_to_others(again) == []
    assert mode(run.parent) == mode(again.parent) == 0o777


@pytest.mark.campaign
def test_training_files_are_private(tmp_path: Path) -> None:
    project = Project(tmp_path)
    lake_folder(tmp_path)
    done = called(project, "train", "train.yaml", "--display", "plain")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints").is_dir() and open_to_others(run) == []


def test_resume_keeps_the_permissions_of_a_shared_run(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert called(project, "run", "task.yaml", "--limit", "2").returncode == 0
    run = project.run_path()
    for path in (run, *run.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    kept = (run / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (run / "episodes.jsonl").write_bytes(kept[0])
    done = called(project, "run", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert len((run / "episodes.jsonl").read_bytes().splitlines()) == len(kept)
    assert {mode(run / name) for name in ("run.json", "episodes.jsonl", "scores.jsonl", "summary.json")} == {0o644}
    assert mode(run) == 0o755


def test_output_file_follows_the_umask(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for _ in range(2):
        assert called(project, "run", "task.yaml").returncode == 0
    run, other = map(str, project.runs())
    for arguments in (
        ("view", run, "-o", "page.html"),
        ("compare", run, other, "-o", "compare.html"),
        ("export", run, "--format", "csv", "--table", "scores", "-o", "scores.csv"),
        ("export", run, "--format", "openai-jsonl", "-o", "chats.jsonl"),
    ):
        done = called(project, *arguments)
        assert done.returncode == 0, done.stderr
        assert mode(tmp_path / arguments[-1]) == 0o666


def test_report_data_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "MOST_INLINE", 0)
    run = random_run(tmp_path, 8)
    write_report(run)
    assert (run / "report_data").is_dir() and not open_to_others(run / "report_data")


def test_final_states_are_private(tmp_path: Path) -> None:
    made = episode("a", ["s0"])
    made.custom_data["final_state"] = {"kind": "json", "payload": b"{}"}
    run = make_run(tmp_path, [made], [])
    assert len(list((run / "states").iterdir())) == 1 and open_to_others(run) == []


def test_recordings_and_caches_are_private(tmp_path: Path) -> None:
    Cassette.record(tmp_path / "made" / "answers.jsonl").close()
    AnswerCache(tmp_path / "cache.jsonl").close()
    assert mode(tmp_path / "made" / "answers.jsonl") == mode(tmp_path / "cache.jsonl") == 0o600
