"""Test that `reward-kit init` writes a working project and overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests import command_line


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    done = command_line.call("init", "mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "  cd mine",
        "  reward-kit run task.yaml",
        "  pytest",
        "  reward-kit view --open",
    ]
    return folder / "mine"


def test_task_of_the_new_project_runs_and_is_solved(project: Path) -> None:
    done = command_line.call("run", "task.yaml", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    (policy,) = json.loads(done.stdout)["policies"]
    assert (policy["score"]["mean"], policy["episodes"], policy["errors"], policy["tool_errors"]) == (1.0, 6, {}, 0)
    assert policy["mean_steps"] > 2


def test_policy_of_the_new_project_runs_under_a_limit_on_cost(project: Path) -> None:
    done = command_line.call("run", "task.yaml", "--max-cost", "1", "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["errors"] == {}


def test_task_and_reward_of_the_new_project_pass_the_checks(project: Path) -> None:
    done = command_line.call("check", "task.yaml", "--gold-policy", "agent.py:Clerk", cwd=project)
    assert done.returncode == 0 and "error:" not in done.stdout, done.stdout + done.stderr


def test_tests_of_the_new_project_pass_and_keep_the_report(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--reward-kit-log-dir", "kept"],
        cwd=project,
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert "5 passed" in done.stdout, done.stdout + done.stderr
    assert len(list((project / "kept").glob("*/report.html"))) == 1


def test_init_files_are_valid(project: Path) -> None:
    task = yaml.safe_load((project / "task.yaml").read_text())
    jsonschema.validate(task, json.loads((project / "task.schema.json").read_text()))
    workflow = yaml.safe_load((project / ".github/workflows/evaluate.yml").read_text())
    assert any("pytest" in step.get("run", "") for step in workflow["jobs"]["evaluate"]["steps"])
    named = [line.split("`")[1] for line in (project / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert all((project / name).is_file() for name in named) and len(named) == 7


def test_workflow_compares_a_pull_request_with_its_base(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "repository", ignore=shutil.ignore_patterns("runs", "kept", "__pycache__"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost"]
    first = ["commit", "-qm", "without a task", "--allow-empty"]
    for command in (["init", "-q"], first, ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], cwd=tmp_path / "repository", check=True)
    workflow = yaml.safe_load((project / ".github/workflows/evaluate.yml").read_text())
    (step,) = (step for step in workflow["jobs"]["evaluate"]["steps"] if "GITHUB_STEP_SUMMARY" in step.get("run", ""))
    summary = tmp_path / "summary.md"
    environment = {"GITHUB_STEP_SUMMARY": str(summary), **workflow["jobs"]["evaluate"]["env"]}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for base in ("HEAD^", "HEAD"):
        done = subprocess.run(
            ["bash", "-e", "-c", step["run"]],
            cwd=tmp_path / "repository",
            env={**os.environ, "PATH": path, **environment, "BASE": base},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if base == "HEAD^":
            assert "The base has no task.yaml" in done.stdout and not summary.exists()
            subprocess.run([*git, "worktree", "remove", "base"], cwd=tmp_path / "repository", check=True)
    assert re.search(r"\| base .*\| head ", summary.read_text())
    assert re.search(r"\| mean score \| 1\.000 .*\| 1\.000 ", summary.read_text())


def test_existing_files_are_not_overwritten(project: Path) -> None:
    before = (project / "task.yaml").read_bytes()
    again = command_line.call("init", "mine", cwd=project.parent)
    assert again.returncode == 2 and "already contains task.yaml, orders.jsonl" in again.stderr
    assert (project / "task.yaml").read_bytes() == before
    on_a_file = command_line.call("init", "task.yaml", cwd=project)
    assert on_a_file.returncode == 2 and "task.yaml is a file" in on_a_file.stderr


def test_folder_with_other_files_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("mine")
    done = command_line.call("init", ".", cwd=tmp_path)
    assert done.returncode == 0 and "  reward-kit run task.yaml\n" in done.stdout
    assert "cd " not in done.stdout
    assert (tmp_path / "LICENSE").read_text() == "mine" and (tmp_path / "agent.py").is_file()
