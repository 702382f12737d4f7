"""Requests and answers in the Responses and Messages APIs, checked against the types of the official SDKs."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import anthropic.types
import openai.types.responses
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from reward_kit.agent.actions import assistant_message
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.policy_interface import EpisodeContext, check_output
from reward_kit.environments.base import tool_spec
from reward_kit.errors import ConfigError, ProviderError
from reward_kit.models import PROVIDER_ITEMS, Message
from reward_kit.providers.chat import DIALECTS
from tests.chat_server import (
    USAGE,
    ChatServer,
    answer,
    events,
    message_events,
    raw,
    response_events,
    to_message,
    to_response,
    tool_calls,
)

NEW = ("responses", "messages")
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOOLS = [tool_spec("move", "Go there.", {"type": "object", "properties": {"to": {"type": "string"}}})]
ASKED = [
    Message(role="system", content="Be brief."),
    Message(
        role="user",
        content=[{"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
    ),
]
SUMMARY = {"type": "summary_text", "text": "North, \u00fc \U0001f600."}
COMPLETION = {"choices": [{"message": {"content": "half"}, "finish_reason": "stop"}], "usage": USAGE}
RESPONSE, MESSAGE = to_response(COMPLETION), to_message(COMPLETION)
REASONING = {
    "responses": [{"id": "rs_1", "type": "reasoning", "summary": [SUMMARY], "encrypted_content": "gAAA+/=="}],
    "messages": [
        {"type": "thinking", "thinking": "North, \u00fc \U0001f600.", "signature": "EqoB+/=="},
        {"type": "redacted_thinking", "data": "opaque"},
    ],
}


def check_request(api: str, body: dict) -> None:
    """Validate a request with the parameter types of the SDK, which have no unknown keys."""
    kind = ResponseCreateParamsNonStreaming if api == "responses" else MessageCreateParamsNonStreaming
    # Version 2023-06-01 of Messages accepts sampling options, which the SDK no longer lists.
    left_out = ("stream", "temperature", "top_p") if api == "messages" else ("stream",)
    body = {key: value for key, value in body.items() if key not in left_out}
    assert body.keys() <= kind.__optional_keys__ | kind.__required_keys__
    TypeAdapter(kind).validate_python(body)


def check_answer(api: str, value: dict) -> None:
    kind = openai.types.responses.Response if api == "responses" else anthropic.types.Message
    kind.model_validate(value, strict=False)


@asynccontextmanager
async def session_at(server: ChatServer, **options):
    policy = OpenAIAgentPolicy("m", base_url=server.base_url, **{"api_key": "k", "retry_base_s": 0.001, **options})
    session = await policy.open(EpisodeContext("r", 7))
    yield session
    await session.close()
    await policy.close()


async def test_answers_of_the_test_server_have_the_types_of_the_sdks() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": '{"to": "north"}'}}
    for api, convert, stream in (
        ("responses", to_response, response_events),
        ("messages", to_message, message_events),
    ):
        message = {"role": "assistant", "content": "Going.", "tool_calls": [call], "items": REASONING[api]}
        choice = {"message": message, "finish_reason": "tool_calls"}
        value = convert({"choices": [choice], "usage": USAGE})
        check_answer(api, value)
        kind = openai.types.responses.ResponseStreamEvent if api == "responses" else None
        kind = kind or anthropic.types.RawMessageStreamEvent
        for event in stream(value):
            if event["type"] != "ping" and "delta" not in event["type"]:
                TypeAdapter(kind).validate_python(event)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", DIALECTS)
async def test_text_is_the_same_in_every_dialect(api: str, stream: bool) -> None:
    async with ChatServer([answer("hello")]) as server, session_at(server, api=api, stream=stream) as session:
        output = check_output(await session.get_action(ASKED, TOOLS))
    assert output.action_structured == {"type": "text", "content": "hello"}
    reported = {"reasoning_tokens": 0} if api == "responses" else {}
    assert output.log_probs["usage"] == {"prompt_tokens": 11, "completion_tokens": 7, **reported}
    assert output.log_probs["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", NEW)
async def test_reasoning_is_sent_back_unchanged(api: str, stream: bool) -> None:
    """A conversation with parallel calls keeps its reasoning items, their order and the ids of the calls."""
    calls = [("move", {"to": "north"}), ("move", {})]
    first = tool_calls(calls, "Going.", message={"items": REASONING[api]})
    async with ChatServer([first, answer("There.")]) as server, session_at(server, api=api, stream=stream) as session:
        output = check_output(await session.get_action(ASKED, TOOLS))
        acted = assistant_message(output.action_structured, 0)
        assert [call.function.arguments for call in acted.tool_calls or []] == ['{"to": "north"}', "{}"]
        assert acted.reasoning_content == "North, \u00fc \U0001f600."
        results = [Message(role="tool", tool_call_id=call.id, content="ok") for call in acted.tool_calls or []]
        stored = Message.model_validate(json.loads(json.dumps(acted.to_chat())))  # as in a recording
        await session.get_action([*ASKED, stored, *results], TOOLS)
        before, after = server.bodies
    check_request(api, before)
    check_request(api, after)
    if api == "responses":
        sent = after["input"]
        assert sent[2:3] == REASONING[api] and sent[3]["type"] == "message"
        assert [item.get("call_id") for item in sent[4:]] == ["call_move_0", "call_move_1"] * 2
        assert after["store"] is False and after["include"] == ["reasoning.encrypted_content"]
    else:
        system, (asked, answered, tools) = after["system"], after["messages"]
        assert system == [{"type": "text", "text": "Be brief."}]
        assert [part["type"] for part in asked["content"]] == ["text", "image"]
        assert answered["content"][:2] == REASONING[api]
        assert [block["input"] for block in answered["content"][3:]] == [{"to": "north"}, {}]
        assert [block["tool_use_id"] for block in tools["content"]] == ["call_move_0", "call_move_1"]


@pytest.mark.parametrize("target", DIALECTS)
@pytest.mark.parametrize("source", NEW)
async def test_conversation_can_continue_at_another_api(source: str, target: str) -> None:
    first = tool_calls([("move", {"to": "north"})], message={"items": REASONING[source]})
    async with ChatServer([first, answer("There.")]) as server:
        async with session_at(server, api=source) as session:
            acted = assistant_message((await session.get_action(ASKED, TOOLS)).action_structured, 0)
        assert (acted.model_extra or {})[PROVIDER_ITEMS].keys() == {source}
        result = Message(role="tool", tool_call_id="call_move_0", content="ok")
        async with session_at(server, api=target) as session:
            await session.get_action([*ASKED, acted, result], TOOLS)
        text = json.dumps(server.bodies[1])
    assert ("EqoB" in text or "gAAA" in text) == (source == target)
    assert PROVIDER_ITEMS not in text and "call_move_0" in text


@pytest.mark.parametrize("api", NEW)
async def test_options_of_a_chat_request_are_translated(api: str) -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 50, "parallel_tool_calls": False}
    async with ChatServer([answer("ok")]) as server:
        async with session_at(server, api=api, **options) as session:
            await session.get_action(ASKED, TOOLS)
        (request,) = server.requests
    body = request.body
    check_request(api, body)
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9) and "seed" not in body
    if api == "responses":
        assert body["max_output_tokens"] == 50 and body["parallel_tool_calls"] is False
        assert request.headers["Authorization"] == "Bearer k"
        assert body["tools"][0] == {"type": "function", "strict": False, **TOOLS[0]["function"]}
    else:
        assert body["max_tokens"] == 50
        assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
        assert request.headers["x-api-key"] == "k" and request.headers["anthropic-version"] == "2023-06-01"
        assert "Authorization" not in request.headers


@pytest.mark.parametrize("choice", ["auto", "required", "none", {"type": "function", "function": {"name": "move"}}])
@pytest.mark.parametrize("api", NEW)
def test_tool_choice_and_formats_are_translated(api: str, choice: object) -> None:
    schema = {"name": "place", "schema": {"type": "object"}, "strict": True}
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
    request |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    request |= {"reasoning_effort": "low"} if api == "responses" else {"output_config": {"effort": "low"}}
    body = json.loads(DIALECTS[api].encode(request))
    check_request(api, body)
    if api == "responses":
        assert body["text"] == {"format": {"type": "json_schema", **schema}} and body["reasoning"] == {"effort": "low"}
    else:
        form = {"type": "json_schema", "schema": {"type": "object"}}
        assert body["output_config"] == {"effort": "low", "format": form} and "response_format" not in body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", DIALECTS)
async def test_token_kinds_and_cost_are_counted(api: str, stream: bool, tmp_path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("m: {input: 10, cached: 1, cache_write: 12.5, output: 100}")
    kinds = {"prompt_tokens_details": {"cached_tokens": 900, "cache_write_tokens": 60}}
    kinds |= {"completion_tokens_details": {"reasoning_tokens": 8}}
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, **kinds}
    options = {"api": api, "stream": stream, "price_file": str(prices)}
    async with ChatServer([answer("ok", usage=usage)]) as server, session_at(server, **options) as session:
        output = await session.get_action(ASKED)
    expected = {"prompt_tokens": 1000, "completion_tokens": 10, "cached_tokens": 900, "cache_write_tokens": 60}
    cost = pytest.approx((40 * 10 + 900 * 1 + 60 * 12.5 + 10 * 100) / 1e6)
    assert output.log_probs["usage"] == {**expected, "reasoning_tokens": 8, "cost": cost}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", DIALECTS)
async def test_truncated_answers_have_the_reason_length(api: str, stream: bool) -> None:
    script = [answer("half", finish_reason="length"), tool_calls([("move", {"to": "n"})], finish_reason="length")]
    async with ChatServer(script) as server, session_at(server, api=api, stream=stream) as session:
        for _ in script:
            assert (await session.get_action(ASKED)).log_probs["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("status", "details", "expected"),
    [
        ("incomplete", None, "length"),
        ("incomplete", {"reason": "content_filter"}, "content_filter"),
        (None, None, "stop"),
        ("queued", None, "status is 'queued'"),
        ("in_progress", None, "status is 'in_progress'"),
        ("failed", None, "status is 'failed'"),
    ],
)
async def test_unfinished_response_is_not_a_complete_answer(status: str | None, details: object, expected: str) -> None:
    item = {"type": "message", "content": [{"type": "output_text", "text": "half"}]}
    value = raw(json.dumps({"status": status, "incomplete_details": details, "output": [item]}))
    async with ChatServer([value]) as server, session_at(server, api="responses") as session:
        if "status" in expected:
            with pytest.raises(ProviderError, match=expected):
                await session.get_action(ASKED)
        else:
            assert (await session.get_action(ASKED)).log_probs["finish_reason"] == expected


async def test_tool_call_of_a_truncated_message_keeps_its_partial_arguments() -> None:
    call = {"type": "tool_use", "id": "c", "name": "move", "input": {}}
    block = {"type": "content_block_start", "index": 0, "content_block": call}
    delta = {"type": "input_json_delta", "partial_json": '{"to": "no'}
    sent = [{"type": "message_start", "message": {"usage": None}}, block]
    sent += [{"type": "content_block_delta", "index": 0, "delta": delta}]
    sent += [{"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {}}, {"type": "message_stop"}]
    async with ChatServer([events(*sent)]) as server, session_at(server, api="messages", stream=True) as session:
        output = check_output(await session.get_action(ASKED, TOOLS))
    (call,) = assistant_message(output.action_structured, 0).tool_calls or []
    assert (call.function.arguments, output.log_probs["finish_reason"]) == ('{"to": "no', "length")


@pytest.mark.parametrize("api", NEW)
async def test_done_marker_does_not_complete_an_answer(api: str) -> None:
    started = {"responses": response_events(RESPONSE)[:-1], "messages": message_events(MESSAGE)[:-1]}[api]
    script = [events(*started), answer("ok")]
    async with ChatServer(script) as server, session_at(server, api=api, stream=True) as session:
        assert (await session.get_action(ASKED)).raw_policy_output == "ok"


@pytest.mark.parametrize("api", NEW)
@pytest.mark.parametrize("value", [{}, {"output": 1}, {"content": [1]}, {"output": [{}]}, [], None, "text", 5])
async def test_malformed_answers_are_rejected(api: str, value: object) -> None:
    async with ChatServer([raw(json.dumps(value))]) as server, session_at(server, api=api) as session:
        with pytest.raises(ProviderError, match=r"unknown format|without choices"):
            await session.get_action(ASKED)
        assert len(server.requests) == 1


BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": 5}}
PIECE = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
STOP = {"type": "message_stop"}


@pytest.mark.parametrize(
    ("api", "sent"),
    [
        ("messages", [PIECE, STOP]),
        ("messages", [BLOCK, PIECE, STOP]),
        ("messages", [BLOCK, BLOCK | {"index": "1"}, STOP]),
        ("messages", [{"type": "error", "error": {"type": ["overloaded_error"], "code": {}}}]),
        ("messages", [{"type": "message_start", "message": 1}]),
        ("messages", [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": [1]}]),
        ("messages", [BLOCK, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": 5}}]),
        ("responses", [{"type": "response.output_item.done"}]),
        ("responses", [{"output": []}]),
        ("responses", [{"type": "response.completed", "response": 1}]),
        ("responses", [{"type": "response.completed", "response": {"output": [{}]}}]),
    ],
)
async def test_malformed_streams_are_rejected(api: str, sent: list) -> None:
    stream = events(*sent, done=False)
    async with ChatServer([stream]) as server, session_at(server, api=api, stream=True) as session:
        with pytest.raises(ProviderError, match=r"unknown format|an error instead of"):
            await session.get_action(ASKED)


def test_arguments_that_are_no_object_are_sent_as_one() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": '{"to": '}}
    request = {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    (message,) = json.loads(DIALECTS["messages"].encode(request))["messages"]
    assert message["content"][0]["input"] == {"invalid_arguments": '{"to": '}


def test_unknown_api_and_log_probabilities_of_messages_are_rejected() -> None:
    with pytest.raises(ConfigError, match="api: unknown API 'respones'; did you mean 'responses'"):
        OpenAIAgentPolicy("m", base_url="http://127.0.0.1:9/v1", api="respones")
    with pytest.raises(ConfigError, match="api: client= supports only chat completions"):
        OpenAIAgentPolicy("m", client=openai.AsyncOpenAI(api_key="k"), api="messages")
    with pytest.raises(ConfigError, match="logprobs: the API 'messages' does not return"):
        OpenAIAgentPolicy("m", base_url="http://127.0.0.1:9/v1", api="messages", logprobs=True)
