"""Rewards over HTTP beside the same rewards in process: how many a second, and what a call takes.

    .venv/bin/python benchmarks/serve.py [--rollouts 4000] [--repeats 3]

One async reward that compares two texts, at the level in_process, so that what is measured is the way there and back.
The server is `reward-kit serve` in a process of its own; the client, in this one, is `RemoteReward` under the reward
agent, 64 calls at a time, or 8 requests of 64 rollouts. In process it is the same agent without a server. Each figure
is the best of several repeats. Rates need an idle machine; the milliseconds of a processor that each rollout took, in
this process and in the server's, do not.
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
WIDTH, GROUP, GROUPS_AT_A_TIME = 64, 64, 8


def rollouts(count, turns):
    """Conversations of so many turns of 200 characters."""
    history = [Message(role=role, content="x" * 200) for _ in range(turns) for role in ("user", "assistant")]
    return [ScoringRequest(f"r{i}", [*history, Message(role="assistant", content="42")], "42") for i in range(count)]


class Cost(NamedTuple):
    """Seconds of the clock, and of the processor in this process and in the server's."""

    wall_s: float
    client_s: float
    server_s: float


def processor_s(pid):
    """What a process took so far (fields 14 and 15 of proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def cost(scorer, batch, size, width, pid):
    async with AsyncRewardAgent(scorer, max_concurrency=width) as agent:
        await agent.get(size, ticket=await agent.submit(batch[:size], size))  # connections and instances are made
        began = (time.perf_counter(), time.process_time(), processor_s(pid))
        chunk = await agent.get(len(batch), ticket=await agent.submit(batch, size))
        ended = (time.perf_counter(), time.process_time(), processor_s(pid))
    assert set(chunk.rewards) == {1.0}
    return Cost(*(after - before for before, after in zip(began, ended, strict=True)))


async def best(make, batch, size, width, pid, repeats):
    found = [await cost(await make(), batch, size, width, pid) for _ in range(repeats)]
    return Cost(*map(min, zip(*found, strict=True)))


async def measure(folder, address, pid, count, repeats):
    print("| rollouts of | called | in process | over HTTP | ratio | ms of a processor: in process | client | server |")
    print("|---|---|---|---|---|---|---|---|")
    for turns in (0, 10):
        batch = rollouts(count, turns)
        for name, told, size, width in (
            ("exact", "one a request, 64 at a time", 1, WIDTH),
            ("exact", "one a request, one at a time", 1, 1),
            ("exact_group", "64 a request, 8 at a time", GROUP, GROUPS_AT_A_TIME),
        ):
            some = batch[: (count if width > 1 else count // 4) // size * size]
            reward = load_reward(f"rewards.py:{name}", folder, SandboxChoice("in_process")).reward
            url = f"{address}/v1/rewards/{name}"

            async def local(reward=reward):
                return make_scorer(reward)

            async def remote(url=url):
                return await RemoteReward.connect(url, api_key=KEY)

            here, there = [await best(make, some, size, width, pid, repeats) for make in (local, remote)]
            each = [f"{1000 * one / len(some):.2f}" for one in (here.client_s, there.client_s, there.server_s)]
            rates = [f"{len(some) / one.wall_s:,.0f}/s" for one in (here, there)]
            ratio = f"{there.wall_s / here.wall_s:.1f}"
            print("|", " | ".join([f"{2 * turns + 1} messages", told, *rates, ratio, *each]), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS)
        arguments = ("serve", "rewards.py:exact", "rewards.py:exact_group", "--sandbox", "in_process", "--port", "0")
        with subprocess.Popen(
            [sys.executable, "-m", "reward_kit.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, "REWARD_KIT_SERVE_API_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server:
            try:
                address = server.stdout.readline().strip()
                asyncio.run(measure(folder, address, server.pid, given.rollouts, given.repeats))
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
