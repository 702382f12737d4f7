"""Supervised training on the action tokens of episodes: the warm start of a small model, before reinforcement.

What other episodes' policies did is made likelier: the loss is the mean negative log-probability of the tokens where
`action_mask` is 1, or of what label smoothing makes of it. Logits are computed at those tokens alone
(`rl.learner.forward`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.learner.config import PPOConfig, Precision, lr_factor
from reward_kit.rl.learner.forward import Scorer, restricted
from reward_kit.rl.learner.optimizer import adamw, clip_gradients, set_lr, widen
from reward_kit.rl.learner.training_rows import MicroBatch, Restriction, TrainingRows
from reward_kit.tokens import TokenBatch, micro_batches
from reward_kit.tokens.columns import Array, Ints
from reward_kit.torch_cpu import keep_freed_memory, no_denormals

OnFailure = Callable[[TokenBatch, Mapping[str, Any]], object]

_POOL = 64
"""Batches' worth of rows that are sorted by length together: little padding, and batches that differ in every epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """The options of supervised training. The learning rate rises, then follows a cosine down, over all steps.

    Attributes:
        epochs: passes over the rows.
        max_tokens_per_batch: of an optimizer step, padding included; a row that is longer is a batch of its own.
        max_tokens_per_micro_batch: what goes through the model at once; None: a batch.
        lr: the greatest learning rate.
        warmup_share: the share of all steps over which it rises.
        min_lr_share: the share of `lr` that is left at the end.
        betas: of AdamW.
        weight_decay: of AdamW, on matrices.
        max_grad_norm: the gradient is scaled down to this 2-norm; None leaves it.
        use_allowed_ids: where rows say what a constraint allowed, the loss is of the distribution over that, and a
            token that had no other beside it is not trained on: its loss is 0 whatever the weights.
        label_smoothing: the share of the target that is spread evenly over what could have come: what a constraint
            allowed, with `use_allowed_ids` and where one was at work, else the vocabulary. A model keeps trying then.
        precision: "bfloat16" runs the model in autocast; weights and loss are float32. None: "bfloat16" for a model
            that is given in it, else "float32".
        seed: of the order.

    Raises:
        ConfigError: a value is out of range.
    """

    epochs: int = 1
    max_tokens_per_batch: int = 8_192
    max_tokens_per_micro_batch: int | None = None
    lr: float = 1e-3
    warmup_share: float = 0.05
    min_lr_share: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    use_allowed_ids: bool = False
    label_smoothing: float = 0.0
    precision: Precision | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch is at least 1; got {self.max_tokens_per_batch}")
        if not 0.0 <= self.warmup_share < 1.0:
            raise ConfigError(f"warmup_share is in [0, 1); got {self.warmup_share}")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing is in [0, 1); got {self.label_smoothing}")
        self.learner_options(1)

    def learner_options(self, steps: int) -> PPOConfig:
        """The same as the learner's parts take it: the optimizer, the schedule and the forward pass."""
        return PPOConfig(
            epochs=self.epochs,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            schedule="cosine",
            warmup=math.ceil(self.warmup_share * steps),
            min_lr_share=self.min_lr_share,
            precision=self.precision,
        )


class SFTProgress(NamedTuple):
    """How far it is, after an optimizer step; steps count from 1 and over all epochs."""

    epoch: int
    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_second: float


class Evaluation(NamedTuple):
    """How well a model says what was done, each token after the true ones before it.

    Attributes:
        loss: the mean negative log-probability of an action token, in nats.
        token_accuracy: the share of action tokens that are the likeliest.
        action_accuracy: the share of actions all of whose tokens are.
        tokens: action tokens.
        actions: runs of them.
    """

    loss: float
    token_accuracy: float
    action_accuracy: float
    tokens: int
    actions: int


class EpochReport(NamedTuple):
    """One pass: the mean loss of the tokens that it trained, and the held-out rows after it, None without any."""

    epoch: int
    loss: float
    seconds: float
    held_out: Evaluation | None


def fit(
    model: nn.Module,
    rows: TokenBatch,
    config: SFTConfig,
    *,
    held_out: TokenBatch | None = None,
    progress: Callable[[SFTProgress], object] | None = None,
    on_failure: OnFailure | None = None,
    device: torch.device | str = "cpu",
) -> list[EpochReport]:
    """Train a model on what was done in episodes, in place and without dropout; the same seed gives the same weights.

    Weights in half precision become float32, as in `PPOLearner`.

    On the CPU numbers too small to be normal count as 0 meanwhile, since they can make a model that was begun badly
    forty times slower, and the process keeps the memory that it frees.

    Args:
        model: a causal language model of `transformers`; it is moved to the device.
        rows: of `build_rows`.
        config: the options.
        held_out: rows to measure with after each epoch; see `split_rows`.
        progress: called after each optimizer step.
        on_failure: called with the rows and the facts where a loss or gradient is not finite, to keep them for study.
        device: where to train.

    Raises:
        ConfigError: no row has an action token.
        TrainingError: a loss or gradient is not finite; the step in question is not made.
    """
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    training = _Training(model, rows, config, torch.device(device), progress, on_failure)
    reports = []
    with no_denormals():
        for epoch in range(config.epochs):
            began = time.perf_counter()
            loss = training.epoch(epoch)
            seconds = time.perf_counter() - began
            measured = evaluate(model, held_out, config, device=device) if held_out is not None else None
            reports.append(EpochReport(epoch, loss, seconds, measured))
    return reports


