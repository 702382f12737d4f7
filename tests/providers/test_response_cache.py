"""Test the response cache: keys, hits, several processes, damaged files."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError, ProviderError
from reward_kit.providers import ChatEndpoint, ProviderSession, RetryPolicy
from reward_kit.providers.chat import DIALECTS
from reward_kit.providers.prices import Price, PriceTable
from reward_kit.providers.response_cache import ResponseCache
from tests.chat_server import ChatServer, answer, status

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def numbered(server: list[ChatServer]):
    """Return a script with numbered answers."""
    return lambda _: answer(f"answer {len(server[0].requests)}")


async def ask(path: Path, url: str, *asked: tuple[dict, str], **options) -> tuple[list[str], ResponseCache]:
    """Return the answers to requests of scopes, with a new process's cache."""
    cache = ResponseCache(path)
    endpoint = ChatEndpoint(url, traffic=ProviderSession(cache=cache), retry=RetryPolicy(max_attempts=1), **options)
    try:
        return [(await endpoint.complete(REQUEST | more, scope=scope)).message.text for more, scope in asked], cache
    finally:
        await endpoint.aclose()
        cache.close()


@pytest.mark.parametrize("api", DIALECTS)
async def test_each_api_has_its_own_answers(tmp_path: Path, api: str) -> None:
    servers: list[ChatServer] = []
    async with ChatServer(numbered(servers)) as server:
        servers.append(server)
        asked = [({"temperature": 0}, "a"), ({}, "b")]
        for _ in range(2):
            found, _ = await ask(tmp_path / "c.db", server.base_url, *asked, dialect=DIALECTS[api])
            assert found == ["answer 1", "answer 2"]
        other = DIALECTS["messages" if api == "chat" else "chat"]
        found, _ = await ask(tmp_path / "c.db", server.base_url, *asked, dialect=other)
        assert found == ["answer 3", "answer 4"]


async def test_second_run_makes_no_request_and_costs_nothing(tmp_path: Path) -> None:
    servers: list[ChatServer] = []
    prices = PriceTable({"m": Price(1.0, 1.0, 1.0)})
    async with ChatServer(numbered(servers)) as server:
        servers.append(server)
        asked = [({"seed": 1}, "a"), ({"seed": 2}, "b")]
        first, cache = await ask(tmp_path / "c.db", server.base_url, *asked)
        assert (first, cache.hits, cache.misses) == (["answer 1", "answer 2"], 0, 2)
        again = ResponseCache(tmp_path / "c.db")
        endpoint = ChatEndpoint(server.base_url, traffic=ProviderSession(cache=again), prices=prices)
        completion = await endpoint.complete(REQUEST | {"seed": 2}, scope="c")
        await endpoint.aclose()
        assert completion.message.text == "answer 2"
        assert completion.usage is not None and completion.usage.cost == 0.0 and completion.usage.prompt_tokens > 0
        assert again.to_json() == {"path": str(tmp_path / "c.db"), "hits": 1, "misses": 0}
    assert len(server.requests) == 2


async def test_requests_without_a_seed_stay_independent_samples(tmp_path: Path) -> None:
    servers: list[ChatServer] = []
    async with ChatServer(numbered(servers)) as server:
        servers.append(server)
        asked = [({}, "a"), ({}, "a"), ({}, "b"), ({"temperature": 0}, "a"), ({"temperature": 0}, "b")]
        first, _ = await ask(tmp_path / "c.db", server.base_url, *asked)
        assert first == ["answer 1", "answer 2", "answer 3", "answer 4", "answer 4"]
        again, cache = await ask(tmp_path / "c.db", server.base_url, *reversed(asked))
        assert again == ["answer 4", "answer 4", "answer 3", "answer 1", "answer 2"], "the first request of a is first"
        assert (cache.hits, cache.misses) == (5, 0)


async def test_other_url_or_request_is_a_miss_and_order_of_keys_is_not(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "c.db")

    def key(url: str, request: dict) -> bytes:
        return cache.key(url, json.dumps(request).encode(), "a")

    base = {"model": "m", "seed": 1, "messages": []}
    assert key("u", base) == key("u", dict(reversed(base.items())))
    assert len({key("u", base), key("v", base), key("u", base | {"model": "n"}), key("u", base | {"seed": 2})}) == 4


async def test_errors_are_not_cached(tmp_path: Path) -> None:
    async with ChatServer([status(400), answer("fine")]) as server:
        with pytest.raises(ProviderError):
            await ask(tmp_path / "c.db", server.base_url, ({"seed": 1}, "a"))
        assert (await ask(tmp_path / "c.db", server.base_url, ({"seed": 1}, "a")))[0] == ["fine"]


async def test_streamed_answer_is_cached(tmp_path: Path) -> None:
    async with ChatServer([answer("streamed")]) as server:
        for _ in range(2):
            texts, _ = await ask(tmp_path / "c.db", server.base_url, ({"seed": 1, "stream": True}, "a"))
            assert texts == ["streamed"]
    assert len(server.requests) == 1


async def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    first, second = ResponseCache(tmp_path / "c.db"), ResponseCache(tmp_path / "c.db")
    for number in range(50):
        for cache in (first, second):
            cache.keep(bytes([number]), {"n": number})
    assert [second.find(bytes([number])) for number in range(50)] == [{"n": number} for number in range(50)]


async def test_lost_file_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ResponseCache(tmp_path / "c.db")
    cache._database.execute("DROP TABLE answers")
    cache.keep(b"k", 1)
    assert cache.find(b"k") is None and "no such table" in caplog.text


@pytest.mark.parametrize("kind", ["text", "database", "directory"])
def test_file_that_is_not_a_cache_is_rejected_unchanged(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other"
    if kind == "text":
        path.write_text("precious " * 200)
    elif kind == "database":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE mine (x)")
    else:
        path.mkdir()
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match="response cache"):
        ResponseCache(path)
    assert before is None or path.read_bytes() == before


def test_file_is_private_and_secrets_are_redacted(tmp_path: Path) -> None:
    cache = ResponseCache(tmp_path / "sub" / "c.db")
    cache.redact = lambda line: line.replace(b"sk-1", b"***")
    cache.keep(b"k", {"text": "key sk-1"})
    assert cache.find(b"k") == {"text": "key ***"}
    assert (tmp_path / "sub" / "c.db").stat().st_mode & 0o077 == 0
