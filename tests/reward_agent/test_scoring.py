"""Scoring of a single request: arguments, results, failures and isolation."""

import asyncio
import threading

import pytest

from reward_kit import Task
from reward_kit.environments.base import StateSnapshot
from reward_kit.errors import ProviderError
from reward_kit.models import Message
from reward_kit.providers.faults import TransientError
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest, score_one
from reward_kit.typed_interface import reward_function, reward_spec
from tests.agent.resources import COUNTER, call, calls, task_of, worker_of
from tests.reward_agent.held_scorer import HeldScorer, requests

MESSAGES = [
    Message(role="user", content=[{"type": "text", "text": "2+2?"}], origin={"file": 1}),
    Message(role="assistant", content=None, tool_calls=[{"id": "1", "function": {"name": "f"}}]),
    Message(role="assistant", content="4", function_call={"name": "g"}),
]


def request(**fields):
    return ScoringRequest("r1", MESSAGES, **{"ground_truth": ["4"], "assistant_turns": [1, 2], **fields})


async def score(function, deadline_s=None, **fields):
    return await score_one(reward_spec(function), request(**fields), deadline_s)


async def episode_of(*actions, **fields):
    return await worker_of(list(actions), resource_type=COUNTER, **fields).collect_episode()


class TestCalls:
    async def test_sync_function_runs_in_a_thread(self):
        here = threading.get_ident()
        scored = await score(lambda messages: {"score": float(threading.get_ident() != here)})
        assert (scored.score, scored.failure, scored.rollout_id) == (1.0, None, "r1")

    async def test_async_function_runs_in_the_event_loop(self):
        async def reward(messages):
            await asyncio.sleep(0)
            return {"score": 0.5}

        scored = await score(reward)
        assert scored.score == 0.5
        assert scored.duration_s >= 0.0

    async def test_only_named_parameters_are_passed(self):
        def reward(messages, rollout_id, assistant_turns):
            return {"score": 1.0, "reason": f"{rollout_id} {assistant_turns}"}

        assert (await score(reward)).result.reason == "r1 [1, 2]"

    async def test_function_with_kwargs_receives_every_field(self):
        def reward(messages, **kwargs):
            return {"score": 1.0, "reason": " ".join(sorted(kwargs))}

        assert (await score(reward, extra={"goal_description": "g"})).result.reason.split() == [
            "assistant_turns",
            "environment_return",
            "goal_description",
            "ground_truth",
            "rollout_id",
            "sample",
            "state",
            "step_data",
            "stop_reason",
        ]

    async def test_final_state_is_opened_only_if_named(self):
        broken = StateSnapshot("json", b"{")
        assert (await score(lambda messages: {"score": 1.0}, final_state=broken)).score == 1.0
        assert (
            await score(lambda messages, state: {"score": 1.0}, final_state=broken)
        ).failure.where == "EnvironmentFailure"
        state = StateSnapshot.from_json({"total": 3})
        assert (await score(lambda messages, state: {"score": state["total"]}, final_state=state)).score == 3.0

    async def test_a_batch_reward_is_called_with_a_batch_of_one(self):
        @reward_function(mode="batch")
        def reward(rollouts_messages: list[list[dict]], ground_truths):
            assert len(rollouts_messages) == len(ground_truths) == 1
            return [{"score": float(rollouts_messages[0][-1]["content"] == ground_truths[0][0])}]

        assert (await score(reward)).score == 1.0

    async def test_batch_reward_with_wrong_result_count_is_unscored(self):
        reward = reward_function(mode="batch")(lambda rollouts_messages: [{"score": 1.0}] * 2)
        scored = await score(reward)
        assert (scored.score, scored.failure.failure_class) == (None, "invalid_result")
        assert "2 results for 1 rollouts" in scored.failure.message


