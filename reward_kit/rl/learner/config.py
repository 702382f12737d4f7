"""The options for the PPO learner, which are checked on construction."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch

from reward_kit.errors import ConfigError
from reward_kit.rl.kl import KLEstimator
from reward_kit.rl.loss_terms import Aggregation, check_above_0
from reward_kit.rl.losses import BeyondCap, ClipRange, Level
from reward_kit.validation import check_choice, check_number

logger = logging.getLogger("reward_kit.rl")
LossName = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "decoupled", "turn_gspo", "turn_ppo"]
OldLogprobs = Literal["sampler", "recomputed"]
OldValues = Literal["recorded", "recomputed"]
LRSchedule = Literal["constant", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
Optimizer = Literal["adamw", "muon"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"]
_CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "sapo": (1.0, 0.0),  # not used
    "gmpo": (0.4, 0.4),
    "dppo_tv": (0.15, 0.15),
    "dppo_kl": (0.05, 0.05),
    "decoupled": (0.2, 0.2),
    "turn_gspo": (0.2, 0.2),
    "turn_ppo": (0.2, 0.2),
}
_DUAL = ("ppo", "decoupled", "turn_gspo", "turn_ppo")
"""The losses that have a dual clip."""
_OF_SEQUENCES = ("gspo", "sapo", "gmpo")
"""The losses whose default aggregation is the mean over sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """The size of low-rank adapters and the layers to which the adapters are added.

    Attributes:
        rank: the rank of an adapter's two matrices.
        alpha: the scale of an adapter. The adapter's output is multiplied by alpha / rank.
        targets: the names of linear layers. A name matches a layer if the layer's path ends with it. "all-linear" means
            all linear layers except the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = "all-linear"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora.rank must be an integer of at least 1, got {self.rank!r}")
        check_number("lora.alpha", self.alpha, 0.0)
        if not self.targets:
            raise ConfigError("lora.targets must name at least one layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyLimits:
    """The limits beyond which an alarm is raised. None disables an alarm.

    Attributes:
        logprob_gap_mean: the maximum value for the mean absolute difference between the sampler's log-probabilities and
            those computed before the update. Two float32 implementations differ by about 1e-5, and a bfloat16 sampler
            by about 1e-2.
        approx_kl: the maximum estimated KL divergence of the update.
        clip_fraction: the maximum fraction of tokens that have no gradient because their ratio is clipped.
        ratio_max: the maximum probability ratio.
        effective_share: the minimum effective sample size, as a fraction of the number of tokens. It is a
            fraction of the number of sequences for "gspo", and of turns for "turn_gspo" and "turn_ppo".
        lag_max: the maximum number of versions by which the weights that sampled a token may be older than the weights
            that are being trained.
        grad_norm: the maximum gradient norm before clipping.
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
        """Log each limit that the diagnostics exceed, and return the measured values under the names `alarm/<name>`."""
        beyond = {}
        for one in fields(self):
            limit, measured = getattr(self, one.name), diagnostics.get(one.name)
            if limit is None or measured is None:
                continue
            is_least = one.name == "effective_share"
            # NaN exceeds every limit.
            if not (measured >= limit if is_least else measured <= limit):
                beyond[f"alarm/{one.name}"] = measured
                side = "below" if is_least else "above"
                logger.warning("off-policy: %s is %g, %s the limit %g", one.name, measured, side, limit)
        return beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """The hyperparameters for an update.

    Attributes:
        epochs: the number of passes over the batch.
        minibatch_rows: the number of rows in an optimizer step. If None, `minibatches` is used. If `minibatches` is
            also None, each step uses all rows.
        minibatches: the number of optimizer steps in an epoch, at most one for each row. The sizes of the mini-batches
            differ by at most one row.
        max_tokens_per_micro_batch: the maximum number of tokens in one pass through the module, including padding. If
            None, the maximum is 1,024 on a CPU, which fits its caches, and 16,384 on an accelerator. A row that is
            longer forms a pass by itself. The value affects memory and speed, but not the gradient.
        loss: the policy loss; see `rl.losses`.
        clip_low: the maximum distance of the probability ratio below 1. For "gmpo", it is the maximum distance of the
            log-ratio below 0; for "dppo_tv" and "dppo_kl", it is the maximum divergence of a token with a negative
            advantage. If None, the default of the loss is used: 3e-4 for "gspo", 1 for "cispo", 0.4 for "gmpo", 0.15
            for "dppo_tv", 0.05 for "dppo_kl", and 0.2 for all other losses.
        clip_high: the corresponding maximum above 1, above 0, or for positive advantages. If None, the default is the
            same as for `clip_low`, except that it is 4e-4 for "gspo" and 4 for "cispo".
        dual_clip: the bound on the loss of tokens with a negative advantage, for "ppo", "decoupled", "turn_gspo" and
            "turn_ppo". None means no bound.
        aggregation: how token losses are reduced to a single number. If None, it is "seq-mean-token-mean" for "gspo",
            "sapo" and "gmpo", and "token-mean" for all other losses.
        norm_length: the divisor for "seq-mean-token-sum-norm".
        old_logprobs: the source of the log-probabilities in the denominator of the ratio: either the sampler or, at the
            cost of a forward pass, the module before the update. "decoupled" and importance weights always use the
            latter.
        importance: the level ("token" or "sequence") of truncated importance weights, which correct for the difference
            between the sampler and the recomputed log-probabilities. None disables them.
        importance_cap: the maximum importance weight.
        decoupled_cap: the maximum weight in "decoupled".
        beyond_cap: whether to exclude a token whose weight exceeds `decoupled_cap` or to truncate the weight.
        kl_coefficient: the coefficient, in the loss, of the divergence from the reference. With `lora`, the default
            reference is the module without its adapters.
        kl_kind: the estimator for this divergence.
        kl_target: the value of `kl_sequence` that an adaptive coefficient maintains. If None, the coefficient is
            constant.
        kl_horizon: the number of rows over which an adaptive coefficient may change by a fifth.
        entropy_coefficient: the coefficient of the entropy bonus.
        value_coefficient: the coefficient of the critic's loss if the module has a value head.
        value_clip: the maximum distance between a value and its old value. None means no limit.
        old_values: the source of the old values, which are either recorded by the policy or computed by the module
            before the update.
        critic_warmup: the number of initial updates that train only the value head.
        lr: the learning rate.
        value_lr: the learning rate of the value head. If None, `lr` is used.
        lr_by_name: learning rates keyed by parameter name, such as {"*norm*": 1e-2}. Keys are `fnmatch` patterns for
            the names in `named_parameters`. The learning rate of the first matching pattern replaces `value_lr` or
            `lr`. All learning rates follow the same schedule.
        optimizer: "adamw", or "muon", which trains the matrices of hidden layers with torch's Muon, scaled so that the
            learning rates of AdamW fit, and everything else, such as embeddings and norms, with AdamW.
        betas: the betas of AdamW.
        adam_epsilon: the epsilon of AdamW.
        weight_decay: the weight decay of AdamW, which is applied to matrices but not to biases, norms or other vectors.
        max_grad_norm: the 2-norm to which the gradient is clipped. If None, the gradient is not clipped.
        schedule: the learning rate schedule after the warm-up.
        warmup: the number of initial updates over which the learning rate rises.
        min_lr_share: the learning rate at the end of the schedule, as a fraction of `lr`.
        temperature: the temperature by which logits are divided. It must equal the sampler's temperature.
        precision: "bfloat16" runs the module in autocast, while trained weights and losses are float32. If None, the
            module's type determines the precision.
        gradient_checkpointing: whether to recompute activations inside the layers of the module instead of storing
            them.
        compile: whether to compile the layers of the module with `torch.compile`. The first update then takes a minute
            or more longer. If the compiler fails, or the module is sharded over processes, the layers run uncompiled
            and a warning is logged.
        attention: the attention implementation of `transformers` for training. If None, the module's own is kept, which
            is scaled dot-product attention ("sdpa") for most models. If the implementation does not work on this
            machine, the module's own is kept and a warning is logged.
        packed: whether to concatenate the rows of a micro-batch instead of padding them to the longest row. On a GPU
            and in bfloat16, attention within the rows is computed by the kernel of `torch` for rows of variable length,
            otherwise one row after the other. If the module cannot compute packed rows, they are padded and a warning
            is logged.
        max_logits: the maximum number of logits in memory, which is the number of tokens times the vocabulary size. If
            there are more logits, the head runs in chunks. With a gradient, the head requires five times the memory of
            these logits; without a gradient, it requires twice their memory.
        lora: the options for low-rank adapters, which are trained instead of the module's weights. If None, the weights
            are trained.
        limits: the limits beyond which an alarm about off-policy data is raised.

    Raises:
        ConfigError: If a value is out of range or unknown, or has no effect in combination with the others.
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
    optimizer: Optimizer = "adamw"
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
    compile: bool = False
    attention: Attention | None = None
    packed: bool = False
    max_logits: int = 2**27
    lora: LoRAOptions | None = None
    limits: OffPolicyLimits = field(default_factory=OffPolicyLimits)

    def __post_init__(self) -> None:
        _check_values(self)
        _check_together(self)

    @property
    def clip(self) -> ClipRange:
        """The clip range, including the loss's defaults."""
        low, high = _CLIPS[self.loss]
        given = (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)
        return ClipRange(*given, self.dual_clip)

    @property
    def reduction(self) -> Aggregation:
        """The aggregation or, if it is `None`, the loss's default."""
        return self.aggregation or ("seq-mean-token-mean" if self.loss in _OF_SEQUENCES else "token-mean")

    def for_weights(self, dtype: torch.dtype) -> PPOConfig:
        """Return the options with `precision` set; the default depends on the type of the module's weights."""
        if self.precision is not None:
            return self
        return replace(self, precision="bfloat16" if dtype == torch.bfloat16 else "float32")

    @property
    def of_critic(self) -> tuple[str, ...]:
        """The names of all critic options that are set."""
        names = ("critic_warmup", "value_coefficient", "value_clip", "value_lr", "old_values")
        return tuple(name for name in names if _is_set(self, name))

    @property
    def uses_sampler(self) -> bool:
        """True if the loss uses the sampler's log-probabilities."""
        return self.old_logprobs == "sampler" or self.loss == "decoupled" or self.importance is not None

    @property
    def recomputes(self) -> bool:
        """True if the loss uses the module's log-probabilities before the update."""
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
    "optimizer": Optimizer,
    "attention": Attention,
}
_COUNTS = {"epochs": 1, "minibatch_rows": 1, "minibatches": 1, "max_tokens_per_micro_batch": 1, "max_logits": 1}
_COUNTS |= {"critic_warmup": 0, "warmup": 0}
_AT_LEAST_0 = ("kl_coefficient", "value_coefficient", "weight_decay", "lr", "value_lr")
_ABOVE_0 = (
    *("importance_cap", "decoupled_cap", "kl_target", "kl_horizon", "value_clip", "adam_epsilon", "max_grad_norm"),
    *("temperature", "norm_length"),
)


