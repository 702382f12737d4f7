"""Checkpoints are whole or not there, and what comes back is bit for bit what went in."""

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
from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import ConfigError, StoreError
from reward_kit.rl.checkpoint import (
    best,
    check_whole,
    checkpoints,
    latest,
    load_batch_for_study,
    load_checkpoint,
    prune,
    random_states,
    restore_random_states,
    save_batch_for_study,
    save_checkpoint,
)
from reward_kit.rl.model_kit import build_decoder, build_tokenizer, load_model
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.ppo_config import PPOConfig
from reward_kit.rl.state_tree import read_tree, write_tree
from reward_kit.tokens import TokenBatch
from tests.rl.learner_cases import a_model, some_rows


def same(first: Any, second: Any) -> bool:
    """Equal in kind, type and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and first.numpy(force=True).tobytes() == (second.numpy(force=True).tobytes())
            if first.dtype != torch.bfloat16
            else same(first.view(torch.int16), second.view(torch.int16))
        )
    if isinstance(first, np.ndarray | np.generic):
        if first.dtype == object:
            return same(list(first), list(second))
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)


def every_kind() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    return {
        "float32": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "int64": torch.arange(3) - 2**40,
        "uint8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "a_view": base[1:3],
        "another_view": base[2:, ::2],
        "transposed": base.T,
        "the_same_memory": base.view(-1),
        "with_gradient": nn.Parameter(base).detach(),
        "nan": torch.tensor([math.nan, math.inf, -0.0, 1e-42]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "of_no_dimension": np.array(1.5),
        "masked": np.array([True, False]),
        "numpy_number": np.float64(0.1),
        "objects": np.array([None, "x", {"a": 1}], dtype=object),
        "lists_of_one_length": np.fromiter([[1, 2], [3, 4]], dtype=object, count=2),
        "allowed": AllowedIds([1, 4], [0, 2, 3], [5, 6, 7]),
        "floats": [math.nan, math.inf, -math.inf, -0.0, 0.1],
        "keyed": {0: "zero", "$odd": 1, "none": None, (1, 2): "tuple"},
        "tuple": (1, (2, [3, True])),
        "large": 2**127,
        "text": "ä\ud800",
    }


def test_a_tree_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tree = every_kind()
    write_tree(tmp_path, "state", tree)
    assert same(read_tree(tmp_path, "state"), tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "state.safetensors"]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weights = torch.randn(1_000)
    write_tree(tmp_path, "state", {"embedding": weights, "head": weights})
    assert (tmp_path / "state.safetensors").stat().st_size < 1.5 * weights.numel() * 4


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\.policy\[1\] is a function"):
        write_tree(tmp_path, "state", {"policy": [1, same]})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path, "state", {"a": torch.ones(3)})
    file = tmp_path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(StoreError, match=r"state\.json and its safetensors"):
        read_tree(tmp_path, "state")


class Run:
    """A small training run with everything that has a state."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 1)).bfloat16()
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


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
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


def test_the_learner_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    config = PPOConfig(lr=1e-3, minibatch_rows=2, epochs=2, schedule="cosine", warmup=1)
    learner = PPOLearner(a_model(dtype=torch.bfloat16), config, seed=5, total_steps=4)
    learner.update(some_rows(seed=1), version=0)
    path = save_checkpoint(tmp_path, 1, learner.state_dict())
    found = [learner.update(some_rows(seed=seed), version=seed - 1) for seed in (2, 3)]
    resumed = PPOLearner(a_model(seed=9, dtype=torch.bfloat16), config, seed=6, total_steps=4)
    resumed.load_state_dict(load_checkpoint(path).state)
    assert [resumed.update(some_rows(seed=seed), version=seed - 1) for seed in (2, 3)] == found
    assert same(dict(resumed.module.state_dict()), dict(learner.module.state_dict()))


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 0, Run().state())
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors"


def test_a_model_in_a_checkpoint_is_one_of_transformers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["go to fridge 1"])
    model = build_decoder(tokenizer, layers=1, width=8, heads=2, context=16)
    path = save_checkpoint(tmp_path, 7, {}, model=model, tokenizer=tokenizer)
    loaded = load_model(path / "model")
    assert same(dict(loaded.model.state_dict()), dict(model.state_dict()))
    assert loaded.tokenizer is not None
    assert "model/model.safetensors" in check_whole(path)["files"]


