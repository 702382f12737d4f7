"""Test `reward-kit compare`: table, JSON, page, gates and validation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.project import Project
from tests.report.run_factory import Parsed


def acting(answer: str) -> dict[str, Any]:
    return {"type": "scripted", "actions": [{"type": "text", "content": answer}]}


def run(project: Project, answer: str, name: str, *options: str, **task: Any) -> str:
    """Write a run whose policy gives this answer to every question, under its own name."""
    project.write_task(policy=acting(answer), **task)
    done = project.call("run", "task.yaml", "--display", "none", "--log-dir", "new", *options)
    assert done.returncode == 0, done.stderr
    (made,) = (project.folder / "new").iterdir()
    (project.folder / "runs").mkdir(exist_ok=True)
    made.rename(project.folder / "runs" / name)
    return f"runs/{name}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Eight questions, and four runs: "done" is right for every second one, "no" for the others, "wrong" for none."""
    project = Project(tmp_path_factory.mktemp("project"), rows=8)
    for name, answer in (("wrong", "wrong"), ("done", "done"), ("no", "no")):
        run(project, answer, name)
    return project


@pytest.fixture
def own(tmp_path: Path) -> Project:
    """A project that a test may change."""
    return Project(tmp_path, rows=8)


def test_two_runs_of_one_task_are_compared_in_a_table(project: Project) -> None:
    done = project.call("compare", "runs/wrong", "runs/done")
    assert (done.returncode, done.stderr) == (0, ""), "no warning: only the policy differs"
    lines = {line[:21].strip(): line[21:].split() for line in done.stdout.splitlines()}
    assert lines["mean score"] == ["0.000", "[0.000,", "0.369]", "0.500", "[0.157,", "0.843]"]
    assert lines["difference"] == ["+0.500", "[+0.053,", "+0.947]"]
    assert lines["p (permutation)"] == ["0.12"]
    assert lines["samples won, lost"] == ["4,", "0"]
    assert "won (4): q1, q3, q5, q7" in done.stdout
    assert "done and wrong may differ: +0.500  [+0.053, +0.947], p 0.12" in done.stdout
    rich = project.call("compare", "runs/wrong", "runs/done", "--display", "rich").stdout
    assert "━" in rich and "━" not in done.stdout, "plain where it is no terminal"


def test_markdown_is_a_table_whose_texts_are_no_markup(own: Project) -> None:
    first = run(own, "wrong", "base")
    second = run(own, "done", "a|b<b>*[x](y)")
    done = own.call("compare", first, second, "--markdown", "--fail-under", "0.9")
    assert done.returncode == 1, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}
    assert table[0] == r"|  | base (baseline) | a\|b\<b\>\*\[x\](y) |" and table[1] == "|---|---:|---:|"
    assert r"| mean score | 0.000  \[0.000, 0.369\] |" in table[2]
    assert done.stdout.startswith("### Evaluation\n\n- ") and "- Gate failed: " in done.stdout
    assert own.call("compare", first, second, "--markdown", "--json").returncode == 2


def test_three_runs_are_compared_as_json_with_gates_and_page(project: Project) -> None:
    gates = ["--fail-on-regression", "--fail-under", "0.5", "-o", "compare.html"]
    done = project.call("compare", "runs/done", "runs/wrong", "runs/no", "--json", *gates)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    worse, other = document["comparisons"]
    assert [flip["sample"] for flip in other["lost"]] == ["q1", "q3", "q5", "q7"]
    assert [flip["sample"] for flip in other["won"]] == ["q0", "q2", "q4", "q6"]
    assert (other["difference"], other["p"], other["p_mcnemar"], other["verdict"]) == (0.0, 1.0, 1.0, "not shown")
    assert (worse["p"], worse["p_holm"]) == (0.125, 0.25)
    assert [(gate["gate"], gate["run"], gate["failed"]) for gate in document["gates"]] == [
        ("fail-on-regression", "wrong", True),
        ("fail-on-regression", "no", False),
        ("fail-under", "no", False),
    ]
    assert document["runs"][0]["run"] == "runs/done"
    assert "Report:  compare.html" in done.stderr
    shown = Parsed((project.folder / "compare.html").read_text(encoding="utf-8"))
    assert shown.column("samples", "change") == ["lost"] * 8 + ["won"] * 4 + ["same"] * 4


