"""Chat completions are parsed identically whether streamed or not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.errors import ProviderError
from reward_kit.models import Message
from reward_kit.providers import ChatEndpoint, EncodedMessages, Price, PriceTable, Usage
from reward_kit.providers.completion import EventReader, StreamedCompletion
from reward_kit.providers.dialect import Dialect
from tests.chat_server import USAGE, ChatServer, answer, events, raw, tool_calls

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOKENS = {
    "logprobs": {"content": [{"token": "O", "logprob": -0.5}, {"token": "k", "logprob": -1.25}]},
    "token_ids": [4, 8],
}


async def ask(behaviour, *, stream=False, request=None, **options):
    async with ChatServer([behaviour]) as server:
        chat = ChatEndpoint(server.base_url, **options)
        try:
            return await chat.complete({**(request or REQUEST), **({"stream": True} if stream else {})})
        finally:
            await chat.aclose()


ANSWERS = {
    "text": answer("Grüße, 世界 🙂"),
    "empty": answer(""),
    "reasoning": answer("42", message={"reasoning_content": "six times seven"}),
    "length": answer("cut", finish_reason="length"),
    "one call": tool_calls([("move", {"to": "north"})]),
    "ten calls": tool_calls([(f"tool_{n}", {"n": n, "text": "x" * n}) for n in range(10)], "All at once."),
    "malformed call": tool_calls([("move", '{"to": ')]),
    "calls without id": tool_calls([("a", {}), ("a", {})], call_ids=False),
    "no usage": answer("ok", usage=None),
    "tokens": answer("Ok", choice=TOKENS, top={"prompt_token_ids": [1, 2, 3]}),
}


@pytest.mark.parametrize("behaviour", ANSWERS.values(), ids=ANSWERS)
async def test_streamed_completion_equals_whole_completion(behaviour):
    whole, streamed = await ask(behaviour), await ask(behaviour, stream=True)
    assert streamed.message.text == whole.message.text
    assert streamed.message.tool_calls == whole.message.tool_calls
    assert streamed.message.reasoning_content == whole.message.reasoning_content
    for name in ("finish_reason", "usage", "prompt_ids", "token_ids", "logprobs"):
        assert getattr(streamed, name) == getattr(whole, name), name


async def test_streaming_request_asks_for_usage():
    async with ChatServer([answer()]) as server:
        chat = ChatEndpoint(server.base_url)
        await chat.complete({**REQUEST, "stream": True})
        await chat.aclose()
        assert server.bodies[0]["stream_options"] == {"include_usage": True}
        assert "Authorization" not in server.requests[0].headers


async def test_whole_answer_to_a_streaming_request_is_read():
    body = {"choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}]}
    assert (await ask(raw(json.dumps(body)), stream=True)).message.content == "whole"


async def test_token_ids_logprobs_and_usage_are_read():
    completion = await ask(ANSWERS["tokens"])
    assert completion.prompt_ids == [1, 2, 3]
    assert completion.token_ids == [4, 8]
    assert completion.logprobs == [-0.5, -1.25]
    assert completion.usage == Usage(11, 7)


async def test_token_ids_are_read_from_logprob_entries():
    entries = [{"token": "token_id:123", "logprob": -0.1}, {"token": "token_id:7", "logprob": -0.2}]
    completion = await ask(answer("x", choice={"logprobs": {"content": entries}}))
    assert completion.token_ids == [123, 7]
    assert completion.logprobs == [-0.1, -0.2]


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": [{"token": "a"}]}, {"content": [3]}, []])
async def test_missing_logprobs_are_none(logprobs):
    completion = await ask(answer("x", choice={"logprobs": logprobs}))
    assert completion.logprobs is completion.token_ids is None


async def test_missing_usage_is_none():
    assert (await ask(answer(usage=None))).usage is None
    assert (await ask(answer(usage={"prompt_tokens": None}))).usage is None


async def test_cached_tokens_are_read_in_both_spellings_and_priced():
    prices = PriceTable({"m": Price(2.0, 10.0, 0.5)})
    openai = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
    deepseek = {**USAGE, "prompt_cache_hit_tokens": 4}
    for usage in (openai, deepseek):
        completion = await ask(answer(usage=usage), prices=prices)
        assert completion.usage == Usage(11, 7, 4, pytest.approx((7 * 2.0 + 4 * 0.5 + 7 * 10.0) / 1e6))


async def test_model_without_a_price_has_no_cost():
    usage = (await ask(answer(), prices=PriceTable({"other": Price(1, 1, 1)}))).usage
    assert usage is not None
    assert usage.cost is None


@pytest.mark.parametrize("cost, read", [(0.25, 0.25), (0, 0.0), (None, None), ("free", None), (True, None), (-1, None)])
async def test_provider_reported_cost_is_used_without_a_price(cost, read):
    usage = {**USAGE, "cost": cost}
    assert (await ask(answer(usage=usage))).usage.cost == read
    priced = (await ask(answer(usage=usage), prices=PriceTable({"m": Price(1e6, 0, 0)}))).usage
    assert priced.cost == 11.0


async def test_missing_call_ids_are_generated_and_null_content_is_kept():
    request = {"model": "m", "messages": [{"role": "user", "content": str(n)} for n in range(3)]}
    behaviour = tool_calls([("a", {}), ("b", {})], call_ids=False)
    completions = [await ask(behaviour, request=request) for _ in range(2)]
    for completion in completions:
        assert completion.message.content is None
        assert [call.id for call in completion.message.tool_calls] == ["call_3_0", "call_3_1"]


async def test_object_or_missing_arguments_become_json_text():
    calls = [{"function": {"name": "a", "arguments": {"x": 1}}}, {"function": {"name": "b"}}]
    completion = await ask(answer(None, message={"tool_calls": calls}))
    assert [call.function.arguments for call in completion.message.tool_calls] == ['{"x": 1}', "{}"]


async def test_refusal_becomes_message_text():
    completion = await ask(answer(None, message={"refusal": "I will not."}))
    assert completion.message.text == "I will not."


async def test_reasoning_field_is_read_as_reasoning_content():
    assert (await ask(answer(message={"reasoning": "hm"}))).message.reasoning_content == "hm"


async def test_streamed_calls_without_an_index_are_separated_by_id():
    def chunk(call):
        return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    stream = events(
        chunk({"id": "1", "function": {"name": "a", "arguments": '{"x":'}}),
        chunk({"function": {"arguments": "1}"}}),
        chunk({"id": "2", "function": {"name": "b", "arguments": "{}"}}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    )
    calls = (await ask(stream, stream=True)).message.tool_calls
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [("1", "a", '{"x":1}'), ("2", "b", "{}")]


async def test_finish_reason_ends_a_stream_without_done_marker():
    stream = events({"choices": [{"delta": {"content": "all"}, "finish_reason": "stop"}]}, done=False)
    assert (await ask(stream, stream=True)).message.content == "all"


@pytest.mark.parametrize(
    "delta",
    [3, {"content": 3}, {"tool_calls": [None]}, {"tool_calls": 3}, {"tool_calls": [{"function": {"name": 3}}]}],
)
async def test_malformed_stream_event_is_a_provider_error(delta):
    with pytest.raises(ProviderError, match="sent a stream event in an unknown format"):
        await ask(events({"choices": [{"delta": delta}]}), stream=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text, read", [("\ud83d\ude42", "\N{SLIGHTLY SMILING FACE}"), ("a\ud83d", "a\ufffd")])
async def test_split_surrogate_pairs_are_joined(text, read, stream):
    pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in text]
    whole = raw(json.dumps({"choices": [{"message": {"content": text}}]}))
    completion = await ask(events(*pieces) if stream else whole, stream=stream)
    assert completion.message.content == read


async def test_request_that_is_not_json_is_not_sent():
    with pytest.raises(ProviderError, match="it cannot be converted to JSON"):
        await ask(answer(), request={**REQUEST, "temperature": float("nan")})


EVENT_TEXTS = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1))


@given(EVENT_TEXTS, st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(1, 7), min_size=1))
def test_events_do_not_depend_on_network_chunking(texts, newline, sizes):
    wire = "".join(f": ping{newline}data: {text}{newline}id: 3{newline}{newline}" for text in texts).encode()
    reader, seen, start, turn = EventReader(), [], 0, 0
    while start < len(wire):
        size = sizes[turn % len(sizes)]
        seen += reader.feed(wire[start : start + size])
        start, turn = start + size, turn + 1
    assert seen == texts


def test_data_lines_of_one_event_are_joined():
    assert EventReader().feed(b"data: a\ndata:b\n\n") == ["a\nb"]


def test_a_second_choice_is_ignored():
    stream = StreamedCompletion("here")
    for index, text in ((0, "mine"), (1, "other")):
        delta = {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": "stop"}]}
        stream.feed(f"data: {json.dumps(delta)}\n\n".encode())
    assert stream.result()["choices"][0]["message"] == {"content": "mine"}


@given(st.lists(st.text(st.characters()), max_size=5))
def test_encoded_messages_equal_json_dump(texts):
    conversation = [Message(role="user", content=text) for text in texts]
    encoded = EncodedMessages()
    for end in range(len(conversation) + 1):
        encoded.update(conversation[:end])
    assert len(encoded) == len(texts)
    expected = {"model": "m", "messages": [message.to_chat() for message in conversation]}
    assert json.loads(Dialect().encode({"model": "m", "messages": encoded})) == expected
    assert json.loads(Dialect().encode({"messages": encoded})) == {"messages": expected["messages"]}


def test_only_new_and_rewritten_messages_are_encoded():
    seen = []

    def to_chat(message: Message):
        seen.append(message.text)
        return message.to_chat()

    a, b, c, d = (Message(role="user", content=text) for text in "abcd")
    encoded = EncodedMessages(to_chat=to_chat)
    encoded.update([a, b])
    encoded.update([a, b, c])
    assert seen == ["a", "b", "c"]
    encoded.update([a, d])
    assert seen == ["a", "b", "c", "d"]
    assert [message["content"] for message in map(json.loads, encoded.encoded)] == ["a", "d"]
