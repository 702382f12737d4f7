"""The PPO learner: epochs of mini-batches over the rows of one batch of episodes, each in parts that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, RewardKitError, TrainingError, boundary
from reward_kit.rl.learner.columns import Place, prepared, score_rows
from reward_kit.rl.learner.config import PPOConfig, lr_factor
from reward_kit.rl.learner.forward import Scorer
from reward_kit.rl.learner.lora import LoRAOptions, add_adapters, has_adapters
from reward_kit.rl.learner.loss import StepCounts, micro_batch_loss
from reward_kit.rl.learner.off_policy import OffPolicyLimits, explained_variance, version_lag
from reward_kit.rl.learner.optimizer import adamw, check_critic, clip_gradients, in_order_of, rates, set_lr, widen
from reward_kit.rl.learner.sharding import load_module, load_optimizer, whole
from reward_kit.rl.learner.summary import StepRecord, summary_of
from reward_kit.rl.learner.training_rows import CHOICE, MicroBatch, TrainingRows
from reward_kit.rl.losses import AdaptiveKLCoefficient, Diagnostics, GlobalBatch
from reward_kit.rl.losses.diagnostics import Statistic, mean_of
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array, Ints
from reward_kit.torch_cpu import no_denormals

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
        self._place = Place.of(module, config, device)
        module.to(self._place.device)
        if config.lora is not None:
            add_adapters(module, config.lora, seed)
        widen(module)
        self._scorer = Scorer(module, config)
        self._reference = self._reference_scorer(reference)
        self._check()
        self._set_mode()
        self._place.processes.shard(module, torch.bfloat16 if config.precision == "bfloat16" else torch.float32)
        self.optimizer = adamw(module, config)
        self._parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        self._generator = torch.Generator().manual_seed(seed)
        self._kl = _adaptive(config)
        self.updates = self.optimizer_steps = 0

    def _reference_scorer(self, reference: nn.Module | None) -> Scorer | None:
        if reference is self.module:
            raise ConfigError("the reference is the module in training; give it a copy, copy.deepcopy(module)")
        if reference is not None:
            self._place.processes.same_weights(reference.to(self._place.device))
            return Scorer(reference.eval().requires_grad_(False), self.config)
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
