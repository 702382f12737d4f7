"""Children prepared before their call."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
import pytest_asyncio

from reward_kit.sandbox import Program, Sandbox
from tests.sandbox.sandbox_calls import AVAILABLE, QUICK, missing, plain, run

pytestmark = pytest.mark.asyncio(loop_scope="module")

STATEFUL = Program("import os\nseen = []\ndef solve(x):\n    seen.append(x)\n    return seen\n", "solve", form="plain")


@pytest_asyncio.fixture(loop_scope="module", params=["namespaces", "landlock"])
async def sandbox(request):
    if missing(request.param):
        pytest.skip(AVAILABLE[request.param].reason if AVAILABLE else "not Linux")
    async with Sandbox(strength=request.param, slots=1) as opened:
        yield opened


async def settled(sandbox) -> int:
    """Return the only waiting child."""
    async with asyncio.timeout(10):
        while not (sandbox.is_settled and sandbox.waiting_children):  # noqa: ASYNC110 - nobody tells it
            await asyncio.sleep(0.001)
    (waiting,) = sandbox.waiting_children
    return waiting


async def after_load(sandbox) -> None:
    """Wait until a waiting child has finished what it does at loading."""
    waiting = await settled(sandbox)
    (zygote,) = sandbox._idle
    async with asyncio.timeout(10):
        while not (zygote._prepared.has_extra or zygote._prepared.ended.done()):  # noqa: ASYNC110 - nor this
            await asyncio.sleep(0.01)
    assert waiting


async def test_next_call_uses_a_prepared_child_with_fresh_state(sandbox):
    for number in range(4):
        assert (await sandbox.call(STATEFUL, number, limits=QUICK)).value == [number]
        waiting = await settled(sandbox)
        (zygote,) = sandbox._idle
        child = zygote._prepared
        assert child.pid == waiting
        assert (await sandbox.call(STATEFUL, number, limits=QUICK)).value == [number]
        assert child.ended.done()


async def test_prepared_child_is_not_used_for_other_limits_or_programs(sandbox):
    await run(sandbox, "return 1")
    first = await settled(sandbox)
    assert (await run(sandbox, "return 2")).value == 2
    assert await settled(sandbox) != first
    many = await run(sandbox, "return len(os.urandom(x))", 10, limits=replace(QUICK, memory_mb=300))
    assert many.value == 10
    too_much = await run(sandbox, "return len(bytearray(250 << 20))", limits=QUICK)
    assert too_much.kind == "memory"


async def test_failing_program_is_loaded_in_its_own_call(sandbox):
    broken = plain("return 1 / x")
    assert (await sandbox.call(broken, 1, limits=QUICK)).value == 1.0
    for _ in range(2):
        failed = await sandbox.call(broken, 0, limits=QUICK)
        assert failed.failure is not None and "ZeroDivisionError" in failed.failure.message


LATER = """
import os, threading, time
def later():
    time.sleep(0.2)
    {act}
threading.Thread(target=later, daemon=True).start()
def solve(x):
    return x
"""


@pytest.mark.parametrize("act", ["os.write(3, b'x' * 500)", "os._exit(0)"])
async def test_prepared_child_that_acts_while_waiting_is_replaced(sandbox, act):
    program = Program(LATER.format(act=act), "solve", form="plain")
    assert (await sandbox.call(program, 1, limits=QUICK)).value == 1
    await after_load(sandbox)
    assert (await sandbox.call(program, 2, limits=QUICK)).value == 2


async def test_output_while_loading_is_included_in_the_call(sandbox):
    program = Program("print('loaded')\ndef solve(x):\n    print(x)\n    return x\n", "solve", form="plain")
    for number in range(3):
        assert (await sandbox.call(program, number, limits=QUICK)).stdout == f"loaded\n{number}\n"


async def test_program_larger_than_the_socket_buffer_is_sent_ahead(sandbox):
    program = Program(f"text = {'x' * 3_000_000!r}\ndef solve(x):\n    return len(text) + x\n", "solve", form="plain")
    for number in range(3):
        assert (await sandbox.call(program, number, limits=QUICK)).value == 3_000_000 + number


async def test_closing_the_sandbox_ends_prepared_children(sandbox):
    await run(sandbox, "return 1")
    waiting = await settled(sandbox)
    await sandbox.__aexit__(None, None, None)
    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)
    await sandbox.__aenter__()
