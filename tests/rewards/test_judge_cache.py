"""Caching, recording and reported usage of judge requests."""

from __future__ import annotations

import asyncio
import json

import pytest

from reward_kit.errors import ConfigError, ProviderError
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, Cassette, ProviderSession
from reward_kit.rewards import llm_judge
from reward_kit.rewards.judge_client import JudgeClients
from tests.chat_server import ChatServer, answer, silent, slow, status
from tests.rewards.judges import GOOD, QUALITY, QUICK, fair, grades, judged, said, talk


async def test_equal_requests_are_sent_once_even_concurrently():
    clients = JudgeClients()
    script = lambda body: slow(0.05, fair(grades(4))(body))  # noqa: E731
    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "judge_clients": clients}
        results = await asyncio.gather(*(llm_judge(talk("Paris"), **options) for _ in range(20)))
        results.append(await llm_judge(talk("Paris"), **options))
        assert len(server.requests) == 1
        assert {result.score for result in results} == {0.75}
        usages = sorted(result.metrics["judge_usage"].reason for result in results)
        assert usages.count("calls=0 cached=1 prompt_tokens=0 completion_tokens=0 cost_usd=0.000000") == 20
        await llm_judge(talk("Lyon"), **options)
        await llm_judge(talk("Paris"), **{**options, "model": "other"})
        await llm_judge(talk("Paris"), **options, ground_truth="Paris")
        await llm_judge(talk("Paris"), **options, client={"seed": 7})
        assert len(server.requests) == 5
        await clients.close()


async def test_waiter_sends_its_own_request_if_the_shared_request_is_cancelled():
    clients = JudgeClients()
    arrived = asyncio.Event()

    def script(body):
        if arrived.is_set():
            return said(GOOD)(body)
        arrived.set()
        return silent()

    async with ChatServer(script) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "judge_clients": clients}
        first = asyncio.ensure_future(llm_judge(talk("Paris"), **options))
        await arrived.wait()
        second = asyncio.ensure_future(llm_judge(talk("Paris"), **options))
        await asyncio.sleep(0.01)
        assert len(server.requests) == 1
        first.cancel()
        assert (await second).score == 1.0
        assert first.cancelled() and len(server.requests) == 2
        await clients.close()


async def test_failed_request_is_not_cached():
    clients = JudgeClients()
    script = iter([status(400), status(400)])
    async with ChatServer(lambda body: next(script, None) or fair(grades(5))(body)) as server:
        options = {"model": "m", "base_url": server.base_url, "judge_clients": clients}
        with pytest.raises(ProviderError):
            await llm_judge(talk("Paris"), **options)
        assert (await llm_judge(talk("Paris"), **options)).score == 1.0
        await clients.close()


async def test_cache_file_is_used_by_later_runs(tmp_path):
    cache = tmp_path / "judge" / "cache.jsonl"
    async with ChatServer(fair(grades(4))) as server:
        options = {"model": "m", "base_url": server.base_url, "rubric": QUALITY, "cache": str(cache)}
        first = await llm_judge(talk("Paris"), **options)
        whole = cache.read_bytes()
        cache.write_bytes(whole + b'{"key": "torn')
        again = await llm_judge(talk("Paris"), **options)
        assert len(server.requests) == 1
        assert (again.score, again.reason) == (first.score, first.reason)
        await llm_judge(talk("Lyon"), **options)
        await llm_judge(talk("Lyon"), **options)
        assert len(server.requests) == 2
    lines = cache.read_text().splitlines()
    assert json.loads(lines[0]) == {"judge_cache": 1}
    assert sum(line.startswith('{"key":') and line.endswith("}") for line in lines) == 2


async def test_unreadable_verdict_is_not_cached(tmp_path):
    cache = tmp_path / "cache.jsonl"
    with pytest.raises(ProviderError):
        await judged(llm_judge, lambda body: answer("no"), talk("Paris"), cache=str(cache))
    assert cache.read_text() == '{"judge_cache":1}\n'


async def test_other_file_is_rejected_as_cache(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="is not a judge cache"):
        await judged(llm_judge, [], talk("Paris"), cache=str(tmp_path / "data.jsonl"))
    assert (tmp_path / "data.jsonl").read_text() == '{"messages": []}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        await judged(llm_judge, [], talk("Paris"), cache=str(tmp_path))


async def test_recorded_requests_are_replayed_without_a_server_or_key(tmp_path, monkeypatch):
    async def scores(traffic, base_url):
        clients, token = JudgeClients(), CURRENT_PROVIDER_SESSION.set(traffic)
        try:
            options = {
                "model": "m",
                "base_url": base_url,
                "judge_clients": clients,
                "client": {"api_key_env": "JUDGE_KEY"},
            }
            options["cache"] = str(tmp_path / "cache.jsonl")
            return [(await llm_judge(talk(text), **options)).score for text in ("Paris", "Paris", "Lyon")]
        finally:
            CURRENT_PROVIDER_SESSION.reset(token)
            await clients.close()
            traffic.close()

    monkeypatch.setenv("JUDGE_KEY", "sk-judge-secret")
    async with ChatServer(fair(grades(4))) as server:
        url = server.base_url
        recorded = await scores(ProviderSession(cassette=Cassette.record(tmp_path / "tape.jsonl")), url)
        assert len(server.requests) == 2
        assert server.requests[0].headers["Authorization"] == "Bearer sk-judge-secret"
    monkeypatch.delenv("JUDGE_KEY")
    assert (
        await scores(ProviderSession(cassette=Cassette.replay(tmp_path / "tape.jsonl")), url) == recorded == [0.75] * 3
    )
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "sk-judge-secret" not in written


async def test_judge_usage_reports_tokens_and_cost(tmp_path):
    (tmp_path / "prices.yaml").write_text("judge: {input: 1000000, output: 0}\n")
    client = {**QUICK, "price_file": str(tmp_path / "prices.yaml")}
    result, _ = await judged(llm_judge, fair(grades(5)), talk("Paris"), client=client)
    expected = "calls=1 cached=0 prompt_tokens=11 completion_tokens=7 cost_usd=11.000000"
    assert result.metrics["judge_usage"].reason == expected
    result, _ = await judged(llm_judge, fair(grades(5)), talk("Paris"))
    assert result.metrics["judge_usage"].reason.endswith("cost_usd=unknown")
