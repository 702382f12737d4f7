"""Test the choice of a task's tools and of its first observation."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from reward_kit.agent.policies.simple_policies import ExpertPolicy, RandomPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.environments.base import ForkableResource, StepOutcome, tool_spec
from reward_kit.environments.sqlite import SqliteResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, PolicyError
from tests.agent.resources import (
    COUNTER,
    Counter,
    call,
    collected,
    failure,
    reason,
    task_of,
    text,
    tool_answers,
    worker_of,
)

SQLITE = {"resource_type": "sqlite", "base_resource_config": {"seed_sql": "CREATE TABLE orders (id TEXT)"}}
desk = ToolRegistry("desk")


@desk.tool
async def lookup_order(number: str, db: SqliteResource) -> str:
    """Look up an order."""
    found = await db.step("execute_sql", {"query": f"SELECT id FROM orders WHERE id = '{number}'"})
    return f"{len(found.observation['rows'])} orders"


@desk.tool
def refund_order(number: str) -> str:
    """Refund an order."""
    return f"{number} is refunded"


@desk.tool
def close_ticket() -> str:
    """Close the ticket."""
    return "closed"


class RecordingPolicy(AgentPolicy):
    """A policy that records its input and plays a list of actions."""

    def __init__(self, *actions: dict[str, Any]) -> None:
        self.actions, self.seen = list(actions) or [text("ok")], []

    async def get_action(self, observation, available_tools_specs=None):
        self.seen.append((list(observation), available_tools_specs))
        return PolicyOutput(self.actions[min(len(self.seen), len(self.actions)) - 1])

    @property
    def tools(self) -> list[str]:
        return [spec["function"]["name"] for spec in self.seen[0][1] or []]

    @property
    def prompt(self) -> list[str]:
        return [message.text for message in self.seen[0][0]]


async def seen_in(*actions: dict[str, Any], registry: ToolRegistry | None = None, **task: Any) -> RecordingPolicy:
    """Run one episode and compare the policy's first request with `first_request`."""
    policy = RecordingPolicy(*actions)
    task.setdefault("on_text", "end")
    worker = RLRolloutWorker(task_of(**task), policy, tools=registry)
    request = await worker.first_request()
    episode = await worker.collect_episode()
    assert failure(episode) is None, failure(episode)
    policy.episode = episode
    messages, specs = policy.seen[0]
    assert [message.to_chat() for message in request.messages] == [message.to_chat() for message in messages]
    assert request.tools == (specs or [])
    return policy


class TestTools:
    async def test_own_tools_replace_those_of_the_resource(self):
        policy = await seen_in(registry=desk, **SQLITE)
        assert policy.tools == ["lookup_order", "refund_order", "close_ticket"]

    async def test_hidden_tool_is_an_unknown_tool(self):
        query = {"query": "DROP TABLE orders"}
        actions = call("execute_sql", **query), call("lookup_order", number="7"), text("ok")
        policy = await seen_in(*actions, registry=desk, **SQLITE)
        refused, answer = tool_answers(policy.episode)
        assert refused.startswith("Error: unknown tool 'execute_sql'") and "list_tables" not in refused
        assert answer == "0 orders"

    async def test_named_tools_of_both_origins_are_offered(self):
        names = ["refund_order", "execute_sql"]
        actions = call("close_ticket"), call("list_tables"), call("execute_sql", query="SELECT 1"), text("ok")
        policy = await seen_in(*actions, registry=desk, tools=names, **SQLITE)
        assert sorted(policy.tools) == sorted(names)
        *refused, answer = tool_answers(policy.episode)
        assert [re.match(r"Error: unknown tool '\w+'", one)[0] for one in refused] == [
            "Error: unknown tool 'close_ticket'",
            "Error: unknown tool 'list_tables'",
        ]
        assert not answer.startswith("Error")

    async def test_tools_of_a_resource_can_be_selected(self):
        policy = await seen_in(tools=["list_tables"], **SQLITE)
        assert policy.tools == ["list_tables"]

    async def test_all_tools_of_a_resource_are_offered_without_own_tools(self):
        assert (await seen_in(**SQLITE)).tools == ["execute_sql", "list_tables", "describe_table"]
        empty = ToolRegistry("empty")
        assert len((await seen_in(registry=empty, **SQLITE)).tools) == 3

    async def test_terminate_tool_is_always_offered(self):
        for names in (None, ["refund_order"], ["refund_order", "bye"]):
            policy = await seen_in(call("bye"), registry=desk, tools=names, terminate_tool="bye", **SQLITE)
            assert policy.tools[-1] == "bye" and reason(policy.episode) == "terminate_action"

    async def test_empty_list_offers_no_tools_and_a_text_ends_the_episode(self):
        policy = await seen_in(text("ok"), tools=[], on_text=None, registry=desk, **SQLITE)
        assert policy.tools == [] and reason(policy.episode) == "answered"

    async def test_two_tools_of_one_name_conflict_only_if_both_are_offered(self):
        registry = ToolRegistry("own")
        registry.tool(name="add")(lambda: "mine")
        episode = await collected([call("add"), text("ok")], tools=registry, resource_type=COUNTER, on_text="end")
        assert tool_answers(episode) == ["mine"]
        episode = await collected([call("add")], tools=registry, resource_type=COUNTER, offered=["add"])
        assert failure(episode)["message"] == "two tools are named add; rename one of them"

    async def test_unknown_name_is_logged_once_per_worker(self, caplog):
        worker = worker_of([text("ok")], offered=["wim"], resource_type=COUNTER, on_text="end")
        for _ in range(2):
            await worker.collect_episode()
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "tools: unknown tool 'wim'; did you mean 'win'?" in record.getMessage()

    async def test_tool_that_appears_later_can_be_selected(self):
        actions = call("open"), call("enter"), call("leave"), text("ok")
        policy = await seen_in(*actions, tools=["open", "enter"], resource_type=f"{__name__}:Door")
        assert [[spec["function"]["name"] for spec in specs] for _, specs in policy.seen[:2]] == [
            ["open"],
            ["open", "enter"],
        ]
        assert tool_answers(policy.episode)[1] == "enter" and "unknown tool" in tool_answers(policy.episode)[2]

    async def test_own_agent_cannot_call_a_hidden_tool(self):
        class Calls(RecordingPolicy):
            async def open(self, context):
                self.call_tool = context.call_tool
                return self

            async def get_action(self, observation, available_tools_specs=None):
                answer = await self.call_tool("execute_sql", {"query": "SELECT 1"})
                return PolicyOutput(text(answer.text))

        episode = await RLRolloutWorker(task_of(on_text="end", **SQLITE), Calls(), tools=desk).collect_episode()
        assert episode.messages[-1].text.startswith("Error: unknown tool 'execute_sql'")

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ("tools.py", "expected a list of names; to name the file with the task's own tools, use tools_module_path"),
            (["a", "b", "a"], "'a' is listed twice"),
            ([3], "tools.0"),
        ],
    )
    def test_invalid_list_is_rejected(self, names, message):
        with pytest.raises(ValidationError, match=message):
            task_of(tools=names)


