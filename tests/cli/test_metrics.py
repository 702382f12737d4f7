"""Test named metrics: their table, `summary.json`, and gates on them."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from tests.cli.project import Project

REWARD = """
from reward_kit import EvaluateResult, MetricResult

def graded(messages, sample):
    number = sample["number"]
    metrics = {"state": MetricResult(score=number % 2, reason="")}
    if number < 2:
        metrics["format"] = MetricResult(score=0.75, reason="")
    metrics["never"] = MetricResult(score=0.0, reason="no reference", is_score_valid=False)
    if number == 2:
        raise ValueError("no score")
    return EvaluateResult(score=1.0, metrics=metrics)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path, rows=6, reward_function_path="reward.py:graded", num_rollouts_per_sample=1)
    (tmp_path / "reward.py").write_text(REWARD)
    return project


def test_metrics_are_means_over_the_episodes_that_have_them(project: Project) -> None:
    done = project.call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((project.run_path() / "summary.json").read_text())["policies"][0]["metrics"]
    assert list(metrics) == ["state", "format", "never"]
    state, form = metrics["state"], metrics["format"]
    assert (state["mean"], state["n"], state["n_unscored"]) == (pytest.approx(0.6), 5, 1)
    assert 0.0 <= state["low"] < 0.6 < state["high"] <= 1.0
    assert (form["mean"], form["n"], form["n_unscored"]) == (0.75, 2, 4)
    assert metrics["never"] is None
    table = done.stdout[done.stdout.index("Metrics") : done.stdout.index("first error")].splitlines()
    shown = {line.split()[0]: line.split() for line in table if line.strip()}
    assert shown["metric"] == ["metric", "mean", "n", "missing"]
    assert shown["state"][1] == "0.600" and shown["state"][-2:] == ["5", "1"]
    assert shown["format"][-2:] == ["2", "4"]
    assert shown["never"] == ["never", "no", "value", "0", "6"]
    assert all(len(line) <= 80 for line in table)


@pytest.mark.parametrize(
    ("gates", "code", "messages"),
    [
        (["state=0.5", "0.9", "format=0.75"], 0, []),
        (["state=0.7", "0.9"], 1, ["Gate failed: mean of 'state' below 0.7 for transcript (0.600)"]),
        (
            ["state=0.7", "format=1"],
            1,
            ["Gate failed: mean of 'state' below 0.7", "Gate failed: mean of 'format' below 1"],
        ),
        (["never=0"], 1, ["Gate failed: mean of 'never' is unknown for transcript, because no episode has a value"]),
        (["stat=0.5"], 1, ["Gate failed: unknown metric 'stat'; did you mean 'state'?"]),
        (["x=0.5"], 1, ["Gate failed: unknown metric 'x'; known: format, never, state"]),
        (
            ["state=0.5", "--lower-bound"],
            1,
            ["Gate failed: lower bound of the mean of 'state' below 0.5 for transcript"],
        ),
        (["=0.5"], 2, ["has no metric name"]),
        (["state=nan"], 2, ["is not a finite number"]),
        (["state=high"], 2, ["'high' is not a number; use METRIC=X"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_fail_under_gates_a_metric(project: Project, gates: list[str], code: int, messages: list[str]) -> None:
    rows = [{"id": str(n), "number": n, "messages": [{"role": "user", "content": "?"}]} for n in (0, 1, 3, 5, 4)]
    project.write_rows(rows)
    arguments = [one for gate in gates for one in ([gate] if gate.startswith("--") else ["--fail-under", gate])]
    done = project.call("score", "rows.jsonl", "--reward", "reward.py:graded", "--sandbox", "in_process", *arguments)
    assert done.returncode == code, done.stderr
    for message in messages:
        assert message in done.stderr


def test_gate_on_a_metric_of_a_reward_without_metrics_names_the_cause(project: Project) -> None:
    (project.folder / "reward.py").write_text("def graded(messages):\n    return {'score': 1.0}\n")
    done = project.call("run", "task.yaml", "--fail-under", "state=0.5")
    assert done.returncode == 1 and "unknown metric 'state'; the reward returns no metrics" in done.stderr
    assert "Metrics" not in done.stdout


def test_report_and_comparison_have_a_table_of_metrics(project: Project) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    metrics = {hostile: {"score": 0.5, "reason": ""}}
    (project.folder / "other.py").write_text(
        f"def other(messages):\n    return {{'score': 1.0, 'metrics': {metrics!r}}}\n"
    )
    project.write_task(reward_function_path="other.py:other")
    for folder in ("before", "after"):
        assert project.call("run", "task.yaml", "--log-dir", folder).returncode == 0
    runs = [str(next((project.folder / folder).iterdir())) for folder in ("before", "after")]
    page = (Path(runs[0]) / "report.html").read_text()
    table = page[page.index('id="metrics"') : page.index("</table>", page.index('id="metrics"'))]
    assert "0.500" in table and ">12<" in table and html.escape(hostile) in table and hostile not in page
    done = project.call("compare", *runs, "-o", "compare.html", "--fail-under", f"{hostile}=0.6")
    assert done.returncode == 1 and "Metrics" in done.stdout and "is 0.500, below 0.6" in done.stderr
    compared = (project.folder / "compare.html").read_text()
    assert 'id="metrics"' in compared and html.escape(hostile) in compared and hostile not in compared
    markdown = project.call("compare", *runs, "--markdown").stdout
    assert "| metric | baseline | mean | difference | samples |" in markdown and hostile not in markdown


def test_rescored_run_aggregates_the_metrics_of_the_new_reward(project: Project) -> None:
    assert project.call("run", "task.yaml").returncode == 0
    (project.folder / "other.py").write_text(
        "def other(messages):\n    return {'score': 1.0, 'metrics': {'new': {'score': 0.5, 'reason': ''}}}\n"
    )
    done = project.call("score", str(project.run_path()), "--reward", "other.py:other", "--json")
    (summary,) = json.loads(done.stdout)["policies"]
    assert list(summary["metrics"]) == ["new"] and summary["metrics"]["new"]["n"] == 6
