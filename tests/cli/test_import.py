"""Test `reward-kit import`, and the commands that take an imported run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.runs.logs.inspect_log import read_header, read_samples
from tests.command_line import call

LOG = Path(__file__).parents[1] / "runs" / "logs" / "inspect_part.json"
REWARD = """
from reward_kit import EvaluateResult, reward_function

@reward_function
def short(messages, ground_truth):
    return EvaluateResult(score=float(len(messages[-1].text) < 100), reason=str(ground_truth))
"""


def run(tmp_path: Path, *arguments: str) -> Any:
    done = call(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done


def imported(tmp_path: Path) -> str:
    done = run(tmp_path, "import", str(LOG), "--json")
    summary = json.loads(done.stdout)
    assert [policy["policy"] for policy in summary["policies"]] == ["mockllm/large"]
    assert summary["fields"]["log_only"]["sample.events"] > 0
    return str(summary["run"])


def test_all_commands_take_an_imported_run(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(REWARD)
    path = imported(tmp_path)
    run(tmp_path, "view", path, "-o", "page.html")
    assert "mockllm/large" in (tmp_path / "page.html").read_text()
    run(tmp_path, "check", path)
    run(tmp_path, "credit", path, "--estimator", "rloo")
    run(tmp_path, "score", path, "--reward", "short.py:short", "--trust", "-o", "again")
    run(tmp_path, "compare", path, "again")
    run(tmp_path, "export", "again", "--format", "inspect", "-o", "again.json")
    sample = next(one.data for one in read_samples(tmp_path / "again.json") if not one.data.get("error"))
    original = next(one.data for one in read_samples(LOG) if one.data["uuid"] == sample["uuid"])
    assert sample["scores"] == {"short": {"value": 1.0, "explanation": str(original["target"])}}
    assert sample["events"] == original["events"]


def test_export_of_an_imported_log_is_equal(tmp_path: Path) -> None:
    path = imported(tmp_path)
    done = run(tmp_path, "export", path, "--format", "inspect", "-o", "log.json")
    assert "2 episodes in 1 log" in done.stderr
    assert read_header(tmp_path / "log.json", to_end=True) == read_header(LOG, to_end=True)
    assert [one.data for one in read_samples(tmp_path / "log.json")] == [one.data for one in read_samples(LOG)]


def test_fields_and_table_are_printed(tmp_path: Path) -> None:
    done = run(tmp_path, "import", str(LOG), "--score", "length")
    assert "style/polite" in done.stdout
    assert "Only in the run's copy of the log: " in done.stderr
    assert "sample.events" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["missing.eval"], "missing.eval: is not a file"),
        (["short.py"], "short.py: unknown format; pass --format with one of inspect"),
        (["short.py", "-o", "task"], "-o applies only to an eval of OpenAI Evals"),
        (["eval.yaml"], "needs -o FOLDER"),
        (["eval.yaml", "-o", "task"], "eval.yaml"),
    ],
)
def test_invalid_usage_is_rejected(tmp_path: Path, arguments: list[str], problem: str) -> None:
    (tmp_path / "short.py").write_text(REWARD)
    done = call("import", *arguments, cwd=tmp_path)
    assert (done.returncode, problem in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.glob("runs/*"))