class TestGates:
    @pytest.mark.parametrize(
        ("options", "code", "told"),
        [
            (["--fail-on-regression", "0.05"], 1, "worse than done by more than 0.05"),
            (["--fail-on-regression=0.06"], 0, "Gate passed: wrong is not shown to be worse than done by more than"),
            (
                ["--fail-on-regression", "--fail-on-regression", "exact=0"],
                2,
                "--fail-on-regression: done: unknown metric",
            ),
            (["--fail-under", "exact=0"], 2, "--fail-under: wrong: unknown metric 'exact'"),
            (["--fail-under", "0.1", "--fail-on-regression", "0.5"], 1, "the mean score of wrong is 0.000, below 0.1"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_gates_set_the_exit_code(self, project: Project, options: list[str], code: int, told: str) -> None:
        done = project.call("compare", "runs/done", "runs/wrong", *options)
        assert done.returncode == code, done.stderr
        assert told in done.stderr

    def test_lower_bound_gate_checks_the_last_run(self, project: Project) -> None:
        runs, gate = ["runs/wrong", "runs/done"], ["--fail-under", "0.2"]
        assert project.call("compare", *runs, *gate).returncode == 0
        done = project.call("compare", *runs, *gate, "--lower-bound")
        assert done.returncode == 1
        assert "the lower bound of the mean score of done is 0.157, below 0.2" in done.stderr


OTHER = """
from reward_kit import AgentPolicy

class Other(AgentPolicy):
    async def get_action(self, observation, available_tools_specs=None):
        return {"type": "text", "content": "no"}, "no", None, None
"""


def test_policies_of_one_run_are_compared(own: Project) -> None:
    (own.folder / "other.py").write_text(OTHER)
    path = run(own, "done", "both", "--policy", "scripted", "--policy", "other.py:Other")
    done = own.call("compare", path, "--policy", "scripted", "--policy", "other.py:Other", "--json")
    assert done.returncode == 0, done.stderr
    assert [side["label"] for side in json.loads(done.stdout)["runs"]] == ["scripted", "other.py:Other"]
    again = own.call("compare", path, "--policy", "scriptd")
    assert again.returncode == 2 and "did you mean 'scripted'" in again.stderr


def test_compare_reports_other_differences(project: Project, own: Project) -> None:
    own.write_rows([{"id": f"q{n}", "number": n + 1, "ground_truth": "done"} for n in range(6)])
    reward = (own.folder / "reward.py").read_text()
    (own.folder / "reward.py").write_text(reward.replace('"compared"', '"again"'))
    after = run(own, "done", "after", "--seed", "5", pass_threshold=0.5, max_episode_steps=4)
    done = own.call("compare", str(project.folder / "runs" / "done"), after)
    assert done.returncode == 0
    for word in (
        "the dataset differs (SHA-256",
        "the reward differs (right ",
        "the pass_threshold differs (1 and 0.5)",
        "the task files differ in max_episode_steps",
        "the seed differs (0 and 5): models sampled differently, and where environments are generated from it",
        "left out: 2 only in the baseline",
    ):
        assert f"warning: after: {word}" in done.stderr


KIND = """

@reward_function
def kind(messages):
    if "3" in str(messages[0]):
        raise ValueError("no")
    return {"score": 1.0, "reason": "kind"}
"""


def test_scored_runs_with_a_failed_sample_are_compared(project: Project, own: Project) -> None:
    path = str(project.folder / "runs" / "done")
    with (own.folder / "reward.py").open("a") as code:
        code.write(KIND)
    data = f"{path}/episodes.jsonl"
    assert own.call("score", data, "--reward", "reward.py:kind", "--log-dir", "scored").returncode == 0
    (scored,) = (own.folder / "scored").iterdir()
    done = own.call("compare", path, str(scored), "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["comparisons"]
    assert found["common_samples"] == 7 and found["left_out"]["unscored_in_run"] == 1
    assert found["difference"] == pytest.approx(4 / 7), "what is unscored is not zero"
    assert [mismatch["what"] for mismatch in found["mismatches"]] == ["reward"]
    assert "2 of 16 episodes are unscored and are excluded from the means" in done.stderr


COUNTING = """
from reward_kit import AgentPolicy

class Counting(AgentPolicy):
    def __init__(self, answer="no"):
        self.answer = answer

    async def open(self, context):
        return Counting("done" if context.rollout_index else "no")

    async def get_action(self, observation, available_tools_specs=None):
        return {"type": "text", "content": self.answer}, self.answer, None, None
"""

HALF = """

@reward_function
def half(messages, sample):
    if (messages[-1].text == "done") == bool(sample["number"] % 4 < 2):
        raise ValueError("not this one")
    return {"score": 1.0, "reason": "one of two"}
"""


def test_comparison_with_a_rescored_run_matches_the_rescore_report(own: Project) -> None:
    """Compare a run with its rescoring, whose reward raises on one of two rollouts per sample."""
    (own.folder / "counting.py").write_text(COUNTING)
    path = run(own, "done", "first", "--policy", "counting.py:Counting")
    with (own.folder / "reward.py").open("a") as code:
        code.write(HALF)
    again = own.call("score", path, "--reward", "reward.py:half", "-o", "runs/again", "--json")
    (change,) = json.loads(again.stdout)["changes"]["policies"]
    done = own.call("compare", path, "runs/again", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["comparisons"]
    assert found["difference"] == change["difference"]["mean"] == 0.5
    assert (found["paired_by"], found["paired_rollouts"], found["single_rollouts"]) == ("rollout", change["paired"], 8)
    assert "paired by rollout: 8 have a score in both runs; 8 have a score in only one run" in done.stderr


class TestInvalidRuns:
    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (
                ["runs/done", "runs/don"],
                "runs/don is not a run directory: it has no run.json; did you mean 'runs/done'?",
            ),
            (
                ["--fail-on-regression", "runs/done"],
                "'runs/done' is not a number; write METRIC=MARGIN, put --fail-on-regression after the runs",
            ),
            (["runs/done", "runs/no", "--lower-bound"], "--lower-bound requires --fail-under"),
        ],
        ids=["typo", "margin", "bound"],
    )
    def test_invalid_usage_is_rejected(self, project: Project, arguments: list[str], told: str) -> None:
        done = project.call("compare", *arguments)
        assert done.returncode == 2 and told in done.stderr

    def test_runs_without_common_samples_are_rejected(self, project: Project, own: Project) -> None:
        own.write_rows([{"id": "x", "number": 1, "ground_truth": "done"}])
        done = own.call("compare", str(project.folder / "runs" / "done"), run(own, "done", "after"))
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "error: after and the baseline done have no sample scored in both" in done.stderr
