"""Latency and throughput of sandboxed rewards, compared with a subprocess, bubblewrap and inspect-ai's `local` sandbox.

    .venv/bin/python benchmarks/sandbox.py [-n 300] [--rounds 3] [--strength namespaces|landlock]

Three rewards (standard library, NumPy, SymPy) are called with a request of 2 kB at every sandbox level. Latency is that
of sequential calls. The rate is that of four concurrent tasks with one slot per CPU; for `in_process` it is that of one
batch in the reward agent at concurrency 16. The round with the highest rate is printed. bubblewrap is measured if
installed, inspect-ai if installed by `benchmarks/rollouts.py --peers`; both start an interpreter for every call, as in
normal use.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from reward_kit.models import Message  # noqa: E402
from reward_kit.reward_agent import AsyncRewardAgent, ScoringRequest  # noqa: E402
from reward_kit.sandbox import Limits, Program, Sandbox  # noqa: E402
from reward_kit.typed_interface import reward_spec  # noqa: E402

TASKS = 4
LIMITS = Limits(memory_mb=1024)
TEXT = "The first train covers 2/3 of the way in 40 minutes, the second one needs an hour and a half. "
REQUEST: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Solve the task. Put the answer in \\boxed{}."},
        {"role": "user", "content": TEXT * 9},
        {"role": "assistant", "content": TEXT * 10 + "So the answer is \\boxed{x + x}."},
    ],
    "ground_truth": "2*x",
}
_HEAD = (
    "def evaluate(messages, ground_truth, **rest):\n    found = re.findall(r'boxed{(.*?)}', messages[-1]['content'])\n"
)
SOURCES = {
    "stdlib": "import re\n" + _HEAD + "    return {'score': float(len(found) == 1 and found[0] != ground_truth)}\n",
    "numpy": "import re\nimport numpy\n"
    + _HEAD
    + "    lengths = numpy.array([len(message['content']) for message in messages])\n"
    + "    return {'score': float(numpy.clip(lengths.mean(), 0.0, 1.0))}\n",
    "sympy": "import re\nimport sympy\n"
    + _HEAD
    + "    return {'score': float(sympy.simplify(sympy.sympify(found[0]) - sympy.sympify(ground_truth)) == 0)}\n",
}
_MAIN = "import json, sys\nprint(json.dumps(evaluate(**json.load(sys.stdin))))\n"
Call = Callable[[], Awaitable[Any]]


class Cost(NamedTuple):
    """Rate and latency of a method of calling."""

    rate: float  # calls/s
    p50_ms: float
    p99_ms: float


async def measure(call: Call, count: int) -> Cost:
    """Measure the latency of `count` sequential calls, then the rate of as many concurrent ones."""
    for _ in range(3):
        await call()
    latencies_s = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        latencies_s.append(time.perf_counter() - began)

    async def work() -> None:
        for _ in range(count // TASKS):
            await call()

    began = time.perf_counter()
    if isinstance(call, Scoring):
        await call(count // TASKS * TASKS)
    else:
        await asyncio.gather(*(work() for _ in range(TASKS)))
    return make_cost(latencies_s, count // TASKS * TASKS / (time.perf_counter() - began))


def make_cost(latencies_s: list[float], rate: float) -> Cost:
    ordered = sorted(latencies_s)
    return Cost(rate, ordered[len(ordered) // 2] * 1e3, ordered[len(ordered) * 99 // 100] * 1e3)


class Scoring(NamedTuple):
    """Scores a request with a reward agent, `count` times concurrently."""

    agent: AsyncRewardAgent
    request: ScoringRequest

    async def __call__(self, count: int = 1) -> None:
        await self.agent.submit([self.request] * count)
        assert set((await self.agent.get(count)).rewards) == {1.0}


@asynccontextmanager
async def in_process(kind: str) -> AsyncIterator[Call]:
    """Call a trusted reward through the reward agent: in a thread, with typed copies of the messages."""
    space: dict[str, Any] = {}
    exec(SOURCES[kind].replace("['content']", ".text"), space)  # noqa: S102 - our own code
    messages = [Message.model_validate(message) for message in REQUEST["messages"]]
    request = ScoringRequest("rollout", messages, ground_truth=REQUEST["ground_truth"], assistant_turns=[2])
    async with AsyncRewardAgent(reward_spec(space["evaluate"])) as agent:
        yield Scoring(agent, request)


def sandboxed(level: Any, strength: Any) -> Callable[[str], Any]:
    """Call a reward at a level of the sandbox."""

    @asynccontextmanager
    async def method(kind: str) -> AsyncIterator[Call]:
        program = Program(SOURCES[kind], imports=() if kind == "stdlib" else (kind,))
        async with Sandbox(strength=strength) as sandbox:

            async def call() -> None:
                outcome = await sandbox.call(program, REQUEST, limits=LIMITS, level=level)
                assert outcome.failure is None and outcome.value["score"] == 1.0, outcome

            await asyncio.gather(*(call() for _ in range(2 * TASKS)))
            yield call

    return method


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def spawned(*prefix: str) -> Callable[[str], Any]:
    """Start an interpreter for each call, with the request on stdin and the result on stdout."""

    @asynccontextmanager
    async def method(kind: str) -> AsyncIterator[Call]:
        request = json.dumps(REQUEST).encode()
        with tempfile.TemporaryDirectory() as folder:
            script = write_text(Path(folder, "reward.py"), SOURCES[kind] + _MAIN)
            binding = ["--ro-bind", folder, folder, "--die-with-parent"] if prefix else []

            async def call() -> None:
                process = await asyncio.create_subprocess_exec(
                    *(*prefix, *binding, sys.executable, "-I", str(script)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                output, _ = await process.communicate(request)
                assert json.loads(output)["score"] == 1.0

            yield call

    return method


async def inspect_local(count: int) -> Cost:
    """Measure inspect-ai in its virtual environment."""
    with tempfile.TemporaryDirectory() as folder:
        script = write_text(Path(folder, "reward.py"), SOURCES["stdlib"] + _MAIN)
        request = write_text(Path(folder, "request.json"), json.dumps(REQUEST))
        command = [str(INSPECT), str(ROOT / "benchmarks" / "peers" / "inspect_exec.py"), str(count), str(TASKS)]
        process = await asyncio.create_subprocess_exec(
            *command, sys.executable, str(script), str(request), stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
    result = json.loads(output.splitlines()[-1])
    return make_cost(result["latencies_s"], result["rate"])


INSPECT = ROOT / ".peers" / "inspect" / "bin" / "python"
BWRAP = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all"]


def methods(strength: str) -> dict[str, tuple[Callable[[str], Any], tuple[str, ...], int]]:
    """Return each method of calling with its rewards and its multiple of `-n` calls."""
    all_rewards = ("stdlib", "numpy", "sympy")
    result: dict[str, tuple[Callable[[str], Any], tuple[str, ...], int]] = {
        "in_process": (in_process, all_rewards, 20),
        "warm": (sandboxed("warm", strength), all_rewards, 20),
        "isolated": (sandboxed("isolated", strength), all_rewards, 1),
        "subprocess": (spawned(), all_rewards[:2], 1),
    }
    if shutil.which("bwrap"):
        result["bwrap"] = (spawned(*BWRAP), all_rewards[:1], 1)
    return result


async def main(count: int, rounds: int, strength: str) -> None:
    """Measure the methods alternately and print the table."""
    best: dict[tuple[str, str], Cost] = {}
    for _ in range(rounds):
        for name, (method, kinds, times) in methods(strength).items():
            for kind in kinds:
                async with method(kind) as call:
                    cost = await measure(call, max(40, count * times // (1 if name != "subprocess" else 3)))
                best[name, kind] = max(best.get((name, kind), cost), cost)
        if INSPECT.exists():
            cost = await inspect_local(count // 3)
            best["inspect local", "stdlib"] = max(best.get(("inspect local", "stdlib"), cost), cost)
    show(best, strength)


def show(best: dict[tuple[str, str], Cost], strength: str) -> None:
    """Print the table, with the ratio of p50 to our `isolated` level for the same reward."""
    today, load = datetime.date.today(), os.getloadavg()
    print(f"{today}, Linux {platform.release()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, ", end="")
    print(f"{strength}, uid {os.geteuid()}, load {load[0]:.1f} {load[1]:.1f}, request {len(json.dumps(REQUEST))} bytes")
    print(f"{'method':<14} {'reward':<8} {'calls/s':>9} {'p50 ms':>8} {'p99 ms':>8}   p50 ratio to isolated")
    for (name, kind), cost in best.items():
        ratio = cost.p50_ms / best["isolated", kind].p50_ms
        print(f"{name:<14} {kind:<8} {cost.rate:>9,.0f} {cost.p50_ms:>8.3f} {cost.p99_ms:>8.3f}   {ratio:.3g}")
    for name, present in (("bwrap", shutil.which("bwrap")), ("inspect local", INSPECT.exists())):
        if not present:
            print(f"{name:<14} not installed, skipped")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=300, help="isolated calls per round; faster methods make more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strength", choices=["namespaces", "landlock"], default="namespaces")
    options = parser.parse_args()
    asyncio.run(main(options.n, options.rounds, options.strength))
