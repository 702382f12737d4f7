"""Test that a replay repeats the recorded episode or reports the first difference."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from reward_kit.agent.policies import make_policy
from reward_kit.agent.policies.own_agent_policy import OwnAgentPolicy
from reward_kit.agent.policies.replay_policy import ReplayPolicy
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import ScriptedUser
from reward_kit.checks.episode import check_episode
from reward_kit.environments.tools import ToolRegistry
from reward_kit.episodes.record import episode_to_record
from reward_kit.errors import ConfigError, ProviderError
from reward_kit.runs.plan import RunArgs, make_policies
from reward_kit.runs.tasks import load_task
from tests.agent.resources import COUNTER, call, calls, failure, reason, task_of, text
from tests.chat_server import ChatServer, answer, tool_calls
from tests.cli.project import Project, lines

COUNT = {"resource_type": COUNTER, "initial_user_prompt": "Count.", "on_text": "end"}


class FunctionPolicy(AgentPolicy):
    """A policy whose outputs come from a function, which may call tools."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    async def open(self, context):
        session = FunctionPolicy(*self.outputs)
        session.context, session.next = context, 0
        return session

    async def get_action(self, observation, available_tools_specs=None):
        output = self.outputs[self.next]
        self.next += 1
        if isinstance(output, Exception):
            raise output
        return await output(self.context) if callable(output) else output


async def collect(policy, *, user=None, tools=None, rollouts=1, label="recorded", seed=3, samples=("s",), **fields):
    worker = RLRolloutWorker(task_of(**{**COUNT, **fields}), policy, user=user, tools=tools, policy_label=label)
    episodes = []
    for sample in samples:
        async with worker.group(Sample(sample), seed) as group:
            episodes += [await worker.collect_episode(group, index) for index in range(rollouts)]
    return episodes


def line(episode):
    record = episode_to_record(episode)
    record.pop("timing")
    if state := record["final_state"]:
        record["final_state"] = {**state, "payload": repr(state["payload"])}
    return json.dumps(record)


def written(folder: Path, *episodes, **changes) -> Path:
    """Write the episodes to a run's file, with `changes` to the lines."""
    records = [{**episode_to_record(episode), "final_state": None, **changes} for episode in episodes]
    with (folder / "episodes.jsonl").open("a") as file:
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    return folder


async def replayed(folder: Path, policy, *, before=None, now=None, **options):
    """Return a recorded episode, and its replay in a task that may have changed."""
    (first,) = await collect(policy, **(before or {}))
    replay = ReplayPolicy(written(folder, first), **options)
    (again,) = await collect(replay, **(before or {}) | (now or {}))
    return first, again


def sampled(prompt, token_ids, **facts):
    return {"prompt_ids": prompt, "token_ids": token_ids, "logprobs": [-0.25] * len(token_ids), **facts}


USAGE = {"usage": {"prompt_tokens": 5, "completion_tokens": 2, "cost": 0.01}, "finish_reason": "stop"}
THINKS = {"type": "text", "content": "thinking", "reasoning_content": "hmm"}

SCRIPTS = {
    "tools and rewards": [call(by=2), calls(("add", {"by": 1}), ("add", {})), text("done")],
    "tool errors": [call("nothing"), {"type": "tool_call", "name": "add", "arguments_text": "{"}, call("invalid")],
    "the end of the world": [call(), call("win")],
    "a world that breaks": [call(), call("crash")],
    "terminate": [call(), {"type": "terminate", "content": "bye"}],
    "tokens": FunctionPolicy(
        PolicyOutput(call(), "add", sampled([1, 2], [3], policy_version=4, **USAGE), 0.5),
        PolicyOutput(call(), None, sampled([1, 2, 3, 9], [4, 5])),
        PolicyOutput(call(), "", sampled([7], [8], segment_reason="cut"), 1),
        PolicyOutput(text("x"), "x", {"token_ids": [1], "logprobs": [-1.0], **USAGE}),
    ),
    "unknown log-probabilities": FunctionPolicy(PolicyOutput(text("x"), "x", {"prompt_ids": [1], "token_ids": [2]})),
    "a policy that breaks": FunctionPolicy(PolicyOutput(call()), ZeroDivisionError("oh")),
    "an endpoint that fails": FunctionPolicy(PolicyOutput(call()), ProviderError("503 for the fifth time")),
}


