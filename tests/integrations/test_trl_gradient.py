"""Test that loss, gradient and updated weights equal those of TRL's `GRPOTrainer` on the same episodes.

Each side runs its own training step on a tiny Llama: TRL in a Python of its own, on the rows as its `env_mask` makes
them; we on rows of episodes, in 1, 3 and 7 micro-batches. `make integrations` installs TRL, and `pytest -s` shows the
greatest difference of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.sharding import Processes
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.ppo import DeviceContext, PPOLearner
from reward_kit.tokens import TokenBatch
from tests.integrations.peers import PYTHON, Deviations, Peer
from tests.rl.learner.sharded_learning import VOCABULARY, model, rows

pytestmark = pytest.mark.campaign

COUNT, LONGEST = 16, 40
LR = 1e-3
TRL_OPTIONS = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "max_completion_length": LONGEST,
    "learning_rate": LR,
    "max_grad_norm": 1e9,
    "weight_decay": 0.0,
}
OUR_OPTIONS: dict[str, Any] = {"clip_high": 0.28, "lr": LR, "max_grad_norm": None, "max_tokens_per_micro_batch": None}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "token-mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "seq-mean-token-sum-norm", "norm_length": LONGEST}),
    "luspo": ({"loss_type": "luspo"}, {"aggregation": "seq-mean-token-sum"}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2}),
    "dapo, delta": ({"loss_type": "dapo", "delta": 1.5}, {"dual_clip": 1.5}),
    "dapo, entropy": ({"loss_type": "dapo", "entropy_coef": 0.05}, {"entropy_coefficient": 0.05}),
    "dapo, temperature": ({"loss_type": "dapo", "temperature": 0.7}, {"temperature": 0.7}),
}
"""What TRL calls a loss, and we."""

Credit = Literal["token", "episode"]


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed; run `make integrations`")
    with Peer("trl_gradient_side.py", tmp_path_factory.mktemp("trl_gradient_side")) as peer:
        yield peer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial weights of both sides, and those of the reference."""
    place = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 0), ("reference", 1)):
        model(seed).float().save_pretrained(place / name)
    return place


def ours(folder: Path, name: str = "policy") -> PreTrainedModel:
    made = model(0 if name == "policy" else 1).float()
    assert (folder / name).exists()
    return made


def episodes(credit: Credit) -> TokenBatch:
    """Return multi-turn rows in TRL's layout, with one advantage per action or per row."""
    made = rows(COUNT, padding="outer")
    if credit == "episode":
        made.batch["advantages"][:] = made.batch["advantages"].max(axis=1, keepdims=True)
        made.batch["advantages"][:] *= made.batch["action_mask"]
    return made


def trl_inputs(batch: TokenBatch, chosen: np.ndarray, credit: Credit) -> dict[str, Tensor]:
    """Return the rows as `GRPOTrainer._prepare_inputs` does; `env_mask` is its `tool_mask`, padded with 1."""
    tensors = {key: torch.from_numpy(values[chosen]) for key, values in batch.batch.items()}
    prompt = tensors["prompt_ids"].shape[1]
    is_padding = tensors["completion_mask"][:, prompt:] == 0
    advantages = tensors["advantages"][:, prompt:].float()
    return {
        "prompt_ids": tensors["prompt_ids"].long(),
        "prompt_mask": tensors["attention_mask"][:, :prompt].long(),
        "completion_ids": tensors["completion_ids"].long(),
        "completion_mask": tensors["completion_mask"][:, prompt:].long(),
        "tool_mask": (tensors["action_mask"][:, prompt:].bool() | is_padding).long(),
        "advantages": advantages if credit == "token" else _of_row(tensors["advantages"]),
        "old_per_token_logps": tensors["logprobs"][:, prompt:].float(),
        "num_items_in_batch": torch.tensor(int(batch.batch["loss_mask"].sum())),
    }


def _of_row(advantages: Tensor) -> Tensor:
    """Return (B,) the only nonzero number of each row."""
    return advantages.gather(1, advantages.abs().argmax(dim=1, keepdim=True)).squeeze(1).float()


def theirs(
    trl: Peer, folder: Path, parts: list[dict[str, Tensor]], options: dict[str, Any], reference: bool = False
) -> dict[str, Any]:
    return trl.ask(
        "step",
        folder=str(folder / "policy"),
        parts=parts,
        options={**TRL_OPTIONS, **options},
        reference=str(folder / "reference") if reference else None,
        vocabulary=VOCABULARY,
    )


