"""Option types shared by multiple rewards, and comparison of numbers with a tolerance.

The types are checked when a task is loaded.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Annotated

from pydantic import Field

from reward_kit.errors import ConfigError, install_hint

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""The maximum absolute or relative difference between two numbers."""
Closeness = Annotated[float, Field(ge=0, lt=1)]
"""The maximum relative or absolute difference between two numbers, whichever is larger."""
Seconds = Annotated[float, Field(gt=0, le=28_000)]
"""A CPU time limit in seconds. The wall time limit, which is 3 times this value plus 1 s, is at most one day."""
Megabytes = Annotated[int, Field(ge=16, le=1 << 20)]
"""A memory limit in MiB, in the range of `sandbox.limits`."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


def check_closeness(tolerance: float) -> None:
    """Raise a ConfigError if the tolerance is not in [0, 1).

    Direct calls to a reward require this check, because option types are checked only for tasks.
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(f"option 'tolerance' must be at least 0 and less than 1, got {tolerance}")


def is_close(expected: float, got: float, tolerance: float) -> bool:
    """Return True if two numbers are equal within the tolerance. Integers may be too large for a float."""
    if expected == got or (expected != expected and got != got):
        return True
    try:
        return tolerance > 0 and math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:
        return False


def check_extra(extra: str, *packages: str) -> None:
    """Raise a ConfigError if a package in an extra is not installed.

    Without this check, every rollout would be unscored.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"missing package{'s' if len(missing) > 1 else ''}: {', '.join(missing)}; {install_hint(extra)}"
        )
