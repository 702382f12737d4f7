"""What Ray costs an episode, how episodes that wait scale over workers, and the constants of `development/scale.md`.

    .integrations/ray/bin/python benchmarks/ray_engine.py [--episodes 400] [--rounds 5] [--megabytes 256]

Four nodes on this machine. The local engine and one worker on the cluster collect the same episodes by turns, one at a
time and sixteen at a time; per-episode times are medians over the rounds, and their difference is the overhead. For the
scaling each worker has as many episodes in flight, which wait as for a model's answers; the ideal is proportional.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import numpy as np  # noqa: E402
import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from reward_kit.agent import RunBudget, Sample  # noqa: E402
from reward_kit.episodes.record import episode_to_record  # noqa: E402
from reward_kit.integrations.ray.engine import RayEngine  # noqa: E402
from reward_kit.integrations.ray.options import RayOptions  # noqa: E402
from reward_kit.providers.session import ProviderSession  # noqa: E402
from reward_kit.runs.plan import RunArgs, plan_run  # noqa: E402
from reward_kit.runs.runner import LocalEngine, RolloutWorker, RunEngine  # noqa: E402
from reward_kit.runs.tasks import load_task  # noqa: E402

NODES, IN_FLIGHT, GROUP = 4, 16, 4
OVERHEAD_MS, SCALING = 5.0, 0.9
TASK = """
name: waits
messages: [{role: user, content: "look at %d things"}]
resource_type: parts.py:Shelf
policy: {type: "parts.py:Looks", turns: %d, wait_s: %g}
max_episode_steps: 64
"""
PARTS = """
import anyio
from reward_kit import AgentPolicy, ForkableResource, PolicyOutput, StepOutcome
from reward_kit.environments.base import hash_key, tool_spec

class Shelf(ForkableResource):
    fork_kind = "native"

    def __init__(self): self.seen = 0
    async def setup(self, config): ...
    async def reset(self, seed=None): self.seen = 0
    async def fork(self):
        other = Shelf()
        other.seen = self.seen
        return other
    async def get_observation(self): return "a shelf"
    async def get_tools_spec(self): return [tool_spec("look", "see the next thing")]
    async def state_key(self): return hash_key(str(self.seen))
    async def step(self, name, arguments):
        self.seen += 1
        return StepOutcome(f"thing {self.seen}: " + "x" * 200)

class Looks(AgentPolicy):
    "As many tool calls as `turns`, then an answer, with a wait before each."
    def __init__(self, turns, wait_s): self.turns, self.wait_s = turns, wait_s
    async def get_action(self, observation, available_tools_specs=None):
        await anyio.sleep(self.wait_s)
        if sum(message.role == "assistant" for message in observation) >= self.turns:
            return PolicyOutput({"type": "text", "content": "that was all", "is_final": True})
        return PolicyOutput({"type": "tool_call", "name": "look", "arguments": {"why": "y" * 40}})
"""


class Took(NamedTuple):
    """Seconds that one episode took, of the clock and of this process's CPUs."""

    clock_s: float
    driver_s: float


