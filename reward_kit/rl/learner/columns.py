"""What an update needs of its rows besides what was recorded: log-probabilities and values before its first step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.forward import Scorer
from reward_kit.rl.learner.lora import without_adapters
from reward_kit.rl.learner.sharding import Processes
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.losses import truncated_importance_weights, within_cap
from reward_kit.tokens import micro_batches
from reward_kit.tokens.columns import Array, Ints
from reward_kit.torch_cpu import keep_freed_memory


class Scored(NamedTuple):
    """(N,) log-probabilities; values on each action's first token, 0 elsewhere, and None without a critic."""

    logprobs_N: Array
    values_N: Array | None


class Place(NamedTuple):
    """Where modules run: the device, the type of real numbers, a part's budget, and the processes that share parts."""

    device: torch.device
    dtype: torch.dtype
    budget: int
    processes: Processes

    @classmethod
    def of(cls, module: nn.Module, config: PPOConfig, device: torch.device | str) -> Place:
        """Where a module is trained; on a CPU the process is told to keep what it frees."""
        where = torch.device(device)
        if where.type == "cpu":
            keep_freed_memory()
        first = next(module.parameters(), torch.empty(0))
        budget = config.max_tokens_per_micro_batch or (1_024 if where.type == "cpu" else 16_384)
        return cls(where, torch.promote_types(first.dtype, torch.float32), budget, Processes.current())

    def parts_of(self, rows: TrainingRows, chosen: Ints) -> list[Ints]:
        """The rows of each part of this process: within the budget, those of like length together.

        Args:
            rows: all rows.
            chosen: which of them.
        """
        lengths = rows.lengths_B[chosen]
        # A row that is longer than the budget goes alone; nothing could be trained on it otherwise.
        parts = micro_batches(lengths, max(self.budget, int(lengths.max(initial=1))), padded=True)
        return self.processes.share([chosen[part] for part in parts])


@torch.no_grad()
def score_rows(scorer: Scorer, rows: TrainingRows, place: Place) -> Scored:
    """What the module says now of all tokens that take part."""
    parts = place.parts_of(rows, np.flatnonzero(rows.counts_B))
    logprobs: list[Tensor] = []
    values: list[Tensor] = []
    for chosen in parts:
        scores = scorer(rows.part(chosen, place.device, place.dtype), entropies=False)
        logprobs.append(scores.logprobs_N)
        values += [] if scores.values_M is None else [scores.values_M]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *(rows.tokens_of(chosen) for chosen in parts)])
    found = place.processes.added(_placed(logprobs, order, rows.count))
    if not scorer.has_values:
        return Scored(found, None)
    firsts = order[rows.is_first_N[order]]
    return Scored(found, place.processes.added(_placed(values, firsts, rows.count)))


def _placed(parts: list[Tensor], places: Ints, count: int) -> Array:
    found = torch.cat(parts or [torch.zeros(0)]).cpu().numpy()  # the only wait for the device
    placed = np.zeros(count, dtype=found.dtype)
    placed[places] = found
    return placed


def prepared(
    rows: TrainingRows, scorer: Scorer, reference: Scorer | None, config: PPOConfig, place: Place
) -> TrainingRows:
    """The rows with the columns that the losses read besides.

    `old`: what the ratio is taken to. `recomputed`: the module's own log-probabilities before the update, where the
    options ask for them. `reference`, `weights`, `is_within` and `old_values`: where they are used.

    Raises:
        TrainingError: a sampled token has no log-probability, or an action of a critic no return or recorded value.
        ConfigError: an array is missing.
    """
    _check_recorded(rows, config.uses_sampler)
    columns: dict[str, Array] = {"old": rows.columns["logprobs"]}
    learns_values = scorer.has_values and config.value_coefficient > 0.0
    recorded = learns_values and config.old_values == "recorded" and "values" in rows.columns
    if config.recomputes or (learns_values and not recorded):
        now = score_rows(scorer, rows, place)
        if config.recomputes:
            columns |= {"old": now.logprobs_N, "recomputed": now.logprobs_N}
        if now.values_N is not None:
            columns["old_values"] = now.values_N
    if recorded:
        columns["old_values"] = rows.columns["values"]
    if learns_values:
        _check_values(rows, columns["old_values"])
    if reference is not None:
        with _as_reference(reference, scorer):
            columns["reference"] = score_rows(reference, rows, place).logprobs_N
    return rows.with_columns(columns | _weights(rows, columns["old"], config))


def _as_reference(reference: Scorer, scorer: Scorer) -> AbstractContextManager[None]:
    """With adapters the module itself is the reference, without them."""
    return without_adapters(scorer.module) if reference is scorer else nullcontext()


def _weights(rows: TrainingRows, old_N: Array, config: PPOConfig) -> dict[str, Array]:
    """Importance weights from the sampler to `old`, or which tokens "decoupled" keeps."""
    # In the loss's own type, so that both draw the line at the cap alike.
    old, sampler = (torch.from_numpy(one.astype(old_N.dtype))[None] for one in (old_N, rows.columns["logprobs"]))
    ids, everything = torch.from_numpy(rows.rows_N)[None], torch.ones(1, rows.count, dtype=torch.long)
    if config.importance is not None:
        found = truncated_importance_weights(
            old, sampler, everything, level=config.importance, cap=config.importance_cap, sequence_ids_BT=ids
        )
        return {"weights": found.weights_BT[0].numpy()}
    if config.loss == "decoupled" and config.beyond_cap == "exclude":
        return {"is_within": within_cap(old, sampler, everything, config.decoupled_cap)[0].numpy()}
    return {}


def _check_recorded(rows: TrainingRows, uses_sampler: bool) -> None:
    for key in ("logprobs", "advantages"):
        if key not in rows.columns:
            raise ConfigError(f"PPO needs {key!r} in the rows; make them with build_rows")
    if uses_sampler and not np.isfinite(rows.columns["logprobs"]).all():
        raise TrainingError(
            "a sampled token has no log-probability; PPO needs a policy that records `logprobs`, or "
            "old_logprobs='recomputed'"
        )


def _check_values(rows: TrainingRows, old_values_N: Array) -> None:
    if "returns" not in rows.columns:
        raise ConfigError("a critic learns from 'returns' in the rows; make them with build_rows, of steps with credit")
    if not np.isfinite(old_values_N[rows.is_first_N]).all():
        raise TrainingError("an action has no recorded value; say old_values='recomputed', or record value estimates")
