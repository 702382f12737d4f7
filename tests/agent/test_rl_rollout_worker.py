"""The rollout loop: what is one step, why an episode ends, and that whatever fails is recorded and cleaned up."""

import asyncio
import gc
import inspect
import logging
import tracemalloc

import pytest

from reward_kit.agent.models import StopReason
from reward_kit.agent.policies.scripted_policy import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import StepOutcome
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, ProviderError
from tests.agent.worlds import (
    WORLD,
    Counter,
    call,
    calls,
    collected,
    failure,
    reason,
    task_of,
    text,
    tool_answers,
    worker_of,
)


def with_usage(tokens):
    return lambda *_: PolicyOutput(call(), None, {"usage": {"prompt_tokens": tokens, "completion_tokens": 1}})


class TestEnds:
    """Each StopReason that the worker gives, with terminated and truncated."""

    CASES = {  # noqa: RUF012
        "answered": ([text("42")], {}, True),
        "terminate_action": ([{"type": "terminate"}], {"resource_type": WORLD}, True),
        "stop_phrase": ([text("a"), text("I am DONE.")], {"on_text": "continue", "stop_phrases": ["DONE"]}, True),
        "termination_regex": ([text("x=1")], {"on_text": "continue", "termination_regex": r"x=\d"}, True),
        "environment_terminated": ([call("win")], {"resource_type": WORLD}, True),
        "environment_truncated": ([call("cut")], {"resource_type": WORLD}, False),
        "max_steps": ([call(), call(), call()], {"resource_type": WORLD, "max_episode_steps": 2}, False),
        "token_limit": (with_usage(9), {"resource_type": WORLD, "limits": {"total_tokens": 15}}, False),
        "wall_time_limit": ([call("slow")], {"resource_type": WORLD, "limits": {"wall_time_s": 0.05}}, False),
        "error": ([call("crash")], {"resource_type": WORLD}, False),
    }

    @pytest.mark.parametrize("expected", CASES)
    async def test_each_reason_has_one_flag(self, expected):
        actions, fields, terminated = self.CASES[expected]
        episode = await collected(actions, **fields)
        assert reason(episode) == expected
        assert (episode.is_terminated, episode.is_truncated) == (terminated, not terminated)
        assert (failure(episode) is None) == (expected != "error")

    def test_every_reason_is_covered(self):
        assert {*self.CASES, "recorded"} == {member.value for member in StopReason}

    def test_a_reason_is_terminal_or_a_limit_or_an_error(self):
        for member in StopReason:
            assert member.is_terminal + member.is_limit + (member is StopReason.ERROR) == 1

    async def test_the_terminate_tool_ends_and_what_follows_in_the_action_is_not_done(self):
        episode = await collected([calls(("bye", {}), ("add", {}))], resource_type=WORLD, terminate_tool="bye")
        assert reason(episode) == "terminate_action"
        assert tool_answers(episode) == ["The episode ends.", "Not carried out: the episode is over."]

    async def test_the_terminate_tool_is_offered(self):
        seen = []
        await collected(lambda _, tools: seen.extend(tools) or text("x"), terminate_tool="bye", on_text="end")
        assert [tool["function"]["name"] for tool in seen] == ["bye"]

    async def test_the_token_limit_counts_prompt_and_completion_of_all_steps(self):
        episode = await collected(with_usage(9), resource_type=WORLD, limits={"total_tokens": 15})
        assert len(episode) == 2
        assert episode.custom_data["usage"] == {"prompt_tokens": 18, "completion_tokens": 2}

    async def test_wall_time_that_runs_out_while_the_policy_thinks_is_a_limit(self):
        async def think(*_):
            await asyncio.sleep(30)

        episode = await collected(think, limits={"wall_time_s": 0.05})
        assert (reason(episode), len(episode), failure(episode)) == ("wall_time_limit", 0, None)

    async def test_a_world_cut_off_in_a_call_has_no_final_state(self):
        episode = await collected([call(), call("slow")], resource_type=WORLD, limits={"wall_time_s": 0.1})
        assert len(episode) == 2
        assert "limits.wall_time_s" in tool_answers(episode)[1]
        assert episode.custom_data.get("final_state") is None

    async def test_a_phrase_is_sought_in_the_raw_output_too(self):
        def act(*_):
            return PolicyOutput(call(), "thinking … FINISHED")

        assert reason(await collected(act, resource_type=WORLD, stop_phrases=["FINISHED"])) == "stop_phrase"

    @pytest.mark.parametrize("steps", [0, -1])
    def test_a_step_limit_is_at_least_one(self, steps):
        with pytest.raises(ConfigError, match=f"max_episode_steps is at least 1, got {steps}"):
            RLRolloutWorker(task_of(), ScriptedPolicy([]), max_episode_steps=steps)

    async def test_the_workers_step_limit_beats_the_tasks(self):
        worker = RLRolloutWorker(task_of(resource_type=WORLD), ScriptedPolicy([call()] * 9), max_episode_steps=3)
        assert len(await worker.collect_episode()) == 3