class _Training:
    """The state of one `fit`: its optimizer, its batches, its place in the schedule."""

    def __init__(
        self,
        model: nn.Module,
        rows: TokenBatch,
        config: SFTConfig,
        device: torch.device,
        progress: Callable[[SFTProgress], object] | None,
        on_failure: OnFailure | None,
    ) -> None:
        self._rows, self._device, self._progress, self._on_failure = rows, device, progress, on_failure
        self._flat = _flat(rows, config).without_forced(keep_firsts=False)
        if not self._flat.count:
            raise ConfigError("no row has an action token; make rows of episodes whose tokens are recorded")
        generator = np.random.default_rng(config.seed)
        lengths = np.where(self._flat.counts_B > 0, self._flat.lengths_B, 0)
        self._epochs = [_batches(lengths, config.max_tokens_per_batch, generator) for _ in range(config.epochs)]
        self._steps = sum(map(len, self._epochs))
        self._config = config.learner_options(self._steps).for_weights(next(model.parameters()).dtype)
        model.to(device).eval()
        widen(model)
        self._smoothing = config.label_smoothing
        scorer = _Smoothing if self._smoothing else Scorer
        self._scorer, self._optimizer = scorer(model, self._config), adamw(model, self._config)
        self._step = 0

    def epoch(self, epoch: int) -> float:
        """One pass; the mean loss of its tokens."""
        total, tokens, began = 0.0, 0, time.perf_counter()
        for chosen in self._epochs[epoch]:
            factor = lr_factor(self._config, self._step, self._steps)
            set_lr(self._optimizer, factor)
            loss = self._optimizer_step(chosen)
            count = int(self._flat.counts_B[chosen].sum())
            total, tokens = total + loss * count, tokens + int(self._flat.lengths_B[chosen].sum())
            if self._progress is not None:
                speed = tokens / (time.perf_counter() - began)
                self._progress(SFTProgress(epoch, self._step, self._steps, loss, self._config.lr * factor, speed))
        return total / self._flat.count

    def _optimizer_step(self, chosen: Ints) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        count, losses = int(self._flat.counts_B[chosen].sum()), []
        for part in _parts(self._flat, chosen, self._config.max_tokens_per_micro_batch):
            loss = self._loss(self._flat.part(part, self._device)) / count
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        norm = clip_gradients(parameters, self._config.max_grad_norm)
        total, size = torch.stack([torch.stack(losses).sum(), norm.to(losses[0].dtype)]).tolist()
        if not (math.isfinite(total) and math.isfinite(size)):
            self._fail(chosen, total, size)
        self._optimizer.step()
        self._step += 1
        return float(total)

    def _loss(self, part: MicroBatch) -> Tensor:
        """The sum over the part's tokens."""
        scores = self._scorer(part, entropies=bool(self._smoothing))
        loss = -scores.logprobs_N.sum()
        if self._smoothing:
            assert scores.entropies_N is not None
            loss = (1.0 - self._smoothing) * loss - self._smoothing * scores.entropies_N.sum()
        return loss

    def _fail(self, chosen: Ints, loss: float, norm: float) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        facts = {"loss": loss, "grad_norm": norm, "optimizer_step": self._step}
        kept = self._on_failure(self._rows[chosen], facts) if self._on_failure is not None else None
        where = f"; the batch is kept in {kept}" if kept is not None else ""
        raise TrainingError(f"step {self._step}: the loss is {loss:g}, the gradient's norm {norm:g}{where}")


def _flat(rows: TokenBatch, config: SFTConfig) -> TrainingRows:
    if not config.use_allowed_ids:
        others = {key: values for key, values in rows.non_tensor_batch.items() if key != "allowed_ids"}
        rows = replace(rows, non_tensor_batch=others)
    return TrainingRows.of(rows, "action_mask")