class Bench:
    """Collects episodes of one small task with any engine."""

    def __init__(self, folder: Path, turns: int, wait_s: float) -> None:
        folder.mkdir()
        (folder / "parts.py").write_text(PARTS)
        (folder / "task.yaml").write_text(TASK % (turns, turns, wait_s))
        self.path = folder / "task.yaml"
        self._request = RunArgs(task_path=self.path)
        self._round = 0

    def ray_engine(self, workers: int) -> RayEngine:
        """An engine with so many workers."""
        return RayEngine(load_task(self.path), self._request, RayOptions(workers=workers))

    @asynccontextmanager
    async def open(self, engine: RunEngine) -> AsyncIterator[RolloutWorker]:
        """The worker of an engine, warm."""
        plan = plan_run(load_task(self.path), self._request, max_concurrency=1_000, traffic=ProviderSession())
        async with engine.workers(plan, RunBudget()) as workers:
            worker = next(iter(workers.values()))
            await self.collect(worker, 32, 8)
            yield worker

    async def collect(self, worker: RolloutWorker, episodes: int, in_flight: int) -> Took:
        """Collect episodes in groups; what one of them took."""
        self._round += 1
        places = iter([(group, index) for group in range(episodes // GROUP) for index in range(GROUP)])
        samples = [Sample(f"{self._round}-{number}") for number in range(episodes // GROUP)]
        groups = [worker.group(sample) for sample in samples]
        left = [GROUP] * len(groups)

        async def work() -> None:
            for group, index in places:
                await worker.collect_episode(groups[group], index)
                left[group] -= 1
                if not left[group]:
                    await groups[group].close()

        clock, process = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(in_flight):
                tasks.start_soon(work)
        return Took((time.perf_counter() - clock) / episodes, (time.process_time() - process) / episodes)


async def overhead(folder: Path, episodes: int, rounds: int) -> bool:
    """Print what an episode takes with either engine."""
    bench = Bench(folder / "instant", turns=4, wait_s=0.0)
    found: dict[tuple[str, int], list[Took]] = {}
    async with bench.open(LocalEngine()) as here, bench.open(bench.ray_engine(1)) as there:
        for _ in range(rounds):
            for in_flight in (1, IN_FLIGHT):
                for name, worker in (("local", here), ("ray", there)):
                    took = await bench.collect(worker, episodes, in_flight)
                    found.setdefault((name, in_flight), []).append(took)
        episode = await here.collect_episode(here.group(Sample("one")), 0)
    record = episode_to_record(episode)
    print(
        f"an episode of 5 steps: {len(pickle.dumps(record, 5)):,} bytes on the way, {len(record['messages'])} messages"
    )
    extra_ms = []
    for in_flight in (1, IN_FLIGHT):
        local, far = (_median(found[name, in_flight]) for name in ("local", "ray"))
        extra_ms.append(1e3 * (far.clock_s - local.clock_s))
        print(
            f"{in_flight:2d} in flight: local {1e3 * local.clock_s:.2f} ms, ray {1e3 * far.clock_s:.2f} ms an episode "
            f"(ratio {far.clock_s / local.clock_s:.2f}, overhead {extra_ms[-1]:+.2f} ms); "
            f"CPU of the driver {1e3 * local.driver_s:.2f} and {1e3 * far.driver_s:.2f} ms"
        )
    holds = max(extra_ms) <= OVERHEAD_MS
    print(f"overhead of Ray at most {max(extra_ms):.2f} ms an episode (target {OVERHEAD_MS:g}): {_verdict(holds)}")
    return holds


def _median(taken: Sequence[Took]) -> Took:
    return Took(*(statistics.median(values) for values in zip(*taken, strict=True)))


async def scaling(folder: Path, rounds: int) -> bool:
    """Print how throughput grows with workers."""
    bench = Bench(folder / "waits", turns=4, wait_s=0.2)
    ideal_s, rates = 5 * 0.2, {}
    for workers in (1, 2, 4):
        async with bench.open(bench.ray_engine(workers)) as worker:
            await bench.collect(worker, 8 * workers, 8 * workers)
            taken = [await bench.collect(worker, 32 * workers, 8 * workers) for _ in range(rounds)]
        rates[workers] = 1 / _median(taken).clock_s
        share = rates[workers] * ideal_s / (8 * workers)
        print(f"{workers} workers: {rates[workers]:.1f} episodes a second, {share:.2f} of what the waits allow")
    share = rates[4] / (4 * rates[1])
    print(f"from 1 to 4 workers: {share:.3f} of proportional (target {SCALING:g}): {_verdict(share >= SCALING)}")
    return share >= SCALING


async def startup(folder: Path) -> None:
    """Print how long workers take to come, and what the object store holds while episodes pass."""
    bench = Bench(folder / "startup", turns=4, wait_s=0.05)
    for workers in (1, 4):
        began = time.perf_counter()
        async with bench.open(bench.ray_engine(workers)) as worker:
            print(f"{workers} workers ready, with their first episodes: {time.perf_counter() - began:.1f} s")
            await _watched(bench, worker)


async def _watched(bench: Bench, worker: RolloutWorker) -> None:
    free, before = [], _free_store()
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while True:
                await anyio.sleep(0.2)
                free.append(_free_store())

        tasks.start_soon(watch)
        await bench.collect(worker, 256, 64)
        tasks.cancel_scope.cancel()
    print(f"  object store in use beyond the start, 64 in flight: {(before - min(free)) / 1e6:.2f} MB")


def _free_store() -> float:
    return float(ray.available_resources().get("object_store_memory", 0.0))


class Receiver:
    """Takes weights, on one node."""

    async def take(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """Touch all of them; their bytes."""
        return sum(int(array.view(np.uint8)[::4096].sum() >= 0) * array.nbytes for array in weights.values())


def broadcast(megabytes: int) -> None:
    """Print how long weights take to every node, by way of its object store."""
    weights = {f"layer{n}": np.random.default_rng(n).random(megabytes * 125_000 // 8) for n in range(8)}
    gigabytes = sum(array.nbytes for array in weights.values()) / 1e9
    receivers = [ray.remote(Receiver).options(num_cpus=1).remote() for _ in range(NODES)]
    ray.get([receiver.take.remote({}) for receiver in receivers])
    began = time.perf_counter()
    reference = ray.put(weights)
    put_s = time.perf_counter() - began
    for what in ("to 4 nodes", "again, where it lies already"):
        began = time.perf_counter()
        ray.get([receiver.take.remote(reference) for receiver in receivers])
        print(f"weights {what}: {(time.perf_counter() - began) / gigabytes:.2f} s a GB")
    print(f"weights into the object store: {put_s / gigabytes:.2f} s a GB ({gigabytes:.2f} GB)")


def _verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def main() -> None:
    """Start the cluster, measure, end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rk") as name:
        store = {"num_cpus": 1, "object_store_memory": (80 + 2 * given.megabytes) * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**store, "temp_dir": name})
        for _ in range(NODES - 1):
            cluster.add_node(**store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        folder = Path(name, "tasks")
        folder.mkdir()
        try:
            holds = [asyncio.run(overhead(folder, given.episodes, given.rounds))]
            holds.append(asyncio.run(scaling(folder, given.rounds)))
            asyncio.run(startup(folder))
            broadcast(given.megabytes)
        finally:
            ray.shutdown()
            cluster.shutdown()
    sys.exit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
