"""`reward-kit run`, `score` and `doctor` with rewards that run elsewhere: an `ssh` here leads back to this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.project import Project, lines
from tests.sandbox.behind_walls import AVAILABLE
from tests.sandbox.places import write_ssh

SSH = f"ssh:here:{Path(sys.executable).parent}/reward-kit"
pytestmark = pytest.mark.skipif(
    not any(found.is_available for name, found in AVAILABLE.items() if name != "process"),
    reason="nothing confines here",
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def reached(tmp_path: Path) -> dict[str, str]:
    return {"REWARD_KIT_SSH": write_ssh(tmp_path)}


def test_a_run_records_where_its_reward_ran(project: Project, reached: dict[str, str]) -> None:
    project.write_task(sandbox={"back_end": "docker:of-the-file"})  # the flag beats the file
    done = project.call("run", "task.yaml", "--sandbox-back-end", SSH, **reached)
    assert done.returncode == 0, done.stderr
    walls = [line["sandbox"] for line in lines(project.run_path() / "scores.jsonl")]
    assert {(one["level"], one["back_end"]) for one in walls} == {("warm", SSH)}
    again = project.call("run", "--resume", "--sandbox-back-end", "ssh:other", **reached)
    assert again.returncode == 2
    assert "--sandbox-back-end cannot be changed by --resume" in again.stderr


def test_a_score_runs_there_too(project: Project, reached: dict[str, str]) -> None:
    (project.folder / "data.jsonl").write_text(
        json.dumps({"messages": [{"role": "assistant", "content": "x"}], "ground_truth": "x"}) + "\n"
    )
    done = project.call("score", "data.jsonl", "--reward", "reward.py:right", "--sandbox-back-end", SSH, **reached)
    assert done.returncode == 0, done.stderr
    (line,) = lines(project.run_path() / "scores.jsonl")
    assert (line["score"], line["sandbox"]["back_end"]) == (1.0, SSH)


def test_a_calibration_runs_there_too_and_so_would_a_check(project: Project, reached: dict[str, str]) -> None:
    (project.folder / "labels.csv").write_text("id,label,prompt,response\na,1,x,yes\nb,0,x,no\n")
    (project.folder / "own.py").write_text("def length(messages):\n    return {'score': len(messages[-1].text) / 9}\n")
    asked = ("calibrate", "labels.csv", "--reward", "own.py:length", "--resamples", "0", "--sandbox-back-end", SSH)
    done = project.call(*asked, **reached)
    assert done.returncode == 0 and "2 of 2 rows are scored" in done.stdout, done.stderr
    for arguments in (asked, ("check", "own.py:length", "--sandbox-back-end", SSH)):
        refused = project.call(*arguments, REWARD_KIT_SSH="no-such-ssh")
        assert refused.returncode == 2 and "no-such-ssh" in refused.stderr, "nothing is run here instead"


def test_a_back_end_that_cannot_be_used_ends_the_run_before_it_begins(project: Project) -> None:
    done = project.call(
        "run", "task.yaml", "--sandbox-back-end", "docker:image", REWARD_KIT_CONTAINER_ENGINE="no-such-engine"
    )
    assert done.returncode == 2
    assert "no-such-engine, which REWARD_KIT_CONTAINER_ENGINE names, is not found" in done.stderr
    assert not (project.folder / "runs").exists()


def test_the_doctor_tries_it(project: Project, reached: dict[str, str]) -> None:
    done = project.call("doctor", "--sandbox-back-end", SSH, **reached)
    assert done.returncode == 0, done.stderr
    assert f"In {SSH} it is confined with " in done.stdout
    done = project.call("doctor", "--json", "--sandbox-back-end", "ssh:here:/not/there", **reached)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert "ssh:here:/path/to/reward-kit" in found["back_end"]["refusal"]
    assert found["back_ends"].keys() == {"docker", "podman", "ssh"}
