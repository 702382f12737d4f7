"""Test the page that `run`, `score` and `reward-kit view RUN -o` write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.project import Project
from tests.report.run_factory import Parsed, make_run


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def page(path: Path) -> Parsed:
    return Parsed((path / "report.html").read_text(encoding="utf-8"))


def assert_as_summary(path: Path) -> None:
    """Assert that the page of a run matches its `summary.json`."""
    shown = page(path)
    for policy in json.loads((path / "summary.json").read_text())["policies"]:
        figures = shown.figures[policy["policy"]]
        assert [figures[key] for key in ("episodes", "scored", "failures")] == [
            policy[key] for key in ("episodes", "scored", "failures")
        ]
        assert figures.get("mean") == (policy["score"] or {}).get("mean")
        assert figures["errors"] == sum(policy["errors"].values())


def test_run_writes_its_page_and_reports_the_path(project: Project) -> None:
    done = project.call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    path = project.run_path()
    assert f"Report:  runs/{path.name}/report.html" in done.stderr
    assert_as_summary(path)
    shown = page(path)
    assert shown.counts["stop"] == {"answered": 6}
    assert "have no request and arrival times" not in shown.text
    assert {"episode", "call"} <= {given.get("class") for tag, given in shown.tags if tag == "rect"}


def test_score_timing_records_submission_and_attempts(project: Project) -> None:
    project.call("run", "task.yaml")
    for line in (project.run_path() / "scores.jsonl").read_text().splitlines():
        timing = json.loads(line)["timing"]
        ((began_s, ended_s),) = timing["attempts"]
        assert 0 <= timing["submitted_s"] <= began_s <= ended_s <= timing["done_s"]


def test_score_writes_its_page_with_the_given_threshold(project: Project) -> None:
    project.call("run", "task.yaml")
    data = project.run_path() / "episodes.jsonl"
    done = project.call("score", str(data), "--reward", "reward.py:right", "--pass-threshold", "0", "--log-dir", "more")
    assert done.returncode == 0, done.stderr
    (path,) = (project.folder / "more").iterdir()
    assert_as_summary(path)
    assert set(page(path).column("episodes", "outcome")) == {"passed"}
    assert "collected elsewhere" in page(path).text


def test_sample_name_with_surrogates_is_listed_escaped(project: Project) -> None:
    project.write_rows([{"id": "half \ud800 <b>", "number": 1, "ground_truth": "done"}])
    done = project.call("run", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert_as_summary(project.run_path())
    assert page(project.run_path()).column("samples", "sample") == ["half \\ud800 <b>"]


def test_failures_are_shown_on_the_page(project: Project) -> None:
    project.write_task(reward_function_path="reward.py:broken")
    assert project.call("run", "task.yaml").returncode == 3
    shown = page(project.run_path())
    assert_as_summary(project.run_path())
    assert shown.counts["error"] == {"crash": 6} and "division by zero" in shown.text


def test_view_output_writes_the_page_again_and_prints_its_path(project: Project) -> None:
    project.call("run", "task.yaml")
    path = project.run_path()
    before = (path / "report.html").read_bytes()
    (path / "report.html").unlink()
    run = str(path.relative_to(project.folder))
    done = project.call("view", run, "-o", f"{run}/report.html")
    assert (done.returncode, done.stdout) == (0, f"runs/{path.name}/report.html\n")
    assert (path / "report.html").read_bytes() == before
    assert project.call("view", str(path), "-o", "mine.html").stdout == "mine.html\n"
    assert (project.folder / "mine.html").read_bytes() == before


def test_view_rejects_a_folder_without_a_run(project: Project) -> None:
    done = project.call("view", ".", "-o", "page.html")
    assert done.returncode == 2
    assert "error: . is not a run directory: it has no run.json" in done.stderr


def test_damaged_run_is_reported_with_its_line(project: Project) -> None:
    path = make_run(project.folder, [], [])
    (path / "episodes.jsonl").write_text("{}\n")
    done = project.call("view", "run", "-o", "page.html")
    assert done.returncode == 3 and "run/episodes.jsonl:1: expected an object with a string rollout_id" in done.stderr


def test_unwritable_page_does_not_fail_the_run(project: Project) -> None:
    project.call("run", "task.yaml")
    path = project.run_path()
    (path / "report.html").unlink()
    (path / "report.html").mkdir()
    done = project.call("run", "--resume", str(path))
    assert done.returncode == 0, done.stderr
    assert "No report was written: cannot write" in done.stderr
    assert "report was not written: cannot write" in (path / "run.log").read_text()


def test_secret_is_not_on_the_page(project: Project) -> None:
    secret = "sk-very-secret-0123456789"
    project.write_task(policy={"type": "scripted", "actions": [{"type": "text", "content": f"key {secret}"}]})
    (project.folder / "reward.py").write_text(
        "from reward_kit import reward_function\n\n@reward_function\ndef right(messages):\n"
        "    return {'score': 1.0, 'reason': messages[-1].text}\n"
    )
    done = project.call("run", "task.yaml", SOME_API_KEY=secret)
    assert done.returncode == 0, done.stderr
    assert set(page(project.run_path()).column("episodes", "reason")) == {"key (hidden)"}
    assert secret not in (project.run_path() / "report.html").read_text()