class TestTextActions:
    async def test_text_ends_a_task_without_tools(self):
        assert reason(await collected([text("a"), text("b")])) == "answered"

    async def test_with_tools_a_text_is_answered_with_the_nudge(self):
        episode = await collected([text("hm"), {"type": "terminate"}], resource_type=WORLD, nudge="Go on.")
        assert [m.text for m in episode.messages] == ["the count is 0", "hm", "Go on.", ""]
        assert episode.get_observations(1) == "Go on."

    async def test_the_task_may_say_otherwise(self):
        assert reason(await collected([text("a")], resource_type=WORLD, on_text="end")) == "answered"
        assert len(await collected([text("a"), text("b")], on_text="continue", max_episode_steps=2)) == 2

    async def test_no_nudge_follows_the_last_action(self):
        episode = await collected([text("a"), text("b")], on_text="continue", max_episode_steps=2)
        assert episode.messages[-1].text == "b"


class TestToolCalls:
    async def test_parallel_calls_are_one_step_with_one_assistant_message(self):
        episode = await collected(
            [calls(("add", {"by": 1}), ("add", {"by": 2}))], resource_type=WORLD, max_episode_steps=1
        )
        assert len(episode) == 1
        assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "tool"]
        assert tool_answers(episode) == ["the count is 1", "the count is 3"]
        assert episode.get_rewards() == [3.0]
        assistant = episode.messages[1]
        assert [c.id for c in assistant.tool_calls] == [m.tool_call_id for m in episode.messages[2:]]
        assert episode.assistant_turns.tolist() == [1]

    async def test_malformed_arguments_are_a_tool_error_counted_invalid(self):
        broken = {"type": "tool_call", "name": "add", "arguments_text": '{"by": '}
        episode = await collected([broken, call()], resource_type=WORLD, max_episode_steps=2)
        assert tool_answers(episode) == [
            "Error: the arguments of 'add' are not a JSON object: {\"by\": ",
            "the count is 1",
        ]
        assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, True]
        # The model reads back exactly what it wrote.
        assert episode.messages[1].tool_calls[0].function.arguments == '{"by": '

    async def test_an_unknown_tool_offers_the_nearest_of_all_tools(self):
        registry = ToolRegistry("own")

        @registry.tool
        def calculate(x: int) -> int:
            """Compute."""
            return x

        episode = await collected(
            [call("calculat"), call("adds"), call()], resource_type=WORLD, tools=registry, max_episode_steps=3
        )
        assert "unknown tool 'calculat'; did you mean 'calculate'?" in tool_answers(episode)[0]
        assert "unknown tool 'adds'; did you mean 'add'?" in tool_answers(episode)[1]
        assert tool_answers(episode)[2] == "the count is 1"
        assert [info["is_action_valid"] for info in episode.get_infos(slice(1, None))] == [False, False, True]

    async def test_a_task_may_have_tools_only(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def double(x: int) -> int:
            """Double a number."""
            return 2 * x

        episode = await collected([call("double", x=4), call("dubble")], tools=registry, max_episode_steps=2)
        assert tool_answers(episode) == ["8", "Error: unknown tool 'dubble'; did you mean 'double'?"]
        assert episode.custom_data["start"] == {"fork": None, "state_key": None, "verified": None}

    @pytest.mark.parametrize(
        "raised", [ValueError("nope"), TimeoutError("nope"), ProviderError("nope"), SystemExit("nope")]
    )
    async def test_a_tool_that_raises_is_a_tool_error_and_the_episode_goes_on(self, raised):
        registry = ToolRegistry("own")

        @registry.tool
        def fail() -> str:
            """Fail."""
            raise raised

        episode = await collected([call("fail"), call("fail"), text("ok")], tools=registry, on_text="end")
        assert (reason(episode), failure(episode)) == ("answered", None)
        assert len(tool_answers(episode)) == 2
        assert all(answer.startswith("Error: ") and "nope" in answer for answer in tool_answers(episode))

    async def test_a_tool_may_return_what_has_no_json_form(self):
        registry = ToolRegistry("own")

        @registry.tool
        def odd() -> dict:
            """Return a dict that JSON cannot write."""
            return {(1, 2): 3}

        episode = await collected([call("odd"), text("ok")], tools=registry, on_text="end")
        assert (reason(episode), failure(episode)) == ("answered", None)
        assert tool_answers(episode)[0].startswith("Error: tool 'odd'")

    async def test_a_slow_tool_of_the_task_is_a_tool_error(self):
        registry = ToolRegistry("own")

        @registry.tool
        async def wait() -> str:
            """Wait."""
            await asyncio.sleep(30)

        episode = await collected(
            [call("wait"), text("ok")], tools=registry, on_text="end", limits={"tool_time_s": 0.02}
        )
        assert reason(episode) == "answered"
        assert tool_answers(episode) == ["Error: tool 'wait' did not answer within 0.02 s (limits.tool_time_s)"]

    async def test_a_resource_that_does_not_answer_ends_the_episode_as_a_timeout(self):
        episode = await collected([call(), call("slow"), call()], resource_type=WORLD, limits={"tool_time_s": 0.02})
        assert (reason(episode), failure(episode)["class"], len(episode)) == ("error", "timeout", 2)
        assert "limits.tool_time_s" in failure(episode)["message"]

    async def test_long_tool_output_is_cut_visibly(self):
        episode = await collected(
            [call("long")], resource_type=WORLD, limits={"tool_output_chars": 100}, max_episode_steps=1
        )
        (answer,) = tool_answers(episode)
        assert answer == "a" * 50 + "\n[… 900 of 1,000 characters left out …]\n" + "b" * 50
        assert episode.get_infos(1)["tools"] == [{"name": "long", "cut": True}]

    async def test_an_invalid_action_is_marked_by_the_resource(self):
        episode = await collected([call("invalid")], resource_type=WORLD, max_episode_steps=1)
        assert episode.get_infos(1)["is_action_valid"] is False
        assert episode.get_infos(1)["tools"] == [{"name": "invalid", "why": "wall", "is_valid": False}]

    async def test_what_follows_the_end_in_one_action_is_answered_but_not_done(self):
        episode = await collected([calls(("win", {}), ("crash", {}))], resource_type=WORLD)
        assert reason(episode) == "environment_terminated"
        assert tool_answers(episode) == ["won", "Not carried out: the episode is over."]

    async def test_two_tools_of_one_name_are_refused(self):
        registry = ToolRegistry("own")
        registry.tool(name="add")(lambda: None)
        for fields in ({"resource_type": WORLD}, {"terminate_tool": "add"}):
            episode = await collected([call()], tools=registry, **fields)
            assert failure(episode)["message"] == "two tools are called add; rename one of them"


class TestFailures:
    async def test_a_resource_that_raises_is_recorded_and_the_action_kept(self):
        episode = await collected([call(), call("crash")], resource_type=WORLD)
        assert failure(episode)["where"] == "EnvironmentFailure"
        assert failure(episode)["message"] == "Counter in 'crash': ZeroDivisionError: the world broke"
        assert failure(episode)["traceback"].splitlines()[1].startswith(f"  {inspect.getfile(Counter)}")
        assert episode.get_actions() == [call(), call("crash")]
        assert [m.role for m in episode.messages][-2:] == ["assistant", "tool"]
        assert len(episode) == 2

    @pytest.mark.parametrize(
        ("observation", "reward"), [("x", float("nan")), ("x", float("inf")), ("x", "much"), ("odd keys", 1.0)]
    )
    async def test_a_resource_that_answers_garbage_is_recorded_and_the_action_kept(self, observation, reward):
        episode = await collected([call("value", observation=observation, reward=reward)], resource_type=WORLD)
        assert (failure(episode)["where"], len(episode)) == ("EnvironmentFailure", 1)
        assert episode.get_return() == 0.0

    async def test_an_outcome_of_another_type_is_named(self):
        episode = await collected([call("bad")], resource_type=WORLD)
        assert failure(episode)["message"] == "step('bad') returned dict, not a StepOutcome"

    @pytest.mark.parametrize(
        "garbage",
        [
            None,
            "text",
            (1, 2, 3),
            {},
            {"type": "dance"},
            {"type": "text"},
            {"type": "text", "content": 5},
            {"type": "tool_call"},
            {"type": "tool_calls"},
            {"type": "tool_calls", "calls": []},
            {"type": "tool_calls", "calls": {"name": "x"}},
            {"type": "tool_calls", "calls": ["x"]},
            {"type": "tool_call", "name": "add", "content": 5},
            {"type": "tool_call", "name": "add", "arguments": {(1, 2): 3}},
            PolicyOutput(None),
            PolicyOutput(text("x"), 5),
            PolicyOutput(text("x"), None, "logprobs"),
            PolicyOutput(text("x"), None, {"usage": 5}),
            PolicyOutput(text("x"), None, {"prompt_ids": [1], "token_ids": ["a"]}),
            PolicyOutput(text("x"), None, {"prompt_ids": [1], "token_ids": [2**40]}),
            PolicyOutput(text("x"), None, {"prompt_ids": [1], "token_ids": [1], "logprobs": [0.1, 0.2]}),
            PolicyOutput(text("x"), None, {"prompt_ids": [1], "token_ids": [1], "policy_version": "v2"}),
            PolicyOutput(text("x"), None, None, "high"),
        ],
    )
    async def test_a_policy_that_returns_garbage_is_recorded_before_anything_is_done(self, garbage):
        episode = await collected(lambda *_: garbage, resource_type=WORLD)
        assert (reason(episode), failure(episode)["where"], len(episode)) == ("error", "PolicyError", 0)

    async def test_a_policy_that_raises_is_recorded_with_its_frame(self):
        def act(*_):
            raise KeyError("weights")

        episode = await collected(act)
        assert failure(episode)["message"] == "ScriptedPolicy: KeyError: 'weights'"
        assert failure(episode)["traceback"].splitlines()[1].startswith(f"  {__file__}")

    async def test_an_error_of_a_provider_keeps_its_class(self):
        def act(*_):
            raise ProviderError("429")

        assert failure(await collected(act))["class"] == "provider_error"

    async def test_a_policy_that_takes_too_long_is_a_timeout(self):
        async def act(*_):
            await asyncio.sleep(30)

        episode = await collected(act, limits={"policy_time_s": 0.02, "wall_time_s": 60})
        assert (reason(episode), failure(episode)["class"]) == ("error", "timeout")
        assert "limits.policy_time_s" in failure(episode)["message"]

    @pytest.mark.parametrize(
        "method",
        [
            "setup",
            "reset",
            "fork",
            "state_key",
            "get_observation",
            "get_tools_spec",
            "final_state",
            "__init__",
            "reseed_noise",
        ],
    )
    async def test_whatever_of_the_world_breaks_the_episode_comes_back_and_nothing_stays_open(
        self, method, monkeypatch
    ):
        # The worlds of a test are its own: breaking one method of the class is how a user's bug looks.
        class Broken(Counter):
            pass

        def broken(self, *_):
            raise RuntimeError("broken")

        async def broken_async(self, *_):
            raise RuntimeError("broken")

        setattr(Broken, method, broken if method in ("__init__", "reseed_noise") else broken_async)
        monkeypatch.setitem(globals(), "Broken", Broken)
        episode = await collected([call()], resource_type=f"{__name__}:Broken", max_episode_steps=1)
        assert (reason(episode), failure(episode)["where"]) == ("error", "EnvironmentFailure")
        assert "RuntimeError: broken" in failure(episode)["message"]

    async def test_a_world_that_cannot_be_closed_costs_a_line_and_not_the_episode(self, caplog, monkeypatch):
        class Sticky(Counter):
            async def close(self):
                await super().close()
                raise RuntimeError("sticky")

        monkeypatch.setitem(globals(), "Sticky", Sticky)
        episode = await collected([{"type": "terminate"}], resource_type=f"{__name__}:Sticky")
        assert (reason(episode), failure(episode)) == ("terminate_action", None)
        # The group's own world and the episode's.
        assert [record.message for record in caplog.records] == ["close of Sticky: RuntimeError: sticky"] * 2

    async def test_a_wrong_world_is_recorded(self):
        episode = await collected([call()], resource_type="gymnasum")
        assert "unknown resource 'gymnasum'; did you mean 'gymnasium'?" in failure(episode)["message"]


class Session(AgentPolicy):
    """Counts its sessions; `broken` names the method that raises."""

    def __init__(self, act=None, broken=None):
        self.act, self.broken = act, broken
        self.opened, self.closed = [], []

    async def open(self, context):
        self.fail("open")
        self.opened.append(context)
        return self

    async def get_action(self, observation, available_tools_specs=None):
        return await self.act() if self.act else PolicyOutput(text("x"))

    async def close_session(self):
        self.closed.append(True)
        self.fail("close_session")

    def fail(self, method):
        if self.broken == method:
            raise RuntimeError(f"{method} broke")


class TestSessions:
    async def test_each_episode_opens_one_and_closes_it(self):
        policy = Session()
        worker = RLRolloutWorker(task_of(resource_type=WORLD, on_text="end"), policy)
        episode = await worker.collect_episode()
        (context,) = policy.opened
        assert context.rollout_id == episode.id_
        assert context.seed == episode.custom_data["seeds"]["policy"]
        assert isinstance(context.resource, Counter)
        assert len(policy.closed) == 1

    async def test_one_that_does_not_open_is_recorded(self):
        episode = await RLRolloutWorker(task_of(resource_type=WORLD), Session(broken="open")).collect_episode()
        assert failure(episode)["message"] == "open of Session: RuntimeError: open broke"

    async def test_one_that_does_not_close_costs_a_line_and_not_the_episode(self, caplog):
        task = task_of(resource_type=WORLD, on_text="end")
        episode = await RLRolloutWorker(task, Session(broken="close_session")).collect_episode()
        assert (reason(episode), failure(episode)) == ("answered", None)
        assert episode.custom_data["final_state"]["payload"] == b'{"total":0}'
        assert caplog.records[0].message == "close_session of Session: RuntimeError: close_session broke"

    @pytest.mark.parametrize("broken", [None, "close_session"])
    async def test_cancellation_closes_world_and_session_and_goes_on_outwards(self, broken):
        waiting = asyncio.Event()

        async def act():
            waiting.set()
            await asyncio.sleep(30)

        policy = Session(act, broken)
        running = asyncio.create_task(RLRolloutWorker(task_of(resource_type=WORLD), policy).collect_episode())
        await waiting.wait()
        assert len(Counter.open_worlds) == 2
        before = asyncio.all_tasks()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(policy.closed) == 1
        assert not Counter.open_worlds
        assert asyncio.all_tasks() <= before


class TestRecord:
    async def test_run_episode_gives_steps_messages_and_ground_truth(self):
        worker = worker_of(
            [call(), call("win")], resource_type=WORLD, ground_truth={"total": 1}, initial_user_prompt="Play."
        )
        steps, messages, ground_truth = await worker.run_episode(seed=3)
        assert ground_truth == {"total": 1}
        assert [m.role for m in messages] == ["user", "user", "assistant", "tool", "assistant", "tool"]
        assert [step.action_taken for step in steps] == [call(), call("win")]
        assert [list(step.resulting_messages_history) for step in steps] == [messages[:4], messages]
        assert [step.observation_data for step in steps] == ["the count is 0", "the count is 1"]
        assert [step.is_done for step in steps] == [False, True]
        infos = [step.step_info for step in steps]
        assert [info["assistant_turn_index"] for info in infos] == [0, 1]
        assert [info["state_key"] for info in infos] == ["count 0", "count 1"]
        assert [info["environment_reward"] for info in infos] == [1.0, 5.0]
        assert infos[-1]["stop_reason"] == "environment_terminated"

    async def test_run_episode_puts_a_failure_on_the_last_step_and_into_the_log(self, caplog):
        steps, _, _ = await worker_of([call("crash")], resource_type=WORLD).run_episode()
        assert steps[-1].step_info["failure"]["class"] == "crash"
        assert "the world broke" in caplog.text

    async def test_an_environment_without_reward_gives_none_and_not_zero(self):
        steps, _, _ = await worker_of([call("cut")], resource_type=WORLD).run_episode()
        assert steps[0].step_info["environment_reward"] is None

    async def test_the_final_state_is_taken_before_the_world_closes(self):
        episode = await collected([call(by=3), {"type": "terminate"}], resource_type=WORLD)
        assert episode.custom_data["final_state"] == {"kind": "json", "payload": b'{"total":3}'}

    async def test_tokens_are_kept_exactly_and_read_back_by_step(self):
        def act(observation, _):
            step = sum(m.role == "assistant" for m in observation)
            known = {
                "prompt_ids": list(range(3 + 2 * step)),
                "token_ids": [3 + 2 * step],
                "logprobs": [-0.5],
                "policy_version": 4,
            }
            return PolicyOutput(call(), "raw", known, 0.25)

        steps, _, _ = await worker_of(act, resource_type=WORLD, max_episode_steps=2).run_episode()
        assert steps[1].policy_logprobs["prompt_ids"].tolist() == [0, 1, 2, 3, 4]
        assert steps[1].policy_logprobs["token_ids"].tolist() == [5]
        assert steps[1].policy_logprobs["logprobs"].tolist() == [-0.5]
        assert steps[1].policy_logprobs["policy_version"] == 4
        assert (steps[1].raw_policy_output, steps[1].policy_value_estimate) == ("raw", 0.25)

    async def test_log_probabilities_without_the_prompts_ids_are_kept_too(self):
        known = {"token_ids": [7, 8], "logprobs": [-0.1, -0.2], "prompt_ids": None, "usage": None}
        steps, _, _ = await worker_of(lambda *_: PolicyOutput(text("x"), "x", known)).run_episode()
        assert steps[0].policy_logprobs == {"token_ids": [7, 8], "logprobs": [-0.1, -0.2]}

    async def test_a_plain_four_tuple_is_accepted(self):
        episode = await collected(lambda *_: (text("4"), "raw", None, 0.5))
        assert (reason(episode), episode.messages[-1].text) == ("answered", "4")
        assert episode.get_extra_model_outputs("value_estimate") == [0.5]

    async def test_arguments_may_hold_numpy_values(self):
        import numpy as np

        episode = await collected([call(by=np.int64(2))], resource_type=WORLD, max_episode_steps=1)
        assert episode.messages[1].tool_calls[0].function.arguments == '{"by": 2}'
        assert tool_answers(episode) == ["the count is 2"]

    async def test_debug_logs_each_step(self, caplog):
        with caplog.at_level(logging.DEBUG, "reward_kit.agent"):
            episode = await collected([call(), call("win")], resource_type=WORLD)
        lines = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
        assert [line.split(":")[0] for line in lines] == [f"{episode.id_} step 0", f"{episode.id_} step 1"]
        assert "'add'" in lines[0]

    async def test_two_runs_of_one_seed_are_equal_but_for_the_clock(self):
        def without_clock(episode):
            state = episode.get_state()
            state["custom_data"].pop("timing")
            return {**state, "duration_s": 0}

        worker = worker_of([call(), call("win")], resource_type=WORLD)
        first, again, other = [without_clock(await worker.collect_episode(seed=seed)) for seed in (1, 1, 2)]
        assert first == again
        assert first["id_"] != other["id_"]

    async def test_the_conversation_is_stored_once_whatever_policies_and_steps_see(self):
        seen = []

        def act(observation, _):
            seen.append(observation)
            return call()

        steps, messages, _ = await worker_of(act, resource_type=WORLD, max_episode_steps=3).run_episode()
        assert [len(history) for history in seen] == [1, 3, 5]
        assert seen[0][0] is seen[2][0] is steps[0].resulting_messages_history[0] is messages[0]

    async def test_memory_grows_with_the_steps_and_not_with_their_square(self):
        class Wide(PythonStateResource):
            async def step(self, action_name, action_params):
                self.count = getattr(self, "count", 0) + 1
                return StepOutcome(f"{self.count:1000}")

        world = Wide()
        await world.setup({})

        async def bytes_of(steps):
            worker = RLRolloutWorker(task_of(), ScriptedPolicy([call("get_state")] * steps), steps, world)
            gc.collect()
            tracemalloc.start()
            episode = await worker.collect_episode()
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert len(episode) == steps
            return used

        await bytes_of(10)
        half, whole = await bytes_of(100), await bytes_of(200)
        assert whole < 1_000_000
        assert whole < 2.2 * half
        await world.close()


class TestGivenEnvironment:
    async def test_it_is_forked_and_stays_its_owners(self):
        world = Counter()
        worker = worker_of([call(by=2), {"type": "terminate"}], environment=world)
        episode = await worker.collect_episode()
        assert episode.custom_data["start"]["verified"] is True
        assert world.total == 0
        assert Counter.open_worlds == {world}
        await world.close()

    async def test_concurrent_episodes_of_different_starts_do_not_disturb_each_other(self):
        class Seeded(Counter):
            async def reset(self, seed=None):
                await asyncio.sleep(0)
                await super().reset(seed)
                await asyncio.sleep(0)

            async def fork(self):
                await asyncio.sleep(0)
                return await super().fork()

            async def state_key(self):
                return f"{self.seed} {self.total}"

        world = Seeded()
        worker = worker_of([call(), {"type": "terminate"}], environment=world)
        episodes = await asyncio.gather(*(worker.collect_episode(seed=seed) for seed in range(8)))
        assert [failure(episode) for episode in episodes] == [None] * 8
        keys = [episode.custom_data["start"]["state_key"] for episode in episodes]
        assert keys == [f"{episode.custom_data['seeds']['environment']} 0" for episode in episodes]
        await world.close()


def test_a_worker_made_outside_a_loop_serves_several():
    worker = worker_of([text("a")])
    assert [reason(asyncio.run(worker.collect_episode())) for _ in range(2)] == ["answered"] * 2


class TestFirstMessages:
    async def test_the_initial_observation_is_appended_as_a_user_message(self):
        episode = await collected(
            [{"type": "terminate"}], resource_type=WORLD, messages=[{"role": "system", "content": "s"}]
        )
        assert [(m.role, m.text) for m in episode.messages[:2]] == [("system", "s"), ("user", "the count is 0")]

    async def test_unless_a_template_uses_it(self):
        episode = await collected(
            [{"type": "terminate"}], resource_type=WORLD, initial_user_prompt="Now {{ observation }}."
        )
        assert [m.text for m in episode.messages[:-1]] == ["Now the count is 0."]

    async def test_a_field_that_the_row_lacks_is_recorded(self):
        worker = worker_of([text("x")], initial_user_prompt="{{ question }}")
        async with worker.group(Sample("s1", {"answer": 1})) as group:
            episode = await worker.collect_episode(group)
        assert failure(episode)["class"] == "refused"
        assert "sample 's1'" in failure(episode)["message"]

    async def test_a_rows_configuration_is_laid_over_the_tasks(self):
        worker = worker_of(
            [{"type": "terminate"}], resource_type=WORLD, base_resource_config={"greeting": "a", "size": 1}
        )
        async with worker.group(Sample("s", resource_config={"greeting": "b"}, ground_truth=7)) as group:
            episode = await worker.collect_episode(group)
        assert episode.messages[0].text == "b"
        assert episode.custom_data["ground_truth"] == 7
