"""Test encoding and comparison of program results, against Python's equality and forged encodings."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import RewardError
from reward_kit.rewards.code_tests import Rules, conditions_of, is_same, is_same_output, shown_answer
from reward_kit.rewards.program_runner import decode, encode
from reward_kit.rewards.replies import Block, fenced_blocks, select_block
from tests.profiles import examples

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**900), 10**900), st.floats(), st.text(), st.just("\ud800")
)
KEYS = st.one_of(st.booleans(), st.integers(-9, 9), st.text(max_size=3), st.tuples(st.integers(-2, 2)))
DATA = st.recursive(
    st.one_of(SCALARS, st.binary(max_size=4), st.complex_numbers(allow_nan=False), st.sets(KEYS, max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=8,
)
EXACT = Rules()


def sent(value: Any) -> Any:
    """Return the value as it is decoded after the sandbox."""
    return json.loads(json.dumps(encode(value)))


@given(DATA)
@settings(max_examples=examples(150), deadline=None)
def test_values_round_trip(value: Any) -> None:
    assert repr(decode(sent(value))) == repr(value) or decode(sent(value)) == value


@given(DATA)
@settings(max_examples=examples(100), deadline=None)
def test_value_equals_its_encoded_form(value: Any) -> None:
    assert is_same(value, sent(value), EXACT)
    assert is_same([value, 1], sent((1, value)), Rules(unordered=True))


def by_value(value: Any) -> Any:
    """Convert for Python's equality under our rules: booleans differ from numbers, tuples equal lists."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list | tuple):
        return [by_value(item) for item in value]
    return {key: by_value(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(JSON, JSON)
@settings(max_examples=examples(150), deadline=None)
def test_json_comparison_agrees_with_python_equality(one: Any, other: Any) -> None:
    assert is_same(one, sent(other), EXACT) == (by_value(one) == by_value(other))


@given(JSON)
@settings(max_examples=examples(150), deadline=None)
def test_comparison_accepts_arbitrary_json(forged: Any) -> None:
    """The child can send any JSON."""
    for expected in (1, 1.5, "a", None, True, [1], {"a": 1}, {1}, b"x"):
        assert is_same(expected, forged, EXACT) in (True, False)
        assert is_same(expected, forged, Rules(unordered=True)) in (True, False)
        assert is_same(expected, forged, Rules(tolerance=0.1)) in (True, False)
    assert isinstance(shown_answer(forged), str)


@pytest.mark.parametrize(
    ("expected", "forged"),
    [
        (3, ["int", "3"]),  # as Python reads base sixteen, it is 3, and said in another way
        (1.5, ["float", "1.5"]),
    ],
)
def test_number_encoded_in_another_form_is_equal(expected: Any, forged: Any) -> None:
    assert is_same(expected, forged, EXACT)


@pytest.mark.parametrize(
    ("expected", "forged"),
    [
        (3, ["int", "zz"]),
        (3, ["int", 3]),
        (3, ["float", "x"]),
        (3, "3"),
        (3, [3]),
        ([1], ["list", [1], 2]),
        ([1], [1]),
        ([1], ["set", [1]]),
        ({"a": 1}, ["dict", [["a", 1], ["a", 1]]]),
        ({"a": 1}, ["dict", ["a"]]),
        ({"a": 1, "b": 2}, ["dict", [["a", 1], ["a", 1]]]),
        ({1, 2}, ["list", [1, 2]]),
        ("other", ["other", "str"]),
        (b"a", ["bytes", "zz"]),
        (None, ["other", "NoneType"]),
    ],
)
def test_malformed_encodings_are_not_equal_to_anything(expected: Any, forged: Any) -> None:
    assert not is_same(expected, forged, EXACT)


def test_objects_that_are_not_data_are_described_by_type() -> None:
    assert encode(object()) == ["other", "object"]
    assert encode(iter([1])) == ["other", "list_iterator"]
    assert shown_answer(encode(object())) == "an object of type object"
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    assert "nested too deeply" in json.dumps(encode(deep))


def test_numpy_numbers_are_compared_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert is_same([1, 2.5, True], sent([numpy.int64(1), numpy.float64(2.5), numpy.bool_(True)]), EXACT)
    assert is_same([[1, 2]], sent(numpy.array([[1, 2]])), EXACT)


@pytest.mark.parametrize(("one", "other", "is_close"), [(1.0, 1.0 + 1e-7, True), (0.0, 1e-7, True), (1.0, 1.1, False)])
def test_tolerance_is_absolute_or_relative(one: float, other: float, is_close: bool) -> None:
    assert is_same([one], sent([other]), Rules(tolerance=1e-6)) == is_close
    assert is_same_output(f"{one!r}\n", f"{other!r}", Rules(tolerance=1e-6)) == is_close


def test_large_integers_are_compared_exactly() -> None:
    assert not is_same(10**400, sent(10**400 + 1), EXACT)
    assert not is_same(2**53, sent(2**53 + 1), EXACT)


VALUES = ["[1, 2]", "(1, 2)", "{1, 2}", "True", "1", "1.5", "'ab'", "None", "{1: 'a'}", "[[1], [2]]", "float('nan')"]
TESTS = [
    "f(0) == [1, 2]",
    "f(0) == (1, 2)",
    "f(0) == {2, 1}",
    "f(0) == 1",
    "f(0) == 1.5",
    "f(0) == True",
    "f(0) is True",
    "f(0) is None",
    "f(0) == {1: 'a'}",
    "not f(0)",
    "f(0)",
    "f(0) != 1",
    "f(0) in [1, 1.5, None]",
    "set(f(0)) == set((1, 2))",
    "sorted(f(0)) == [1, 2]",
    "len(f(0)) == 2",
    "abs(f(0) - 1.5) < 1e-6",
    "math.isclose(f(0), 1.5, rel_tol=1e-3)",
    "f(0)[0] == 1",
    "f(0)[-1:] == [2]",
    "1 <= f(0) < 2",
    "f(0) == 1 or f(0) == 1.5",
    "f(0) + f(0) == [1, 2] * 2",
    "f(0) == [1] + [2]",
    "all(f(0))",
    "sum(f(0)) == 3 and max(f(0)) == 2",
    "f(0) == f(0)",
    "str(f(0)) == '1.5'",
    "round(f(0)) == 2",
    "f(0) * 2 == 3.0",
    "f(0) == 'a' + 'b'",
    "f(0) == 10**0",
]


@pytest.mark.parametrize("test", TESTS)
def test_assertions_agree_with_python(test: str) -> None:
    """Python runs the assertion on the same values."""
    (condition,) = conditions_of(f"assert {test}", "f", "test")
    for text in VALUES:
        value = eval(text)  # noqa: S307 - ours
        try:
            wanted = bool(eval(test, {"f": lambda _, value=value: value, "math": math}))  # noqa: S307
        except (TypeError, LookupError, ValueError):
            wanted = False
        assert condition.holds([sent(value)] * len(condition.calls)) == wanted, text


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) == __import__('os').getpid()",
        "assert f(1).__class__ == 1",
        "assert f(g(1)) == 2",
        "assert f(*[1]) == 2",
        "assert f(1) == [x for x in (1,)]",
        "assert f(1) == 10 ** 10 ** 10",
        "assert f(1) == [0] * 10 ** 9",
        "assert f(1) ** 2 == 4",
        "assert f(1) % 'x' == 4",
        "for x in range(10 ** 6):\n    assert f(x) == x",
        "while True:\n    assert f(1) == 2",
        "x = input()",
        "print(f(1))",
        "assert (lambda: f(1))() == 2",
        "assert 1 == 2",
        "def check(g):\n    with open('x'):\n        assert g(1) == 2",
    ],
)
def test_unsupported_assertion_is_rejected_with_its_line(source: str) -> None:
    with pytest.raises(RewardError, match=r"line [123]"):
        conditions_of(source, "f", "test")


