"""Test loss diagnostics: definitions, merging, and empty statistics."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.loss_terms import (
    Diagnostics,
    Kind,
    Statistic,
    effective_size_statistic,
    mean_statistic,
    merge_diagnostics,
    spread_statistics,
)
from reward_kit.rl.losses import cispo_loss, decoupled_ppo_loss, gspo_loss, ppo_clip_loss, value_loss
from tests.devices import tolerance
from tests.rl.loss_cases import LOSSES, random_case

pytestmark = pytest.mark.device


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


def test_ppo_diagnostics_match_their_definitions() -> None:
    case = random_case(2, rows=30)
    tensors = (case[key] for key in ("trained", "old", "advantages", "mask"))
    found = ppo_clip_loss(*tensors, clip_low=0.1, clip_high=0.15, dual_clip=1.3).diagnostics
    ratio, sign = (case["trained"] - case["old"]).exp()[case["mask"]], case["advantages"][case["mask"]]
    low, high, dual = (ratio < 0.9) & (sign < 0), (ratio > 1.15) & (sign > 0), (ratio > 1.3) & (sign < 0)
    assert found["tokens"] == case["mask"].sum()
    for name, clipped in {"_low": low, "_high": high, "": low | high, "_dual": dual}.items():
        assert 0.0 < found[f"clip_fraction{name}"] < 1.0
        close(found[f"clip_fraction{name}"], clipped.double().mean())
    close(found["approx_kl"], (ratio - 1 - ratio.log()).mean())
    close(found["approx_kl_k1"], -ratio.log().mean())
    close(found["effective_sample_size"], ratio.sum() ** 2 / (ratio**2).sum())
    for name, expected in {"min": ratio.min(), "max": ratio.max(), "mean": ratio.mean()}.items():
        close(found[f"ratio_{name}"], expected)


def test_a_clip_fraction_counts_the_tokens_without_a_gradient() -> None:
    case = random_case(2)
    leaf = case["trained"].requires_grad_()
    found = ppo_clip_loss(leaf, case["old"], case["advantages"], case["mask"], dual_clip=1.3)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    silent = (gradient == 0.0)[case["mask"]].double().mean()
    close(found.diagnostics["clip_fraction"] + found.diagnostics["clip_fraction_dual"], silent)


def test_effective_sample_size_of_equal_and_of_dominated_ratios() -> None:
    ones = torch.ones(1, 8)
    assert ppo_clip_loss(ones, ones, ones, ones).diagnostics["effective_sample_size"] == 8.0
    ahead = ones + torch.tensor([15.0] + 7 * [0.0])
    found = ppo_clip_loss(ahead, ones, ones, ones).diagnostics["effective_sample_size"]
    assert found.item() == pytest.approx(1.0, abs=1e-3)


def test_gspo_diagnostics_use_sequence_ratios() -> None:
    case = random_case(3)
    found = gspo_loss(*(case[key] for key in ("trained", "old", "advantages", "mask"))).diagnostics
    rows = [(case["trained"] - case["old"])[b, row].mean().exp() for b, row in enumerate(case["mask"]) if row.any()]
    ratios = torch.stack(rows)
    close(found["ratio_max"], ratios.max())
    close(found["ratio_mean"], ratios.mean())
    close(found["effective_sample_size"], ratios.sum() ** 2 / (ratios**2).sum())
    assert found["tokens"] == case["mask"].sum()


def test_cispo_counts_clipped_weights_regardless_of_the_advantage() -> None:
    case = random_case(3)
    tensors = (case[key] for key in ("trained", "old", "advantages", "mask"))
    found = cispo_loss(*tensors, clip_low=0.2, clip_high=0.2).diagnostics
    ratio = (case["trained"] - case["old"]).exp()[case["mask"]]
    close(found["clip_fraction_low"], (ratio < 0.8).double().mean())
    close(found["clip_fraction_high"], (ratio > 1.2).double().mean())


def test_decoupled_ppo_reports_excluded_tokens() -> None:
    case = random_case(4)
    tensors = [case[key] for key in ("trained", "old", "behaviour", "advantages", "mask")]
    found = decoupled_ppo_loss(*tensors, cap=1.3).diagnostics
    weights = (case["old"] - case["behaviour"]).exp()[case["mask"]]
    close(found["weight_capped_fraction"], (weights > 1.3).double().mean())
    assert found["tokens"] == (weights <= 1.3).sum() and found["weight_max"] <= 1.3
    truncated = decoupled_ppo_loss(*tensors, cap=1.3, beyond_cap="truncate").diagnostics
    assert truncated["tokens"] == len(weights) and truncated["weight_max"] == 1.3


def test_value_loss_diagnostics_describe_the_critic() -> None:
    case = random_case(5)
    values, old, returns, mask = (case[key] for key in ("trained", "old", "advantages", "mask"))
    leaf = values.clone().requires_grad_()
    loss, found = value_loss(leaf, old, returns, mask, clip=0.2)
    (gradient,) = torch.autograd.grad(loss, leaf)
    close(found["value_clip_fraction"], (gradient == 0.0)[mask].double().mean())
    close(found["value_error"], (values - returns)[mask].abs().mean())
    close(found["value_mean"], values[mask].mean())
    close(found["return_mean"], returns[mask].mean())


def described(values: Tensor) -> Diagnostics:
    return Diagnostics({**spread_statistics("x", values), "size": effective_size_statistic(values)})


@given(st.lists(st.lists(st.floats(0.01, 100)), min_size=1, max_size=5))
def test_merged_diagnostics_equal_diagnostics_of_the_whole(parts: list[list[float]]) -> None:
    found = merge_diagnostics([described(torch.tensor(part, dtype=torch.float64)) for part in parts]).floats()
    values = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    assert found == pytest.approx(described(values).floats(), rel=tolerance(1e-12))
    assert set(found) == ({"x_min", "x_max", "x_mean", "size"} if len(values) else set())


def test_empty_statistics_are_nan_and_not_logged() -> None:
    found = described(torch.zeros(0))
    assert all(value.isnan() for value in found.values()) and found.floats() == {}


def test_nan_values_are_kept() -> None:
    found = merge_diagnostics([described(torch.tensor([math.nan])), described(torch.ones(3))]).floats()
    assert set(found) == {"x_min", "x_max", "x_mean", "size"} and all(math.isnan(value) for value in found.values())


def test_merging_diagnostics_prefers_the_second() -> None:
    one, other = (
        Diagnostics({"a": mean_statistic(torch.ones(1) * n), str(n): mean_statistic(torch.ones(1))}) for n in (1, 2)
    )
    assert (one | other).floats() == {"a": 2.0, "1": 1.0, "2": 1.0}
    assert repr(one | other) == "Diagnostics({'a': 2.0, '1': 1.0, '2': 1.0})"


def test_parts_that_lack_a_name_do_not_count_for_it() -> None:
    merged = merge_diagnostics([Diagnostics({"a": mean_statistic(torch.ones(2))}), Diagnostics({})])
    assert merged["a"] == 1.0 and len(merged) == 1


def test_diagnostics_can_be_pickled() -> None:
    found = described(torch.tensor([1.0, 3.0]))
    assert pickle.loads(pickle.dumps(found)).floats() == found.floats()


@pytest.mark.parametrize("name", LOSSES)
def test_diagnostics_do_not_hold_the_graph(name: str) -> None:
    case = random_case(0)
    found = LOSSES[name](case | {"trained": case["trained"].clone().requires_grad_()})
    assert found.loss.requires_grad
    assert not any(statistic.parts.requires_grad for statistic in found.diagnostics.statistics.values())


@pytest.mark.parametrize("kind", ["mean", "min", "max", "effective"])
def test_merging_different_kinds_under_the_same_name_is_rejected(kind: Kind) -> None:
    parts = [Diagnostics({"a": Statistic(found, torch.ones(2))}) for found in ("total", kind)]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"is a total statistic in one part but a {kind} statistic in another"):
        merge_diagnostics(parts)


def test_a_value_within_the_clip_range_is_not_counted_as_clipped() -> None:
    # `old + (value - old)` is not always `value`: rounding was counted, and differently on different processors.
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(1, 1000, generator=generator) for _ in range(3))
    found = value_loss(values, old, returns, torch.ones(1, 1000), clip=9.0).diagnostics
    assert found["value_clip_fraction"].item() == 0.0
