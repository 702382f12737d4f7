"""Test tool calls: parallel, malformed, failing and slow ones."""

import asyncio

import pytest

from reward_kit.environments.base import ForkableResource
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.environments.tools import ToolRegistry, tool
from reward_kit.errors import EnvironmentFailure, ProviderError, ToolError
from tests.agent.resources import (
    COUNTER,
    Counter,
    call,
    calls,
    collected,
    failure,
    reason,
    text,
    tool_answers,
    worker_of,
)


class MethodShop(ForkableResource):
    async def reset(self, seed=None):
        pass

    async def state_key(self):
        return "open"

    @tool
    def buy(self, item: str) -> str:
        """Buy an item."""
        return sell(item)


class RegistryShop(PythonStateResource):
    registry = ToolRegistry("shop")


@RegistryShop.registry.tool
def buy(item: str) -> str:
    """Buy an item."""
    return sell(item)


def sell(item: str) -> str:
    if item == "wine":
        raise ToolError("no wine here")
    return str(1 / 0)


class TestToolCalls:
    async def test_parallel_calls_are_one_step_with_one_assistant_message(self):
        episode = await collected(
            [calls(("add", {"by": 1}), ("add", {"by": 2}))], resource_type=COUNTER, max_episode_steps=1
        )
        assert len(episode) == 1
        assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "tool"]
        assert tool_answers(episode) == ["the count is 1", "the count is 3"]
        assert episode.get_rewards() == [3.0]
        assistant = episode.messages[1]
        assert [c.id for c in assistant.tool_calls] == [m.tool_call_id for m in episode.messages[2:]]
        assert episode.assistant_turns.tolist() == [1]

    async def test_missing_and_duplicate_call_ids_are_replaced(self):
        call_of = {"name": "add", "arguments": {}}
        given = [{**call_of, "id": "a"}, {**call_of, "id": "a"}, call_of, {**call_of, "id": ""}]
        episode = await collected([{"type": "tool_calls", "calls": given}], resource_type=COUNTER, max_episode_steps=1)
        ids = ["a", "call_0_1", "call_0_2", "call_0_3"]
        assert [c.id for c in episode.messages[1].tool_calls] == ids
        assert [m.tool_call_id for m in episode.messages[2:]] == ids

    async def test_huge_output_is_cut(self):
        registry = ToolRegistry("loud")

        @registry.tool
        def shout() -> str:
            return "a" * 50_000_000

        episode = await collected([call("shout"), text("on we go")], tools=registry, on_text="end")
        (long,) = tool_answers(episode)
        assert len(long) < 17_000 and "characters omitted" in long and reason(episode) == "answered"

    async def test_malformed_arguments_are_a_tool_error_counted_invalid(self):
        broken = {"type": "tool_call", "name": "add", "arguments_text": '{"by": '}
        episode = await collected([broken, call()], resource_type=COUNTER, max_episode_steps=2)
        assert tool_answers(episode) == [
            "Error: the arguments of 'add' are not a JSON object: {\"by\": ",
            "the count is 1",
        ]
        assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, True]
        # The model reads back exactly what it wrote.
        assert episode.messages[1].tool_calls[0].function.arguments == '{"by": '

    async def test_unknown_tool_suggests_the_nearest_name(self):
        registry = ToolRegistry("own")

        @registry.tool
        def calculate(x: int) -> int:
            """Compute."""
            return x

        episode = await collected(
            [call("calculat"), call("adds"), call()],
            resource_type=COUNTER,
            tools=registry,
            offered=["calculate", "add"],
            max_episode_steps=3,
        )
        assert "unknown tool 'calculat'; did you mean 'calculate'?" in tool_answers(episode)[0]
        assert "unknown tool 'adds'; did you mean 'add'?" in tool_answers(episode)[1]
        assert tool_answers(episode)[2] == "the count is 1"
        assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, False, True]

    async def test_task_may_have_tools_without_a_resource(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def double(x: int) -> int:
            """Double a number."""
            return 2 * x

        episode = await collected([call("double", x=4), call("dubble")], tools=registry, max_episode_steps=2)
        assert tool_answers(episode) == ["8", "Error: unknown tool 'dubble'; did you mean 'double'?"]
        assert episode.custom_data["start"] == {"fork": None, "state_key": None, "verified": None}

    @pytest.mark.parametrize(
        ("raised", "failure_class", "where"),
        [
            (ValueError("nope"), "crash", "EnvironmentFailure"),
            (KeyError("nope"), "crash", "EnvironmentFailure"),
            (SystemExit("nope"), "crash", "EnvironmentFailure"),
            (TimeoutError("nope"), "timeout", "DeadlineError"),
            (ProviderError("nope"), "provider_error", "ProviderError"),
        ],
    )
    @pytest.mark.parametrize("is_async", [False, True])
    async def test_exception_in_a_tool_ends_the_episode_with_its_traceback(
        self, raised, failure_class, where, is_async
    ):
        registry = ToolRegistry("own")

        def fail() -> str:
            """Fail."""
            raise raised

        async def fail_later() -> str:
            """Fail."""
            raise raised

        registry.tool(name="fail")(fail_later if is_async else fail)
        episode = await collected([call("fail"), text("ok")], tools=registry, on_text="end")
        assert (reason(episode), len(episode)) == ("error", 1)
        found = failure(episode)
        assert (found["class"], found["where"]) == (failure_class, where)
        assert "nope" in found["message"] and "raise raised" in found["traceback"]
        assert f"{__file__}:" in found["traceback"]

    @pytest.mark.parametrize("is_caused", [False, True])
    async def test_declared_tool_error_goes_to_the_agent_and_the_episode_continues(self, is_caused):
        registry = ToolRegistry("own")

        @registry.tool
        def cancel(order: str) -> str:
            """Cancel an order."""
            try:
                return {"1": "cancelled"}[order]
            except KeyError as error:
                raise ToolError(f"no order {order}") from (error if is_caused else None)

        episode = await collected(
            [call("cancel", order="2"), call("cancel", order="1"), text("ok")], tools=registry, on_text="end"
        )
        assert (reason(episode), failure(episode)) == ("answered", None)
        assert tool_answers(episode) == ["Error: no order 2", "cancelled"]

    async def test_wrong_arguments_go_to_the_agent(self):
        registry = ToolRegistry("own")

        @registry.tool
        def double(x: int) -> int:
            """Double a number."""
            return 2 * x

        episode = await collected(
            [call("double", x="many"), call("double"), call("double", x=1, y=2), call("double", x=2)],
            tools=registry,
            max_episode_steps=4,
        )
        assert failure(episode) is None
        *refused, answer = tool_answers(episode)
        assert all(each.startswith("Error: tool 'double': ") for each in refused) and answer == "4"

    async def test_error_raised_from_itself_is_recorded(self):
        registry = ToolRegistry("own")

        @registry.tool
        def fail() -> str:
            """Fail."""
            error = ValueError("nope")
            raise error from error

        episode = await collected([call("fail"), text("ok")], tools=registry, on_text="end")
        assert (reason(episode), failure(episode)["message"]) == ("error", "tool 'fail': ValueError: nope")

    @pytest.mark.parametrize("value", [{(1, 2): 3}, b"\xff\xfe", object()])
    async def test_result_without_json_form_ends_the_episode(self, value):
        registry = ToolRegistry("own")

        @registry.tool
        def odd() -> dict:
            """Return a value that JSON cannot write."""
            return value

        episode = await collected([call("odd"), text("ok")], tools=registry, on_text="end")
        assert (reason(episode), failure(episode)["class"]) == ("error", "crash")
        assert failure(episode)["message"].startswith("tool 'odd': TypeError: ")

    @pytest.mark.parametrize("kind", ["MethodShop", "RegistryShop"])
    async def test_tools_of_a_resource_follow_the_same_rule(self, kind):
        actions = [call("buy", item="wine"), call("buy", item="bug"), text("ok")]
        episode = await collected(actions, resource_type=f"{__name__}:{kind}", on_text="end")
        assert tool_answers(episode)[0] == "Error: no wine here" and len(episode) == 2
        assert (reason(episode), failure(episode)["class"]) == ("error", "crash")
        assert "'buy'" in failure(episode)["message"] and "1 / 0" in failure(episode)["traceback"]

    async def test_calls_after_a_broken_tool_are_not_executed(self):
        registry = ToolRegistry("own")
        called = []

        @registry.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("nope")

        @registry.tool
        def note() -> str:
            """Note the call."""
            called.append(1)
            return "noted"

        episode = await collected([calls(("fail", {}), ("note", {}))], tools=registry)
        assert tool_answers(episode)[1] == "Not executed: the episode is over." and not called

    async def test_slow_tool_is_a_tool_error(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def wait() -> str:
            """Wait."""
            await asyncio.sleep(30)

        episode = await collected(
            [call("wait"), text("ok")], tools=registry, on_text="end", limits={"tool_time_s": 0.02}
        )
        assert reason(episode) == "answered"
        assert tool_answers(episode) == ["Error: tool 'wait' did not respond within 0.02 s (limits.tool_time_s)"]

    async def test_calls_of_one_action_share_the_remaining_episode_time(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def wait() -> str:
            """Wait."""
            await asyncio.sleep(0.2)
            return "done"

        action = calls(*[("wait", {})] * 5)
        episode = await collected([action], tools=registry, limits={"wall_time_s": 0.3})
        assert reason(episode) == "wall_time_limit"
        assert tool_answers(episode).count("done") <= 1
        assert sum("the time limit of the episode was reached" in answer for answer in tool_answers(episode)) >= 4

    async def test_unresponsive_resource_ends_the_episode_with_a_timeout(self):
        episode = await collected([call(), call("slow"), call()], resource_type=COUNTER, limits={"tool_time_s": 0.02})
        assert (reason(episode), failure(episode)["class"], len(episode)) == ("error", "timeout", 2)
        assert "limits.tool_time_s" in failure(episode)["message"]

    async def test_long_tool_output_is_cut_with_a_notice(self):
        episode = await collected(
            [call("long")], resource_type=COUNTER, limits={"tool_output_chars": 100}, max_episode_steps=1
        )
        (answer,) = tool_answers(episode)
        assert answer == "a" * 50 + "\n[… 900 of 1,000 characters omitted …]\n" + "b" * 50
        assert episode.get_infos(1)["tools"] == [{"name": "long", "cut": True}]

    async def test_resource_can_mark_an_action_invalid(self):
        episode = await collected([call("invalid")], resource_type=COUNTER, max_episode_steps=1)
        assert episode.get_infos(1)["is_action_valid"] is False
        assert episode.get_infos(1)["tools"] == [{"name": "invalid", "why": "wall", "is_valid": False}]

    async def test_calls_after_the_end_are_answered_but_not_executed(self):
        episode = await collected([calls(("win", {}), ("crash", {}))], resource_type=COUNTER)
        assert reason(episode) == "environment_terminated"
        assert tool_answers(episode) == ["won", "Not executed: the episode is over."]

    async def test_duplicate_tool_names_are_rejected(self):
        registry = ToolRegistry("own")
        registry.tool(name="add")(lambda: None)
        for fields in ({"resource_type": COUNTER, "offered": ["add"]}, {"terminate_tool": "add"}):
            episode = await collected([call()], tools=registry, **fields)
            assert failure(episode)["message"] == "two tools are named add; rename one of them"

    async def test_tool_added_by_an_earlier_call_of_the_action_can_be_called(self):
        class Unlocking(Counter):
            async def get_tools_spec(self):
                return [
                    spec for spec in await super().get_tools_spec() if self.total or spec["function"]["name"] != "win"
                ]

        resource = Unlocking()
        worker = worker_of([calls(("add", {}), ("win", {}))], environment=resource)
        assert reason(await worker.collect_episode()) == "environment_terminated"
        early = await worker_of([calls(("win", {}))], environment=resource, max_episode_steps=1).collect_episode()
        assert "unknown tool 'win'" in tool_answers(early)[0]
        await resource.close()

    async def test_resource_failure_inside_a_task_tool_ends_the_episode(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def push(world: ForkableResource) -> str:
            """Push."""
            raise EnvironmentFailure("the world broke")

        episode = await collected([call("push"), call()], resource_type=COUNTER, tools=registry)
        assert (reason(episode), failure(episode)["where"], len(episode)) == ("error", "EnvironmentFailure", 1)

    async def test_structured_observation_is_shown_as_json(self):
        shown = {"position": [1, 2]}
        episode = await collected([call("value", observation=shown)], resource_type=COUNTER, max_episode_steps=1)
        assert tool_answers(episode) == ['{"position": [1, 2]}']
        assert episode.get_observations(1) == '{"position": [1, 2]}'

    async def test_arguments_that_are_not_a_mapping_are_a_tool_error(self):
        action = {"type": "tool_call", "name": "add", "arguments": [1]}
        episode = await collected([action], resource_type=COUNTER, max_episode_steps=1)
        assert tool_answers(episode) == ["Error: the arguments of 'add' must be an object, got a list"]

    async def test_content_and_reasoning_beside_a_call_are_kept(self):
        action = {**call(), "content": "I add.", "reasoning_content": "hm"}
        episode = await collected([action], resource_type=COUNTER, max_episode_steps=1)
        assert (episode.messages[1].content, episode.messages[1].reasoning_content) == ("I add.", "hm")
