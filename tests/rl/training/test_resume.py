"""Test that resumed runs equal uninterrupted runs bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.rl.checkpoint import checkpoints
from reward_kit.rl.training.logs import TrainingDisplay
from reward_kit.rl.training.plan import load_plan
from reward_kit.rl.training.resume import Changes, changes_since
from reward_kit.runs.plan import Control
from reward_kit.runs.run_folder import RunHeader
from tests import command_line
from tests.rl.training.frozen_lake import (
    TRAIN,
    interrupted_after,
    lake_folder,
    metrics_of,
    same,
    train,
    trained,
    weights_of,
)

CLOCK = ("time/", "speed/", "overlap/", "reward_agent/", "at")


def without_clock(run: Path) -> list[dict[str, object]]:
    """Return the metrics without those that depend on the clock."""
    return [{key: value for key, value in line.items() if not key.startswith(CLOCK)} for line in metrics_of(run)]


@pytest.mark.parametrize("limit", [{"updates": 4}, {"updates": None, "max_env_steps": 50}])
@pytest.mark.parametrize("pipeline", ["sync", "one_step_off"])
async def test_stopped_and_resumed_run_equals_an_uninterrupted_run(
    tmp_path: Path, pipeline: str, limit: dict[str, int | None]
) -> None:
    ppo = {**TRAIN["ppo"], "schedule": "linear"}
    path = lake_folder(tmp_path, **limit, pipeline=pipeline, ppo=ppo, reward_manager={"normalization_type": "variance"})
    plan = load_plan(path)
    assert (await train(plan, tmp_path / "straight")).status == "complete"
    stopped = await train(plan, tmp_path / "stopped", interrupted_after(2))
    assert (stopped.status, stopped.summary["updates"]) == ("interrupted", 2)
    assert RunHeader.read(tmp_path / "stopped").status == "interrupted"
    assert (await train(plan, tmp_path / "stopped")).status == "complete"
    assert same(weights_of(tmp_path / "stopped"), weights_of(tmp_path / "straight"))
    assert without_clock(tmp_path / "stopped") == without_clock(tmp_path / "straight")


async def test_updates_after_the_last_checkpoint_are_repeated_and_logged_once(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=3, checkpoints={"every": 1, "keep": 3, "best_by": "score/max"})
    await trained(path, tmp_path / "straight")
    await trained(path, tmp_path / "cut")
    # As a kill leaves it: figures of updates whose checkpoint was not written yet, and a torn line.
    last = checkpoints(tmp_path / "cut" / "checkpoints")[-1]
    (last / "manifest.json").unlink()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"update": 4, "sco')
    await trained(path, tmp_path / "cut")
    assert [line["update"] for line in metrics_of(tmp_path / "cut")] == [0, 1, 2, 3]
    assert same(weights_of(tmp_path / "cut"), weights_of(tmp_path / "straight"))


async def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    path = lake_folder(tmp_path, updates=1, evaluation=None)
    await trained(path, tmp_path / "run")
    policy = tmp_path / "policy.py"
    policy.write_text(policy.read_text().replace("width: int = 24", "width: int = 12"))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("reward.py", "lakes.jsonl", "train.yaml", "policy.py"):
        (other / name).write_text((tmp_path / name).read_text())
    with pytest.raises(ConfigError, match="step-000001 was saved with a different policy or optimizer"):
        await trained(other / "train.yaml", tmp_path / "run", updates=2)


HASH = "def same_for_all(step, messages=()):\n    return 0\n"


@pytest.mark.parametrize("is_of_task", [False, True])
async def test_a_run_with_a_state_hash_resumes_after_its_folder_was_moved(tmp_path: Path, is_of_task: bool) -> None:
    credit = {"estimator": "gigpo", "step_rewards": "environment", "state_hash": "hash.py:same_for_all"}
    changes = {"credit": None, "task": {**TRAIN["task"], "credit": credit}} if is_of_task else {"credit": credit}
    first = tmp_path / "first"
    first.mkdir()
    (first / "hash.py").write_text(HASH)
    await trained(lake_folder(first, updates=1, **changes), first / "run")
    assert metrics_of(first / "run")[-1]["credit/peer_share"] == 1.0

    moved = first.rename(tmp_path / "moved")
    path, header = moved / "train.yaml", RunHeader.read(moved / "run")
    longer = load_plan(path, {"updates": 2})  # another digest, so that the keys are compared
    assert changes_since(header, longer, moved / "run") == Changes([], ["updates was 1, is 2"])
    assert (await train(longer, moved / "run")).summary["updates"] == 2

    (moved / "hash.py").write_text(HASH.replace("0", "len(step.observation_data)"))
    refused = changes_since(header, load_plan(path), moved / "run").refused
    assert refused == (["evaluation's state hash", "state hash"] if is_of_task else ["state hash hash.py"])


@pytest.mark.campaign
def test_killed_and_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    """Four updates equal two updates, kill -9, resume, two updates."""
    lake_folder(tmp_path, updates=4, checkpoints={"every": 1}, rollout={"samples_per_update": 3, "group_size": 8})
    straight = command_line.call_new_process("train", "train.yaml", "--log-dir", "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    killed = subprocess.Popen(
        command_line.command("train", "train.yaml", "--log-dir", "killed"), cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("killed/*/checkpoints/step-000002/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    (run,) = tmp_path.glob("killed/*")
    assert RunHeader.read(run).status == "running" and not (run / "summary.json").exists()
    resumed = command_line.call_new_process("train", "--resume", "--log-dir", "killed", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (whole,) = tmp_path.glob("straight/*")
    assert same(weights_of(run), weights_of(whole))
    assert without_clock(run) == without_clock(whole)
    assert json.loads((run / "summary.json").read_text())["updates"] == 4


async def test_lockstep_language_model_resumes_bit_for_bit(tmp_path: Path) -> None:
    from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, load_model, save_model

    tokenizer = build_tokenizer(level="byte")
    model = build_decoder(tokenizer, layers=1, width=16, heads=2, context=512, seed=1)
    save_model(tmp_path / "model", model, tokenizer)
    policy = {"type": "hf", "model": "model", "action_format": "bare", "constrain": True, "lockstep": True}
    policy |= {"tools_in_prompt": False, "max_new_tokens": 16}
    path = lake_folder(tmp_path, updates=4, policy=policy, evaluation={"hold_out": 1, "every": 2, "temperature": 0.0})
    plan = load_plan(path)
    await train(plan, tmp_path / "straight")
    assert (await train(plan, tmp_path / "stopped", interrupted_after(2))).status == "interrupted"
    await train(plan, tmp_path / "stopped")
    trained_weights = weights_of(tmp_path / "straight")
    assert same(weights_of(tmp_path / "stopped"), trained_weights)
    assert without_clock(tmp_path / "stopped") == without_clock(tmp_path / "straight")
    assert not same(dict(model.state_dict().items()), trained_weights)
    assert max(line.get("learner/logprob_gap", 0.0) for line in metrics_of(tmp_path / "straight")) < 1e-4
    assert load_model(tmp_path / "straight" / "model").tokenizer is not None


async def test_resume_on_another_device_is_reported(tmp_path: Path) -> None:
    plan, run, lines = load_plan(lake_folder(tmp_path)), tmp_path / "run", list[str]()
    await train(plan, run, interrupted_after(1))
    for path in checkpoints(run / "checkpoints"):
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["facts"]["device"] == "cpu"
        manifest["facts"]["device"] = "NVIDIA H200"
        (path / "manifest.json").write_text(json.dumps(manifest))

    @asynccontextmanager
    async def keep_lines(control: Control, display: TrainingDisplay) -> AsyncIterator[None]:
        display.say = lines.append  # type: ignore[method-assign]
        yield

    assert (await train(plan, run, keep_lines)).status == "complete"
    (line,) = [line for line in lines if "bitwise identical" in line]
    assert "device was NVIDIA H200, is cpu" in line