@pytest.mark.parametrize("policy", SCRIPTS.values(), ids=SCRIPTS)
async def test_replay_equals_the_recorded_episode_byte_for_byte(tmp_path: Path, policy: Any) -> None:
    script = policy if isinstance(policy, AgentPolicy) else ScriptedPolicy(policy)
    first, again = await replayed(tmp_path, script)
    assert line(again) == line(first)


async def test_simulated_user_is_replayed(tmp_path: Path) -> None:
    fields = {"user": ScriptedUser(["hi", "bye"]), "on_text": "continue", "initial_user_prompt": None}
    first, again = await replayed(tmp_path, ScriptedPolicy([THINKS, call(), text("b"), text("c")]), before=fields)
    assert reason(first) == "user_stopped" and line(again) == line(first)


async def test_each_episode_replays_its_own_record(tmp_path: Path) -> None:
    scripts = iter([[call(by=n), text(f"number {n}")] for n in range(4)])

    class Next(ScriptedPolicy):
        async def open(self, context):
            return await ScriptedPolicy(next(scripts)).open(context)

    many = {"rollouts": 2, "samples": ("a", "b")}
    first = await collect(Next([]), **many)
    replay = ReplayPolicy(written(tmp_path, *reversed(first)))
    assert [*map(line, await collect(replay, **many))] == [*map(line, first)]


async def test_episode_of_another_label_is_found_by_sample_and_position(tmp_path: Path) -> None:
    (first,) = await collect(ScriptedPolicy([call(by=4), text("done")]))
    (again,) = await collect(ReplayPolicy(written(tmp_path, first)), label="other")
    assert again.id_ != first.id_ and again.messages == first.messages


async def test_latest_attempt_is_replayed(tmp_path: Path) -> None:
    (failed,) = await collect(ScriptedPolicy([call("crash")]))
    (good,) = await collect(ScriptedPolicy([call(by=4), text("done")]))
    written(written(tmp_path, good, attempt=1), failed)
    for label in ("recorded", "other"):
        (again,) = await collect(ReplayPolicy(tmp_path), label=label)
        assert again.messages == good.messages


