"""PPO on token rows, in reading order: the learner, an optimizer step, the loss of a micro-batch, and diagnostics.

An update trains for multiple epochs on the rows from one batch of episodes. It divides the rows into mini-batches, and
each mini-batch into micro-batches that fit in memory. The axis `_N` contains the tokens in the loss, and the axis `_M`
contains the actions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, RewardKitError, TrainingError, boundary, type_name
from reward_kit.rl.kl import AdaptiveKLCoefficient, kl_loss
from reward_kit.rl.learner.config import PPOConfig, lr_factor
from reward_kit.rl.learner.forward import LogprobModel, Scores
from reward_kit.rl.learner.optimizer import (
    add_adapters,
    check_critic,
    clip_gradients,
    has_adapters,
    make_optimizer,
    rates,
    reorder_optimizer_state,
    set_lr,
    widen,
    without_adapters,
)
from reward_kit.rl.learner.sharding import Processes, load_module, load_optimizer, whole
from reward_kit.rl.learner.training_rows import CHOICE, MicroBatch, TrainingRows
from reward_kit.rl.loss_terms import (
    Aggregation,
    Diagnostics,
    GlobalBatch,
    Loss,
    MaskedTokens,
    Statistic,
    merge_diagnostics,
    spread_statistics,
)
from reward_kit.rl.losses import (
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    entropy_loss,
    gmpo_loss,
    gspo_loss,
    ppo_clip_loss,
    sapo_loss,
    truncated_importance_weights,
    turn_clip_loss,
    value_loss,
    within_cap,
)
from reward_kit.tokens import TokenBatch, micro_batches
from reward_kit.tokens.columns import Array, Floats, Ints
from reward_kit.torch_cpu import keep_freed_memory, no_denormals

logger = logging.getLogger("reward_kit.rl")
OnFailure = Callable[[TokenBatch, Mapping[str, Any]], object]
"""A function that is called with the batch for which an update failed, and with facts about the failure."""


class DeviceContext(NamedTuple):
    """A module's device and floating-point type, the micro-batch budget, and the processes that share a batch."""

    device: torch.device
    dtype: torch.dtype
    budget: int
    processes: Processes

    @classmethod
    def of(cls, module: nn.Module, config: PPOConfig, device: torch.device | str | None) -> DeviceContext:
        """Create the context for a module. On a CPU, the process is also configured to keep freed memory."""
        first = next(module.parameters(), torch.empty(0))
        target = torch.device(device or first.device)
        if target.type == "cpu":
            keep_freed_memory()
        budget = config.max_tokens_per_micro_batch or (1_024 if target.type == "cpu" else 16_384)
        return cls(target, torch.promote_types(first.dtype, torch.float32), budget, Processes.current())

    def split(self, rows: TrainingRows, chosen: Ints, *, is_packed: bool = False) -> list[Ints]:
        """Divide rows into the micro-batches of this process.

        The rows of a micro-batch fit into the token budget and, unless they are packed, have similar lengths.
        """
        lengths = rows.lengths_B[chosen]
        # A row that exceeds the budget gets its own micro-batch, since rows are not split.
        parts = micro_batches(lengths, max(self.budget, int(lengths.max(initial=1))), padded=not is_packed)
        return self.processes.share([chosen[part] for part in parts])


class _StepRecord(NamedTuple):
    """The loss of an optimizer step, the gradient norm before clipping, and the diagnostics of its micro-batches.

    `computed` is the number of tokens, including padding, that pass through the module in this process; `padding` is
    the padding among them.
    """

    loss: float
    grad_norm: float
    parts: Sequence[Diagnostics]
    computed: int
    padding: int


class _StepCounts(NamedTuple):
    """The divisors for the losses in an optimizer step."""

    policy: GlobalBatch  # for the policy loss; "decoupled" excludes some tokens
    tokens: GlobalBatch  # for losses over all tokens
    actions: GlobalBatch  # for the critic's loss, in which an action counts once


