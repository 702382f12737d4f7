"""Test episodes as chats for fine-tuning: format, rejected episodes and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_kit.episodes.json_codec import to_json_value
from reward_kit.runs.chats import Unfit, make_chat

USER = {"role": "user", "content": "What time is it?"}
ANSWER = {"role": "assistant", "content": "Noon."}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


def call(id: Any = "c1", name: Any = "clock", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def answer(id: str = "c1", content: Any = "12:00") -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": "clock", "tool_call_id": id}


def test_chat_with_tool_calls_is_a_line_in_provider_format() -> None:
    both = calling(call("c1"), call("c2"), content="Let me look.")
    line = make_chat([{"role": "system", "content": "Be brief."}, USER, both, answer("c2"), answer("c1"), ANSWER]).line(
        TOOLS
    )
    assert line.endswith("\n") and line.count("\n") == 1
    assert json.loads(line) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            both,
            {"role": "tool", "tool_call_id": "c2", "content": "12:00"},
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            ANSWER,
        ],
        "tools": TOOLS,
    }


def test_chat_without_tools_has_no_tools_key() -> None:
    assert json.loads(make_chat([USER, ANSWER]).line([])) == {"messages": [USER, ANSWER]}


def test_a_call_without_text_has_no_content() -> None:
    (_, said) = make_chat([USER, calling(call())]).messages
    assert said == {"role": "assistant", "tool_calls": [call()]}


def test_messages_after_the_last_assistant_message_are_left_out() -> None:
    chat = make_chat([USER, calling(call()), answer(), {"role": "user", "content": "go on"}])
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.dropped == {"messages after the assistant's last message": 2}


def test_unsupported_message_fields_are_dropped_and_counted() -> None:
    thought = {**ANSWER, "reasoning_content": "hm", "annotations": [], "x": 1}
    chat = make_chat([USER, thought, USER, thought])
    assert chat.messages[1] == ANSWER and chat.dropped == {"reasoning_content": 2, "x": 2}


def test_pictures_of_the_user_are_kept_and_lone_surrogates_survive() -> None:
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    stored = to_json_value([seen, {"role": "assistant", "content": "half \ud83d"}])
    assert json.loads(make_chat(stored).line([]))["messages"] == [seen, {"role": "assistant", "content": "half \ud83d"}]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([USER], "no assistant message"),
        ([], "no assistant message"),
        ([{"role": "function", "content": "x", "name": "f"}, ANSWER], "with the role 'function'"),
        ([{**ANSWER, "function_call": {"name": "f", "arguments": "{}"}}], "uses function_call"),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}, ANSWER],
            "type 'input_audio' in a message with the role user",
        ),
        ([USER, {"role": "assistant", "content": None}], "and no content"),
        ([USER, calling(call(arguments="{")), answer(), ANSWER], "arguments that are not a JSON object"),
        ([USER, calling(call(arguments="[1]")), answer(), ANSWER], "arguments that are not a JSON object"),
        ([USER, calling(call(name="a b")), answer(), ANSWER], "a tool named 'a b'"),
        ([USER, calling(call(), call("c2")), answer(), ANSWER], "a tool call without a result"),
        ([USER, calling(call()), answer("other"), ANSWER], "a tool result without a call"),
        ([USER, calling(call()), answer(), answer(), ANSWER], "a tool result without a call"),
        ([USER, calling(call(), call()), answer(), ANSWER], "without unique ids"),
        ([USER, calling(call(None)), ANSWER], "without unique ids"),
    ],
)
def test_unsupported_chat_is_rejected_with_its_reason(messages: list[Any], told: str) -> None:
    with pytest.raises(Unfit, match=told):
        make_chat(messages)


def test_call_of_undefined_tool_is_rejected() -> None:
    with pytest.raises(Unfit, match="calls 'watch', which is not one of the tools"):
        make_chat([USER, calling(call(name="watch")), answer(), ANSWER]).line(TOOLS)
