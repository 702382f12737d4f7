"""Rehearse all stages of the GPU campaign on the CPU, and kill the runner in each of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_campaign.campaign import STAGES, read_results
from benchmarks.gpu_campaign.context import RUNNING
from benchmarks.gpu_campaign.household import EXAMPLE, FULL, TINY
from benchmarks.gpu_campaign.machine import _OUTCOME
from benchmarks.gpu_campaign.models import SHAPES, qwen2, random_rows
from benchmarks.gpu_campaign.speed import flops
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.training.plan import check_policy, load_plan

ROOT = Path(__file__).parents[2]
LIMIT_S = 2_700


def test_every_stage_passes_although_the_runner_is_killed_in_each(tmp_path: Path) -> None:
    end, killed = time.monotonic() + LIMIT_S, list[str]()
    while True:
        runner = start(tmp_path)
        while runner.poll() is None:
            assert time.monotonic() < end, f"after {LIMIT_S} s, killed in {killed} of {[*STAGES]}"
            stage = running_stage(tmp_path)
            if stage is not None and stage not in killed:
                killed.append(stage)
                break
            time.sleep(0.02)
        else:
            break  # the campaign ended
        runner.send_signal(signal.SIGKILL)
        text, _ = runner.communicate(timeout=60)
        assert_all_ended(tmp_path)
        assert killed[-1] not in [one["stage"] for one in read_results(tmp_path)], text
        (tmp_path / RUNNING).unlink()
    text, _ = runner.communicate(timeout=60)
    log = (tmp_path / "campaign.log").read_text(errors="replace")
    assert runner.returncode == 0, text + log
    assert killed == [*STAGES]
    assert [one["stage"] for one in read_results(tmp_path)] == [*STAGES]
    assert {one["verdict"] for one in read_results(tmp_path)} == {"pass"}
    report = (tmp_path / "report.md").read_text()
    assert all(f"| `{name}` | pass |" in report for name in STAGES)
    figures = {one["stage"]: one["figures"] for one in read_results(tmp_path)}
    assert figures["losses"]["losses"] == 84
    assert figures["engine"]["float32_lockstep_is_bitwise_equal"] is True
    assert figures["resume"]["deterministic_resume_difference"] == 0
    assert figures["household"]["updates"] == 2
    assert (
        0
        < figures["fsdp2"]["2_gloo_cpu_bfloat16_gradient_difference"]
        <= figures["fsdp2"]["2_gloo_cpu_bfloat16_tolerance"]
    )
    skipped = {part.partition(":")[0] for one in read_results(tmp_path) for part in one["skipped"]}
    assert skipped <= {"vllm", "trl", "flash_attention_2", "flash_attention_2_packed", "cuda_graphs"}


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "benchmarks/gpu_campaign/campaign.py", "--device", "cpu", "--size", "tiny"]
    return subprocess.Popen(
        [*command, "--out", str(out)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def running_stage(out: Path) -> str | None:
    """Return the stage that has recorded a figure but no verdict."""
    with suppress(FileNotFoundError):
        state = json.loads((out / RUNNING).read_text())
        return None if "verdict" in state else state["stage"]
    return None


def assert_all_ended(out: Path) -> None:
    """Assert that no process of the campaign is left."""
    end = time.monotonic() + 60
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in command_of(path)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def command_of(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.parametrize("overrides", [TINY, FULL])
def test_household_overrides_fit_the_example(overrides: dict[str, object]) -> None:
    plan = load_plan(EXAMPLE / "train.yaml", {**overrides, "policy.device": "cpu"})
    assert plan.config.updates == overrides["updates"]
    check_policy(plan)


def test_flops_agree_with_those_that_torch_counts() -> None:
    shape = SHAPES["tiny"]._replace(layers=3)
    model, flat = qwen2(shape, "cpu", attention="eager"), TrainingRows.of(random_rows(2, 64, shape.vocabulary))
    with FlopCounterMode(display=False) as counter:
        for row, length in enumerate(flat.lengths_B):
            ids = torch.zeros(1, int(length), dtype=torch.long)
            logits = model(input_ids=ids, logits_to_keep=int(flat.counts_B[row]), use_cache=False).logits
            logits.sum().backward()
    # Eager attention also computes what causality hides, which is half of its work.
    hidden = 6.0 * shape.layers * shape.width * float((flat.lengths_B.astype(float) ** 2).sum())
    assert counter.get_total_flops() == pytest.approx(flops(shape, model, flat) + hidden, rel=0.02)


def test_outcomes_of_pytest_are_read_with_and_without_workers() -> None:
    lines = {
        "tests/rl/test_ppo.py::test_a[ppo dual weighted-1] PASSED [  2%]": "PASSED",
        "[gw0] [ 25%] FAILED tests/rl/test_ppo.py::test_b ": "FAILED",
        "[gw12] [100%] SKIPPED tests/rl/test_ppo.py::test_c ": "SKIPPED",
        "tests/rl/test_ppo.py::test_a[ppo dual weighted-1] ": None,
        "tests/rl/test_ppo.py:12: AssertionError": None,
        "E   assert PASSED == FAILED": None,
    }
    for line, expected in lines.items():
        match = _OUTCOME.search(line)
        assert (match and (match["of_worker"] or match["alone"])) == expected, line
