"""Soak tests of the sandbox with hostile calls, run by `make sandbox-campaign`."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from reward_kit.processes import temporary_root
from reward_kit.sandbox import Limits, Program, Sandbox
from tests.sandbox.hostile_canaries import processes, resident_mb
from tests.sandbox.sandbox_calls import missing

HONEST = Program("def evaluate(messages, **rest):\n    return {'score': sum(messages) / 8, 'count': len(messages)}\n")
LIMITS = Limits(wall_s=5, cpu_s=2, memory_mb=128, disk_mb=2, output_kb=8, result_kb=8)
HOSTILE = {
    "no_result": "import os\ndef evaluate(**rest): os._exit(0)",
    "non_finite": "def evaluate(**rest): return float('nan')",
    "exception": "def evaluate(**rest): raise ValueError(rest)",
    "forged_frame": "import os\ndef evaluate(**rest): os.write(3, b'z' * 64)",
    "signal": "import ctypes\ndef evaluate(**rest): ctypes.string_at(0)",
    "memory": "def evaluate(**rest): return len(bytearray(1 << 30))",
    "result_size": "def evaluate(**rest): return 'x' * 100_000",
    "denied": "import os\ndef evaluate(**rest): os.fork()",
    "load": "def evaluate(**rest) return 1",
    "disk": "def evaluate(**rest): open('large', 'wb').write(bytes(4 << 20))",
}


def state() -> tuple[int, int, int, int]:
    """Return descriptors, zombie children, descendants, and work folders."""
    children = processes()
    ours = {os.getpid()}
    while more := {pid for pid, parent in children.items() if parent in ours} - ours:
        ours |= more
    zombies = sum(b") Z " in _stat(pid) for pid in ours)
    folders = list(temporary_root().glob("sandbox-*/*"))
    return len(list(Path("/proc/self/fd").iterdir())), zombies, len(ours), len(folders)


def _stat(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return b""


async def settled(sandbox: Sandbox):
    """Return the state once no child is starting."""
    while not sandbox.is_settled:  # noqa: ASYNC110 - nobody tells it
        await asyncio.sleep(0.001)
    return state()


async def spread(count: int, one, tasks: int = 4) -> None:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(work())


@pytest.mark.campaign
@pytest.mark.parametrize("strength", ["namespaces", "landlock"])
async def test_a_hundred_thousand_calls_leak_nothing(strength):
    if missing(strength):
        pytest.skip(missing(strength))
    temporary_root()
    at_start = state()
    async with Sandbox(strength=strength, slots=2) as sandbox:

        async def one(number: int) -> None:
            messages = [1] * (number % 9)
            level = "isolated" if number % 20 == 0 else "warm"
            outcome = await sandbox.call(HONEST, {"messages": messages}, limits=LIMITS, level=level)
            assert outcome.value == {"score": len(messages) / 8, "count": len(messages)}, outcome

        await spread(10_000, one)
        before, memory = await settled(sandbox), resident_mb()
        for _ in range(3):
            await spread(30_000, one)
            assert await settled(sandbox) == before
        assert resident_mb() - memory < 4
    assert state()[1:] == at_start[1:]


@pytest.mark.campaign
@pytest.mark.parametrize("strength", ["namespaces", "landlock"])
async def test_hostile_calls_do_not_change_results_of_other_calls(strength):
    if missing(strength):
        pytest.skip(missing(strength))
    kinds, got = list(HOSTILE), Counter()
    hostile = {kind: Program(source) for kind, source in HOSTILE.items()}
    async with Sandbox(strength=strength, slots=2) as sandbox:

        async def one(number: int) -> None:
            level = "isolated" if number % 8 else "warm"
            if number % 4 == 3:
                kind = kinds[number // 4 % len(kinds)]
                outcome = await sandbox.call(hostile[kind], {"messages": []}, limits=LIMITS, level=level)
                assert outcome.kind == kind, (kind, outcome)
                got[kind] += 1
            else:
                messages = [1] * (number % 9)
                outcome = await sandbox.call(HONEST, {"messages": messages}, limits=LIMITS, level=level)
                assert outcome.value == {"score": len(messages) / 8, "count": len(messages)}, outcome

        await spread(400, one)
        before, memory = state(), resident_mb()
        await spread(4_000, one)
        assert state()[:2] == before[:2]
        assert resident_mb() - memory < 8
    assert got.total() == 1_100 and set(got) == set(kinds)
    assert state()[1] == 0