class PPOLearner:
    """Updates a module on batches of rows.

    Args:
        module: the module to train in place. It can be a causal language model from `transformers`, a
            `PolicyWithValue`, or any module that maps (ids_BT, attention_mask_BT) to logits_BTV. Like the sampler, it
            runs without dropout. Trainable half-precision weights are converted to float32.
        config: the options.
        reference: a separate module for the KL divergence. It is required if the options or the diagnostics use the
            divergence. If None and the module has adapters, the module without its adapters is used.
        seed: the random seed for the order of mini-batches and for new adapters.
        device: the device to which the module is moved. If None, the module stays on its device.
        total_steps: the number of updates, which is required by schedules that end. With `math.inf`, schedules follow
            only the `progress` passed to `update`.
        on_failure: a function that saves a batch for debugging. Before a `TrainingError` for a non-finite loss or
            gradient is raised, the function is called with the rows and a mapping `facts`. `facts["rows"]` contains the
            indices of the rows in the mini-batch.

    Raises:
        ConfigError: If the module cannot be trained with these options.
    """

    def __init__(
        self,
        module: nn.Module,
        config: PPOConfig,
        *,
        reference: nn.Module | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        total_steps: float | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module must be a torch module, such as policy.module, got {type_name(module)}")
        self.module, self.total_steps, self.on_failure = module, total_steps, on_failure
        self.config = config = config.for_weights(next(module.parameters(), torch.empty(0)).dtype)
        self._context = DeviceContext.of(module, config, device)
        module.to(self._context.device)
        if config.lora is not None:
            add_adapters(module, config.lora, seed)
        widen(module)
        self._model = LogprobModel(module, config)
        self._reference: LogprobModel | None = None
        if reference is module:
            raise ConfigError("the reference is the module that is being trained; pass a copy: copy.deepcopy(module)")
        if reference is not None:
            self._context.processes.same_weights(reference.to(self._context.device))
            self._reference = LogprobModel(reference.eval().requires_grad_(False), config)
        elif config.kl_coefficient and has_adapters(module):
            self._reference = self._model  # without its adapters the module is unchanged
        if config.kl_coefficient and self._reference is None:
            raise ConfigError("kl_coefficient requires a reference model; pass reference=…")
        check_critic(config, has_values=self._model.has_values)
        if config.schedule != "constant" and total_steps is None:
            raise ConfigError(f"schedule {config.schedule!r} requires the number of updates; pass total_steps")
        module.eval()  # no dropout
        if config.gradient_checkpointing:
            base: Any = getattr(module, "policy", module)
            if not getattr(base, "supports_gradient_checkpointing", False):
                raise ConfigError(
                    f"{type(base).__name__} does not support gradient checkpointing; remove gradient_checkpointing"
                )
            # Prefer the newer of the two method names.
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in base.modules():
                if getattr(layer, "gradient_checkpointing", False):
                    layer.training = (
                        True  # These layers recompute only in training mode; dropout inside them remains disabled.
                    )
        if config.compile and self._context.processes.is_group:
            logger.warning("ppo.compile: layers that are sharded over processes are not compiled")
        elif config.compile:
            self._model.compile_layers()
        self._context.processes.shard(module, torch.bfloat16 if config.precision == "bfloat16" else torch.float32)
        self.optimizer = make_optimizer(module, config)
        self._parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._generator = torch.Generator().manual_seed(seed)
        self._kl: AdaptiveKLCoefficient | None = None
        if config.kl_target is not None:
            self._kl = AdaptiveKLCoefficient(config.kl_coefficient, target=config.kl_target, horizon=config.kl_horizon)
        self.updates = self.optimizer_steps = 0

    @property
    def _kl_coefficient(self) -> float:
        return self._kl.value if self._kl is not None else self.config.kl_coefficient

    def update(self, rows: TokenBatch, *, version: int, progress: float = 0.0) -> dict[str, float]:
        """Run all epochs on a batch.

        Args:
            rows: the rows that `build_rows` returned.
            version: the module's policy version before the update, as in `policy_versions`.
            progress: the share of training before this update, from 0 to 1, if training is not limited by the number
                of updates.

        Returns:
            The diagnostics; see `docs/reference/ppo.md`. If no token is in the loss, the only diagnostics are `tokens`
            and `optimizer_steps`, and both are 0.

        Raises:
            TrainingError: If a required log-probability is missing, or a loss or gradient is not finite. The optimizer
                step is then skipped, but earlier steps remain in effect. The failed update is not counted, so if it is
                repeated, it uses the same order of rows.
        """
        flat, order = self._trainable_rows(rows), self._generator.get_state()
        diagnostics = {"tokens": 0.0, "optimizer_steps": 0.0}
        try:
            if flat.count:
                with no_denormals():
                    diagnostics = self._make_epochs(flat, rows, version, progress)
            else:
                logger.warning("nothing was learned in this update: %s", _why_empty(rows, flat))
        except BaseException:
            self._generator.set_state(order)
            raise
        self.updates += 1
        return diagnostics

    def _make_epochs(self, flat: TrainingRows, rows: TokenBatch, version: int, progress: float) -> dict[str, float]:
        flat, importance = self._with_loss_columns(flat)
        factor = lr_factor(self.config, self.updates, self.total_steps, progress)
        set_lr(self.optimizer, factor)
        steps: list[_StepRecord] = []
        # Rows without tokens in the loss would cost a forward pass without effect.
        used, size = np.flatnonzero(flat.counts_B), self.config.minibatch_rows
        count = -(-len(used) // size) if size else min(self.config.minibatches or 1, len(used))
        cuts = [size * part for part in range(1, count)] if size else count
        for _ in range(self.config.epochs):
            shuffled = used[torch.randperm(len(used), generator=self._generator).numpy()]
            for chosen in np.array_split(shuffled, cuts):
                record = self._gradients(
                    flat,
                    chosen,
                    policy=self.updates >= self.config.critic_warmup,
                    # The gap is measured before the first change; recomputed log-probabilities already include it.
                    gap=not steps and "recomputed" not in flat.columns,
                    limit=self.config.max_grad_norm,
                )
                self._check_finite(record, rows, chosen, version)
                self.optimizer.step()
                self.optimizer_steps += 1
                steps.append(record)
        measured = _summary(steps, self.config.epochs, self._context.processes) | self._row_diagnostics(flat, version)
        measured |= importance.floats()
        measured["padding_share"] = sum(one.padding for one in steps) / sum(one.computed for one in steps)
        measured |= {"tokens": float(flat.choices), "optimizer_steps": float(len(steps))} | rates(self.config, factor)
        if self._kl is not None and "kl_sequence" in measured:
            self._kl.update(measured["kl_sequence"], int((flat.counts_B > 0).sum()))
        return measured | self.config.limits.alarms(measured)

    def gradients(self, rows: TokenBatch) -> dict[str, float]:
        """Compute the gradient of the loss over all rows, and store it in the `grad` of each parameter.

        No optimizer step is taken. In the diagnostics, `grad_norm` is the norm before clipping.

        Raises:
            TrainingError: If no token is in the loss, or a required log-probability is missing.
        """
        flat = self._trainable_rows(rows)
        if not flat.count:
            raise TrainingError(f"the gradient is empty: {_why_empty(rows, flat)}")
        flat, importance = self._with_loss_columns(flat)
        gap = "recomputed" not in flat.columns
        with no_denormals():
            record = self._gradients(flat, np.flatnonzero(flat.counts_B), policy=True, gap=gap, limit=None)
        return _summary([record], 1, self._context.processes) | importance.floats()

    def logprobs(self, rows: TokenBatch) -> Array:
        """Return log-probabilities under the current module as (B,T) float32, aligned with `input_ids`.

        The result is 0 for tokens that do not belong to an action.
        """
        flat = TrainingRows.of(rows, "action_mask")
        laid: Array = np.zeros(rows.batch["input_ids"].shape, dtype=np.float32)
        with no_denormals():
            logprobs_N, _ = score_rows(self._model, flat, self._context)
        laid.reshape(-1)[flat.flat_N] = logprobs_N
        return laid

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Return a state from which an identical learner can continue exactly.

        If `keep` is false, all tensors are replaced with `None`. This is meant for processes that only help to gather
        shards.
        """
        return {
            "module": whole(self.module.state_dict(), keep=keep),
            "optimizer": whole(self.optimizer.state_dict(), keep=keep),
            "parameters": self._parameter_names(),
            "generator": self._generator.get_state(),
            "kl": self._kl.state_dict() if self._kl is not None else {},
            "updates": self.updates,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. A state contains no options.

        If the state has no adaptive KL coefficient, the coefficient starts from its initial value.

        Raises:
            ConfigError: If the state belongs to a module that has different weights or different trainable weights.
        """
        with boundary(
            ConfigError, "the state belongs to a module with different weights or different trainable weights"
        ):
            load_module(self.module, state["module"])
            names = self._parameter_names()
            moments = reorder_optimizer_state(names, state.get("parameters"), self.optimizer, state["optimizer"])
            load_optimizer(self.optimizer, moments)
        self._generator.set_state(state["generator"])
        if self._kl is not None and state["kl"]:
            self._kl.load_state_dict(state["kl"])
        self.updates, self.optimizer_steps = state["updates"], state["optimizer_steps"]

    def _parameter_names(self) -> list[str]:
        names = {one: name for name, one in self.module.named_parameters()}
        return [names[one] for one in self._parameters]

    def _trainable_rows(self, rows: TokenBatch) -> TrainingRows:
        return TrainingRows.of(rows).without_forced(keep_firsts=self._model.has_values)

    def _with_loss_columns(self, flat: TrainingRows) -> tuple[TrainingRows, Diagnostics]:
        """Add the columns that the losses require but that are not recorded, and compute the importance weights.

        The column `old` is the denominator of the ratio. The column `recomputed` contains the module's
        log-probabilities before the update. The columns `reference`, `weights`, `is_within` and `old_values` are added
        only if the options use them.
        """
        config, recorded = self.config, flat.columns
        if missing := [key for key in ("logprobs", "advantages") if key not in recorded]:
            raise ConfigError(f"the rows have no {missing[0]!r}, which PPO requires; create them with build_rows")
        if config.uses_sampler and not np.isfinite(recorded["logprobs"]).all():
            raise TrainingError(
                "a sampled token has no log-probability; use a policy that records `logprobs`, or set "
                "old_logprobs='recomputed'"
            )
        columns: dict[str, Array] = {"old": recorded["logprobs"]}
        learns_values = self._model.has_values and config.value_coefficient > 0.0
        has_values = learns_values and config.old_values == "recorded" and "values" in recorded
        if config.recomputes or (learns_values and not has_values):
            logprobs_N, values_N = score_rows(self._model, flat, self._context)
            if config.recomputes:
                columns |= {"old": logprobs_N, "recomputed": logprobs_N}
            if values_N is not None:
                columns["old_values"] = values_N
        if has_values:
            columns["old_values"] = recorded["values"]
        if learns_values:
            if "returns" not in recorded:
                raise ConfigError(
                    "the rows have no 'returns', which a critic requires; "
                    "create them with build_rows from steps with credit"
                )
            if not np.isfinite(columns["old_values"][flat.is_first_N]).all():
                raise TrainingError(
                    "an action has no recorded value; "
                    "set old_values='recomputed', or use a policy that records value estimates"
                )
        if self._reference is not None:
            is_own = self._reference is self._model
            with without_adapters(self.module) if is_own else nullcontext():
                columns["reference"] = score_rows(self._reference, flat, self._context)[0]
        # Use the dtype of the loss so that both comparisons with the cap agree.
        old, sampler = (
            torch.from_numpy(one.astype(columns["old"].dtype))[None] for one in (columns["old"], recorded["logprobs"])
        )
        everything, measured = torch.ones(1, flat.count, dtype=torch.long), Diagnostics({})
        if config.importance is not None:
            level, cap, ids_BT = config.importance, config.importance_cap, torch.from_numpy(flat.rows_N)[None]
            weights = truncated_importance_weights(
                old, sampler, everything, level=level, cap=cap, sequence_ids_BT=ids_BT
            )
            columns["weights"], measured = weights.weights_BT[0].numpy(), weights.diagnostics
        elif config.loss == "decoupled" and config.beyond_cap == "exclude":
            columns["is_within"] = within_cap(old, sampler, everything, config.decoupled_cap)[0].numpy()
        return replace(flat, columns={**recorded, **columns}), measured

    def _gradients(
        self, flat: TrainingRows, chosen: Ints, *, policy: bool, gap: bool, limit: float | None
    ) -> _StepRecord:
        """Accumulate the gradient of a mini-batch, and then read the loss and the norm from the device.

        Apart from this read, the CPU waits for the device only in models of `transformers`, once for each padded
        micro-batch; in each layer, if packed rows are computed one after the other; and for "decoupled", which excludes
        tokens. If `policy` is false, only the value head learns. If `gap` is true, the module's log-probabilities are
        compared with the sampler's. If `limit` is not None, the gradient is clipped to this norm.
        """
        self.optimizer.zero_grad(set_to_none=True)
        counts = self._counts(flat, chosen)
        losses: list[Tensor] = []
        diagnostics: list[Diagnostics] = []
        computed = padding = 0
        is_packed = self._model.is_packed
        for rows in self._context.split(flat, chosen, is_packed=is_packed):
            part = flat.part(rows, self._context.device, self._context.dtype, is_packed=is_packed)
            scores = self._model(part, values_only=not policy)
            loss, measured = _micro_batch_loss(scores, part, self.config, counts, self._kl_coefficient, policy=policy)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no annotation for it
            computed += part.ids_BT.numel()
            padding += part.ids_BT.numel() - int(flat.lengths_B[rows].sum())
            losses.append(loss.detach())
            diagnostics.append(measured | _gap(scores.logprobs_N, part) if gap else measured)
        norm = clip_gradients(self._parameters, limit)
        own, size = torch.stack([torch.stack(losses).sum(), norm.to(losses[0].dtype)]).tolist()
        return _StepRecord(float(self._context.processes.added(np.array(own))), size, diagnostics, computed, padding)

    def _counts(self, flat: TrainingRows, chosen: Ints) -> _StepCounts:
        tokens, length = flat.token_indices(chosen), self.config.norm_length
        firsts = tokens[flat.is_first_N[tokens]]
        actions = GlobalBatch(len(firsts), len(chosen))
        if CHOICE in flat.columns:
            tokens = tokens[flat.columns[CHOICE][tokens]]
        everything = GlobalBatch(len(tokens), len(np.unique(flat.rows_N[tokens])), length)
        if "is_within" not in flat.columns:
            return _StepCounts(everything, everything, actions)
        within = tokens[flat.columns["is_within"][tokens]]
        return _StepCounts(GlobalBatch(len(within), len(np.unique(flat.rows_N[within])), length), everything, actions)

    def _check_finite(self, record: _StepRecord, rows: TokenBatch, chosen: Ints, version: int) -> None:
        if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
            return
        gradients = {name: one.grad for name, one in self.module.named_parameters() if one.grad is not None}
        facts = {
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "rows": chosen.tolist(),
            "parameters": [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()],
            "version": version,
            "update": self.updates,
            "optimizer_step": self.optimizer_steps,
        }
        self.optimizer.zero_grad(set_to_none=True)
        problem = f"the loss is {record.loss:g}"
        if math.isfinite(record.loss):
            problem = f"the gradient norm is {record.grad_norm:g} at a loss of {record.loss:g}"
        measured = _summary([record], 1, self._context.processes)
        low, high = (measured.get(name, math.nan) for name in ("ratio_min", "ratio_max"))
        kept = ""
        if self.on_failure is not None and self._context.processes.is_first:
            try:
                path = self.on_failure(rows, facts)
                kept = f"; the batch is saved in {path}" if path is not None else ""
            except (RewardKitError, OSError) as error:  # A full disk must not hide the error.
                kept = f"; the batch could not be saved: {error}"
        raise TrainingError(f"{problem}, with ratios from {low:g} to {high:g}; the optimizer step is skipped{kept}")

    def _row_diagnostics(self, flat: TrainingRows, version: int) -> dict[str, float]:
        """Return the diagnostics computed over all rows."""
        measured: dict[str, float] = {}
        columns = flat.columns
        if flat.forced:
            measured["forced_share"] = flat.forced / (flat.forced + flat.choices)
        if "policy_versions" in columns:
            measured |= version_lag(columns["policy_versions"], version)
        if "recomputed" in columns:
            gap = np.abs(columns["recomputed"] - columns["logprobs"])
            # Unrecorded log-probabilities are not used here.
            gap = gap[np.isfinite(columns["logprobs"]) & columns.get(CHOICE, np.True_)]
            measured |= {"logprob_gap": float(gap.max()), "logprob_gap_mean": float(gap.mean())} if len(gap) else {}
        if "old_values" in columns:
            firsts = flat.is_first_N
            measured |= explained_variance(columns["old_values"][firsts], columns["returns"][firsts])
        if self._reference is not None:
            measured["kl_coefficient"] = self._kl_coefficient
        return measured


@torch.no_grad()
def score_rows(model: LogprobModel, rows: TrainingRows, context: DeviceContext) -> tuple[Array, Array | None]:
    """Return the log-probabilities (N,) and the critic's values (N,).

    Values are 0 except on the first token of each action. If there is no critic, they are `None`.
    """
    parts = context.split(rows, np.flatnonzero(rows.counts_B), is_packed=model.is_packed)
    logprobs: list[Tensor] = []
    values: list[Tensor] = []
    for chosen in parts:
        part = rows.part(chosen, context.device, context.dtype, is_packed=model.is_packed)
        scores = model(part, entropies=False)
        logprobs.append(scores.logprobs_N)
        values += [] if scores.values_M is None else [scores.values_M]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *(rows.token_indices(chosen) for chosen in parts)])

    def laid(pieces: list[Tensor], indices: Ints) -> Array:
        flat = torch.cat(pieces or [torch.zeros(0)]).cpu().numpy()  # the only synchronization with the device
        result = np.zeros(rows.count, dtype=flat.dtype)
        result[indices] = flat
        return context.processes.added(result)

    logprobs_N = laid(logprobs, order)
    return logprobs_N, laid(values, order[rows.is_first_N[order]]) if model.has_values else None


