"""The PPO learner: epochs of mini-batches over the rows of one batch of episodes, each in parts that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from reward_kit.agent.policies.hf.cpu import keep_freed_memory, no_denormals
from reward_kit.errors import ConfigError, RewardKitError, TrainingError, boundary
from reward_kit.rl.learner.config import LoRAOptions, OffPolicyLimits, PPOConfig, lr_factor
from reward_kit.rl.learner.forward import LogprobModel, Scores
from reward_kit.rl.learner.optimizer import (
    adamw,
    add_adapters,
    check_critic,
    clip_gradients,
    has_adapters,
    in_order_of,
    rates,
    set_lr,
    widen,
    without_adapters,
)
from reward_kit.rl.learner.sharding import Processes, load_module, load_optimizer, whole
from reward_kit.rl.learner.training_rows import CHOICE, MicroBatch, TrainingRows
from reward_kit.rl.losses import (
    AdaptiveKLCoefficient,
    Aggregation,
    Diagnostics,
    GlobalBatch,
    Loss,
    cispo_loss,
    decoupled_ppo_loss,
    entropy_loss,
    gspo_loss,
    kl_loss,
    merge_diagnostics,
    ppo_clip_loss,
    truncated_importance_weights,
    value_loss,
    within_cap,
)
from reward_kit.rl.losses.base import Statistic, mean_of
from reward_kit.tokens import TokenBatch, micro_batches
from reward_kit.tokens.columns import Array, Floats, Ints

__all__ = ["LoRAOptions", "OffPolicyLimits", "OnFailure", "PPOConfig", "PPOLearner"]

OnFailure = Callable[[TokenBatch, Mapping[str, Any]], object]

"""Is given the batch that an update failed on, and what is known of the failure."""


class PPOLearner:
    """Updates a module on batches of rows.

    Args:
        module: the weights in training, changed in place: a causal language model of `transformers`, a
            `PolicyWithValue`, or anything that maps (ids_BT, attention_mask_BT) to logits_BTV. It runs without dropout,
            as the sampler does. Weights in half precision that are to be trained become float32.
        config: the options.
        reference: what the divergence is measured to, where the options or the diagnostics want it; another module than
            the one in training. None with adapters: the module without them.
        seed: orders the mini-batches, and makes new adapters.
        device: where to; the module is moved there.
        total_steps: how many updates there will be, for schedules that end.
        on_failure: called with the rows and the facts before a `TrainingError` for a loss or gradient that is not
            finite, to keep the batch for study. `facts["rows"]` are the numbers of the mini-batch's rows.

    Raises:
        ConfigError: the module cannot be trained so.
    """

    def __init__(
        self,
        module: nn.Module,
        config: PPOConfig,
        *,
        reference: nn.Module | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        total_steps: int | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.module, self.total_steps, self.on_failure = module, total_steps, on_failure
        self.config = config = config.for_weights(next(module.parameters(), torch.empty(0)).dtype)
        self._place = DeviceContext.of(module, config, device)
        module.to(self._place.device)
        if config.lora is not None:
            add_adapters(module, config.lora, seed)
        widen(module)
        self._scorer = LogprobModel(module, config)
        self._reference = self._reference_scorer(reference)
        self._check()
        self._set_mode()
        self._place.processes.shard(module, torch.bfloat16 if config.precision == "bfloat16" else torch.float32)
        self.optimizer = adamw(module, config)
        self._parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._generator = torch.Generator().manual_seed(seed)
        self._kl = _adaptive(config)
        self.updates = self.optimizer_steps = 0

    def _reference_scorer(self, reference: nn.Module | None) -> LogprobModel | None:
        if reference is self.module:
            raise ConfigError("the reference is the module in training; give it a copy, copy.deepcopy(module)")
        if reference is not None:
            self._place.processes.same_weights(reference.to(self._place.device))
            return LogprobModel(reference.eval().requires_grad_(False), self.config)
        # Adapters leave the weights that they are beside as they were.
        return self._scorer if self.config.kl_coefficient and has_adapters(self.module) else None

    def _check(self) -> None:
        config = self.config
        if config.kl_coefficient and self._reference is None:
            raise ConfigError("kl_coefficient needs a reference to measure the divergence to; give reference=…")
        check_critic(config, has_values=self._scorer.has_values)
        if config.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule {config.schedule!r} ends with the last update; give total_steps")

    def _set_mode(self) -> None:
        """No dropout anywhere; layers that recompute their activations look whether they are in training."""
        self.module.eval()
        if not self.config.gradient_checkpointing:
            return
        base: Any = getattr(self.module, "policy", self.module)
        if not getattr(base, "supports_gradient_checkpointing", False):
            raise ConfigError(f"{type(base).__name__} has no gradient checkpointing; leave gradient_checkpointing out")
        # The newer of its two names, where the model has it.
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for layer in base.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = True  # of this layer alone: what lies inside keeps its dropout off

    def update(self, rows: TokenBatch, *, version: int) -> dict[str, float]:
        """All epochs over one batch.

        Args:
            rows: of `build_rows`.
            version: of the policy that the module is before the update, as `policy_versions` count.

        Returns:
            The diagnostics; see `docs/reference/ppo.md`. Without a token that takes part only `tokens` and
            `optimizer_steps`, 0.

        Raises:
            TrainingError: a log-probability that takes part is unknown, or a loss or gradient is not finite. The step
                in question is not made; those before it are. The update does not count, and the same rows would come in
                the same order again.
        """
        flat, order = self._learned_from(rows), self._generator.get_state()
        try:
            with no_denormals():
                found = self._updated(flat, rows, version) if flat.count else {"tokens": 0.0, "optimizer_steps": 0.0}
        except BaseException:
            self._generator.set_state(order)
            raise
        self.updates += 1
        return found

    def _updated(self, flat: TrainingRows, rows: TokenBatch, version: int) -> dict[str, float]:
        """The epochs over rows of which at least one token takes part."""
        update, flat = self.updates, prepared(flat, self._scorer, self._reference, self.config, self._place)
        factor = lr_factor(self.config, update, self.total_steps)
        set_lr(self.optimizer, factor)
        steps: list[StepRecord] = []
        for chosen in self._minibatches(flat):
            # The gap is to the module before its first change; where it was recomputed, it is known already.
            is_first = not steps and "recomputed" not in flat.columns
            learns_policy = update >= self.config.critic_warmup
            steps.append(
                self._gradients(flat, chosen, policy=learns_policy, gap=is_first, limit=self.config.max_grad_norm)
            )
            self._check_finite(steps[-1], rows, chosen, version)
            self.optimizer.step()
            self.optimizer_steps += 1
        found = summary_of(steps, self.config.epochs, self._place.processes) | self._described(flat, version)
        found |= {"tokens": float(flat.choices), "optimizer_steps": float(len(steps))} | rates(self.config, factor)
        if self._kl is not None and "kl_sequence" in found:
            self._kl.update(found["kl_sequence"], int((flat.counts_B > 0).sum()))
        return found | self.config.limits.alarms(found)

    def gradients(self, rows: TokenBatch) -> dict[str, float]:
        """The gradient of the loss of all rows as one optimizer step, left in the parameters' `grad`; no step is made.

        Returns:
            The diagnostics; `grad_norm` is the norm before anything is cut, and nothing is.

        Raises:
            TrainingError: no token takes part, or a log-probability that takes part is unknown.
        """
        flat = self._learned_from(rows)
        if not flat.count:
            forced = f", and a constraint forced {flat.forced}" if flat.forced else ""
            raise TrainingError(f"no token of these rows takes part{forced}; there is no gradient")
        flat = prepared(flat, self._scorer, self._reference, self.config, self._place)
        gap = "recomputed" not in flat.columns
        with no_denormals():
            record = self._gradients(flat, np.flatnonzero(flat.counts_B), policy=True, gap=gap, limit=None)
        return summary_of([record], 1, self._place.processes)

    def logprobs(self, rows: TokenBatch) -> Array:
        """(B,T) float32 log-probabilities of the module now on the axis of `input_ids`, 0 off the actions."""
        flat = TrainingRows.of(rows, "action_mask")
        laid: Array = np.zeros(rows.batch["input_ids"].shape, dtype=np.float32)
        with no_denormals():
            found = score_rows(self._scorer, flat, self._place)
        laid.reshape(-1)[flat.flat_N] = found.logprobs_N
        return laid

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """All that a learner like this one needs to go on as if nothing had happened.

        Args:
            keep: False where another of several processes keeps it: all of them have to call this, and put shards
                together, but then the tensors are None.
        """
        return {
            "module": whole(self.module.state_dict(), keep=keep),
            "optimizer": whole(self.optimizer.state_dict(), keep=keep),
            "parameters": self._names(),
            "generator": self._generator.get_state(),
            "kl": self._kl.state_dict() if self._kl is not None else {},
            "updates": self.updates,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave.

        Options are those of this learner: rates, betas and the like may have been changed, and an adaptive coefficient
        begins anew where there was none.

        Raises:
            ConfigError: the state is of a module with other weights, or of one with others of them trainable.
        """
        with boundary(ConfigError, "the state is not of a module like this one, with the same weights trainable"):
            load_module(self.module, state["module"])
            moments = in_order_of(self._names(), state.get("parameters"), self.optimizer, state["optimizer"])
            load_optimizer(self.optimizer, moments)
        self._generator.set_state(state["generator"])
        if self._kl is not None and state["kl"]:
            self._kl.load_state_dict(state["kl"])
        self.updates, self.optimizer_steps = state["updates"], state["optimizer_steps"]

    def _names(self) -> list[str]:
        """Of the optimizer's parameters, in its order."""
        names = {one: name for name, one in self.module.named_parameters()}
        return [names[one] for one in self._parameters]

    def _learned_from(self, rows: TokenBatch) -> TrainingRows:
        return TrainingRows.of(rows).without_forced(keep_firsts=self._scorer.has_values)

    def _minibatches(self, flat: TrainingRows) -> Iterator[Ints]:
        # Rows without a token that takes part would cost a forward pass and change nothing.
        used = np.flatnonzero(flat.counts_B)
        size = self.config.minibatch_rows
        count = -(-len(used) // size) if size else min(self.config.minibatches or 1, len(used))
        cuts = [size * part for part in range(1, count)] if size else count
        for _ in range(self.config.epochs):
            order = torch.randperm(len(used), generator=self._generator).numpy()
            yield from np.array_split(used[order], cuts)

    def _gradients(
        self, flat: TrainingRows, chosen: Ints, *, policy: bool, gap: bool, limit: float | None
    ) -> StepRecord:
        """Accumulate the gradient of a mini-batch, and look at the loss and the norm: the one wait for the device.

        Args:
            flat: all rows.
            chosen: those of the mini-batch.
            policy: False where the value head alone learns.
            gap: measure how far the module's log-probabilities are from the sampler's.
            limit: the norm to cut the gradient to; None leaves it.
        """
        self.optimizer.zero_grad(set_to_none=True)
        counts = self._counts(flat, chosen)
        losses: list[Tensor] = []
        found: list[Diagnostics] = []
        for rows in self._place.parts_of(flat, chosen):
            part = flat.part(rows, self._place.device, self._place.dtype)
            scores = self._scorer(part, values_only=not policy)
            coefficient = self._kl.value if self._kl is not None else self.config.kl_coefficient
            loss, told = micro_batch_loss(scores, part, self.config, counts, kl_coefficient=coefficient, policy=policy)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            found.append(told | _gap(scores.logprobs_N, part) if gap else told)
        norm = clip_gradients(self._parameters, limit)
        measured = torch.stack([torch.stack(losses).sum(), norm.to(losses[0].dtype)]).tolist()
        total = self._place.processes.added(np.array(measured[0]))
        return StepRecord(float(total), measured[1], found)

    def _counts(self, flat: TrainingRows, chosen: Ints) -> StepCounts:
        """What the losses of this mini-batch are divided by."""
        tokens, length = flat.tokens_of(chosen), self.config.norm_length
        firsts = tokens[flat.is_first_N[tokens]]
        actions = GlobalBatch(len(firsts), len(chosen))
        if CHOICE in flat.columns:
            tokens = tokens[flat.columns[CHOICE][tokens]]
        everything = GlobalBatch(len(tokens), len(np.unique(flat.rows_N[tokens])), length)
        if "is_within" not in flat.columns:
            return StepCounts(everything, everything, actions)
        within = tokens[flat.columns["is_within"][tokens]]
        return StepCounts(GlobalBatch(len(within), len(np.unique(flat.rows_N[within])), length), everything, actions)

    def _check_finite(self, record: StepRecord, rows: TokenBatch, chosen: Ints, version: int) -> None:
        if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
            return
        facts = {
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "rows": chosen.tolist(),
            "parameters": _not_finite(self.module),
            "version": version,
            "update": self.updates,
            "optimizer_step": self.optimizer_steps,
        }
        self.optimizer.zero_grad(set_to_none=True)
        what = f"the loss is {record.loss:g}"
        if math.isfinite(record.loss):
            what = f"the gradient's norm is {record.grad_norm:g} at a loss of {record.loss:g}"
        found = summary_of([record], 1, self._place.processes)
        least, most = (found.get(name, math.nan) for name in ("ratio_min", "ratio_max"))
        raise TrainingError(f"{what}, ratios from {least:g} to {most:g}; the step is not made{self._kept(rows, facts)}")

    def _kept(self, rows: TokenBatch, facts: Mapping[str, Any]) -> str:
        """Where `on_failure` has kept the rows, for the end of a message."""
        if self.on_failure is None or not self._place.processes.is_first:
            return ""
        try:
            kept = self.on_failure(rows, facts)
        except (RewardKitError, OSError) as error:  # a full disk does not hide why training stops
            return f"; the batch could not be kept: {error}"
        return f"; the batch is kept in {kept}" if kept is not None else ""

    def _described(self, flat: TrainingRows, version: int) -> dict[str, float]:
        """What is known of the rows as a whole."""
        found: dict[str, float] = {}
        columns = flat.columns
        if flat.forced:
            found["forced_share"] = flat.forced / (flat.forced + flat.choices)
        if "policy_versions" in columns:
            found |= version_lag(columns["policy_versions"], version)
        if "recomputed" in columns:
            gap = np.abs(columns["recomputed"] - columns["logprobs"])
            # Where nothing was recorded, nothing uses it here.
            gap = gap[np.isfinite(columns["logprobs"]) & columns.get(CHOICE, np.True_)]
            found |= {"logprob_gap": float(gap.max()), "logprob_gap_mean": float(gap.mean())} if len(gap) else {}
        if "old_values" in columns:
            firsts = flat.is_first_N
            found |= explained_variance(columns["old_values"][firsts], columns["returns"][firsts])
        if self._reference is not None:
            found["kl_coefficient"] = self._kl.value if self._kl is not None else self.config.kl_coefficient
        return found


def _not_finite(module: nn.Module) -> list[str]:
    """The names of the parameters whose gradient is not finite."""
    return [
        name for name, one in module.named_parameters() if one.grad is not None and not torch.isfinite(one.grad).all()
    ]


def _gap(logprobs_N: Tensor, part: MicroBatch) -> Diagnostics:
    gap = (logprobs_N.detach() - part.columns["logprobs"]).abs()
    if CHOICE in part.columns:
        gap = gap[part.columns[CHOICE] > 0]
    most = Statistic("max", gap.amax().reshape(1) if len(gap) else gap.new_tensor([-torch.inf]))
    return Diagnostics({"logprob_gap": most, "logprob_gap_mean": mean_of(gap)})


def _adaptive(config: PPOConfig) -> AdaptiveKLCoefficient | None:
    if config.kl_target is None:
        return None
    return AdaptiveKLCoefficient(config.kl_coefficient, target=config.kl_target, horizon=config.kl_horizon)


class Scored(NamedTuple):
    """(N,) log-probabilities; values on each action's first token, 0 elsewhere, and None without a critic."""

    logprobs_N: Array
    values_N: Array | None


class DeviceContext(NamedTuple):
    """Where modules run: the device, the type of real numbers, a part's budget, and the processes that share parts."""

    device: torch.device
    dtype: torch.dtype
    budget: int
    processes: Processes

    @classmethod
    def of(cls, module: nn.Module, config: PPOConfig, device: torch.device | str) -> DeviceContext:
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
def score_rows(scorer: LogprobModel, rows: TrainingRows, place: DeviceContext) -> Scored:
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
    rows: TrainingRows, scorer: LogprobModel, reference: LogprobModel | None, config: PPOConfig, place: DeviceContext
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


def _as_reference(reference: LogprobModel, scorer: LogprobModel) -> AbstractContextManager[None]:
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


class StepCounts(NamedTuple):
    """What the losses of one optimizer step are divided by.

    Attributes:
        policy: of the policy's loss; "decoupled" leaves tokens out.
        tokens: of what is over all tokens.
        actions: of the critic's loss, where an action counts once.
    """

    policy: GlobalBatch
    tokens: GlobalBatch
    actions: GlobalBatch


class _Over(TypedDict):
    """Which tokens a loss is over, and how they become one number."""

    loss_mask_BT: Tensor
    aggregation: Aggregation
    global_batch: GlobalBatch
    sequence_ids_BT: Tensor


def micro_batch_loss(
    scores: Scores, part: MicroBatch, config: PPOConfig, counts: StepCounts, *, kl_coefficient: float, policy: bool
) -> Loss:
    """The share of this part in the loss of its optimizer step.

    Args:
        scores: of the module in training.
        part: its tokens, with the columns `old`, `advantages`, and what the options need.
        config: the options.
        counts: of the optimizer step.
        kl_coefficient: as it is now.
        policy: False in the critic's warm-up: the value head alone learns.
    """
    terms: dict[str, tuple[float, Loss]] = {}
    over = _over(part, config, counts.tokens)
    if policy:
        terms["policy_loss"] = (1.0, _policy_loss(scores, part, config, counts.policy))
    if policy and "reference" in part.columns:
        reference = _row(part.columns["reference"])
        terms["kl_loss"] = (
            kl_coefficient,
            kl_loss(_row(scores.logprobs_N), reference, estimator=config.kl_kind, **over),
        )
    if scores.entropies_N is not None:
        coefficient = config.entropy_coefficient if policy else 0.0
        terms["entropy_loss"] = (coefficient, entropy_loss(_row(scores.entropies_N), **over))
    if scores.values_M is not None and config.value_coefficient:
        terms["value_loss"] = (config.value_coefficient, _value_loss(scores.values_M, part, config, counts.actions))
    used = {name: (weight, term) for name, (weight, term) in terms.items() if weight}
    total = sum((weight * term.loss for weight, term in used.values()), start=scores.logprobs_N.new_zeros(()))
    found = Diagnostics({name: Statistic("total", term.loss.detach().reshape(1)) for name, (_, term) in used.items()})
    for _, term in terms.values():
        found |= term.diagnostics
    return Loss(total, found)


def _row(values_N: Tensor) -> Tensor:
    return values_N.unsqueeze(0)


def _over(part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> _Over:
    """All of the tokens at which there was a choice, in rows of their own."""
    rows, chosen = _row(part.rows_N), part.columns.get(CHOICE)
    return _Over(
        loss_mask_BT=torch.ones_like(rows) if chosen is None else _row(chosen > 0),
        aggregation=config.reduction,
        global_batch=whole,
        sequence_ids_BT=rows,
    )


def _policy_loss(scores: Scores, part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> Loss:
    over, clip = _over(part, config, whole), config.clip
    new, old, advantages = (_row(one) for one in (scores.logprobs_N, part.columns["old"], part.columns["advantages"]))
    if config.loss == "decoupled":
        return decoupled_ppo_loss(
            new,
            old,
            _row(part.columns["logprobs"]),
            advantages,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            cap=config.decoupled_cap,
            beyond_cap=config.beyond_cap,
            **over,
        )
    weights = _row(part.columns["weights"]) if config.importance else None
    if config.loss == "ppo":
        return ppo_clip_loss(
            new,
            old,
            advantages,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            weights_BT=weights,
            **over,
        )
    loss = gspo_loss if config.loss == "gspo" else cispo_loss
    return loss(new, old, advantages, clip_low=clip.low, clip_high=clip.high, weights_BT=weights, **over)


def _value_loss(values_M: Tensor, part: MicroBatch, config: PPOConfig, whole: GlobalBatch) -> Loss:
    """Over actions: each is a token of its own here, in the row of its episode."""
    rows = _row(part.rows_N.index_select(0, part.firsts_M))
    old, returns = (_row(part.columns[key].index_select(0, part.firsts_M)) for key in ("old_values", "returns"))
    return value_loss(
        _row(values_M),
        old,
        returns,
        torch.ones_like(rows),
        clip=config.value_clip,
        global_batch=whole,
        sequence_ids_BT=rows,
    )


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


def version_lag(versions_N: Array, version: int) -> dict[str, float]:
    """How old the tokens are.

    Args:
        versions_N: which version of the policy sampled each token that takes part; -1 where nobody knows.
        version: of the policy before the update.

    Returns:
        `lag_mean` and `lag_max` in versions, and `lag_share`, the share of tokens of an older version; nothing where no
        version is known.
    """
    lag = version - versions_N[versions_N >= 0].astype(np.int64)
    if not len(lag):
        return {}
    return {"lag_mean": float(lag.mean()), "lag_max": float(lag.max()), "lag_share": float((lag > 0).mean())}


def explained_variance(values: Floats, returns: Floats) -> dict[str, float]:
    """`explained_variance`: 1 - Var(returns - values) / Var(returns); nothing where the returns are all equal.

    1 is a perfect critic, 0 one that says the mean, and below 0 one that is worse than saying nothing.
    """
    spread = float(np.var(returns)) if len(returns) else 0.0
    return {"explained_variance": 1.0 - float(np.var(returns - values)) / spread} if spread > 0.0 else {}
