"""Test a training run in several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch

from reward_kit.rl.model_kit.models import load_model
from reward_kit.rl.training.plan import load_plan
from reward_kit.runs.run_folder import RunHeader
from tests.rl.training.frozen_lake import lake_folder, metrics_of, train, weights_of
from tests.rl.training.frozen_lake_text import CLOCK, language_lake
from tests.rl.training.process_group import ProcessGroup


@pytest.fixture(scope="module")
def several() -> Iterator[ProcessGroup]:
    made = ProcessGroup()
    yield made
    made.close()


def run_of(folder: Path) -> Path:
    (run,) = folder.glob("runs/*")
    return run


def wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)) and time.monotonic() < deadline:
        time.sleep(0.005)


async def test_killed_and_resumed_two_process_run_equals_a_single_process_run(
    tmp_path: Path, several: ProcessGroup
) -> None:
    path = language_lake(tmp_path, updates=3, evaluation=None)
    await train(load_plan(path), tmp_path / "alone")
    first, _ = several.start("train", "train.yaml", cwd=tmp_path)
    wait_for(tmp_path, "runs/*/checkpoints/step-000001/manifest.json")
    os.kill(first, signal.SIGKILL)
    assert several.end().codes == [-9, 0], "no process is left waiting"
    run = run_of(tmp_path)
    assert RunHeader.read(run).status == "running"
    resumed = several.call("train", "--resume", str(run), cwd=tmp_path)
    assert resumed.codes == [0, 0], resumed.stderr
    assert_close(weights_of(run), weights_of(tmp_path / "alone"))
    assert_close(*(load_model(each / "model").model.state_dict() for each in (run, tmp_path / "alone")))
    for ours, theirs in zip(metrics_of(run), metrics_of(tmp_path / "alone"), strict=True):
        assert ours.keys() == theirs.keys()
        # Processes divide a batch into other micro-batches, which have other padding.
        for name in (name for name in ours if not name.startswith((*CLOCK, "learner/padding_share"))):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.campaign
@pytest.mark.parametrize("count", [1, 3])
def test_torchrun_works_with_any_number_of_processes(tmp_path: Path, count: int) -> None:
    path = language_lake(tmp_path, updates=2)
    anyio.run(train, load_plan(path), tmp_path / "alone")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command = [*torchrun, "-m", "reward_kit.cli.main", "train", "train.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert_close(weights_of(run_of(tmp_path)), weights_of(tmp_path / "alone"))


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weights in ours.items():
        assert torch.allclose(weights, theirs[name], atol=1e-5), f"{name}: {(weights - theirs[name]).abs().max()}"


def breaking_lake(folder: Path, what: str) -> None:
    """Write a train file whose module runs `what` in its fifth forward pass with gradients."""
    lake_folder(folder, updates=4, evaluation=None)
    policy, head = folder / "policy.py", "    def forward(self, ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:\n"
    body = f"""
        import os
        self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
        if self.calls == 5 and {what}
"""
    policy.write_text(policy.read_text().replace(head, head + body))


def test_failing_process_ends_all_processes_with_its_reason(tmp_path: Path, several: ProcessGroup) -> None:
    breaking_lake(tmp_path, "os.environ.get('RANK') == '1': raise MemoryError('no room')")
    ended = several.call("train", "train.yaml", "--display", "none", cwd=tmp_path)
    assert ended.codes == [3, 0], ended
    lines = [line for line in ended.stderr.splitlines() if "error" in line.lower()]
    assert lines == ["error: process 2 of 2: MemoryError: no room"]
    assert RunHeader.read(run_of(tmp_path)).status == "failed"


def test_non_finite_loss_is_reported_by_the_first_process(tmp_path: Path, several: ProcessGroup) -> None:
    breaking_lake(tmp_path, "True: return self.head.weight.sum() * torch.full((*ids_BT.shape, VOCABULARY), torch.nan)")
    ended = several.call("train", "train.yaml", "--display", "none", cwd=tmp_path)
    assert ended.codes == [3, 0], ended.stderr
    assert ended.stderr.count("error:") == 1 and "error: the loss is nan" in ended.stderr
    assert list(run_of(tmp_path).glob("studies/*")), "the batch is kept"


@pytest.mark.campaign
def test_killed_process_ends_all_processes(tmp_path: Path, several: ProcessGroup) -> None:
    lake_folder(tmp_path, updates=500, evaluation=None)
    _, second = several.start("train", "train.yaml", "--display", "none", cwd=tmp_path)
    wait_for(tmp_path, "runs/*/checkpoints/step-000010/manifest.json")
    os.kill(second, signal.SIGKILL)
    ended = several.end()
    assert ended.codes == [3, -9]
    assert (
        "error: another process ended without reporting a reason; it may have been killed" in ended.stderr.splitlines()
    )
    assert "Traceback" not in ended.stderr


def test_error_in_the_train_file_is_reported_once(tmp_path: Path, several: ProcessGroup) -> None:
    lake_folder(tmp_path)
    ended = several.call("train", "train.yaml", "-T", "ppo.rate=1", cwd=tmp_path)
    assert ended.codes == [2, 0]
    assert ended.stderr.count("ppo.rate: unknown key") == 1
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_stops_all_processes_after_the_current_update(tmp_path: Path, several: ProcessGroup) -> None:
    lake_folder(tmp_path, updates=500, evaluation=None)
    pids = several.start("train", "train.yaml", cwd=tmp_path)
    wait_for(tmp_path, "runs/*/checkpoints/step-000010/manifest.json")
    for pid in reversed(pids):
        os.kill(pid, signal.SIGINT)
    ended = several.end()
    assert ended.codes == [130, 0], ended.stderr
    assert "Resume with:  torchrun --nproc-per-node 2 -m reward_kit.cli.main train --resume" in ended.stderr
    done = [line["update"] for line in metrics_of(run_of(tmp_path))]
    assert json.loads((run_of(tmp_path) / "summary.json").read_text())["updates"] == done[-1]


def test_dry_run_output_is_printed_once(tmp_path: Path, several: ProcessGroup) -> None:
    lake_folder(tmp_path)
    ended = several.call("train", "train.yaml", "--dry-run", cwd=tmp_path)
    assert ended.codes == [0, 0]
    assert ended.stdout.count("Checkpoints") == 1 and ended.stderr.count("Nothing was written.") == 1
