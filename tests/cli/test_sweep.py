"""Test `reward-kit sweep`: its output, interrupts, kills and trust prompt."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_kit.rl.training.sweep_results import sweep_tables
from reward_kit.runs.run_folder import RunHeader
from tests import command_line
from tests.rl.training.lake_sweep import sweep_folder

LONG = {"updates": 400, "checkpoints": {"every": 5}, "evaluation": {"dataset_path": "held_out.jsonl", "every": 1000}}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    # In a group of its own: a terminal sends Ctrl-C to all that runs in it.
    return subprocess.Popen(
        command_line.command("sweep", *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until(is_true: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(folder: Path) -> list[int]:
    """Return the processes of runs whose working directory is the folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            is_run = process.name.isdigit() and b"sweep_run" in (process / "cmdline").read_bytes()
            if is_run and (process / "cwd").readlink() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def tables_of(folder: Path) -> list[list[list[str]]]:
    """Return the rows of a sweep's tables without the CPU seconds."""
    tables = sweep_tables(json.loads((folder / "summary.json").read_text()))
    kept = [[at for at, name in enumerate(table.columns) if name != "CPU s"] for table in tables]
    return [[[row[at] for at in of] for row in table.rows] for table, of in zip(tables, kept, strict=True)]


def test_dry_run_shows_the_arms_and_writes_nothing(tmp_path: Path) -> None:
    sweep_folder(tmp_path, seeds=3, overrides={"ppo.lr": 0.01}, evaluation={"limit": 2})
    done = command_line.call("sweep", "sweep.yaml", "--dry-run", "--processes", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 arms, seeds 0, 1, 2: 6 runs, 3 at a time\ngigpo (baseline): train.yaml, 2 updates\n" in done.stdout
    assert "\n  ppo.lr: 0.01\n" in done.stdout and "(2 samples, 1 episode each)" in done.stdout
    assert '\n  credit.estimator: "grpo", not "gigpo"\n' in done.stdout and not (tmp_path / "runs").exists()
    done = command_line.call("sweep", "sweep.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["runs"] == 6


def test_sweep_prints_a_line_per_run_and_the_tables(tmp_path: Path) -> None:
    sweep_folder(tmp_path, seeds=1)
    done = command_line.call("sweep", "sweep.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gigpo-0  complete after 2 updates, " in done.stderr and "start-0  held-out score 0.0" in done.stderr
    assert "One seed does not show the spread between seeds" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:5]] == ["Arms", "seeds", "start", "gigpo", "grpo"]
    assert "not tested" in done.stdout
    listed = command_line.call("runs", "list", cwd=tmp_path)
    assert "/gigpo-0  complete" in listed.stdout and "/grpo-0  complete" in listed.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    again = command_line.call("sweep", "--resume", "--json", cwd=tmp_path)
    summary = json.loads(again.stdout)
    assert again.returncode == 0 and summary["sweep"] == f"runs/{folder.name}" and summary["status"] == "complete"
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "\n# changed\n")
    refused = command_line.call("sweep", "--resume", cwd=tmp_path)
    problem = f"runs/{folder.name} cannot be resumed, because its inputs changed:\ngigpo: evaluation's reward\n"
    fixes = "\nUndo the changes, or start again in a new directory\n"
    assert refused.returncode == 2 and problem in refused.stderr and fixes in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "pass a sweep file, or --resume"),
        (("--resume",), "no sweep in runs"),
        (("--resume", "."), "it has no sweep"),
    ],
)
def test_missing_sweep_is_rejected(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command_line.call("sweep", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr


def test_settings_of_an_arm_need_trust(tmp_path: Path) -> None:
    sweep_folder(tmp_path, arms={"gigpo": {}, "own": {"credit": {"estimator": "own.py:estimate"}}})
    (tmp_path / "own.py").write_text("def estimate(steps): ...\n")
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "REWARD_KIT_TRUST": ""}
    done = command_line.call("sweep", "sweep.yaml", cwd=tmp_path, env=env)
    assert done.returncode == 2 and "credit.estimator: own.py:estimate" in done.stderr and "file: own.py" in done.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_killed_sweep_ends_its_processes_and_ctrl_c_stops_after_the_update(tmp_path: Path) -> None:
    sweep_folder(tmp_path, LONG, seeds=1)
    sweep = start(tmp_path, "sweep.yaml")
    wait_until(lambda: len(list(tmp_path.glob("runs/*/*/checkpoints/step-*/manifest.json"))) > 1)
    assert children_of(tmp_path)
    sweep.kill()
    sweep.communicate()
    wait_until(lambda: not children_of(tmp_path))

    (folder,) = (tmp_path / "runs").iterdir()
    before = {path.name: path.stat().st_size for path in folder.glob("*/metrics.jsonl")}
    sweep = start(tmp_path, "--resume")
    wait_until(lambda: any(path.stat().st_size > before[path.name] for path in folder.glob("*/metrics.jsonl")))
    sweep.send_signal(signal.SIGINT)
    _, told = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and f"Resume with:  reward-kit sweep --resume runs/{folder.name}" in told
    assert json.loads((folder / "sweep.json").read_text())["status"] == "interrupted"
    statuses = {RunHeader.read(path.parent).status for path in folder.glob("*/run.json")}
    assert "interrupted" in statuses and statuses <= {"interrupted", "complete"}
    assert not children_of(tmp_path)


@pytest.mark.campaign
def test_sweep_that_was_killed_ten_times_has_the_same_tables(tmp_path: Path) -> None:
    train = {**LONG, "updates": 60}
    changes = {"seeds": 3, "evaluation": {"rollouts": 2, "by": "side"}}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        sweep_folder(tmp_path / name, train, **changes)
    chance, killed = random.Random(0), tmp_path / "killed"
    for number in range(10):
        sweep = start(killed, *(["--resume"] if list(killed.glob("runs/*/sweep.json")) else ["sweep.yaml"]))
        time.sleep(chance.uniform(4, 14) if number else 3.0)
        sweep.kill()
        sweep.communicate()
        wait_until(lambda: not children_of(killed))
    for folder, argument in ((killed, "--resume"), (tmp_path / "whole", "sweep.yaml")):
        done = command_line.call("sweep", argument, cwd=folder, timeout_s=600)
        assert done.returncode == 0, done.stderr
    folders = [next((tmp_path / name / "runs").iterdir()) for name in ("killed", "whole")]
    assert tables_of(folders[0]) == tables_of(folders[1])
