"""Test sessions of an agent with its own loop: limits, ends, failures and concurrency."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import BadRequestError

from reward_kit import RLRolloutWorker, ToolRegistry
from reward_kit.agent.policies import own_agent_policy as session
from reward_kit.agent.policies.own_agent_policy import AgentTask
from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import EpisodeError
from tests.agent.policies.own_agents import (
    SUM,
    ask,
    bare_loop,
    collect,
    loop,
    registry,
    served,
    shown,
    task_of,
    threaded_loop,
)
from tests.agent.resources import COUNTER, failure, reason
from tests.chat_server import Behavior, answer, slow, status, tool_calls


async def test_end_of_the_environment_ends_the_agent() -> None:
    heard: list[str] = []

    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        heard.append(await task.call_tool("win"))
        try:
            await asyncio.sleep(60)
        finally:
            heard.append((await ask(base_url, "And now?"))["error"]["message"])
            with pytest.raises(EpisodeError, match="the episode is over"):
                await task.call_tool("add")

    script = [tool_calls([("win", {}), ("add", {})])]
    episode, server = await collect(script, agent, tools=None, resource_type=COUNTER)
    assert shown(episode)[-2:] == [("tool", "won"), ("tool", "Not executed: the episode is over.")]
    assert (reason(episode), list(episode.get_rewards()), len(server.requests)) == ("environment_terminated", [5.0], 1)
    assert heard == ["won", "no running episode uses this URL"]


async def test_thread_of_a_finished_episode_gets_an_error() -> None:
    heard: list[BaseException] = []
    notified = threading.Event()

    def agent(task: AgentTask, base_url: str) -> None:
        try:
            threaded_loop(task, base_url)
        except BadRequestError as error:
            heard.append(error)
        try:
            task.call_tool("add", {"x": 1, "y": 1})
        except EpisodeError as error:
            heard.append(error)
        notified.set()

    await collect(lambda _: SUM, agent, max_episode_steps=1)
    assert await asyncio.to_thread(notified.wait, 5)
    assert ["the episode is over" in str(error) for error in heard] == [True, True]


@pytest.mark.parametrize("agent", [loop, threaded_loop])
async def test_step_limit_stops_the_agent(agent: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    episode, server = await collect(lambda _: SUM, agent, max_episode_steps=3)
    assert (reason(episode), len(episode), len(server.requests)) == ("max_steps", 3, 3)
    assert shown(episode)[-1] == ("tool", "3")
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_token_limit_stops_the_agent() -> None:
    episode, server = await collect(lambda _: SUM, loop, max_episode_steps=50, limits={"total_tokens": 40})
    assert (reason(episode), len(server.requests)) == ("token_limit", 3)


@pytest.mark.parametrize(
    ("limit", "expected"), [("wall_time_s", ("wall_time_limit", None)), ("policy_time_s", ("error", "timeout"))]
)
async def test_slow_agent_is_stopped_and_its_answer_is_kept(limit: str, expected: tuple[str, Any]) -> None:
    stopped = asyncio.Event()

    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    episode, _ = await collect([answer("thinking")], agent, limits={limit: 0.6})
    assert (reason(episode), (failure(episode) or {}).get("class")) == expected
    assert stopped.is_set() and shown(episode)[1:] == [("assistant", "thinking")]
    assert episode.custom_data["usage"]["completion_tokens"] == 7


async def test_agent_that_ignores_the_end_is_abandoned_with_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(session, "_END_SECONDS", 0.05)
    allowed, ended = asyncio.Event(), asyncio.Event()

    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        while not allowed.is_set():
            try:
                await allowed.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    episode, _ = await collect([answer("3")], agent, limits={"wall_time_s": 2.0})
    assert reason(episode) == "wall_time_limit"
    assert f"the agent of {episode.id_} is still running after the end of its episode" in caplog.messages
    allowed.set()
    await ended.wait()


async def test_interrupted_call_leaves_no_final_state() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await task.call_tool("slow")

    limits = {"wall_time_s": 0.5}
    episode, _ = await collect([answer("wait")], agent, tools=None, resource_type=COUNTER, limits=limits)
    assert reason(episode) == "wall_time_limit" and episode.custom_data["final_state"] is None


async def test_concurrent_call_finishes_before_the_worker_continues() -> None:
    naps = ToolRegistry("naps")

    @naps.tool
    async def nap() -> str:
        """Take a while."""
        await asyncio.sleep(0.1)
        return "rested"

    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        call = asyncio.create_task(task.call_tool("nap"))
        await ask(base_url, "Go on.")
        assert await call == "rested"

    episode, _ = await collect([answer("first"), answer("second")], agent, tools=naps)
    assert [[tool["name"] for tool in info.get("tools", ())] for info in episode.get_infos(slice(1, None))] == [
        ["nap"],
        [],
    ]


async def test_resource_failure_in_a_call_fails_the_episode() -> None:
    episode, _ = await collect([tool_calls([("crash", {})])], loop, tools=None, resource_type=COUNTER)
    assert (reason(episode), failure(episode)["where"]) == ("error", "EnvironmentFailure")
    assert "the world broke" in failure(episode)["message"] and len(episode) == 1


async def test_concurrent_requests_are_answered_in_turn() -> None:
    async def agent(task: AgentTask, base_url: str) -> str:
        answers = await asyncio.gather(*(ask(base_url, "Add.", tag=n) for n in range(5)))
        return " ".join(sorted(reply["choices"][0]["message"]["content"] for reply in answers))

    episode, server = await collect(lambda body: answer(f"a{body['tag']}"), agent)
    assert len(server.requests) == 5 and len({body["seed"] for body in server.bodies}) == 5
    assert shown(episode)[-1] == ("assistant", "a0 a1 a2 a3 a4") and reason(episode) == "terminate_action"


@pytest.mark.parametrize("is_async", [True, False])
async def test_exception_in_the_agent_fails_the_episode_with_its_traceback(is_async: bool) -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        raise ZeroDivisionError("in my agent")

    def threaded(task: AgentTask, base_url: str) -> None:
        asyncio.run(agent(task, base_url))

    episode, _ = await collect([answer("3")], agent if is_async else threaded)
    assert (reason(episode), failure(episode)["where"]) == ("error", "PolicyError")
    assert failure(episode)["message"] == "the agent's own code: ZeroDivisionError: in my agent"
    assert Path(__file__).name in failure(episode)["traceback"]
    assert shown(episode)[-1] == ("assistant", "3")


async def test_agent_must_return_text_or_none() -> None:
    async def agent(task: AgentTask, base_url: str) -> int:
        return 3

    episode, _ = await collect([], agent)
    assert "the agent must return a string or None, got an int" in failure(episode)["message"]


async def test_endpoint_failure_fails_the_episode() -> None:
    episode, _ = await collect([SUM, status(401, text="bad key")], loop)
    assert failure(episode)["class"] == "provider_error" and "bad key" in failure(episode)["message"]
    assert len(episode) == 1


async def test_cancelled_request_is_not_forwarded() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        first = asyncio.create_task(ask(base_url, "one"))
        await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(base_url, "two"), 0.05)
        await first
        await ask(base_url, "three")

    episode, server = await collect(lambda _: slow(0.2, answer("yes")), agent)
    assert [body["messages"][0]["content"] for body in server.bodies] == ["one", "three"]
    assert (reason(episode), len(episode)) == ("answered", 2)


async def test_answer_to_an_abandoned_request_is_recorded() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(base_url, "Add."), 0.05)
        await ask(base_url, "Add.")

    episode, _ = await collect([slow(0.2, answer("late")), answer("3")], agent)
    assert [text for role, text in shown(episode) if role == "assistant"] == ["late", "3"]
    assert episode.custom_data["usage"]["completion_tokens"] == 14


async def test_hundred_concurrent_episodes_leak_nothing() -> None:
    def script(body: dict[str, Any]) -> Behavior:
        return answer("3") if len(body["messages"]) > 4 else SUM

    before = asyncio.all_tasks()
    async with served(script, bare_loop) as (_, policy):
        worker = RLRolloutWorker(task_of(), policy, tools=registry)
        episodes = await asyncio.gather(*(worker.collect_episode(seed=seed) for seed in range(100)))
        url = policy._endpoint._url
        assert not policy._endpoint._episodes
    assert {(reason(episode), len(episode)) for episode in episodes} == {("answered", 3)}
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url)


async def test_record_does_not_depend_on_concurrency() -> None:
    def script(body: dict[str, Any]) -> Behavior:
        return answer(f"seed {body['seed']}") if len(body["messages"]) > 2 else SUM

    async def records(slots: int) -> list[str]:
        limiter = asyncio.Semaphore(slots)
        async with served(script, bare_loop) as (_, policy):
            worker = RLRolloutWorker(task_of(), policy, tools=registry)

            async def one(seed: int) -> str:
                async with limiter:
                    episode = await worker.collect_episode(seed=seed)
                del episode.custom_data["timing"]
                return json.dumps(episode_to_record(episode))

            return await asyncio.gather(*(one(seed) for seed in range(16)))

    assert await records(1) == await records(16)
