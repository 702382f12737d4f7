"""Test that assistant messages and actions convert into each other without loss."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.agent.actions import assistant_message, json_text, to_plain_data
from reward_kit.agent.message_actions import MAX_NESTING, parse_action
from reward_kit.agent.policy_interface import check_output
from reward_kit.models import FunctionCall, Message, ToolCall


def message(*arguments: str, content: str | None = None, **rest: Any) -> Message:
    calls = [ToolCall(id=f"c{n}", function=FunctionCall(name="add", arguments=a)) for n, a in enumerate(arguments)]
    return Message(role="assistant", content=content, tool_calls=calls or None, **rest)


def call(n: int, **arguments: Any) -> dict[str, Any]:
    return {"name": "add", "id": f"c{n}", **arguments}


@pytest.mark.parametrize(
    ("said", "action"),
    [
        (message(content="4"), {"type": "text", "content": "4"}),
        (message(), {"type": "text", "content": ""}),
        (message('{"x": 2}'), {"type": "tool_call", **call(0, arguments={"x": 2})}),
        (message("", content=""), {"type": "tool_call", **call(0, arguments={})}),
        (message(" "), {"type": "tool_call", **call(0, arguments={})}),
        (
            message('{"x": 2}', content="so"),
            {"type": "tool_calls", "calls": [call(0, arguments={"x": 2})], "content": "so"},
        ),
        (
            message("{x", "[1]", "null"),
            {"type": "tool_calls", "calls": [call(n, arguments_text=a) for n, a in enumerate(["{x", "[1]", "null"])]},
        ),
        (message(content="4", reasoning_content="2+2"), {"type": "text", "content": "4", "reasoning_content": "2+2"}),
    ],
)
def test_message_parses_to_its_action(said: Message, action: dict[str, Any]) -> None:
    assert parse_action(said) == action


def test_text_parts_are_joined_and_images_ignored() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert parse_action(Message(role="assistant", content=parts)) == {"type": "text", "content": "4"}


@pytest.mark.parametrize("text", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', '{"x": ' + "[" * 100_000])
def test_invalid_json_arguments_are_kept_verbatim(text: str) -> None:
    assert parse_action(message(text)) == {"type": "tool_call", **call(0, arguments_text=text)}


def test_deeply_nested_arguments_are_kept_verbatim() -> None:
    def nested(depth: int) -> str:
        return '{"x":' * depth + "1" + "}" * depth

    assert "arguments" in parse_action(message(nested(MAX_NESTING)))
    assert "arguments_text" in parse_action(message(nested(MAX_NESTING + 1)))
    wide = json.dumps({"x": [[]] * 500})
    assert "arguments" in parse_action(message(wide))


texts = st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(texts, values, max_size=3).map(lambda found: json.dumps(found, ensure_ascii=False)) | texts
messages = st.builds(
    lambda all_arguments, content, reasoning: message(*all_arguments, content=content, reasoning_content=reasoning),
    st.lists(arguments, max_size=3),
    texts | st.none(),
    texts | st.none(),
)


@given(messages)
def test_action_converts_back_to_its_message(said: Message) -> None:
    again = assistant_message(check_output((parse_action(said), None, None, None)).action_structured, 0)
    assert meaning(again) == meaning(said)
    assert assistant_message(parse_action(again), 0) == again


def meaning(said: Message) -> tuple[Any, ...]:
    """Normalize equivalent spellings: no text and empty text, no arguments and `{}`."""
    calls = [(one.id, one.function.name, one.function.arguments.strip() or "{}") for one in said.tool_calls or ()]
    return said.text, said.reasoning_content or None, calls


@given(st.lists(st.text(alphabet='{}[]":,0e+-. \\u1d8', max_size=12), min_size=1, max_size=2))
def test_round_trip_normalizes_any_message(written: list[str]) -> None:
    once = assistant_message(parse_action(message(*written)), 0)
    assert assistant_message(parse_action(once), 0) == once


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.lists(st.text() | st.booleans()))))
def test_flat_data_is_encoded_like_any_other(value: dict[str, Any]) -> None:
    assert json_text(value) == json.dumps(value, ensure_ascii=False)
    stored = to_plain_data(value)
    assert stored == json.loads(json.dumps(value))
    assert all(stored[key] is not item for key, item in value.items() if isinstance(item, list))
