"""The quick text of a value is that of its JSON form, whatever the value is."""

from __future__ import annotations

import math
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.json_text import compact_json, has_lone_surrogates, json_text
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

TEXTS = st.text(st.characters(exclude_categories=())) | st.sampled_from(["\\ud800", "\\", "😀", "é", "__type__", "%s"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=3)
KEYS = TEXTS | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(TEXTS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_it_is_the_text_of_the_json_value(value: Any) -> None:
    text, expected = json_text(value), compact_json(to_json_value(value))
    assert text == expected or has_lone_surrogates(text)


@given(TEXTS)
def test_half_a_pair_of_surrogates_is_told_from_all_that_looks_like_it(text: str) -> None:
    assert has_lone_surrogates(json_text([text, {text: 1}])) == any("\ud800" <= letter <= "\udfff" for letter in text)


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [
        *(2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1, -0.0, 5e-324, math.nan, -math.inf, Number.ONE),
        *(np.float64(0.1), np.int8(3), np.bool_(True), np.arange(3), Message(role="user", content="a\ud800")),
        *({True: 1}, {1.0: 2, "1.0": 3}, {"__type__": "int", "value": "7"}, [{"a": (1, [2])}]),
    ],
)
def test_what_is_unusual_is_left_to_the_codec(value: Any) -> None:
    assert json_text(value) == compact_json(to_json_value(value))


class Suit(Enum):
    HEARTS = "h"


@pytest.mark.parametrize("value", [{1, 2}, Suit.HEARTS, object(), [{"a": 1j}]])
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(EpisodeError, match="has no JSON form"):
        json_text(value)
