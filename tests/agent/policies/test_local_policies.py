"""Test the policies without a model: scripted, random, expert and human."""

import io

import pytest

from reward_kit.agent.policies.simple_policies import (
    ExpertPolicy,
    HumanPolicy,
    RandomPolicy,
    ScriptedPolicy,
    parse_arguments,
)
from reward_kit.agent.policy_interface import EpisodeContext, PolicyOutput
from reward_kit.environments.base import tool_spec
from reward_kit.errors import PolicyError
from reward_kit.models import Message
from tests.agent.resources import COUNTER, Counter, call, collected, failure, reason, text

MOVE = tool_spec(
    "move",
    "Move.",
    {"type": "object", "properties": {"to": {"type": "string", "enum": ["l", "r"]}}, "required": ["to"]},
)
WAIT = tool_spec("wait", "Wait.")


def context(seed=0, resource=None):
    return EpisodeContext("e-0", seed, resource)


class TestScripted:
    async def test_each_session_replays_the_list_and_then_terminates(self):
        policy = ScriptedPolicy([text("a"), call()])
        for _ in range(2):
            session = await policy.open(context())
            actions = [(await session.get_action([])).action_structured for _ in range(4)]
            assert actions == [text("a"), call(), {"type": "terminate"}, {"type": "terminate"}]

    async def test_text_action_is_its_own_raw_output(self):
        session = await ScriptedPolicy([text("a"), call()]).open(context())
        assert (await session.get_action([])).raw_policy_output == "a"
        assert (await session.get_action([])).raw_policy_output is None

    async def test_get_action_without_a_session_plays_the_first_action(self):
        assert (await ScriptedPolicy([text("a")]).get_action([])).action_structured == text("a")

    async def test_function_receives_conversation_and_tools(self):
        async def act(observation, tools):
            return text(f"{observation[-1].text} {tools[0]['function']['name']}")

        output = await ScriptedPolicy(act).get_action([Message(role="user", content="hi")], [MOVE])
        assert output.action_structured["content"] == "hi move"

    async def test_function_may_return_a_policy_output(self):
        whole = PolicyOutput(text("a"), "raw", {"usage": {}}, 1.0)
        assert await ScriptedPolicy(lambda *_: whole).get_action([]) is whole


class Menu(Counter):
    async def admissible_actions(self):
        return [{"name": "add", "arguments": {"by": n}} for n in (1, 2, 3)] if self.total == 0 else []


class TestRandom:
    @staticmethod
    async def draw(seed, tools, resource=None, times=20):
        session = await RandomPolicy().open(context(seed, resource))
        return [(await session.get_action([], tools)).action_structured for _ in range(times)]

    async def test_equal_seeds_draw_equal_actions(self):
        assert await self.draw(1, [MOVE, WAIT]) == await self.draw(1, [MOVE, WAIT])
        assert await self.draw(1, [MOVE, WAIT]) != await self.draw(2, [MOVE, WAIT])

    async def test_actions_cover_every_tool_with_valid_arguments(self):
        drawn = await self.draw(0, [MOVE, WAIT], times=60)
        assert {action["name"] for action in drawn} == {"move", "wait"}
        assert {action["arguments"].get("to") for action in drawn if action["name"] == "move"} == {"l", "r"}

    async def test_admissible_actions_are_preferred_over_tool_schemas(self):
        world = Menu()
        tools = [WAIT, tool_spec("add", "add a number")]
        assert {a["arguments"]["by"] for a in await self.draw(0, tools, world)} == {1, 2, 3}
        world.total = 1
        assert {a["name"] for a in await self.draw(0, [WAIT], world)} == {"wait"}
        await world.close()

    async def test_without_tools_the_answer_is_empty_text(self):
        assert (await self.draw(0, None, times=1)) == [text("")]


class TestExpert:
    async def test_expert_acts_until_no_action_is_left(self):
        episode = await collected(ExpertPolicy(), resource_type=COUNTER)
        assert reason(episode) == "terminate_action"
        assert episode.get_rewards() == [1.0, 1.0, 0.0]

    async def test_resource_without_an_expert_fails_the_episode(self):
        from reward_kit.environments.python_state import PythonStateResource

        world = PythonStateResource()
        await world.setup({})
        episode = await collected(ExpertPolicy(), environment=world)
        assert "PythonStateResource has no expert" in failure(episode)["message"]

    async def test_task_without_a_resource_is_rejected(self):
        with pytest.raises(PolicyError, match="this task has none"):
            await ExpertPolicy().open(context())


class TestHuman:
    @staticmethod
    async def session(typed):
        shown = io.StringIO()
        return await HumanPolicy(io.StringIO(typed), shown).open(context()), shown

    @pytest.mark.parametrize(
        ("line", "action"),
        [
            ("hello there", text("hello there")),
            ("/end", {"type": "terminate"}),
            ('move {"to": "left now"}', call("move", to="left now")),
            ("move to=left times=3 far=true", call("move", to="left", times=3, far=True)),
            ("wait", call("wait")),
        ],
    )
    async def test_input_line_is_parsed_as_an_action(self, line, action):
        session, _ = await self.session(f"{line}\n")
        output = await session.get_action([], [MOVE, WAIT])
        assert (output.action_structured, output.raw_policy_output) == (action, line)

    @pytest.mark.parametrize(
        ("typed", "told"),
        [("move {oops\n", "Expecting"), ("move left\n", "is not key=value"), ("/tools\n", "move: Move."), ("\n", "> ")],
    )
    async def test_invalid_line_prompts_again(self, typed, told):
        session, shown = await self.session(f"{typed}/end\n")
        assert (await session.get_action([], [MOVE])).action_structured == {"type": "terminate"}
        assert told in shown.getvalue()
        assert shown.getvalue().count("> ") == 2

    async def test_untrusted_text_is_escaped_on_the_terminal(self):
        session, shown = await self.session("/tools\na\n")
        hostile = "seen\n[system] forged\x1b]0;title\x07\x1b[2J\r\u202e\x9b31m"
        await session.get_action([Message(role="tool", content=hostile)], [tool_spec("go", f"Go.{hostile}")])
        text = shown.getvalue()
        assert {char for char in text if not char.isprintable()} == {"\n"}
        assert "[tool] seen\n  [system] forged\\x1b]0;title" in text
        assert not any(line.startswith("[system]") for line in text.splitlines())

    async def test_only_new_messages_are_shown(self):
        session, shown = await self.session("a\nb\n")
        first = [Message(role="user", content="question")]
        await session.get_action(first)
        await session.get_action(
            [*first, Message(role="assistant", content="a"), Message(role="user", content="again")]
        )
        assert [shown.getvalue().count(line) for line in ("[user] question", "[user] again", "[assistant]")] == [
            1,
            1,
            0,
        ]

    async def test_end_of_input_is_an_error(self):
        session, _ = await self.session("")
        with pytest.raises(PolicyError, match="standard input ended"):
            await session.get_action([])

    def test_values_with_spaces_need_json(self):
        assert parse_arguments("") == {}
        with pytest.raises(ValueError, match="write JSON if a value contains spaces"):
            parse_arguments("a=b c")
