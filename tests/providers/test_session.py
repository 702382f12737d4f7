"""Requests of a run share outages, refusals, keys and limits, tested against real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from reward_kit.errors import ConfigError, ProviderError
from reward_kit.providers import ChatEndpoint, ProviderSession, Rates, RetryPolicy
from reward_kit.providers.chat import DIALECTS
from tests.chat_server import ChatServer, answer, html, silent, slow, status

FAST = RetryPolicy(base_s=0.001, cap_s=0.002)
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def traffic(**options) -> tuple[ProviderSession, list[str], list[str]]:
    made, lines, reasons = ProviderSession(**options), [], []
    made.notice, made.gave_up = lines.append, reasons.append
    return made, lines, reasons


async def test_outage_pauses_all_requests_until_the_endpoint_answers():
    shared, lines, reasons = traffic()
    notified = asyncio.Event()
    shared.notice = lambda line: (lines.append(line), notified.set())
    async with ChatServer(lambda _: answer() if len(server.requests) == 1 else silent()) as server:
        chat = ChatEndpoint(server.base_url, retry=FAST, traffic=shared)
        await chat.complete(REQUEST)
        waiting = asyncio.gather(*(chat.complete(REQUEST) for _ in range(30)))
        await asyncio.sleep(0.02)
    assert not waiting.done()
    await asyncio.wait_for(notified.wait(), 5)
    async with ChatServer(lambda _: answer("back"), port=server.port):
        assert {completion.message.text for completion in await waiting} == {"back"}
    await chat.aclose()
    first, second = lines
    assert f"http://127.0.0.1:{server.port}/v1/chat/completions (m) has failed" in first
    assert first.count("http://") == 1 and "first after 1 s and later every 30 s: " in first
    assert "is responding again after" in second
    assert not reasons


async def test_outage_longer_than_the_patience_fails_the_run_and_its_requests():
    shared, lines, reasons = traffic(outage_time_s=0.3)
    chat = ChatEndpoint(f"http://127.0.0.1:{closed_port()}/v1", retry=FAST, traffic=shared)
    failures = await asyncio.gather(*(chat.complete(REQUEST) for _ in range(5)), return_exceptions=True)
    assert {type(failure) for failure in failures} == {ProviderError}
    assert len(lines) == len(reasons) == 1
    assert "has not responded for 0 s" in reasons[0]
    await chat.aclose()


async def test_cancelling_the_run_on_an_outage_cancels_requests_instead_of_failing():
    shared, _, _ = traffic(outage_time_s=0.2)
    chat = ChatEndpoint(f"http://127.0.0.1:{closed_port()}/v1", retry=FAST, traffic=shared)
    tasks = [asyncio.create_task(chat.complete(REQUEST)) for _ in range(5)]
    shared.gave_up = lambda reason: [task.cancel() for task in tasks]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
    await chat.aclose()


async def test_rejected_key_stops_the_run_before_the_request_fails():
    for stops in (False, True):
        shared, _, reasons = traffic()
        async with ChatServer(lambda _: status(401, text="wrong key")) as server:
            chat = ChatEndpoint(server.base_url, "key-1", retry=FAST, traffic=shared)
            task = asyncio.create_task(chat.complete(REQUEST))
            if stops:
                shared.gave_up = lambda reason, task=task: task.cancel()
            with pytest.raises(asyncio.CancelledError if stops else ProviderError) as caught:
                await task
            assert stops or type(caught.value) is ProviderError
            assert stops or "HTTP 401: wrong key" in reasons[0]
            assert len(server.requests) == 1
            await chat.aclose()


@pytest.mark.parametrize(
    ("model", "path", "behavior", "advice"),
    [
        ("qwen3-9b", "/v1", status(404, text="no such model"), "; did you mean 'qwen3-8b'?"),
        ("gpt", "/v1", status(404, error={"message": "x"}), "; known: llama-3, qwen3-8b"),
        ("gpt", "", status(404), "; set base_url to URL/v1, which offers the models qwen3-8b, llama-3"),
        ("gpt", "/api", status(404), "; check base_url, which usually ends in /v1"),
        ("gpt", "/v2", status(404), "; check base_url"),
        ("gpt", "/v1", html(), "; known: llama-3, qwen3-8b"),
        ("qwen3-8b", "/v1", html(), "; check base_url"),
    ],
)
async def test_wrong_url_or_model_stops_the_run_at_once_with_advice(model, path, behavior, advice):
    shared, lines, reasons = traffic()
    async with ChatServer(lambda _: behavior, models=["qwen3-8b", "llama-3"]) as server:
        url = server.base_url.removesuffix("/v1")
        chat = ChatEndpoint(url + path, "key-1", retry=FAST, traffic=shared)
        results = await asyncio.gather(
            *(chat.complete(REQUEST | {"model": model}) for _ in range(3)), return_exceptions=True
        )
        await chat.aclose()
    assert {type(result) for result in results} == {ProviderError}
    assert reasons[0] == str(results[0]) and reasons[0].endswith(advice.replace("URL", url))
    assert not lines


async def test_unknown_model_after_a_completion_fails_only_its_request():
    shared, _, reasons = traffic()
    async with ChatServer(lambda _: answer() if len(server.requests) == 1 else status(404)) as server:
        chat = ChatEndpoint(server.base_url, retry=FAST, traffic=shared)
        await chat.complete(REQUEST)
        with pytest.raises(ProviderError, match="HTTP 404"):
            await chat.complete(REQUEST)
        await chat.aclose()
    assert not reasons


async def test_always_failing_request_fails_alone():
    shared, lines, _ = traffic()

    def script(body):
        return status(500) if body["messages"][0]["content"] == "poison" else slow(0.01, answer())

    async with ChatServer(script) as server:
        chat = ChatEndpoint(server.base_url, retry=RetryPolicy(base_s=0.02), traffic=shared)
        texts = ["hi"] * 10 + ["poison"] + ["hi"] * 30
        requests = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in texts]
        gate = asyncio.Semaphore(4)

        async def ask(request):
            async with gate:
                return await chat.complete(request)

        outcomes = await asyncio.gather(*map(ask, requests), return_exceptions=True)
        await chat.aclose()
    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, ProviderError)] == [10]
    assert "gave up after 5 attempts" in str(outcomes[10])
    assert not lines


async def test_limited_endpoint_capacity_is_found_and_every_request_is_answered():
    shared, _, _ = traffic()
    places = asyncio.Semaphore(5)

    async def crowded(request, body):
        await asyncio.sleep(0.005)
        if places.locked():
            return await status(429)(request, body)
        async with places:
            return await slow(0.02, answer())(request, body)

    async with ChatServer(lambda _: crowded) as server:
        chat = ChatEndpoint(server.base_url, retry=RetryPolicy(base_s=0.01), traffic=shared)
        await asyncio.gather(*(chat.complete(REQUEST) for _ in range(100)))
        refused = len(server.requests) - 100
        await chat.aclose()
    assert refused < 200


async def test_requests_start_at_the_configured_rate():
    shared, _, _ = traffic()
    async with ChatServer(lambda _: answer()) as server:
        chat = ChatEndpoint(server.base_url, traffic=shared, rates=Rates(requests_per_minute=1_200))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(chat.complete(REQUEST) for _ in range(30)))
        assert asyncio.get_running_loop().time() - began >= (30 - 20) / 20 - 0.01
        await chat.aclose()


@pytest.mark.parametrize("api", DIALECTS)
async def test_token_rates_count_the_usage_of_every_api(api):
    usage = {"prompt_tokens": 900, "completion_tokens": 70, "prompt_tokens_details": {"cached_tokens": 800}}
    async with ChatServer(lambda _: answer(usage=usage)) as server:
        chat = ChatEndpoint(server.base_url, rates=Rates(tokens_per_minute=60_000), dialect=DIALECTS[api])
        await chat.complete(REQUEST)
        estimate = chat.queue("m")._estimate
        await chat.aclose()
    assert estimate.tokens(0, 5_000) == 70.0, "the answer's length, not the limit"
    assert estimate.tokens(100, 0) > 70 + 100 * 0.25, "more tokens per byte than assumed"


async def test_rates_apply_without_a_shared_session():
    async with ChatServer(lambda _: slow(0.05, answer())) as server:
        chat = ChatEndpoint(server.base_url, rates=Rates(max_connections=1))
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(chat.complete(REQUEST) for _ in range(4)))
        assert asyncio.get_running_loop().time() - began >= 0.2
        await chat.aclose()


def test_each_endpoint_and_model_pair_has_a_single_queue_and_rates():
    shared = ProviderSession()
    queue = shared.queue("http://a", "m", Rates(requests_per_minute=60))
    assert shared.queue("http://a", "m", Rates(requests_per_minute=60)) is queue
    assert shared.queue("http://a", "other") is not queue
    with pytest.raises(ConfigError, match=r"two policies use 'm' at http://a .*requests_per_minute=60,.*=120"):
        shared.queue("http://a", "m", Rates(requests_per_minute=120))


def test_invalid_outage_patience_is_a_config_error():
    with pytest.raises(ConfigError, match="outage_time_s: expected a number above 0, got 0"):
        ProviderSession(outage_time_s=0)


CROWD = """
import asyncio, resource, sys
from reward_kit.providers import ChatEndpoint, ProviderSession
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
async def main():
    chat = ChatEndpoint(sys.argv[1], traffic=ProviderSession())
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    await chat.complete(request)
    print(len(await asyncio.gather(*(chat.complete(request) for _ in range(100)))))
    await chat.aclose()
asyncio.run(main())
"""


async def test_process_low_on_file_descriptors_sends_fewer_concurrent_requests():
    async with ChatServer(lambda _: slow(0.05, answer())) as server:
        command = [sys.executable, "-c", CROWD, server.base_url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "100", done.stderr
