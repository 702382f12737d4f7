"""Validation of options. The checks raise a ConfigError if an option is unknown, is out of range, or has no effect."""

from __future__ import annotations

from typing import Literal, get_args

from reward_kit.errors import ConfigError
from reward_kit.validation import check_choice, check_number

Normalization = Literal["std", "mean", "constant", "leave_one_out"]
EpisodeStatistics = Literal["trajectory", "step"]
"""What counts once in the statistics of the scores of a group: each trajectory, or each step."""
RowsWithScore = Literal["last", "each"]
"""The rows of a trajectory that contain its score: only the last row, or each row."""


def check_returns(gamma: float, default_step_reward: float) -> None:
    """Raise a ConfigError unless `gamma` is in [0, 1] and `default_step_reward` is finite."""
    check_number("gamma", gamma, 0.0, 1.0)
    check_number("default_step_reward", default_step_reward)


def check_normalization(normalization: str, normalization_constant: float | None, epsilon: float) -> None:
    """Validate the name of the normalization, the normalization constant and `epsilon`.

    The constant is required for the normalization "constant" and rejected for all other normalizations. `epsilon` must
    be finite and non-negative.
    """
    check_choice("normalization", normalization, get_args(Normalization))
    check_number("epsilon", epsilon, 0.0)
    if normalization != "constant":
        if normalization_constant is not None:
            raise ConfigError(
                f"normalization_constant applies only to normalization 'constant', not to {normalization!r}; "
                f"got {normalization_constant!r}"
            )
        return
    check_number("normalization_constant (the divisor of 'constant')", normalization_constant, 0.0)
    if normalization_constant == 0.0:
        raise ConfigError("normalization_constant, the divisor of 'constant', must not be 0")
