"""Overhead of the Ray engine per episode, scaling over workers, and the other figures of `development/scale.md`.

    .integrations/ray/bin/python benchmarks/ray_engine.py [--episodes 400] [--rounds 5] [--megabytes 256]

A cluster of four nodes runs on this machine. Overhead: the local engine and one Ray worker collect the same episodes
alternately, with concurrency 1 and 16; it is the difference of their median times per episode (target: 5 ms). Scaling:
1, 2 and 4 workers collect 8 concurrent episodes each, which wait as for a model's responses; throughput is compared
with proportional scaling (target: 0.9). Also printed are startup times, use of the object store, and broadcast times of
weights. The exit status is 1 if a target is missed.
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
from reward_kit.agent.rl_rollout_worker import RolloutWorker  # noqa: E402
from reward_kit.episodes.record import episode_to_record  # noqa: E402
from reward_kit.integrations.ray.engine import RayEngine  # noqa: E402
from reward_kit.integrations.ray.options import RayOptions  # noqa: E402
from reward_kit.providers.session import ProviderSession  # noqa: E402
from reward_kit.runs.plan import RunArgs, plan_run  # noqa: E402
from reward_kit.runs.runner import LocalEngine, RunEngine  # noqa: E402
from reward_kit.runs.tasks import load_task  # noqa: E402

NODES, CONCURRENCY, GROUP = 4, 16, 4
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


class EpisodeTime(NamedTuple):
    """Wall-clock seconds and CPU seconds of the driver, per episode."""

    clock_s: float
    driver_s: float


class Bench:
    """Collects episodes of a small task with any engine."""

    def __init__(self, folder: Path, turns: int, wait_s: float) -> None:
        folder.mkdir()
        (folder / "parts.py").write_text(PARTS)
        (folder / "task.yaml").write_text(TASK % (turns, turns, wait_s))
        self.path = folder / "task.yaml"
        self._request = RunArgs(task_path=self.path)
        self._round = 0

    def ray_engine(self, workers: int) -> RayEngine:
        """Return an engine with `workers` workers."""
        return RayEngine(load_task(self.path), self._request, RayOptions(workers=workers))

    @asynccontextmanager
    async def open(self, engine: RunEngine) -> AsyncIterator[RolloutWorker]:
        """Yield the rollout worker of an engine after a warm-up."""
        plan = plan_run(load_task(self.path), self._request, max_concurrency=1_000, traffic=ProviderSession())
        async with engine.workers(plan, RunBudget()) as workers:
            worker = next(iter(workers.values()))
            await self.collect(worker, 32, 8)
            yield worker

    async def collect(self, worker: RolloutWorker, episodes: int, concurrency: int) -> EpisodeTime:
        """Collect episodes in groups and return the time per episode."""
        self._round += 1
        remaining = iter([(group, index) for group in range(episodes // GROUP) for index in range(GROUP)])
        samples = [Sample(f"{self._round}-{number}") for number in range(episodes // GROUP)]
        groups = [worker.group(sample) for sample in samples]
        left = [GROUP] * len(groups)

        async def work() -> None:
            for group, index in remaining:
                await worker.collect_episode(groups[group], index)
                left[group] -= 1
                if not left[group]:
                    await groups[group].close()

        clock, process = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(concurrency):
                tasks.start_soon(work)
        return EpisodeTime((time.perf_counter() - clock) / episodes, (time.process_time() - process) / episodes)


async def overhead(folder: Path, episodes: int, rounds: int) -> bool:
    """Print the time per episode of both engines and whether the overhead meets the target."""
    bench = Bench(folder / "instant", turns=4, wait_s=0.0)
    times: dict[tuple[str, int], list[EpisodeTime]] = {}
    async with bench.open(LocalEngine()) as local_worker, bench.open(bench.ray_engine(1)) as ray_worker:
        for _ in range(rounds):
            for concurrency in (1, CONCURRENCY):
                for name, worker in (("local", local_worker), ("ray", ray_worker)):
                    time_per_episode = await bench.collect(worker, episodes, concurrency)
                    times.setdefault((name, concurrency), []).append(time_per_episode)
        episode = await local_worker.collect_episode(local_worker.group(Sample("one")), 0)
    record = episode_to_record(episode)
    print(f"episode of 5 steps: {len(pickle.dumps(record, 5)):,} bytes transferred, {len(record['messages'])} messages")
    extra_ms = []
    for concurrency in (1, CONCURRENCY):
        local, remote = (_median(times[name, concurrency]) for name in ("local", "ray"))
        extra_ms.append(1e3 * (remote.clock_s - local.clock_s))
        print(
            f"concurrency {concurrency:2d}: local {1e3 * local.clock_s:.2f} ms/episode, ray {1e3 * remote.clock_s:.2f} "
            f"(ratio {remote.clock_s / local.clock_s:.2f}, overhead {extra_ms[-1]:+.2f} ms); "
            f"driver CPU time {1e3 * local.driver_s:.2f} and {1e3 * remote.driver_s:.2f} ms"
        )
    is_met = max(extra_ms) <= OVERHEAD_MS
    print(f"maximum overhead {max(extra_ms):.2f} ms per episode (target {OVERHEAD_MS:g}): {_verdict(is_met)}")
    return is_met


def _median(taken: Sequence[EpisodeTime]) -> EpisodeTime:
    return EpisodeTime(*(statistics.median(values) for values in zip(*taken, strict=True)))


async def scaling(folder: Path, rounds: int) -> bool:
    """Print throughput by workers and whether scaling meets the target."""
    bench = Bench(folder / "waits", turns=4, wait_s=0.2)
    ideal_s, rates = 5 * 0.2, {}
    for workers in (1, 2, 4):
        async with bench.open(bench.ray_engine(workers)) as worker:
            await bench.collect(worker, 8 * workers, 8 * workers)
            taken = [await bench.collect(worker, 32 * workers, 8 * workers) for _ in range(rounds)]
        rates[workers] = 1 / _median(taken).clock_s
        share = rates[workers] * ideal_s / (8 * workers)
        print(f"{workers} workers: {rates[workers]:.1f} episodes/s, {share:.2f} of the ideal")
    share = rates[4] / (4 * rates[1])
    print(f"scaling from 1 to 4 workers: {share:.3f} (target {SCALING:g}): {_verdict(share >= SCALING)}")
    return share >= SCALING


async def startup(folder: Path) -> None:
    """Print startup times of workers, and the use of the object store while they collect."""
    bench = Bench(folder / "startup", turns=4, wait_s=0.05)
    for workers in (1, 4):
        began = time.perf_counter()
        async with bench.open(bench.ray_engine(workers)) as worker:
            print(f"startup of {workers} workers, with warm-up episodes: {time.perf_counter() - began:.1f} s")
            await _print_store_use(bench, worker)


async def _print_store_use(bench: Bench, worker: RolloutWorker) -> None:
    free, before = [], _free_store()
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            while True:
                await anyio.sleep(0.2)
                free.append(_free_store())

        tasks.start_soon(watch)
        await bench.collect(worker, 256, 64)
        tasks.cancel_scope.cancel()
    print(f"  object store, peak increase at concurrency 64: {(before - min(free)) / 1e6:.2f} MB")


def _free_store() -> float:
    return float(ray.available_resources().get("object_store_memory", 0.0))


class Receiver:
    """An actor that receives weights on one node."""

    async def take(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """Read every page of the weights and return their bytes."""
        return sum(int(array.view(np.uint8)[::4096].sum() >= 0) * array.nbytes for array in weights.values())


def broadcast(megabytes: int) -> None:
    """Print the time to broadcast weights to every node through its object store."""
    weights = {f"layer{n}": np.random.default_rng(n).random(megabytes * 125_000 // 8) for n in range(8)}
    gigabytes = sum(array.nbytes for array in weights.values()) / 1e9
    receivers = [ray.remote(Receiver).options(num_cpus=1).remote() for _ in range(NODES)]
    ray.get([receiver.take.remote({}) for receiver in receivers])
    began = time.perf_counter()
    reference = ray.put(weights)
    put_s = time.perf_counter() - began
    for label in ("first broadcast to 4 nodes", "second broadcast, already local"):
        began = time.perf_counter()
        ray.get([receiver.take.remote(reference) for receiver in receivers])
        print(f"{label}: {(time.perf_counter() - began) / gigabytes:.2f} s/GB")
    print(f"put into the object store: {put_s / gigabytes:.2f} s/GB ({gigabytes:.2f} GB)")


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main() -> None:
    """Start a cluster, run the benchmark and stop the cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rk") as name:
        store = {"num_cpus": 1, "object_store_memory": (80 + 2 * options.megabytes) * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**store, "temp_dir": name})
        for _ in range(NODES - 1):
            cluster.add_node(**store)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.wait_for_nodes()
        folder = Path(name, "tasks")
        folder.mkdir()
        try:
            are_met = [asyncio.run(overhead(folder, options.episodes, options.rounds))]
            are_met.append(asyncio.run(scaling(folder, options.rounds)))
            asyncio.run(startup(folder))
            broadcast(options.megabytes)
        finally:
            ray.shutdown()
            cluster.shutdown()
    sys.exit(0 if all(are_met) else 1)


if __name__ == "__main__":
    main()
