"""Regression tests for defects known from the losses of other trainers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.kl import AdaptiveKLCoefficient, KLEstimator, kl_estimate
from reward_kit.rl.loss_terms import GlobalBatch
from reward_kit.rl.losses import (
    cispo_loss,
    decoupled_ppo_loss,
    gspo_loss,
    ppo_clip_loss,
    truncated_importance_weights,
    value_loss,
    within_cap,
)
from tests.rl.loss_cases import AGGREGATIONS, NORM_LENGTH, random_case

pytestmark = pytest.mark.device


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_seq_mean_token_mean_with_a_masked_row_is_finite() -> None:
    # verl-agent divides each row by its number of tokens, and this row has none.
    zeros, mask = torch.zeros(2, 2), torch.tensor([[1, 1], [0, 0]])
    leaf = zeros.clone().requires_grad_()
    loss = ppo_clip_loss(leaf, zeros, zeros + 1, mask, aggregation="seq-mean-token-mean").loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == -1.0
    assert gradient.tolist() == [[-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_masked_row_does_not_lower_the_mean_over_sequences(aggregation: str) -> None:
    # verl-agent counts it among the sequences.
    def loss(mask: Tensor) -> float:
        zeros, whole = torch.zeros(mask.shape), GlobalBatch.of(mask, norm_length=2.0)
        return ppo_clip_loss(zeros, zeros, zeros + 1, mask, aggregation=aggregation, global_batch=whole).loss.item()

    assert loss(torch.tensor([[1, 1], [0, 0]])) == loss(torch.tensor([[1, 1]])) != 0.0


@pytest.mark.parametrize(("estimator", "value"), [("k1+", -1.0), ("k3+", math.e - 2.0)])
def test_k1_plus_and_k3_plus_have_a_value_and_the_gradient_of_k2(estimator: KLEstimator, value: float) -> None:
    # verl b178a3c raises NotImplementedError for both (verl pull request 6058).
    leaf = row(-3.0).requires_grad_()
    found = kl_estimate(leaf, row(-2.0), estimator)
    assert found.item() == pytest.approx(value)
    assert torch.autograd.grad(found.sum(), leaf)[0].item() == -1.0


def test_tokens_excluded_by_the_decoupled_loss_are_not_counted() -> None:
    # verl pull request 2854 zeroes such a token and still divides by it.
    proximal, behaviour, advantages, mask = row(-1, -1, -1), row(-1, -1, -9), row(1, 1, 1), row(1, 1, 1)
    loss, found = decoupled_ppo_loss(proximal, proximal, behaviour, advantages, mask, cap=5.0)
    assert loss.item() == -1.0
    assert found["tokens"] == 2
    assert GlobalBatch.of(within_cap(proximal, behaviour, mask, 5.0)) == GlobalBatch(2, 1)


def test_missing_logprob_makes_the_loss_nan() -> None:
    # NaN is not at most the cap, so a mask made of "weight <= cap" would hide it.
    proximal, behaviour = row(-1, -1), row(-1, math.nan)
    assert decoupled_ppo_loss(proximal, proximal, behaviour, row(1, 1), row(1, 1)).loss.isnan()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_loss_does_not_depend_on_the_micro_batch_split(aggregation: str) -> None:
    # verl issues 2776, 3741, 5625 and 7321: a mean of the micro-batches' means weighs a short row's tokens more.
    zeros, advantages = torch.zeros(2, 4), torch.tensor([[1.0] * 4, [3.0] * 4])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    whole = GlobalBatch.of(mask, norm_length=NORM_LENGTH)
    parts = [
        ppo_clip_loss(
            zeros[b], zeros[b], advantages[b], mask[b], aggregation=aggregation, global_batch=whole
        ).loss.item()
        for b in ([0, 1], [0], [1])
    ]
    assert parts[0] == pytest.approx(parts[1] + parts[2])
    if aggregation == "token-mean":
        assert parts[0] == pytest.approx(-7 / 5)  # the mean of the means would be -2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [1000.0, -1000.0, math.inf])
def test_overflowing_ratio_is_clamped(gap: float, advantage: float) -> None:
    # verl-agent takes exp of the difference as it is: 1000 gives inf, and a gradient of NaN.
    zero = torch.zeros(1, 1)
    for loss in (ppo_clip_loss, gspo_loss, cispo_loss):
        leaf = torch.zeros(1, 1, requires_grad=True)
        found = loss(leaf, zero - gap, zero + advantage, zero + 1)
        found.loss.backward()
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and torch.isfinite(found.loss)
        assert all(math.isfinite(value) for value in found.diagnostics.floats().values())


def test_the_value_loss_has_the_factor_one_half() -> None:
    # verl has it, verl-agent has not: one coefficient means two things.
    leaf = row(3.0).requires_grad_()
    loss = value_loss(leaf, row(3.0), row(1.0), row(1), clip=None).loss
    assert loss.item() == 2.0
    assert torch.autograd.grad(loss, leaf)[0].item() == 2.0


def test_a_short_mask_is_divided_by_exactly_its_tokens() -> None:
    # masked_mean of verl adds 1e-8 to the count.
    case = random_case(0)
    mask = torch.zeros_like(case["mask"])
    mask[0, 0] = True
    loss = ppo_clip_loss(case["old"], case["old"], case["advantages"], mask).loss
    assert loss == -case["advantages"][0, 0]


def test_sum_norm_requires_an_explicit_length() -> None:
    # verl divides by the width of the tensor unless told a factor: the loss then changes with the longest row at hand.
    narrow, wide = torch.ones(1, 2), torch.ones(1, 9)
    mask_of_wide = torch.tensor([[1.0] * 2 + [0.0] * 7])
    whole = GlobalBatch.of(narrow, norm_length=4.0)
    options = {"aggregation": "seq-mean-token-sum-norm", "global_batch": whole}
    losses = [
        ppo_clip_loss(ones, ones, ones, mask, **options).loss.item()
        for ones, mask in ((narrow, narrow), (wide, mask_of_wide))
    ]
    assert losses == [-0.5, -0.5]
    with pytest.raises(ConfigError, match="a constant length"):
        ppo_clip_loss(narrow, narrow, narrow, narrow, aggregation="seq-mean-token-sum-norm")


def test_k3_has_a_gradient_far_from_the_reference() -> None:
    # verl cuts the value of k3 at 10, and with it the gradient where it is needed most.
    leaf = row(-10.0).requires_grad_()
    found = kl_estimate(leaf, row(-5.0), "k3")
    assert found.item() > 10.0
    assert torch.autograd.grad(found.sum(), leaf)[0].item() < -100.0


def test_straight_through_estimators_have_a_gradient_beyond_the_clamp() -> None:
    leaf = row(-50.0).requires_grad_()
    found = kl_estimate(leaf, row(-5.0), "k3+")
    assert torch.isfinite(found).all()
    assert torch.autograd.grad(found.sum(), leaf)[0].item() == -45.0


def test_the_kl_coefficient_never_turns_negative() -> None:
    # More than five horizons at once would make 1 - 0.2 · n / horizon negative.
    coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=10)
    assert coefficient.update(0.0, samples=1000) == pytest.approx(0.08)


def test_advantages_per_row_are_rejected() -> None:
    # A (2,) tensor beside (2,2) ones would be taken as one advantage per column.
    ones = torch.ones(2, 2)
    with pytest.raises(ConfigError, match="advantages has shape"):
        ppo_clip_loss(ones, ones, torch.tensor([1.0, 2.0]), ones)


@pytest.mark.parametrize("number", [2, -1, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float32])
def test_mask_of_other_numbers_is_rejected(number: int, dtype: torch.dtype) -> None:
    ones, mask = torch.ones(1, 2), torch.tensor([[1, number]], dtype=dtype)
    if mask[0, 1] == 1:
        assert ppo_clip_loss(ones, ones, ones, mask).loss.item() == -1.0
        return
    with pytest.raises(ConfigError, match="must contain only 0 and 1"):
        ppo_clip_loss(ones, ones, ones, mask)


LONG = 131_072


def long_case(gap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return old and new log-probabilities of a long sequence, and its mask.

    The mean difference is about `gap`. The first half is far above it, the second half far below.
    """
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand((1, LONG), generator=generator)
    sign = torch.ones(1, LONG)
    sign[0, LONG // 2 :] = -1.0
    return old, old + gap + sign * (0.5 + 0.1 * old), torch.ones(1, LONG)


def test_weight_of_a_long_sequence_is_exact() -> None:
    # Adding 131,072 float32 numbers one by one is off by several percent.
    old, new, mask = long_case(0.0)
    exact = math.fsum((new - old)[0].tolist())
    new[0, 0] -= exact  # so that the weight is close to 1
    found = truncated_importance_weights(new, old, mask, level="sequence", cap=1e6).weights_BT[0, 0]
    assert found.item() == pytest.approx(math.exp(math.fsum((new - old)[0].tolist())), rel=1e-5)


def test_gspo_loss_of_a_long_sequence_is_exact() -> None:
    old, new, mask = long_case(0.5)
    found = gspo_loss(new, old, -mask, mask, clip_high=1.0).loss
    exact = math.exp(math.fsum((new - old)[0].tolist()) / LONG)
    assert found.item() == pytest.approx(exact, rel=1e-6)


def test_approx_kl_of_nearly_equal_policies_is_not_rounding() -> None:
    # In float32, exp(1e-4) - 1 - 1e-4 is off by more than its value, 5e-9.
    old, mask = torch.full((1, 8), -1.0), torch.ones(1, 8)
    new = old + 1e-4
    gap = (new - old).double()
    found = ppo_clip_loss(new, old, mask, mask).diagnostics["approx_kl"].item()
    assert found == pytest.approx((gap.expm1() - gap).mean().item(), rel=0.02)


def test_value_clip_fraction_of_large_returns_is_not_rounding() -> None:
    # Both squares round to the same number, but the first value is clipped and the second is not.
    values, old, returns = torch.tensor([[2.0, 2.0]]), torch.zeros(1, 2), torch.tensor([[1e8, -1e8]])
    leaf = values.requires_grad_()
    loss, found = value_loss(leaf, old, returns, torch.ones(1, 2), clip=0.5)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert found["value_clip_fraction"].item() == 0.5
    assert gradient[0, 0] == 0.0 < gradient[0, 1]


def test_value_at_its_bound_is_not_clipped() -> None:
    old = torch.tensor([[0.1, 0.7, 1.3]])
    values = torch.stack([old[0] + 0.5 * sign for sign in (1, -1)])
    returns = torch.tensor([[9.0] * 3, [-9.0] * 3])
    found = value_loss(values, old.expand(2, 3), returns, torch.ones(2, 3), clip=0.5).diagnostics
    assert found["value_clip_fraction"].item() == 0.0


@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_straight_through_estimators_do_not_overflow(estimator: KLEstimator) -> None:
    # The square of 1e20 is infinite in float32.
    leaf = torch.tensor([-1e20]).requires_grad_()
    found = kl_estimate(leaf, torch.tensor([0.0]), estimator)
    assert torch.isfinite(found).all()
    assert torch.isfinite(torch.autograd.grad(found.sum(), leaf)[0]).all()
