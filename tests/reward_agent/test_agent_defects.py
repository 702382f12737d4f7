"""Test defects of the published asynchronous reward agent (verl pull request 2854), one by one.

Time is virtual: who waits for ever raises `StuckError` at once, and what is said of seconds is exact.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from reward_kit.errors import ConfigError
from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent import AsyncRewardAgent, Retries, SyncRewardAgent
from tests.reward_agent import virtual_time
from tests.reward_agent.held_scorer import HeldScorer, requests, scored


class DelayedScorer:
    """A scorer that answers each request after the seconds in its name."""

    mode = "pointwise"

    def __init__(self):
        self.began = {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def score(self, request):
        self.began[request.rollout_id] = asyncio.get_running_loop().time()
        await asyncio.sleep(float(request.rollout_id))
        return scored(request.rollout_id, float(request.rollout_id))

    async def score_group(self, requests):
        return [await self.score(request) for request in requests]


def now():
    return asyncio.get_running_loop().time()


def test_1_rewards_and_lengths_stay_together_if_groups_finish_out_of_order():
    async def check():
        batch = [request for n in (1, 4) for request in requests(9 - n, 9.5 - n, extra={"response_length": n})]
        async with AsyncRewardAgent(DelayedScorer()) as agent:
            await agent.submit(batch, group_size=2)
            chunk = await agent.get(4)
        assert chunk.completion_ranks == [2, 3, 0, 1]
        assert (chunk.data_idxs, chunk.lengths) == ([0, 1, 2, 3], [1, 1, 4, 4])
        assert chunk.rewards == [8.0, 8.5, 5.0, 5.5]

    virtual_time.run(check())


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), asyncio.CancelledError(), TimeoutError()])
def test_2_exception_fails_its_own_request_and_releases_waiting_callers(error):
    async def check():
        held = HeldScorer()
        async with AsyncRewardAgent(held) as agent:
            await agent.submit(requests("a", "b"), group_size=2)
            await virtual_time.settled()
            held.calls["a"].set_exception(error)
            held.answer("b")
            chunk = await agent.get(2)
            assert chunk.rewards == [None, 1.0]
            assert chunk.extra_infos[0].failure.failure_class in ("crash", "timeout")
            assert chunk.incomplete_groups == [0]
            await agent.submit(requests("c"))  # and later batches are served
            await virtual_time.settled()
            held.answer("c")
            assert (await agent.get(1)).rewards == [1.0]

    virtual_time.run(check())


def test_3_an_instant_reward_takes_no_time():
    async def check():
        async with AsyncRewardAgent(DelayedScorer()) as agent:
            for _ in range(100):
                await agent.submit(requests(0))
                await agent.get(1)
        assert now() == 0.0  # no timer was waited for, so nothing polls

    virtual_time.run(check())


def test_4_slow_request_does_not_delay_other_batches():
    async def check():
        delays = DelayedScorer()
        async with AsyncRewardAgent(delays, max_concurrency=4) as agent:
            slow = await agent.submit(requests(2))
            fast = await agent.submit(requests(0.5))
            assert (await agent.get(1, ticket=fast)).rewards == [0.5]
            assert now() == 0.5
            await agent.get(1, ticket=slow)
        assert delays.began == {"2": 0.0, "0.5": 0.0}

    virtual_time.run(check())


def test_5_leftover_results_of_a_batch_are_not_returned_as_the_next_batch():
    async def check():
        async with AsyncRewardAgent(DelayedScorer()) as agent:
            assert await agent.compute_reward_pipeline(requests(*range(6)), group_size=2) == 6
            assert await agent.compute_reward_pipeline(requests(10, 11, 12, 13), group_size=2) == 4
            first = [await agent.get(4), await agent.get(2)]
            second = await agent.get(4)
        assert [chunk.data_idxs for chunk in first] == [[0, 1, 2, 3], [4, 5]]
        assert (second.data_idxs, second.rewards) == ([0, 1, 2, 3], [10.0, 11.0, 12.0, 13.0])

        async with AsyncRewardAgent(DelayedScorer()) as agent:
            await agent.submit(requests(*range(6)), group_size=2)
            await agent.submit(requests(10, 11), group_size=2)
            await agent.get(4)
            with pytest.raises(
                ConfigError, match=r"get\(4\) cannot return: 2 results of batch 1 \(6 requests\) are outstanding"
            ):
                await agent.get(4)

    virtual_time.run(check())


def test_6_chunk_that_cuts_a_group_is_rejected_unless_allowed():
    async def check():
        async with AsyncRewardAgent(DelayedScorer()) as agent:
            await agent.submit(requests(*range(6)), group_size=2)
            with pytest.raises(ConfigError, match=r"get\(3\) would split a group of 2; request 2 or 4, or set"):
                await agent.get(3)
            assert (await agent.get(3, cut_groups=True)).data_idxs == [0, 1, 2]
            assert (await agent.get(3)).data_idxs == [3, 4, 5]  # with the rest of the cut group it fits

    virtual_time.run(check())


def test_7_program_that_never_closes_its_agent_exits():
    code = """
from reward_kit.reward_agent import ScoringRequest, SyncRewardAgent
from reward_kit.typed_interface import reward_spec

async def never(messages):
    import asyncio
    await asyncio.Event().wait()

agent = SyncRewardAgent(reward_spec(never)).__enter__()
agent.submit([ScoringRequest("r", [])])
print("the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the end\n")


def test_7_leaving_the_agent_block_early_cancels_calls_and_ends_the_thread():
    held = HeldScorer()

    def fit_and_fail():
        with SyncRewardAgent(held) as agent:
            agent.submit(requests("a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit_and_fail()
    assert held.calls == {}
    assert "reward agent" not in {thread.name for thread in threading.enumerate()}


class TestDefect8:
    """No retries, deadlines, cancellation, rates or back-pressure; see also the scheduling tests."""

    def test_transient_failure_is_retried(self):
        async def check():
            held = HeldScorer()
            retries = Retries(RetryPolicy(max_attempts=2, base_s=1.0), seed=0)
            async with AsyncRewardAgent(held, retries=retries) as agent:
                await agent.submit(requests("a"))
                await virtual_time.settled()
                held.fail("a", "provider_error")
                await asyncio.sleep(1.1)
                held.answer("a")
                assert (await agent.get(1)).rewards == [1.0]
            assert held.asked == ["a", "a"]

        virtual_time.run(check())

    def test_stalled_call_is_cancelled_at_its_deadline(self):
        async def check():
            held = HeldScorer()
            async with AsyncRewardAgent(held, deadline_s=300.0) as agent:
                await agent.submit(requests("a"))
                (result,) = (await agent.get(1)).extra_infos
            assert (now(), result.failure.failure_class, held.cancelled) == (300.0, "timeout", ["a"])

        virtual_time.run(check())

    def test_submission_order_returns_slow_groups_in_turn(self):
        async def check():
            async with AsyncRewardAgent(DelayedScorer()) as agent:
                fast = await agent.submit(requests(3, 2, 1, 0))
                slow = await agent.submit(requests(3, 2, 1, 0))
                by_completion = [chunk.data_idxs async for chunk in agent.mini_batches(2, ticket=fast)]
                in_order = agent.mini_batches(2, ticket=slow, order="submission")
                chunks = [(chunk.data_idxs, chunk.completion_ranks) async for chunk in in_order]
            assert by_completion == [[2, 3], [0, 1]]
            assert chunks == [([0, 1], [3, 2]), ([2, 3], [1, 0])]

        virtual_time.run(check())
