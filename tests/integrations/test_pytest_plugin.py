"""Test the pytest plugin in a separate pytest: gates, failure output, invalid marks, and overhead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "reward_kit.integrations.pytest_plugin"
REWARD = """
from reward_kit import EvaluateResult, MetricResult, reward_function

@reward_function
def right(messages, ground_truth=None):
    if ground_truth == "broken":
        raise ValueError("no score")
    metrics = {"state": MetricResult(score=0.75, reason="")}
    metrics["never"] = MetricResult(score=0, reason="", is_score_valid=False)
    score = float(messages[-1].content == ground_truth)
    return EvaluateResult(score=score, reason=f"said {messages[-1].content}", metrics=metrics)
"""
TASK = """
name: capitals
initial_user_prompt: "{question}"
dataset_path: rows.jsonl
reward_function_path: reward.py:right
policy: {type: scripted, actions: [{type: text, content: Paris}]}
"""
ROWS = [{"id": "f", "question": "France?", "ground_truth": "Paris"}, {"id": "i", "question": "Italy?", "ground_truth": "Rome"}]  # fmt: skip  # noqa: E501
BROKEN = [*ROWS, {"id": "b", "question": "?", "ground_truth": "broken"}]
SAID = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": row["ground_truth"]}], **row} for row in ROWS]  # fmt: skip  # noqa: E501
TESTS = """
import asyncio, pytest
mark = pytest.mark.reward_kit

@mark("task.yaml", threshold=0.5, rollouts=3)
def test_passes(reward_kit_run):
    assert len(reward_kit_run.rows) == 6 and reward_kit_run.score == 0.5

@mark("task.yaml", threshold=0.5)
def test_needs_no_argument(): pass

@mark("task.yaml", threshold=0.5, thresholds={"state": 0.75})
def test_metric(): pass

@mark("task.yaml", thresholds={"state": 0.8})
def test_metric_below(): pass

@mark("task.yaml", thresholds={"never": 0})
def test_metric_without_values(): pass

@mark("task.yaml", thresholds={"stat": 0})
def test_metric_misspelt(): pass

@mark("several.yaml", thresholds={"answer": 0.5, "answer.state": 0.75})
def test_named_reward(): pass

@mark("several.yaml", thresholds={"anwser": 0.5})
def test_named_reward_misspelt(): pass

@mark("task.yaml", thresholds={"state": "high"})
def test_metric_no_number(): pass

@mark("task.yaml", thresholds=0.5)
def test_metric_no_dict(): pass

@mark("task.yaml", threshold=0.6)
def test_below(): pass

@mark("task.yaml", threshold=0.5, lower_bound=True)
def test_not_surely(): pass

@mark("broken.yaml")
def test_broken(): pass

@mark("broken.yaml", max_errors=1, threshold=0.5)
def test_broken_is_allowed(): pass

@mark("task.yaml")
def test_its_own_claim(reward_kit_run):
    assert reward_kit_run.score == 1.0

@mark(reward="reward.py:right", data="said.jsonl", threshold=1.0)
def test_reward(): pass

@mark("task.yaml", limit=1, threshold=1)
@pytest.mark.parametrize("policy", ["a", "b"])
class TestOfAClass:
    def test_in_it(self, policy, reward_kit_run):
        assert len(reward_kit_run.rows) == 1

@mark("task.yaml", treshold=1)
def test_misspelt(): pass

@mark("tsk\\x1b[2J.yaml")
def test_no_file(): pass

@mark("task.yaml", threshold="high")
def test_no_number(): pass

@mark("task.yaml", reward="x.py:f")
def test_both(): pass

@mark("task.yaml", max_errors=-1)
def test_negative(): pass

@mark("task.yaml", threshold=1, lower_bound="yes")
def test_no_flag(): pass

