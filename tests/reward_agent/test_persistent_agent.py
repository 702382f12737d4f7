"""An agent that is opened by its first call and closed with its event loop or on demand."""

from __future__ import annotations

import asyncio

import pytest

from reward_kit.errors import RewardError
from reward_kit.reward_agent.agent import AsyncRewardAgent, PersistentAgent
from tests.reward_agent.held_scorer import HeldScorer, requests, scored
from tests.reward_agent.virtual_time import settled


class RecordingScorer(HeldScorer):
    """A scorer that records when it was opened and closed, and answers at once."""

    def __init__(self):
        super().__init__()
        self.events = []

    async def __aenter__(self):
        self.events.append("opened")
        return self

    async def __aexit__(self, *_):
        self.events.append("closed")

    async def score(self, request):
        return scored(request.rollout_id, 1.0)


def one(name):
    return requests(name)[0]


def test_agent_is_opened_once_per_event_loop_and_closed_with_the_loop():
    doors = RecordingScorer()
    kept = PersistentAgent(lambda: AsyncRewardAgent(doors))

    async def several():
        return [found.score for found in await asyncio.gather(*(kept.score(one(name)) for name in "abc"))]

    assert asyncio.run(several()) == [1.0] * 3
    assert doors.events == ["opened", "closed"]
    assert asyncio.run(several()) == [1.0] * 3
    assert doors.events == ["opened", "closed"] * 2


async def test_closed_agent_is_reopened_by_the_next_call():
    doors = RecordingScorer()
    kept = PersistentAgent(lambda: AsyncRewardAgent(doors))
    await kept.close()  # nothing is open
    await kept.score(one("a"))
    await kept.close()
    await kept.close()
    assert doors.events == ["opened", "closed"]
    await kept.score(one("b"))
    await kept.close()
    assert doors.events == ["opened", "closed"] * 2


async def test_opening_error_reaches_all_callers_and_opening_is_retried():
    doors, tries = RecordingScorer(), []

    def made():
        tries.append(None)
        if len(tries) == 1:
            raise RewardError("not yet")
        return AsyncRewardAgent(doors)

    kept = PersistentAgent(made)
    errors = await asyncio.gather(*(kept.score(one(name)) for name in "ab"), return_exceptions=True)
    assert [str(error) for error in errors] == ["not yet"] * 2 and len(tries) == 1
    assert (await kept.score(one("c"))).score == 1.0
    await kept.close()


async def test_cancelled_caller_leaves_no_call():
    held = HeldScorer()
    kept = PersistentAgent(lambda: AsyncRewardAgent(held))
    asking, other = (asyncio.create_task(kept.score(one(name))) for name in "ab")
    while len(held.calls) < 2:
        await settled()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settled()
    assert (held.cancelled, list(held.calls)) == (["a"], ["b"])
    held.answer("b")
    assert (await other).score == 1.0
    await kept.close()


def test_agent_of_an_abruptly_closed_loop_is_forgotten():
    doors = RecordingScorer()
    kept = PersistentAgent(lambda: AsyncRewardAgent(doors))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(kept.score(one("a")))
    left = asyncio.all_tasks(loop)
    loop.close()
    asyncio.run(kept.score(one("b")))
    assert not kept._held
    assert doors.events == ["opened", "opened", "closed"]
    assert left, "its tasks were not ended"
    for task in left:
        task._log_destroy_pending = False