class TestUnscored:
    """Unscored is None with a failure class, and never zero."""

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "0.5", None])
    async def test_non_finite_score_error_names_field_and_value(self, value):
        scored = await score(lambda messages: {"score": value})
        assert (scored.score, scored.failure.failure_class) == (None, "invalid_result")
        assert "score: " in scored.failure.message
        assert f"(got {value!r})" in scored.failure.message

    @pytest.mark.parametrize(
        ("result", "why"),
        [
            ({"score": 0.0, "error": "no key"}, "no key"),
            ({"score": 1.0, "is_score_valid": False, "reason": "unreadable"}, "unreadable"),
            ({"score": 1.0, "is_score_valid": False}, "is_score_valid is False"),
        ],
    )
    async def test_declared_error_leaves_the_rollout_unscored_and_keeps_the_result(self, result, why):
        scored = await score(lambda messages: result)
        assert (scored.score, scored.failure.failure_class) == (None, "invalid_result")
        assert scored.failure.message.endswith(f"returned no valid score: {why}")
        assert scored.result.score == result["score"]

    async def test_traceback_begins_with_user_frames(self):
        def helper():
            raise ValueError("bad row")

        def reward(messages):
            return helper()

        failure = (await score(reward)).failure
        assert (failure.failure_class, failure.message) == ("crash", "reward 'reward': ValueError: bad row")
        lines = failure.traceback.splitlines()
        assert lines[0] == "ValueError: bad row"
        assert lines[1].startswith(f"  {__file__}:")
        assert lines[1].endswith("in helper")
        assert lines[3].endswith("in reward")
        assert len(lines) <= 15

    @pytest.mark.parametrize("error", [SystemExit(0), StopIteration(), RecursionError()])
    async def test_escaping_exceptions_are_crashes_of_the_reward(self, error):
        def reward(messages):
            raise error

        assert (await score(reward)).failure.failure_class == "crash"

    async def test_reward_kit_errors_keep_their_failure_class(self):
        async def reward(messages):
            raise ProviderError("429")

        assert (await score(reward)).failure.failure_class == "provider_error"

    async def test_async_call_beyond_the_deadline_is_a_timeout(self):
        async def reward(messages):
            await asyncio.sleep(30)

        scored = await score(reward, deadline_s=0.02)
        assert (scored.score, scored.failure.failure_class) == (None, "timeout")

    async def test_sync_call_beyond_the_deadline_is_a_timeout(self):
        release = threading.Event()

        def reward(messages):
            release.wait(30)

        scored = await score(reward, deadline_s=0.02)
        release.set()
        assert scored.failure.failure_class == "timeout"

    async def test_setup_beyond_the_deadline_is_a_timeout(self):
        release = threading.Event()

        class Slow:
            def setup(self):
                release.wait(30)

            def score(self, messages):
                return {"score": 1.0}

        scored = await score(Slow, deadline_s=0.02)
        release.set()
        assert (scored.score, scored.failure.failure_class) == (None, "timeout")

    async def test_close_is_not_limited_by_the_deadline(self):
        ended = threading.Event()

        class Lasting:
            def score(self, messages):
                return {"score": 1.0}

            def close(self):
                assert not ended.wait(0.3)
                ended.set()

        assert (await score(Lasting, deadline_s=0.2)).score == 1.0
        assert ended.is_set()

    async def test_cancellation_is_not_a_failure(self):
        async def reward(messages):
            await asyncio.sleep(30)

        running = asyncio.create_task(score(reward))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


class TestIsolationFromTheEpisode:
    async def test_reward_changing_its_arguments_does_not_change_the_episode(self):
        def reward(messages, ground_truth, sample, step_data, criteria):
            messages[0].content[0]["text"] = "changed"
            messages[0].origin["file"] = 2
            messages[1].tool_calls[0].function.name = "changed"
            messages[2].function_call.name = "changed"
            messages[2].content = "changed"
            messages.clear()
            ground_truth.append("changed")
            sample["rows"].append("changed")
            criteria["x"].append("changed")
            for step in step_data:
                step.step_info["tools"][0]["name"] = "changed"
                step.resulting_messages_history[0].content = "changed"
                step.action_taken["name"] = "changed"
            return {"score": 1.0}

        episode = await episode_of(call(), max_episode_steps=1)
        before = episode.get_state()
        given = {"ground_truth": ["4"], "sample": {"rows": [1]}, "extra": {"criteria": {"x": []}}}
        messages = [message.model_copy(deep=True) for message in MESSAGES]
        scored = await score(reward, episode=episode, **given)
        assert (scored.score, scored.failure) == (1.0, None)
        assert messages == MESSAGES
        assert given == {"ground_truth": ["4"], "sample": {"rows": [1]}, "extra": {"criteria": {"x": []}}}
        assert episode.get_state() == before


