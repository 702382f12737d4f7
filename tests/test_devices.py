"""Test that the tests run on the device that REWARD_KIT_TEST_DEVICE names, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.devices import DEVICE, WIDEST, randomize

pytestmark = pytest.mark.device
ROOT = Path(__file__).parents[1]


def run_tests(device: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tests on another device in a process of their own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**os.environ, "REWARD_KIT_TEST_DEVICE": device, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_tensors_of_tests_are_on_the_device() -> None:
    weight = torch.zeros(3)
    randomize(weight)
    assert weight.device.type == torch.arange(3).device.type == torch.randn(3).device.type == DEVICE.type
    assert torch.zeros(3, device="cpu").device.type == "cpu"


def test_unavailable_device_is_one_error() -> None:
    done = run_tests("abacus", "tests/test_devices.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.startswith("ERROR: REWARD_KIT_TEST_DEVICE: device: 'abacus' cannot be used; on this machine")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(DEVICE.type != "standin", reason="another device has tests of its own")
def test_two_devices_are_an_error() -> None:
    torch.nn.Linear(3, 2).to(DEVICE)(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, 3) @ torch.ones(3, 2, device="cpu")
    with pytest.raises(RuntimeError, match="for generator but found 'cpu'"):
        torch.ones(3).normal_(generator=torch.Generator())


@pytest.mark.skipif(torch.float64 == WIDEST, reason="the device has float64")
def test_float64_is_an_error_on_a_device_without_it() -> None:
    for convert, device in (
        (torch.ones(3).to, DEVICE),
        (torch.ones(3, device="cpu").to, DEVICE),
        (torch.ones(3).to, "cpu"),
    ):
        with pytest.raises(TypeError, match="float64"):
            convert(device=device, dtype=torch.float64)
    assert torch.zeros(3, dtype=torch.float64).dtype == torch.float32  # tests use float32 instead


@pytest.mark.skipif(DEVICE.type != "cpu", reason="runs on the stand-in device in another process")
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
@pytest.mark.parametrize("device", ["standin", "standin32"])
def test_standin_device_rejects_other_tensors(device: str) -> None:
    tests = {
        "standin": "two_devices_are_an_error or tensors_of_tests or micro_batches_do_not_wait",
        # Sampling, generation, and a loss that adds up in float64.
        "standin32": "float64_is_an_error or extreme_uniforms or likely_allowed or computes_only_new or gspo-seq-mean",
    }
    files = ["tests/test_devices.py", "tests/agent/policies/hf/", "tests/rl/test_losses.py", "tests/rl/learner/"]
    done = run_tests(device, "-q", "-m", "device", *files, "-k", tests[device])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "s" not in done.stdout.partition(" ")[0], "a test was skipped"