def learner(folder: Path, reference: bool = False, **options: Any) -> PPOLearner:
    config = PPOConfig(**{**OUR_OPTIONS, **options})
    return PPOLearner(ours(folder), config, reference=ours(folder, "reference") if reference else None)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def held(deviations: Deviations, name: str, one: PPOLearner, batch: TokenBatch, found: dict[str, Any]) -> None:
    """Compare loss, norm and gradient, and then the weights after a step on the same rows."""
    step_metrics = one.gradients(batch)
    deviations.hold(f"TRL step, {name}: loss", torch.tensor(step_metrics["loss"]), torch.tensor(found["loss"]), 1e-5)
    deviations.hold(
        f"TRL step, {name}: norm", torch.tensor(step_metrics["grad_norm"]), torch.tensor(found["norm"]), 1e-5
    )
    gradient = gradients_of(one.module)
    assert gradient.keys() == found["gradient"].keys()
    assert found["norm"] > 0.01
    for weight, values in gradient.items():
        deviations.hold(f"TRL step, {name}: gradient", values, found["gradient"][weight], 1e-5)
    gradient = {weight: values.clone() for weight, values in gradient.items()}
    one.update(batch, version=0)
    for weight, values in one.module.named_parameters():
        # AdamW's first step is lr · g / (|g| + 1e-8): where g is next to nothing, rounding decides its sign.
        is_clear = gradient[weight].abs() > 1e-6
        deviations.hold(f"TRL step, {name}: weights", values[is_clear], found["weights"][weight][is_clear], 1e-5)
        assert is_clear.float().mean() > 0.5


@pytest.mark.parametrize("credit", ["token", "episode"])
@pytest.mark.parametrize("name", SAME)
def test_training_step_equals_trl(trl: Peer, folder: Path, deviations: Deviations, name: str, credit: Credit) -> None:
    batch, (trl_options, our_options) = episodes(credit), SAME[name]
    found = theirs(trl, folder, [trl_inputs(batch, np.arange(COUNT), credit)], trl_options)
    held(deviations, f"{name}, per {credit}", learner(folder, **our_options), batch, found)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_training_step_with_kl_equals_trl(trl: Peer, folder: Path, deviations: Deviations, name: str) -> None:
    batch, (trl_options, our_options) = episodes("token"), SAME[name]
    options = {**trl_options, "beta": 0.1, "use_bias_correction_kl": False}
    found = theirs(trl, folder, [trl_inputs(batch, np.arange(COUNT), "token")], options, reference=True)
    one = learner(folder, reference=True, kl_coefficient=0.1, kl_kind="k3", **our_options)
    held(deviations, f"{name} with KL", one, batch, found)


def test_trl_default_divergence_is_k3_plus_on_fresh_samples(trl: Peer, folder: Path, deviations: Deviations) -> None:
    batch = episodes("token")
    inputs = trl_inputs(batch, np.arange(COUNT), "token")
    del inputs["old_per_token_logps"]  # the trainer then takes its own log-probabilities before the step
    found = theirs(trl, folder, [inputs], {"loss_type": "dapo", "beta": 0.1}, reference=True)
    one = learner(folder, reference=True, kl_coefficient=0.1, old_logprobs="recomputed")
    held(deviations, "dapo with default KL, ratio 1", one, batch, found)


def test_sequence_level_importance_is_gspo(trl: Peer, folder: Path, deviations: Deviations) -> None:
    batch = episodes("episode")
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
    found = theirs(trl, folder, [trl_inputs(batch, np.arange(COUNT), "episode")], options)
    held(deviations, "gspo", learner(folder, loss="gspo", clip_low=0.02, clip_high=0.03), batch, found)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_micro_batched_step_equals_whole_trl_batch(trl: Peer, folder: Path, deviations: Deviations, count: int) -> None:
    batch = episodes("token")
    found = theirs(trl, folder, [trl_inputs(batch, np.arange(COUNT), "token")], {"loss_type": "grpo"})
    one = learner(folder, aggregation="seq-mean-token-mean", max_tokens_per_micro_batch=budget_for(batch, count))
    held(deviations, f"grpo in {count} micro-batches", one, batch, found)


def budget_for(batch: TokenBatch, count: int) -> int:
    """Return a token budget that splits the rows into this many micro-batches."""
    flat = TrainingRows.of(batch)
    everything = np.flatnonzero(flat.counts_B)
    fitting = (
        budget
        for budget in range(int(flat.lengths_B.max()), 10_000)
        if len(DeviceContext(torch.device("cpu"), torch.float32, budget, Processes()).split(flat, everything)) == count
    )
    return next(fitting)


def test_equal_micro_batches_equal_trl_if_it_counts_all_tokens(trl: Peer, folder: Path, deviations: Deviations) -> None:
    batch = episodes("token")
    parts = [trl_inputs(batch, part, "token") for part in np.split(np.arange(COUNT), 4)]
    found = theirs(trl, folder, parts, {"loss_type": "dapo"})
    held(deviations, "dapo, TRL in 4 micro-batches", learner(folder), batch, found)


def test_trl_bnpo_depends_on_micro_batches_and_reward_kit_does_not(trl: Peer, folder: Path) -> None:
    batch = episodes("token")
    parts = [trl_inputs(batch, part, "token") for part in np.split(np.arange(COUNT), 4)]
    split = theirs(trl, folder, parts, {"loss_type": "bnpo"})
    whole = theirs(trl, folder, [trl_inputs(batch, np.arange(COUNT), "token")], {"loss_type": "bnpo"})
    assert abs(split["loss"] - whole["loss"]) > 1e-3
    losses = [learner(folder, max_tokens_per_micro_batch=budget_for(batch, n)).gradients(batch)["loss"] for n in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] == pytest.approx(whole["loss"], abs=1e-5)
