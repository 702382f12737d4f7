"""Losses: their values, their gradients, and that masked tokens have no influence at all."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reward_kit.rl.losses import Loss, logprobs_of, ppo_clip_loss

SHAPE = (3, 5)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64)

    old_BT = draw() - 2.0
    mask_BT = torch.rand(SHAPE, generator=generator) < 0.6
    mask_BT[0, 0] = True
    return old_BT + 0.3 * draw(), old_BT, draw(), mask_BT


def with_gradient(logprobs_BT: Tensor, *others: Tensor, **options: float) -> tuple[Loss, Tensor]:
    leaf = logprobs_BT.clone().requires_grad_()
    found = ppo_clip_loss(leaf, *others, **options)
    found.loss.backward()
    assert leaf.grad is not None
    return found, leaf.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # pushed up far enough: cut at 1 + clip_high
        (1.5, -2.0, 3.0, 3.0),  # wrongly high: the full slope down
        (0.5, -2.0, 1.8, 0.0),  # pushed down far enough: cut at 1 - clip_low
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_values_and_slopes(ratio: float, advantage: float, expected: float, slope: float) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    others = torch.zeros_like(logprobs), torch.full_like(logprobs, advantage), torch.ones_like(logprobs)
    found, gradient = with_gradient(logprobs, *others, clip_low=0.1, clip_high=0.3)
    assert found.loss.item() == pytest.approx(expected)
    assert gradient.item() == pytest.approx(slope)


@pytest.mark.parametrize("seed", range(5))
def test_gradcheck(seed: int) -> None:
    logprobs, old, advantages, mask = random_case(seed)

    def loss(x: Tensor) -> Tensor:
        return ppo_clip_loss(x, old, advantages, mask).loss

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e30, -1e30, math.inf, -math.inf, math.nan]))
def test_masked_tokens_have_no_influence(seed: int, junk: float) -> None:
    logprobs, old, advantages, mask = random_case(seed)
    found, gradient = with_gradient(logprobs, old, advantages, mask)
    spoiled = [torch.where(mask, values, junk) for values in (logprobs, old, advantages)]
    again, gradient_again = with_gradient(*spoiled, mask)
    assert torch.equal(found.loss, again.loss)
    assert torch.equal(gradient, gradient_again)
    assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
    assert all(torch.equal(found.diagnostics[key], again.diagnostics[key]) for key in found.diagnostics)


def test_a_fully_masked_row_changes_nothing_and_a_fully_masked_batch_gives_zero() -> None:
    logprobs, old, advantages, mask = random_case(0)
    mask[1] = False
    whole, gradient = with_gradient(logprobs, old, advantages, mask)
    rest = [values[[0, 2]] for values in (logprobs, old, advantages, mask)]
    without, gradient_without = with_gradient(*rest)
    torch.testing.assert_close(whole.loss, without.loss, rtol=0, atol=1e-15)
    assert torch.equal(gradient[[0, 2]], gradient_without)
    assert not gradient[1].any()
    empty, gradient = with_gradient(logprobs, old, advantages, torch.zeros_like(mask))
    assert empty.loss.item() == 0.0
    assert not gradient.any()
    assert all(torch.isfinite(value) for value in empty.diagnostics.values())


def test_only_the_trained_policy_gets_a_gradient() -> None:
    logprobs, old, advantages, mask = random_case(1)
    others = old.requires_grad_(), advantages.requires_grad_()
    with_gradient(logprobs, *others, mask)
    assert all(tensor.grad is None for tensor in others)


def test_diagnostics_against_their_definitions() -> None:
    logprobs, old, advantages, mask = random_case(2)
    found = ppo_clip_loss(logprobs, old, advantages, mask).diagnostics
    ratio, sign = (logprobs - old).exp()[mask], advantages[mask]
    clipped = ((ratio > 1.2) & (sign > 0)) | ((ratio < 0.8) & (sign < 0))
    assert found["tokens"] == mask.sum()
    torch.testing.assert_close(found["clip_fraction"], clipped.float().mean())
    torch.testing.assert_close(found["approx_kl"], (ratio - 1 - ratio.log()).mean())


def test_a_huge_ratio_stays_finite() -> None:
    case = torch.tensor([[1000.0]]), torch.tensor([[0.0]]), torch.tensor([[-1.0]]), torch.tensor([[1]])
    assert torch.isfinite(with_gradient(*case)[0].loss)


def test_logprobs_come_from_the_logits_before() -> None:
    logits = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4], [6, 5, 0, 1]])
    found = logprobs_of(logits, ids)
    assert found.shape == (2, 4)
    assert not found[:, 0].any()
    for b in range(2):
        for t in range(1, 4):
            torch.testing.assert_close(found[b, t], logits[b, t - 1].log_softmax(-1)[ids[b, t]])
