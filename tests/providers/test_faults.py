"""Endpoint failures are classified, reported without secrets and retried only if a retry can help, in every API."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from contextlib import asynccontextmanager

import pytest

from reward_kit.errors import DeadlineError, LimitError, ProviderError
from reward_kit.providers import ChatEndpoint, RetryPolicy, Transport
from reward_kit.providers.chat import DIALECTS
from reward_kit.providers.faults import EXCERPT_CHARS, excerpt
from tests.chat_server import (
    Behavior,
    ChatServer,
    answer,
    cut_body,
    cut_stream,
    dropped,
    events,
    html,
    raw,
    silent,
    slow,
    status,
    trickle,
)

SECRET = "sk-very-secret-0123456789"
FAST = RetryPolicy(base_s=0.001, cap_s=0.002)
ONCE = RetryPolicy(max_attempts=1)
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**REQUEST, "stream": True}


@asynccontextmanager
async def endpoint(server: ChatServer, api: str = "chat", **options):
    chat = ChatEndpoint(server.base_url, SECRET, **{"retry": FAST, "dialect": DIALECTS[api], **options})
    yield chat
    await chat.aclose()


TRANSIENT = {
    **{
        f"status {code}": (status(code), f"HTTP {code}: scripted {code}")
        for code in (408, 409, 429, 500, 502, 503, 504, 520, 529)
    },
    "dropped connection": (dropped(), "dropped the connection"),
    "cut body": (cut_body(), "cut the response short"),
    "html": (html(), "with an HTML page: <html><body>Please wait"),
    "html by type only": (raw("Please wait", "text/html"), "with an HTML page: Please wait"),
    "html by content only": (raw(" \n<!doctype html>", "application/json"), "with an HTML page: <!doctype"),
    "not json": (raw("upstream error", "text/plain"), "with text that is not JSON: upstream error"),
    "empty body": (raw(""), "not JSON: (empty)"),
    "hostile json": (raw("[" * 100_000), "not JSON"),
    "routed rate limit": (raw('{"error": {"code": 429, "message": "slow down"}}'), "slow down"),
}
TRANSIENT_STREAMS = {
    "cut stream": (cut_stream(), "closed the stream early"),
    "no final event": (cut_stream(keep=1), "closed the stream early"),
    "half an event": (cut_stream(half_event=True), "closed the stream early"),
    "half a final event": (cut_stream(keep=1, half_event=True), "closed the stream early"),
    "cut connection": (cut_stream(connection=True), "cut the response short"),
    "no json event": (events("{oops"), "not a JSON object: {oops"),
    "html": (html(), "HTML page"),
}
FAILED_RESPONSE = {"status": "failed", "output": [], "error": {"code": "server_error", "message": "worker died"}}
# Events in the form of each API, and their statuses.
ERROR_EVENTS = {
    "chat": [{"error": {"code": code, "type": None, "message": "worker died"}} for code in (503, "500")],
    "responses": [
        {"type": "error", "code": "server_error", "message": "worker died", "param": None},
        {
            "type": "error",
            "error": {"type": "too_many_requests", "code": "rate_limit_exceeded", "message": "worker died"},
        },
        {"type": "response.failed", "response": FAILED_RESPONSE},
    ],
    "messages": [
        {"type": "error", "error": {"type": kind, "message": "worker died"}}
        for kind in ("overloaded_error", "api_error", "rate_limit_error", "timeout_error")
    ],
}


async def check_retries(api: str, request: dict, behaviour: Behavior, expected: str) -> None:
    """Check that a fault is retried and reported."""
    async with ChatServer([behaviour, behaviour, answer("at last"), behaviour]) as server:
        async with endpoint(server, api) as chat:
            completion = await chat.complete(request)
            assert (completion.message.content, completion.retries) == ("at last", 2)
        async with endpoint(server, api, retry=ONCE) as impatient:
            with pytest.raises(ProviderError) as caught:
                await impatient.complete(request)
        assert expected in str(caught.value)
        assert type(caught.value) is ProviderError


@pytest.mark.parametrize("behaviour, expected", TRANSIENT.values(), ids=TRANSIENT)
@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", DIALECTS)
async def test_a_transient_fault_is_retried_and_named(api, request_, behaviour, expected):
    await check_retries(api, request_, behaviour, expected)


@pytest.mark.parametrize("behaviour, expected", TRANSIENT_STREAMS.values(), ids=TRANSIENT_STREAMS)
@pytest.mark.parametrize("api", DIALECTS)
async def test_a_transient_fault_of_a_stream_is_retried_and_named(api, behaviour, expected):
    await check_retries(api, STREAMED, behaviour, expected)


@pytest.mark.parametrize("api, event", [(api, event) for api, found in ERROR_EVENTS.items() for event in found])
async def test_error_event_of_a_stream_is_retried_and_named(api, event):
    """An error may be the only event, or follow a part of the answer or the whole answer."""
    for behaviour in (events(event, done=False), cut_stream(error=event), cut_stream(keep=1, error=event)):
        await check_retries(api, STREAMED, behaviour, "worker died")


PERMANENT = {
    **{f"status {code}": (status(code), f"HTTP {code}: scripted {code}") for code in (400, 401, 403, 404, 422)},
    "status 501": (status(501), "HTTP 501"),
    "text error": (status(400, error="bad model"), "HTTP 400: bad model"),
    "fastapi detail": (raw('{"detail": "no such route"}', code=404), "HTTP 404: no such route"),
    "listed detail": (raw('{"detail": [{"loc": ["seed"]}]}', code=422), '"loc": ["seed"]'),
    "plain text": (raw("nope", "text/plain", 403), "HTTP 403: nope"),
    "empty account": (status(429, error={"message": "no money", "code": "insufficient_quota"}), "no money"),
    "redirect": (status(307, {"Location": "https://elsewhere/v1"}), "'https://elsewhere/v1'; set base_url to that URL"),
    "error in success": (raw('{"error": {"message": "context too long", "code": 400}}'), "context too long"),
}
MALFORMED = {
    "no choices": (raw('{"object": "list"}'), 'without choices: {"object": "list"}'),
    "empty choices": (raw('{"choices": []}'), "without choices"),
    "null choices": (raw('{"choices": null}'), "without choices"),
    "no message": (raw('{"choices": [{"text": "old"}]}'), "a choice without a message"),
    "no object": (raw("[1, 2]"), "without choices: [1, 2]"),
    "content of no kind": (raw('{"choices": [{"message": {"content": 5}}]}'), "in an unknown format"),
    "call without function": (raw('{"choices": [{"message": {"tool_calls": [{}]}}]}'), "in an unknown format"),
}


@pytest.mark.parametrize("behaviour, expected", PERMANENT.values(), ids=PERMANENT)
@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", DIALECTS)
async def test_permanent_fault_fails_immediately_with_the_provider_message(api, request_, behaviour, expected):
    async with ChatServer([behaviour]) as server, endpoint(server, api) as chat:
        with pytest.raises(ProviderError) as caught:
            await chat.complete(request_)
        assert expected in str(caught.value)
        assert len(server.requests) == 1


@pytest.mark.parametrize("behaviour, expected", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_completion_fails_immediately_and_is_shown(behaviour, expected):
    async with ChatServer([behaviour]) as server, endpoint(server) as chat:
        with pytest.raises(ProviderError) as caught:
            await chat.complete(REQUEST)
        assert expected in str(caught.value)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("context_length_exceeded", "too much"),
        (None, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."),
        (None, "prompt is too long: 210000 tokens > 200000 maximum"),
        (None, "the request exceeds the available context size"),
        (None, "Your input exceeds the context window of this model."),
    ],
)
@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", DIALECTS)
async def test_context_length_error_is_a_limit_error_and_is_not_retried(api, request_, code, text):
    error = {"message": text, "code": code}
    in_answer = {"type": "error", "status": "failed", "error": error}
    sent_later = events(in_answer, done=False) if "stream" in request_ else raw(json.dumps(in_answer))
    for refusal in (status(400, error=error), sent_later):
        async with ChatServer([refusal] * 3) as server, endpoint(server, api) as chat:
            with pytest.raises(LimitError, match=re.escape(text[:20])):
                await chat.complete(request_)
            assert len(server.requests) == 1


async def test_stream_without_chunks_is_a_provider_error():
    async with ChatServer([events()]) as server, endpoint(server) as chat:
        with pytest.raises(ProviderError, match="without choices"):
            await chat.complete(STREAMED)


async def test_refused_connection_is_reported():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening, so that no other process gets the port
        chat = ChatEndpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", retry=FAST)
        with pytest.raises(ProviderError, match=r"refused the connection; is the server running\?.*gave up after 5"):
            await chat.complete(REQUEST)
        await chat.aclose()


async def test_an_unknown_host_fails_without_retries():
    chat = ChatEndpoint("http://no-such-host.invalid/v1", retry=RetryPolicy(base_s=3600.0, cap_s=3600.0))
    with pytest.raises(ProviderError, match="cannot be reached; check base_url"):
        await chat.complete(REQUEST)
    await chat.aclose()


async def test_request_to_an_idle_endpoint_is_retried():
    script = ChatServer(lambda _: silent() if len(script.requests) == 1 else answer("awake"))
    async with script as server, endpoint(server, idle_timeout_s=0.1) as chat:
        completion = await chat.complete(REQUEST)
        assert completion.message.content == "awake"
        assert completion.retries >= 1


async def test_idle_timeout_is_a_deadline_error():
    async with ChatServer([silent()]) as server, endpoint(server, idle_timeout_s=0.05, retry=ONCE) as chat:
        with pytest.raises(DeadlineError, match=r"sent nothing for idle_timeout_s=0.05; raise idle_timeout_s"):
            await chat.complete(REQUEST)


@pytest.mark.parametrize("api", DIALECTS)
async def test_endless_stream_hits_the_total_timeout_and_is_not_retried(api):
    server = ChatServer(lambda _: trickle())
    async with server, endpoint(server, api, total_timeout_s=0.1, idle_timeout_s=30.0) as chat:
        with pytest.raises(DeadlineError, match=r"within total_timeout_s=0.1; raise total_timeout_s"):
            await chat.complete(STREAMED)
        assert len(server.requests) <= 1


async def test_slow_answer_within_the_timeouts_is_accepted():
    async with ChatServer([slow(0.02, answer("patience"))]) as server, endpoint(server) as chat:
        assert (await chat.complete(REQUEST)).message.content == "patience"


async def test_retries_stop_after_max_attempts():
    async with ChatServer(lambda _: status(503)) as server, endpoint(server) as chat:
        with pytest.raises(ProviderError, match=r"HTTP 503.*gave up after 5 attempts \(max_attempts\)"):
            await chat.complete(REQUEST)
        assert len(server.requests) == 5


@pytest.mark.parametrize("code", [429, 529])
@pytest.mark.parametrize("api", DIALECTS)
async def test_retry_after_beyond_the_budget_fails_immediately(api, code):
    script = [status(code, {"Retry-After": "120"})]
    async with ChatServer(script) as server, endpoint(server, api, retry=RetryPolicy(budget_s=60.0)) as chat:
        with pytest.raises(ProviderError, match=r"Retry-After of 120 s exceeds .* retry_budget_s=60"):
            await chat.complete(REQUEST)
        assert len(server.requests) == 1


@pytest.mark.parametrize("code", [429, 529])
@pytest.mark.parametrize("api", DIALECTS)
async def test_retry_after_within_the_budget_is_respected(api, code):
    waits: list[float] = []

    class Recorded(RetryPolicy):
        def wait_s(self, retry: int, retry_after_s: float | None, jitter: random.Random) -> float:
            waits.append(retry_after_s)
            return 0.0

    headers = [{"Retry-After": "7"}, {"Retry-After": "0.25"}, {"retry-after-ms": "1500", "Retry-After": "9"}, {}]
    script = [*(status(code, h) for h in headers), answer()]
    async with ChatServer(script) as server, endpoint(server, api, retry=Recorded()) as chat:
        assert (await chat.complete(REQUEST)).retries == 4
    assert waits == [7.0, 0.25, 1.5, None]


@pytest.mark.parametrize("request_", [REQUEST, STREAMED], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", DIALECTS)
async def test_api_key_echoed_by_the_provider_is_not_in_the_error(api, request_):
    echo = [status(401, text=f"Incorrect key: {SECRET}"), raw(f"<html>{SECRET}", "text/html"), raw(f"x{SECRET}")]
    echo += [raw(f'{{"a": "{SECRET}"}}'), events({"type": SECRET, "error": SECRET}), events(f"oops {SECRET}")]
    echo = echo if "stream" in request_ else echo[:4]
    async with ChatServer(echo) as server, endpoint(server, api, retry=ONCE) as chat:
        for _ in echo:
            with pytest.raises(ProviderError) as caught:
                await chat.complete(request_)
            assert SECRET not in repr(caught.value)
            assert "***" in str(caught.value)
        assert SECRET in json.dumps(server.requests[0].headers)
        assert SECRET not in repr(chat)


def test_excerpt_has_200_characters_and_no_partial_secret():
    text = "a" * (EXCERPT_CHARS - 3) + SECRET + "b" * 1_000
    assert excerpt(text, [SECRET]) == "a" * (EXCERPT_CHARS - 3) + "***…"


async def test_cancellation_propagates_and_leaves_the_endpoint_usable():
    arrived = asyncio.Event()

    async def announced(request, body):
        arrived.set()
        return await silent()(request, body)

    async with ChatServer([announced, answer("next")]) as server, endpoint(server) as chat:
        task = asyncio.create_task(chat.complete(REQUEST))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await chat.complete(REQUEST)).message.content == "next"


@pytest.mark.parametrize("api", DIALECTS)
async def test_stream_ends_at_its_end_marker_even_if_left_open(api):
    async def stays_open(request, body):
        response = await answer("done")(request, body)
        await asyncio.sleep(3600)
        return response

    async with ChatServer([stays_open]) as server, endpoint(server, api) as chat:
        assert (await chat.complete(STREAMED)).message.content == "done"


async def test_connections_are_kept_and_reopened_after_close():
    async with ChatServer(lambda _: answer()) as server:
        transport = Transport()
        for _ in range(2):
            data = await transport.post(f"{server.base_url}/chat/completions", {}, b"{}")
            assert data["choices"][0]["message"]["content"] == "ok"
            await transport.aclose()


def test_one_endpoint_serves_two_event_loops():
    chat = ChatEndpoint("http://unused.invalid")

    async def once() -> str:
        nonlocal chat
        async with ChatServer([answer("here")]) as server:
            chat._url = f"{server.base_url}/chat/completions"
            return (await chat.complete(REQUEST)).message.text

    assert [asyncio.run(once()), asyncio.run(once())] == ["here", "here"]
    asyncio.run(chat.aclose())
