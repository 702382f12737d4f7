"""Test that failures are recorded and that resources and sessions are closed."""

import asyncio
import copy
import inspect

import anyio
import anyio.lowlevel
import pytest

from reward_kit.agent.policy_interface import AgentPolicy, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.errors import ProviderError
from tests.agent.resources import (
    COUNTER,
    Counter,
    call,
    collected,
    failure,
    reason,
    task_of,
    text,
    worker_of,
)


class TestFailures:
    async def test_resource_failure_is_recorded_and_the_action_kept(self):
        episode = await collected([call(), call("crash")], resource_type=COUNTER)
        assert failure(episode)["where"] == "EnvironmentFailure"
        assert failure(episode)["message"] == "Counter in 'crash': ZeroDivisionError: the world broke"
        assert failure(episode)["traceback"].splitlines()[1].startswith(f"  {inspect.getfile(Counter)}")
        assert episode.get_actions() == [call(), call("crash")]
        assert [m.role for m in episode.messages][-2:] == ["assistant", "tool"]
        assert len(episode) == 2

    @pytest.mark.parametrize(
        ("observation", "reward"), [("x", float("nan")), ("x", float("inf")), ("x", "much"), ("odd keys", 1.0)]
    )
    async def test_invalid_step_outcome_is_recorded_and_the_action_kept(self, observation, reward):
        episode = await collected([call("value", observation=observation, reward=reward)], resource_type=COUNTER)
        assert (failure(episode)["where"], len(episode)) == ("EnvironmentFailure", 1)
        assert episode.get_return() == 0.0

    async def test_outcome_of_another_type_is_named(self):
        episode = await collected([call("bad")], resource_type=COUNTER)
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
    async def test_invalid_policy_output_is_recorded_before_any_step(self, garbage):
        episode = await collected(lambda *_: garbage, resource_type=COUNTER)
        assert (reason(episode), failure(episode)["where"], len(episode)) == ("error", "PolicyError", 0)

    async def test_exception_in_a_policy_is_recorded_with_its_frame(self):
        def act(*_):
            raise KeyError("weights")

        episode = await collected(act)
        assert failure(episode)["message"] == "ScriptedPolicy: KeyError: 'weights'"
        assert failure(episode)["traceback"].splitlines()[1].startswith(f"  {__file__}")

    async def test_provider_error_keeps_its_class(self):
        def act(*_):
            raise ProviderError("429")

        assert failure(await collected(act))["class"] == "provider_error"

    async def test_slow_policy_is_a_timeout(self):
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
    async def test_failing_resource_method_is_recorded_and_everything_closed(self, method, monkeypatch):
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

    async def test_resource_that_fails_to_close_is_only_logged(self, caplog, monkeypatch):
        class Sticky(Counter):
            async def close(self):
                await super().close()
                raise RuntimeError("sticky")

        monkeypatch.setitem(globals(), "Sticky", Sticky)
        episode = await collected([{"type": "terminate"}], resource_type=f"{__name__}:Sticky")
        assert (reason(episode), failure(episode)) == ("terminate_action", None)
        # The group's own world and the episode's.
        assert [record.message for record in caplog.records] == ["close of Sticky: RuntimeError: sticky"] * 2

    async def test_unknown_resource_type_is_recorded(self):
        episode = await collected([call()], resource_type="gymnasum")
        assert "unknown resource 'gymnasum'; did you mean 'gymnasium'?" in failure(episode)["message"]


class Session(AgentPolicy):
    """A policy that counts its sessions; `broken` names the method that raises."""

    def __init__(self, act=None, broken=None):
        self.act, self.broken = act, broken
        self.opened, self.closed = [], []

    async def open(self, context):
        self.fail("open")
        self.opened.append(context)
        return copy.copy(self)  # the lists are shared

    async def get_action(self, observation, available_tools_specs=None):
        return await self.act() if self.act else PolicyOutput(text("x"))

    async def close(self):
        await anyio.lowlevel.checkpoint()
        self.closed.append(True)
        self.fail("close")

    def fail(self, method):
        if self.broken == method:
            raise RuntimeError(f"{method} broke")


