"""Test Axolotl's command line with rollouts and step advantages: the reward rises.

It runs in a Python of its own, in `.integrations/axolotl`, on the CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.peers import ROOT

pytestmark = pytest.mark.campaign

PYTHON = ROOT / ".integrations/axolotl/bin/python"
RUNS = Path(__file__).parent / "axolotl_runs"
EXAMPLE = ROOT / "examples/trl_locks"
_REWARD = re.compile(r"'reward': '([\d.e-]+)'")


def run(folder: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        pytest.skip("Axolotl is not installed in .integrations/axolotl")
    quiet = {
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "OMP_NUM_THREADS": "1",
    }
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    return subprocess.run(
        [PYTHON, *words],
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=1500,
        env={**os.environ, **quiet, "PYTHONPATH": paths},
    )


def test_axolotl_trains_on_reward_kit_rollouts_and_the_reward_rises(tmp_path: Path) -> None:
    for path in EXAMPLE.glob("*.*"):
        shutil.copy(path, tmp_path)
    written = run(tmp_path, "axolotl_rollouts.py")
    assert written.returncode == 0, written.stderr[-2000:]
    done = run(tmp_path, "-m", "axolotl.cli.train", "axolotl.yml")
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(found) for found in _REWARD.findall(done.stdout + done.stderr)]
    print(f"reward, a mean of five updates each: {rewards[0]:.2f} … {rewards[-1]:.2f}")
    assert "credit/advantage_abs_mean" in done.stdout + done.stderr
    assert len(rewards) >= 24
    # As in test_trl_rollouts.py: a run that does not learn one of the four locks still ends above 0.75.
    assert rewards[0] < 0.25 and rewards[-1] > 0.75


GOOD: dict[str, Any] = {"rl": "grpo", "trl": {"rollout_func": "axolotl_rollouts.rollouts"}}


def with_trl(**keys: Any) -> dict[str, Any]:
    return {**GOOD, "trl": {**GOOD["trl"], **keys}}


def test_ineffective_configuration_key_is_rejected(tmp_path: Path) -> None:
    wrong = {
        "rl: 'dpo' uses a different trainer": {**GOOD, "rl": "dpo"},
        "trl.rollout_func is missing": {"rl": "grpo", "trl": {"num_generations": 2}},
        "trl.reward_funcs has no effect": with_trl(reward_funcs=["rewards.accuracy"]),
        "trl.async_prefetch applies only to Axolotl's asynchronous trainer": with_trl(async_prefetch=True),
        "trl.reward_num_workers applies only to Axolotl's asynchronous": with_trl(reward_num_workers=2),
        "trl.use_liger_loss supports only one advantage per row": with_trl(use_liger_loss=True),
        "context_parallel_size splits rows": {**GOOD, "context_parallel_size": 2},
        "set different trainers": {**GOOD, "trainer_cls": "mine.Trainer"},
    }
    reward = with_trl(reward_funcs=["reward_kit.integrations.trl.rewards.rollout_scores"])
    configs = [GOOD, reward, *wrong.values()]
    done = run(tmp_path, str(RUNS / "refusals.py"), text=json.dumps(configs))
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout.splitlines()[-1])
    assert output[:2] == [None, None]
    assert [expected in found for expected, found in zip(wrong, output[2:], strict=True)] == [True] * len(wrong), output
