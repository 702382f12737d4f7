"""Training in two processes equals training in a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.rl.learner.sharding import Processes, process_group, shardable_layers
from reward_kit.rl.loss_terms import Diagnostics, mean_statistic
from tests.devices import DEVICE
from tests.rl.learner.sharded_learning import Outcome, model, outcome

pytestmark = pytest.mark.device

ROOT = Path(__file__).parents[2]
SCRIPT = "tests.rl.learner.sharded_learning"


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return outcome()


@pytest.fixture(scope="module")
def together(alone: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    if DEVICE.type == "standin":
        pytest.skip("processes cannot communicate on the stand-in device")
    # A process that uses a GPU cannot be forked. With one GPU, its only process shards the module over itself.
    command = [sys.executable] if DEVICE.type == "cpu" else torchrun(min(torch.accelerator.device_count(), 2))
    return by_processes([*command, "-m", SCRIPT], alone, tmp_path_factory.mktemp("two"))


def torchrun(processes: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


def by_processes(command: list[str], alone: Outcome, folder: Path) -> Outcome:
    """Return the outcome of several processes that resume from the state of one."""
    torch.save(alone.state, folder / "saved.pt")
    subprocess.run(
        [*command, str(folder)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120
    )
    return Outcome(**torch.load(folder / "outcome.pt", weights_only=True))


def assert_same(ours: Any, theirs: Any, where: str, tolerance: float = 1e-12) -> None:
    """Assert that two trees of tensors and numbers are equal."""
    if isinstance(ours, Mapping):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}", tolerance)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{place}]", tolerance)
    elif isinstance(ours, torch.Tensor) and ours.is_floating_point():
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), f"{where}: {(ours - theirs).abs().max()}"
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    else:
        is_exact = not isinstance(ours, float)
        assert ours == (theirs if is_exact else pytest.approx(theirs, rel=tolerance, abs=tolerance)), where


def test_gradient_of_two_processes_equals_a_single_process(alone: Outcome, together: Outcome) -> None:
    assert all(gradient.abs().max() > 1e-6 for gradient in alone.gradient.values())
    assert_same(together.gradient, alone.gradient, "gradient")


def test_metrics_of_two_processes_equal_a_single_process(alone: Outcome, together: Outcome) -> None:
    # What is read of float32 columns, such as recomputed values, is as exact as float32.
    assert_same(together.gradient_metrics, alone.gradient_metrics, "gradients", 1e-6)
    for metrics in (*together.metrics, *alone.metrics):
        metrics.pop("padding_share", None)  # the micro-batches differ
    assert_same(together.metrics, alone.metrics, "updates", 1e-6)


def test_parameters_and_moments_of_two_processes_equal_a_single_process(alone: Outcome, together: Outcome) -> None:
    assert alone.state["optimizer_steps"] == 12
    assert_same(together.state, alone.state, "state", 1e-7)


def test_two_processes_resume_from_the_state_of_a_single_process(alone: Outcome, together: Outcome) -> None:
    assert_same(together.resumed, alone.resumed, "resumed", 1e-7)
    assert torch.allclose(together.logprobs, alone.logprobs, atol=1e-6)


def test_single_row_batch_works_with_two_processes(alone: Outcome, together: Outcome) -> None:
    assert_same(together.lonely, alone.lonely, "lonely", 1e-9)


@pytest.mark.campaign
@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs as many accelerators as processes")
@pytest.mark.parametrize("count", [1, 3])
def test_torchrun_works_with_any_number_of_processes(alone: Outcome, tmp_path: Path, count: int) -> None:
    found = by_processes([*torchrun(count), "-m", SCRIPT], alone, tmp_path)
    assert_same(found.gradient, alone.gradient, "gradient")
    assert_same(found.state, alone.state, "state", 1e-7)


@pytest.mark.parametrize(("sizes", "processes"), [([5], 2), ([3, 1, 2], 2), ([1], 3), ([4, 4], 2), ([2, 9], 4)])
def test_rows_are_distributed_once_in_equal_numbers_of_parts(sizes: list[int], processes: int) -> None:
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    shared = [Processes(rank, processes, True).share(parts) for rank in range(processes)]
    assert len({len(mine) for mine in shared}) == 1
    assert sorted(np.concatenate([part for mine in shared for part in mine])) == list(range(sum(sizes)))
    working = sum(any(len(part) for part in mine) for mine in shared)
    assert working == min(processes, sum(sizes))


def test_single_process_needs_no_communication() -> None:
    module, parts = model(), [np.arange(3), np.arange(3, 4)]
    diagnostics = [Diagnostics({"kl": mean_statistic(torch.ones(2))})]
    with process_group() as processes:
        before = type(module)
        processes.shard(module)
        assert type(module) is before
        assert processes == Processes(rank=0, size=1, is_group=False)
        assert [part.tolist() for part in processes.share(parts)] == [[0, 1, 2], [3]]
        assert processes.merged(diagnostics) is diagnostics
        assert processes.added(parts[0]) is parts[0]


def test_shardable_layers_are_the_decoder_layers() -> None:
    assert [type(layer).__name__ for layer in shardable_layers(model(layers=3))] == ["LlamaDecoderLayer"] * 3