class TestOwnCalls:
    """Tool calls made by policies are repeated, or taken from the record."""

    @staticmethod
    async def call_and_tell(context):
        answer = await context.call_tool("add", {"by": 2})
        result = {"role": "tool", "tool_call_id": "c", "content": f"I saw: {answer.text}"}
        return PolicyOutput({**call(by=2), "id": "c", "results": [result]})

    STEPS = (
        call_and_tell,
        PolicyOutput({**text("rewritten"), "results": [], "prompt_messages": [{"role": "user", "content": "short"}]}),
        PolicyOutput({**call("outside"), "id": "d", "results": [{"role": "user", "content": "made elsewhere"}]}),
        PolicyOutput({**text("done"), "results": [], "is_final": True}),
    )

    async def test_own_calls_are_repeated(self, tmp_path):
        fields = {"on_text": "continue"}
        first, again = await replayed(tmp_path, FunctionPolicy(*self.STEPS), before=fields)
        assert (reason(first), len(first), failure(first)) == ("answered", 4, None)
        assert json.loads(line(again)) == json.loads(line(first)) and line(again) == line(first)
        assert again.custom_data["final_state"]["payload"] == first.custom_data["final_state"]["payload"]

    async def test_calls_without_reported_results_are_repeated(self, tmp_path):
        async def call_and_keep(context):
            await context.call_tool("add", {"by": 2})
            return PolicyOutput(text("thinking"))

        own = FunctionPolicy(call_and_keep, PolicyOutput(text("done")))
        first, again = await replayed(tmp_path, own, before={"on_text": "continue"})
        assert list(first.get_rewards()) == [2.0, 0.0]
        assert line(again) == line(first)
        assert check_episode(first) == check_episode(again) == []

    async def test_agent_with_its_own_loop_is_replayed(self, tmp_path):
        async def agent(task, base_url):
            """Asks twice, the second time with a prompt that it made up."""
            messages = [{"role": "system", "content": "mine"}, *task.messages]
            async with AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
                reply = await client.chat.completions.create(model="m", messages=messages, tools=task.tools)
                (made,) = reply.choices[0].message.tool_calls
                seen = await task.call_tool(made.function.name, made.function.arguments)
                summary = [{"role": "user", "content": f"I saw: {seen}"}]
                await client.chat.completions.create(model="m", messages=summary)

        async with ChatServer([tool_calls([("add", {"by": 2})]), answer("done")]) as server:
            policy = OwnAgentPolicy(agent, "m", base_url=server.base_url, api_key="x")
            first, again = await replayed(tmp_path, policy)
            await policy.close()
        assert (reason(first), len(first), first.get_rewards(0)) == ("answered", 2, 2.0)
        assert line(again) == line(first)

    async def test_custom_prompt_is_replayed(self, tmp_path):
        prompt = [{"role": "system", "content": "mine"}, {"role": "user", "content": "Count!"}]
        own = FunctionPolicy(PolicyOutput({**call(), "prompt_messages": prompt}), PolicyOutput(text("done")))
        first, again = await replayed(tmp_path, own)
        assert first.messages[0].text == "mine" and line(again) == line(first)

    async def test_changed_task_is_reported_with_a_custom_prompt(self, tmp_path):
        own = FunctionPolicy(PolicyOutput({**call(), "prompt_messages": [{"role": "user", "content": "x"}]}))
        _, again = await replayed(tmp_path, own, now={"initial_user_prompt": "Sum."})
        assert "message 0 (user) differs at .content: 'Count.' became 'Sum.'" in failure(again)["message"]

    async def test_messages_after_a_short_custom_prompt_are_compared(self, tmp_path):
        prompt = [{"role": "user", "content": "x"}]
        own = FunctionPolicy(
            PolicyOutput({**call(), "prompt_messages": prompt}), PolicyOutput(call()), PolicyOutput(text("done"))
        )
        now = {"resource_type": f"{__name__}:Louder"}
        _, again = await replayed(
            tmp_path, own, before={"messages": [{"role": "system", "content": "Be quick."}]}, now=now
        )
        assert "step 1: message 2 (tool) differs" in failure(again)["message"]

    async def test_changed_answer_to_an_own_call_is_reported(self, tmp_path, caplog):
        other = {"resource_type": f"{__name__}:Louder"}
        _, again = await replayed(tmp_path, FunctionPolicy(*self.STEPS), before={"on_text": "continue"}, now=other)
        assert (
            "add {'by': 2} returned a result that differs from the recorded result: 'THE COUNT IS 2'"
            in failure(again)["message"]
        )
        twice, fields = FunctionPolicy(self.call_and_tell, self.call_and_tell, *self.STEPS[1:]), {"on_text": "continue"}
        caplog.clear()
        _, again = await replayed(tmp_path, twice, before=fields, now=other, on_difference="continue")
        assert len(caplog.records) == 1 and (reason(again), len(again)) == ("answered", 5)


def weather_tools(answer: str) -> ToolRegistry:
    registry = ToolRegistry("weather")

    @registry.tool
    def weather() -> str:
        """Tell the weather."""
        return answer

    return registry


