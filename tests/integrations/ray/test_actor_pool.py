"""Test the actor pool: lost actors are replaced, and a missing actor is reported only after the wait."""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import anyio.lowlevel
import pytest

pytest.importorskip("ray", reason="runs in .integrations/ray")

import ray

from reward_kit.integrations.ray import actors
from reward_kit.integrations.ray.actors import ActorPool
from reward_kit.integrations.ray.cluster import ClusterError

pytestmark = pytest.mark.campaign


@ray.remote(num_cpus=0, max_concurrency=4)
class IdleActor:
    """An actor that does nothing until it is killed."""

    async def hold(self) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None: ...


class ActorFactory:
    """A factory that makes the first actor immediately and the others on request."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.go_on = anyio.Event()
        self._numbers = itertools.count()

    async def __call__(self) -> Any:
        if next(self._numbers):
            await self.go_on.wait()
        self.handles.append(IdleActor.remote())
        return self.handles[-1]


async def test_lost_first_actor_is_replaced_while_others_start(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_SETTLE_S", 1.0)
    starts = ActorFactory()
    async with ActorPool("worker", starts, 2, wait_s=60).open() as pool:
        async with anyio.create_task_group() as tasks:
            placed: list[Any] = []

            async def place() -> None:
                placed.append(await pool.place())

            while not pool.members:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            first = pool.members[0]
            tasks.start_soon(place)
            await anyio.lowlevel.checkpoint()
            first.lose()
            await anyio.sleep(1.5)  # until the others have had their time
            assert not placed
            starts.go_on.set()
        assert placed[0].handle in starts.handles[1:]


async def test_pool_reports_that_no_actor_started_in_time(cluster: Any) -> None:
    async with ActorPool("worker", anyio.sleep_forever, 2, wait_s=0.2).open() as pool:
        with pytest.raises(ClusterError, match=r"no worker for 0.2 s \(2 requested; the cluster has"):
            await pool.place()
