"""Test agents with their own loop: every model answer is recorded with its tool results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from reward_kit import RLRolloutWorker
from reward_kit.agent.models import episode_steps
from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.own_agent_policy import AgentTask
from reward_kit.agent.policy_interface import EpisodeContext
from reward_kit.errors import ConfigError, PolicyError
from tests.agent.policies.own_agents import (
    COUNT,
    SUM,
    ask,
    client_of,
    collect,
    loop,
    served,
    shown,
    streaming_loop,
    task_of,
    threaded_loop,
)
from tests.agent.resources import COUNTER, failure, reason
from tests.chat_server import Behavior, answer, tool_calls


@pytest.mark.parametrize("agent", [loop, streaming_loop, threaded_loop])
async def test_own_agent_episode_equals_a_plain_policy_episode(agent: Callable[..., Any]) -> None:
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


async def test_token_ids_and_logprobs_become_token_rows() -> None:
    def reply(prompt: list[int], sampled: list[int], behaviour: Callable[..., Behavior] = answer, **rest: Any):
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


async def test_policy_options_override_those_of_the_agent() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        form = {"type": "json_object"}
        await ask(base_url, "Add.", temperature=1.9, max_tokens=5, model="gpt", stop=["x"], response_format=form, n=1)

    _, server = await collect([answer()], agent, options={"temperature": 0.1, "max_tokens": 50})
    (body,) = server.bodies
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.1, 50, "m")
    assert (body["stop"], body["response_format"]) == (["x"], {"type": "json_object"}) and "n" not in body


async def test_tool_calls_of_the_agent_step_the_resource() -> None:
    episode, _ = await collect([COUNT, COUNT, answer("4")], loop, tools=None, resource_type=COUNTER)
    assert list(episode.get_rewards()) == [2.0, 2.0, 0.0]
    assert episode.get_infos(2)["state_key"] == "count 4"
    assert episode.custom_data["final_state"]["payload"] == b'{"total":4}'


async def test_invalid_calls_are_answered_and_counted() -> None:
    script = [tool_calls([("ad", {})]), tool_calls([("add", "{")]), answer("I give up")]
    episode, _ = await collect(script, loop)
    texts = [text for role, text in shown(episode) if role == "tool"]
    assert "did you mean 'add'" in texts[0] and "are not a JSON object: {" in texts[1]
    assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, False, True]


async def test_text_does_not_end_an_agent_that_continues() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        first = (await ask(base_url, "Add."))["choices"][0]["message"]
        messages = [*task.messages, first, {"role": "user", "content": "Sure?"}]
        async with client_of(base_url) as client:
            await client.chat.completions.create(model="m", messages=messages)

    episode, _ = await collect([answer("3"), answer("Yes")], agent, tools=None)
    assert shown(episode)[1:] == [("assistant", "3"), ("user", "Sure?"), ("assistant", "Yes")]
    assert reason(episode) == "answered"


async def test_record_begins_with_the_prompt_the_agent_sent() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, f"You are kind. {task.prompt}")

    episode, _ = await collect([answer("3")], agent)
    assert shown(episode) == [("user", "You are kind. Add."), ("assistant", "3")]


async def test_rewritten_context_is_recorded_with_the_conversation() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await ask(base_url, "In short: add.")

    episode, _ = await collect([answer("Why?"), answer("3")], agent)
    assert shown(episode) == [("user", "Add."), ("assistant", "Why?"), ("assistant", "3")]
    given = episode.get_extra_model_outputs("prompt_messages")
    assert given == [None, [{"role": "user", "content": "In short: add."}]]


@pytest.mark.parametrize(("returned", "steps"), [(None, 1), (" 3 ", 1), ("three", 2)])
async def test_returned_text_becomes_the_final_answer(returned: str | None, steps: int) -> None:
    async def agent(task: AgentTask, base_url: str) -> str | None:
        await ask(base_url, task.prompt)
        return returned

    episode, _ = await collect([answer("3")], agent)
    assert len(episode) == steps and shown(episode)[-1] == ("assistant", "three" if steps == 2 else "3")
    assert reason(episode) == ("answered" if steps == 1 else "terminate_action")


async def test_agent_without_model_requests_is_one_step() -> None:
    async def agent(task: AgentTask, base_url: str) -> str:
        return await task.call_tool("add", {"by": 3})

    episode, server = await collect([], agent, tools=None, resource_type=COUNTER)
    assert server.requests == [] and list(episode.get_rewards()) == [3.0]
    assert shown(episode)[-2:] == [("user", "the count is 3"), ("assistant", "the count is 3")]
    assert reason(episode) == "terminate_action"


async def test_agent_that_ignores_the_base_url_is_reported_once(caplog) -> None:
    seeds: list[int] = []

    async def agent(task: AgentTask, base_url: str) -> str:
        seeds.append(task.seed)
        if len(seeds) == 2:
            await ask(base_url, task.prompt)
        return "elsewhere"

    async with served([answer("3")], agent) as (_, policy):
        worker = RLRolloutWorker(task_of(), policy)
        for seed in range(3):
            await worker.collect_episode(seed=seed)
    assert len(seeds) == 3
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "sent no model request to base_url" in warning and "its tokens and cost are unknown" in warning


async def test_agent_with_requests_is_not_reported(caplog) -> None:
    await collect([SUM, answer("3")], loop)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


async def test_cost_of_an_agent_that_ignores_the_base_url_is_unknown_under_a_limit(tmp_path) -> None:
    (tmp_path / "prices.yaml").write_text("m: {input: 1.0, output: 1.0}\n")

    async def agent(task: AgentTask, base_url: str) -> str:
        return "elsewhere"

    options = {"price_file": tmp_path / "prices.yaml"}
    episode, _ = await collect([], agent, options=options, limits={"cost": 1.0})
    assert "did not report the cost of this action" in failure(episode)["message"]


async def test_results_are_recorded_if_the_agent_ends_after_its_calls() -> None:
    async def agent(task: AgentTask, base_url: str) -> None:
        await ask(base_url, "Add.")
        await task.call_tool("add", {"x": 1, "y": 2})
        await task.call_tool("add", {"x": 2, "y": 2})

    episode, _ = await collect([SUM], agent)
    assert shown(episode)[2:] == [("tool", "3"), ("user", "4")]
    assert episode.messages[2].tool_call_id == "call_add_0" and reason(episode) == "answered"


async def test_returned_text_costs_nothing_under_a_cost_limit(tmp_path) -> None:
    (tmp_path / "prices.yaml").write_text("m: {input: 1.0, output: 1.0}\n")

    async def agent(task: AgentTask, base_url: str) -> str:
        await ask(base_url, task.prompt)
        return "three"

    options = {"price_file": tmp_path / "prices.yaml"}
    episode, _ = await collect([answer("3")], agent, options=options, limits={"cost": 1.0})
    assert (failure(episode), reason(episode)) == (None, "terminate_action")
    assert episode.custom_data["usage"]["cost"] == pytest.approx(18e-6)


async def test_steps_include_the_usage_of_the_model() -> None:
    episode, _ = await collect([SUM, answer("3")], loop)
    first, last = episode_steps(episode)
    assert first.action_taken["name"] == "add" and first.policy_logprobs["usage"]["prompt_tokens"] == 11
    assert last.is_done and [said.role for said in first.resulting_messages_history] == ["user", "assistant", "tool"]


def test_task_file_names_the_agent_by_path(tmp_path) -> None:
    (tmp_path / "mine.py").write_text("async def agent(task, base_url): ...\ndef short(task): ...\nnumber = 3\n")
    options = {"agent": "mine.py:agent", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
    assert repr(make_policy("own_agent", options, tmp_path)).startswith("OwnAgentPolicy('agent'")
    for wrong, words in (
        ({"agent": "mine.py:agnet"}, "did you mean 'agent'"),
        ({"agent": "mine.py:short"}, "agent: short cannot be called with the task and the base URL"),
        ({"agent": "mine.py:number"}, "agent must be a function"),
        ({"agent": 3}, "agent must be a function"),
        ({"temprature": 1}, "policy.temprature: unknown key for policy 'own_agent'; did you mean 'temperature'"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_policy("own_agent", {**options, **wrong}, tmp_path)
    with pytest.raises(ConfigError, match=r"needs policy\.agent, policy\.model"):
        make_policy("own_agent", {}, tmp_path)


async def test_get_action_outside_an_episode_is_rejected() -> None:
    async with served([], loop) as (_, policy):
        with pytest.raises(PolicyError, match="open a session"):
            await policy.get_action([])
        session = await policy.open(EpisodeContext("r", 0))
        await session.close()


async def test_agent_receives_the_fields_of_its_episode() -> None:
    told: list[AgentTask] = []

    async def agent(task: AgentTask, base_url: str) -> None:
        told.append(task)
        await ask(base_url, task.prompt)

    episode, _ = await collect([answer("3")], agent)
    (task,) = told
    assert (task.messages, task.prompt, task.model) == ([{"role": "user", "content": "Add."}], "Add.", "m")
    assert [tool["function"]["name"] for tool in task.tools] == ["add"]
    assert (task.rollout_id, task.sample_id, task.seed) == (episode.id_, "t", episode.custom_data["seeds"]["policy"])


def test_model_may_name_its_provider(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    (tmp_path / "clerk.py").write_text("def agent(task, base_url):\n    return None\n", encoding="utf-8")
    options = {"agent": "clerk.py:agent", "model": "anthropic/some-model"}
    policy = make_policy("own_agent", options, tmp_path, of_user=frozenset(options))
    assert "some-model" in repr(policy) and "anthropic/" not in repr(policy)
    assert "https://api.anthropic.com" in repr(policy)
    elsewhere = make_policy("own_agent", {**options, "base_url": "http://127.0.0.1:1/v1"}, tmp_path)
    assert "anthropic/some-model" in repr(elsewhere)
