"""Test the rollout loop: steps, stop reasons and records."""

import asyncio
import gc
import logging
import tracemalloc

import pytest

from reward_kit.agent.models import StopReason
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.environments.base import StepOutcome
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.record import episode_from_record, episode_to_record
from reward_kit.errors import ConfigError, LimitError
from tests.agent.resources import (
    COUNTER,
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


def with_usage(tokens, cost=None):
    usage = {"prompt_tokens": tokens, "completion_tokens": 1, **({"cost": cost} if cost else {})}
    return lambda *_: PolicyOutput(call(), None, {"usage": usage})


def cut_answer(*_):
    return PolicyOutput(text("It is forty-"), None, {"finish_reason": "length"})


def does_not_fit(observation, _):
    if len(observation) > 2:
        raise LimitError("maximum context length is 8 tokens")
    return call()


class TestEnds:
    """Every StopReason of the worker, with its terminated and truncated flags."""

    CASES = {  # noqa: RUF012
        "answered": ([text("42")], {}, True),
        "terminate_action": ([{"type": "terminate"}], {"resource_type": COUNTER}, True),
        "stop_phrase": ([text("a"), text("I am DONE.")], {"on_text": "continue", "stop_phrases": ["DONE"]}, True),
        "termination_regex": ([text("x=1")], {"on_text": "continue", "termination_regex": r"x=\d"}, True),
        "environment_terminated": ([call("win")], {"resource_type": COUNTER}, True),
        "environment_truncated": ([call("cut")], {"resource_type": COUNTER}, False),
        "max_steps": ([call(), call(), call()], {"resource_type": COUNTER, "max_episode_steps": 2}, False),
        "token_limit": (with_usage(9), {"resource_type": COUNTER, "limits": {"total_tokens": 15}}, False),
        "output_limit": (cut_answer, {}, False),
        "context_limit": (does_not_fit, {"resource_type": COUNTER}, False),
        "cost_limit": (with_usage(9, 0.2), {"resource_type": COUNTER, "limits": {"cost": 0.3}}, False),
        "wall_time_limit": ([call("slow")], {"resource_type": COUNTER, "limits": {"wall_time_s": 0.05}}, False),
        "error": ([call("crash")], {"resource_type": COUNTER}, False),
    }

    @pytest.mark.parametrize("expected", CASES)
    async def test_stop_reason_sets_terminated_or_truncated(self, expected):
        actions, fields, terminated = self.CASES[expected]
        episode = await collected(actions, **fields)
        assert reason(episode) == expected
        assert (episode.is_terminated, episode.is_truncated) == (terminated, not terminated)
        assert (failure(episode) is None) == (expected != "error")

    def test_every_stop_reason_is_tested(self):
        elsewhere = {"recorded": "transcripts", "run_limit": "test_budget", "user_stopped": "test_simulated_user"}
        assert {*self.CASES, *elsewhere} == {member.value for member in StopReason}

    def test_stop_reason_is_terminal_or_a_limit_or_an_error(self):
        for member in StopReason:
            assert member.is_terminal + member.is_limit + (member is StopReason.ERROR) == 1

    async def test_terminate_tool_ends_before_the_remaining_calls(self):
        episode = await collected([calls(("bye", {}), ("add", {}))], resource_type=COUNTER, terminate_tool="bye")
        assert reason(episode) == "terminate_action"
        assert tool_answers(episode) == ["The episode ends.", "Not executed: the episode is over."]

    async def test_terminate_tool_is_offered(self):
        seen = []
        await collected(lambda _, tools: seen.extend(tools) or text("x"), terminate_tool="bye", on_text="end")
        assert [tool["function"]["name"] for tool in seen] == ["bye"]

    async def test_token_limit_counts_prompt_and_completion_of_all_steps(self):
        episode = await collected(with_usage(9), resource_type=COUNTER, limits={"total_tokens": 15})
        assert len(episode) == 2
        assert episode.custom_data["usage"] == {"prompt_tokens": 18, "completion_tokens": 2}

    async def test_wall_time_during_a_policy_action_is_a_limit(self):
        async def think(*_):
            await asyncio.sleep(30)

        episode = await collected(think, limits={"wall_time_s": 0.05})
        assert (reason(episode), len(episode), failure(episode)) == ("wall_time_limit", 0, None)

    async def test_resource_interrupted_in_a_call_has_no_final_state(self):
        episode = await collected([call(), call("slow")], resource_type=COUNTER, limits={"wall_time_s": 0.1})
        assert len(episode) == 2
        assert "limits.wall_time_s" in tool_answers(episode)[1]
        assert episode.custom_data.get("final_state") is None

    async def test_stop_phrase_is_searched_in_the_raw_output(self):
        def act(*_):
            return PolicyOutput(call(), "thinking … FINISHED")

        assert reason(await collected(act, resource_type=COUNTER, stop_phrases=["FINISHED"])) == "stop_phrase"

    @pytest.mark.parametrize("steps", [0, -1])
    def test_step_limit_must_be_positive(self, steps):
        with pytest.raises(ConfigError, match=f"max_episode_steps must be at least 1, got {steps}"):
            RLRolloutWorker(task_of(), ScriptedPolicy([]), max_episode_steps=steps)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("tools_module_path", "tools.py"),
            ("user", {"type": "scripted", "replies": ["Hello."]}),
            ("resource_server", {"start_command": "serve", "health_check_url": "http://127.0.0.1:1/health"}),
        ],
    )
    def test_unloaded_parts_of_a_task_are_an_error(self, key, value):
        with pytest.raises(ConfigError, match=f"task 'counting': {key} is set, .*Task.from_file"):
            RLRolloutWorker(task_of(name="counting", resource_type=COUNTER, **{key: value}), ScriptedPolicy([]))

    @pytest.mark.parametrize(
        "config",
        [{"resource_server": {}}, {"resources": [{"type": "a"}, {"type": "b", "config": {"resource_server": {}}}]}],
    )
    def test_server_in_the_resource_config_counts_as_loaded(self, config):
        server = {"start_command": "serve", "health_check_url": "http://127.0.0.1:1/health"}
        task = task_of(resource_type=COUNTER, resource_server=server, base_resource_config=config)
        assert RLRolloutWorker(task, ScriptedPolicy([])).task_definition is task

    def test_loaded_parts_are_accepted(self):
        task = task_of(tools_module_path="tools.py", user={"type": "scripted"})
        tools, user = ToolRegistry("t"), ScriptedUser(["Hello."])
        assert RLRolloutWorker(task, ScriptedPolicy([]), tools=tools, user=user).tools is tools

    async def test_step_limit_of_the_worker_overrides_the_task(self):
        worker = RLRolloutWorker(task_of(resource_type=COUNTER), ScriptedPolicy([call()] * 9), max_episode_steps=3)
        assert len(await worker.collect_episode()) == 3


