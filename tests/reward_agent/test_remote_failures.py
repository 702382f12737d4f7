"""Failures of remote rewards: retries, timeouts and invalid answers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from reward_kit.errors import ConfigError, DeadlineError, ProviderError
from reward_kit.integrations.reward_server.wire import make_answer
from reward_kit.models import EvaluateResult
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent import Scored, ScoringRequest
from reward_kit.reward_agent.remote import AboutBody, RemoteReward, RequestOptions

KEY = "the-key-that-nobody-reads"
SCORED = Scored("r", EvaluateResult(score=0.5))
Behavior = Callable[[web.Request], Awaitable[web.StreamResponse]]


def about(url: str = "x", **changes: Any) -> AboutBody:
    facts = {
        **{"name": "x", "id": "x", "mode": "pointwise", "parameters": None, "required": [], "level": "warm"},
        **{"digest": "12345678", "deadline_s": 1.0, "max_batch": 8},
    }
    return AboutBody.model_validate({**facts, **changes})


def says(value: Any, status: int = 200, **headers: str) -> Behavior:
    """Answer with JSON, or with raw bytes."""

    async def behave(request: web.Request) -> web.StreamResponse:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json", **headers})

    return behave


def scores(**changes: Any) -> Behavior:
    return says({**make_answer(SCORED, "typed"), **changes})


async def hangs_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"score"')
    assert request.transport is not None
    request.transport.close()
    return response


async def never_answers(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


@asynccontextmanager
async def scripted(script: Sequence[Behavior]) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Serve a script of behaviors, one per request; further requests get the last one."""
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        seen.append(request)
        return await script[min(len(seen), len(script)) - 1](request)

    app = web.Application()
    app.router.add_route("*", "/v1/rewards/{rest:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/rewards/x", seen
    finally:
        await runner.cleanup()


def request_options(attempts: int = 3, budget_s: float = 30.0, **more: float) -> RequestOptions:
    return RequestOptions(policy=RetryPolicy(attempts, budget_s, base_s=0.001, cap_s=0.001), **more)


async def scored_by(*script: Behavior, **options: Any) -> tuple[Scored, int]:
    """Return the result of one call, and its number of requests."""
    async with scripted(script) as (url, seen):
        async with RemoteReward(url, about(), api_key=KEY, request_options=request_options(**options)) as reward:
            scored = await reward.score(ScoringRequest("r", []))
        assert {request.headers["Authorization"] for request in seen} == {f"Bearer {KEY}"}
        return scored, len(seen)


class TestRetried:
    @pytest.mark.parametrize(
        "fault",
        [
            says({}, 429),
            says({}, 429, **{"Retry-After": "0"}),
            says({}, 503),
            says({}, 500),
            hangs_up,
            breaks_off,
            says(b"<"),
        ],
        ids=["429", "429 with Retry-After", "503", "500", "hangs up", "breaks off", "a page"],
    )
    async def test_transient_fault_is_retried_until_success(self, fault: Behavior) -> None:
        scored, requests = await scored_by(fault, fault, scores())
        assert (scored.score, scored.failure, requests) == (0.5, None, 3)

    async def test_persistent_fault_is_a_provider_error_with_the_attempt_count(self) -> None:
        scored, requests = await scored_by(says({"error": {"message": "full up"}}, 429))
        assert scored.failure is not None and requests == 3
        assert (scored.failure.failure_class, scored.score) == ("provider_error", None)
        assert "HTTP 429: full up" in scored.failure.message and "3 attempts" in scored.failure.message

    async def test_retry_after_is_respected(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        scored, requests = await scored_by(says({}, 503, **{"Retry-After-Ms": "300"}), scores())
        assert scored.score == 0.5 and requests == 2 and loop.time() - began >= 0.3
        scored, requests = await scored_by(says({}, 429, **{"Retry-After": "3600"}), scores())
        assert scored.failure is not None and requests == 1
        assert "its Retry-After of 3600 s exceeds the time left" in scored.failure.message
        assert scored.retry_after_s == 3600.0

    async def test_refused_connection_is_retried(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1/rewards/x"
        async with RemoteReward(url, about(), api_key=KEY, request_options=request_options()) as reward:
            scored = await reward.score(ScoringRequest("r", []))
        assert scored.failure is not None and scored.failure.failure_class == "provider_error"
        assert "cannot be reached (Connect" in scored.failure.message


class TestNotRetried:
    async def test_unanswered_request_is_a_timeout(self) -> None:
        scored, requests = await scored_by(never_answers, timeout_s=0.05)
        assert scored.failure is not None and requests == 1
        assert scored.failure.failure_class == "timeout"
        assert scored.failure.message.endswith("/score did not respond within timeout_s=0.05")

    @pytest.mark.parametrize("status", [400, 404, 405, 413, 415, 422])
    async def test_rejected_request_reports_the_reason(self, status: int) -> None:
        refusal = says({"error": {"code": "x", "message": "messages.0.role: not so"}}, status)
        scored, requests = await scored_by(refusal)
        assert scored.failure is not None and requests == 1
        assert scored.failure.failure_class == "refused"
        assert f"HTTP {status}: messages.0.role: not so" in scored.failure.message

    async def test_rejected_key_is_named_and_not_shown(self) -> None:
        scored, requests = await scored_by(says({"error": {"message": f"no such key: {KEY}"}}, 401))
        assert scored.failure is not None and requests == 1
        assert "REWARD_KIT_REWARD_API_KEY" in scored.failure.message and KEY not in repr(scored)

    async def test_redirect_is_not_followed(self) -> None:
        async with scripted([scores()]) as (elsewhere, theirs):
            scored, requests = await scored_by(says(b"", 307, Location=elsewhere))
        assert scored.failure is not None and (requests, theirs) == (1, [])
        assert "redirects (HTTP 307); use the address to which it redirects" in scored.failure.message


LIES: dict[str, Behavior] = {
    "of another rollout": scores(rollout_id="other"),
    "no rollout": scores(rollout_id=None),
    "another score than its result's": scores(score=0.75),
    "a score as text": scores(score="0.5"),
    "neither a score nor an error": scores(result=None, score=None),
    "a result that is none": scores(result={"score": 0.5, "metrics": {"m": {"score": "high", "reason": ""}}}),
    "an unknown key in its result": scores(result={"score": 0.5, "bonus": 1}),
    "an unknown class": scores(error={"class": "magic", "where": "x", "message": "x"}),
    "a negative duration": scores(duration_s=-1.0),
    "a list": says([]),
    "nothing": says(None),
    "an object of code": scores(rollout_id={"__type__": "array", "dtype": "O", "shape": [1], "value": "AAAA"}),
}


class TestInvalidAnswers:
    @pytest.mark.parametrize("lie", LIES)
    async def test_invalid_answer_is_never_a_score(self, lie: str) -> None:
        scored, _ = await scored_by(LIES[lie])
        assert scored.score is None and scored.result is None and scored.rollout_id == "r"
        assert scored.failure is not None and scored.failure.failure_class == "provider_error"

    @pytest.mark.parametrize("body", [b'{"score": NaN}', b'{"score": 1e999}', b"\xff", b"", b"[" * 100_000])
    async def test_answer_that_is_not_json_is_retried(self, body: bytes) -> None:
        scored, requests = await scored_by(says(body), attempts=2)
        assert scored.failure is not None and requests == 2
        assert "returned invalid JSON" in scored.failure.message

    @pytest.mark.parametrize("count", [0, 1, 3])
    async def test_group_answer_with_wrong_score_count_is_rejected(self, count: int) -> None:
        answer = says({"scores": [make_answer(SCORED, "typed")] * count})
        async with (
            scripted([answer]) as (url, _),
            RemoteReward(url, about(mode="batch"), api_key=KEY, request_options=request_options()) as reward,
        ):
            scored = await reward.score_group([ScoringRequest("r", []), ScoringRequest("r", [])])
        assert [one.score for one in scored] == [None, None]
        assert all(one.failure and "did not return 2 scores" in one.failure.message for one in scored)


class TestConnect:
    async def test_connect_rejects_servers_without_the_reward_protocol(self) -> None:
        for value, problem in (({}, "name: missing"), ({**about().model_dump(), "mode": "x"}, "mode: "), ([], "")):
            async with scripted([says(value)]) as (url, _):
                with pytest.raises(ProviderError, match=f"{url} is not a reward on a reward server: .*{problem}"):
                    await RemoteReward.connect(url, api_key=KEY, request_options=request_options())

    async def test_connect_reports_silent_server_and_unknown_reward(self) -> None:
        async with scripted([never_answers]) as (url, _):
            with pytest.raises(DeadlineError, match="did not respond within timeout_s"):
                await RemoteReward.connect(url, api_key=KEY, request_options=request_options(timeout_s=0.05))
        async with scripted([says({"error": {"message": "there is no reward 'x'"}}, 404)]) as (url, _):
            with pytest.raises(ConfigError, match="there is no reward 'x'"):
                await RemoteReward.connect(url, api_key=KEY, request_options=request_options())

    @pytest.mark.parametrize(
        "wrong", [{"timeout_s": 0.0}, {"connect_timeout_s": -1.0}, {"attempts": 0}, {"budget_s": float("inf")}]
    )
    def test_request_options_must_be_positive(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="above 0"):
            request_options(**wrong)


async def test_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await scored_by(hangs_up, says({"error": {"message": KEY}}, 503), says(KEY.encode()), says({"x": KEY}, 400))
    assert caplog.records and KEY not in caplog.text
