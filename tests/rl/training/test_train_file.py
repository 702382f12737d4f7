"""Test `reward_kit.train` with a train file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import reward_kit
from reward_kit.errors import ConfigError
from tests.rl.training.frozen_lake import lake_folder, metrics_of


def test_a_train_file_becomes_a_run_with_the_metrics_of_the_command(tmp_path: Path) -> None:
    train_file = lake_folder(tmp_path)
    outcome = reward_kit.train(train_file, overrides={"updates": 1}, log_dir=tmp_path / "runs")
    assert (outcome.status, outcome.summary["updates"]) == ("complete", 1)
    assert outcome.path.parent == tmp_path / "runs" and (outcome.path / "report.html").is_file()
    called = subprocess.run(
        [sys.executable, "-m", "reward_kit.cli.main", "train", "train.yaml", "-T", "updates=1", "--log-dir", "called"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "REWARD_KIT_TRUST": "1"},
    )
    assert called.returncode == 0, called.stderr
    (run,) = (tmp_path / "called").iterdir()
    for ours, theirs in zip(metrics_of(outcome.path), metrics_of(run), strict=True):
        assert ours["held_out/score"] == theirs["held_out/score"]
        assert ours.get("learner/loss") == pytest.approx(theirs.get("learner/loss"), nan_ok=True)


async def test_train_blocks_inside_a_running_event_loop(tmp_path: Path) -> None:
    assert reward_kit.train(lake_folder(tmp_path), log_dir=tmp_path, overrides={"updates": 1}).status == "complete"


def test_an_invalid_key_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'updates'"):
        reward_kit.train(lake_folder(tmp_path), overrides={"update": 1}, log_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import reward_kit; reward_kit.train('train.yaml')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "ConfigError: train needs torch; install the extra 'train'" in done.stderr