class _LossArguments(TypedDict):
    """The tokens on which a loss is computed, and the way in which their losses are reduced to a single number."""

    loss_mask_BT: Tensor
    aggregation: Aggregation
    global_batch: GlobalBatch
    sequence_ids_BT: Tensor


def _micro_batch_loss(
    scores: Scores, part: MicroBatch, config: PPOConfig, counts: _StepCounts, kl_coefficient: float, *, policy: bool
) -> Loss:
    """Return the contribution of a micro-batch to the loss of its optimizer step.

        loss = policy + kl_coefficient · KL(π, reference) - entropy_coefficient · entropy + value_coefficient · value

    During the critic's warm-up, `policy` is false, and only the value head learns.
    """
    row_ids = _row(part.rows_N)
    # All tokens with a choice form one row, in which `row_ids` separates the sequences.
    over = _LossArguments(
        loss_mask_BT=_row(_choices(part)),
        aggregation=config.reduction,
        global_batch=counts.tokens,
        sequence_ids_BT=row_ids,
    )
    terms: dict[str, tuple[float, Loss]] = {}
    if policy:
        over_policy: _LossArguments = {**over, "global_batch": counts.policy}
        terms["policy_loss"] = (1.0, _policy_loss(scores.logprobs_N, part, config, over_policy))
    if policy and "reference" in part.columns:
        reference_BT = _row(part.columns["reference"])
        term = kl_loss(_row(scores.logprobs_N), reference_BT, estimator=config.kl_kind, **over)
        terms["kl_loss"] = (kl_coefficient, term)
    if scores.entropies_N is not None:
        coefficient = config.entropy_coefficient if policy else 0.0
        terms["entropy_loss"] = (coefficient, entropy_loss(_row(scores.entropies_N), **over))
    if scores.values_M is not None and config.value_coefficient:
        # Here, each action is one token in the row of its episode.
        action_rows = _row(part.first_rows_M)
        old, returns = (_row(part.columns[key].index_select(0, part.firsts_M)) for key in ("old_values", "returns"))
        term = value_loss(
            _row(scores.values_M),
            old,
            returns,
            torch.ones_like(action_rows),
            clip=config.value_clip,
            global_batch=counts.actions,
            sequence_ids_BT=action_rows,
        )
        terms["value_loss"] = (config.value_coefficient, term)
    used = {name: (weight, term) for name, (weight, term) in terms.items() if weight}
    total = sum((weight * term.loss for weight, term in used.values()), start=scores.logprobs_N.new_zeros(()))
    measured = Diagnostics(
        {name: Statistic("total", term.loss.detach().reshape(1)) for name, (_, term) in used.items()}
    )
    for _, term in terms.values():
        measured |= term.diagnostics
    return Loss(total, measured)


