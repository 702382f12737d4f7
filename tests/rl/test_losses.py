"""Test every loss under every aggregation against its formula as a loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.loss_terms import Aggregation, GlobalBatch, Loss
from reward_kit.rl.losses import (
    Level,
    cispo_loss,
    decoupled_ppo_loss,
    gspo_loss,
    ppo_clip_loss,
    token_entropies,
    token_logprobs,
    truncated_importance_weights,
    value_loss,
)
from tests.devices import tolerance
from tests.rl.loss_cases import CAP, EVERY_LOSS_AND_AGGREGATION, LOSSES, NORM_LENGTH, Case, random_case, whole_of

pytestmark = pytest.mark.device

Token = dict[str, float]
"""The values at one token, and the ratios of its sequence: `s` in GSPO, and `g` in GMPO."""


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float = math.inf) -> float:
    found = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(found, -advantage * dual) if advantage < 0 else found


def ppo(token: Token) -> float:
    return clipped(math.exp(token["trained"] - token["old"]), token["advantages"], 0.1, 0.3)


def ppo_dual_weighted(token: Token) -> float:
    ratio = math.exp(token["trained"] - token["old"])
    return token["weights"] * clipped(ratio, token["advantages"], 0.2, 0.2, 1.5)


def cispo(token: Token) -> float:
    ratio = math.exp(token["trained"] - token["old"])
    return -min(max(ratio, 0.8), 1.4) * token["advantages"] * token["trained"]


def sapo(token: Token) -> float:
    temperature = 0.8 if token["advantages"] > 0 else 1.5
    ratio = math.exp(token["trained"] - token["old"])
    return -token["advantages"] * 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


def bounded(token: Token) -> float:
    """Return the log-ratio of a token in GMPO."""
    log_ratio = token["trained"] - token["old"]
    near = min(max(log_ratio, -0.1), 0.3)
    return min(log_ratio, near) if token["advantages"] >= 0 else max(log_ratio, near)


def dppo(token: Token, divergence: str, low: float, high: float, cap: float) -> float:
    p, q, advantage = math.exp(token["trained"]), math.exp(token["old"]), token["advantages"]
    apart = abs(p - q)
    if divergence == "kl":
        apart = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (advantage > 0 and p > q and apart > high) or (advantage < 0 and p < q and apart > low):
        return 0.0
    return -advantage * min(p / q, cap)


def weight(token: Token) -> float:
    return math.exp(token["old"] - token["behaviour"])


def decoupled(token: Token, dual: float) -> float:
    ratio = math.exp(token["trained"] - token["old"])
    return min(weight(token), CAP) * clipped(ratio, token["advantages"], 0.1, 0.3, dual)


def value(token: Token, clip: float) -> float:
    values, old, returns = token["trained"], token["old"], token["advantages"]
    near = min(max(values, old - clip), old + clip)
    return 0.5 * max((values - returns) ** 2, (near - returns) ** 2)


def k1(token: Token) -> float:
    return token["trained"] - token["old"]


def k3(token: Token) -> float:
    return math.exp(-k1(token)) - 1 + k1(token)


FORMULAS: dict[str, Callable[[Token], float]] = {
    "ppo": ppo,
    "ppo dual weighted": ppo_dual_weighted,
    "gspo": lambda token: clipped(token["s"], token["advantages"], 0.1, 0.1),
    "turn mean": lambda token: clipped(token["turn mean"], token["advantages"], 0.1, 0.2),
    "turn product": lambda token: clipped(token["turn product"], token["advantages"], 0.2, 0.3, 1.5),
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": lambda token: -token["advantages"] * token["g"],
    "dppo tv": lambda token: dppo(token, "tv", 0.01, 0.03, 1.2),
    "dppo kl": lambda token: dppo(token, "kl", 0.002, 0.004, 20.0),
    "decoupled exclude": lambda token: decoupled(token, math.inf),
    "decoupled truncate": lambda token: decoupled(token, 1.5),
    "kl k1": k1,
    "kl k2": lambda token: k1(token) ** 2 / 2,
    "kl k3": k3,
    "kl k1+": k1,
    "kl k3+": k3,
    "kl abs": lambda token: abs(k1(token)),
    "value": lambda token: value(token, 0.2),
    "value unclipped": lambda token: value(token, math.inf),
    "entropy": lambda token: -token["trained"],
}


def sequences_of(case: Case) -> list[list[Token]]:
    """Return the unmasked tokens row by row."""
    found = []
    for b, row in enumerate(case["mask"].tolist()):
        tokens = [{key: float(case[key][b, t]) for key in case} for t, part in enumerate(row) if part]
        if tokens:
            s = math.exp(sum(token["trained"] - token["old"] for token in tokens) / len(tokens))
            g = math.exp(sum(map(bounded, tokens)) / len(tokens))
            turns: dict[float, list[float]] = {}
            for token in tokens:
                turns.setdefault(token["turn_ids"], []).append(token["trained"] - token["old"])
            found.append(
                [
                    token
                    | {"s": s, "g": g}
                    | {"turn mean": math.exp(sum(turns[token["turn_ids"]]) / len(turns[token["turn_ids"]]))}
                    | {"turn product": math.exp(sum(turns[token["turn_ids"]]))}
                    for token in tokens
                ]
            )
    return found


def aggregated(losses: list[list[float]], aggregation: Aggregation) -> float:
    if aggregation == "token-mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    divisors = {"seq-mean-token-sum": lambda _: 1.0, "seq-mean-token-mean": len}
    divisor = divisors.get(aggregation, lambda _: NORM_LENGTH)
    return sum(sum(sequence) / divisor(sequence) for sequence in losses) / len(losses)


@pytest.mark.parametrize(("name", "aggregation"), EVERY_LOSS_AND_AGGREGATION)
def test_loss_matches_the_formula(name: str, aggregation: Aggregation) -> None:
    for seed in range(3):
        case = random_case(seed)
        sequences = sequences_of(case)
        if name == "decoupled exclude":
            kept = [[token for token in tokens if weight(token) <= CAP] for tokens in sequences]
            sequences = [tokens for tokens in kept if tokens]
        expected = aggregated([[FORMULAS[name](token) for token in tokens] for tokens in sequences], aggregation)
        found = LOSSES[name](case, aggregation=aggregation, global_batch=whole_of(name, case)).loss
        assert found.item() == pytest.approx(expected, abs=tolerance(1e-12))


def with_gradient(
    loss: Callable[..., Loss], logprobs: Tensor, *others: Tensor, **options: float
) -> tuple[Loss, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    found = loss(leaf, *others, **options)
    found.loss.backward()
    assert leaf.grad is not None
    return found, leaf.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # pushed up far enough: cut at 1 + clip_high
        (1.5, -2.0, 3.0, 3.0),  # wrongly high: the full slope down
        (4.0, -2.0, 6.0, 0.0),  # so high that the dual clip bounds it
        (0.5, -2.0, 1.8, 0.0),  # pushed down far enough: cut at 1 - clip_low
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_values_and_slopes_of_ppo(ratio: float, advantage: float, expected: float, slope: float) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    others = torch.zeros_like(logprobs), torch.full_like(logprobs, advantage), torch.ones_like(logprobs)
    found, gradient = with_gradient(ppo_clip_loss, logprobs, *others, clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    assert found.loss.item() == pytest.approx(expected)
    assert gradient.item() == pytest.approx(slope)


def test_gspo_clips_whole_sequences() -> None:
    old = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    others = old, torch.ones_like(old), torch.ones_like(old)
    # Single ratios far beyond the clip range, of which the mean of the logarithms is 0: nothing is clipped.
    found, gradient = with_gradient(gspo_loss, old + torch.tensor([[0.7, -0.7, 0.0]]), *others)
    assert found.loss.item() == pytest.approx(-1.0) and found.diagnostics["clip_fraction"] == 0.0
    torch.testing.assert_close(gradient, torch.full_like(old, -1 / 3))
    found, gradient = with_gradient(gspo_loss, old + 0.01, *others)
    assert found.diagnostics["clip_fraction_high"] == 1.0 and not gradient.any()


def test_cispo_keeps_a_gradient_where_ppo_has_none() -> None:
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    others = old, torch.ones_like(old), torch.ones_like(old)
    assert not with_gradient(ppo_clip_loss, old + 2.0, *others)[1].any()
    found, gradient = with_gradient(cispo_loss, old + 2.0, *others)
    assert gradient.item() == pytest.approx(-5.0) and found.diagnostics["clip_fraction_high"] == 1.0


def test_decoupled_ppo_with_one_policy_for_both_is_ppo() -> None:
    case = random_case(0)
    plain, gradient = with_gradient(ppo_clip_loss, *(case[key] for key in ("trained", "old", "advantages", "mask")))
    tensors = (case[key] for key in ("trained", "old", "old", "advantages", "mask"))
    decoupled, gradient_decoupled = with_gradient(decoupled_ppo_loss, *tensors)
    assert torch.equal(plain.loss, decoupled.loss) and torch.equal(gradient, gradient_decoupled)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_weights(level: Level) -> None:
    case = random_case(1)
    leaf = case["old"].clone().requires_grad_()
    found, diagnostics = truncated_importance_weights(leaf, case["behaviour"], case["mask"], level=level, cap=1.5)
    assert not found.requires_grad
    for b, t in case["mask"].nonzero().tolist():
        places = [t] if level == "token" else case["mask"][b].nonzero().flatten().tolist()
        ratio = math.exp(sum(float(case["old"][b, u] - case["behaviour"][b, u]) for u in places))
        assert found[b, t].item() == pytest.approx(min(ratio, 1.5))
    assert not found[~case["mask"]].any()
    assert diagnostics["weight_max"] == 1.5 and 0.0 < diagnostics["weight_capped_fraction"] < 1.0


def test_weights_by_sequence_ids_equal_weights_by_rows() -> None:
    case = random_case(2)
    rows = truncated_importance_weights(case["old"], case["behaviour"], case["mask"], level="sequence")
    flat = [case[key].reshape(1, -1) for key in ("old", "behaviour", "mask")]
    ids = truncated_importance_weights(*flat, level="sequence", sequence_ids_BT=case["row_ids"].reshape(1, -1))
    assert torch.equal(rows.weights_BT.reshape(1, -1), ids.weights_BT)


def test_rows_with_one_id_are_one_sequence() -> None:
    case = random_case(3)
    loss = LOSSES["ppo"](case, aggregation="seq-mean-token-sum", sequence_ids_BT=torch.zeros_like(case["row_ids"]))
    mean = LOSSES["ppo"](case, aggregation="token-mean")
    torch.testing.assert_close(loss.loss, mean.loss * case["mask"].sum())


def test_only_the_trained_policy_gets_a_gradient() -> None:
    case = random_case(1)
    for name, loss in LOSSES.items():
        others = {key: case[key].clone().requires_grad_() for key in ("old", "behaviour", "advantages", "weights")}
        loss(case | others | {"trained": case["trained"].clone().requires_grad_()}).loss.backward()
        assert all(tensor.grad is None for tensor in others.values()), name


def test_half_precision_is_computed_in_float32() -> None:
    case = {key: values.bfloat16() if values.is_floating_point() else values for key, values in random_case(0).items()}
    wide = {key: values.float() if values.is_floating_point() else values for key, values in case.items()}
    for name, loss in LOSSES.items():
        assert torch.equal(loss(case).loss, loss(wide).loss), name
        assert loss(case).loss.dtype == torch.float32


def test_logprobs_of_half_precision_logits_are_computed_in_float32() -> None:
    logits = torch.randn((1, 5, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(5).unsqueeze(0)
    assert token_logprobs(logits, ids).dtype == token_entropies(logits).dtype == torch.float32
    torch.testing.assert_close(token_logprobs(logits, ids), token_logprobs(logits.float(), ids))


def test_counts_may_be_numbers_of_numpy() -> None:
    counts: Any = (np.int64(6), np.float32(2.0))
    assert ppo_clip_loss(ONES, ONES, ONES, ONES, global_batch=GlobalBatch(*counts)).loss.item() == -1.0


def test_logprobs_and_entropies_use_the_preceding_logits() -> None:
    logits = torch.randn(2, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3, 4], [6, 5, 0, 1]])
    logprobs, entropies = token_logprobs(logits, ids), token_entropies(logits)
    assert logprobs.shape == entropies.shape == (2, 4)
    assert not logprobs[:, 0].any() and not entropies[:, 0].any()
    for b in range(2):
        for t in range(1, 4):
            p = logits[b, t - 1].softmax(-1)
            torch.testing.assert_close(logprobs[b, t], p[ids[b, t]].log())
            torch.testing.assert_close(entropies[b, t], -sum(q * q.log() for q in p))


def test_impossible_token_adds_no_entropy_and_no_nan() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropies = token_entropies(logits)
    assert entropies[0, 1].item() == pytest.approx(math.log(2))
    entropies.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ppo_clip_loss(ONES, ONES, torch.ones(2), ONES),
            r"advantages has shape \(2,\), but loss_mask has shape \(2, 3\)",
        ),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, torch.ones(3)), r"two axes, row and token, but its shape is \(3,\)"),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, sequence_ids_BT=torch.ones(2)), "sequence_ids has shape"),
        (
            lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, sequence_ids_BT=ONES),
            r"sequence_ids must be integers, got torch.float32",
        ),
        (
            lambda: ppo_clip_loss(ONES.tolist(), ONES, ONES, ONES),  # type: ignore[arg-type]
            "logprobs must be a tensor, got a list",
        ),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, ONES.numpy()), "loss_mask must be a tensor, got"),  # type: ignore[arg-type]
        (
            lambda: ppo_clip_loss(ONES, ONES, ONES, 0.5 * ONES),
            "loss_mask must contain only 0 and 1; pass a factor",
        ),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, math.nan * ONES), "loss_mask must contain only 0 and 1"),
        (
            lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, global_batch=GlobalBatch(0, 0)),
            "global_batch must also count the 6 tokens in these rows",
        ),
        (lambda: token_logprobs(torch.ones(2, 3, 4), torch.ones(2, 4).long()), r"got \(2, 3, 4\) and \(2, 4\)"),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, clip_low=1.5), r"clip_low must be in \[0, 1\], got 1.5"),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, clip_high=math.nan), "clip_high must be a finite number"),
        (lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, dual_clip=1.0), "dual_clip must be above 1, got 1"),
        (
            lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, aggregation="token_mean"),  # type: ignore[arg-type]
            "unknown aggregation 'token_mean'; did you mean 'token-mean'",
        ),
        (
            lambda: ppo_clip_loss(ONES, ONES, ONES, ONES, aggregation="seq-mean-token-sum-norm"),
            "requires a constant length; pass global_batch=GlobalBatch.of",
        ),
        (
            lambda: decoupled_ppo_loss(ONES, ONES, ONES, ONES, ONES, beyond_cap="cut"),  # type: ignore[arg-type]
            "unknown beyond_cap 'cut'",
        ),
        (lambda: decoupled_ppo_loss(ONES, ONES, ONES, ONES, ONES, cap=0.0), "cap must be above 0, got 0"),
        (
            lambda: truncated_importance_weights(ONES, ONES, ONES, level="step"),  # type: ignore[arg-type]
            "unknown level 'step'",
        ),
        (lambda: value_loss(ONES, ONES, ONES, ONES, clip=0.0), "clip must be above 0, or None"),
        (lambda: GlobalBatch(-1, 1), "tokens must be at least 0, got -1"),
        (lambda: GlobalBatch(1, 1, 0.0), "norm_length must be above 0, got 0"),
    ],
)
def test_invalid_input_is_rejected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
