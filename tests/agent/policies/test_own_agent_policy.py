"""Agents that bring their own loop: every answer of the model is recorded, and what they did with it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from reward_kit import RLRolloutWorker, TaskDefinitionModel, ToolRegistry
from reward_kit.agent.models import steps_of
from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.own_agent_policy import AgentTask, OwnAgentPolicy
from reward_kit.agent.policy_interface import EpisodeContext
from reward_kit.episodes.record import episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, PolicyError
from tests.agent.worlds import WORLD, failure, reason
from tests.chat_server import Behaviour, ChatServer, Script, answer, slow, status, tool_calls

registry = ToolRegistry("adder")


@registry.tool
async def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


SUM = tool_calls([("add", {"x": 1, "y": 2})])
COUNT = tool_calls([("add", {"by": 2})])


def task_of(**fields: Any) -> TaskDefinitionModel:
    return TaskDefinitionModel.model_validate({"name": "t", "initial_user_prompt": "Add.", **fields})


@asynccontextmanager
async def served(script: Script, agent: Callable[..., Any], **options: Any):
    async with ChatServer(script) as server:
        policy = OwnAgentPolicy(agent, "m", base_url=server.base_url, api_key="secret", retry_base_s=0.001, **options)
        try:
            yield server, policy
        finally:
            await policy.close()


async def collect(
    script: Script, agent: Callable[..., Any], *, tools: ToolRegistry | None = registry, **fields: Any
) -> tuple[SingleAgentEpisode, ChatServer]:
    options = fields.pop("options", {})
    async with served(script, agent, **options) as (server, policy):
        return await RLRolloutWorker(task_of(**fields), policy, tools=tools).collect_episode(seed=3), server


def shown(episode: SingleAgentEpisode) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in episode.messages]


def client_of(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="the agent's own", max_retries=0)


async def loop(task: AgentTask, base_url: str) -> None:
    """The loop that every framework has: ask, call, ask again."""
    messages = list(task.messages)
    async with client_of(base_url) as client:
        while True:
            reply = await client.chat.completions.create(model=task.model, messages=messages, tools=task.tools)
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                text = await task.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def streaming_loop(task: AgentTask, base_url: str) -> None:
    """The same, with streams."""
    messages = list(task.messages)
    async with client_of(base_url) as client:
        while True:
            async with client.chat.completions.stream(
                model="any", messages=messages, tools=task.tools, stream_options={"include_usage": True}
            ) as stream:
                final = await stream.get_final_completion()
            assert final.usage is not None and final.usage.total_tokens == 18
            said = final.choices[0].message
            messages.append(
                said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
                | ({"tool_calls": [plain(call) for call in said.tool_calls]} if said.tool_calls else {})
            )
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                text = await task.call_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def plain(call: Any) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }


def threaded_loop(task: AgentTask, base_url: str) -> str:
    """The same, in a plain function with a blocking client."""
    messages = list(task.messages)
    with OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        while True:
            reply = client.chat.completions.create(model="any", messages=messages, tools=task.tools)
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content or ""
            for call in said.tool_calls:
                text = task.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def bare_loop(task: AgentTask, base_url: str) -> None:
    """The same over bare HTTP, which takes a hundredth of the time."""
    messages = list(task.messages)
    async with aiohttp.ClientSession() as http:
        while True:
            body = {"messages": messages, "tools": task.tools}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                said = (await response.json())["choices"][0]["message"]
            messages.append(said)
            if not said.get("tool_calls"):
                return
            for call in said["tool_calls"]:
                text = await task.call_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def ask(base_url: str, *texts: str, **body: Any) -> dict[str, Any]:
    """One request over bare HTTP."""
    messages = [{"role": "user", "content": text} for text in texts]
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{base_url}/chat/completions", json={"messages": messages, **body}) as response,
    ):
        return await response.json()


@pytest.mark.parametrize("agent", [loop, streaming_loop, threaded_loop])
async def test_an_agent_and_its_calls_make_the_episode_a_plain_policy_would_make(agent: Callable[..., Any]) -> None:
    script = [SUM, tool_calls([("add", {"x": 3, "y": 4}), ("add", {"x": 5, "y": 6})], "Two more."), answer("18")]
    episode, server = await collect(script, agent)
    assert shown(episode) == [
        ("user", "Add."),
        ("assistant", ""),
        ("tool", "3"),
        ("assistant", "Two more."),
        ("tool", "7"),
        ("tool", "11"),
        ("assistant", "18"),
    ]
    assert [message.tool_call_id for message in episode.messages[4:6]] == ["call_add_0", "call_add_1"]
    assert (reason(episode), failure(episode), len(episode)) == ("answered", None, 3)
    assert [len(info.get("tools", ())) for info in episode.get_infos(slice(1, None))] == [1, 2, 0]
    assert episode.custom_data["usage"] == {"prompt_tokens": 33, "completion_tokens": 21}
    assert not {"results", "prompt_messages", "is_final"} & set().union(*episode.get_actions())
    assert "prompt_messages" not in episode.extra_model_outputs
    for step, body in enumerate(server.bodies):
        assert body["model"] == "m" and "stream" not in body
        assert body["seed"] == (episode.custom_data["seeds"]["policy"] + step) % 2**31
        assert body["tools"][0]["function"]["name"] == "add"
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer secret"}


async def test_token_ids_and_logprobs_of_the_real_model_become_token_rows() -> None:
    def reply(prompt: list[int], sampled: list[int], behaviour: Callable[..., Behaviour] = answer, **rest: Any):
        entries = [{"token": f"t{t}", "logprob": -0.5, "top_logprobs": []} for t in sampled]
        choice = {"token_ids": sampled, "logprobs": {"content": entries}}
        return behaviour(choice=choice, top={"prompt_token_ids": prompt}, **rest)

    script = [
        reply([1, 2, 3], [10, 11], tool_calls, calls=[("add", {"x": 1, "y": 2})]),
        reply([1, 2, 3, 10, 11, 4, 5], [12], text="3"),
    ]
    options = {"logprobs": True, "temperature": 0.5, "extra_body": {"return_token_ids": True}}
    episode, server = await collect(script, loop, options=options)
    (row,) = episode.tokens.rows()
    assert (row.prompt_ids.tolist(), row.completion_ids.tolist()) == ([1, 2, 3], [10, 11, 4, 5, 12])
    assert (row.action_mask.tolist(), row.logprobs.tolist()) == ([1, 1, 0, 0, 1], [-0.5, -0.5, 0.0, 0.0, -0.5])
    assert all(body["return_token_ids"] and body["logprobs"] and body["temperature"] == 0.5 for body in server.bodies)


async def test_the_policys_options_go_before_the_agents_and_the_rest_passes_through() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        form = {"type": "json_object"}
        await ask(base_url, "Add.", temperature=1.9, max_tokens=5, model="gpt", stop=["x"], response_format=form, n=1)

    _, server = await collect([answer()], agent, options={"temperature": 0.1, "max_tokens": 50})
    (body,) = server.bodies
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.1, 50, "m")
    assert (body["stop"], body["response_format"]) == (["x"], {"type": "json_object"}) and "n" not in body


async def test_the_world_counts_what_the_agent_calls() -> None:
    episode, _ = await collect([COUNT, COUNT, answer("4")], loop, tools=None, resource_type=WORLD)
    assert list(episode.get_rewards()) == [2.0, 2.0, 0.0]
    assert episode.get_infos(2)["state_key"] == "count 4"
    assert episode.custom_data["final_state"]["payload"] == b'{"total":4}'


async def test_the_world_ends_the_episode_and_the_agent_with_it() -> None:
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
    episode, server = await collect(script, agent, tools=None, resource_type=WORLD)
    assert shown(episode)[-2:] == [("tool", "won"), ("tool", "Not carried out: the episode is over.")]
    assert (reason(episode), list(episode.get_rewards()), len(server.requests)) == ("environment_terminated", [5.0], 1)
    assert heard == ["won", "no episode has this address; it may be over"]


async def test_a_thread_whose_episode_is_over_is_told_so() -> None:
    heard: list[BaseException] = []
    told = threading.Event()

    def agent(task: AgentTask, base_url: str) -> None:
        try:
            threaded_loop(task, base_url)
        except BadRequestError as error:
            heard.append(error)
        try:
            task.call_tool("add", {"x": 1, "y": 1})
        except EpisodeError as error:
            heard.append(error)
        told.set()

    await collect(lambda _: SUM, agent, max_episode_steps=1)
    assert await asyncio.to_thread(told.wait, 5)
    assert ["the episode is over" in str(error) for error in heard] == [True, True]


@pytest.mark.parametrize("agent", [loop, threaded_loop])
async def test_the_step_limit_stops_the_agent(agent: Callable[..., Any]) -> None:
    episode, server = await collect(lambda _: SUM, agent, max_episode_steps=3)
    assert (reason(episode), len(episode), len(server.requests)) == ("max_steps", 3, 3)
    assert shown(episode)[-1] == ("tool", "3")


async def test_the_token_limit_stops_the_agent() -> None:
    episode, server = await collect(lambda _: SUM, loop, max_episode_steps=50, limits={"total_tokens": 40})
    assert (reason(episode), len(server.requests)) == ("token_limit", 3)


@pytest.mark.parametrize(
    ("limit", "expected"), [("wall_time_s", ("wall_time_limit", None)), ("policy_time_s", ("error", "timeout"))]
)
async def test_an_agent_that_dawdles_is_stopped_and_its_answer_is_kept(limit: str, expected: tuple[str, Any]) -> None:
    stopped = asyncio.Event()

    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    episode, _ = await collect([answer("thinking")], agent, limits={limit: 0.4})
    assert (reason(episode), (failure(episode) or {}).get("class")) == expected
    assert stopped.is_set() and shown(episode)[1:] == [("assistant", "thinking")]
    assert episode.custom_data["usage"]["completion_tokens"] == 7


async def test_a_call_that_is_cut_off_leaves_no_final_state() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await task.call_tool("slow")

    limits = {"wall_time_s": 0.4}
    episode, _ = await collect([answer("wait")], agent, tools=None, resource_type=WORLD, limits=limits)
    assert reason(episode) == "wall_time_limit" and episode.custom_data["final_state"] is None


async def test_a_world_that_breaks_in_a_call_is_the_episodes_failure() -> None:
    episode, _ = await collect([tool_calls([("crash", {})])], loop, tools=None, resource_type=WORLD)
    assert (reason(episode), failure(episode)["where"]) == ("error", "EnvironmentFailure")
    assert "the world broke" in failure(episode)["message"] and len(episode) == 1


async def test_wrong_calls_answer_the_agent_and_are_counted() -> None:
    script = [tool_calls([("ad", {})]), tool_calls([("add", "{")]), answer("I give up")]
    episode, _ = await collect(script, loop)
    texts = [text for role, text in shown(episode) if role == "tool"]
    assert "did you mean 'add'" in texts[0] and "are not a JSON object: {" in texts[1]
    assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, False, True]


async def test_a_text_does_not_end_an_agent_that_goes_on() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        first = (await ask(base_url, "Add."))["choices"][0]["message"]
        messages = [*task.messages, first, {"role": "user", "content": "Sure?"}]
        async with client_of(base_url) as client:
            await client.chat.completions.create(model="m", messages=messages)

    episode, _ = await collect([answer("3"), answer("Yes")], agent, tools=None)
    assert shown(episode)[1:] == [("assistant", "3"), ("user", "Sure?"), ("assistant", "Yes")]
    assert reason(episode) == "answered"


async def test_what_the_agent_makes_of_the_prompt_is_how_the_record_begins() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, f"You are kind. {task.prompt}")

    episode, _ = await collect([answer("3")], agent)
    assert shown(episode) == [("user", "You are kind. Add."), ("assistant", "3")]


async def test_a_rewritten_context_is_kept_beside_the_conversation() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await ask(base_url, "In short: add.")

    episode, _ = await collect([answer("Why?"), answer("3")], agent)
    assert shown(episode) == [("user", "Add."), ("assistant", "Why?"), ("assistant", "3")]
    given = episode.get_extra_model_outputs("prompt_messages")
    assert given == [None, [{"role": "user", "content": "In short: add."}]]


async def test_requests_at_the_same_time_are_answered_one_after_another() -> None:
    async def agent(task: AgentTask, base_url: str) -> str:
        answers = await asyncio.gather(*(ask(base_url, "Add.", tag=n) for n in range(5)))
        return " ".join(sorted(reply["choices"][0]["message"]["content"] for reply in answers))

    episode, server = await collect(lambda body: answer(f"a{body['tag']}"), agent)
    assert len(server.requests) == 5 and len({body["seed"] for body in server.bodies}) == 5
    assert shown(episode)[-1] == ("assistant", "a0 a1 a2 a3 a4") and reason(episode) == "terminate_action"


@pytest.mark.parametrize(("returned", "steps"), [(None, 1), (" 3 ", 1), ("three", 2)])
async def test_the_text_that_an_agent_returns_is_its_last_word(returned: str | None, steps: int) -> None:
    async def agent(task: AgentTask, base_url: str) -> str | None:
        await ask(base_url, task.prompt)
        return returned

    episode, _ = await collect([answer("3")], agent)
    assert len(episode) == steps and shown(episode)[-1] == ("assistant", "three" if steps == 2 else "3")
    assert reason(episode) == ("answered" if steps == 1 else "terminate_action")


async def test_an_agent_that_never_asks_the_model_is_one_step() -> None:
    async def agent(task: AgentTask, base_url: str) -> str:
        return await task.call_tool("add", {"by": 3})

    episode, server = await collect([], agent, tools=None, resource_type=WORLD)
    assert server.requests == [] and list(episode.get_rewards()) == [3.0]
    assert shown(episode)[2:] == [("assistant", "the count is 3"), ("user", "the count is 3")]
    assert reason(episode) == "terminate_action"


async def test_results_are_known_also_where_the_agent_ends_without_telling_the_model() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await task.call_tool("add", {"x": 1, "y": 2})
        await task.call_tool("add", {"x": 2, "y": 2})

    episode, _ = await collect([SUM], agent)
    assert shown(episode)[2:] == [("tool", "3"), ("user", "4")]
    assert episode.messages[2].tool_call_id == "call_add_0" and reason(episode) == "answered"


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_agent_that_raises_fails_its_episode_with_its_own_frames(is_async: bool) -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        raise ZeroDivisionError("in my agent")

    def threaded(task: AgentTask, base_url: str) -> None:
        asyncio.run(agent(task, base_url))

    episode, _ = await collect([answer("3")], agent if is_async else threaded)
    assert (reason(episode), failure(episode)["where"]) == ("error", "PolicyError")
    assert "ZeroDivisionError: in my agent" in failure(episode)["message"]
    assert "test_own_agent_policy.py" in failure(episode)["traceback"]
    assert shown(episode)[-1] == ("assistant", "3")


async def test_an_agent_returns_text_or_nothing() -> None:
    async def agent(task: AgentTask, base_url: str) -> int:
        return 3

    episode, _ = await collect([], agent)
    assert "the agent returned a int" in failure(episode)["message"]


async def test_a_failure_of_the_real_endpoint_is_the_episodes_failure() -> None:
    episode, _ = await collect([SUM, status(401, text="bad key")], loop)
    assert failure(episode)["class"] == "provider_error" and "bad key" in failure(episode)["message"]
    assert len(episode) == 1


async def test_a_request_that_the_agent_takes_back_is_not_sent_on() -> None:
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


async def test_an_answer_that_the_agent_did_not_wait_for_is_recorded_all_the_same() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(base_url, "Add."), 0.05)
        await ask(base_url, "Add.")

    episode, _ = await collect([slow(0.2, answer("late")), answer("3")], agent)
    assert [text for role, text in shown(episode) if role == "assistant"] == ["late", "3"]
    assert episode.custom_data["usage"]["completion_tokens"] == 14


async def test_a_closing_text_costs_nothing_under_a_limit_on_cost(tmp_path) -> None:
    (tmp_path / "prices.yaml").write_text("m: {input: 1.0, output: 1.0}\n")

    async def agent(task: AgentTask, base_url: str) -> str:
        await ask(base_url, task.prompt)
        return "three"

    options = {"price_file": tmp_path / "prices.yaml"}
    episode, _ = await collect([answer("3")], agent, options=options, limits={"cost": 1.0})
    assert (failure(episode), reason(episode)) == (None, "terminate_action")
    assert episode.custom_data["usage"]["cost"] == pytest.approx(18e-6)


async def test_a_hundred_episodes_at_once_leave_nothing_behind() -> None:
    def script(body: dict[str, Any]) -> Behaviour:
        return answer("3") if len(body["messages"]) > 4 else SUM

    before = asyncio.all_tasks()
    async with served(script, bare_loop) as (_, policy):
        worker = RLRolloutWorker(task_of(), policy, tools=registry)
        episodes = await asyncio.gather(*(worker.collect_episode(seed=seed) for seed in range(100)))
        url = policy._endpoint._url
        assert not policy._endpoint._answerers
    assert {(reason(episode), len(episode)) for episode in episodes} == {("answered", 3)}
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(url)


async def test_the_record_does_not_depend_on_how_many_run_at_once() -> None:
    def script(body: dict[str, Any]) -> Behaviour:
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


async def test_steps_are_views_with_the_usage_of_the_model() -> None:
    episode, _ = await collect([SUM, answer("3")], loop)
    first, last = steps_of(episode)
    assert first.action_taken["name"] == "add" and first.policy_logprobs["usage"]["prompt_tokens"] == 11
    assert last.is_done and [said.role for said in first.resulting_messages_history] == ["user", "assistant", "tool"]


def test_a_task_file_names_the_agent_beside_it(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("async def agent(task, base_url): ...\ndef short(task): ...\nnumber = 3\n")
    options = {"agent": "mine.py:agent", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
    assert repr(make_policy("own_agent", options, tmp_path)).startswith("OwnAgentPolicy('agent'")
    for wrong, words in (
        ({"agent": "mine.py:agnet"}, "did you mean 'agent'"),
        ({"agent": "mine.py:short"}, "cannot be called with the task and the base URL"),
        ({"agent": "mine.py:number"}, "agent: expected a function"),
        ({"agent": 3}, "agent: expected a function"),
        ({"temprature": 1}, "policy.temprature: unknown key for policy 'own_agent'; did you mean 'temperature'"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_policy("own_agent", {**options, **wrong}, tmp_path)
    with pytest.raises(ConfigError, match=r"needs policy\.agent, policy\.model"):
        make_policy("own_agent", {}, tmp_path)


async def test_there_is_no_action_outside_of_an_episode() -> None:
    async with served([], loop) as (_, policy):
        with pytest.raises(PolicyError, match="open a session"):
            await policy.get_action([])
        session = await policy.open(EpisodeContext("r", 0))
        await session.close()
