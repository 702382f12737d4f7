"""Test that tokens are drawn from the distribution of their log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from reward_kit.agent.policies.hf.sampling import Draws, Sampling, allowed_mask, draw
from reward_kit.errors import ConfigError
from tests.devices import DEVICE
from tests.profiles import examples

pytestmark = pytest.mark.device


def logits_of(seed: int, rows: int, vocabulary: int) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)), dtype=torch.float32)


def probabilities(logits_V: torch.Tensor, sampling: Sampling, allowed: list[int] | None = None) -> torch.Tensor:
    """Return (V,) probabilities as filtered by `transformers`."""
    scores = logits_V[None].clone()
    if allowed is not None:
        kept = torch.full_like(scores, -torch.inf)
        kept[0, allowed] = scores[0, allowed]
        scores = kept
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].softmax(-1)


def device_mask(allowed: list[np.ndarray | None], vocabulary: int) -> torch.Tensor | None:
    mask_BV = allowed_mask(allowed, vocabulary)
    return None if mask_BV is None else mask_BV.to(DEVICE)


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 99),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([0, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    is_restricted=st.booleans(),
)
def test_evenly_spaced_uniforms_reproduce_the_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, is_restricted: bool
) -> None:
    sampling, count, vocabulary = Sampling(temperature, top_p, top_k), 400, 20
    logits_V = logits_of(seed, 1, vocabulary)[0]
    allowed = (
        sorted(np.random.default_rng(seed).choice(vocabulary, 6, replace=False).tolist()) if is_restricted else None
    )
    mask = device_mask([None if allowed is None else np.array(allowed)] * count, vocabulary)
    uniforms = (np.arange(count) + 0.5) / count
    drawn = draw(logits_V.expand(count, -1), uniforms, sampling, mask)
    expected_V = probabilities(logits_V, sampling, allowed)
    ids_B = drawn.ids_B.to(DEVICE)
    shares_V = torch.bincount(ids_B, minlength=vocabulary) / count
    torch.testing.assert_close(shares_V, expected_V, atol=1.01 / count, rtol=0)
    torch.testing.assert_close(drawn.logprobs_B.float().to(DEVICE), expected_V[ids_B].log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_uniforms_draw_tokens_with_positive_probability(uniform: float) -> None:
    logits_BV = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf], [-200.0, 0.0, 1.0, -200.0]])
    drawn = draw(logits_BV, np.full(2, uniform), Sampling())
    assert set(drawn.ids_B.tolist()) <= {1, 2}
    assert torch.isfinite(drawn.logprobs_B).all()


def test_greedy_draws_the_most_likely_allowed_token() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    drawn = draw(logits_BV, np.zeros(2), Sampling(temperature=0), device_mask([None, np.array([0, 2])], 3))
    assert drawn.ids_B.tolist() == [1, 2]
    assert drawn.logprobs_B.tolist() == [0.0, 0.0]


def test_only_allowed_token_has_logprob_zero() -> None:
    drawn = draw(logits_of(0, 1, 9), np.zeros(1), Sampling(temperature=0.3), device_mask([np.array([4])], 9))
    assert (drawn.ids_B.item(), drawn.logprobs_B.item()) == (4, 0.0)


def test_mask_is_none_without_restrictions() -> None:
    assert allowed_mask([None, None], 5) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_nan_logprobs(temperature: float) -> None:
    drawn = draw(torch.full((1, 4), torch.nan), np.full(1, 0.5), Sampling(temperature))
    assert 0 <= drawn.ids_B.item() < 4
    assert drawn.logprobs_B.isnan().all()


def test_uniforms_of_a_row_do_not_depend_on_other_rows() -> None:
    draws = Draws(3)
    draws.begin(2, np.random.default_rng(5))
    draws.begin(0, np.random.default_rng(6))
    taken = [draws.take(np.array([2])).item()]
    for _ in range(150):
        taken.append(draws.take(np.array([0, 2]))[1])
    assert taken == np.random.default_rng(5).random(151).tolist()


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.5), "top_p"),
        (Sampling(top_k=-1), "top_k"),
    ],
)
def test_invalid_sampling_settings_are_rejected(sampling: Sampling, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} must be"):
        sampling.check()
