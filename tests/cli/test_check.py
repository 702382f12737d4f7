"""Test the output and exit codes of `reward-kit check` for rewards and tasks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from reward_kit.checks.reward import is_reward
from reward_kit.cli.check import command
from reward_kit.cli.main import program
from tests import command_line

ROOT = Path(__file__).parents[2]
REWARD = """
from reward_kit import EvaluateResult, Message, reward_function

@reward_function
def right(messages: list[Message], ground_truth: str) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    return EvaluateResult(score=float(bool(messages) and messages[-1].text.strip() == ground_truth))

@reward_function
def contains(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(score=float(ground_truth in messages[-1].text if messages else 0))

def plain(messages):
    return {"score": 0.0}

class World:
    def step(self): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["check", *arguments])


def test_exit_code_is_zero_for_a_correct_reward_and_one_for_a_wrong_reward(folder: Path) -> None:
    good, bad = check("own.py:right"), check("own.py:contains")
    assert (good.exit_code, bad.exit_code) == (0, 1), good.output + bad.output
    assert "own.py:right: 0 errors" in good.stdout
    assert "error:   near-miss-earns: " in bad.stdout and "not checked: score of a correct answer" in bad.stdout


def test_fail_on_sets_the_severity(folder: Path) -> None:
    here = ("--sandbox", "in_process")  # the walls are another test's
    assert check("own.py:contains", "--fail-on", "never", *here).exit_code == 0
    given = (*here, "own.py:right", "--ground-truth", '"Paris"', "--gold", "Paris")
    assert check(*given, "--fail-on", "warning").exit_code == 0
    assert check(*given, "--fail-on", "info").exit_code == 1  # other case is not right, which is a fact