def _batches(lengths_B: Ints, budget: int, generator: np.random.Generator) -> list[Ints]:
    """The rows with a length, in batches of rows of like length, in random order."""
    order = generator.permutation(np.flatnonzero(lengths_B))
    pool = max(_POOL * budget // max(int(lengths_B[order].mean()), 1), 1)
    batches: list[Ints] = []
    for start in range(0, len(order), pool):
        batches += _cut(order[start : start + pool], lengths_B, budget)
    return [batches[place] for place in generator.permutation(len(batches))]


def _cut(rows: Ints, lengths_B: Ints, budget: int) -> Iterator[Ints]:
    """In order of length, as many in a batch as fit when padded to the longest."""
    rows = rows[np.argsort(lengths_B[rows], kind="stable")]
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or (stop + 1 - start) * lengths_B[rows[stop]] > budget:
            yield rows[start:stop]
            start = stop


def _parts(flat: TrainingRows, chosen: Ints, budget: int | None) -> list[Ints]:
    """These rows in parts that go through the model at once; a row beyond the budget is a part of its own."""
    lengths = flat.lengths_B[chosen]
    parts = (
        micro_batches(lengths, max(budget, int(lengths.max())), padded=True) if budget is not None else [slice(None)]
    )
    return [chosen[part] for part in parts]


class _Grading(Scorer):
    """Says in the place of the entropies, which nobody asks for here, which tokens are the likeliest."""

    def _statistics(
        self, logits_NV: Tensor, targets_N: Tensor, restriction: Restriction | None, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        if restriction is not None:
            logits_NV = restricted(logits_NV, restriction)
        logprobs_NV = logits_NV.float().log_softmax(dim=-1)
        chosen_N = logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
        return chosen_N, (chosen_N >= logprobs_NV.amax(dim=-1)).float()


class _Smoothing(Scorer):
    """Says in the place of the entropies the mean log-probability of what could have come, with its gradient."""

    def _statistics(
        self, logits_NV: Tensor, targets_N: Tensor, restriction: Restriction | None, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        logits_NV = logits_NV.float()
        means_N = logits_NV.mean(dim=-1)
        if restriction is not None:
            means_N = means_N.index_copy(0, restriction.tokens_K, _allowed_means(logits_NV, restriction))
            logits_NV = restricted(logits_NV, restriction)
        sums_N = logits_NV.logsumexp(dim=-1)
        return logits_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) - sums_N, means_N - sums_N


def _allowed_means(logits_NV: Tensor, restriction: Restriction) -> Tensor:
    """(K,) the mean logit of what each restricted token could have been."""
    weights_SV = logits_NV.new_zeros(restriction.sets, logits_NV.shape[1])
    weights_SV[restriction.owners_A, restriction.ids_A] = 1.0
    weights_SV /= weights_SV.sum(dim=-1, keepdim=True)
    rows_KV = logits_NV.index_select(0, restriction.tokens_K)
    means: Tensor = torch.linalg.vecdot(rows_KV, weights_SV.index_select(0, restriction.sets_K))
    return means


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: TokenBatch, config: SFTConfig | None = None, *, device: torch.device | str = "cpu"
) -> Evaluation:
    """Measure how well a model says what was done in these rows.

    Args:
        model: a causal language model of `transformers`.
        rows: of `build_rows`.
        config: of which precision, the sizes of batches and `use_allowed_ids` are read.
        device: where the model is.

    Raises:
        ConfigError: no row has an action token.
    """
    config = config or SFTConfig()
    flat, options = _flat(rows, config), config.learner_options(1)
    if not flat.count:
        raise ConfigError("no row has an action token; make rows of episodes whose tokens are recorded")
    scorer, budget = _Grading(model, options), config.max_tokens_per_micro_batch or config.max_tokens_per_batch
    logprobs, right = np.zeros(flat.count), np.zeros(flat.count, dtype=np.bool_)
    for chosen in _parts(flat, np.flatnonzero(flat.counts_B), budget):
        scores, places = scorer(flat.part(chosen, torch.device(device))), flat.tokens_of(chosen)
        logprobs[places] = scores.logprobs_N.cpu().numpy()
        assert scores.entropies_N is not None
        right[places] = scores.entropies_N.cpu().numpy() > 0.0
    actions = np.cumsum(flat.is_first_N) - 1
    whole = np.bincount(actions, weights=~right) == 0
    return Evaluation(-float(logprobs.mean()), float(right.mean()), float(whole.mean()), flat.count, len(whole))


def split_rows(rows: TokenBatch, share: float, *, seed: int = 0) -> tuple[TokenBatch, TokenBatch]:
    """Rows to train on and rows to hold out, parted by group, so that no start is in both.

    Args:
        rows: of `build_rows`.
        share: of the groups (or of the rollouts that have none) to hold out, at least one.
        seed: which.

    Raises:
        ConfigError: the share is not in (0, 1), or there are fewer than two groups.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(f"share is in (0, 1); got {share}")
    names, group_B = np.unique(rows.non_tensor_batch["uid"].astype(str), return_inverse=True)
    if len(names) < 2:
        raise ConfigError("there is one group, and nothing could be held out; give rows of two or more")
    count = min(max(round(share * len(names)), 1), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(len(names))[:count]
    is_held_out: Array = np.isin(group_B, chosen)
    return rows[~is_held_out].trim(), rows[is_held_out].trim()
