"""Throughput and CPU time of rewards over HTTP, compared with the same rewards in process.

    .venv/bin/python benchmarks/serve.py [--rollouts 4000] [--repeats 3]

The reward compares two texts at level `in_process`, so the figures are the overhead of the transport. The server is
`reward-kit serve` in a subprocess; the client is `RemoteReward` in the reward agent, with 64 concurrent requests of one
rollout, or 8 of 64 rollouts. The comparison is the same agent without a server. Printed are rollouts/s, their ratio,
and CPU milliseconds per rollout in process, in the client and in the server; figures are the best of the repeats. Rates
need an idle machine, CPU times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reward_kit.models import Message
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.remote import RemoteReward

KEY = "the-key-of-the-benchmark"
REWARDS = """
from reward_kit import reward_function

@reward_function
async def exact(messages, ground_truth):
    return {"score": float(messages[-1].text == ground_truth)}

@reward_function(mode="batch")
async def exact_group(rollouts_messages, ground_truths):
    pairs = zip(rollouts_messages, ground_truths)
    return [{"score": float(messages[-1].text == truth)} for messages, truth in pairs]
"""
WIDTH, GROUP, CONCURRENT_GROUPS = 64, 64, 8


def rollouts(count, turns):
    """Return requests with conversations of `turns` turns, 200 characters per message."""
    history = [Message(role=role, content="x" * 200) for _ in range(turns) for role in ("user", "assistant")]
    return [ScoringRequest(f"r{i}", [*history, Message(role="assistant", content="42")], "42") for i in range(count)]


class Cost(NamedTuple):
    """Wall-clock seconds, and CPU seconds of this process and of the server."""

    wall_s: float
    client_s: float
    server_s: float


def process_cpu_s(pid):
    """Return the CPU seconds of a process (fields 14 and 15 of proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def cost(scorer, batch, size, width, pid):
    async with AsyncRewardAgent(scorer, max_concurrency=width) as agent:
        await agent.get(size, ticket=await agent.submit(batch[:size], size))  # opens connections
        began = (time.perf_counter(), time.process_time(), process_cpu_s(pid))
        chunk = await agent.get(len(batch), ticket=await agent.submit(batch, size))
        ended = (time.perf_counter(), time.process_time(), process_cpu_s(pid))
    assert set(chunk.rewards) == {1.0}
    return Cost(*(after - before for before, after in zip(began, ended, strict=True)))


async def best(make, batch, size, width, pid, repeats):
    costs = [await cost(await make(), batch, size, width, pid) for _ in range(repeats)]
    return Cost(*map(min, zip(*costs, strict=True)))


async def measure(folder, address, pid, count, repeats):
    print("| conversation | requests | in process | over HTTP | ratio | CPU ms: in process | client | server |")
    print("|---|---|---|---|---|---|---|---|")
    for turns in (0, 10):
        batch = rollouts(count, turns)
        for name, label, size, width in (
            ("exact", "1 rollout, concurrency 64", 1, WIDTH),
            ("exact", "1 rollout, concurrency 1", 1, 1),
            ("exact_group", "64 rollouts, concurrency 8", GROUP, CONCURRENT_GROUPS),
        ):
            part = batch[: (count if width > 1 else count // 4) // size * size]
            reward = load_reward(f"rewards.py:{name}", folder, SandboxChoice("in_process")).reward
            url = f"{address}/v1/rewards/{name}"

            async def local(reward=reward):
                return make_scorer(reward)

            async def remote(url=url):
                return await RemoteReward.connect(url, api_key=KEY)

            in_process, over_http = [await best(make, part, size, width, pid, repeats) for make in (local, remote)]
            cpu_ms = [
                f"{1000 * one / len(part):.2f}" for one in (in_process.client_s, over_http.client_s, over_http.server_s)
            ]
            rates = [f"{len(part) / one.wall_s:,.0f}/s" for one in (in_process, over_http)]
            ratio = f"{over_http.wall_s / in_process.wall_s:.1f}"
            print("|", " | ".join([f"{2 * turns + 1} messages", label, *rates, ratio, *cpu_ms]), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS)
        arguments = ("serve", "rewards.py:exact", "rewards.py:exact_group", "--sandbox", "in_process", "--port", "0")
        with subprocess.Popen(
            [sys.executable, "-m", "reward_kit.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, "REWARD_KIT_SERVE_API_KEY": KEY, "REWARD_KIT_TRUST": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server:
            try:
                address = server.stdout.readline().strip()
                asyncio.run(measure(folder, address, server.pid, options.rollouts, options.repeats))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
