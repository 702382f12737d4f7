"""Test the endpoint with OpenAI's Responses: requests in chat form, answers in the types of the SDK, and kept items."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from reward_kit.models import PROVIDER_ITEMS, FunctionCall, Message, ToolCall
from reward_kit.providers.completion import ChatCompletion
from tests.agent.recording.served_endpoint import CALL, SAID, ServedEndpoint, check_events

PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
REASONING = {
    "id": "rs_up",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "hm"}],
    "encrypted_content": "gAAA+/==",
}
CALLS = [
    ToolCall(id=f"call_{name}", function=FunctionCall(name=name, arguments="{}")) for name in ("one", "two", "three")
]


def said_calls(*calls: ToolCall, **fields: Any) -> ChatCompletion:
    return ChatCompletion(Message(role="assistant", content=None, tool_calls=list(calls), **fields), "tool_calls")


def function_call(call: ToolCall) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call.id, "name": call.function.name, "arguments": "{}"}


def output(call: ToolCall, value: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.id, "output": value}


async def test_request_is_converted_to_chat_form() -> None:
    schema = {"name": "sum", "schema": {"type": "object"}, "strict": True}
    body = {
        "model": "any",
        "instructions": "Be brief.",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is it?"},
                    {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"role": "assistant", "content": "Let me see."},
            function_call(CALLS[0]),
            function_call(CALLS[1]),
            output(CALLS[0], [{"type": "input_text", "text": "a dot"}]),
            output(CALLS[1], [{"type": "input_image", "image_url": PIXEL}]),
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "max_output_tokens": 50,
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", **schema}, "verbosity": "low"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "metadata": {},
    }
    shared = {
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    async with ServedEndpoint() as served, ServedEndpoint(api="responses") as native:
        for one in (served, native):
            assert (await one.post(body, path="responses"))[0] == 200
    (asked,) = served.asked
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": "{}"}}
        for call in CALLS[:2]
    ]
    answered = {"role": "assistant", "content": "Let me see.", "tool_calls": calls, "reasoning_content": "hm"}
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
            ],
        },
        answered,
        {"role": "tool", "tool_call_id": "call_one", "content": "a dot"},
        {"role": "tool", "tool_call_id": "call_two", "content": [image]},
        {"role": "developer", "content": "Go on."},
    ]
    assert asked.options == shared
    (asked,) = native.asked
    assert asked.messages[2] == {**answered, PROVIDER_ITEMS: {"responses": body["input"][1:5]}}
    assert asked.options == {
        **shared,
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "metadata": {},
    }


REJECTED = {
    "hosted tool": ({"tools": [{"type": "web_search"}]}, "tools.0: tools of type 'web_search' are not supported"),
    "hosted choice": ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice: type 'file_search'"),
    "hosted item": ({"input": [{"type": "web_search_call", "id": "w"}]}, "items of type 'web_search_call'"),
    "background": ({"background": True}, "background: responses in the background are not supported"),
    "conversation": ({"conversation": "conv_1"}, "conversation: stored conversations are not supported"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt: stored prompts are not supported"),
    "unknown response": ({"previous_response_id": "resp_9"}, "the episode has no response 'resp_9'"),
    "unknown item": ({"input": [{"type": "item_reference", "id": "rs_9"}]}, "the episode has no item 'rs_9'"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include: the policy does not request"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs: the policy does not request"),
    "no input": ({"input": []}, "input must not be empty"),
    "a number": ({"input": 3}, "input: expected a list, got 3"),
    "a list of numbers": ({"input": [3]}, "input.0: expected an object, got 3"),
    "instructions": ({"instructions": [1]}, "instructions: expected a string, got [1]"),
    "no call id": ({"input": [{"type": "function_call_output", "output": ""}]}, "does not have the format of the API"),
    "unknown role": ({"input": [{"role": "robot", "content": ""}]}, "messages: 0.role"),
    "file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input.0.content.0: 'input_file': this type is not supported by the API of the model (chat)",
    ),
}


@pytest.mark.parametrize(("body", "words"), REJECTED.values(), ids=REJECTED)
async def test_unsupported_request_is_rejected_with_a_message(body: Any, words: str) -> None:
    async with ServedEndpoint() as served:
        status, reply = await served.post({"model": "m", "input": "Hello", **body}, path="responses")
    assert status == 400 and words in reply["error"]["message"] and not served.asked
    assert reply["error"]["type"] == "invalid_request_error"


ANSWERS = {
    "text, call and reasoning": SAID,
    "calls": said_calls(*CALLS),
    "cut off": ChatCompletion(Message(role="assistant", content="half"), "length"),
    "items": ChatCompletion(
        Message(
            role="assistant",
            content="ok",
            **{
                PROVIDER_ITEMS: {
                    "responses": [
                        REASONING | {"content": [{"type": "reasoning_text", "text": "so"}]},
                        {
                            "id": "msg_up",
                            "type": "message",
                            "role": "assistant",
                            "status": "completed",
                            "phase": None,
                            "content": [
                                {"type": "output_text", "text": "ok", "annotations": [], "logprobs": []},
                                {"type": "refusal", "refusal": "no"},
                            ],
                        },
                    ]
                }
            },
        ),
        "stop",
    ),
}


@pytest.mark.parametrize("says", ANSWERS.values(), ids=ANSWERS)
async def test_answers_have_the_types_of_the_sdk(says: ChatCompletion) -> None:
    body = {"model": "any", "input": "Hello", "tools": [TOOL]}
    async with ServedEndpoint(says) as served, served.client() as client:
        _, whole = await served.post(body, path="responses")
        events = await served.stream(body, "responses")
        if says.finish_reason == "length":  # the SDK waits for `response.completed` only
            streamed = Response.model_validate(events[-1]["response"], strict=False)
        else:
            async with client.responses.stream(**body) as stream:
                streamed = await stream.get_final_response()
    Response.model_validate(whole, strict=False)
    check_events(events, ResponseStreamEvent)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    status = "incomplete" if says.finish_reason == "length" else "completed"
    assert (whole["status"], events[-1]["type"]) == (status, f"response.{status}")
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    dumped = [item.to_dict() for item in streamed.output]
    for item in dumped:
        item.pop("parsed_arguments", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert streamed.status == status and [
        {key: value for key, value in item.items() if key != "id"} for item in dumped
    ] == [{key: value for key, value in item.items() if key != "id"} for item in whole["output"]]
    # The deltas alone contain the texts and arguments too.
    written = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    for text in (says.message.text, *(call.function.arguments for call in says.message.tool_calls or ())):
        assert text in written


async def test_usage_has_the_fields_of_the_api() -> None:
    async with ServedEndpoint() as served, served.client() as client:
        reply = await client.responses.create(model="any", input="Hello")
    usage = reply.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (11, 7, 18)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (5, 3)
    assert (reply.model, reply.id) == ("real-model", "resp_7")


async def test_logprobs_are_returned_on_request() -> None:
    entries = [{"token": "ok", "logprob": -0.5, "bytes": [111, 107], "top_logprobs": []}]
    says = ChatCompletion(Message(role="assistant", content="ok"), logprobs=[-0.5], logprob_entries=entries)
    async with ServedEndpoint(says, has_logprobs=True) as served, served.client() as client:
        asked = {"model": "any", "input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        reply = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        without = await client.responses.create(model="any", input="Hello")
    assert served.asked[0].options == {"top_logprobs": 2}
    for one in (reply, streamed):
        assert [entry.to_dict() for entry in one.output[0].content[0].logprobs] == entries
    assert without.output[0].content[0].logprobs == []


async def test_earlier_items_are_resolved_by_id() -> None:
    says = said_calls(CALL, **{PROVIDER_ITEMS: {"responses": [REASONING, function_call(CALL) | {"id": "fc_up"}]}})
    async with ServedEndpoint(says, api="responses") as served, served.client() as client:
        first = await client.responses.create(model="any", input="Hello", instructions="Only now.")
        await client.responses.create(model="any", input=[output(CALL)], previous_response_id=first.id)
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        shortened = [{"type": "reasoning", "id": "rs_up", "summary": []}, function_call(CALL)]
        for items in (references, shortened):
            await client.responses.create(
                model="any", input=[{"role": "user", "content": "Hello"}, *items, output(CALL)]
            )
    assert [message["role"] for message in served.asked[0].messages] == ["system", "user"]
    for asked in served.asked[1:]:
        user, answered, result = asked.messages
        assert (user["content"], result["tool_call_id"]) == ("Hello", CALL.id)
        assert answered[PROVIDER_ITEMS]["responses"][0] == REASONING


async def test_items_are_grouped_by_the_response_they_come_from() -> None:
    """Calls of one answer stay together if each is sent with its result, and two answers in a row stay apart."""
    async with ServedEndpoint(said_calls(*CALLS[:2])) as served, served.client() as client:
        await client.responses.create(model="any", input="Hello")
        served.says = said_calls(CALLS[2])
        await client.responses.create(model="any", input="Hello")
        one, two, three = map(function_call, CALLS)
        for items in (
            [one, output(CALLS[0]), two, output(CALLS[1]), three, output(CALLS[2])],
            [one, two, three, output(CALLS[0])],
        ):
            await client.responses.create(model="any", input=items)
    shape = [
        [[call["id"] for call in message.get("tool_calls", ())] or message["role"] for message in asked.messages]
        for asked in served.asked[2:]
    ]
    assert shape == [
        [["call_one", "call_two"], "tool", "tool", ["call_three"], "tool"],
        [["call_one", "call_two"], ["call_three"], "tool"],
    ]
