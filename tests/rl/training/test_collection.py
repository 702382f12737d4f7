"""Order and concurrency of collected episodes, also in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.environments.base import ToolSpec
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.rl.training.rollouts import Collector, LockstepBarrier

TASK = TaskDefinitionModel(name="say", initial_user_prompt="Say something.")
ASKED = [(Sample(name), number) for number, name in enumerate("abcd")]


class CountingPolicy(AgentPolicy):
    """Sessions that open slowly one after another, with their highest number; one name cannot be opened."""

    pad_token_id = 0
    module = None

    def __init__(self, breaks: str = "") -> None:
        self.open_now = self.most_open = 0
        self.open_when_acting: list[int] = []
        self._breaks, self._door = breaks, anyio.Lock()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        async with self._door:
            await anyio.lowlevel.checkpoint()
        if self._breaks and self._breaks in context.rollout_id:
            raise RuntimeError("out of memory")
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return Says(self)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        raise AssertionError("act through a session")


class Says(AgentPolicy):
    def __init__(self, policy: CountingPolicy) -> None:
        self._policy = policy

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        self._policy.open_when_acting.append(self._policy.open_now)
        for _ in range(
            200
        ):  # turns of the loop and no time: longer than all others take to open, however busy the machine
            await anyio.lowlevel.checkpoint()
        return PolicyOutput({"type": "text", "content": "something"})

    async def close(self) -> None:
        self._policy.open_now -= 1


async def collected(policy: AgentPolicy, max_concurrency: int | None = None) -> list[list[str]]:
    with anyio.fail_after(20):
        groups = await Collector(2, max_concurrency).collect(RLRolloutWorker(TASK, policy), ASKED)
    return [[episode.custom_data["sample_id"] for episode in group] for group in groups]


async def test_groups_are_returned_in_request_order() -> None:
    assert await collected(CountingPolicy()) == [[name] * 2 for name in "abcd"]


@pytest.mark.parametrize(("limit", "most"), [(None, 8), (3, 3), (1, 1)])
async def test_no_more_episodes_are_in_flight_than_allowed(limit: int | None, most: int) -> None:
    policy = CountingPolicy()
    await collected(policy, limit)
    assert policy.most_open == most


async def test_callback_is_called_when_each_group_is_finished() -> None:
    told: list[int] = []

    async def finished(place: int, episodes: object) -> None:
        told.append(place)

    await Collector(2, 2).collect(RLRolloutWorker(TASK, CountingPolicy()), ASKED, finished)
    assert told == [0, 1, 2, 3]


class TestLockstep:
    async def test_no_episode_acts_before_all_are_open(self) -> None:
        policy = CountingPolicy()
        assert await collected(LockstepBarrier(policy)) == [[name] * 2 for name in "abcd"]
        assert policy.open_when_acting[0] == 8 and len(policy.open_when_acting) == 8

    @pytest.mark.parametrize(("limit", "wave"), [(4, 4), (5, 4), (2, 2), (1, 2)])
    async def test_limited_concurrency_runs_waves_of_whole_groups(self, limit: int, wave: int) -> None:
        policy = CountingPolicy()
        await collected(LockstepBarrier(policy), limit)
        assert policy.most_open == wave
        assert policy.open_when_acting[0::wave] == [wave] * (8 // wave)

    async def test_episode_that_fails_to_open_does_not_block_others(self) -> None:
        policy = CountingPolicy(breaks="b-")
        await collected(LockstepBarrier(policy), 4)
        assert policy.open_when_acting[0] == 2 and len(policy.open_when_acting) == 6

    async def test_session_cancelled_while_it_waits_is_counted_once(self) -> None:
        policy = CountingPolicy()
        barrier, is_waiting, opened = LockstepBarrier(policy), anyio.CancelScope(), list[str]()
        barrier.expect(3)

        async def open_session(name: str, scope: anyio.CancelScope) -> None:
            with scope:
                await barrier.open(EpisodeContext(name, 0))
                opened.append(name)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(open_session, "a", is_waiting)
                await anyio.wait_all_tasks_blocked()
                is_waiting.cancel()
                await anyio.wait_all_tasks_blocked()
                barrier.give_up()
                tasks.start_soon(open_session, "b", anyio.CancelScope())
                await anyio.wait_all_tasks_blocked()
                assert policy.open_now == 1 and opened == [], "the third session is not open yet"
                tasks.start_soon(open_session, "c", anyio.CancelScope())
        assert sorted(opened) == ["b", "c"]
