"""Each sandbox strength: what it grants, what it leaves behind and which is chosen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.sandbox import Limits, Sandbox
from reward_kit.sandbox.zygote_process import ZygoteProcess
from tests.sandbox.sandbox_calls import is_gone, missing, run

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("strength", ["namespaces", "landlock"])
async def test_dead_zygote_fails_a_single_call(strength):
    if missing(strength):
        pytest.skip(missing(strength))
    async with Sandbox(strength=strength, slots=1) as sandbox:
        zygotes: list[ZygoteProcess] = []
        assert (await run(sandbox, "return 1")).value == 1
        zygotes += sandbox._idle
        call = asyncio.create_task(run(sandbox, "time.sleep(60)"))
        await asyncio.sleep(0.1)
        os.kill(zygotes[0]._process.pid, signal.SIGKILL)
        outcome = await call
        assert (outcome.kind, outcome.failure.failure_class) == ("zygote", "crash")
        assert (await run(sandbox, "return 1")).value == 1


@pytest.mark.parametrize("strength", ["namespaces", "landlock"])
async def test_closing_the_sandbox_leaves_no_processes_or_descriptors(strength):
    if missing(strength):
        pytest.skip(missing(strength))
    descriptors = open_descriptors()
    async with Sandbox(strength=strength, slots=2) as sandbox:
        await asyncio.gather(*(run(sandbox, "return 1", level=level) for level in ("isolated", "warm")))
        pids = {zygote._process.pid for zygote in sandbox._idle}
    assert all(is_gone(f"/proc/{pid}") for pid in pids)
    # The guardian of temporary folders, which starts with the first one, keeps a pipe.
    assert open_descriptors() <= descriptors + 1


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_processes_can_be_allowed_and_are_limited_and_ended():
    if missing("namespaces"):
        pytest.skip(missing("namespaces"))
    async with Sandbox(strength="namespaces", slots=1) as sandbox:
        limits = Limits(wall_s=5, processes=3)
        body = "import subprocess\nreturn subprocess.run(['/bin/echo', 'hi'], capture_output=True, text=True).stdout"
        assert (await run(sandbox, body, limits=limits)).value == "hi\n"
        body = """
born = 0
try:
    while born < 50:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        born += 1
except BlockingIOError:
    return born
"""
        outcome = await run(sandbox, body, limits=limits)
        assert outcome.value == 3, outcome
        assert outcome.wall_s < 3


async def test_memory_limit_applies_to_each_process():
    if missing("namespaces"):
        pytest.skip(missing("namespaces"))
    body = """
held = []
for _ in range(3):
    reader, writer = os.pipe()
    if os.fork() == 0:
        blocks = []
        try:
            while True:
                blocks.append(bytearray(8 << 20))
        except MemoryError:
            count = len(blocks)
            del blocks
        os.write(writer, str(8 * count).encode())
        os._exit(0)
    os.close(writer)
    held.append(int(os.read(reader, 20)))
return held
"""
    async with Sandbox(strength="namespaces", slots=1) as sandbox:
        outcome = await run(sandbox, body, limits=Limits(wall_s=20, cpu_s=20, memory_mb=128, processes=3))
    assert len(outcome.value) == 3 and all(64 <= mb <= 128 for mb in outcome.value), outcome


async def test_processes_need_namespaces():
    if missing("landlock"):
        pytest.skip(missing("landlock"))
    async with Sandbox(strength="landlock", slots=1) as sandbox:
        with pytest.raises(ConfigError, match="processes"):
            await run(sandbox, "return 1", limits=Limits(processes=1))


async def test_landlock_is_chosen_if_namespaces_are_denied():
    """As in Docker with its default profile: calls that create namespaces fail."""
    if missing("landlock"):
        pytest.skip(missing("landlock"))
    script = """
import asyncio, errno, sys
from reward_kit.sandbox import linux, seccomp
names = {"x86_64": (272, 165, 308, 155), "aarch64": (97, 40, 268, 41)}[linux.machine()]
deny = seccomp.answer(seccomp.errno_action(errno.EPERM))
rules = {number: deny for number in names}
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, "")
seccomp.load(seccomp.assemble(linux.audit_arch(linux.machine()), rules, seccomp.answer(seccomp.ALLOW)))
from reward_kit.sandbox import Program, Sandbox, probe
from reward_kit.errors import ConfigError
async def main():
    found = await probe()
    print(found[0].is_available, found[0].reason)
    async with Sandbox() as sandbox:
        print((await sandbox.call(Program("def f(x): return x", "f", form="plain"), 3)).strength)
    try:
        await Sandbox(strength="namespaces").__aenter__()
    except ConfigError as error:
        print(error)
asyncio.run(main())
"""
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("False create a"), done.stderr
    assert lines[1] == "landlock"
    assert "cannot confine code (namespaces: create a" in lines[2]


async def test_process_strength_can_be_requested_explicitly():
    async with Sandbox(strength="process", slots=1) as sandbox:
        outcome = await run(sandbox, "return x", 3)
    assert (outcome.value, outcome.strength) == (3, "process")
