"""Validation of sandbox limits."""

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
def test_invalid_limit_is_named(name, value):
    with pytest.raises(ConfigError, match=rf"limits\.{name}"):
        Limits(**{name: value})


def test_equal_limits_have_equal_hashes():
    assert hash(Limits(wall_s=2.0)) == hash(Limits(wall_s=2.0))