class TestSessions:
    async def test_each_episode_opens_and_closes_one_session(self):
        policy = Session()
        worker = RLRolloutWorker(task_of(resource_type=COUNTER, on_text="end"), policy)
        episode = await worker.collect_episode()
        (context,) = policy.opened
        assert context.rollout_id == episode.id_
        assert context.seed == episode.custom_data["seeds"]["policy"]
        assert isinstance(context.resource, Counter)
        assert len(policy.closed) == 1

    async def test_session_that_fails_to_open_is_recorded(self):
        episode = await RLRolloutWorker(task_of(resource_type=COUNTER), Session(broken="open")).collect_episode()
        assert failure(episode)["message"] == "open of Session: RuntimeError: open broke"

    async def test_session_that_fails_to_close_is_only_logged(self, caplog):
        task = task_of(resource_type=COUNTER, on_text="end")
        episode = await RLRolloutWorker(task, Session(broken="close")).collect_episode()
        assert (reason(episode), failure(episode)) == ("answered", None)
        assert episode.custom_data["final_state"]["payload"] == b'{"total":0}'
        assert caplog.records[0].message == "close of a session of Session: RuntimeError: close broke"

    @pytest.mark.parametrize("broken", [None, "close"])
    async def test_cancellation_closes_resource_and_session_and_propagates(self, broken):
        waiting = asyncio.Event()

        async def act():
            waiting.set()
            await asyncio.sleep(30)

        policy = Session(act, broken)
        running = asyncio.create_task(RLRolloutWorker(task_of(resource_type=COUNTER), policy).collect_episode())
        await waiting.wait()
        assert len(Counter.open_instances) == 2
        before = asyncio.all_tasks()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(policy.closed) == 1
        assert not Counter.open_instances
        assert asyncio.all_tasks() <= before

    async def test_cancelled_scope_waits_for_slow_closing(self, monkeypatch):
        class Lingering(Counter):
            async def close(self):
                await anyio.lowlevel.checkpoint()
                await super().close()

        monkeypatch.setitem(globals(), "Lingering", Lingering)
        waiting = asyncio.Event()

        async def act():
            waiting.set()
            await asyncio.sleep(30)

        policy = Session(act)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(RLRolloutWorker(task_of(resource_type=f"{__name__}:Lingering"), policy).collect_episode)
            await waiting.wait()
            tasks.cancel_scope.cancel()
        assert len(policy.closed) == 1
        assert not Counter.open_instances


class TestGivenEnvironment:
    async def test_given_environment_is_forked_and_not_closed(self):
        resource = Counter()
        worker = worker_of([call(by=2), {"type": "terminate"}], environment=resource)
        episode = await worker.collect_episode()
        assert episode.custom_data["start"]["verified"] is True
        assert resource.total == 0
        assert Counter.open_instances == {resource}
        await resource.close()


@pytest.mark.parametrize(
    "method", ["setup", "reset", "fork", "state_key", "get_observation", "get_tools_spec", "final_state"]
)
async def test_unresponsive_resource_method_is_a_timeout(method, monkeypatch):
    async def hang(self, *_):
        await anyio.sleep_forever()

    monkeypatch.setattr(Counter, method, hang)
    episode = await collected([text("done")], resource_type=COUNTER, on_text="end", limits={"environment_time_s": 0.02})
    assert reason(episode) == "error"
    assert failure(episode)["class"] == "timeout"
    assert "limits.environment_time_s" in failure(episode)["message"]
    assert not Counter.open_instances


async def test_resource_that_never_waits_has_no_time_limit(monkeypatch):
    async def linger(self):
        await anyio.sleep(0.06)
        return {}

    monkeypatch.setattr(Counter, "get_observation", linger)
    asked = {"resource_type": COUNTER, "on_text": "end", "limits": {"environment_time_s": 0.02}}
    assert failure(await collected([text("done")], **asked))["class"] == "timeout"
    monkeypatch.setattr(Counter, "never_waits", True)
    assert failure(await collected([text("done")], **asked)) is None
