"""Times of scores in `scores.jsonl`, in seconds since the run began."""

from __future__ import annotations

import asyncio
import datetime

from reward_kit.providers.request_queue import RetryPolicy
from reward_kit.reward_agent import AsyncRewardAgent, Retries, ScoreCache
from reward_kit.runs.scoring_units import RunClock
from tests.reward_agent.held_scorer import HeldScorer, requests
from tests.reward_agent.test_agent_scheduling import virtual
from tests.reward_agent.virtual_time import settled


def clock(ago_s: float = 0.0) -> RunClock:
    """Return the clock of a run that began this long ago."""
    return RunClock(datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago_s))


@virtual
async def test_score_times_are_submission_attempts_and_completion(self=None):
    held, counted = HeldScorer(), clock()
    async with AsyncRewardAgent(held, max_concurrency=1) as agent:
        await asyncio.sleep(1.0)
        await agent.submit(requests("a", "b"))
        await asyncio.sleep(2.0)
        held.answer("a")
        await asyncio.sleep(4.0)
        held.answer("b")
        times = {}
        for _ in range(2):
            chunk = await agent.get_group()
            times[chunk.extra_infos[0].rollout_id] = counted.timing(chunk.ticket, chunk.data_idxs[0])
    found = {name: {key: _rounded(value) for key, value in told.items()} for name, told in times.items()}
    assert found["a"] == {"submitted_s": 1.0, "attempts": [[1.0, 3.0]], "done_s": 7.0}
    assert found["b"] == {"submitted_s": 1.0, "attempts": [[3.0, 7.0]], "done_s": 7.0}


def _rounded(value):
    """Drop the microseconds that pass in real time."""
    return [_rounded(item) for item in value] if isinstance(value, list) else round(value, 2)


@virtual
async def test_each_attempt_has_begin_and_end_times(self=None):
    held = HeldScorer()
    async with AsyncRewardAgent(held, retries=Retries(RetryPolicy(max_attempts=2), seed=1)) as agent:
        ticket = await agent.submit(requests("a"))
        await asyncio.sleep(5.0)
        held.fail("a", "provider_error")
        await asyncio.sleep(60.0)
        held.answer("a")
        await agent.get(1, ticket=ticket)
    (first, second) = clock().timing(ticket, 0)["attempts"]
    assert round(first[1] - first[0], 3) == 5.0 and first[1] < second[0] < second[1]


@virtual
async def test_cached_score_has_no_attempts(self=None):
    held = HeldScorer()
    async with AsyncRewardAgent(held, cache=ScoreCache()) as agent:
        first = await agent.submit(requests("a"))
        await settled()
        held.answer("a")
        await agent.get(1, ticket=first)
        again = await agent.submit(requests("a"))
        await agent.get(1, ticket=again)
    assert (len(first.spans[0]), len(again.spans[0])) == (1, 0)


@virtual
async def test_scores_of_a_group_share_the_times_of_its_call(self=None):
    held = HeldScorer("batch")
    async with AsyncRewardAgent(held) as agent:
        ticket = await agent.submit(requests("a", "b"), group_size=2)
        for name in "ab":
            await asyncio.sleep(1.0)
            held.answer(name)
        await agent.get(2, ticket=ticket)
    assert [list(spans) for spans in ticket.spans] == [[(0.0, 2.0)]] * 2


@virtual
async def test_times_of_a_resumed_run_count_from_its_first_start(self=None):
    async with AsyncRewardAgent(HeldScorer()) as agent:
        ticket = await agent.submit(requests("a"))
        told = clock(ago_s=3600.0).timing(ticket, 0)
        ticket.cancel()
    assert 3600.0 <= told["submitted_s"] <= told["done_s"] < 3660.0
