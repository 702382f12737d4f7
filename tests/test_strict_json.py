"""Parsing of untrusted JSON according to RFC 8259."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.safe_input import parse_json, strict_decoder

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES, st.sampled_from(["utf-8", "utf-16", "utf-32-le"]))
def test_valid_json_is_parsed_as_by_the_json_module(value: Any, encoding: str) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode(encoding)) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"x": NaN}', "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1e999", "1e999 is out of the range of floats"),
        ("-" + "9" * 400 + ".0", f"-{'9' * 39} is out of"),
        ("{", "Expecting property name"),
    ],
)
def test_non_standard_json_is_rejected(text: str, told: str) -> None:
    for given_text in (text, text.encode()):
        with pytest.raises(ValueError, match=told):
            parse_json(given_text)


def test_object_pairs_hook_is_applied() -> None:
    assert strict_decoder(lambda pairs: [name for name, _ in pairs]).decode('{"a": 1, "a": 2}') == ["a", "a"]
    with pytest.raises(ValueError, match="Infinity"):
        strict_decoder(dict).decode('{"a": Infinity}')
