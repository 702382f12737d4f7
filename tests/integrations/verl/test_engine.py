"""Test an exported batch in verl's FSDP engine: equal forward pass, loss and update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

ON_CPU = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.cpu_platform"}


def test_exported_batch_has_equal_loss_and_gradient_in_the_verl_engine() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("engine_on_cpu.py")],
        env={**os.environ, **ON_CPU, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["rows"] > 8 and output["logprobs"] < 1e-5
    for verls, ours in (output["loss"], output["norm"]):
        assert verls == pytest.approx(ours, rel=1e-5) != 0.0
    # After one step of its optimizer the policy does more of what was good.
    assert output["moved_towards_advantages"] > 0.1