@pytest.mark.parametrize(
    "answer", [10**300, "x" * 6_000, [[1]] * 200, ["int", "f" * 900], {"a": 1}, None, [None, None]]
)
def test_conditions_accept_arbitrary_answers(answer: Any) -> None:
    for test in TESTS:
        (condition,) = conditions_of(f"assert {test}", "f", "test")
        assert condition.holds([answer] * len(condition.calls)) in (True, False)
        assert condition.holds([sent(answer)] * len(condition.calls), 1e-6) in (True, False)


def test_fenced_blocks_agree_with_commonmark() -> None:
    text = "a\n```Python title=x\n1\n```\n~~~\n```\n2\n~~~\n````\n```\n3\n````\n``` inline ```\n```{.py}\n4"
    assert fenced_blocks(text) == [
        Block("python", "1"),
        Block("", "```\n2"),
        Block("", "```\n3"),
        Block("py", "4"),
    ]
    assert select_block(text, {"python", "py"}, "last") == "4"
    assert select_block(text, {"python", "py"}, "joined") == "1\n4"
    assert select_block(text, {"sql"}, "first") == "```\n2"
    assert select_block("```c\n1\n```", {"sql"}, "last") is None


def test_form_feed_does_not_end_a_line() -> None:
    assert fenced_blocks("```\nx = '\x0c\u2028'\r\n```\r\n") == [Block("", "x = '\x0c\u2028'")]


@given(st.text(alphabet="`~a \n", max_size=200))
def test_fenced_blocks_are_not_longer_than_the_text(text: str) -> None:
    blocks = fenced_blocks(text)
    assert sum(len(block.text) for block in blocks) <= len(text)
