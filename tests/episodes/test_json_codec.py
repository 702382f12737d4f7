"""Test that JSON decoding is the exact inverse of encoding."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.episodes.columns import same_value
from reward_kit.episodes.json_codec import TAG, from_json_value, to_json_value
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

text = st.text(st.characters(), max_size=5)
keys = text | st.just(TAG) | st.integers() | st.tuples(st.integers(), text)
arrays = st.tuples(
    st.sampled_from(["<f8", ">i4", "|b1", "<U3", "<c16", "|S2"]), st.sampled_from([(), (0,), (2,), (2, 3)])
).map(lambda kind: np.ones(kind[1], dtype=kind[0]))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | text
    | st.binary(max_size=5)
    | arrays
    | st.sampled_from([np.int64(3), np.float32(0.5), np.float32("nan"), np.bool_(True), np.uint8(255)])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def through_a_file(value):
    written = json.dumps(to_json_value(value), allow_nan=False, ensure_ascii=False).encode("utf-8")
    return from_json_value(json.loads(written))


def same_types(left, right):
    if isinstance(left, dict):
        return all(same_types(*pair) for pair in zip(left.values(), right.values(), strict=True))
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(same_types(*pair) for pair in zip(left, right, strict=True))
    return type(left) is type(right)


@given(values)
def test_every_value_survives_with_its_type(value):
    again = through_a_file(value)
    assert same_value(again, value)
    assert same_types(again, value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        "\ud800",
        "\ud83d\ude00",  # two surrogates, which JSON text alone would join to one character
        {TAG: "float", "value": "nan"},
        {"\udfff": 1},
        {1: "a", None: "b"},
        (),
        b"",
    ],
)
def test_unusual_values_survive(value):
    again = through_a_file(value)
    assert repr(again) == repr(value)


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "é", [1, [2]], {"a": {"b": []}}])
def test_plain_json_values_are_unchanged(value):
    assert to_json_value(value) == value


@pytest.mark.parametrize("value", [np.float64(0.5), np.float64("nan"), np.float64("inf")])
def test_numpy_float64_is_written_as_a_number(value):
    assert same_value(through_a_file(value), float(value))
    assert to_json_value(np.float64(0.5)) == 0.5


def test_arrays_keep_dtype_and_shape_and_are_writable():
    again = through_a_file(np.arange(6, dtype=">i2").reshape(2, 3).T)
    assert (again.dtype, again.shape) == (np.dtype(">i2"), (3, 2))
    again[0, 0] = 9


def test_messages_survive():
    message = Message(role="assistant", content=None, tool_calls=[{"id": "1", "function": {"name": "f"}}])
    assert through_a_file([message]) == [message]


@pytest.mark.parametrize(
    "value",
    [
        *({1, 2}, object(), np.array([object()]), np.zeros(1, dtype=[("a", "i4")])),
        *(np.complex128(1), np.longdouble(1), np.timedelta64(1, "ns")),
    ],
)
def test_value_without_json_form_is_named(value):
    with pytest.raises(EpisodeError, match="cannot be converted to JSON"):
        to_json_value({"deep": [value]})


def test_unknown_type_tag_is_rejected():
    with pytest.raises(EpisodeError, match="unknown value type 'set'"):
        from_json_value({TAG: "set", "value": []})


@pytest.mark.parametrize("dtype", ["V1", "|S1", "<U1", "<m8[ns]", "O", "<c16"])
def test_scalar_of_a_non_numeric_dtype_is_rejected(dtype):
    with pytest.raises(EpisodeError, match="must be a number"):
        from_json_value({TAG: "scalar", "dtype": dtype, "value": 1_000_000})  # so many bytes of NumPy's np.void


def test_scalar_with_a_non_numeric_value_is_rejected():
    with pytest.raises(EpisodeError, match=r"a scalar of type '<f8' must be a number, got \[1, 2\]"):
        from_json_value({TAG: "scalar", "dtype": "<f8", "value": [1, 2]})
