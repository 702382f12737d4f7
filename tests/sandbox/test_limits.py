"""Limits are checked when they are written down, not when a call meets them."""

from __future__ import annotations

import pytest

from reward_kit.errors import ConfigError
from reward_kit.sandbox import Limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_s", 0),
        ("wall_s", float("nan")),
        ("cpu_s", -1),
        ("cpu_s", True),
        ("cpu_s", "10"),
        ("memory_mb", 1),
        ("memory_mb", 512.0),
        ("processes", -1),
        ("open_files", 4),
        ("disk_mb", 0),
        ("output_kb", -1),
        ("result_kb", 0),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"limits\.{name}"):
        Limits(**{name: value})


def test_equal_limits_are_one_key():
    assert hash(Limits(wall_s=2.0)) == hash(Limits(wall_s=2.0))
