"""Recognition of transient errors raised by other HTTP clients."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable

import aiohttp
import openai
import pytest

from reward_kit.errors import RewardError, boundary
from reward_kit.providers.faults import TransientError, TransientFailure, find_transient_failure
from tests.chat_server import Behavior, ChatServer, answer, dropped, slow, status

SECONDS = 0.3
ASKED = [{"role": "user", "content": "x"}]
Client = Callable[[str], object]


def by_openai(url: str) -> object:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        return client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]


def by_urllib(url: str) -> object:
    body = json.dumps({"model": "m", "messages": ASKED}).encode()
    asked = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answered:
            return answered.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise


def by_aiohttp(url: str) -> object:
    async def ask() -> object:
        seconds = aiohttp.ClientTimeout(SECONDS)
        async with aiohttp.ClientSession(timeout=seconds, raise_for_status=True) as session:
            body = {"model": "m", "messages": ASKED}
            async with session.post(f"{url}/chat/completions", json=body) as answered:
                return await answered.read()

    return asyncio.run(ask())


def raised(client: Client, url: str) -> BaseException:
    """Return the failure of a reward that uses the client."""
    with pytest.raises(Exception) as caught, boundary(RewardError, "reward"):
        client(url)
    return caught.value


@pytest.mark.parametrize("client", [by_openai, by_urllib, by_aiohttp])
@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (status(429, {"Retry-After": "7"}), TransientFailure(7.0)),
        (status(503), TransientFailure(None)),
        (dropped(), TransientFailure(None)),
        (slow(3 * SECONDS, answer("too late")), TransientFailure(None)),
        (status(400), None),
        (status(403, {"Retry-After": "7"}), None),
    ],
    ids=["limited", "down", "dropped", "stalled", "wrong", "refused"],
)
async def test_transient_failures_of_other_clients_are_recognized(
    client: Client, behaviour: Behavior, expected: TransientFailure | None
) -> None:
    async with ChatServer(lambda body: behaviour) as server:
        error = await asyncio.to_thread(raised, client, server.base_url)
    assert find_transient_failure(error) == expected


@pytest.mark.parametrize("client", [by_openai, by_urllib, by_aiohttp])
def test_refused_connection_is_transient(client: Client) -> None:
    assert find_transient_failure(raised(client, "http://127.0.0.1:9/v1")) == TransientFailure(None)


def test_transient_cause_of_a_reward_error_is_found_and_a_bug_is_not_transient() -> None:
    error = RewardError("the judge gave up")
    error.__cause__ = TransientError("429", 3.0, 429)
    assert find_transient_failure(error) == TransientFailure(3.0)
    assert find_transient_failure(KeyError("grade")) is None


def test_suppressed_context_is_ignored_and_cyclic_causes_terminate() -> None:
    hiding = ValueError("no grade")
    hiding.__context__, hiding.__suppress_context__ = ConnectionResetError(), True
    assert find_transient_failure(hiding) is None
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert find_transient_failure(one) is None
