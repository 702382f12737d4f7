"""Test the page that `reward-kit train` writes, also when it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import command_line
from tests.report.run_factory import Parsed
from tests.rl.training.frozen_lake import lake_folder


def test_training_writes_a_page_and_view_writes_it_again(tmp_path: Path) -> None:
    lake_folder(tmp_path)
    done = command_line.call("train", "train.yaml", "--display", "none", "-v", cwd=tmp_path)
    assert done.stderr.count("reward_kit.events  update finished update=") == 3, "and the evaluation before the first"
    (run,) = (tmp_path / "runs").iterdir()
    assert done.returncode == 0 and f"Report:  runs/{run.name}/report.html" in done.stderr, done.stderr
    page = Parsed((run / "report.html").read_text(encoding="utf-8"))
    assert "2 of 2 updates" in page.text
    assert [given for tag, given in page.tags if tag == "svg" and given.get("data-chart") == "score"]
    done = command_line.call("view", str(run), "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "page.html\n"
    assert '<h2 id="learning">Score</h2>' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.campaign
def test_interrupted_training_writes_a_page(tmp_path: Path) -> None:
    lake_folder(tmp_path, updates=5_000)
    training = subprocess.Popen(
        command_line.command("train", "train.yaml", "--display", "none"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size for file in tmp_path.glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < deadline and training.poll() is None
        time.sleep(0.02)
    training.send_signal(signal.SIGINT)
    _, told = training.communicate(timeout=60)
    (run,) = (tmp_path / "runs").iterdir()
    assert training.returncode == 130 and f"Report:  runs/{run.name}/report.html" in told, told
    page = Parsed((run / "report.html").read_text(encoding="utf-8"))
    assert "interrupted" in page.text and f"reward-kit train --resume runs/{run.name}" in page.text
