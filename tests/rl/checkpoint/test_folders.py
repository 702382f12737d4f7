"""Test that checkpoint folders are written atomically and restored bit for bit."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reward_kit.environments.base import ForkableResource
from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.checkpoint import (
    best,
    checkpoints,
    load_checkpoint,
    load_latest,
    prune,
    random_states,
    restore_random_states,
    save_checkpoint,
)
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from tests.devices import DEVICE
from tests.full_disk import largest_file
from tests.rl.checkpoint.state_values import same
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device


class Run:
    """A small training run with every stateful part."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 1)).bfloat16().to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.generator = torch.Generator().manual_seed(2)
        self.numbers = np.random.default_rng(3)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            inputs = torch.randn(4, 5, generator=self.generator).bfloat16() + random.random() + float(np.random.rand())
            loss = (self.module(inputs) + float(self.numbers.random())).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
            "numbers": self.numbers.bit_generator.state,
            "random": random_states(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"])
        self.numbers.bit_generator.state = state["numbers"]
        restore_random_states(state["random"])


def test_training_resumed_from_a_checkpoint_equals_uninterrupted_training(tmp_path: Path) -> None:
    run = Run()
    run.train(3)
    path = save_checkpoint(tmp_path, 3, run.state(), score=0.25, facts={"episodes": 12})
    losses, after = run.train(4), run.module.state_dict()
    found = load_checkpoint(path)
    assert (found.step, found.score, found.facts) == (3, 0.25, {"episodes": 12})
    resumed = Run()
    resumed.restore(found.state)
    assert resumed.train(4) == losses
    assert same(dict(resumed.module.state_dict()), dict(after))


def test_learner_resumes_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    config = PPOConfig(lr=1e-3, minibatch_rows=2, epochs=2, schedule="cosine", warmup=1)
    learner = PPOLearner(a_model(dtype=torch.bfloat16), config, seed=5, total_steps=4)
    learner.update(some_rows(seed=1), version=0)
    path = save_checkpoint(tmp_path, 1, learner.state_dict())
    found = [learner.update(some_rows(seed=seed), version=seed - 1) for seed in (2, 3)]
    resumed = PPOLearner(a_model(seed=9, dtype=torch.bfloat16), config, seed=6, total_steps=4)
    resumed.load_state_dict(load_checkpoint(path).state)
    assert [resumed.update(some_rows(seed=seed), version=seed - 1) for seed in (2, 3)] == found
    assert same(dict(resumed.module.state_dict()), dict(learner.module.state_dict()))


def test_checkpoint_contains_no_pickles(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 0, Run().state())
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors"


WRITER = """
import sys, torch
from pathlib import Path
from reward_kit.rl.checkpoint import save_checkpoint
for step in range(10_000):
    save_checkpoint(Path(sys.argv[1]), step, {"weights": torch.full((3_000_000,), float(step))})
"""


def test_kill_while_writing_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        while not checkpoints(tmp_path) and writer.poll() is None:
            time.sleep(0.01)
        was_writing = False
        while not was_writing and writer.poll() is None:
            was_writing = any((part / "state.safetensors").exists() for part in tmp_path.glob(".*.part"))
    finally:
        writer.kill()
        assert writer.wait() == -9
    newest = checkpoints(tmp_path)[-1]
    found = load_latest(tmp_path)
    assert found is not None and found.path == newest
    assert torch.equal(found.state["weights"], torch.full((3_000_000,), float(found.step), device="cpu"))
    save_checkpoint(tmp_path, found.step + 1, {})
    assert not list(tmp_path.glob(".*"))


def damaged(path: Path, how: str) -> None:
    state = path / "state.safetensors"
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "half a manifest":
        (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:40])
    elif how == "a file too short":
        state.write_bytes(state.read_bytes()[:-1])
    elif how == "a file changed":
        state.write_bytes(state.read_bytes()[:-1] + b"\x55")
    else:
        state.unlink()