def test_json_report_is_complete(folder: Path) -> None:
    messages = [{"role": "user", "content": "The capital of France?"}, {"role": "assistant", "content": "Lyon"}]
    row = {"messages": messages, "ground_truth": "Paris"}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    done = check("own.py:contains", "--data", "data.jsonl", "--against", "own.py:right", "--json", "--seed", "3")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["reward"], report["seed"], report["level"]) == (1, "own.py:contains", 3, "warm")
    assert report["counts"]["error"] == sum(finding["severity"] == "error" for finding in report["findings"])
    assert report["facts"]["agreement with own.py:right"]["rollouts"] > 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("own.py:nobody",), "has no 'nobody'"),
        (("own.py",), "own.py: specify the object to check: own.py:right, own.py:contains"),
        (("own.py:right", "--ground-truth", "Paris"), "is not valid JSON"),
        (("own.py:right", "--gold", "Paris"), "--ground-truth"),
        (("own.py:right", "--data", "none.jsonl"), "none.jsonl does not exist"),
        (("own.py:right", "--steps", "3"), "--steps applies to a resource, but the target is a reward"),
        (("own.py:World", "--gold", "x"), "--gold applies to a reward, but the target is a resource"),
        (("own.py:right", "--limit", "3"), "--limit applies to a task file, but the target is a reward"),
        (("task.yaml", "--data", "x.jsonl"), "--data applies to a reward, but the target is a task file"),
    ],
)
def test_invalid_usage_exits_with_two(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = check(*arguments)
    message = str(done.exception) if done.exit_code == 1 else done.stderr
    code = getattr(done.exception, "exit_code", done.exit_code) if done.exit_code == 1 else done.exit_code
    assert code == 2 and said in message, done.output


HALTING = """
from reward_kit.environments import PythonStateResource

class World(PythonStateResource):
    def get_observation(self):
        return "here"
"""


LENIENT = """
from reward_kit import ForkableResource, StepOutcome

class Lenient(ForkableResource):
    async def setup(self, config): pass
    async def reset(self, seed=None): self.count = 0
    async def state_key(self): return str(self.count)
    async def get_observation(self): return str(self.count)
    async def close(self): pass
    async def get_tools_spec(self):
        parameters = {"type": "object", "properties": {}}
        functions = [{"name": name, "description": "Count.", "parameters": parameters} for name in ("up", "down")]
        return [{"type": "function", "function": function} for function in functions]
    async def step(self, name, arguments):
        self.count += 1 if name == "up" else -1
        return StepOutcome(str(self.count))
"""


def test_findings_that_differ_only_in_the_tool_are_one_line_with_a_count(folder: Path) -> None:
    (folder / "lenient.py").write_text(LENIENT)
    lines = check("lenient.py:Lenient").stdout.splitlines()
    accepted = [line for line in lines if "no_such_argument" in line]
    assert len(accepted) == 1 and accepted[0].startswith("error: an unknown argument (")
    assert accepted[0].endswith("(2 findings)")
    assert [line for line in lines if line.startswith("tool ")] == ["tool up(): Count.", "tool down(): Count."]


def test_check_reports_a_resource_that_cannot_be_observed(folder: Path) -> None:
    (folder / "halting.py").write_text(HALTING, encoding="utf-8")
    done = check("halting.py:World")
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "get_observation is not a coroutine function, but its result is awaited" in done.stdout
    assert done.stdout.endswith("halting.py:World: 1 error (native fork, 20 steps)\n")


def test_reward_is_recognized_without_running_its_file(folder: Path) -> None:
    (folder / "own.py").write_text(REWARD + "\nraise SystemExit(7)\n", encoding="utf-8")
    names = ("right", "plain", "World", "unknown")
    assert [is_reward(f"own.py:{name}") for name in names] == [True, True, False, True]
    assert is_reward("reward_kit.rewards:exact_answer")
    others = ("frozen_lake", "gymnasium", "own.py", "nowhere.py:f", "reward_kit.environments.sokoban:Sokoban")
    assert not any(map(is_reward, others))


def test_help_describes_every_option() -> None:
    assert all(getattr(option, "help", "") for option in command.params if option.name != "target")
    assert "Exit codes" in check("--help").stdout


EXAMPLES = {
    "alfworld_household/task.yaml": (),
    "bring_your_own_agent/task.yaml": (),
    "file_clerk/report.yaml": ("--gold-policy", "clerk.py:Bookkeeper"),
    "file_clerk/task.yaml": ("--gold-policy", "clerk.py:Clerk"),
    "frozen_lake/task.yaml": (),
    "mcp_filesystem/task.yaml": (),
    "sokoban/task.yaml": (),
    "sqlite_analyst/task.yaml": (),
    "support_dialogue/task.yaml": (),
    "textworld_cooking/task.yaml": (),
    "webshop/task.yaml": (),
}


def test_every_example_is_tested() -> None:
    there = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").glob("*/*.yaml")}
    assert there == EXAMPLES.keys() | ASKS_A_JUDGE | LEARNS


LEARNS = {
    f"{folder}/{name}.yaml"
    for folder, names in (
        ("alfworld_household", ("agent", "sweep", "train", "training")),
        ("frozen_lake_training", ("agent", "sweep", "task", "train")),
        ("sokoban_training", ("sweep", "task", "train")),
    )
    for name in names
}
"""Files of agents that learn, which `test_household_agent`, `test_household_example` and others test."""

ASKS_A_JUDGE = {"llm_judge/task.yaml"}
"""Needs an endpoint, and what its reward lets pass is the judge's doing: see the test with the stand-in."""


def test_judge_example_is_proved_with_its_stand_in() -> None:
    folder = ROOT / "examples" / "llm_judge"
    with subprocess.Popen(
        [sys.executable, str(folder / "stand_in.py"), "0"], stdout=subprocess.PIPE, text=True
    ) as stand_in:
        try:
            assert stand_in.stdout is not None
            found = re.search(r"http://\S+/v1", stand_in.stdout.readline())
            assert found is not None
            env = {**os.environ, "JUDGE_BASE_URL": found[0]}
            done = command_line.call(
                "check", "task.yaml", "--sandbox", "in_process", "--fail-on", "never", "--json", cwd=folder, env=env
            )
        finally:
            stand_in.terminate()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [(sample["gold"], sample["nothing"]) for sample in report["samples"]] == [(1.0, 0.0)] * 4


SLOW = {
    "alfworld_household/task.yaml",
    "bring_your_own_agent/task.yaml",
    "file_clerk/report.yaml",
    "mcp_filesystem/task.yaml",
    "sokoban/task.yaml",
    "webshop/task.yaml",
}
"""Proved by the same steps as the others, and left to the long tests."""


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.campaign] if name in SLOW else []) for name in EXAMPLES]
)
def test_example_gold_scores_one_and_its_reward_passes(example: str) -> None:
    if example.startswith("textworld"):
        pytest.importorskip("textworld")
    done = check(str(ROOT / "examples" / example), *EXAMPLES[example], "--limit", "1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert all((sample["gold"], sample["nothing"]) == (1.0, 0.0) for sample in report["samples"])
    assert report["reward"]["counts"]["error"] == 0


class TestTaskWithCosts:
    TASK = "name: t\nnum_rollouts: 1\ninitial_user_prompt: go\n"

    def told(self, folder: Path, more: str, task: str = TASK) -> str:
        (folder / "task.yaml").write_text(task + more)
        result = check("task.yaml")
        assert result.exit_code == 0, result.output
        return result.output

    def test_task_with_a_model_judge_is_not_run(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        judge = "{model: m, base_url: 'http://127.0.0.1:9/v1', rubric: {good: 'Is it good?'}}"
        more = f"on_text: end\nreward_function_path: reward_kit.rewards:llm_judge\nreward_options: {judge}\n"
        assert "its reward calls a model" in self.told(folder, more)

    def test_only_the_judge_among_several_rewards_is_skipped(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        row = {"id": "france", "ground_truth": "Paris", "gold_answer": "Paris"}
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        judge = "{model: m, base_url: 'http://127.0.0.1:9/v1', rubric: {good: 'Is it good?'}}"
        rewards = (
            "rewards:\n"
            "- {name: answer, reward_function_path: 'own.py:right'}\n"
            f"- {{name: tone, reward_function_path: 'reward_kit.rewards:llm_judge', reward_options: {judge}}}\n"
        )
        task = "name: t\ndataset_path: rows.jsonl\ninitial_user_prompt: Capital?\non_text: end\n"
        told = self.told(folder, rewards, task)
        assert "answer: own.py:right: 0 errors" in told
        assert "not checked: reward 'tone', which calls a model" in told
        assert "task.yaml: 1 sample; the reference solution (gold_answer) scores 1" in told
        only = rewards.replace("name: answer", "name: answer, weight: 0")  # no score is left
        assert "its reward calls a model" in self.told(folder, only, task)

    def test_policy_without_a_model_is_no_error(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        policy = "policy: {type: openai, base_url: 'http://127.0.0.1:9/v1', OPTION: 0.5}\n"
        assert "1 episode with the policy that you pass" in self.told(folder, policy.replace("OPTION", "temperature"))
        (folder / "task.yaml").write_text(self.TASK + policy.replace("OPTION", "temprature"), encoding="utf-8")
        assert "policy.temprature: unknown key" in str(check("task.yaml").exception)

    def test_judge_reward_is_rejected(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        judge = ("reward_kit.rewards:llm_judge", "-O", "model=m", "-O", "base_url=http://127.0.0.1:9/v1")
        told = str(check(*judge).exception)
        assert "calls a model, which costs money" in told and "reward-kit calibrate" in told

    def test_task_with_a_model_as_user_is_not_run(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        user = "{type: openai, model: m, base_url: 'http://127.0.0.1:9/v1', instructions: You buy.}"
        assert "its simulated user is a model" in self.told(
            folder, f"reward_function_path: own.py:plain\nuser: {user}\n"
        )
