"""Test that a run's lines are parsed fast and exactly as Python's `json` does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.runs.files import read_line

TEXTS = st.text(st.characters(exclude_categories=()))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=10)


@given(VALUES)
def test_written_line_is_read_back(value: Any) -> None:
    line = json.dumps(value).encode("ascii")
    assert repr(read_line(line)) == repr(json.loads(line))


@pytest.mark.parametrize("line", [b'{"a":1,"a":2}', b"-0", b"-0.0", b"1E400", b"9" * 40, b'"\\ud800"', b" [1]\r\n"])
def test_foreign_json_is_read_like_json_loads(line: bytes) -> None:
    assert repr(read_line(line)) == repr(json.loads(line))


def test_nan_and_infinity_are_read() -> None:
    assert math.isnan(read_line(b"NaN")) and read_line(b"[-Infinity]") == [-math.inf]


@pytest.mark.parametrize("line", [b"", b"{", b'{"a":1}}', b'"\x01"', b'"\xff"', b"[1,]", b"01"])
def test_invalid_json_has_the_error_of_json_loads(line: bytes) -> None:
    with pytest.raises(ValueError) as told:
        read_line(line)
    with pytest.raises(ValueError) as expected:
        json.loads(line)
    assert str(told.value) == str(expected.value)


def test_too_deeply_nested_line_is_reported() -> None:
    with pytest.raises(RecursionError):
        read_line(b"[" * 200_000 + b"]" * 200_000)
    deep = b"[" * 400 + b"]" * 400
    assert read_line(deep) == json.loads(deep)