def schema_bounds() -> dict[str, dict[str, float]]:
    """Return the bounds of numeric options as JSON Schema."""
    bounds: dict[str, dict[str, float]] = {name: {"minimum": least} for name, least in _COUNTS.items()}
    bounds |= {name: {"minimum": 0.0} for name in _AT_LEAST_0} | {name: {"exclusiveMinimum": 0.0} for name in _ABOVE_0}
    return bounds | {"min_lr_share": {"minimum": 0.0, "maximum": 1.0}}


def _check_values(config: PPOConfig) -> None:
    for name, kind in _CHOICES.items():
        if (choice := getattr(config, name)) is not None:
            check_choice(name, choice, get_args(kind))
    for one in fields(config):
        if isinstance(one.default, bool) and not isinstance(switch := getattr(config, one.name), bool):
            raise ConfigError(f"{one.name} must be True or False, got {switch!r}")
    if config.lora is not None and not isinstance(config.lora, LoRAOptions):
        raise ConfigError(f"lora must be LoRAOptions(rank=…), got {config.lora!r}")
    for name, least in _COUNTS.items():
        count = getattr(config, name)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < least):
            raise ConfigError(f"{name} must be an integer of at least {least}, got {count!r}")
    for name in (*_AT_LEAST_0, *_ABOVE_0):
        if (number := getattr(config, name)) is not None:
            check_above_0(name, number) if name in _ABOVE_0 else check_number(name, number, 0.0)
    for pattern, rate in config.lr_by_name.items():
        check_number(f"lr_by_name {pattern!r}", rate, 0.0)
    check_number("entropy_coefficient", config.entropy_coefficient)
    check_number("min_lr_share", config.min_lr_share, 0.0, 1.0)
    if len(config.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in config.betas):
        raise ConfigError(f"betas must be two numbers in [0, 1), got {config.betas!r}")
    clip = config.clip.checked()
    if config.loss in ("ppo", "decoupled") and not (clip.low < 1.0 and clip.high > 0.0):
        raise ConfigError(f"clip_low must be below 1 and clip_high above 0, got {clip.low:g} and {clip.high:g}")