class TestDifferences:
    SCRIPT = (call(), call("weather"), text("done"))
    BEFORE = {"tools": weather_tools("sunny")}  # noqa: RUF012
    NOW = {"tools": weather_tools("rainy")}  # noqa: RUF012

    async def test_first_difference_fails_the_episode_and_is_reported(self, tmp_path):
        first, again = await replayed(tmp_path, ScriptedPolicy(self.SCRIPT), before=self.BEFORE, now=self.NOW)
        what = "step 2: message 5 (tool) differs at .content: 'sunny' became 'rainy'"
        assert failure(again)["message"] == f"replay of {first.id_} ({tmp_path / 'episodes.jsonl'}): {what}"
        assert (reason(again), len(again)) == ("error", 2)

    async def test_on_difference_continue_logs_the_difference_once(self, tmp_path, caplog):
        script = ScriptedPolicy([call("weather"), *self.SCRIPT])
        fields = {"before": self.BEFORE, "now": self.NOW, "on_difference": "continue"}
        with caplog.at_level(logging.WARNING, "reward_kit.agent"):
            first, again = await replayed(tmp_path, script, **fields)
        assert [record.message for record in caplog.records if "'sunny' became 'rainy'" in record.message] == [
            record.message for record in caplog.records
        ]
        assert len(caplog.records) == 1
        assert (reason(again), len(again)) == (reason(first), len(first))

    async def test_difference_after_the_last_action_is_reported(self, tmp_path):
        fields = {"before": {**self.BEFORE, "max_episode_steps": 2}, "now": self.NOW}
        _, again = await replayed(tmp_path, ScriptedPolicy(self.SCRIPT), **fields)
        assert "step 2: message 5 (tool) differs" in failure(again)["message"]
        assert (len(again), again.messages[-1].text) == (2, "rainy")

    async def test_episode_longer_than_recorded_is_reported(self, tmp_path):
        fields = {"before": {**self.BEFORE, "max_episode_steps": 2}, "now": {"max_episode_steps": 3}}
        _, again = await replayed(tmp_path, ScriptedPolicy(self.SCRIPT), **fields)
        assert (
            "recorded episode ended with max_steps after 2 actions, but this episode continues"
            in failure(again)["message"]
        )
        _, again = await replayed(tmp_path, ScriptedPolicy(self.SCRIPT), **fields, on_difference="continue")
        assert (reason(again), len(again)) == ("terminate_action", 3)

    async def test_episode_shorter_than_recorded_is_reported(self, tmp_path):
        fields = {"before": self.BEFORE, "now": {"max_episode_steps": 2}}
        _, again = await replayed(tmp_path, ScriptedPolicy(self.SCRIPT), **fields)
        assert "message 6 (assistant): 'done' is missing" in failure(again)["message"]

    async def test_new_resource_failure_is_recorded_as_environment_failure(self, tmp_path):
        now = {"resource_type": f"{__name__}:Crashing", "tools": None}
        _, again = await replayed(tmp_path, ScriptedPolicy([call(), text("x")]), before={}, now=now)
        assert failure(again)["where"] == "EnvironmentFailure"

    async def test_recorded_failure_that_no_longer_occurs_is_reported(self, tmp_path):
        before = {"resource_type": f"{__name__}:Broken", "tools": None}
        first, again = await replayed(tmp_path, ScriptedPolicy([call(), text("x")]), before=before, now=COUNT)
        assert failure(first)["where"] == "EnvironmentFailure"
        assert "ended with error after 1 actions, but this episode continues" in failure(again)["message"]


