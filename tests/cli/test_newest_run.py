"""Test that commands without RUN take the newest run and report it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from tests.cli.project import Project
from tests.runs.stored_run import episode, make_run, score

COMMANDS = {
    "credit": ["credit"],
    "score": ["score", "--reward", "own.py:fair"],
    "export": ["export", "--format", "csv", "--table", "episodes", "-o", "-"],
}


def stored(folder: Path, name: str, day: int, **header: object) -> Path:
    """Write a run of two scored episodes that began on a day of January."""
    folder.mkdir(exist_ok=True)
    episodes = [episode("a", ["s0"]), episode("b", ["s0"], index=1)]
    made = make_run(folder.parent / f"making {name}", episodes, [score("a", 1.0), score("b", 0.0)])
    made = made.rename(folder / name)
    document = json.loads((made / "run.json").read_text())
    started = datetime.datetime(2026, 1, day, tzinfo=datetime.UTC).isoformat()
    changed = {**document, **header, "timing": {**document["timing"], "started_at": started}}
    (made / "run.json").write_text(json.dumps(changed))
    return made


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Three readable runs, a newer training run, and a damaged run."""
    made = Project(tmp_path)
    reward = (
        "from reward_kit import reward_function\n\n@reward_function\ndef fair(messages):\n    return {'score': 0.5}\n"
    )
    (tmp_path / "own.py").write_text(reward)
    runs = tmp_path / "runs"
    stored(runs, "middle", 2)
    stored(runs, "newest", 3)
    stored(runs, "oldest", 1)
    stored(runs, "training", 4, training={"train_path": "train.yaml"})
    (runs / "damaged").mkdir()
    (runs / "damaged" / "run.json").write_text("{")
    return made


@pytest.mark.parametrize("verb", ["credit", "score", "export"])
def test_newest_run_with_episodes_is_used_and_reported(project: Project, verb: str) -> None:
    done = project.call(*COMMANDS[verb])
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("the newest run: runs/newest\n")


def test_view_may_take_a_training_run(project: Project) -> None:
    done = project.call("view", "-o", "page.html")
    assert done.stderr.startswith("the newest run: runs/training\n")


@pytest.mark.parametrize("verb", COMMANDS)
def test_missing_runs_are_reported(project: Project, verb: str) -> None:
    done = project.call(*COMMANDS[verb], "--log-dir", "elsewhere")
    assert done.returncode == 2 and "no runs in elsewhere; start one with `reward-kit run`" in done.stderr, done.stderr


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_mentions_the_default_run(project: Project, verb: str) -> None:
    output = " ".join(project.call(verb, "--help").stdout.split())
    assert "RUN]" in output and "Without RUN, the newest run is used." in output and "--log-dir" in output


def test_output_run_is_not_taken_as_its_own_source(project: Project) -> None:
    first = project.call(*COMMANDS["score"], "-o", "runs/again")
    again = project.call(*COMMANDS["score"], "-o", "runs/again")
    assert first.returncode == again.returncode == 0, again.stderr
    assert again.stderr.startswith("the newest run: runs/newest\n")


def test_compare_takes_the_two_newest_runs_of_a_task(project: Project) -> None:
    stored(project.folder / "runs", "of_another_task", 2, task_name="another")
    done = project.call("compare", "--json")
    assert done.returncode == 0, done.stderr
    assert "runs/middle (the baseline) and runs/newest\n" in done.stderr


def test_compare_reports_a_missing_run(project: Project) -> None:
    stored(project.folder / "runs", "alone", 9, task_name="alone")
    done = project.call("compare")
    assert done.returncode == 2 and "one run of task 'alone', runs/alone; specify the runs to compare" in done.stderr
    none = project.call("compare", "--log-dir", "elsewhere")
    assert none.returncode == 2 and "no runs in elsewhere" in none.stderr
