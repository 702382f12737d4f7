"""Test the endpoint with Anthropic's Messages: requests in chat form, answers in the types of the SDK, and threads."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent

from reward_kit.agent.policies.own_agent_policy import AgentTask
from reward_kit.models import PROVIDER_ITEMS, FunctionCall, Message, ToolCall
from reward_kit.providers.completion import ChatCompletion
from tests.agent.policies.own_agents import collect
from tests.agent.recording.served_endpoint import SAID, ServedEndpoint, check_events
from tests.agent.resources import failure
from tests.chat_server import answer, tool_calls

PIXEL = "iVBORw0KGgo="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}
CACHE = {"cache_control": {"type": "ephemeral"}}
THINKING = [
    {"type": "thinking", "thinking": "hm", "signature": "EqoB+/=="},
    {"type": "redacted_thinking", "data": "opaque"},
]
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"x": 1}}
BODY = {"model": "any", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "What is it?", **CACHE}, IMAGE]},
    {"role": "assistant", "content": [*THINKING, {"type": "text", "text": "Let me see."}, USE]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "a dot"}, IMAGE],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ],
    },
]


async def test_request_is_converted_to_chat_form() -> None:
    schema = {"type": "object", "properties": {}}
    body = {
        "model": "any",
        "max_tokens": 50,
        "system": [{"type": "text", "text": "Be brief.", **CACHE}],
        "messages": CONVERSATION,
        "tools": [TOOL | CACHE],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        "context_management": {"edits": []},
    }
    async with ServedEndpoint() as served, ServedEndpoint(api="messages") as native:
        for one in (served, native):
            assert (await one.post(body, path="messages"))[0] == 200
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    shared = {
        "max_completion_tokens": 50,
        "tools": [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": ["END"],
        "temperature": 0.5,
    }
    (asked,) = served.asked
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, CHAT_IMAGE]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": [{"type": "text", "text": "a dot"}, CHAT_IMAGE]},
        {"role": "user", "content": "Go on."},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    assert asked.options == {**shared, "response_format": form}
    (asked,) = native.asked
    kept = [message.pop(PROVIDER_ITEMS, None) for message in asked.messages]
    assert asked.messages == served.asked[0].messages
    user, answered, result = CONVERSATION
    assert kept == [
        {"messages": body["system"]},
        {"messages": user["content"]},
        {"messages": answered["content"]},
        {"messages": result["content"][:1]},
        None,
    ]
    assert asked.options == {**shared, **{key: body[key] for key in ("thinking", "output_config")}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_tool_choice_is_converted(choice: Any, expected: Any) -> None:
    async with ServedEndpoint() as served:
        await served.post({**BODY, "tools": [TOOL], "tool_choice": choice}, path="messages")
    assert served.asked[0].options["tool_choice"] == expected


def asking(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


REJECTED = {
    "server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools.0: tools of type 'web_search_20250305' are not supported",
    ),
    "remote MCP": ({"mcp_servers": [{"url": "u"}]}, "mcp_servers: tools that run at the provider"),
    "document": (
        asking({"type": "document", "source": {"type": "base64", "data": ""}}),
        "messages.0.content.0: blocks of type 'document' are not supported by the API of the model (chat)",
    ),
    "no messages": ({"messages": []}, "messages must not be empty"),
    "a number": ({"messages": 3}, "messages: expected a list, got 3"),
    "a number as content": ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: expected a string or"),
    "a number as block": ({"messages": [{"role": "user", "content": [3]}]}, "messages.0.content.0: expected an object"),
    "unknown role": ({"messages": [{"role": "robot", "content": "hi"}]}, "messages: 0.role"),
    "no type": (asking({"text": "hi"}), "does not have the format of the API: KeyError('type')"),
    "unknown thread": ({"thread": {"type": "continue", "previous_message_id": "msg_9"}}, "the last message 'msg_9'"),
}


@pytest.mark.parametrize(("body", "words"), REJECTED.values(), ids=REJECTED)
async def test_unsupported_request_is_rejected_with_a_message(body: Any, words: str) -> None:
    async with ServedEndpoint() as served:
        status, reply = await served.post({**BODY, **body}, path="messages")
    assert status == 400 and words in reply["error"]["message"] and not served.asked
    assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")


async def test_errors_are_those_of_the_sdk() -> None:
    async with ServedEndpoint() as served, served.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError, match="POST messages/count_tokens is not supported"):
            await client.messages.count_tokens(**{key: BODY[key] for key in ("model", "messages")})
        served.endpoint.forget(served.url)
        with pytest.raises(anthropic.NotFoundError, match="no running episode uses this URL") as caught:
            await client.messages.create(**BODY)
    assert caught.value.body["error"]["type"] == "not_found_error"


ITEMS = {PROVIDER_ITEMS: {"messages": [*THINKING, {"type": "text", "text": "ok"}, USE]}}
INVALID = ToolCall(id="c", function=FunctionCall(name="add", arguments='{"x": '))
ANSWERS = {
    "text and call": (SAID, ["text", "tool_use"], "tool_use"),
    "call that ends with stop": (
        ChatCompletion(Message(role="assistant", content=None, tool_calls=SAID.message.tool_calls), "stop"),
        ["tool_use"],
        "tool_use",
    ),
    "blocks": (
        ChatCompletion(Message(role="assistant", content="ok", **ITEMS)),
        ["thinking", "redacted_thinking", "text", "tool_use"],
        "tool_use",
    ),
    "cut off": (ChatCompletion(Message(role="assistant", content="half"), "length"), ["text"], "max_tokens"),
    "refusal": (ChatCompletion(Message(role="assistant", content=""), "content_filter"), [], "refusal"),
    "invalid arguments": (
        ChatCompletion(Message(role="assistant", content=None, tool_calls=[INVALID]), "tool_calls"),
        ["tool_use"],
        "tool_use",
    ),
}


@pytest.mark.parametrize(("says", "kinds", "stop_reason"), ANSWERS.values(), ids=ANSWERS)
async def test_answers_have_the_types_of_the_sdk(says: ChatCompletion, kinds: list[str], stop_reason: str) -> None:
    async with ServedEndpoint(says) as served, served.anthropic() as client:
        whole = await client.messages.create(**BODY)
        check_events(await served.stream(BODY, "messages"), RawMessageStreamEvent)
        async with client.messages.stream(**BODY) as stream:
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == kinds and whole.stop_reason == stop_reason
    assert (whole.id, whole.model) == ("msg_7", "real-model")
    first, second = (
        message.model_dump(exclude={"id"}, exclude_unset=True, warnings=False) for message in (whole, streamed)
    )
    assert [{**block, "caller": None} for block in second.pop("content")] == [
        {**block, "caller": None} for block in first.pop("content")
    ]
    assert {key: second[key] for key in first} == first


async def test_base_url_may_end_in_v1_and_thinking_is_shown_on_request() -> None:
    async with ServedEndpoint() as served, anthropic.AsyncAnthropic(base_url=served.url, api_key="any") as client:
        reply = await client.messages.create(**BODY, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens) == (4, 7)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 2)
    assert usage.output_tokens_details.thinking_tokens == 3


async def test_invalid_arguments_are_restored() -> None:
    says = ChatCompletion(Message(role="assistant", content=None, tool_calls=[INVALID]), "tool_calls")
    async with ServedEndpoint(says) as served, served.anthropic() as client:
        reply = await client.messages.create(**BODY)
        content = [block.to_dict() for block in reply.content]
        await client.messages.create(
            **{**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": content}]}
        )
    assert served.asked[1].messages[1]["tool_calls"] == [INVALID.to_chat()]


async def test_thread_continues_with_new_messages_only() -> None:
    async with ServedEndpoint() as served:
        created = {**BODY, "system": "Be brief.", "tools": [TOOL], "thread": {"type": "create"}}
        _, first = await served.post(created, path="messages")
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "2"}
        continued = {
            **BODY,
            "messages": [{"role": "user", "content": [result]}],
            "thread": {"type": "continue", "previous_message_id": first["id"]},
        }
        await served.post(continued, path="messages")
    one, two = served.asked
    assert two.messages[:2] == one.messages and two.options["tools"] == one.options["tools"]
    assert [message["role"] for message in two.messages] == ["system", "user", "assistant", "tool"]


async def test_blocks_reach_a_model_with_the_same_api_unchanged() -> None:
    """Blocks that chat form cannot express, such as cache breakpoints and errors, are sent but not recorded."""
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Facts."}, **CACHE}
    result = {"type": "tool_result", "tool_use_id": "call_add_0", "content": "failed", "is_error": True}

    async def agent(task: AgentTask, base_url: str) -> None:
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": [document, {"type": "text", "text": task.prompt}]}]
            reply = await client.messages.create(model="any", max_tokens=9, messages=messages, tools=[TOOL])
            messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            messages.append({"role": "user", "content": [result, {"type": "text", "text": "Again.", **CACHE}]})
            messages.append({"role": "system", "content": "Be exact."})
            await client.messages.create(model="any", max_tokens=9, messages=messages, tools=[TOOL])

    calls = tool_calls([("add", {"x": 1, "y": 2})], message={"items": THINKING})
    episode, server = await collect([calls, answer("3")], agent, options={"api": "messages"})
    assert failure(episode) is None
    asked, answered, told, system = server.bodies[1]["messages"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be exact."}]}
    assert asked["content"][0] == document and answered["content"][:2] == THINKING
    assert told["content"] == [result, {"type": "text", "text": "Again.", **CACHE}]
    recorded = [message.to_chat() for message in episode.messages]
    assert [PROVIDER_ITEMS in message for message in recorded] == [False, True, False, False, False, False]
    assert [message.text for message in episode.messages[2:]] == ["failed", "Again.", "Be exact.", "3"]
