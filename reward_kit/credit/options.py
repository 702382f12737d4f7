"""Validation of options. The checks raise a ConfigError if an option is unknown, is out of range, or has no effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from reward_kit.errors import ConfigError, did_you_mean

Normalization = Literal["std", "mean", "constant", "leave_one_out"]
EpisodeStatistics = Literal["trajectory", "step"]
"""What counts once in the statistics of the scores of a group: each trajectory, or each step."""
RowsWithScore = Literal["last", "each"]
"""The rows of a trajectory that contain its score: only the last row, or each row."""


def check_choice(name: str, choice: object, known: Sequence[str]) -> None:
    """Raise a ConfigError if `choice` is not in `known`."""
    if choice not in known:
        raise ConfigError(f"unknown {name} {choice!r}{did_you_mean(str(choice), known)}")


def check_number(name: str, number: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise a ConfigError if `number` is not a finite number in [low, high]."""
    if not isinstance(number, int | float | np.integer | np.floating) or not math.isfinite(number):
        raise ConfigError(f"{name} must be a finite number, got {number!r}")
    if not low <= number <= high:
        limits = f"in [{low:g}, {high:g}]" if high < math.inf else f"at least {low:g}"
        raise ConfigError(f"{name} must be {limits}, got {number!r}")


def check_integer(name: str, number: object, low: int) -> None:
    """Raise a ConfigError if `number` is not an integer of at least `low`."""
    if not isinstance(number, int) or isinstance(number, bool) or number < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {number!r}")


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