def _row(values_N: Tensor) -> Tensor:
    return values_N.unsqueeze(0)


def _policy_loss(logprobs_N: Tensor, part: MicroBatch, config: PPOConfig, over: _LossArguments) -> Loss:
    clip = config.clip
    new, old, advantages = (_row(one) for one in (logprobs_N, part.columns["old"], part.columns["advantages"]))
    low, high = clip.low, clip.high
    if config.loss == "decoupled":
        return decoupled_ppo_loss(
            new,
            old,
            _row(part.columns["logprobs"]),
            advantages,
            clip_low=low,
            clip_high=high,
            dual_clip=clip.dual,
            cap=config.decoupled_cap,
            beyond_cap=config.beyond_cap,
            **over,
        )
    weights = _row(part.columns["weights"]) if config.importance else None
    if config.loss == "ppo":
        return ppo_clip_loss(
            new, old, advantages, clip_low=low, clip_high=high, dual_clip=clip.dual, weights_BT=weights, **over
        )
    if config.loss in ("turn_gspo", "turn_ppo"):
        return turn_clip_loss(
            new,
            old,
            advantages,
            turn_ids_BT=_row(part.turns_N),
            ratio="mean" if config.loss == "turn_gspo" else "product",
            clip_low=low,
            clip_high=high,
            dual_clip=clip.dual,
            weights_BT=weights,
            **over,
        )
    if config.loss == "sapo":
        return sapo_loss(new, old, advantages, weights_BT=weights, **over)
    return _CLIPPED[config.loss](new, old, advantages, clip_low=low, clip_high=high, weights_BT=weights, **over)


