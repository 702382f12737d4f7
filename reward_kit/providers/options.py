"""Checks of what a user sets for an endpoint."""

from __future__ import annotations

import math
from typing import Any

from reward_kit.errors import ConfigError


def check_number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> None:
    """Positive, or zero where that is allowed.

    Raises:
        ConfigError: `value` is another thing; the message names the option.
    """
    kinds = int if whole else int | float
    number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{name}: expected a {kind} {'of at least' if zero else 'above'} 0, got {value!r}")
