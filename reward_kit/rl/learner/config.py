"""The options of the PPO learner, checked when they are made."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch

from reward_kit.credit.options import check_choice, check_number
from reward_kit.errors import ConfigError
from reward_kit.rl.losses import Aggregation, BeyondCap, ClipRange, KLEstimator, Level

log = logging.getLogger(__name__)
LossName = Literal["ppo", "gspo", "cispo", "decoupled"]
OldLogprobs = Literal["sampler", "recomputed"]
OldValues = Literal["recorded", "recomputed"]
LRSchedule = Literal["constant", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
_CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "decoupled": (0.2, 0.2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """The matrices that get a low-rank adapter, and its size.

    Attributes:
        rank: of an adapter's two matrices.
        alpha: an adapter's output is multiplied by alpha / rank.
        targets: names of linear layers, by the end of their path; "all-linear" is every one but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = "all-linear"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora.rank is a whole number from 1; got {self.rank!r}")
        check_number("lora.alpha", self.alpha, 0.0)
        if not self.targets:
            raise ConfigError("lora.targets names at least one layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyLimits:
    """The limits beyond which an alarm is raised; None: never.

    Attributes:
        logprob_gap_mean: of |the module's log-probability before the update - the sampler's|, the mean over tokens.
            Two implementations in float32 differ by 1e-5, a bfloat16 sampler by 1e-2.
        approx_kl: the mean estimate of how far the policy has moved.
        clip_fraction: the share of tokens that the clip leaves without a gradient.
        ratio_max: the greatest probability ratio.
        effective_share: the least effective sample size, as a share of the tokens (of sequences with "gspo").
        lag_max: how many versions older than the policy in training a token's sampler is.
        grad_norm: before clipping.
    """

    logprob_gap_mean: float | None = 0.1
    approx_kl: float | None = 0.5
    clip_fraction: float | None = 0.5
    ratio_max: float | None = 1e4
    effective_share: float | None = 0.2
    lag_max: float | None = 8.0
    grad_norm: float | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if (limit := getattr(self, one.name)) is not None:
                check_number(f"limits.{one.name}", limit, 0.0)

    def alarms(self, diagnostics: Mapping[str, float]) -> dict[str, float]:
        """Return `alarm/<name>` with the measured value for each limit exceeded by these diagnostics; log each."""
        beyond = {}
        for one in fields(self):
            limit, measured = getattr(self, one.name), diagnostics.get(one.name)
            if limit is None or measured is None:
                continue
            is_least = one.name == "effective_share"
            # NaN is beyond every limit.
            if not (measured >= limit if is_least else measured <= limit):
                beyond[f"alarm/{one.name}"] = measured
                side = "below" if is_least else "above"
                log.warning("off-policy: %s is %g, %s the limit %g", one.name, measured, side, limit)
        return beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """The hyper-parameters of an update.

    Attributes:
        epochs: passes over the batch.
        minibatch_rows: rows per optimizer step; None: all, or by `minibatches`.
        minibatches: optimizer steps per epoch, of rows as equal in number as can be; at most one per row.
        max_tokens_per_micro_batch: of one pass through the module, padding included; None: 1,024 on a CPU, whose caches
            hold no more, and 16,384 on an accelerator. A longer row goes alone. Changes memory and speed, no gradient.
        loss: the policy loss; see `rl.losses`.
        clip_low: how far below 1 the probability ratio may be pushed; None: the loss's own default.
        clip_high: how far above.
        dual_clip: bounds the loss of tokens with a negative advantage, of "ppo" and "decoupled"; None: no bound.
        aggregation: how the tokens' losses become one; None: the loss's own default.
        norm_length: the divisor of "seq-mean-token-sum-norm".
        old_logprobs: the denominator of the ratio: the sampler's log-probabilities, or the module's own before the
            update, which cost a forward pass. "decoupled" and importance weights recompute them in any case.
        importance: truncated importance weights from the sampler to the recomputed log-probabilities, of each token or
            of its sequence; None: none.
        importance_cap: the greatest such weight.
        decoupled_cap: the greatest weight of "decoupled".
        beyond_cap: exclude a token beyond it, or truncate its weight.
        kl_coefficient: of the divergence from the reference, in the loss.
        kl_kind: its estimator.
        kl_target: the `kl_sequence` that an adaptive coefficient holds; None: the coefficient is constant.
        kl_horizon: over how many rows an adaptive coefficient may change by a fifth.
        entropy_coefficient: of the entropy bonus.
        value_coefficient: of the critic's loss, if the module has a value head.
        value_clip: how far a value may be pushed from the old one; None: no limit.
        old_values: the old value: as the policy recorded it, or as the module computes it before the update.
        critic_warmup: so many first updates train the value head alone.
        lr: the learning rate.
        value_lr: that of the value head; None: `lr`.
        lr_by_name: that of parameters by name, such as {"*norm*": 1e-2}: patterns of `fnmatch` over the names of
            `named_parameters`; the first that fits counts, before `value_lr` and `lr`. All follow one schedule.
        betas: of AdamW.
        adam_epsilon: of AdamW.
        weight_decay: of AdamW, on matrices; biases, norms and other vectors have none.
        max_grad_norm: the gradient is scaled down to this 2-norm; None leaves it.
        schedule: of the learning rate after the warm-up, by updates.
        warmup: so many first updates over which it rises.
        min_lr_share: the share of `lr` that the schedule ends with.
        temperature: the logits are divided by it, as by the sampler.
        precision: "bfloat16" runs the module in autocast; trained weights and losses are float32. None: "bfloat16" for
            a module that is given in it, else "float32".
        gradient_checkpointing: recompute activations inside the module's layers instead of keeping them.
        max_logits: how many logits are held at once, tokens times vocabulary; beyond it the head runs in chunks.
        lora: train low-rank adapters instead of the module's weights.
        limits: beyond which an alarm about off-policy data is raised.

    Raises:
        ConfigError: a value is out of range or unknown, or has no effect with the others.
    """

    epochs: int = 1
    minibatch_rows: int | None = None
    minibatches: int | None = None
    max_tokens_per_micro_batch: int | None = None
    loss: LossName = "ppo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: Aggregation | None = None
    norm_length: float | None = None
    old_logprobs: OldLogprobs = "sampler"
    importance: Level | None = None
    importance_cap: float = 2.0
    decoupled_cap: float = 5.0
    beyond_cap: BeyondCap = "exclude"
    kl_coefficient: float = 0.0
    kl_kind: KLEstimator = "k3+"
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    entropy_coefficient: float = 0.0
    value_coefficient: float = 0.5
    value_clip: float | None = 0.5
    old_values: OldValues = "recorded"
    critic_warmup: int = 0
    lr: float = 1e-6
    value_lr: float | None = None
    lr_by_name: dict[str, float] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: LRSchedule = "constant"
    warmup: int = 0
    min_lr_share: float = 0.0
    temperature: float = 1.0
    precision: Precision | None = None
    gradient_checkpointing: bool = False
    max_logits: int = 2**27
    lora: LoRAOptions | None = None
    limits: OffPolicyLimits = field(default_factory=OffPolicyLimits)

    def __post_init__(self) -> None:
        _check_values(self)
        _check_together(self)

    @property
    def clip(self) -> ClipRange:
        """The clip range, with the loss's defaults."""
        low, high = _CLIPS[self.loss]
        given = (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)
        return ClipRange(*given, self.dual_clip)

    @property
    def reduction(self) -> Aggregation:
        """The aggregation, with the loss's default."""
        return self.aggregation or ("seq-mean-token-mean" if self.loss == "gspo" else "token-mean")

    def for_weights(self, dtype: torch.dtype) -> PPOConfig:
        """Return the options with a definite precision, for a module whose weights are given in this type."""
        if self.precision is not None:
            return self
        return replace(self, precision="bfloat16" if dtype == torch.bfloat16 else "float32")

    @property
    def of_critic(self) -> tuple[str, ...]:
        """The options of a critic that were set."""
        names = ("critic_warmup", "value_coefficient", "value_clip", "value_lr", "old_values")
        return tuple(name for name in names if _is_set(self, name))

    @property
    def uses_sampler(self) -> bool:
        """The loss uses the sampler's log-probabilities."""
        return self.old_logprobs == "sampler" or self.loss == "decoupled" or self.importance is not None

    @property
    def recomputes(self) -> bool:
        """The loss uses the module's log-probabilities before the update."""
        return self.old_logprobs == "recomputed" or self.loss == "decoupled" or self.importance is not None


_CHOICES = {
    "loss": LossName,
    "aggregation": Aggregation,
    "old_logprobs": OldLogprobs,
    "importance": Level,
    "beyond_cap": BeyondCap,
    "kl_kind": KLEstimator,
    "old_values": OldValues,
    "schedule": LRSchedule,
    "precision": Precision,
}
_COUNTS = {"epochs": 1, "minibatch_rows": 1, "minibatches": 1, "max_tokens_per_micro_batch": 1, "max_logits": 1}
_COUNTS |= {"critic_warmup": 0, "warmup": 0}
_AT_LEAST_0 = ("kl_coefficient", "value_coefficient", "weight_decay", "lr", "value_lr")
_ABOVE_0 = (
    *("importance_cap", "decoupled_cap", "kl_target", "kl_horizon", "value_clip", "adam_epsilon", "max_grad_norm"),
    *("temperature", "norm_length"),
)


def schema_bounds() -> dict[str, dict[str, float]]:
    """The bounds of single numbers as JSON Schema."""
    bounds: dict[str, dict[str, float]] = {name: {"minimum": least} for name, least in _COUNTS.items()}
    bounds |= {name: {"minimum": 0.0} for name in _AT_LEAST_0} | {name: {"exclusiveMinimum": 0.0} for name in _ABOVE_0}
    return bounds | {"min_lr_share": {"minimum": 0.0, "maximum": 1.0}}


def _check_values(config: PPOConfig) -> None:
    for name, kind in _CHOICES.items():
        if (choice := getattr(config, name)) is not None:
            check_choice(name, choice, get_args(kind))
    if config.lora is not None and not isinstance(config.lora, LoRAOptions):
        raise ConfigError(f"lora is LoRAOptions(rank=…); got {config.lora!r}")
    for name, least in _COUNTS.items():
        count = getattr(config, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
            raise ConfigError(f"{name} is a whole number from {least}; got {count!r}")
    for name in (*_AT_LEAST_0, *_ABOVE_0):
        if (number := getattr(config, name)) is not None:
            check_number(name, number, 0.0)
            if number == 0.0 and name in _ABOVE_0:
                raise ConfigError(f"{name} is above 0; got 0")
    for pattern, rate in config.lr_by_name.items():
        check_number(f"lr_by_name {pattern!r}", rate, 0.0)
    check_number("entropy_coefficient", config.entropy_coefficient)
    check_number("min_lr_share", config.min_lr_share, 0.0, 1.0)
    if len(config.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in config.betas):
        raise ConfigError(f"betas are two numbers in [0, 1); got {config.betas!r}")
    clip = config.clip.checked()
    if config.loss in ("ppo", "decoupled") and not (clip.low < 1.0 and clip.high > 0.0):
        raise ConfigError(f"clip_low is below 1, clip_high above 0; got {clip.low:g} and {clip.high:g}")


def _check_together(config: PPOConfig) -> None:
    """Reject options that have no effect with the others."""
    is_decoupled, without_kl = config.loss == "decoupled", not config.kl_coefficient
    of_decoupled = [name for name in ("decoupled_cap", "beyond_cap") if _is_set(config, name)]
    is_normed = config.aggregation == "seq-mean-token-sum-norm"
    refusals: dict[str, object] = {
        "give minibatch_rows or minibatches, not both": config.minibatch_rows and config.minibatches,
        f"loss {config.loss!r} has no dual_clip; leave it out": config.dual_clip and config.loss in ("gspo", "cispo"),
        f"{'/'.join(of_decoupled)} is of loss 'decoupled'; got {config.loss!r}": of_decoupled and not is_decoupled,
        "loss 'decoupled' has its own importance weights; remove importance": config.importance and is_decoupled,
        "importance_cap caps importance weights; say importance='token'": not config.importance
        and _is_set(config, "importance_cap"),
        "kl_target adapts kl_coefficient, which is 0": config.kl_target and without_kl,
        "kl_horizon is how slowly kl_coefficient adapts; say kl_target too": not config.kl_target
        and _is_set(config, "kl_horizon"),
        "kl_kind is of the divergence in the loss, and kl_coefficient is 0": without_kl and _is_set(config, "kl_kind"),
        "norm_length is of aggregation 'seq-mean-token-sum-norm'; say both or neither": is_normed
        != bool(config.norm_length),
        "in critic_warmup the value head alone learns, and value_coefficient is 0": config.critic_warmup
        and not config.value_coefficient,
        "min_lr_share is where a schedule ends; say schedule='linear' or 'cosine'": config.min_lr_share
        and config.schedule == "constant",
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(message)


def _is_set(config: PPOConfig, name: str) -> bool:
    default = next(one.default for one in fields(config) if one.name == name)
    return bool(getattr(config, name) != default)


def lr_factor(config: PPOConfig, update: int, total: int | None) -> float:
    """Return the factor of the learning rate at an update, from 0, of `total`; later ones have the last one's."""
    if update < config.warmup:
        return (update + 1) / config.warmup
    if config.schedule == "constant" or total is None:
        return 1.0
    share = min((update - config.warmup) / max(total - config.warmup, 1), 1.0)
    left = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr_share + (1.0 - config.min_lr_share) * left