@pytest.mark.parametrize(
    "how", ["no manifest", "half a manifest", "a file too short", "a file changed", "a file missing"]
)
def test_incomplete_checkpoint_is_named_and_never_loaded(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = save_checkpoint(tmp_path, 1, {"weights": torch.ones(3)})
    torn = save_checkpoint(tmp_path, 2, {"weights": torch.ones(3)}, score=1.0)
    damaged(torn, how)
    assert (loaded := load_latest(tmp_path)) is not None and loaded.path == whole
    assert str(torn) in caplog.text
    assert best(tmp_path) is None
    with pytest.raises(StoreError, match="step-000002"):
        load_checkpoint(torn)


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.1, 0.9, 0.2, 0.9, 0.3, None, None]):
        written = save_checkpoint(tmp_path, step, {}, score=score)
    assert best(tmp_path) == tmp_path / "step-000001", "of equals the first that reached it"
    removed = prune(written, keep=2)
    assert [path.name for path in removed] == [f"step-00000{step}" for step in (0, 2, 3, 4)]
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-00000{step}" for step in (1, 5, 6)]
    assert prune(written, keep=2) == []


def test_pruning_keeps_the_written_checkpoint_beside_newer_damaged_ones(tmp_path: Path) -> None:
    for step in range(3):
        save_checkpoint(tmp_path, step, {})
    damaged(tmp_path / "step-000002", "no manifest")
    written = save_checkpoint(tmp_path, 1, {})
    assert prune(written, keep=1) == [tmp_path / "step-000000"]
    assert (loaded := load_latest(tmp_path)) is not None and loaded.path == written
    with pytest.raises(ConfigError, match="keep must be at least 1"):
        prune(written, keep=0)


def test_existing_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, {"weights": torch.zeros(2), "extra": 1})
    path = save_checkpoint(tmp_path, 5, {"weights": torch.ones(2)})
    assert same(load_checkpoint(path).state, {"weights": torch.ones(2)})
    assert [each.name for each in tmp_path.iterdir()] == ["step-000005"]


def test_failed_save_keeps_the_existing_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 5, {"a": 1})
    with pytest.raises(ConfigError, match=r"state\.a is an ABCMeta"):
        save_checkpoint(tmp_path, 5, {"a": ForkableResource})
    with pytest.raises(ConfigError, match="finite"):
        save_checkpoint(tmp_path, 5, {"a": 2}, facts={"loss": math.nan})
    assert load_checkpoint(path).state == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["step-000005"]


def test_steps_beyond_six_digits_are_in_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save_checkpoint(tmp_path, step, {})
    assert (loaded := load_latest(tmp_path)) is not None and loaded.step == 1_000_000


def test_latest_without_checkpoints_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nowhere") is None
    with pytest.raises(ConfigError, match="step must be at least 0"):
        save_checkpoint(tmp_path, -1, {})


def test_full_disk_keeps_the_existing_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"a": torch.ones(3)})
    with largest_file(100_000), pytest.raises(StoreError, match="cannot write"):
        save_checkpoint(tmp_path, 2, {"a": torch.ones(100_000)})
    assert [each.name for each in tmp_path.iterdir()] == ["step-000001"]
    assert (loaded := load_latest(tmp_path)) is not None and loaded.path == path


def test_symlinked_checkpoint_folder_is_followed(tmp_path: Path) -> None:
    folder, far = tmp_path / "run", tmp_path / "far"
    whole = save_checkpoint(far, 1, {"a": 1})
    folder.mkdir()
    (folder / "step-000001").symlink_to(whole)
    save_checkpoint(folder, 1, {"a": 2})
    assert (folder / "step-000001").is_symlink()
    assert load_checkpoint(whole).state == {"a": 2}
    written = save_checkpoint(folder, 2, {})
    assert prune(written, keep=1) == [folder / "step-000001"]
    assert [each.name for each in folder.iterdir()] == ["step-000002"]
    assert load_checkpoint(whole).state == {"a": 2}


@pytest.mark.parametrize(
    "manifest", [[], {}, {"schema_version": 1, "files": []}, {"schema_version": 1, "files": {"state.json": 3}}]
)
def test_malformed_manifest_counts_as_incomplete(tmp_path: Path, manifest: object) -> None:
    path = save_checkpoint(tmp_path, 1, {}, score=1.0)
    newer = save_checkpoint(tmp_path, 2, {}, score=2.0)
    (newer / "manifest.json").write_text(json.dumps(manifest))
    assert (loaded := load_latest(tmp_path)) is not None and loaded.path == best(tmp_path) == path
    with pytest.raises(StoreError, match="manifest"):
        load_checkpoint(newer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_random_states_are_restored_with_fewer_gpus() -> None:
    states = random_states()
    expected = torch.rand(3, device="cuda")
    restore_random_states({**states, "cuda": [*states["cuda"], *states["cuda"]]})
    assert torch.equal(torch.rand(3, device="cuda"), expected)
