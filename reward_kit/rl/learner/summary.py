"""The diagnostics of an update as numbers for a log: gathered on the device, read from it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from reward_kit.rl.learner.sharding import Processes
from reward_kit.rl.losses import Diagnostics, merge_diagnostics
from reward_kit.rl.losses.diagnostics import Statistic


class StepRecord(NamedTuple):
    """One optimizer step: its loss, the gradient's norm before it was cut, and what the parts' losses said."""

    loss: float
    grad_norm: float
    parts: Sequence[Diagnostics]


_TERMS = ("policy_loss", "entropy_loss", "kl_loss", "value_loss")
_COUNTS = ("tokens", "value_tokens")


def summary_of(steps: Sequence[StepRecord], epochs: int, processes: Processes) -> dict[str, float]:
    """One number by name.

    Args:
        steps: in order; their `parts` are this process's, all else is of all.
        epochs: over how many passes they are.
        processes: which the parts were dealt out to.

    Returns:
        Means over the optimizer steps of `loss`, of its terms, and of `grad_norm`; `grad_norm_max`; and the merged
        diagnostics of all parts. `effective_share` is the effective sample size as a share of what it counts, and
        `effective_sample_size` that of one epoch.
    """
    if not steps:
        return {}
    merged = merge_diagnostics(processes.merged(_on_host([part for step in steps for part in step.parts])))
    found = merged.floats()
    for name in _TERMS:
        if name in found:
            found[name] /= len(steps)
    for name in _COUNTS:
        found.pop(name, None)
    if "effective_sample_size" in found:
        found["effective_sample_size"] /= epochs
        found["effective_share"] = found["effective_sample_size"] * epochs / _count(merged, "ratio_mean")
    norms = [step.grad_norm for step in steps]
    return found | {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
    }


def _count(merged: Diagnostics, name: str) -> float:
    return float(merged.statistics[name].parts[1])


def _on_host(parts: Sequence[Diagnostics]) -> list[Diagnostics]:
    """The same in float64 on the host, by one copy."""
    statistics = [statistic for part in parts for statistic in part.statistics.values()]
    if not statistics:
        return list(parts)
    flat = torch.cat([statistic.parts for statistic in statistics]).cpu().double()
    pieces = iter(torch.split(flat, [len(statistic.parts) for statistic in statistics]))
    return [
        Diagnostics({name: Statistic(one.kind, next(pieces)) for name, one in part.statistics.items()})
        for part in parts
    ]