class TestTextActions:
    async def test_text_ends_a_task_without_tools(self):
        assert reason(await collected([text("a"), text("b")])) == "answered"

    async def test_nudge_follows_a_text_if_there_are_tools(self):
        episode = await collected([text("hm"), {"type": "terminate"}], resource_type=COUNTER, nudge="Go on.")
        assert [m.text for m in episode.messages] == ["the count is 0", "hm", "Go on.", ""]
        assert episode.get_observations(1) == "Go on."

    async def test_tools_of_every_origin_prevent_the_end_by_text(self):
        world, registry = Counter(), ToolRegistry("own")
        for origin in ({"environment": world}, {"tools": registry}, {"terminate_tool": "bye"}):
            assert reason(await collected([text("a"), {"type": "terminate"}], **origin)) == "terminate_action"
        await world.close()

    async def test_on_text_overrides_the_default(self):
        assert reason(await collected([text("a")], resource_type=COUNTER, on_text="end")) == "answered"
        assert len(await collected([text("a"), text("b")], on_text="continue", max_episode_steps=2)) == 2

    async def test_no_nudge_follows_the_last_action(self):
        episode = await collected([text("a"), text("b")], on_text="continue", max_episode_steps=2)
        assert episode.messages[-1].text == "b"


class TestRecord:
    async def test_run_episode_gives_steps_messages_and_ground_truth(self):
        worker = worker_of(
            [call(), call("win")], resource_type=COUNTER, ground_truth={"total": 1}, initial_user_prompt="Play."
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
        steps, _, _ = await worker_of([call("crash")], resource_type=COUNTER).run_episode()
        assert steps[-1].step_info["failure"]["class"] == "crash"
        assert "the world broke" in caplog.text

    async def test_missing_environment_reward_is_none(self):
        steps, _, _ = await worker_of([call("cut")], resource_type=COUNTER).run_episode()
        assert steps[0].step_info["environment_reward"] is None

    async def test_final_state_is_taken_before_the_resource_closes(self):
        episode = await collected([call(by=3), {"type": "terminate"}], resource_type=COUNTER)
        assert episode.custom_data["final_state"] == {"kind": "json", "payload": b'{"total":3}'}

    async def test_changes_of_a_cheap_state_are_recorded(self):
        actions = [{"type": "tool_call", "name": "set_value", "arguments": {"path": "a", "value": 2}}]
        config = {"initial_state": {"a": 1}}
        task = {"resource_type": "python_state", "base_resource_config": config}
        episode = await collected([*actions, {"type": "terminate"}], **task)
        changes = [{"at": "/a", "old": "1", "new": "2"}]
        assert episode.custom_data["state_changes"] == {"changes": changes, "more": 0}
        again = episode_from_record(episode_to_record(episode))
        assert again.custom_data["state_changes"] == episode.custom_data["state_changes"]

    async def test_time_in_the_policy_is_recorded_by_step(self):
        episode = await collected([call(by=3), {"type": "terminate"}], resource_type=COUNTER)
        timing = episode.custom_data["timing"]
        assert len(timing["steps_policy_s"]) == 2 and sum(timing["steps_policy_s"]) <= timing["policy_s"] + 1e-5
        assert "state_changes" not in episode.custom_data, "the resource does not declare has_cheap_state"

    async def test_tokens_are_recorded_exactly_and_returned_by_step(self):
        def act(observation, _):
            step = sum(m.role == "assistant" for m in observation)
            known = {
                "prompt_ids": list(range(3 + 2 * step)),
                "token_ids": [3 + 2 * step],
                "logprobs": [-0.5],
                "policy_version": 4,
            }
            return PolicyOutput(call(), "raw", known, 0.25)

        steps, _, _ = await worker_of(act, resource_type=COUNTER, max_episode_steps=2).run_episode()
        assert steps[1].policy_logprobs["prompt_ids"].tolist() == [0, 1, 2, 3, 4]
        assert steps[1].policy_logprobs["token_ids"].tolist() == [5]
        assert steps[1].policy_logprobs["logprobs"].tolist() == [-0.5]
        assert steps[1].policy_logprobs["policy_version"] == 4
        assert (steps[1].raw_policy_output, steps[1].policy_value_estimate) == ("raw", 0.25)

    async def test_logprobs_without_prompt_ids_are_kept(self):
        known = {"token_ids": [7, 8], "logprobs": [-0.1, -0.2], "prompt_ids": None, "usage": None}
        steps, _, _ = await worker_of(lambda *_: PolicyOutput(text("x"), "x", known)).run_episode()
        assert steps[0].policy_logprobs == {"token_ids": [7, 8], "logprobs": [-0.1, -0.2]}

    async def test_plain_four_tuple_is_accepted(self):
        episode = await collected(lambda *_: (text("4"), "raw", None, 0.5))
        assert (reason(episode), episode.messages[-1].text) == ("answered", "4")
        assert episode.get_extra_model_outputs("value_estimate") == [0.5]

    async def test_arguments_may_hold_numpy_values(self):
        import numpy as np

        episode = await collected([call(by=np.int64(2))], resource_type=COUNTER, max_episode_steps=1)
        assert episode.messages[1].tool_calls[0].function.arguments == '{"by": 2}'
        assert tool_answers(episode) == ["the count is 2"]

    async def test_debug_logs_each_step(self, caplog):
        with caplog.at_level(logging.DEBUG, "reward_kit.agent"):
            episode = await collected([call(), call("win")], resource_type=COUNTER)
        lines = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
        assert [line.split(":")[0] for line in lines] == [f"{episode.id_} step 0", f"{episode.id_} step 1"]
        assert "'add'" in lines[0]

    async def test_equal_seeds_give_equal_episodes_except_for_times(self):
        def without_clock(episode):
            state = episode.get_state()
            state["custom_data"].pop("timing")
            return {**state, "duration_s": 0}

        worker = worker_of([call(), call("win")], resource_type=COUNTER)
        first, again, other = [without_clock(await worker.collect_episode(seed=seed)) for seed in (1, 1, 2)]
        assert first == again
        assert first["id_"] != other["id_"]

    async def test_messages_are_shared_by_policies_and_steps(self):
        seen = []

        def act(observation, _):
            seen.append(observation)
            return call()

        steps, messages, _ = await worker_of(act, resource_type=COUNTER, max_episode_steps=3).run_episode()
        assert [len(history) for history in seen] == [1, 3, 5]
        assert seen[0][0] is seen[2][0] is steps[0].resulting_messages_history[0] is messages[0]

    async def test_memory_grows_linearly_with_the_steps(self):
        class Wide(PythonStateResource):
            async def step(self, action_name, action_params):
                self.count = getattr(self, "count", 0) + 1
                return StepOutcome(f"{self.count:1000}")

        resource = Wide()
        await resource.setup({})

        async def bytes_of(steps):
            worker = RLRolloutWorker(task_of(), ScriptedPolicy([call("get_state")] * steps), steps, resource)
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
        await resource.close()


def test_worker_created_outside_a_loop_serves_several_loops():
    worker = worker_of([text("a")])
    assert [reason(asyncio.run(worker.collect_episode())) for _ in range(2)] == ["answered"] * 2


class TestFirstMessages:
    async def test_initial_observation_is_appended_as_a_user_message(self):
        episode = await collected(
            [{"type": "terminate"}], resource_type=COUNTER, messages=[{"role": "system", "content": "s"}]
        )
        assert [(m.role, m.text) for m in episode.messages[:2]] == [("system", "s"), ("user", "the count is 0")]

    async def test_initial_observation_is_not_appended_if_a_template_uses_it(self):
        episode = await collected(
            [{"type": "terminate"}], resource_type=COUNTER, initial_user_prompt="Now {{ observation }}."
        )
        assert [m.text for m in episode.messages[:-1]] == ["Now the count is 0."]

    async def test_missing_row_field_is_a_recorded_failure(self):
        worker = worker_of([text("x")], initial_user_prompt="{{ question }}")
        async with worker.group(Sample("s1", {"answer": 1})) as group:
            episode = await worker.collect_episode(group)
        assert failure(episode)["class"] == "refused"
        assert "sample 's1'" in failure(episode)["message"]

    async def test_row_configuration_overrides_the_task(self):
        worker = worker_of(
            [{"type": "terminate"}], resource_type=COUNTER, base_resource_config={"greeting": "a", "size": 1}
        )
        async with worker.group(Sample("s", resource_config={"greeting": "b"}, ground_truth=7)) as group:
            episode = await worker.collect_episode(group)
        assert episode.messages[0].text == "b"
        assert episode.custom_data["ground_truth"] == 7
