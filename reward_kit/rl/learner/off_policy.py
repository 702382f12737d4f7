"""The off-policy ledger: how far the samples are from the policy that is trained on them, and alarms where too far."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from reward_kit.credit.options import check_number
from reward_kit.tokens.columns import Array, Floats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyLimits:
    """Where an alarm is raised; None: never.

    Attributes:
        logprob_gap_mean: of |the module's log-probability before the update - the sampler's|, the mean over tokens.
            Two implementations in float32 differ by 1e-5, a bfloat16 sampler by 1e-2.
        approx_kl: the mean estimate of how far the policy has moved.
        clip_fraction: the share of tokens that the clip leaves without a gradient.
        ratio_max: the greatest probability ratio.
        effective_share: the least effective sample size, as a share of the tokens (of sequences with "gspo").
        lag_max: how many versions older than the policy in training a token's sampler is.
        grad_norm: before it is cut.

    Raises:
        ConfigError: a limit is negative or not finite.
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

    def alarms(self, found: Mapping[str, float]) -> dict[str, float]:
        """`alarm/<name>`: what was measured, for each limit that it is beyond; each is logged as a warning.

        Args:
            found: the diagnostics of an update.
        """
        beyond = {}
        for one in fields(self):
            limit, measured = getattr(self, one.name), found.get(one.name)
            if limit is None or measured is None:
                continue
            is_least = one.name == "effective_share"
            # NaN is beyond every limit.
            if not (measured >= limit if is_least else measured <= limit):
                beyond[f"alarm/{one.name}"] = measured
                log.warning("off-policy: %s is %g, %s the limit %g", one.name, measured, _side(is_least), limit)
        return beyond


def _side(is_least: bool) -> str:
    return "below" if is_least else "above"


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
