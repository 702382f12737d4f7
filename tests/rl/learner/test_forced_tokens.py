"""Tokens forced by a constraint are excluded from the loss and the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import TrainingError
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device

LOSSES: list[dict[str, Any]] = [
    {"kl_coefficient": 0.3, "entropy_coefficient": 0.1},
    {"loss": "gspo"},
    {"loss": "cispo"},
    {"loss": "turn_gspo"},
    {"loss": "turn_ppo", "dual_clip": 3.0},
    {"loss": "decoupled", "decoupled_cap": 1.5},
    {"importance": "sequence"},
    {"aggregation": "seq-mean-token-sum"},
    {"old_logprobs": "recomputed", "minibatches": 2},
]


def ends_forced(rows: TokenBatch, firsts: bool = False) -> TokenBatch:
    """Make the last (or first) token of each action the only allowed one, as end tokens often are."""
    allowed = np.empty(len(rows.batch["input_ids"]), dtype=object)
    for row, sampled in enumerate(rows.batch["action_mask"]):
        edge = np.diff(np.pad(sampled, 1))
        columns = np.flatnonzero(edge == 1) if firsts else np.flatnonzero(edge == -1) - 1
        start = int(rows.batch["attention_mask"][row].argmax())
        ids = rows.batch["input_ids"][row, columns]
        rows.batch["logprobs"][row, columns] = 0.0
        allowed[row] = AllowedIds(columns - start, np.arange(len(ids) + 1), ids)
    rows.non_tensor_batch["allowed_ids"] = allowed
    return rows


def masked_out(rows: TokenBatch, firsts: bool = False) -> TokenBatch:
    """Return the rows with the forced tokens masked explicitly."""
    forced = ends_forced(rows, firsts)
    allowed = forced.non_tensor_batch.pop("allowed_ids")
    for row, one in enumerate(allowed):
        start = int(forced.batch["attention_mask"][row].argmax())
        forced.batch["loss_mask"][row, np.asarray(one.places) + start] = 0
    return forced


def gradients_of(learner: PPOLearner) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in learner.module.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_forced_tokens_do_not_affect_loss_gradient_or_metrics(options: dict[str, Any], padding: str) -> None:
    reference = a_model(1, torch.float64) if "kl_coefficient" in options else None
    config = PPOConfig(**options, max_tokens_per_micro_batch=60)
    ours = PPOLearner(a_model(dtype=torch.float64), config, reference=reference)
    theirs = PPOLearner(a_model(dtype=torch.float64), config, reference=reference)
    found = ours.gradients(ends_forced(some_rows(padding=padding)))
    expected = theirs.gradients(masked_out(some_rows(padding=padding)))
    assert found == expected
    for name, gradient in gradients_of(ours).items():
        assert torch.equal(gradient, gradients_of(theirs)[name])


def test_update_reports_the_share_of_forced_tokens() -> None:
    rows = ends_forced(some_rows())
    sampled = int(rows.batch["loss_mask"].sum())
    forced = sum(len(one.places) for one in rows.non_tensor_batch["allowed_ids"])
    learner = PPOLearner(a_model(), PPOConfig())
    found = learner.update(rows, version=2)
    assert found["tokens"] == sampled - forced
    assert found["forced_share"] == pytest.approx(forced / sampled)
    assert "forced_share" not in learner.update(some_rows(), version=2)
    # Asked for, their log-probability is what it must be.
    laid = learner.logprobs(rows)
    for row, one in enumerate(rows.non_tensor_batch["allowed_ids"]):
        np.testing.assert_allclose(laid[row, one.places], 0.0, atol=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "decoupled"])
def test_value_loss_includes_a_forced_first_token_but_policy_loss_does_not(loss: Any) -> None:
    def learner_with(**options: Any) -> PPOLearner:
        return PPOLearner(PolicyWithValue(a_model(dtype=torch.float64)), PPOConfig(loss=loss, **options))

    rows = ends_forced(some_rows(), firsts=True)
    found = learner_with().gradients(rows)
    policy = learner_with(value_coefficient=0.0).gradients(masked_out(some_rows(), firsts=True))
    # The value loss looks at first tokens alone, whatever the constraint.
    value = learner_with().gradients(some_rows())
    assert found["value_loss"] == pytest.approx(value["value_loss"], abs=1e-12)
    names = {"policy_loss", "entropy", "approx_kl", "ratio_mean", "logprob_gap_mean", "effective_share"} & policy.keys()
    assert len(names) >= 5
    for name in names:
        assert found[name] == pytest.approx(policy[name], abs=1e-12), name
    assert learner_with().update(rows, version=2)["tokens"] == masked_out(some_rows(), True).batch["loss_mask"].sum()


def test_batch_of_forced_tokens_only_makes_no_step() -> None:
    rows = some_rows(1)
    places = np.flatnonzero(rows.batch["action_mask"][0])
    ids = rows.batch["input_ids"][0, places]
    rows.non_tensor_batch["allowed_ids"] = np.empty(1, dtype=object)
    rows.non_tensor_batch["allowed_ids"][0] = AllowedIds(places, np.arange(len(ids) + 1), ids)
    learner = PPOLearner(a_model(), PPOConfig())
    assert learner.update(rows, version=0) == {"tokens": 0.0, "optimizer_steps": 0.0}
    with pytest.raises(TrainingError, match="no token of 1 row is in the loss, and a constraint forced"):
        learner.gradients(rows)
    with_critic = PPOLearner(PolicyWithValue(a_model()), PPOConfig()).update(rows, version=0)
    assert (with_critic["tokens"], with_critic["optimizer_steps"]) == (0.0, 1.0)
    assert with_critic["value_loss"] > 0.0