class TestRecordedRun:
    async def test_unrecorded_episode_fails(self, tmp_path):
        (first,) = await collect(ScriptedPolicy([text("done")]))
        _, second = await collect(ReplayPolicy(written(tmp_path, first)), rollouts=2)
        assert (
            f"{tmp_path / 'episodes.jsonl'} has no recorded episode for rollout 1 of sample 's'"
            in failure(second)["message"]
        )

    async def test_torn_last_line_is_ignored(self, tmp_path):
        (first,) = await collect(ScriptedPolicy([text("done")]))
        with (written(tmp_path, first) / "episodes.jsonl").open("a") as file:
            file.write('{"schema_version":1,"rollout_id":"torn')
        (again,) = await collect(ReplayPolicy(tmp_path / "episodes.jsonl"))
        assert line(again) == line(first)

    async def test_memory_does_not_grow_with_episode_length(self, tmp_path):
        (first,) = await collect(ScriptedPolicy([text("x" * 200_000)]))
        for number in range(20):
            written(tmp_path, first, rollout_id=f"r{number}")
        tracemalloc.start()
        policy = ReplayPolicy(tmp_path)
        assert len(policy._by_id) == 20
        held, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 20_000 and most < 3_000_000

    async def test_policy_option_selects_among_several_policies(self, tmp_path):
        for label in ("a", "b"):
            written(tmp_path, *await collect(ScriptedPolicy([text(f"I am {label}")]), label=label))
        (again,) = await collect(ReplayPolicy(tmp_path, policy="b"), label="b")
        assert again.messages[-1].text == "I am b"
        with pytest.raises(
            ConfigError, match=r"has episodes from multiple policies \(a, b\); set policy to one of them"
        ):
            ReplayPolicy(tmp_path)
        with pytest.raises(ConfigError, match="no episodes from policy 'c'"):
            ReplayPolicy(tmp_path, policy="c")

    def test_invalid_run_folder_is_rejected(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for path, problem in (
            (tmp_path / "empty", "is not a run; set it"),
            (tmp_path / "no.jsonl", "is not a run; set it"),
        ):
            with pytest.raises(ConfigError, match=problem):
                ReplayPolicy(path)
        (tmp_path / "episodes.jsonl").write_text('{"a": 1}\n')
        with pytest.raises(ConfigError, match=r"episodes.jsonl:1: not an episode: KeyError: 'rollout_id'"):
            ReplayPolicy(tmp_path)
        (tmp_path / "episodes.jsonl").write_text("")
        with pytest.raises(ConfigError, match="no finished episode"):
            ReplayPolicy(tmp_path)
        with pytest.raises(ConfigError, match="on_difference must be stop or continue, got 'halt'"):
            make_policy("replay", {"run": ".", "on_difference": "halt"}, tmp_path)


class TestCommandLine:
    def test_whole_run_replays_to_equal_episodes(self, tmp_path):
        project = Project(tmp_path)
        assert project.call("run", "task.yaml", "--seed", "7").returncode == 0
        first = project.run_path()
        done = project.call("run", "task.yaml", "--seed", "7", "--policy", f"replay:{first}", "--log-dir", "again")
        assert done.returncode == 0, done.stderr
        (again,) = (tmp_path / "again").iterdir()
        assert lines(again / "episodes.jsonl") == lines(first / "episodes.jsonl")

    async def test_each_policy_is_replayed_under_its_label(self, tmp_path):
        Project(tmp_path, policy=None)
        task = load_task(tmp_path / "task.yaml")
        (tmp_path / "run").mkdir()
        for label in ("b", "a"):
            written(tmp_path / "run", *await collect(ScriptedPolicy([text("x")]), label=label))
        assert [
            named.label
            for named in make_policies(task, RunArgs(task_path=task.path, policies=[f"replay:{tmp_path / 'run'}"]))
        ] == ["a", "b"]
        Project(tmp_path, policy={"type": "replay", "run": "run", "policy": "b"})
        assert [
            named.label for named in make_policies(load_task(tmp_path / "task.yaml"), RunArgs(task_path=task.path))
        ] == ["b"]
        with pytest.raises(ConfigError, match="nowhere is not a run; set it to"):
            make_policies(task, RunArgs(task_path=task.path, policies=["replay:nowhere"]))


from tests.agent.resources import Counter  # noqa: E402


class Louder(Counter):
    async def step(self, action_name, action_params):
        outcome = await super().step(action_name, action_params)
        return type(outcome)(outcome.observation.upper(), outcome.reward)


class Crashing(Counter):
    async def step(self, action_name, action_params):
        raise ZeroDivisionError("the world broke")


class Broken(Counter):
    async def state_key(self):
        if self.total:
            raise ZeroDivisionError("no key")
        return await super().state_key()
