"""The update moves probability the way of the advantages, repeats exactly, and never destroys the weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.batch import TensorBatch, to_tensors
from reward_kit.rl.losses import logprobs_of
from reward_kit.rl.ppo import PPOConfig, ppo_update
from reward_kit.tokens import TokenBatch
from tests.tiny_policy import FIRST_ACTION, TinyModel


class Bigram(nn.Module):
    """Logits that depend on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 6))

    def forward(self, ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        return self.table[ids_BT]


def batch(advantages: list[float], module: nn.Module | None = None) -> TensorBatch:
    """One row `0 n` per advantage, where n = 1, 2, … is the sampled token."""
    ids = torch.tensor([[0, 1 + n] for n in range(len(advantages))])
    logprobs = logprobs_of((module or Bigram())(ids, torch.ones_like(ids)), ids).detach()
    mask = torch.tensor([[0, 1]] * len(advantages))
    values = torch.tensor([[0.0, advantage] for advantage in advantages])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": mask,
        "logprobs": logprobs,
        "advantages": values,
    }


def sgd(module: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=rate)


def test_probability_moves_in_the_direction_of_the_advantage() -> None:
    module = Bigram()
    found = ppo_update(module, sgd(module), batch([1.0, -1.0, 0.0]), PPOConfig())
    after = module.table[0].log_softmax(-1)
    assert after[1] > after[3] > after[2]
    assert found["logprob_gap"] == 0.0
    assert found["loss"] == pytest.approx(0.0)
    assert (found["tokens"], found["optimizer_steps"]) == (3.0, 1.0)


def test_the_gradient_is_that_of_the_surrogate() -> None:
    module = Bigram()
    ppo_update(module, sgd(module), batch([1.0, -1.0]), PPOConfig(max_grad_norm=None))
    # With ratio 1 the gradient is A (onehot - p), averaged over the two tokens; the p cancel.
    torch.testing.assert_close(module.table[0].detach(), torch.tensor([0.0, 0.5, -0.5, 0.0, 0.0, 0.0]))


def test_a_gradient_is_cut_to_the_norm() -> None:
    module = Bigram()
    found = ppo_update(module, sgd(module), batch([1000.0, -1000.0]), PPOConfig(max_grad_norm=0.1))
    assert found["grad_norm"] == pytest.approx(1000 / 2**0.5)
    assert module.table.norm().item() == pytest.approx(0.1, rel=1e-4)


def test_epochs_and_minibatches() -> None:
    module = Bigram()
    config = PPOConfig(epochs=3, minibatch_rows=2)
    found = ppo_update(module, sgd(module, 0.1), batch([1.0, -1.0, 0.5, 0.5, 1.0]), config)
    assert found["optimizer_steps"] == 9.0
    assert found["ratio_min"] < 1.0 < found["ratio_max"]


def test_clipping_stops_the_second_epoch() -> None:
    module = Bigram()
    found = ppo_update(module, sgd(module, 100.0), batch([1.0, -1.0]), PPOConfig(epochs=2, max_grad_norm=None))
    assert found["clip_fraction"] == 0.5  # none of the first step's tokens, all of the second's
    once = Bigram()
    ppo_update(once, sgd(once, 100.0), batch([1.0, -1.0]), PPOConfig(max_grad_norm=None))
    assert torch.equal(module.table, once.table)


def test_one_generator_gives_one_result() -> None:
    def trained(seed: int) -> Tensor:
        module = TinyModel()
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        ids = torch.randint(0, FIRST_ACTION + 4, (8, 6))
        rows = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "loss_mask": torch.tensor([0, 1, 0, 0, 1, 1]).expand(8, 6),
            "logprobs": torch.full((8, 6), -1.0),
            "advantages": torch.randn(8, 6),
        }
        config = PPOConfig(epochs=2, minibatch_rows=3)
        ppo_update(module, sgd(module, 0.1), rows, config, torch.Generator().manual_seed(seed))
        return module.tokens.weight.detach()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_rows_without_a_token_that_takes_part_change_nothing() -> None:
    rows, module = batch([1.0, 5.0]), Bigram()
    rows["loss_mask"][1] = 0
    rows["logprobs"][1] = torch.nan
    ppo_update(module, sgd(module), rows, PPOConfig())
    alone = Bigram()
    ppo_update(alone, sgd(alone), batch([1.0]), PPOConfig())
    assert torch.equal(module.table, alone.table)


def test_a_batch_in_which_nothing_takes_part_makes_no_step() -> None:
    rows, module = batch([1.0]), Bigram()
    rows["loss_mask"].zero_()
    assert ppo_update(module, sgd(module), rows, PPOConfig()) == {"tokens": 0.0, "optimizer_steps": 0.0}
    assert not module.table.any()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logprobs", torch.nan, "has no log-probability"),
        ("advantages", torch.inf, "the loss is"),
        ("advantages", torch.nan, "the loss is nan"),
        ("advantages", 1e38, "the gradient's norm is inf"),
    ],
)
def test_what_is_not_finite_stops_before_the_weights_change(key: str, value: float, message: str) -> None:
    module = Bigram()
    rows = batch([1.0, 1.0])
    rows[key][:, 1] = value
    optimizer = sgd(module)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(TrainingError, match=message):
        ppo_update(module, optimizer, rows, PPOConfig())
    assert torch.equal(module.table, before["table"])


@pytest.mark.parametrize(
    "options",
    [{"epochs": 0}, {"minibatch_rows": 0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"max_grad_norm": 0.0}],
)
def test_a_value_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PPOConfig(**options)  # type: ignore[arg-type]


def test_tensors_keep_the_shapes_and_take_the_dtype() -> None:
    rows = TokenBatch({"input_ids": np.zeros((2, 3), dtype=np.int64), "loss_mask": np.ones((2, 3), dtype=np.int8)})
    rows.batch["logprobs"] = np.full((2, 3), -0.5)
    tensors = to_tensors(rows, dtype=torch.float64)
    assert {key: (values.dtype, tuple(values.shape)) for key, values in tensors.items()} == {
        "input_ids": (torch.int64, (2, 3)),
        "loss_mask": (torch.int64, (2, 3)),
        "logprobs": (torch.float64, (2, 3)),
    }
    assert to_tensors(rows)["logprobs"].dtype == torch.float32
