"""Test that losses do not depend on micro-batches, padding, or values at masked positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.kl import penalized_rewards
from reward_kit.rl.loss_terms import Aggregation
from reward_kit.rl.losses import (
    Level,
    TurnRatio,
    gspo_loss,
    ppo_clip_loss,
    truncated_importance_weights,
    turn_clip_loss,
    within_cap,
)
from tests.devices import WIDEST, tolerance
from tests.profiles import examples
from tests.rl.loss_cases import (
    AGGREGATIONS,
    CAP,
    EVERY_LOSS_AND_AGGREGATION,
    LOSSES,
    NORM_LENGTH,
    Case,
    evaluated,
    micro_batches,
    packed,
    random_case,
    whole_of,
)

pytestmark = pytest.mark.device

finite_differences = pytest.mark.skipif(torch.float64 != WIDEST, reason="finite differences need float64")
CLOSE = {"rtol": 0.0, "atol": tolerance(1e-10)}


@pytest.mark.parametrize(("name", "aggregation"), EVERY_LOSS_AND_AGGREGATION)
def test_loss_does_not_depend_on_micro_batches_or_layout(name: str, aggregation: Aggregation) -> None:
    case = random_case(4)
    whole = whole_of(name, case)
    loss, gradients, found = evaluated(name, [case], aggregation, whole)
    assert loss.item() != 0.0
    for parts in (1, 3, 7):
        padded_parts = micro_batches(case, parts)
        for split in (padded_parts, [packed(part) for part in padded_parts]):
            again, gradients_again, found_again = evaluated(name, split, aggregation, whole)
            torch.testing.assert_close(again, loss, **CLOSE)
            torch.testing.assert_close(torch.cat(gradients_again), torch.cat(gradients), **CLOSE)
            assert found_again == pytest.approx(found, rel=tolerance(1e-10))


# The fourth needs a length, which has to be given.
@pytest.mark.parametrize("aggregation", AGGREGATIONS[:3])
@pytest.mark.parametrize("name", LOSSES)
def test_global_counts_default_to_the_given_rows(name: str, aggregation: Aggregation) -> None:
    case = random_case(5)
    given_counts = LOSSES[name](case, aggregation=aggregation, global_batch=whole_of(name, case))
    assert torch.equal(LOSSES[name](case, aggregation=aggregation).loss, given_counts.loss)


@settings(deadline=None, max_examples=examples(400))
@given(
    st.integers(0, 10_000),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from([0.0, 1e30, -1e30, math.inf, -math.inf, math.nan]),
)
def test_masked_tokens_have_no_influence(seed: int, name: str, aggregation: Aggregation, junk: float) -> None:
    case = random_case(seed, rows=4)
    spoiled = {
        key: torch.where(case["mask"], values, junk) if values.is_floating_point() else values
        for key, values in case.items()
    }
    spoiled["row_ids"] = torch.where(case["mask"], case["row_ids"], -seed)
    whole = whole_of(name, case)
    loss, gradients, found = evaluated(name, [case], aggregation, whole)
    again, gradients_again, found_again = evaluated(name, [spoiled], aggregation, whole_of(name, spoiled))
    assert whole == whole_of(name, spoiled)
    assert torch.equal(loss, again) and torch.isfinite(loss)
    assert torch.equal(gradients[0], gradients_again[0])
    assert not gradients[0][~case["mask"][case["attention_mask"]]].any()
    assert found == found_again


@settings(deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from(["token", "sequence"]), st.sampled_from([1e30, -1e30, math.inf, math.nan])
)
def test_masked_tokens_have_no_influence_on_weights_and_penalties(seed: int, level: Level, junk: float) -> None:
    case = random_case(seed, rows=4)
    mask = case["mask"]

    def made(old: Tensor, behaviour: Tensor) -> list[Tensor]:
        weights = truncated_importance_weights(old, behaviour, mask, level=level)
        penalised = penalized_rewards(case["advantages"], old, behaviour, mask, coefficient=0.1, estimator="k3")
        described = [*weights.diagnostics.values(), *penalised.diagnostics.values()]
        return [weights.weights_BT, penalised.rewards_BT, within_cap(old, behaviour, mask, CAP), *described]

    spoiled = (torch.where(mask, case[key], junk) for key in ("old", "behaviour"))
    assert all(map(torch.equal, made(case["old"], case["behaviour"]), made(*spoiled)))


@pytest.mark.parametrize(("name", "aggregation"), EVERY_LOSS_AND_AGGREGATION)
def test_fully_masked_batch_has_zero_loss_and_gradient(name: str, aggregation: Aggregation) -> None:
    case = random_case(6)
    case["mask"] = torch.zeros_like(case["mask"])
    loss, gradients, found = evaluated(name, [case], aggregation, whole_of(name, case))
    assert loss.item() == 0.0 and not gradients[0].any()
    # What there was nothing to look at for is left out of a log, not 0.
    assert set(found) <= {"tokens", "value_tokens"} and set(found.values()) <= {0.0}


def policy_tensors(case: Case) -> tuple[Tensor, ...]:
    return case["old"], case["advantages"], case["mask"]


def frozen_gspo(case: Case, at: Tensor, x: Tensor) -> Tensor:
    old, advantages, mask = policy_tensors(case)
    total = x.new_zeros(())
    for b in range(len(x)):
        row = mask[b]
        if row.any():
            s = (at - old)[b, row].mean().exp()
            ratio = s * (x - at)[b, row].exp()
            losses = torch.maximum(-advantages[b, row] * ratio, -advantages[b, row] * ratio.clamp(0.9, 1.1))
            total = total + losses.sum()
    return total / mask.sum()


def frozen_turns(case: Case, at: Tensor, x: Tensor, *, is_product: bool) -> Tensor:
    old, advantages, mask = policy_tensors(case)
    total = x.new_zeros(())
    for b in range(len(x)):
        for turn in case["turn_ids"][b].unique():
            tokens = mask[b] & (case["turn_ids"][b] == turn)
            if not tokens.any():
                continue
            log_ratio, a = (at - old)[b, tokens], advantages[b, tokens]
            ratio = (log_ratio.sum() if is_product else log_ratio.mean()).exp() * (x - at)[b, tokens].exp()
            low, high = (0.8, 1.3) if is_product else (0.9, 1.2)
            losses = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
            if is_product:
                losses = torch.where(a < 0, torch.minimum(losses, -a * 1.5), losses)
            total = total + losses.sum()
    return total / mask.sum()


def frozen_cispo(case: Case, at: Tensor, x: Tensor) -> Tensor:
    old, advantages, mask = policy_tensors(case)
    return -((at - old).exp().clamp(0.8, 1.4) * advantages * x)[mask].mean()


def frozen_k2(case: Case, at: Tensor, x: Tensor) -> Tensor:
    return ((x - case["old"])[case["mask"]] ** 2).mean() / 2


def frozen_dppo(case: Case, at: Tensor, x: Tensor) -> Tensor:
    ratio, apart = (at - case["old"]).exp(), at.exp() - case["old"].exp()
    advantages, mask = case["advantages"], case["mask"]
    is_kept = ~(((advantages > 0) & (apart > 0.03)) | ((advantages < 0) & (apart < -0.01)))
    return (-advantages * ratio.clamp(max=1.2) * (x - at).exp() * is_kept)[mask].mean()


STOPPED = {
    "gspo": frozen_gspo,
    "turn mean": partial(frozen_turns, is_product=False),
    "turn product": partial(frozen_turns, is_product=True),
    "cispo": frozen_cispo,
    "kl k1+": frozen_k2,
    "kl k3+": frozen_k2,
    "dppo tv": frozen_dppo,
}
"""Losses that stop a gradient, as functions in which what is stopped is a constant; token-mean."""


@finite_differences
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in STOPPED])
def test_gradient_passes_gradcheck(name: str, aggregation: Aggregation) -> None:
    case = random_case(7, rows=5)
    whole = whole_of(name, case)

    def loss(x: Tensor) -> Tensor:
        return LOSSES[name](case | {"trained": x}, aggregation=aggregation, global_batch=whole).loss

    assert torch.autograd.gradcheck(loss, case["trained"].requires_grad_())


@finite_differences
@pytest.mark.parametrize("name", STOPPED)
def test_gradient_passes_gradcheck_with_stopped_terms_constant(name: str) -> None:
    case = random_case(7, rows=5)
    at, x = case["trained"].clone(), case["trained"].clone().requires_grad_()
    frozen: Callable[[Tensor], Tensor] = lambda x: STOPPED[name](case, at, x)  # noqa: E731
    assert torch.autograd.gradcheck(frozen, x)
    (expected,) = torch.autograd.grad(frozen(x), x)
    found = LOSSES[name](case | {"trained": x}, aggregation="token-mean").loss
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], expected, **CLOSE)


@finite_differences
def test_gspo_gradient_passes_gradcheck_with_sequence_advantages() -> None:
    case = random_case(8, rows=5)
    case["advantages"] = case["advantages"][:, :1].expand_as(case["advantages"])

    def loss(x: Tensor) -> Tensor:
        return LOSSES["gspo"](case | {"trained": x}, aggregation="seq-mean-token-mean").loss

    assert torch.autograd.gradcheck(loss, case["trained"].requires_grad_())


def test_turn_loss_by_product_has_the_gradient_of_ppo_on_turns() -> None:
    """With one advantage per turn, the gradient is that of max(-A s, -A clip(s)) summed over turns."""
    case = random_case(8, rows=5)
    case["advantages"] = case["advantages"][:, case["turn_ids"][0] * 2]

    def ppo_on_turns(x: Tensor) -> Tensor:
        rows = []
        for b, row in enumerate(case["mask"]):
            turns = []
            for turn in case["turn_ids"][b, row].unique():
                tokens = row & (case["turn_ids"][b] == turn)
                ratio, advantage = (x - case["old"])[b, tokens].sum().exp(), case["advantages"][b, tokens][0]
                turns.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3)))
            rows += [torch.stack(turns).sum()] if turns else []
        return torch.stack(rows).mean()

    x = case["trained"].requires_grad_()
    tensors = (case[key] for key in ("old", "advantages", "mask", "turn_ids"))
    found = turn_clip_loss(
        x, *tensors, ratio="product", clip_low=0.2, clip_high=0.3, aggregation="seq-mean-token-sum"
    ).loss
    (expected,), (gradient,) = torch.autograd.grad(ppo_on_turns(x), x), torch.autograd.grad(found, x)
    torch.testing.assert_close(gradient, expected, **CLOSE)
    assert gradient.abs().sum() > 0.1


@pytest.mark.parametrize("ratio", ["mean", "product"])
def test_turn_loss_is_ppo_if_each_turn_has_one_token(ratio: TurnRatio) -> None:
    case = random_case(4)
    tensors = [case[key] for key in ("trained", "old", "advantages", "mask")]
    found = turn_clip_loss(*tensors, torch.arange(6).expand(9, 6), ratio=ratio, dual_clip=3.0)
    torch.testing.assert_close(found.loss, ppo_clip_loss(*tensors, dual_clip=3.0).loss, **CLOSE)


def test_turn_loss_by_mean_is_gspo_if_each_row_is_one_turn() -> None:
    case = random_case(4)
    tensors = [case[key] for key in ("trained", "old", "advantages", "mask")]
    one_turn = torch.zeros_like(case["turn_ids"])
    found = turn_clip_loss(*tensors, one_turn, clip_low=0.1, clip_high=0.1, aggregation="seq-mean-token-mean")
    expected = gspo_loss(*tensors, clip_low=0.1, clip_high=0.1)
    torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
    assert found.diagnostics.floats() == pytest.approx(expected.diagnostics.floats())


def test_turn_ids_must_be_integers_of_the_shape_of_the_mask() -> None:
    case = random_case(4)
    tensors = [case[key] for key in ("trained", "old", "advantages", "mask")]
    with pytest.raises(ConfigError, match="turn_ids must be integers"):
        turn_clip_loss(*tensors, case["turn_ids"].double())
    with pytest.raises(ConfigError, match="turn_ids has shape"):
        turn_clip_loss(*tensors, case["turn_ids"][:1])


def test_shared_counts_make_the_averaged_gradient_equal_the_global_gradient() -> None:
    case = random_case(9)
    whole = whole_of("ppo", case)
    of_all = evaluated("ppo", [case], "token-mean", whole)[1]
    share = type(whole)(whole.tokens / 3, whole.sequences / 3, NORM_LENGTH)
    per_process = evaluated("ppo", micro_batches(case, 3), "token-mean", share)[1]
    torch.testing.assert_close(torch.cat(per_process) / 3, of_all[0], **CLOSE)
