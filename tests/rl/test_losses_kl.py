"""Test the divergence from a reference: each estimator's value and gradient, and adaptive coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.kl import AdaptiveKLCoefficient, KLEstimator, kl_estimate, kl_loss, penalized_rewards
from tests.devices import tolerance
from tests.rl.loss_cases import ESTIMATORS, random_case

pytestmark = pytest.mark.device


def policies() -> tuple[Tensor, Tensor]:
    """Return the logits of two distributions over five tokens."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def forward(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_estimator_mean_equals_the_divergence(estimator: KLEstimator) -> None:
    p, q = (logits.log_softmax(-1) for logits in policies())
    expected = (p.exp() * kl_estimate(p, q, estimator)).sum()  # every token, as often as the policy draws it
    torch.testing.assert_close(expected, forward(p, q))


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda p, q: 0.0 * p.sum()),
        ("k2", forward),
        ("k1+", forward),
        ("k3+", forward),
        ("k3", lambda p, q: forward(q, p)),
    ],
)
def test_estimator_gradient_mean_matches_its_divergence(
    estimator: KLEstimator, divergence: Callable[[Tensor, Tensor], Tensor]
) -> None:
    logits, reference = policies()
    logits.requires_grad_()
    q = reference.log_softmax(-1)
    p = logits.log_softmax(-1)
    (found,) = torch.autograd.grad((p.detach().exp() * kl_estimate(p, q, estimator)).sum(), logits)
    (expected,) = torch.autograd.grad(divergence(logits.log_softmax(-1), q), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance(1e-12))


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_k3_is_finite_and_non_negative_and_zero_for_equal_logprobs(logprob: float, reference: float) -> None:
    one, other = torch.tensor(logprob), torch.tensor(reference)
    assert 0.0 <= kl_estimate(one, other, "k3").item() < 1e9
    assert all(kl_estimate(one, one, estimator).item() == 0.0 for estimator in ESTIMATORS)


def test_kl_loss_reports_divergence_per_token_and_per_sequence() -> None:
    case = random_case(0)
    found = kl_loss(case["trained"], case["old"], case["mask"], estimator="k1").diagnostics
    per_token = (case["trained"] - case["old"])[case["mask"]]
    torch.testing.assert_close(found["kl"], per_token.mean())
    torch.testing.assert_close(found["kl_sequence"], per_token.sum() / case["mask"].any(1).sum())


def test_weights_scale_loss_and_gradient_but_not_diagnostics() -> None:
    case = random_case(0)
    x, weights = case["trained"].clone().requires_grad_(), case["weights"].clone().requires_grad_()
    found = kl_loss(x, case["old"], case["mask"], weights_BT=weights)
    expected = (weights.detach() * kl_estimate(x, case["old"], "k3+"))[case["mask"]].mean()
    torch.testing.assert_close(found.loss, expected)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found.loss, expected)]
    torch.testing.assert_close(*gradients)
    assert torch.autograd.grad(
        kl_loss(x, case["old"], case["mask"], weights_BT=weights).loss, weights, allow_unused=True
    ) == (None,)
    assert found.diagnostics.floats() == kl_loss(x, case["old"], case["mask"]).diagnostics.floats()


def test_penalty_on_integer_rewards_is_not_truncated() -> None:
    ones = torch.ones(1, 2)
    found = penalized_rewards(torch.ones(1, 2, dtype=torch.int64), ones, 0.0 * ones, ones, coefficient=0.25)
    assert found.rewards_BT.tolist() == [[0.75, 0.75]]


def test_penalty_applies_only_to_unmasked_tokens() -> None:
    case = random_case(0)
    tensors = (case["trained"].clone().requires_grad_(), case["old"], case["mask"])
    rewards = torch.where(case["mask"], case["advantages"], torch.nan)
    found = penalized_rewards(rewards, *tensors, coefficient=0.1)
    expected = case["advantages"] - 0.1 * (case["trained"] - case["old"])
    torch.testing.assert_close(found.rewards_BT[case["mask"]], expected[case["mask"]])
    assert found.rewards_BT[~case["mask"]].isnan().all() and not found.rewards_BT.requires_grad
    described = kl_loss(*tensors, estimator="k1").diagnostics
    assert found.diagnostics.floats() == described.floats()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_penalized_rewards_are_widened(dtype: torch.dtype) -> None:
    # In the type of the rewards, a penalty of 0.001 would be rounded away.
    rewards = torch.ones(1, 2, dtype=dtype)
    found = penalized_rewards(rewards, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), coefficient=0.001)
    assert found.rewards_BT.dtype == torch.float32
    torch.testing.assert_close(found.rewards_BT, torch.full((1, 2), 1.001))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimates_are_widened(estimator: KLEstimator) -> None:
    logprobs, reference = (torch.tensor([number], dtype=torch.bfloat16) for number in (-1.0078125, -1.0))
    found = kl_estimate(logprobs, reference, estimator)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, kl_estimate(logprobs.double(), reference.double(), estimator).float())


def test_the_coefficient_follows_the_divergence() -> None:
    coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000)
    assert coefficient.update(6.0, 100) == 0.1
    assert coefficient.update(60.0, 100) == pytest.approx(0.1 * 1.02)
    assert coefficient.update(6.6, 100) == pytest.approx(0.1 * 1.02 * 1.01)
    assert coefficient.update(-3.0, 1000) == pytest.approx(0.1 * 1.02 * 1.01 * 0.8)


def test_adaptive_coefficient_resumes_from_a_checkpoint() -> None:
    first, second = (AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000) for _ in range(2))
    first.update(12.0, 500)
    second.load_state_dict(first.state_dict())
    assert first.update(3.0, 10) == second.update(3.0, 10) != 0.1


def test_undefined_divergence_keeps_the_coefficient() -> None:
    coefficient = AdaptiveKLCoefficient(0.1, target=6.0, horizon=1000)
    with pytest.raises(TrainingError, match=r"divergence from the reference is nan; its coefficient is still 0\.1"):
        coefficient.update(math.nan, 100)
    assert coefficient.value == 0.1


ONES = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl_estimate(ONES, ONES, "k2+"), "unknown estimator 'k2\\+'; did you mean 'k"),  # type: ignore[arg-type]
        (lambda: penalized_rewards(ONES, ONES, ONES, ONES, coefficient=1.0, estimator="k3+"), "use 'k3' for rewards"),
        (lambda: penalized_rewards(ONES, ONES, ONES, ONES, coefficient=-1.0), "coefficient must be at least 0"),
        (lambda: AdaptiveKLCoefficient(0.1, target=0.0, horizon=1), "target must be above 0, got 0"),
        (
            lambda: AdaptiveKLCoefficient(0.1, target=1.0, horizon=1).update(2.0, -100),
            "samples must be at least 0, got -100",
        ),
        (
            lambda: AdaptiveKLCoefficient(0.1, target=1.0, horizon=1).update(2.0, math.nan),
            "samples must be a finite number",
        ),
        (
            lambda: AdaptiveKLCoefficient(0.1, target=1.0, horizon=1).load_state_dict({}),
            "the state's value must be a finite",
        ),
        (lambda: kl_loss(ONES, ONES, ONES, weights_BT=torch.ones(1)), r"weights has shape \(1,\)"),
        (lambda: AdaptiveKLCoefficient(math.inf, target=1.0, horizon=1), "coefficient must be a finite number"),
    ],
)
def test_invalid_input_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