def test_unmarked(reward_kit_run): pass
"""
LIGHT = {"reward_kit", "reward_kit.lazy", "reward_kit.integrations", PLUGIN}
PASSED = (
    "metric",
    "named_reward",
    "passes",
    "needs_no_argument",
    "broken_is_allowed",
    "reward",
    "in_it[a]",
    "in_it[b]",
)
FAILED = {
    "metric_below": "scripted: the mean of 'state' is 0.750, below the threshold 0.8",
    "metric_without_values": "scripted: the mean of 'never' is unknown; the threshold is 0",
    "metric_misspelt": "unknown metric 'stat'; did you mean 'state'?",
    "below": "scripted: the mean score is 0.500, below the threshold 0.6",
    "not_surely": "the lower bound of the mean score",
    "broken": "1 of 3 episodes ended with an error and have no score; max_errors is 0",
    "its_own_claim": "assert 0.5 == 1.0",
}
REFUSED = {
    "metric_no_number": "reward_kit(thresholds={'state': 'high'}): expected a finite number",
    "metric_no_dict": "reward_kit(thresholds=0.5): expected a dict that maps the names of metrics to numbers",
    "named_reward_misspelt": "reward_kit: thresholds: unknown metric 'anwser'; did you mean 'answer'?",
    "misspelt": "unknown option 'treshold'; did you mean 'threshold'?",
    "no_file": "tsk\\x1b[2J.yaml",
    "no_number": "reward_kit(threshold='high'): expected a finite number",
    "both": "pass either a task file, or reward= with data=",
    "negative": "reward_kit(max_errors=-1): must be at least 0",
    "no_flag": "reward_kit(lower_bound='yes'): must be True or False",
    "unmarked": "reward_kit_run can only be used in tests with @pytest.mark.reward_kit",
}


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:asyncio\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "task.yaml").write_text(TASK)
    several = "rewards: [{name: answer, reward_function_path: 'reward.py:right'}]"
    (folder / "several.yaml").write_text(TASK.replace("reward_function_path: reward.py:right", several))
    (folder / "broken.yaml").write_text(TASK.replace("rows.jsonl", "broken.jsonl"))
    for name, rows in (("rows", ROWS), ("broken", BROKEN), ("said", SAID)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test_agent.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def results(project: Path) -> Mapping[str, ElementTree.Element]:
    """Return the `<testcase>` of each test by name."""
    done = run_pytest(project, "--junitxml=out.xml", "--reward-kit-log-dir=kept")
    assert done.returncode == 1, done.stdout + done.stderr
    (project / "out.txt").write_text(done.stdout)
    cases = ElementTree.parse(project / "out.xml").iter("testcase")
    return {str(case.get("name")).removeprefix("test_"): case for case in cases}


def test_plugin_collects_every_test(results: Mapping[str, ElementTree.Element]) -> None:
    assert set(results) == {*PASSED, *FAILED, *REFUSED}


@pytest.mark.parametrize("name", PASSED)
def test_gate_passes(results: Mapping[str, ElementTree.Element], name: str) -> None:
    assert results[name].find("failure") is None and results[name].find("error") is None


@pytest.mark.parametrize("name", FAILED)
def test_failed_gate_shows_the_table_and_the_report(results: Mapping[str, ElementTree.Element], name: str) -> None:
    failure = results[name].find("failure")
    assert failure is not None and FAILED[name] in f"{failure.get('message')}\n{failure.text}"


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_mark_is_reported_in_a_single_line(results: Mapping[str, ElementTree.Element], name: str) -> None:
    error = results[name].find("error")
    assert error is not None and REFUSED[name] in str(error.text)
    assert "Traceback" not in str(error.text) and "During handling" not in str(error.text)


def test_the_report_is_attached_and_kept(project: Path, results: Mapping[str, ElementTree.Element]) -> None:
    told = {str(one.get("name")): str(one.get("value")) for one in results["below"].iter("property")}
    page = Path(told["reward_kit_page"])
    assert page.is_file() and page.parent.parent == project / "kept"
    shown = run_pytest(project, "-k", "below").stdout
    assert "mean score" in shown and "episodes that failed or ended with an error:" in shown
    assert re.search(r"the report: .*report\.html", shown) and "0.000  said Paris" in shown


def test_scores_of_passed_tests_are_in_the_terminal_summary_and_in_junit(
    project: Path, results: Mapping[str, ElementTree.Element]
) -> None:
    told = {str(one.get("name")): str(one.get("value")) for one in results["passes"].iter("property")}
    text = told["reward_kit_score:scripted"]
    assert re.fullmatch(r"mean score 0\.500  \[.*\], pass@1 50\.0%, 6 episodes", text)
    assert told["reward_kit_mean:scripted"] == "0.5" and told["reward_kit_metric:scripted:state"] == "0.75"
    assert "reward_kit_metric:scripted:never" not in told
    shown = (project / "out.txt").read_text()
    assert f"test_agent.py::test_passes\n  scripted: {text}\n  {told['reward_kit_page']}" in shown
    assert "test_agent.py::test_misspelt" not in shown.partition("= reward-kit =")[2].partition("short test summary")[0]


def test_summary_reaches_the_terminal_from_parallel_workers(project: Path) -> None:
    shown = run_pytest(project, "-n", "2", "-k", "needs_no_argument or passes").stdout
    assert shown.count("scripted: mean score 0.500") == 2


@pytest.mark.parametrize("how", ["-p", "conftest.py"])
def test_plugin_can_be_loaded_by_name(project: Path, how: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text((project / "pytest.ini").read_text())
    (tmp_path / "test_plain.py").write_text("def test_plain(): pass\n")
    if how == "conftest.py":
        (tmp_path / how).write_text(f"pytest_plugins = [{PLUGIN!r}]\n")
    done = run_pytest(tmp_path, *(["-p", PLUGIN] if how == "-p" else []))
    assert done.returncode == 0, done.stdout + done.stderr


def test_unused_plugin_loads_no_reward_kit_modules(project: Path) -> None:
    (project / "other").mkdir()
    (project / "other" / "test_other.py").write_text(
        "import sys\n"
        "def test_light():\n"
        f"    assert {{name for name in sys.modules if name.startswith('reward_kit')}} == {LIGHT!r}\n"
    )
    assert run_pytest(project, "other/test_other.py").returncode == 0


def test_plugin_import_is_light() -> None:
    code = f"import sys, {PLUGIN}; print(*(name for name in sys.modules if name.startswith('reward_kit')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) == LIGHT
