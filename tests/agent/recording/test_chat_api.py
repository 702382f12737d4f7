"""Test the endpoint with chat completions, whole and streamed, and its access by token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_kit.agent.recording import ChatRequest, RecordedAnswer, endpoint
from reward_kit.errors import EpisodeError
from reward_kit.models import Message
from reward_kit.providers.completion import ChatCompletion
from tests.agent.recording.served_endpoint import HELLO, ServedEndpoint


async def test_answer_has_the_openai_format() -> None:
    async with ServedEndpoint() as served, served.client() as client:
        reply = await client.chat.completions.create(model="any", messages=HELLO)
    (choice,) = reply.choices
    assert (reply.object, reply.id, reply.model) == ("chat.completion", "chatcmpl-7", "real-model")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me \U0001f914 see.")
    assert [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("call_1", "add", '{"x": 1}')
    ]
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (11, 18)
    assert reply.usage.prompt_tokens_details.cached_tokens == 5
    assert reply.usage.prompt_tokens_details.cache_write_tokens == 2
    assert reply.usage.completion_tokens_details.reasoning_tokens == 3
    assert choice.message.reasoning_content == "hm"


async def test_streamed_answer_equals_the_whole_answer() -> None:
    async with ServedEndpoint() as served, served.client() as client:
        whole = await client.chat.completions.create(model="any", messages=HELLO)
        async with client.chat.completions.stream(
            model="any", messages=HELLO, stream_options={"include_usage": True}
        ) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds
    assert served.asked[1].stream
    dumped = [reply.model_dump(exclude={"created", "object", "id"}, exclude_none=True) for reply in (whole, streamed)]
    for call in dumped[1]["choices"][0]["message"]["tool_calls"]:
        del call["index"]
        call["function"].pop("parsed_arguments", None)
    assert dumped[1] == dumped[0]


async def test_stream_ends_with_done_and_includes_usage_on_request() -> None:
    async with ServedEndpoint() as served:
        for options, chunks_with_usage in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
            body = {"messages": HELLO, "stream": True, **options}
            async with served.http.post(f"{served.url}/chat/completions", json=body) as response:
                assert response.content_type == "text/event-stream"
                *chunks, done = [line[6:] for line in (await response.text()).split("\n\n") if line]
            assert done == "[DONE]" and json.loads(chunks[0])["choices"][0]["delta"]["role"] == "assistant"
            assert sum("usage" in json.loads(chunk) for chunk in chunks) == chunks_with_usage


async def test_absent_model_fields_are_left_out() -> None:
    async with ServedEndpoint(ChatCompletion(Message(role="assistant", content="ok"))) as served:
        _, body = await served.post({"messages": HELLO})
        async with served.http.get(f"{served.url}/models") as response:
            models = await response.json()
    assert "usage" not in body and body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ok"}
    assert [model["id"] for model in models["data"]] == ["real-model"]


async def test_request_options_are_forwarded_except_reserved_keys() -> None:
    passed_on = {"tools": [{"type": "function", "function": {"name": "add"}}], "tool_choice": "auto", "stop": ["x"]}
    own = {"model": "gpt", "n": 1, "seed": 7, "stream": False, "logprobs": False, "stream_options": None}
    async with ServedEndpoint() as served:
        await served.post({"messages": HELLO, "user": None, **passed_on, **own})
    (asked,) = served.asked
    assert (asked.messages, asked.stream, asked.options) == (HELLO, False, passed_on)


REFUSED = {
    "several answers": ({"messages": HELLO, "n": 2}, "n must be 1, got 2"),
    "log-probabilities": (
        {"messages": HELLO, "logprobs": True},
        "logprobs: the policy does not request log-probabilities",
    ),
    "the older form of tools": ({"messages": HELLO, "functions": [{"name": "add"}]}, "use tools and tool_choice"),
    "no messages": ({"model": "m"}, "messages must be a non-empty list"),
    "an unknown role": ({"messages": [{"role": "robot", "content": ""}]}, "messages: 0.role"),
    "no JSON": (b'{"messages": [', "the body is not JSON"),
    "a number that is none": (b'{"messages": [], "temperature": NaN}', "NaN is not JSON"),
    "no text": (b"\xff\xfe\xff", "the body is not JSON"),
    "a deep hole": (b"[" * 100_000, "the body is not JSON"),
    "no object": ([1], "the body must be a JSON object, got a list"),
}


@pytest.mark.parametrize(("body", "words"), REFUSED.values(), ids=REFUSED)
async def test_invalid_request_is_rejected_with_a_message(body: Any, words: str) -> None:
    async with ServedEndpoint() as served:
        status, reply = await served.post(body)
    assert status == 400 and words in reply["error"]["message"] and not served.asked


async def test_finished_episode_returns_an_error() -> None:
    async def over(request: ChatRequest) -> RecordedAnswer:
        raise EpisodeError("the episode is over")

    async with ServedEndpoint() as served:
        status, reply = await served.post({"messages": HELLO}, await served.endpoint.open(over))
        assert (status, reply["error"]["message"]) == (400, "the episode is over")
        served.endpoint.forget(served.url)
        status, reply = await served.post({"messages": HELLO})
        assert status == 404 and "no running episode uses this URL" in reply["error"]["message"] and not served.asked


async def test_unknown_token_returns_404() -> None:
    async with ServedEndpoint() as served:
        root, token = served.url.split("/v1")[0].rsplit("/", 1)
        other = await served.endpoint.open(served.answer)
        assert len(token) >= 24 and token not in other
        for path in ("", "/", "/v1/models", f"/{token[:-1]}/v1/models", f"/{token}", f"/{token}/v1x/models"):
            async with served.http.get(root + path) as response:
                assert response.status == 404 and token not in (await response.json())["error"]["message"]
        assert root.startswith("http://127.0.0.1:")


async def test_other_api_routes_are_reported_as_unsupported() -> None:
    async with ServedEndpoint() as served, served.http.post(f"{served.url}/embeddings", json={}) as response:
        assert response.status == 404
        assert "use POST chat/completions, responses or messages" in (await response.json())["error"]["message"]


async def test_request_body_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "AGENT_REQUEST_BYTES", 1000)
    async with ServedEndpoint() as served:
        assert (await served.post({"messages": HELLO}))[0] == 200
        status, reply = await served.post({"messages": [{"role": "user", "content": "a" * 2000}]})
    assert status == 413 and "1000" in reply["error"]["message"] and len(served.asked) == 1


async def test_logprobs_and_token_ids_are_returned_on_request() -> None:
    entries = [{"token": "ok", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    says = ChatCompletion(
        Message(role="assistant", content="ok"),
        prompt_ids=[1, 2],
        token_ids=[3],
        logprobs=[-0.5],
        logprob_entries=entries,
    )
    async with ServedEndpoint(says, has_logprobs=True) as served, served.client() as client:
        options = {"logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
        whole = await client.chat.completions.create(model="any", messages=HELLO, **options)
        async with client.chat.completions.stream(model="any", messages=HELLO, **options) as stream:
            streamed = await stream.get_final_completion()
        without = await client.chat.completions.create(model="any", messages=HELLO)
    assert served.asked[0].options == {"top_logprobs": 2, "return_token_ids": True}
    for reply in (whole, streamed):
        assert [entry.to_dict() for entry in reply.choices[0].logprobs.content] == entries
    assert (whole.prompt_token_ids, whole.choices[0].token_ids) == ([1, 2], [3])
    assert without.choices[0].logprobs is None and "token_ids" not in without.choices[0].to_dict()
