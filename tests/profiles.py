"""Hypothesis profiles: `quick` (default, 20 examples) and `full` (`make test-all`, the count each test asks for)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUICK_EXAMPLES = 20
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")


def examples(count: int) -> int:
    """Return `count` in the full profile, at most 20 in the quick one."""
    return count if PROFILE == "full" else min(count, QUICK_EXAMPLES)


def load_profile() -> None:
    """Load the profile. No deadline: the time of one example depends on the load of the machine."""
    settings.register_profile(
        PROFILE, deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(PROFILE)