class TestRequestOfAnEpisode:
    async def test_request_contains_the_facts_of_the_episode(self):
        criteria = {"final_state_query": "q"}
        task = task_of(resource_type=COUNTER, goal_description="win", evaluation_criteria=criteria, ground_truth=6)
        worker = worker_of([calls(("add", {}), ("add", {})), call("win")], resource_type=COUNTER, ground_truth=6)
        episode = await worker.collect_episode()

        def reward(
            messages,
            ground_truth,
            assistant_turns,
            environment_return,
            stop_reason,
            state,
            step_data,
            goal_description,
            evaluation_criteria,
        ):
            assert [messages[turn].role for turn in assistant_turns] == ["assistant", "assistant"]
            assert (ground_truth, environment_return, stop_reason) == (6, 7.0, "environment_terminated")
            assert state == {"total": 2}
            assert [step.action_taken["type"] for step in step_data] == ["tool_calls", "tool_call"]
            assert (goal_description, evaluation_criteria["final_state_query"]) == ("win", "q")
            return {"score": 1.0}

        scored = await score_one(reward_spec(reward), ScoringRequest.from_episode(episode, task))
        assert (scored.failure, scored.score, scored.rollout_id) == (None, 1.0, episode.id_)

    async def test_request_accepts_a_task_object(self):
        task = Task("count", goal_description="win", initial_user_prompt="Count.")
        request = ScoringRequest.from_episode(await episode_of(call("win")), task)
        assert request.extra["goal_description"] == "win"

    async def test_episode_without_environment_rewards_has_no_return(self):
        assert ScoringRequest.from_episode(await episode_of(call("cut"))).environment_return is None
        assert ScoringRequest.from_episode(await episode_of(call(by=0), call("cut"))).environment_return == 0.0

    async def test_database_is_open_during_the_reward_and_closed_afterwards(self):
        import sqlite3

        connection = sqlite3.connect(":memory:")
        connection.execute("CREATE TABLE t (x)")
        payload = connection.serialize()
        connection.close()
        seen = []

        def reward(messages, state):
            seen.append(state)
            return {"score": float(state.tables() == ["t"])}

        assert (await score(reward, final_state=StateSnapshot("sqlite", payload))).score == 1.0
        with pytest.raises(sqlite3.ProgrammingError):
            seen[0]._connection.execute("SELECT 1")

    @pytest.mark.parametrize("is_given_up", [True, False])
    async def test_database_stays_open_for_an_abandoned_call_but_not_for_a_failed_call(self, is_given_up):
        import sqlite3

        connection = sqlite3.connect(":memory:")
        connection.execute("CREATE TABLE t (x)")
        payload = connection.serialize()
        connection.close()
        release, seen, after = threading.Event(), [], threading.Event()

        def reward(messages, state):
            seen.append(state)
            if not is_given_up:
                raise TimeoutError("its own")
            release.wait(30)
            seen.append(state.tables())
            after.set()

        scored = await score(reward, deadline_s=0.2, final_state=StateSnapshot("sqlite", payload))
        assert scored.failure.failure_class == "timeout"
        release.set()
        if is_given_up:
            assert await asyncio.to_thread(after.wait, 30)
            assert seen[1] == ["t"]
            seen[0].close()
        else:
            with pytest.raises(sqlite3.ProgrammingError):
                seen[0]._connection.execute("SELECT 1")


class TestEndpointFailures:
    async def test_transient_error_of_a_user_client_is_a_provider_error_with_retry_after(self):
        def judged(messages):
            raise TransientError("status 429", 3.0, 429)

        def gave_up(messages):
            try:
                judged(messages)
            except TransientError as error:
                raise RuntimeError("no grade") from error

        for reward in (judged, gave_up):
            found = await score(reward)
            assert (found.failure.failure_class, found.retry_after_s) == ("provider_error", 3.0)

    async def test_transient_error_of_a_scorer_is_a_provider_error_with_retry_after(self):
        async with AsyncRewardAgent(held := HeldScorer()) as agent:
            await agent.submit(requests("a", "b"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held.raise_in("a", TransientError("status 503", 7.0, 503))
            held.raise_in("b", ValueError("no grade"))
            limited, mistaken = (await agent.get(2)).extra_infos
        assert (limited.failure.failure_class, limited.retry_after_s) == ("provider_error", 7.0)
        assert (mistaken.failure.failure_class, mistaken.retry_after_s) == ("crash", None)
