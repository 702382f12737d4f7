"""Test PPO updates: direction, determinism, and weights that stay finite."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.checkpoint import load_batch_for_study, save_batch_for_study
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch, build_rows
from tests.rl.learner.cases import Bigram, a_model, bigram_rows, some_rows

pytestmark = pytest.mark.device


def updated(rows: TokenBatch, *, seed: int = 0, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Return the logits after token 0 of a `Bigram` after an update, and the diagnostics."""
    module = Bigram()
    found = PPOLearner(module, PPOConfig(**{"lr": 0.1, **options}), seed=seed).update(rows, version=0)
    return module.table[0].detach(), found


def test_probability_moves_in_the_direction_of_the_advantage() -> None:
    logits, found = updated(bigram_rows([1.0, -1.0, 0.0]))
    after = logits.log_softmax(-1)
    assert after[1] > after[3] > after[2]
    assert found["logprob_gap"] < 1e-6
    assert found["loss"] == pytest.approx(0.0)
    assert (found["tokens"], found["optimizer_steps"], found["lr"]) == (3.0, 1.0, 0.1)


def test_gradient_equals_the_surrogate_gradient() -> None:
    module = Bigram()
    found = PPOLearner(module, PPOConfig(max_grad_norm=0.1)).gradients(bigram_rows([1.0, -1.0]))
    # With ratio 1 the gradient is A (onehot - p), averaged over the two tokens; the p cancel.
    expected = -torch.tensor([0.0, 0.5, -0.5, 0.0, 0.0, 0.0])
    assert module.table.grad is not None
    torch.testing.assert_close(module.table.grad[0], expected)
    assert found["grad_norm"] == pytest.approx(0.5**0.5)


def test_gradient_is_clipped_to_the_maximum_norm() -> None:
    module = Bigram()
    learner = PPOLearner(module, PPOConfig(max_grad_norm=0.1))
    found = learner.update(bigram_rows([1000.0, -1000.0]), version=0)
    assert found["grad_norm"] == pytest.approx(1000 / 2**0.5)
    assert module.table.grad is not None
    assert module.table.grad.norm().item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(("options", "steps"), [({"minibatch_rows": 2}, 9), ({"minibatches": 2}, 6), ({}, 3)])
def test_epochs_and_minibatches(options: Mapping[str, Any], steps: int) -> None:
    _, found = updated(bigram_rows([1.0, -1.0, 0.5, 0.5, 1.0]), epochs=3, **options)
    assert found["optimizer_steps"] == steps
    assert found["ratio_min"] < 1.0 < found["ratio_max"]


def test_clipping_stops_the_second_epoch() -> None:
    twice, found = updated(bigram_rows([1.0, -1.0]), epochs=2, lr=1.0, betas=(0.0, 0.0))
    assert found["clip_fraction"] == 0.5  # none of the first step's tokens, all of the second's
    once, _ = updated(bigram_rows([1.0, -1.0]), lr=1.0, betas=(0.0, 0.0))
    assert torch.equal(twice, once)


def test_update_is_determined_by_the_seed() -> None:
    def trained(seed: int) -> Tensor:
        model = a_model()
        config = PPOConfig(epochs=2, minibatch_rows=2, lr=0.01, max_tokens_per_micro_batch=40)
        PPOLearner(model, config, seed=seed).update(some_rows(), version=0)
        return model.lm_head.weight.detach()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_fully_masked_rows_do_not_affect_the_update() -> None:
    rows = bigram_rows([1.0, 5.0])
    rows.batch["loss_mask"][1] = 0
    rows.batch["logprobs"][1] = np.nan
    logits, found = updated(rows)
    alone, _ = updated(bigram_rows([1.0]))
    assert torch.equal(logits, alone)
    assert found["tokens"] == 1


def test_episodes_without_tokens_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    episode = SingleAgentEpisode()
    episode.add_env_reset("o")
    episode.add_env_step("o", {"type": "terminate"}, 1.0)
    PPOLearner(Bigram(), PPOConfig()).update(build_rows([episode], pad_token_id=0), version=0)
    assert (
        "nothing was learned in this update: the episodes have no tokens; get_action must return log_probs"
        in caplog.text
    )


def test_module_with_wrong_output_shape_is_named() -> None:
    class Last(Bigram):
        def forward(self, ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
            return super().forward(ids_BT, attention_mask_BT)[:, -1]

    with pytest.raises(ConfigError, match=r"Last must return logits of shape \(1, \d+, V\), got \(1, \d+\)"):
        PPOLearner(Last(), PPOConfig()).update(bigram_rows([1.0]), version=0)
    with pytest.raises(ConfigError, match=r"must be a torch module, such as policy\.module, got a Holder"):
        PPOLearner(type("Holder", (), {})(), PPOConfig())


def test_fully_masked_batch_makes_no_step() -> None:
    rows = bigram_rows([1.0])
    rows.batch["loss_mask"][:] = 0
    logits, found = updated(rows)
    assert found == {"tokens": 0.0, "optimizer_steps": 0.0}
    assert not logits.any()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logprobs", np.nan, "has no log-probability"),
        ("advantages", np.inf, "the loss is"),
        ("advantages", np.nan, "the loss is nan"),
        ("advantages", 1e38, "the gradient norm is inf"),
    ],
)
def test_non_finite_values_stop_before_the_weights_change(key: str, value: float, message: str) -> None:
    rows = bigram_rows([1.0, 1.0])
    rows.batch[key][:, 1] = value
    kept: list[tuple[TokenBatch, Mapping[str, Any]]] = []
    learner = PPOLearner(Bigram(), PPOConfig(lr=0.1), on_failure=lambda *told: kept.append(told))
    before = copy.deepcopy(learner.state_dict())
    with pytest.raises(TrainingError, match=message):
        learner.update(rows, version=4)
    after = learner.state_dict()
    assert torch.equal(after["module"]["table"], before["module"]["table"])
    assert after["optimizer"] == before["optimizer"]
    if key == "advantages":
        assert kept[0][0] is rows
        assert kept[0][1]["version"] == 4
        # Numbers of 1e38 are finite; their squares are not.
        assert kept[0][1]["parameters"] == ([] if value == 1e38 else ["table"])


