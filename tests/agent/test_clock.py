"""Test that an episode's clock and deadlines stop while the episode waits for an endpoint."""

from __future__ import annotations

import time

import anyio
import pytest

from reward_kit.agent.limits import EpisodeClock
from reward_kit.agent.policies.openai_policy import OpenAIAgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.providers.session import ProviderSession
from tests.agent.resources import reason, task_of
from tests.chat_server import ChatServer, answer, status


async def test_waiting_does_not_count_as_episode_time() -> None:
    clock = EpisodeClock(1.0)
    with clock.deadline(1.0) as scope, clock.paused():
        await anyio.sleep(1.2)
    assert not scope.cancelled_caught and clock.waited_s >= 1.2
    assert clock.left_s is not None and 0 < clock.left_s <= 1.0


async def test_deadline_resumes_after_a_pause() -> None:
    clock = EpisodeClock()
    with anyio.fail_after(60), clock.deadline(0.1) as scope:
        with clock.paused():
            await anyio.sleep(0.2)
        await anyio.sleep_forever()
    assert scope.cancelled_caught and clock.seconds >= 0.09 and clock.left_s is None


async def test_nested_pauses_count_once() -> None:
    clock, before = EpisodeClock(), time.monotonic()
    with clock.paused(), clock.paused():
        await anyio.sleep(0.05)
    # Counted twice it would be more than all the time there was, and the episode's own time would be negative.
    assert 0.05 <= clock.waited_s <= time.monotonic() - before and clock.seconds >= 0.0


@pytest.mark.parametrize("limit", ["wall_time_s", "policy_time_s"])
async def test_retry_after_does_not_use_up_the_episode_time(limit: str) -> None:
    async with ChatServer([status(429, headers={"Retry-After": "1.7"}), answer("42")]) as server:
        policy = OpenAIAgentPolicy("m", base_url=server.base_url, traffic=ProviderSession())
        task = task_of(initial_user_prompt="?", limits={limit: 1.5})
        episode = await RLRolloutWorker(task, policy).collect_episode()
        await policy.close()
    assert reason(episode) == "answered"
    assert episode.custom_data["timing"]["waited_s"] >= 1.6