WRITER = """
import sys, torch
from pathlib import Path
from reward_kit.rl.checkpoint import save_checkpoint
for step in range(10_000):
    save_checkpoint(Path(sys.argv[1]), step, {"weights": torch.full((3_000_000,), float(step))})
"""


def test_a_kill_while_writing_leaves_the_former_checkpoint_whole(tmp_path: Path) -> None:
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
    assert latest(tmp_path) == (newest, [])
    found = load_checkpoint(newest)
    assert torch.equal(found.state["weights"], torch.full((3_000_000,), float(found.step)))
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
def test_a_torn_checkpoint_is_named_and_never_taken(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = save_checkpoint(tmp_path, 1, {"weights": torch.ones(3)})
    torn = save_checkpoint(tmp_path, 2, {"weights": torch.ones(3)}, score=1.0)
    damaged(torn, how)
    found = latest(tmp_path)
    assert found.path == whole
    assert [one.path for one in found.torn] == [torn]
    assert str(torn) in caplog.text
    assert best(tmp_path) is None
    with pytest.raises(StoreError, match="step-000002"):
        load_checkpoint(torn)


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, score in enumerate([0.1, 0.9, 0.2, 0.9, 0.3, None, None]):
        save_checkpoint(tmp_path, step, {}, score=score)
    assert best(tmp_path) == tmp_path / "step-000003"
    removed = prune(tmp_path, keep=2)
    assert [path.name for path in removed] == [f"step-00000{step}" for step in (0, 1, 2, 4)]
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-00000{step}" for step in (3, 5, 6)]
    assert prune(tmp_path, keep=2) == []


def test_pruning_never_removes_the_last_whole_one(tmp_path: Path) -> None:
    for step in range(3):
        save_checkpoint(tmp_path, step, {})
    damaged(tmp_path / "step-000002", "no manifest")
    assert prune(tmp_path, keep=1) == [tmp_path / "step-000000"]
    assert latest(tmp_path).path == tmp_path / "step-000001"
    with pytest.raises(ConfigError, match="keep is at least 1"):
        prune(tmp_path, keep=0)


def test_a_step_that_is_there_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, {"weights": torch.zeros(2), "extra": 1})
    path = save_checkpoint(tmp_path, 5, {"weights": torch.ones(2)})
    assert same(load_checkpoint(path).state, {"weights": torch.ones(2)})
    assert [each.name for each in tmp_path.iterdir()] == ["step-000005"]


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
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
    assert latest(tmp_path).path == tmp_path / "step-1000000"


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") == (None, [])
    with pytest.raises(ConfigError, match="step counts from 0"):
        save_checkpoint(tmp_path, -1, {})


def test_a_batch_is_kept_for_study_as_it_was(tmp_path: Path) -> None:
    rows = TokenBatch(
        {
            "input_ids": np.arange(6, dtype=np.int32).reshape(2, 3),
            "logprobs": np.array([[0.0, -math.inf, math.nan]] * 2),
        },
        {
            "uid": np.array(["a", None], dtype=object),
            "extra_info": np.array([{"sample_id": "s", "score": math.nan}, {}], dtype=object),
            "allowed_ids": np.array([None, AllowedIds([2], [0, 2], [3, 5])], dtype=object),
            "multi_modal_inputs": np.array([object(), {}], dtype=object),
        },
        {"pad_token_id": 0, "padding": "right"},
    )
    first = save_batch_for_study(tmp_path, rows, {"loss": math.nan, "step": 7})
    second = save_batch_for_study(tmp_path, rows, {})
    assert [first.name, second.name] == ["study-000", "study-001"]
    found = load_batch_for_study(first)
    assert same(found.facts, {"loss": math.nan, "step": 7})
    assert same(found.rows.batch, rows.batch)
    assert found.rows.meta_info == rows.meta_info
    others = found.rows.non_tensor_batch
    assert others["multi_modal_inputs"][0].startswith("<object object")
    for key in ("uid", "extra_info", "allowed_ids"):
        assert same(others[key], rows.non_tensor_batch[key])
