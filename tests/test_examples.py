"""Every example runs: the expert solves it and the random policy does not."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from reward_kit.cli.main import program
from tests import command_line

ROOT = Path(__file__).parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_line.call(*arguments, cwd=folder)


def assert_run_passes_checks(folder: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Assert that `reward-kit check` finds nothing in a run reported as JSON."""
    path = folder / json.loads(done.stdout)["run"]
    checked = CliRunner().invoke(program, ["check", str(path), "--fail-on", "warning"])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize(
    "name", ["alfworld_household", "frozen_lake", "sokoban", "sqlite_analyst", "support_dialogue", "webshop"]
)
def test_expert_solves_the_example_and_random_policy_does_not(tmp_path: Path, name: str) -> None:
    task = str(ROOT / "examples" / name / "task.yaml")
    done = run(tmp_path, "run", task, "--policy", "expert", "--policy", "random", "-n", "1", "--json")
    assert done.returncode == 0, done.stderr
    expert, chance = json.loads(done.stdout)["policies"]
    assert (expert["policy"], expert["score"]["mean"], expert["errors"]) == ("expert", 1.0, {})
    assert chance["score"]["mean"] < 0.3 and not chance["errors"]
    assert_run_passes_checks(tmp_path, done)


def test_tool_path_of_the_support_dialogue_separates_expert_and_random_policy(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "support_dialogue"
    done = run(tmp_path, "run", str(folder / "task.yaml"), "--policy", "expert", "--policy", "random", "--json")
    again = run(
        tmp_path,
        "score",
        json.loads(done.stdout)["run"],
        "--reward",
        f"{folder / 'path.py'}:identifies_first",
        "--json",
    )
    assert again.returncode == 0, again.stderr
    expert, chance = json.loads(again.stdout)["policies"]
    assert (expert["score"]["mean"], chance["score"]["mean"]) == (1.0, 0.0)


def test_expert_sometimes_fails_on_slippery_ice(tmp_path: Path) -> None:
    task = str(ROOT / "examples" / "frozen_lake" / "task.yaml")
    slippery = "base_resource_config.env_kwargs.is_slippery=true"
    done = run(tmp_path, "run", task, "--policy", "expert", "-T", slippery, "--json")
    assert done.returncode == 0, done.stderr
    assert 0.1 < json.loads(done.stdout)["policies"][0]["score"]["mean"] < 1.0
    assert_run_passes_checks(tmp_path, done)


@pytest.mark.parametrize(("file", "program"), [("task.yaml", "Clerk"), ("report.yaml", "Bookkeeper")])
def test_scripted_clerk_solves_the_file_clerk_example(tmp_path: Path, file: str, program: str) -> None:
    task = str(ROOT / "examples" / "file_clerk" / file)
    done = run(tmp_path, "run", task, "--policy", f"clerk.py:{program}", "--json")
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout)["policies"]
    assert (summary["score"]["mean"], summary["errors"], summary["tool_errors"]) == (1.0, {}, 0)
    assert_run_passes_checks(tmp_path, done)


def test_file_clerk_cases_are_generated_from_their_seeds() -> None:
    folder = ROOT / "examples" / "file_clerk"
    make_case = runpy.run_path(str(folder / "make_cases.py"))["make_case"]
    rows = [json.loads(line) for line in (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [make_case(seed) for seed in range(len(rows))]


def test_file_clerk_reward_scores_correctly_placed_files() -> None:
    folder = ROOT / "examples" / "file_clerk"
    in_order = runpy.run_path(str(folder / "reward.py"))["in_order"]
    row = json.loads((folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()[0])
    before, truth = row["resource_config"]["files"], row["ground_truth"]

    def score(state: dict[str, str]) -> float:
        return in_order(messages=[], ground_truth=truth, state=state).score

    (path, text), *rest = truth.items()
    assert (len(before), len(truth), score(before), score(truth), score({})) == (12, 10, 0.0, 1.0, 0.0)
    assert score(dict(rest)) == 0.9
    assert score({**truth, "a copy": text}) == 0.95
    assert score({**truth, path: "changed"}) == pytest.approx(9 / 11)


def test_bring_your_own_agent_example_is_solved_and_stops_at_the_step_limit(tmp_path: Path) -> None:
    folder = ROOT / "examples" / "bring_your_own_agent"
    with subprocess.Popen(
        [sys.executable, str(folder / "stand_in_model.py"), "0"], stdout=subprocess.PIPE, text=True
    ) as model:
        try:
            assert model.stdout is not None
            url = re.findall(r"http://\S+/v1", model.stdout.readline())[0]
            for steps, ends, score in ((6, {"answered": 6}, 1.0), (1, {"max_steps": 6}, 0.0)):
                limit = f"max_episode_steps={steps}"
                done = run(tmp_path, "run", str(folder / "task.yaml"), "--base-url", url, "-T", limit, "--json")
                assert done.returncode == 0, done.stderr
                (summary,) = json.loads(done.stdout)["policies"]
                assert (summary["stop_reasons"], summary["score"]["mean"]) == (ends, score)
                assert (summary["tokens"], summary["errors"]) == (480 if steps == 6 else 180, {})
                assert_run_passes_checks(tmp_path, done)
        finally:
            model.kill()