def _check_together(config: PPOConfig) -> None:
    """Reject options that have no effect in combination with the others."""
    is_decoupled, without_kl = config.loss == "decoupled", not config.kl_coefficient
    of_decoupled = [name for name in ("decoupled_cap", "beyond_cap") if _is_set(config, name)]
    is_normed = config.aggregation == "seq-mean-token-sum-norm"
    refusals: dict[str, object] = {
        "set either minibatch_rows or minibatches, not both": config.minibatch_rows and config.minibatches,
        f"loss {config.loss!r} has no dual_clip; remove it": config.dual_clip and config.loss not in _DUAL,
        "loss 'sapo' has no clip range; remove clip_low and clip_high": config.loss == "sapo"
        and (config.clip_low, config.clip_high) != (None, None),
        f"{'/'.join(of_decoupled)} applies only to loss 'decoupled', got {config.loss!r}": of_decoupled
        and not is_decoupled,
        "loss 'decoupled' has its own importance weights; remove importance": config.importance and is_decoupled,
        "importance_cap has no effect without importance; set importance='token'": not config.importance
        and _is_set(config, "importance_cap"),
        "kl_target adapts kl_coefficient, which is 0; set a positive coefficient": config.kl_target and without_kl,
        "kl_horizon has no effect without kl_target; set kl_target": not config.kl_target
        and _is_set(config, "kl_horizon"),
        "kl_kind has no effect, since kl_coefficient is 0": without_kl and _is_set(config, "kl_kind"),
        "norm_length and aggregation 'seq-mean-token-sum-norm' require each other; set both or neither": is_normed
        != bool(config.norm_length),
        "critic_warmup trains only the value head, but value_coefficient is 0": config.critic_warmup
        and not config.value_coefficient,
        "packed rows cannot be computed with attention 'eager'; remove one of the two": config.packed
        and config.attention == "eager",
        "min_lr_share has no effect with a constant schedule; set schedule='linear' or 'cosine'": config.min_lr_share
        and config.schedule == "constant",
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(message)


def _is_set(config: PPOConfig, name: str) -> bool:
    default = next(one.default for one in fields(config) if one.name == name)
    return bool(getattr(config, name) != default)


def lr_factor(config: PPOConfig, update: int, total: float | None, progress: float = 0.0) -> float:
    """Return the learning rate factor for an update. Updates are counted from 0.

    The schedule's position is the share of updates or `progress`, whichever is larger. After its end, the factor is
    constant.
    """
    if update < config.warmup:
        return (update + 1) / config.warmup
    if config.schedule == "constant" or total is None:
        return 1.0
    share = min(max((update - config.warmup) / max(total - config.warmup, 1), progress), 1.0)
    left = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.min_lr_share + (1.0 - config.min_lr_share) * left
