"""Test the notebook view of a run, and of one of its episodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult
from reward_kit.runs.finished import FinishedRun
from tests.runs.test_python_tasks import ROWS, Says, capitals
from tests.test_notebook_html import HOSTILE, harmless


def judged(messages: Any, ground_truth: str) -> EvaluateResult:
    if ground_truth == "Rome":
        raise ValueError(HOSTILE)
    return EvaluateResult(score=0.25, reason=HOSTILE)


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    policies = {HOSTILE: Says(HOSTILE), "rome": Says()}
    return capitals(reward=judged).run(policies=policies, rollouts=2, log_dir=tmp_path)


def test_table_has_every_policy_and_no_untrusted_html(run: FinishedRun) -> None:
    seen = harmless(run._repr_html_())
    for told in (
        "capitals",
        "rome",
        "0.250",
        "2 of 4 scored",
        "2 crash",
        "4 episodes with errors",
        "4 episodes did not pass",
    ):
        assert told in seen.text, told
    assert "report.html" in seen.text and "unconfined" in seen.text


def test_repr_is_a_single_line(run: FinishedRun) -> None:
    assert re.fullmatch(r"FinishedRun\('.*', complete, 8 episodes, .*, rome 0\.250\)", repr(run), re.DOTALL)


def test_result_returns_the_episode_of_a_row(run: FinishedRun) -> None:
    failed, broken = run.result(run.failed[0]), run.result(run.errors[0].rollout_id)
    assert (repr(failed), repr(broken)) == (
        f"Result({run.failed[0].rollout_id!r}, 0.25)",
        f"Result({run.errors[0].rollout_id!r}, unscored)",
    )
    assert failed.to_episode().id_ == run.failed[0].rollout_id
    told = failed.to_result()
    assert told is not None and told.score == 0.25 and broken.to_result() is None
    assert "score 0.25" in harmless(failed._repr_html_()).text
    assert "unscored: crash: reward 'judged': ValueError" in harmless(broken._repr_html_()).text


def test_missing_episode_is_reported(run: FinishedRun) -> None:
    near = run.failed[0].rollout_id[:-1]
    with pytest.raises(ConfigError, match=rf"has no episode '{near}'; did you mean '{near}[01]'\?"):
        run.result(near)


def test_run_limit_is_shown(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": str(i)} for i in range(6)]
    run = capitals(dataset=rows, run_limits={"steps": 2}).run(max_concurrency=1, log_dir=tmp_path)
    assert run.status == "interrupted"
    assert "Stopped: run limit reached" in harmless(run._repr_html_()).text


def test_missing_report_page_shows_the_folder(run: FinishedRun) -> None:
    run.page.unlink()
    assert f"no report was written; the run is in {run.path}" in harmless(run._repr_html_()).text