class Door(ForkableResource):
    """A door with tools that appear once it is open."""

    is_open = False

    async def reset(self, seed=None):
        self.is_open = False

    async def state_key(self):
        return str(self.is_open)

    async def get_tools_spec(self):
        return [tool_spec(name, name) for name in (("open", "enter", "leave") if self.is_open else ("open",))]

    async def step(self, action_name, action_params):
        self.is_open = True
        return StepOutcome(action_name)


class TestBaselines:
    async def test_random_policy_takes_only_offered_actions(self):
        class Listing(Counter):
            async def admissible_actions(self):
                return [{"name": "add", "arguments": {"by": 1}}, {"name": "win", "arguments": {}}]

        resource = Listing()
        worker = worker_of(RandomPolicy(), environment=resource, offered=["add", "long"], max_episode_steps=30)
        names = {step["name"] for step in (await worker.collect_episode()).get_actions()}
        assert names == {"add"}
        worker = worker_of(RandomPolicy(), environment=resource, offered=["long"], max_episode_steps=3)
        assert {step["name"] for step in (await worker.collect_episode()).get_actions()} == {"long"}
        worker = worker_of(RandomPolicy(), environment=resource, offered=[], on_text="end")
        assert (await worker.collect_episode()).get_actions()[0]["type"] == "text"
        await resource.close()

    async def test_expert_that_calls_a_hidden_tool_is_an_error(self):
        worker = worker_of(ExpertPolicy(), resource_type=COUNTER, offered=["win"])
        with pytest.raises(PolicyError, match=r"the expert of Counter calls 'add', .*: add it to the task's tools"):
            await worker.run_episode()


class TestObservation:
    async def test_observation_can_be_hidden(self):
        prompt = {"initial_user_prompt": "Help."}
        assert (await seen_in(registry=desk, **prompt, **SQLITE)).prompt[0] == "Help."
        assert "CREATE TABLE orders" in (await seen_in(registry=desk, **prompt, **SQLITE)).prompt[1]
        policy = await seen_in(registry=desk, observation=False, **prompt, **SQLITE)
        assert policy.prompt == ["Help."]
        assert policy.episode.get_observations(0) == "Help."

    async def test_hidden_observation_cannot_be_used_by_a_template(self):
        task = {"observation": False, "initial_user_prompt": "See {{ observation }}"}
        worker = worker_of([text("ok")], resource_type=COUNTER, **task)
        with pytest.raises(ConfigError, match="'observation' is undefined, because the task sets observation: false"):
            await worker.first_request()


class TestFirstRequest:
    async def test_environment_is_left_as_it_was(self):
        resource = Door()
        worker = RLRolloutWorker(task_of(on_text="end"), RecordingPolicy(), environment=resource)
        await worker.first_request()
        resource.is_open = True  # a later reset would close it
        assert len((await worker.first_request()).tools) == 3
        await worker.collect_episode()
        assert worker.agent_policy.tools == ["open", "enter", "leave"]

    async def test_resource_is_closed(self):
        before = len(Counter.open_instances)
        await worker_of([], resource_type=COUNTER).first_request()
        assert len(Counter.open_instances) == before

    async def test_user_is_not_asked(self):
        user = ScriptedUser(lambda conversation, row: pytest.fail("the user was asked"))
        request = await RLRolloutWorker(task_of(), RecordingPolicy(), user=user).first_request()
        assert (request.messages, request.tools, request.user_opens) == ([], [], True)
        request = await RLRolloutWorker(task_of(initial_user_prompt="Hi"), RecordingPolicy(), user=user).first_request()
        assert not request.user_opens