@pytest.mark.parametrize("limit", [1.0, None])
def test_only_parameters_with_non_finite_gradients_are_named(limit: float | None) -> None:
    module, kept = a_model(), list[Mapping[str, Any]]()
    learner = PPOLearner(module, PPOConfig(max_grad_norm=limit), on_failure=lambda _, facts: kept.append(facts))
    module.lm_head.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(TrainingError, match="the gradient norm is nan"):
        learner.update(some_rows(), version=0)
    assert kept[0]["parameters"] == ["lm_head.weight"]


def test_error_names_the_path_of_the_kept_batch(tmp_path: Path) -> None:
    rows = bigram_rows([np.nan])
    learner = PPOLearner(Bigram(), PPOConfig(), on_failure=partial(save_batch_for_study, tmp_path))
    with pytest.raises(TrainingError, match=f"the batch is saved in {tmp_path}"):
        learner.update(rows, version=0)
    (folder,) = tmp_path.iterdir()
    study = load_batch_for_study(folder)
    np.testing.assert_array_equal(study.rows.batch["advantages"], rows.batch["advantages"])


def test_error_while_keeping_the_batch_does_not_hide_the_cause(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("no folder")
    learner = PPOLearner(Bigram(), PPOConfig(), on_failure=partial(save_batch_for_study, tmp_path / "studies"))
    with pytest.raises(TrainingError, match=r"the loss is nan.*the batch could not be saved: cannot write"):
        learner.update(bigram_rows([np.nan]), version=0)


def test_failed_update_is_not_counted() -> None:
    learner = PPOLearner(a_model(), PPOConfig(lr=0.1, warmup=2, minibatches=3))
    bad = some_rows()
    bad.batch["logprobs"][0] = np.nan
    with pytest.raises(TrainingError):
        learner.update(bad, version=0)
    undisturbed = PPOLearner(a_model(), PPOConfig(lr=0.1, warmup=2, minibatches=3))
    assert learner.update(some_rows(), version=0) == undisturbed.update(some_rows(), version=0)


def test_rows_without_any_action_have_no_logprobs() -> None:
    rows = some_rows(3)
    rows.batch["action_mask"][:] = 0
    assert not PPOLearner(a_model(), PPOConfig()).logprobs(rows).any()


def test_fully_excluded_batch_keeps_the_weights_and_raises_an_alarm() -> None:
    rows = some_rows()
    rows.batch["logprobs"][:] = -100.0
    model = a_model()
    before = copy.deepcopy(model.state_dict())
    found = PPOLearner(model, PPOConfig(loss="decoupled", lr=0.1)).update(rows, version=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (found["loss"], found["weight_capped_fraction"]) == (0.0, 1.0)
    assert found["alarm/logprob_gap_mean"] > 90.0


def test_autocast_approximates_and_keeps_weights_in_float32() -> None:
    rows, exact = some_rows(), PPOLearner(a_model(), PPOConfig())
    model = a_model()
    found = PPOLearner(model, PPOConfig(precision="bfloat16")).gradients(rows)
    expected = exact.gradients(rows)
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.1)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_sampled_first_token_is_rejected() -> None:
    rows = bigram_rows([1.0], loss_mask=np.ones((1, 2)))
    with pytest.raises(TrainingError, match="row 0: the first token is a sampled token"):
        updated(rows)


def test_recomputed_logprobs_need_no_recorded_ones() -> None:
    rows = bigram_rows([1.0, -1.0], logprobs=np.full((2, 2), np.nan))
    logits, found = updated(rows, old_logprobs="recomputed")
    expected, _ = updated(bigram_rows([1.0, -1.0]))
    torch.testing.assert_close(logits, expected)
    assert "logprob_gap" not in found
    with pytest.raises(TrainingError, match="has no log-probability"):
        updated(rows, importance="token")


def test_gradients_of_a_fully_masked_batch_are_rejected() -> None:
    rows = bigram_rows([1.0], loss_mask=np.zeros((1, 2)))
    with pytest.raises(TrainingError, match="the gradient is empty: no token of 1 row is in the loss"):
        PPOLearner(Bigram(), PPOConfig()).gradients(rows)


@pytest.mark.parametrize("key", ["input_ids", "attention_mask", "loss_mask", "logprobs", "advantages"])
def test_an_array_that_is_missing_is_named(key: str) -> None:
    rows = bigram_rows([1.0])
    del rows.batch[key]
    with pytest.raises(ConfigError, match=f"the rows have no '{key}'"):
        updated(rows)
