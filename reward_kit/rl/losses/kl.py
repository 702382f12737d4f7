"""The distance to a reference policy: estimated from samples, as a loss, in the rewards, and held near a target."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from reward_kit.credit.options import check_choice, check_number
from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.losses.diagnostics import Diagnostics, Loss, mean_of
from reward_kit.rl.losses.importance import cut
from reward_kit.rl.losses.participants import Aggregation, GlobalBatch, Participants

KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


class PenalisedRewards(NamedTuple):
    """(B,T) rewards less the penalty, without a gradient, and what describes the penalty."""

    rewards_BT: Tensor
    diagnostics: Diagnostics


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Of each token, an estimate of KL(policy, reference) (Schulman 2020, "Approximating KL divergence").

        d  = logprobs - reference_logprobs
        k1 = d                   unbiased; may be negative
        k2 = d² / 2              biased by little where the two are close
        k3 = exp(-d) - 1 + d     unbiased and never negative; d is cut to ±20 first
        k1+, k3+                 the value of k1 or k3 with the gradient of k2

    On samples of the policy only k2 has the gradient of the divergence: that of k1 is 0 on average, and that of k3 is
    of the reverse, KL(reference, policy). So k1 and k3 are for reading and rewards, and k2, k1+ and k3+ for a loss.
    Unlike verl's, k3 has no upper bound of 10: beyond one a token far from the reference would have no gradient left.

    Args:
        logprobs: of the policy.
        reference_logprobs: of the reference; gets no gradient.
        estimator: which.

    Raises:
        ConfigError: the estimator is unknown.
    """
    check_choice("estimator", estimator, get_args(KLEstimator))
    difference = logprobs - reference_logprobs.detach()
    half_square = 0.5 * difference.square()
    if estimator == "k2":
        return half_square
    near = cut(difference)
    value = difference if estimator.startswith("k1") else torch.expm1(-near) + near
    return value.detach() + (half_square - half_square.detach()) if estimator.endswith("+") else value


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
    """The divergence from the reference as a loss, to be added with a coefficient.

    Args:
        logprobs_BT: of the policy being trained; the only input that gets a gradient.
        reference_logprobs_BT: of the reference.
        loss_mask_BT: 1 where a token takes part.
        estimator: see `kl_estimate`.
        weights_BT: a factor per token, such as importance weights of samples of another policy; None: 1. The
            diagnostics are without it.
        aggregation: how the tokens' losses become one.
        global_batch: the counts of all micro-batches; None: these rows are all.
        sequence_ids_BT: which sequence a token belongs to; None: its row.

    Returns:
        The loss, and `kl` and `kl_sequence`: the estimate per token, and its mean sum over a sequence.

    Raises:
        ConfigError: an option is unknown, or shapes differ.
    """
    tokens = Participants(loss_mask_BT, sequence_ids_BT)
    kl_N = _kl(tokens, logprobs_BT, reference_logprobs_BT, estimator)
    loss_N = tokens.weighted(kl_N, weights_BT)
    return Loss(tokens.aggregate(loss_N, aggregation, global_batch), _described(tokens, kl_N))


def penalised_rewards(
    rewards_BT: Tensor,
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    *,
    coefficient: float,
    estimator: KLEstimator = "k1",
    sequence_ids_BT: Tensor | None = None,
) -> PenalisedRewards:
    """The divergence from the reference in the rewards: rewards_t - coefficient · kl_t on each token that takes part.

    It is made before advantages are, and reaches the policy through them.

    Args:
        rewards_BT: of each token; those of tokens that take no part stay as they are.
        logprobs_BT: of the policy that sampled.
        reference_logprobs_BT: of the reference.
        loss_mask_BT: 1 where a token takes part.
        coefficient: the weight of the penalty, at least 0.
        estimator: see `kl_estimate`; "+" is for gradients, of which there are none here.
        sequence_ids_BT: which sequence a token belongs to, for `kl_sequence`; None: its row.

    Returns:
        The rewards, and `kl` and `kl_sequence` as of `kl_loss`.

    Raises:
        ConfigError: the estimator has a "+" or is unknown, the coefficient is negative, or shapes differ.
    """
    if estimator.endswith("+"):
        raise ConfigError(
            f"{estimator!r} is {estimator[:-1]!r} with another gradient; in rewards say {estimator[:-1]!r}"
        )
    check_number("coefficient", coefficient, 0.0)
    with torch.no_grad():
        tokens = Participants(loss_mask_BT, sequence_ids_BT)
        kl_N = _kl(tokens, logprobs_BT, reference_logprobs_BT, estimator)
        rewards_N = tokens.pick("rewards", rewards_BT) - coefficient * kl_N
        # Whole numbers would swallow the penalty.
        dtype = rewards_BT.dtype if rewards_BT.is_floating_point() else rewards_N.dtype
        changed_BT = torch.where(loss_mask_BT.bool(), tokens.lay(rewards_N).to(dtype), rewards_BT.to(dtype))
        return PenalisedRewards(changed_BT, _described(tokens, kl_N))


def _kl(tokens: Participants, logprobs_BT: Tensor, reference_BT: Tensor, estimator: KLEstimator) -> Tensor:
    reference_N = tokens.pick("reference_logprobs", reference_BT)
    return kl_estimate(tokens.pick("logprobs", logprobs_BT), reference_N, estimator)


def _described(tokens: Participants, kl_N: Tensor) -> Diagnostics:
    kl_N = kl_N.detach()
    return Diagnostics({"kl": mean_of(kl_N), "kl_sequence": mean_of(tokens.sequence_sums(kl_N))})


class AdaptiveKLCoefficient:
    """A coefficient that grows while the policy is further from the reference than the target, else shrinks.

        coefficient ← coefficient · (1 + clip(kl / target - 1, -0.2, 0.2) · min(samples / horizon, 1))

    After Ziegler et al. 2019, section 2.2. More samples than the horizon count as the horizon: five times as many would
    make the coefficient 0, and more would make it negative, a reward for distance.

    Args:
        coefficient: to begin with.
        target: the divergence to hold, in the unit of what `update` is given.
        horizon: over how many samples the coefficient may change by a fifth.

    Raises:
        ConfigError: one of them is not above 0.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: float) -> None:
        for name, number in (("coefficient", coefficient), ("target", target), ("horizon", horizon)):
            check_number(name, number, 0.0)
            if number == 0.0:
                raise ConfigError(f"{name} is above 0; got 0")
        self.value, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, samples: float) -> float:
        """The new coefficient.

        Args:
            kl: measured on these samples, such as `kl_sequence`.
            samples: how many sequences.

        Raises:
            TrainingError: the divergence is not finite; the coefficient stays.
            ConfigError: the number of samples is negative or not finite.
        """
        check_number("samples", samples, 0.0)
        kl = float(kl)
        if not math.isfinite(kl):
            raise TrainingError(f"the KL divergence from the reference is {kl}; its coefficient stays {self.value:g}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(samples / self.horizon, 1.0)
        return self.value

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps. Target and horizon are the configuration's."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint.

        Raises:
            ConfigError: it holds no coefficient.
        """
        check_number("the state's value", state.get("value"), 0.0)
        self.value = state["value"]