_CLIPPED: dict[str, Callable[..., Loss]] = {
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "gmpo": gmpo_loss,
    "dppo_tv": partial(dppo_loss, divergence="tv"),
    "dppo_kl": partial(dppo_loss, divergence="kl"),
}
"""The losses that have a clip range but no dual clip."""


def _gap(logprobs_N: Tensor, part: MicroBatch) -> Diagnostics:
    gap = MaskedTokens(_row(_choices(part))).pick("gap", _row((logprobs_N.detach() - part.columns["logprobs"]).abs()))
    statistics = spread_statistics("gap", gap)
    return Diagnostics({"logprob_gap": statistics["gap_max"], "logprob_gap_mean": statistics["gap_mean"]})


def _choices(part: MicroBatch) -> Tensor:
    """Return True for each token at which the policy had a choice, on the CPU."""
    return torch.ones_like(part.rows_N, dtype=torch.bool) if part.choices_N is None else part.choices_N


def _why_empty(rows: TokenBatch, flat: TrainingRows) -> str:
    if not len(rows):
        return (
            "the episodes have no tokens; get_action must return log_probs with the prompt_ids, "
            "token_ids and logprobs of the sampled text"
        )
    forced = f", and a constraint forced {flat.forced}" if flat.forced else ""
    return f"no token of {pluralize(len(rows), 'row')} is in the loss{forced}"


