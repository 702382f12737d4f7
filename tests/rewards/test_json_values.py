"""Reading and comparison of untrusted JSON values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.rewards.json_answers import (
    DEEPEST,
    LONGEST,
    ComparisonRules,
    abbreviate,
    as_json,
    common_leaves,
    comparison_key,
    difference,
    leaves,
    read_json,
)

EXACT = ComparisonRules()
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 0.5, 2.5]) | st.text("ab\ud800", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"a": 1,}', "not JSON"),
        ('{"a": 1} // one', "not JSON"),
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "Infinity"),
        ("1e999", "out of the range of floats"),
        ('{"a": 1, "a": 2}', '"a" twice'),
        ("9" * 5000, "digits"),
        ("[" * 60 + "]" * 60, "deeper"),
        ("[" * 100_000, "deeper"),
        ('{"a":' * 50_000 + "1", "deeper"),
        ('"' + "a" * LONGEST + '"', "longer"),
    ],
)
def test_invalid_or_oversized_json_is_rejected(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_json(text)


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object(), float("nan"), [b"x"], {"a": float("inf")}])
def test_values_without_a_json_form_are_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON|strings"):
        as_json(value)


@pytest.mark.parametrize(
    ("expected", "found", "how", "differs"),
    [
        (1, 1.0, EXACT, ""),
        (1, True, EXACT, ": expected 1, found true"),
        (0, False, EXACT, ": expected 0, found false"),
        (None, False, EXACT, ": expected null, found false"),
        ("1", 1, EXACT, ': expected "1", found 1'),
        (2**53 + 1, float(2**53), EXACT, ": expected 9007199254740993, found 9007199254740992.0"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, EXACT, ""),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, EXACT, " at .a.b[1]: expected 2, found 3"),
        ({"a": None}, {}, EXACT, " at .a: expected null, but it is missing"),
        ({}, {"a": 1}, EXACT, " at .a: 1 is not expected"),
        ({}, {"a": 1}, ComparisonRules(subset=True), ""),
        ({"a": {}}, {"a": {"b": 1}, "c": 2}, ComparisonRules(subset=True), ""),
        ([1], [1, 2], ComparisonRules(subset=True), ": expected an array of 1 item, found an array of 2 items"),
        ([1, 2], [2, 1], EXACT, "[0]: expected 1, found 2"),
        ([1, 2], [2, 1], ComparisonRules(any_order=True), ""),
        ([1, 1, 2], [2, 2, 1], ComparisonRules(any_order=True), ": the item 1 is missing"),
        ([[1, 2], [3]], [[3], [2, 1]], ComparisonRules(any_order=True), ""),
        (0.3, 0.1 + 0.2, EXACT, ": expected 0.3, found 0.30000000000000004"),
        (0.3, 0.1 + 0.2, ComparisonRules(1e-9), ""),
        (10**400, 1.5, ComparisonRules(0.5), ": expected a number of more than 30 digits, found 1.5"),
        ({"a b": 1}, {"a b": 2}, EXACT, ' at ["a b"]: expected 1, found 2'),
    ],
)
def test_first_difference_is_described(expected: Any, found: Any, how: ComparisonRules, differs: str) -> None:
    assert difference(expected, found, how).removeprefix(" at ") == differs.removeprefix(" at ")


@given(values, values)
def test_equality_agrees_with_python_except_for_booleans(one: Any, other: Any) -> None:
    def tagged(value: Any) -> Any:
        if isinstance(value, bool):
            return ("truth", value)
        if isinstance(value, list):
            return [tagged(item) for item in value]
        return {name: tagged(item) for name, item in value.items()} if isinstance(value, dict) else value

    is_same = tagged(one) == tagged(other)
    assert (difference(one, other, EXACT) == "") == is_same
    assert (comparison_key(one) == comparison_key(other)) == is_same


@given(values)
def test_json_round_trip_is_equal(value: Any) -> None:
    assert difference(value, read_json(json.dumps(value)), EXACT) == ""
    assert common_leaves(value, value, EXACT) == leaves(value)
    assert common_leaves(value, value, ComparisonRules(any_order=True)) == leaves(value)


@given(values, values)
def test_common_leaves_are_symmetric_and_bounded(one: Any, other: Any) -> None:
    for how in (EXACT, ComparisonRules(any_order=True)):
        common = common_leaves(one, other, how)
        assert common == common_leaves(other, one, how)
        assert common <= min(leaves(one), leaves(other))


@given(st.lists(values, max_size=4), st.randoms(use_true_random=False))
def test_any_order_ignores_the_order_of_items(items: list[Any], random: Any) -> None:
    mixed = random.sample(items, len(items))
    assert difference(items, mixed, ComparisonRules(any_order=True)) == ""


def test_values_at_the_nesting_limit_are_compared() -> None:
    text = "[" * (DEEPEST - 1) + "1" + "]" * (DEEPEST - 1)
    assert difference(read_json(text), read_json(text), EXACT) == ""
    assert "deeper" not in abbreviate(read_json(text))
