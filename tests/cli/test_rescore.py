"""Test `reward-kit score RUN`: another reward on the episodes of a run, and the changes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import Project, lines
from tests.runs.stored_run import episode, make_run

OTHER = """
import time
from pathlib import Path
from reward_kit import reward_function

@reward_function
def lenient(messages, ground_truth):
    return {"score": 1.0, "reason": "anything goes"}

@reward_function
def picky(messages, ground_truth, least: float = 0.5):
    if ground_truth == "no":
        raise ValueError("this one is not mine")
    return {"score": least}

@reward_function(mode="batch")
def share(rollouts_messages):
    return [{"score": 1.0 / len(rollouts_messages)} for _ in rollouts_messages]

@reward_function
def slow(messages, sample):
    while sample["number"] and Path("block").exists():
        time.sleep(0.05)
    return {"score": 0.25}

@reward_function
def state_of(messages, state):
    return {"score": float(state["kept"])}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one run: three samples, two rollouts each, of which those of q1 pass."""
    project = Project(tmp_path_factory.mktemp("ran"))
    (project.folder / "other.py").write_text(OTHER)
    assert project.call("run", "task.yaml").returncode == 0
    return project.folder


@pytest.fixture
def project(ran: Path, tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    shutil.copytree(ran, folder)
    made = object.__new__(Project)  # the files are there already
    made.folder = folder
    return made


def rescored(project: Project, *arguments: str, code: int = 0) -> tuple[Path, dict[str, Any]]:
    """Return the new run's folder and standard output; assert that the earlier run is unchanged."""
    (run,) = project.runs()
    before = contents(run)
    done = project.call("score", str(run), "--sandbox", "in_process", "-o", "again", "--json", *arguments)
    assert done.returncode == code, done.stderr
    assert contents(run) == before
    return project.folder / "again", json.loads(done.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_changes_are_shown_and_stored_in_a_new_run(project: Project) -> None:
    again, told = rescored(project, "--reward", "other.py:lenient")
    (change,) = told["changes"]["policies"]
    assert (change["before"]["mean"], change["after"]["mean"]) == (pytest.approx(1 / 3), 1.0)
    assert change["difference"]["mean"] == pytest.approx(2 / 3) and change["paired"] == 6
    assert change["difference"]["n_clusters"] == 3 and change["difference"]["high"] == 1.0
    episodes = change["episodes"]
    assert (episodes["up"], episodes["same"], episodes["to_passed"], episodes["to_failed"]) == (4, 2, 4, 0)
    assert (change["samples_up"], change["samples_same"]) == (2, 1)
    assert [moved["before"] for moved in told["changes"]["moved"]] == [0.0] * 4
    (run,) = project.runs()
    assert (again / "episodes.jsonl").read_bytes() == (run / "episodes.jsonl").read_bytes()
    header = json.loads((again / "run.json").read_text())
    assert header["status"] == "complete" and header["rescored_from"]["run"] == str(run)
    assert header["rescored_from"]["scorer"]["id"] == "lenient"
    assert json.loads((again / "summary.json").read_text())["changes"] == told["changes"]
    assert (again / "report.html").is_file()
    card, before = (json.loads((path / "card.json").read_text()) for path in (again, run))
    assert card["attempts"] == before["attempts"]
    assert card["limits"] == before["limits"]
    assert card["versions"]["dataset"] == before["versions"]["dataset"]
    (policy,) = card["policies"].values()
    assert policy["type"] == "scripted", "the settings of the policy come from the first run"


def test_unchanged_scores_are_reported(project: Project) -> None:
    again, told = rescored(project, "--reward", "reward.py:right")
    (run,) = project.runs()
    assert lines(again / "scores.jsonl") == [
        {**line, "sandbox": {"level": "in_process"}} for line in lines(run / "scores.jsonl")
    ]
    (change,) = told["changes"]["policies"]
    assert change["episodes"]["same"] == 6 and told["changes"]["moved"] == []
    assert (change["difference"]["low"], change["difference"]["high"]) == (0.0, 0.0)


def test_batch_reward_receives_whole_groups(project: Project) -> None:
    again, _ = rescored(project, "--reward", "other.py:share")
    scores = lines(again / "scores.jsonl")
    assert [line["score"] for line in scores] == [0.5] * 6
    assert len({line["scored_group"] for line in scores}) == 3


def test_failed_scores_are_not_zero_and_can_be_scored_again(project: Project) -> None:
    again, told = rescored(project, "--reward", "other.py:picky", "-O", "least=0.75")
    (change,) = told["changes"]["policies"]
    assert change["episodes"]["lost"] == 4 and change["paired"] == 2
    assert change["after"]["mean"] == 0.75 and change["difference"]["mean"] == -0.25
    kept = (again / "scores.jsonl").read_bytes()
    rescored(project, "--reward", "other.py:picky", "-O", "least=0.75")
    assert (again / "scores.jsonl").read_bytes() == kept, "all is scored, and nothing is scored twice"
    rescored(project, "--reward", "other.py:picky", "-O", "least=0.75", "--only-failed")
    added = (again / "scores.jsonl").read_bytes().removeprefix(kept).splitlines()
    assert [json.loads(line)["failure"]["class"] for line in added] == ["crash"] * 4
    assert len((again / "episodes.jsonl").read_bytes().splitlines()) == 6


def test_killed_scoring_is_continued_by_the_same_command(project: Project) -> None:
    (project.folder / "block").touch()
    (run,) = project.runs()
    asked = ["score", str(run), "--reward", "other.py:slow", "--sandbox", "in_process", "-o", "again"]
    process = project.start(*asked)
    scores, deadline = project.folder / "again/scores.jsonl", time.monotonic() + 300
    while not (scores.exists() and scores.read_bytes().count(b"\n") == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (project.folder / "block").unlink()
    first = scores.read_bytes()
    done = project.call(*asked)
    assert done.returncode == 0, done.stderr
    assert scores.read_bytes().startswith(first) and [line["score"] for line in lines(scores)] == [0.25] * 6


def test_output_folder_of_another_scoring_is_rejected(project: Project) -> None:
    rescored(project, "--reward", "other.py:lenient")
    (run,) = project.runs()
    for reward, output, told in [
        ("other.py:picky", "again", "cannot be continued (a different reward)"),
        ("other.py:lenient", str(run), "cannot be continued (episodes of a different run)"),
        ("other.py:lenient", ".", "is not a run"),
    ]:
        done = project.call("score", str(run), "--reward", reward, "--sandbox", "in_process", "-o", output)
        assert done.returncode == 2 and told in done.stderr, done.stderr
    with (run / "scores.jsonl").open("a") as file:
        file.write('{"rollout_id": "x", "score": null}\n')
    done = project.call("score", str(run), "--reward", "other.py:lenient", "--sandbox", "in_process", "-o", "again")
    assert done.returncode == 2 and "the run has changed since" in done.stderr


def test_rescored_run_can_be_scored_again(project: Project) -> None:
    again, _ = rescored(project, "--reward", "other.py:lenient")
    done = project.call("score", str(again), "--reward", "reward.py:right", "--sandbox", "in_process", "--json")
    assert done.returncode == 0, done.stderr
    (change,) = json.loads(done.stdout)["changes"]["policies"]
    assert change["before"]["mean"] == 1.0 and change["episodes"]["to_failed"] == 4


@pytest.mark.parametrize(
    ("run", "reward", "told"),
    [
        ("runs", "other.py:lenient", "is not a run directory"),
        ("RUN", "other.py:leninet", "did you mean 'lenient'?"),
        ("RUN", "nothing.py:f", "no such file"),
        ("RUN", "other.py:state_of", None),
    ],
)
def test_score_rejects_invalid_runs_and_rewards(project: Project, run: str, reward: str, told: str | None) -> None:
    (path,) = project.runs()
    done = project.call("score", run.replace("RUN", str(path)), "--reward", reward, "--log-dir", "new")
    if told is None:
        assert done.returncode == 3 and "All episodes ended with an error" in done.stderr, "there is no state to read"
    else:
        assert done.returncode == 2 and told in done.stderr, done.stderr
        assert not (project.folder / "new").exists()


def with_states(folder: Path) -> Path:
    made = [episode(f"r{place}", ["a"], index=place) for place in range(2)]
    for place, one in enumerate(made):
        one.custom_data["final_state"] = {"kind": "json", "payload": json.dumps({"kept": place}).encode()}
    return make_run(folder, made, [])


def test_final_states_are_restored_for_scoring(project: Project) -> None:
    run = with_states(project.folder)
    done = project.call("score", str(run), "--reward", "other.py:state_of", "--sandbox", "in_process", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [line["score"] for line in lines(project.folder / told["run"] / "scores.jsonl")] == [0.0, 1.0]
    assert told["changes"]["policies"][0]["difference"] is None, "nothing was scored before"
    assert told["changes"]["policies"][0]["episodes"]["gained"] == 2
    next((run / "states").iterdir()).unlink()
    done = project.call("score", str(run), "--reward", "other.py:state_of", "--log-dir", "new")
    assert done.returncode == 3 and "its final state" in done.stderr and "missing" in done.stderr
    assert not (project.folder / "new").exists()


def test_texts_are_scored_as_stored(project: Project) -> None:
    (run,) = project.runs()
    text = (run / "episodes.jsonl").read_text().replace("Question 1", "Question sk-a-long-secret-0123")
    (run / "episodes.jsonl").write_text(text)
    header = json.loads((run / "run.json").read_text())
    header["task"]["redact"] = "privacy.py:blot"
    header["task_path"] = str(project.folder / "task.yaml")
    (run / "run.json").write_text(json.dumps(header))
    (project.folder / "privacy.py").write_text("def blot(text):\n    return text.replace('Question', 'Q')\n")
    asked = ["score", str(run), "--reward", "other.py:lenient", "-o", "again", "-T", "redact=privacy.py:blot"]
    done = project.call(*asked, OPENAI_API_KEY="sk-a-long-secret-0123")
    assert done.returncode == 0, done.stderr
    assert "privacy.py:blot when it was stored, and is scored as stored" in done.stderr
    assert "secrets in 2 of 6 episodes are replaced" in done.stderr
    assert "sk-a-long" not in (project.folder / "again/episodes.jsonl").read_text()
