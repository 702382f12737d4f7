"""Test tool call rewards: ground truth forms, schemas, pairing, partial credit, and known traps."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import EvaluateResult, Message, with_options
from reward_kit.errors import ConfigError, RewardError
from reward_kit.rewards.tool_calls import MOST_CALLS, tool_calls_match
from tests.profiles import examples

START = Message(role="user", content="?")
ARGUMENTS = {"city": "Oslo", "unit": "celsius"}
FLAT = {"name": "get_weather", "arguments": ARGUMENTS}
OTHER = {"name": "get_time", "arguments": {"zone": "CET"}}


def said(*calls: dict[str, Any], text: str | None = None) -> Message:
    """Return an assistant message with these calls; text arguments are kept verbatim."""
    made = [
        {
            "id": f"c{index}",
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"]),
            },
        }
        for index, call in enumerate(calls)
    ]
    return Message(role="assistant", content=text, tool_calls=made or None)


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def tool(name: str, properties: dict[str, Any], required: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def ask(made: Any, truth: Any, **options: Any) -> EvaluateResult:
    messages = [START, said(*(made if isinstance(made, list) else [made]))]
    result = tool_calls_match(messages, truth, **options)
    assert isinstance(result, EvaluateResult)
    return result


NESTED = {"type": "function", "function": FLAT}
AS_TEXT = {"type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
CHOICES = [{"get_weather": {"city": ["Oslo", "Oslo, Norway"], "unit": ["celsius", ""]}}]


@pytest.mark.parametrize(
    "truth",
    [
        pytest.param(FLAT, id="flat"),
        pytest.param(NESTED, id="nested"),
        pytest.param(AS_TEXT, id="nested-arguments-as-text"),
        pytest.param([FLAT], id="list-of-flat"),
        pytest.param([AS_TEXT], id="list-of-nested"),
        pytest.param({"tool_calls": [FLAT]}, id="tool_calls-of-flat"),
        pytest.param({"role": "assistant", "tool_calls": [FLAT]}, id="readme-of-the-earlier-package-scored-0"),
        pytest.param({"role": "assistant", "content": None, "tool_calls": [{"id": "x", **NESTED}]}, id="message"),
        pytest.param(json.dumps(FLAT), id="text-of-flat"),
        pytest.param(json.dumps([NESTED]), id="text-of-list"),
        pytest.param(json.dumps({"tool_calls": [AS_TEXT]}), id="text-of-tool_calls"),
        pytest.param(CHOICES, id="bfcl-possible-answers"),
        pytest.param(CHOICES[0], id="bfcl-one-possible-answer"),
        pytest.param(json.dumps(CHOICES), id="bfcl-as-text"),
    ],
)
def test_every_ground_truth_form_is_read(truth: Any) -> None:
    assert ask(FLAT, truth).score == 1.0
    assert ask(OTHER, truth).score == 0.0
    assert ask(call("get_weather", city="Bergen", unit="celsius"), truth).score == 0.0


@pytest.mark.parametrize(
    ("made", "truth", "score"),
    [
        pytest.param(call("f"), call("f"), 1.0, id="no-arguments"),
        pytest.param({"name": "f", "arguments": ""}, {"name": "f"}, 1.0, id="blank-arguments-are-none"),
        pytest.param({"name": "f", "arguments": "null"}, {"name": "f"}, 0.0, id="null-arguments-are-no-object"),
        pytest.param({"name": "f", "arguments": "[]"}, {"name": "f"}, 0.0, id="array-arguments"),
        pytest.param({"name": "f", "arguments": "{'a': 1}"}, call("f", a=1), 0.0, id="python-dict-is-no-json"),
        pytest.param({"name": "f", "arguments": '{"a": 1,}'}, call("f", a=1), 0.0, id="comma-at-the-end"),
        pytest.param({"name": "f", "arguments": '{"a": NaN}'}, call("f", a=None), 0.0, id="nan"),
        pytest.param({"name": "f", "arguments": '{"a":1,"a":2}'}, call("f", a=2), 0.0, id="argument-named-twice"),
        pytest.param({"name": "f", "arguments": ' {"b":2, "a" : 1}\n'}, call("f", a=1, b=2), 1.0, id="text-differs"),
        pytest.param({"name": "f", "arguments": '"{\\"a\\": 1}"'}, call("f", a=1), 0.0, id="json-in-json"),
        pytest.param(call("F", a=1), call("f", a=1), 0.0, id="case-of-the-name"),
        pytest.param(call("f", A=1), call("f", a=1), 0.0, id="case-of-an-argument"),
        pytest.param(call("f", a="Oslo "), call("f", a="Oslo"), 0.0, id="blank-counts"),
        pytest.param(call("f", a=9), call("f", a=10), 0.0, id="near-number-earned-0.7-before"),
        pytest.param(call("f", a="5"), call("f", a=5), 0.0, id="text-is-no-number"),
        pytest.param(call("f", a=1), call("f", a=True), 0.0, id="one-is-not-true"),
        pytest.param(call("f", a=0), call("f", a=False), 0.0, id="zero-is-not-false"),
        pytest.param(call("f", a=None), call("f"), 0.0, id="null-is-not-left-out"),
        pytest.param(call("f", a=5.0), call("f", a=5), 0.0, id="float-without-a-schema"),
        pytest.param(call("f", a={"x": [1, {"y": 2}]}), call("f", a={"x": [1, {"y": 2}]}), 1.0, id="nested-same"),
        pytest.param(call("f", a={"x": [1, {"y": 2}]}), call("f", a={"x": [1, {"y": 3}]}), 0.0, id="nested-other"),
        pytest.param(call("f", a=[1, 2]), call("f", a=[2, 1]), 0.0, id="arrays-have-an-order"),
        pytest.param(call("f", a=1, b=2), call("f", a=1), 0.0, id="an-argument-too-much"),
        pytest.param(call("f", a=1), call("f", a=1, b=2), 0.0, id="an-argument-too-few"),
        pytest.param([call("f", a=1), call("f", a=2)], [call("f", a=2), call("f", a=1)], 1.0, id="parallel-no-order"),
        pytest.param([call("f", a=1)] * 2, [call("f", a=1)], 0.0, id="made-twice"),
        pytest.param([call("f", a=1)], [call("f", a=1)] * 2, 0.0, id="expected-twice"),
        pytest.param([call("f", a=1), OTHER], [call("f", a=1)], 0.0, id="shotgun-of-calls"),
        pytest.param([], [call("f")], 0.0, id="none-made"),
        pytest.param([], [], 1.0, id="bfcl-irrelevance-none-expected"),
        pytest.param([call("f")], [], 0.0, id="bfcl-irrelevance-one-made"),
        pytest.param([], {"tool_calls": []}, 1.0, id="empty-tool_calls"),
        pytest.param([], {"tool_calls": None}, 1.0, id="null-tool_calls"),
        pytest.param(call("f", a="\ud800é"), call("f", a="\ud800é"), 1.0, id="surrogates"),
        pytest.param(call("f", a=10**30), call("f", a=10**30), 1.0, id="big-integers-are-exact"),
        pytest.param(call("f", a=2**53), call("f", a=2**53 + 1), 0.0, id="big-integers-are-no-floats"),
    ],
)
def test_calls_without_a_schema_are_compared_exactly(made: Any, truth: Any, score: float) -> None:
    assert ask(made, truth).score == score


NUMBER, INTEGER, TEXT = {"type": "number"}, {"type": "integer"}, {"type": "string"}
TAGS = {"type": "array", "items": TEXT, "uniqueItems": True}
UNIT = {"type": "string", "enum": ["celsius", "kelvin"], "default": "celsius"}
POINT = {"type": "object", "properties": {"x": NUMBER, "y": {"type": "number", "default": 0}}, "required": ["x"]}
TREE = {"type": "object", "properties": {"left": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}, "v": NUMBER}}


@pytest.mark.parametrize(
    ("made", "truth", "properties", "more", "score"),
    [
        pytest.param({"a": 5.0}, {"a": 5}, {"a": NUMBER}, {}, 1.0, id="number-5.0-is-5"),
        pytest.param({"a": 5.0}, {"a": 5}, {"a": INTEGER}, {}, 1.0, id="integer-5.0-is-5-since-draft-6"),
        pytest.param({"a": 5.5}, {"a": 5.5}, {"a": INTEGER}, {}, 0.0, id="no-integer-though-expected"),
        pytest.param({"a": "5"}, {"a": 5}, {"a": INTEGER}, {}, 0.0, id="text-for-integer"),
        pytest.param({"a": "5"}, {"a": "5"}, {"a": INTEGER}, {}, 0.0, id="text-for-integer-though-expected"),
        pytest.param({"a": True}, {"a": True}, {"a": INTEGER}, {}, 0.0, id="true-is-no-integer"),
        pytest.param({}, {"unit": "celsius"}, {"unit": UNIT}, {}, 1.0, id="default-left-out"),
        pytest.param({"unit": "celsius"}, {}, {"unit": UNIT}, {}, 1.0, id="default-written"),
        pytest.param({"unit": "kelvin"}, {}, {"unit": UNIT}, {}, 0.0, id="no-default-written"),
        pytest.param({}, {"unit": "kelvin"}, {"unit": UNIT}, {}, 0.0, id="other-than-default-left-out"),
        pytest.param({}, {"unit": "celsius"}, {"unit": UNIT}, {"required": ["unit"]}, 0.0, id="required-with-default"),
        pytest.param({"unit": "K"}, {"unit": "K"}, {"unit": UNIT}, {}, 0.0, id="none-of-the-enum-though-expected"),
        pytest.param({"p": {"x": 1}}, {"p": {"x": 1.0, "y": 0.0}}, {"p": POINT}, {}, 1.0, id="nested-default"),
        pytest.param({"p": {"y": 1}}, {"p": {"y": 1}}, {"p": POINT}, {}, 0.0, id="nested-required-though-expected"),
        pytest.param({"t": ["b", "a"]}, {"t": ["a", "b"]}, {"t": TAGS}, {}, 1.0, id="uniqueItems-has-no-order"),
        pytest.param({"t": ["a"]}, {"t": ["a", "b"]}, {"t": TAGS}, {}, 0.0, id="uniqueItems-all-of-them"),
        pytest.param({"z": 1}, {"z": 1}, {}, {"additionalProperties": False}, 0.0, id="forbidden-though-expected"),
        pytest.param({"z": 1}, {"z": 1}, {}, {}, 1.0, id="additional-where-not-forbidden"),
        pytest.param({"z": "1"}, {"z": "1"}, {}, {"additionalProperties": INTEGER}, 0.0, id="additional-of-a-type"),
        pytest.param({"a": None}, {"a": None}, {"a": {"type": ["integer", "null"]}}, {}, 1.0, id="list-of-types"),
        pytest.param({"a": 2}, {"a": 2.0}, {"a": {"anyOf": [NUMBER, {"type": "null"}]}}, {}, 1.0, id="anyOf-number"),
        pytest.param({"a": "x"}, {"a": "x"}, {"a": {"anyOf": [NUMBER, {"type": "null"}]}}, {}, 0.0, id="anyOf-neither"),
        pytest.param({"a": 2}, {"a": 2.0}, {"a": {"$ref": "#/$defs/N"}}, {"$defs": {"N": NUMBER}}, 1.0, id="ref"),
        pytest.param(
            {"a": {"v": 1, "left": {"v": 2}}},
            {"a": {"v": 1.0, "left": {"v": 2.0}}},
            {"a": {"$ref": "#/$defs/T"}},
            {"$defs": {"T": TREE}},
            1.0,
            id="schema-of-a-tree",
        ),
        pytest.param({"a": 1}, {"a": 1}, {"a": {"$ref": "#/$defs/L"}}, {"$defs": {"L": {"$ref": "#/$defs/L"}}}, 1.0,
                     id="ref-to-itself"),
        pytest.param({"a": 1}, {"a": 1}, {"a": {"const": 2}}, {}, 0.0, id="const"),
        pytest.param({"a": 1}, {"a": 1}, {"a": False}, {}, 0.0, id="schema-false"),
        pytest.param({"a": [1, 2]}, {"a": [1.0, 2.0]}, {"a": {"type": "array", "items": NUMBER}}, {}, 1.0, id="items"),
        pytest.param({"a": 2}, {"a": 2.0}, {"a": {"type": "float"}}, {}, 1.0, id="bfcl-type-float"),
        pytest.param({"a": [1]}, {"a": [1]}, {"a": {"type": "dict"}}, {}, 0.0, id="bfcl-type-dict"),
        pytest.param({"a": 1}, {"a": 1}, {"a": {"type": "HashMap"}}, {}, 1.0, id="bfcl-type-of-java"),
    ],
)  # fmt: skip
def test_arguments_are_compared_according_to_the_schema(
    made: Any, truth: Any, properties: Any, more: Any, score: float
) -> None:
    tools = [tool("f", properties, **more)]
    assert ask(call("f", **made), call("f", **truth), tools=tools).score == score
    assert ask(call("f", **made), call("f", **truth), sample={"tools": tools}).score == score
    assert ask(call("f", **made), call("f", **truth), sample={"tools": json.dumps(tools)}).score == score


def test_tool_specifications_can_be_flat_and_in_other_sample_fields() -> None:
    tools = [{"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
    for sample in ({"tools": tools}, {"function": tools}, {"functions": tools}):
        assert ask(call("f"), call("f"), sample=sample).score == 0.0
        assert ask(call("f", a=1), call("f", a=1), sample=sample).score == 1.0
    assert ask(call("f"), call("f"), sample={"function": "def f(): ...", "functions": ["sin"], "tools": None}).score
    assert ask(call("f"), call("f"), tools=[{"name": "f"}]).score == 1.0


def test_unknown_tool_scores_zero_even_if_expected() -> None:
    result = ask(call("g"), call("g"), tools=[tool("f", {})])
    assert result.score == 0.0
    assert "the tool is unknown" in result.reason
    assert ask(call("g"), call("g"), tools=[tool("f", {})], partial="arguments").score == 0.0


def test_coerce_option_converts_strings_to_numbers() -> None:
    tools = [tool("f", {"a": INTEGER, "b": {"type": "boolean"}, "c": NUMBER, "d": TEXT})]
    truth = call("f", a=5, b=True, c=1.5, d="5")
    assert ask(call("f", a="5", b="True", c="1.5", d="5"), truth, tools=tools, coerce=True).score == 1.0
    assert ask(call("f", a="5", b="True", c="1.5", d="5"), truth, tools=tools).score == 0.0
    assert ask(call("f", a="5.5", b=True, c=1.5, d="5"), truth, tools=tools, coerce=True).score == 0.0
    assert ask(call("f", a=5, b=True, c=1.5, d=5), truth, tools=tools, coerce=True).score == 0.0
    with pytest.raises(RewardError, match="coerce"):
        ask(truth, truth, coerce=True)


def test_strings_option_ignores_case() -> None:
    tools = [tool("f", {"unit": UNIT})]
    made, truth = call("f", unit="Kelvin"), call("f", unit="kelvin")
    assert ask(made, truth, tools=tools).score == 0.0
    assert ask(made, truth, tools=tools, strings="casefold").score == 1.0
    assert ask(made, truth, strings="casefold").score == 1.0
    assert ask(call("F", unit="kelvin"), truth, strings="casefold").score == 0.0


def test_any_order_option_ignores_array_order() -> None:
    made, truth = call("f", a=[{"b": [2, 1]}, 3, 3]), call("f", a=[3, {"b": [1, 2]}, 3])
    assert ask(made, truth).score == 0.0
    assert ask(made, truth, any_order=True).score == 1.0
    assert ask(call("f", a=[3, {"b": [1, 2]}]), truth, any_order=True).score == 0.0


BFCL_TOOL = tool("f", {"s": TEXT, "n": INTEGER, "o": TEXT, "d": {"type": "dict"}, "l": {"type": "array"}}, ("s",))


@pytest.mark.parametrize(
    ("made", "choices", "options", "score"),
    [
        pytest.param({"s": "a"}, {"s": ["a", "b"]}, {}, 1.0, id="first"),
        pytest.param({"s": "b"}, {"s": ["a", "b"]}, {}, 1.0, id="second"),
        pytest.param({"s": "c"}, {"s": ["a", "b"]}, {}, 0.0, id="neither"),
        pytest.param({"s": "a"}, {"s": ["a"], "o": ["x", ""]}, {}, 1.0, id="optional-left-out"),
        pytest.param({"s": "a"}, {"s": ["a"], "o": ["x"]}, {}, 0.0, id="not-marked-optional"),
        pytest.param({"s": "a", "o": ""}, {"s": ["a"], "o": ["x", ""]}, {}, 1.0, id="empty-text-for-optional"),
        pytest.param({"s": "a", "o": "y"}, {"s": ["a"], "o": ["x", ""]}, {}, 0.0, id="optional-but-wrong"),
        pytest.param({}, {"s": ["a", ""]}, {}, 0.0, id="required-by-the-schema-all-the-same"),
        pytest.param({"s": "a", "z": 1}, {"s": ["a"]}, {}, 0.0, id="unexpected"),
        pytest.param({"s": "New York, NY"}, {"s": ["new york ny"]}, {}, 0.0, id="texts-are-exact"),
        pytest.param({"s": "New York, NY"}, {"s": ["new york ny"]}, {"strings": "bfcl"}, 1.0, id="as-there"),
        pytest.param({"s": "it's"}, {"s": ['IT"S']}, {"strings": "bfcl"}, 1.0, id="quotes-as-there"),
        pytest.param({"s": "1.5"}, {"s": ["15"]}, {"strings": "bfcl"}, 1.0, id="trap-of-dropped-points"),
        pytest.param({"s": "1.5"}, {"s": ["15"]}, {"strings": "casefold"}, 0.0, id="no-such-trap-here"),
        pytest.param({"s": "a", "l": [1, 2]}, {"s": ["a"], "l": [[1, 2], [3]]}, {}, 1.0, id="list-is-one-value"),
        pytest.param({"s": "a", "l": [3]}, {"s": ["a"], "l": [[1, 2], [3]]}, {}, 1.0, id="list-second-value"),
        pytest.param({"s": "a", "l": [1]}, {"s": ["a"], "l": [[1, 2]]}, {}, 0.0, id="list-not-all"),
        pytest.param({"s": "a", "d": {"k": 2}}, {"s": ["a"], "d": [{"k": [1, 2]}]}, {}, 1.0, id="dict-of-choices"),
        pytest.param({"s": "a", "d": {"k": 3}}, {"s": ["a"], "d": [{"k": [1, 2]}]}, {}, 0.0, id="dict-other"),
        pytest.param({"s": "a", "d": {}}, {"s": ["a"], "d": [{"k": [1, ""]}]}, {}, 1.0, id="dict-optional"),
        pytest.param({"s": "a", "d": {}}, {"s": ["a"], "d": [{"k": [1]}]}, {}, 0.0, id="dict-missing"),
        pytest.param({"s": "a", "d": {"j": 1}}, {"s": ["a"], "d": [{"k": ["", 1]}]}, {}, 0.0, id="dict-unexpected"),
        pytest.param({"s": "a", "l": [{"k": 2}]}, {"s": ["a"], "l": [[{"k": [1, 2]}]]}, {}, 1.0, id="list-of-dicts"),
        pytest.param({"s": "a", "l": [{"k": 3}]}, {"s": ["a"], "l": [[{"k": [1, 2]}]]}, {}, 0.0, id="list-of-others"),
        pytest.param({"s": "a", "n": "N"}, {"s": ["a"], "n": ["N"]}, {}, 0.0, id="variable-is-no-integer"),
        pytest.param({"s": "a", "n": "N"}, {"s": ["a"], "n": ["N"]}, {"validate": "names"}, 1.0, id="variable"),
        pytest.param({}, {"s": ["a", ""]}, {"validate": "names"}, 0.0, id="names-are-still-checked"),
        pytest.param({"s": "a", "n": 2.0}, {"s": ["a"], "n": [2]}, {}, 1.0, id="numbers-of-the-schema"),
    ],
)
def test_possible_answers_follow_bfcl_rules(made: Any, choices: Any, options: Any, score: float) -> None:
    assert ask(call("f", **made), [{"f": choices}], tools=[BFCL_TOOL], **options).score == score


def test_a_default_is_a_possible_answer() -> None:
    tools = [tool("f", {"unit": UNIT})]
    assert ask(call("f"), [{"f": {"unit": ["celsius"]}}], tools=tools).score == 1.0
    assert ask(call("f"), [{"f": {"unit": ["kelvin"]}}], tools=tools).score == 0.0
    assert ask(call("f", unit="celsius"), [{"f": {}}], tools=tools).score == 1.0
    assert ask(call("f", unit="kelvin"), [{"f": {}}], tools=tools).score == 0.0


def test_pairing_is_not_greedy() -> None:
    # Taken in order, f(1) is paired with the first answer and leaves f(2) with one that does not allow it.
    truth = [{"f": {"a": [1, 2]}}, {"f": {"a": [1]}}]
    assert ask([call("f", a=1), call("f", a=2)], truth).score == 1.0
    assert ask([call("f", a=2), call("f", a=1)], truth).score == 1.0
    assert ask([call("f", a=2), call("f", a=2)], truth).score == 0.0


TWO = [call("f", a=1, b=2), call("g", c=3)]


@pytest.mark.parametrize(
    ("made", "partial", "extra", "score"),
    [
        (TWO, "calls", "wrong", 1.0),
        (TWO, "arguments", "wrong", 1.0),
        (TWO[:1], "none", "wrong", 0.0),
        (TWO[:1], "calls", "wrong", 0.5),
        ([call("f", a=1, b=9), TWO[1]], "calls", "wrong", 0.5),
        ([call("f", a=1, b=9), TWO[1]], "arguments", "wrong", 0.75),
        ([call("f", a=1), TWO[1]], "arguments", "wrong", 0.75),
        ([call("f", a=1, b=2, z=0), TWO[1]], "arguments", "wrong", (2 / 3 + 1) / 2),
        ([call("g", a=1, b=2), TWO[1]], "arguments", "wrong", 0.5),
        ([*TWO, call("h"), call("h")], "none", "wrong", 0.0),
        ([*TWO, call("h"), call("h")], "calls", "wrong", 0.5),
        ([*TWO, call("h"), call("h")], "none", "ignore", 1.0),
        ([TWO[0], call("h")], "calls", "ignore", 0.5),
        ([{"name": "f", "arguments": "{"}, TWO[1]], "arguments", "wrong", 0.5),
        ([{"name": "f", "arguments": "{"}, *TWO], "none", "ignore", 1.0),
        ([], "arguments", "wrong", 0.0),
    ],
)
def test_partial_option_gives_partial_credit(made: Any, partial: str, extra: str, score: float) -> None:
    assert ask(made, TWO, partial=partial, extra=extra).score == pytest.approx(score)


def test_unexpected_calls_score_zero_even_if_extra_calls_are_ignored() -> None:
    assert ask([call("f")], [], extra="ignore", partial="arguments").score == 0.0


def test_duplicates_are_paired_for_the_best_total() -> None:
    truth = [call("f", a=1, b=1), call("f", a=1, b=2)]
    made = [call("f", a=1, b=2), call("f", a=1, b=9)]
    result = ask(made, truth, partial="arguments")
    assert result.score == pytest.approx(0.75)
    assert result.metrics["calls"].score == 0.5
    assert result.metrics["names"].score == 1.0


def test_ordered_option_requires_the_order() -> None:
    assert ask(TWO, TWO, ordered=True).score == 1.0
    assert ask(TWO[::-1], TWO, ordered=True).score == 0.0
    assert ask(TWO[::-1], TWO, ordered=True, partial="calls").score == 0.5
    assert ask([call("h"), TWO[0], call("h"), TWO[1]], TWO, ordered=True, extra="ignore").score == 1.0


def test_turns_option_selects_last_or_all_calls() -> None:
    first, last = said(TWO[0]), said(TWO[1])
    answered = [START, first, Message(role="tool", tool_call_id="c0", content="ok"), last, said(text="done")]
    assert tool_calls_match(answered, TWO[1]).score == 1.0
    assert tool_calls_match(answered, TWO).score == 0.0
    assert tool_calls_match(answered, TWO, turns="all").score == 1.0
    assert tool_calls_match(answered, TWO[1], turns="all").score == 0.0


def test_examples_in_the_prompt_do_not_count() -> None:
    shots = [START, said(TWO[0]), START, said(text="I cannot.")]
    assert tool_calls_match(shots, TWO[0]).score == 1.0
    assert tool_calls_match(shots, TWO[0], assistant_turns=[3]).score == 0.0
    assert tool_calls_match(shots, [], assistant_turns=[3]).score == 1.0


def test_legacy_function_call_counts() -> None:
    message = Message(role="assistant", content=None, function_call={"name": "f", "arguments": '{"a": 1}'})
    assert tool_calls_match([START, message], call("f", a=1)).score == 1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', 1.0),
        ('Now:\n<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>', 1.0),
        ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', 1.0),
        ('```json\n[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]\n```', 1.0),
        ('<think><tool_call>{"name": "g", "arguments": {}}</tool_call></think>'
         '```\n{"name": "f", "arguments": {"a": 1}}\n```',
         1.0),
        ('<think><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call></think>I will not.', 0.0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', 1.0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', 0.0),
        ('<tool_call>{"name": "f"}</tool_call>', 0.0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>oops</tool_call>', 0.0),
        ('{"name": "f", "arguments": {"a": 1}}', 0.0),
        ('```python\nf(a=1)\n```', 0.0),
    ],
)  # fmt: skip
def test_calls_written_as_text_count_only_with_the_option(text: str, score: float) -> None:
    messages = [START, Message(role="assistant", content=text)]
    assert tool_calls_match(messages, call("f", a=1), text_calls=True).score == score
    assert tool_calls_match(messages, call("f", a=1)).score == 0.0
    assert tool_calls_match(messages, []).score == 1.0


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "sample has none"),
        ("get_weather(city='Oslo')", "not JSON"),
        (7, "an int"),
        ({}, "does not name a function"),
        ([{"arguments": {}}], "does not name a function"),
        ([["f"]], "a list"),
        ({"name": "f", "argument": {}}, "unknown key 'argument'"),
        ({"name": "f", "arguments": [1]}, "a list"),
        ({"name": "f", "arguments": "{'a': 1}"}, "cannot be read"),
        ([{"f": {"a": 1}}], "does not name a function"),
        ({"function": {}}, "does not name a function"),
        ([{"name": "f"}] * 65, "at most 64"),
        ({"name": "f", "arguments": {"a": float("nan")}}, "nan"),
    ],
)
def test_a_ground_truth_that_cannot_be_read_leaves_the_rollout_unscored(truth: Any, why: str) -> None:
    with pytest.raises(RewardError, match=why):
        ask({"name": "f", "arguments": "{'a': 1}"}, truth)


def test_invalid_tool_specifications_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"option 'tools': tools\[0\] is not a tool"):
        ask(call("f"), call("f"), tools=[{"type": "function"}])
    with pytest.raises(RewardError, match=r"field 'tools'\[0\] is not a tool"):
        ask(call("f"), call("f"), sample={"tools": ["f"]})
    with pytest.raises(RewardError, match="'tools' cannot be read"):
        ask(call("f"), call("f"), sample={"tools": "[oops"})
    with pytest.raises(RewardError, match="other documents are not fetched"):
        ask(call("f", a=1), call("f", a=1), tools=[tool("f", {"a": {"$ref": "https://example.com/schema.json"}})])
    with pytest.raises(RewardError, match="malformed"):
        ask(call("f", a=1), call("f", a=1), tools=[tool("f", {"a": {"anyOf": 7}})])
    with pytest.raises(ConfigError, match="partial"):
        with_options(tool_calls_match, partial="some")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("get_weather", city="Oslo", unit="kelvin"), 'argument "unit" is "kelvin", but "celsius" was expected'),
        (call("get_weather", city="Oslo"), 'argument "unit" is missing, but "celsius" was expected'),
        (call("get_weather", **ARGUMENTS, day=1), 'argument "day" is 1, but it was not expected'),
        (OTHER, '"get_weather" was not called, but "get_time" was'),
        ([FLAT, OTHER], 'a call to "get_time" was not expected'),
        ({"name": "get_weather", "arguments": "{"}, "its arguments cannot be read: it is not JSON"),
        ([], '"get_weather" was not called'),
    ],
)
def test_the_reason_names_the_first_thing_that_is_wrong(made: Any, reason: str) -> None:
    assert reason in ask(made, FLAT).reason


def test_empty_conversation_does_not_count_as_declining() -> None:
    assert tool_calls_match([], []).score == 0.0
    assert tool_calls_match([START], []).score == 0.0
    assert tool_calls_match([START, said(text="no")], []).score == 1.0


scalars = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0]) | st.text("aB é\ud800", max_size=2)
)
arguments = st.dictionaries(st.sampled_from("abc"), scalars | st.lists(scalars, max_size=3), max_size=3)
calls = st.lists(st.builds(lambda name, given: call(name, **given), st.sampled_from("fg"), arguments), max_size=4)


@given(calls, st.randoms(use_true_random=False))
def test_the_expected_calls_are_right_in_any_order_and_form(expected: list[Any], random: Any) -> None:
    mixed = random.sample(expected, len(expected))
    assert ask(mixed, expected).score == 1.0
    assert ask(mixed, json.dumps({"tool_calls": [{"type": "function", "function": one} for one in expected]})).score
    possible = [{one["name"]: {name: [None, value] for name, value in one["arguments"].items()}} for one in expected]
    assert ask(mixed, possible).score == 1.0
    assert ask(mixed, expected, ordered=True).score == float([*map(repr, mixed)] == [*map(repr, expected)])


@given(calls, calls)
def test_the_share_of_arguments_is_the_best_of_all_pairings(made: list[Any], expected: list[Any]) -> None:
    def share(one: Any, other: Any) -> float:
        if one["name"] != other["name"]:
            return 0.0
        left, right = ({name: repr(value) for name, value in two["arguments"].items()} for two in (one, other))
        names = left.keys() | right.keys()
        return sum(left.get(name) == right.get(name) for name in names) / len(names) if names else 1.0

    size = max(len(made), len(expected))
    rows = [*expected, *[{"name": "", "arguments": {}}] * (size - len(expected))]
    columns = [*made, *[{"name": "-", "arguments": {}}] * (size - len(made))]
    best = max(sum(map(share, rows, order)) for order in permutations(columns)) / size if size else 1.0
    result = ask(made, expected, partial="arguments")
    assert result.score == pytest.approx(best if expected else float(not made))
    assert ask(made, expected).score == float(result.score == 1.0)


wild = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool", "system"]),
    content=st.none()
    | st.text(max_size=20)
    | st.just([{"type": "text", "text": "<tool_call>{"}, {"type": "image_url"}]),
    tool_calls=st.none()
    | st.lists(
        st.fixed_dictionaries(
            {
                "id": st.text(max_size=3),
                "function": st.fixed_dictionaries(
                    {
                        "name": st.sampled_from(["f", "get_weather", "", "\ud800"]),
                        "arguments": st.text('{}[]":,0a1\\', max_size=12)
                        | st.sampled_from(["", "[" * 5000, "1" * 5000]),
                    }
                ),
            }
        ),
        max_size=3,
    ),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(wild, max_size=4), st.sampled_from([FLAT, CHOICES, [], [FLAT, OTHER]]), st.booleans())
def test_no_history_raises(messages: list[Message], truth: Any, wide: bool) -> None:
    wide_options = {"turns": "all", "text_calls": True, "partial": "arguments", "coerce": True, "strings": "bfcl"}
    options: dict[str, Any] = wide_options if wide else {}
    result = tool_calls_match(messages, truth, tools=[tool("get_weather", {"city": TEXT, "unit": UNIT})], **options)
    assert 0.0 <= result.score <= 1.0


@pytest.mark.parametrize("text", ["[", "{", '{"a":', "<tool_call>", "```json\n", '<tool_call>{"name":"f",', "9", '"'])
def test_megabyte_of_garbage_is_not_a_call(text: str) -> None:
    huge = (text * (1_000_000 // len(text)))[:1_000_000]
    assert ask({"name": "get_weather", "arguments": huge}, FLAT).score == 0.0
    assert tool_calls_match([START, Message(role="assistant", content=huge)], FLAT, text_calls=True).score == 0.0


def test_many_and_large_calls_are_bounded() -> None:
    assert ask([call("f", a=index) for index in range(MOST_CALLS + 1)], call("f", a=1), extra="ignore").score == 0.0
    many = {f"k{index}": index for index in range(200)}
    truth = [call("f", **many, a=index) for index in range(64)]
    made = [call("f", **dict.fromkeys(list(many)[:100], "x"), a=index % 64) for index in range(MOST_CALLS)]
    assert ask(made, truth, partial="arguments").score < 0.01


def test_nested_unions_are_checked_in_bounded_time() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    branch = {"type": "object", "properties": {"next": node, "v": INTEGER}, "required": ["v"]}
    tools = [tool("f", {"a": node}, **{"$defs": {"A": branch, "B": {**branch, "title": "B"}}})]
    deep: dict[str, Any] = {"v": "no integer"}
    for _ in range(40):
        deep = {"v": 1, "next": deep}
    assert ask(call("f", a=deep), call("f", a=deep), tools=tools).score == 0.0
