"""The types of options that several rewards share, so that what makes no sense is refused when a task is loaded."""

from __future__ import annotations

import importlib.util
from typing import Annotated

from pydantic import Field

from reward_kit.errors import ConfigError, how_to_install

Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""The largest difference, or share of one."""
Closeness = Annotated[float, Field(ge=0, lt=1)]
"""How far numbers may lie apart, as share and as difference."""
Seconds = Annotated[float, Field(gt=0, le=28_000)]
"""Of CPU time. Three times as many of wall time, and one more, are no more than a day."""
Megabytes = Annotated[int, Field(ge=16, le=1 << 20)]
"""As `sandbox.limits` allows."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


def check_closeness(tolerance: float) -> None:
    """The same in a call by hand.

    Raises:
        ConfigError: it is not in [0, 1).
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(f"option 'tolerance': it is at least 0 and less than 1, not {tolerance}")


def check_extra(extra: str, *packages: str) -> None:
    """Refuse a reward whose packages are missing, before it leaves rollouts unscored one by one.

    Args:
        extra: of this package, which brings them.
        packages: their top-level modules.

    Raises:
        ConfigError: one cannot be found.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"it needs {', '.join(missing)}; {how_to_install(extra)}")