def _summary(steps: Sequence[_StepRecord], epochs: int, processes: Processes) -> dict[str, float]:
    """Reduce an update's diagnostics to numbers for a log with a single read from the device.

    The `parts` of the steps come from this process. All other numbers cover all processes.

    The result contains the means of `loss`, its terms and `grad_norm` over all optimizer steps; the maximum norm,
    `grad_norm_max`; and the merged diagnostics of all parts. `effective_sample_size` covers one epoch, and
    `effective_share` is its ratio to the number of tokens.
    """
    if not steps:
        return {}
    parts = [part for step in steps for part in step.parts]
    if statistics := [statistic for part in parts for statistic in part.statistics.values()]:
        # Copy only once, to float64 on the host.
        flat = torch.cat([statistic.parts for statistic in statistics]).cpu().double()
        pieces = iter(torch.split(flat, [len(statistic.parts) for statistic in statistics]))
        parts = [
            Diagnostics({name: Statistic(one.kind, next(pieces)) for name, one in part.statistics.items()})
            for part in parts
        ]
    merged = merge_diagnostics(processes.merged(parts))
    measured = merged.floats()
    for name in ("policy_loss", "entropy_loss", "kl_loss", "value_loss"):
        if name in measured:
            measured[name] /= len(steps)
    for name in ("tokens", "value_tokens"):
        measured.pop(name, None)
    if "effective_sample_size" in measured:
        measured["effective_sample_size"] /= epochs
        counted = float(merged.statistics["ratio_mean"].parts[1])
        measured["effective_share"] = measured["effective_sample_size"] * epochs / counted
    norms = [step.grad_norm for step in steps]
    return measured | {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": sum(norms) / len(norms),
        "grad_norm_max": max(norms),
    }


def version_lag(versions_N: Array, version: int) -> dict[str, float]:
    """Return the age of the tokens: `lag_mean` and `lag_max`, in versions, and `lag_share`, the share of old tokens.

    `versions_N` contains the policy version that sampled each token, or -1 if it is unknown. `version` is the version
    before the update.
    """
    lag = version - versions_N[versions_N >= 0].astype(np.int64)
    if not len(lag):
        return {}
    return {"lag_mean": float(lag.mean()), "lag_max": float(lag.max()), "lag_share": float((lag > 0).mean())}


def explained_variance(values: Floats, returns: Floats) -> dict[str, float]:
    """Return `explained_variance`, 1 - Var(returns - values) / Var(returns). Return {} if all returns are equal."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return {"explained_variance": 1.0 - float(np.var(returns - values)) / spread} if spread > 0.0 else {}
