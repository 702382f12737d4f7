"""Control groups: what they bound, where this process was given one.

What needs a group runs where this process was given one (`reward-kit doctor`); as root one can be named:

    mkdir /sys/fs/cgroup/trial && echo "+memory +pids" > /sys/fs/cgroup/trial/cgroup.subtree_control
    REWARD_KIT_CGROUP=/trial python -m pytest tests/sandbox/test_cgroups.py
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from reward_kit.sandbox import Limits, Sandbox
from reward_kit.sandbox.kernel import cgroups
from reward_kit.sandbox.kernel.cgroups import Group
from tests.sandbox.behind_walls import AVAILABLE, missing, plain, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")

PLACE = cgroups.probe().place
needs_memory = pytest.mark.skipif(PLACE is None or PLACE.memory is None, reason=f"no memory group: {cgroups.told()}")
needs_pids = pytest.mark.skipif(PLACE is None or PLACE.pids is None, reason=f"no pids group: {cgroups.told()}")
needs_place = pytest.mark.skipif(PLACE is None, reason=f"no groups: {cgroups.told()}")
TREE = Limits(wall_s=60, cpu_s=30, memory_mb=100, disk_mb=4, processes=8, output_kb=4, result_kb=4)


# --- Real groups -----------------------------------------------------------------------------------------------------


@pytest.fixture
def group():
    made = Group(PLACE)
    yield made
    cgroups._close(made)


def ours() -> list[Path]:
    return [path for folder in PLACE.folders for path in folder.glob("reward-kit-zygote-*")]


def python_in(group: Group, body: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is put in the group before its first line."""
    script = "input()\n" + textwrap.dedent(body)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        group.add(process.pid)
        output, _ = process.communicate("\n")
    return subprocess.CompletedProcess([], process.returncode, output)


@needs_place
def test_limits_are_those_the_kernel_says_and_can_be_lowered(group):
    for memory, tasks in ((80 << 20, 9), (160 << 20, 20), (40 << 20, 3)):
        group.set_limits(memory, tasks)
        assert group.limits() == (memory if PLACE.memory else 0, tasks if PLACE.pids else 0)


@needs_pids
def test_processes_are_bounded_also_for_root(group):
    group.set_limits(1 << 30, 5)
    body = """
    import os, signal, time
    children = []
    try:
        while len(children) < 50:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    except BlockingIOError:
        print(len(children), os.getuid())
    for pid in children:
        os.kill(pid, 9)
    """
    assert python_in(group, body).stdout.split() == ["4", str(os.getuid())]


@needs_memory
def test_memory_is_bounded_over_all_processes_and_a_kill_is_counted(group):
    group.set_limits(120 << 20, 50)
    body = """
    import os, time
    def hold(mebibytes):
        held = bytearray(b"x") * (mebibytes << 20)
        time.sleep(60)
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            hold(50)
        children.append(pid)
    killed, status = os.wait()
    print(os.WTERMSIG(status))
    for pid in set(children) - {killed}:
        os.kill(pid, 9)
    """
    assert group.memory_kills() == 0
    assert python_in(group, body).stdout.split() == ["9"]
    assert group.memory_kills() >= 1


@needs_memory
def test_a_limit_below_what_is_held_kills_nothing(group):
    group.set_limits(256 << 20, 50)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "held = bytearray(b'x') * (100 << 20); print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        group.add(process.pid)
        # What it took before it was put in is not counted, so it takes its memory when it is asked for.
        assert process.stdout.readline() == "held\n"
        before = group.held()
        group.set_limits(10 << 20, 50)
        assert group.limits()[0] >= before
        process.communicate("\n")
    assert (process.returncode, group.memory_kills()) == (0, 0)
    group.set_limits(10 << 20, 50)
    assert group.limits()[0] == 10 << 20


@needs_place
def test_closing_kills_what_is_left():
    made = Group(PLACE)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        made.add(process.pid)
        cgroups._close(made)
        assert process.wait() == -signal.SIGKILL
    assert not ours()


@needs_place
def test_what_a_killed_process_left_is_cleared_away_by_the_next():
    script = """
    import subprocess, sys, time
    from reward_kit.sandbox.kernel import cgroups
    group = cgroups.Group(cgroups.probe().place)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    group.add(child.pid)
    print(child.pid, flush=True)
    time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as killed:
        orphan = int(killed.stdout.readline())
        assert ours()
        cgroups._sweep(PLACE)
        assert ours(), "it still runs"
        killed.kill()
    for _ in range(1000):  # what was killed takes a moment to be gone
        cgroups._sweep(PLACE)
        if not ours():
            break
    assert not ours()
    assert not _runs(orphan)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


# --- Calls -----------------------------------------------------------------------------------------------------------

WITH_TREES = ["namespaces", "process"]
FORKS = """
import mmap
children = []
for _ in range({children}):
    pid = os.fork()
    if pid == 0:
        held = bytearray(b'x') * ({mebibytes} << 20)
        time.sleep({sleep})
        os._exit(0)
    children.append(pid)
return [os.waitpid(pid, 0)[1] for pid in children]
"""


@pytest.fixture(params=WITH_TREES)
async def sandbox(request):
    if missing(request.param):
        pytest.skip(AVAILABLE[request.param].reason if AVAILABLE else "not Linux")
    async with Sandbox(strength=request.param, slots=1) as opened:
        yield opened
    assert PLACE is None or not ours()


@needs_memory
@pytest.mark.parametrize("level", ["isolated", "warm"])
async def test_children_that_hold_too_much_together_meet_the_memory_limit(sandbox, level):
    body = FORKS.format(children=7, mebibytes=60, sleep=1)
    outcome = await run(sandbox, body, limits=TREE, level=level)
    assert (outcome.kind, outcome.value) == ("memory", None)
    assert outcome.failure.failure_class == "limit"
    assert "raise limits.memory_mb" in outcome.failure.message
    assert (await run(sandbox, "return 1", limits=TREE, level=level)).value == 1


@needs_memory
async def test_children_that_hold_little_are_left_alone(sandbox):
    outcome = await run(sandbox, FORKS.format(children=7, mebibytes=5, sleep=0.1), limits=TREE)
    assert (outcome.failure, outcome.value) == (None, [0] * 7)


@needs_memory
async def test_one_process_may_have_all_its_memory_and_all_its_files(sandbox):
    body = "held = bytearray(b'x') * (80 << 20)\nopen('f', 'wb').write(b'x' * (3 << 20))\nreturn len(held) >> 20"
    for limits in (TREE, dataclasses.replace(TREE, memory_mb=300), TREE):
        outcome = await run(sandbox, body, limits=limits)
        assert (outcome.failure, outcome.value) == (None, 80)


@needs_pids
async def test_processes_are_bounded_whoever_the_user_is(sandbox):
    body = """
started = 0
try:
    for _ in range(60):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        started += 1
except BlockingIOError:
    pass
return started
"""
    outcome = await run(sandbox, body, limits=TREE)
    assert outcome.value == TREE.processes


@needs_memory
async def test_a_zygote_that_was_the_victim_is_a_limit_and_not_lost(sandbox):
    if sandbox.strength != "process":
        pytest.skip("behind walls the zygote cannot be reached")
    body = "open(f'/proc/{os.getppid()}/oom_score_adj', 'w').write('1000')\n"
    outcome = await run(sandbox, body + FORKS.format(children=7, mebibytes=60, sleep=1), limits=TREE)
    assert (outcome.kind, outcome.exit) == ("memory", None)
    assert (await sandbox.call(plain("return 2"), None, limits=TREE)).value == 2
