"""The divergence from a reference policy: estimates, a loss, a penalty on rewards, and an adaptive coefficient.

The functions share the arguments of the policy losses in `rl.losses`, and raise the same errors.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.loss_terms import (
    Aggregation,
    Diagnostics,
    GlobalBatch,
    Loss,
    MaskedTokens,
    check_above_0,
    clamp_log_ratio,
    mean_statistic,
    widened,
)
from reward_kit.validation import check_choice, check_number

__all__ = ["AdaptiveKLCoefficient", "PenalizedRewards", "kl_estimate", "kl_loss", "penalized_rewards"]
KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "abs"]


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimate KL(policy, reference) for each token (Schulman 2020, "Approximating KL divergence").

        d  = logprobs - reference_logprobs; the reference has no gradient
        k1 = d                   unbiased; can be negative
        k2 = d² / 2              has a small bias if the two are close
        k3 = exp(-d) - 1 + d     unbiased and never negative; d is clipped to ±20 first
        k1+, k3+                 the value of k1 or k3 with the gradient of k2, which is d
        abs = |d|                biased; a penalty on any change

    The result is in float32 or wider.

    On samples from the policy, only the gradient of k2 is the gradient of the divergence. The gradient of k1 is 0 on
    average, and the gradient of k3 belongs to the reverse divergence, KL(reference, policy). Use k1 and k3 for
    monitoring and rewards, and k2, k1+ and k3+ for a loss. In verl, k3 is capped at 10, so tokens far from the
    reference have no gradient. Here, k3 is not capped.
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    logprobs = widened(logprobs)
    difference = logprobs - widened(reference_logprobs).detach()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "abs":
        return difference.abs()
    near = clamp_log_ratio(difference)
    value = difference if estimator.startswith("k1") else torch.expm1(-near) + near
    if not estimator.endswith("+"):
        return value
    # The second summand is 0 and has the gradient d. Unlike d² / 2, it cannot overflow.
    return value.detach() + difference.detach() * (logprobs - logprobs.detach())


def kl_loss(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    estimator: KLEstimator = "k3+",
    weights_BT: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    global_batch: GlobalBatch | None = None,
    sequence_ids_BT: Tensor | None = None,
) -> Loss:
    """Return the divergence from the reference as a loss. Multiply it by a coefficient, and add it to the policy loss.

    The diagnostics are `kl`, the mean estimate per token (see `kl_estimate`), and `kl_sequence`, the sum of the
    estimates in a sequence, averaged over sequences. Both are computed without `weights_BT`.
    """
    tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
    kl_N, measured = _kl(tokens, logprobs_BT, reference_logprobs_BT, estimator)
    return Loss(tokens.aggregate(tokens.weighted(kl_N, weights_BT), aggregation, global_batch), measured)


class PenalizedRewards(NamedTuple):
    """Rewards (B,T) minus the penalty, in float32 or wider and without a gradient, and diagnostics of the penalty."""

    rewards_BT: Tensor
    diagnostics: Diagnostics


def penalized_rewards(
    rewards_BT: Tensor,
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    coefficient: float,
    estimator: KLEstimator = "k1",
    sequence_ids_BT: Tensor | None = None,
) -> PenalizedRewards:
    """Subtract coefficient · kl_t from the reward of each included token, before advantages are computed.

    The penalty then affects the policy through the advantages. The coefficient must be at least 0. Estimators with "+"
    are rejected, because they differ only in their gradients. The diagnostics are the same as for `kl_loss`.
    """
    if estimator.endswith("+"):
        raise ConfigError(
            f"{estimator!r} differs from {estimator[:-1]!r} only in its gradient; use {estimator[:-1]!r} for rewards"
        )
    check_number("coefficient", coefficient, 0.0)
    with torch.no_grad():
        tokens = MaskedTokens(loss_mask_BT, sequence_ids_BT)
        kl_N, measured = _kl(tokens, logprobs_BT, reference_logprobs_BT, estimator)
        rewards_N = tokens.pick("rewards", rewards_BT) - coefficient * kl_N
        # The type of the rewards could round the penalty away.
        changed_BT = torch.where(loss_mask_BT.bool(), tokens.lay(rewards_N), rewards_BT.to(rewards_N.dtype))
        return PenalizedRewards(changed_BT, measured)


def _kl(
    tokens: MaskedTokens, logprobs_BT: Tensor, reference_BT: Tensor, estimator: KLEstimator
) -> tuple[Tensor, Diagnostics]:
    reference_N = tokens.pick("reference_logprobs", reference_BT)
    kl_N = kl_estimate(tokens.pick("logprobs", logprobs_BT), reference_N, estimator)
    sums_Q = tokens.sequence_sums(kl_N.detach())
    return kl_N, Diagnostics({"kl": mean_statistic(kl_N), "kl_sequence": mean_statistic(sums_Q)})


class AdaptiveKLCoefficient:
    """A coefficient that grows while the divergence from the reference exceeds the target, and shrinks otherwise.

        coefficient ← coefficient · (1 + clip(kl / target - 1, -0.2, 0.2) · min(samples / horizon, 1))

    See Ziegler et al. 2019, section 2.2. `samples` is capped at the horizon. Otherwise, the coefficient could become 0
    if there were five times as many samples as the horizon. With even more samples, it could become negative, which
    would reward divergence.

    Args:
        coefficient: the initial value.
        target: the divergence to maintain, in the same unit as the divergence passed to `update`.
        horizon: the number of samples over which the coefficient may change by a fifth.

    Raises:
        ConfigError: If an argument is not positive.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float) -> None:
        for name, number in (("coefficient", coefficient), ("target", target), ("horizon", horizon)):
            check_above_0(name, number)
        self.value, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, samples: float) -> float:
        """Update the coefficient for a divergence, such as `kl_sequence`, that was measured on `samples` sequences.

        Returns:
            The new coefficient.

        Raises:
            TrainingError: If the divergence is not finite. The coefficient is unchanged.
            ConfigError: If the number of samples is negative or not finite.
        """
        check_number("samples", samples, 0.0)
        kl = float(kl)
        if not math.isfinite(kl):
            raise TrainingError(
                f"the KL divergence from the reference is {kl}; its coefficient is still {self.value:g}"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint.

        The state excludes the target and the horizon, which belong to the configuration.
        """
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the state from a checkpoint, or raise a `ConfigError` if it has no coefficient."""
        check_number("the state's value", state.get("value"), 0.0)
        self.value = state["value"]
