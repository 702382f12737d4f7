"""Random batches for the losses, every loss under one signature, and splits and layouts of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from reward_kit.rl.kl import KLEstimator, kl_loss
from reward_kit.rl.loss_terms import Aggregation, GlobalBatch, Loss, merge_diagnostics
from reward_kit.rl.losses import (
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    entropy_loss,
    gmpo_loss,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
    turn_clip_loss,
    value_loss,
    within_cap,
)

Case = dict[str, Tensor]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
NORM_LENGTH = 11.0
CAP = 1.3


def random_case(seed: int, rows: int = 9, width: int = 6) -> Case:
    """Return rows of various lengths with masks; the second is fully masked, the third has one token."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn((rows, width), generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    attention_mask = torch.arange(width) < lengths
    mask = (torch.rand((rows, width), generator=generator) < 0.7) & attention_mask
    mask[0, 0] = True
    mask[1:3] = False
    mask[2, 0] = True
    old = draw() - 2.0
    return {
        "trained": old + 0.3 * draw(),
        "old": old,
        "behaviour": old + 0.3 * draw(),
        "advantages": draw(),
        "weights": draw().exp(),
        "mask": mask,
        "attention_mask": attention_mask,
        # Turns of two positions; the ids repeat in each row.
        "turn_ids": (torch.arange(width) // 2).expand(rows, width).clone(),
        "row_ids": torch.arange(rows).unsqueeze(1).expand(rows, width).clone(),
    }


def _policy(loss: Callable[..., Loss], case: Case, **options: Any) -> Loss:
    return loss(case["trained"], case["old"], case["advantages"], case["mask"], **options)


def _decoupled(case: Case, **options: Any) -> Loss:
    tensors = (case["trained"], case["old"], case["behaviour"], case["advantages"], case["mask"])
    return decoupled_ppo_loss(*tensors, clip_low=0.1, clip_high=0.3, cap=CAP, **options)


def _weighted(case: Case, **options: Any) -> Loss:
    return _policy(ppo_clip_loss, case, dual_clip=1.5, weights_BT=case["weights"], **options)


def _kl(estimator: KLEstimator, case: Case, **options: Any) -> Loss:
    return kl_loss(case["trained"], case["old"], case["mask"], estimator=estimator, **options)


def _turns(case: Case, **options: Any) -> Loss:
    return _policy(partial(turn_clip_loss, turn_ids_BT=case["turn_ids"]), case, **options)


def _value(case: Case, **options: Any) -> Loss:
    return value_loss(case["trained"], case["old"], case["advantages"], case["mask"], **options)


def _entropy(case: Case, **options: Any) -> Loss:
    return entropy_loss(case["trained"], case["mask"], **options)


LOSSES: dict[str, Callable[..., Loss]] = {
    "ppo": partial(_policy, ppo_clip_loss, clip_low=0.1, clip_high=0.3),
    "ppo dual weighted": _weighted,
    "gspo": partial(_policy, gspo_loss, clip_low=0.1, clip_high=0.1),
    "turn mean": partial(_turns, clip_low=0.1, clip_high=0.2),
    "turn product": partial(_turns, ratio="product", clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    "cispo": partial(_policy, cispo_loss, clip_low=0.2, clip_high=0.4),
    "sapo": partial(_policy, sapo_loss, temperature_positive=0.8, temperature_negative=1.5),
    "gmpo": partial(_policy, gmpo_loss, clip_low=0.1, clip_high=0.3),
    "dppo tv": partial(_policy, dppo_loss, clip_low=0.01, clip_high=0.03, cap=1.2),
    "dppo kl": partial(_policy, dppo_loss, divergence="kl", clip_low=0.002, clip_high=0.004),
    "decoupled exclude": _decoupled,
    "decoupled truncate": partial(_decoupled, beyond_cap="truncate", dual_clip=1.5),
    **{f"kl {estimator}": partial(_kl, estimator) for estimator in ESTIMATORS},
    "value": partial(_value, clip=0.2),
    "value unclipped": partial(_value, clip=None),
    "entropy": _entropy,
}


def mask_that_counts(name: str, case: Case) -> Tensor:
    """Return the mask of the tokens that a loss is divided by."""
    if name == "decoupled exclude":
        return within_cap(case["old"], case["behaviour"], case["mask"], CAP)
    return case["mask"]


def whole_of(name: str, case: Case) -> GlobalBatch:
    return GlobalBatch.of(mask_that_counts(name, case), case["row_ids"], norm_length=NORM_LENGTH)


def packed(case: Case) -> Case:
    """Return the tokens of all rows in one row, without padding."""
    return {key: values[case["attention_mask"]].unsqueeze(0) for key, values in case.items()}


def micro_batches(case: Case, parts: int) -> list[Case]:
    """Return the rows in this many parts, the first ones longer if the division has a remainder."""
    chunks = [torch.tensor_split(values, parts) for values in case.values()]
    return [dict(zip(case, values, strict=True)) for values in zip(*chunks, strict=True)]


def evaluated(
    name: str, parts: list[Case], aggregation: Aggregation, whole: GlobalBatch
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """Return the loss summed over the parts, each part's unpadded token gradients, and merged diagnostics."""
    total, gradients, found = torch.zeros((), dtype=torch.float64), [], []
    for part in parts:
        leaf = part["trained"].clone().requires_grad_()
        options = {"aggregation": aggregation, "global_batch": whole, "sequence_ids_BT": part["row_ids"]}
        loss, diagnostics = LOSSES[name](part | {"trained": leaf}, **options)
        loss.backward()
        assert leaf.grad is not None
        total = total + loss.detach()
        gradients.append(leaf.grad[part["attention_mask"]])
        found.append(diagnostics)
    return total, gradients, merge_diagnostics(found).floats()


EVERY_LOSS_AND_AGGREGATION = list(itertools.product(LOSSES, AGGREGATIONS))
