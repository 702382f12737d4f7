"""`reward-kit run` and `score` with a reward that requires packages: refused, or given an environment of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.project import Project, lines
from tests.reward_agent.wheels import pack_installed, pip_settings, write_wheel

REWARD = """
import tiny_words
from reward_kit import reward_function

@reward_function(requirements=["tiny-words>=1"])
def right(messages):
    return {"score": float(tiny_words.VERSION)}
"""


@pytest.fixture(scope="module")
def worker_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    pack_installed(folder, tmp_path_factory.mktemp("unpacked"))
    return folder


@pytest.fixture
def index(tmp_path: Path, worker_wheels: Path) -> Path:
    shutil.copytree(worker_wheels, tmp_path / "index")
    write_wheel(tmp_path / "index", "tiny-words", "1.0", {"tiny_words.py": "VERSION = '1.0'\n"})
    return tmp_path / "index"


@pytest.fixture
def settings(tmp_path: Path, index: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), **pip_settings(index)}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path, num_rollouts_per_sample=1)
    (tmp_path / "reward.py").write_text(REWARD)
    return project


def test_a_run_asks_first_then_records_the_packages_and_goes_on_with_no_others(
    project: Project, index: Path, settings: dict[str, str]
) -> None:
    done = project.call("run", "task.yaml", **settings)
    assert done.returncode == 2 and not project.runs() and not (project.folder / "cache").exists()
    assert (
        "task.yaml:6: reward_function_path: reward 'right' requires 'tiny-words>=1', and tiny-words is not installed"
        in done.stderr
    )
    assert "--install-requirements" in done.stderr
    done = project.call("run", "task.yaml", "--install-requirements", **settings)
    assert done.returncode == 0, done.stderr
    assert "making an environment for reward 'right': pydantic" in done.stderr
    environment = json.loads((project.run_path() / "run.json").read_text())["reward_environment"]
    assert "tiny-words==1.0" in environment["packages"]
    for line in lines(project.run_path() / "scores.jsonl"):
        assert (line["score"], line["sandbox"]["environment"]) == (1.0, environment["id"])
    again = project.call("run", "--resume", **settings)
    assert again.returncode == 0 and "making an environment" not in again.stderr
    # The cache was removed, and the index has moved on.
    write_wheel(index, "tiny-words", "1.5", {"tiny_words.py": "VERSION = '1.5'\n"})
    shutil.rmtree(project.folder / "cache")
    again = project.call("run", "--resume", **settings)
    assert again.returncode == 2
    assert "the packages of the reward changed:\n    +tiny-words==1.5\n    -tiny-words==1.0" in again.stderr


def test_a_score_by_the_key_of_a_task_file(project: Project, settings: dict[str, str]) -> None:
    (project.folder / "data.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    arguments = ["--reward", "reward.py:right", "--sandbox", "isolated", "-T", "sandbox.install_requirements=true"]
    done = project.call("score", "data.jsonl", *arguments, **settings)
    assert done.returncode == 0, done.stderr
    environment = json.loads((project.run_path() / "run.json").read_text())["reward_environment"]
    (line,) = lines(project.run_path() / "scores.jsonl")
    assert (line["score"], line["sandbox"]["environment"]) == (1.0, environment["id"])
