"""An event loop in a thread: results, errors, shutdown and behavior in forks."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import ContextVar

import anyio
import pytest

from reward_kit.blocking import LoopThread, run_blocking
from reward_kit.errors import RewardKitError

_HELD: ContextVar[str] = ContextVar("_HELD", default="closed")


@asynccontextmanager
async def held(events: list[str]) -> AsyncIterator[None]:
    """A context that holds a task open, as the reward agent does."""
    _HELD.set("open")
    leaving = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leaving.wait)
        yield
        leaving.set()
    events.append("closed")


class _Broken:
    async def __aenter__(self) -> None:
        raise ValueError("cannot be opened")

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("never opened")


def test_loop_thread_returns_results_and_errors_within_its_context() -> None:
    events: list[str] = []
    thread = LoopThread("test", held(events))

    async def look() -> str:
        return _HELD.get()

    async def fail() -> None:
        raise ValueError("told")

    assert thread.run(look()) == "open"
    assert "test" in {each.name for each in threading.enumerate()}
    with pytest.raises(ValueError, match="told"):
        thread.run(fail())
    assert events == []
    thread.close()
    thread.close()
    assert events == ["closed"]
    assert "test" not in {each.name for each in threading.enumerate()}
    with pytest.raises(RewardKitError, match="test is closed"):
        thread.run(look())


def test_close_cancels_running_calls_and_closes_the_context_once() -> None:
    events: list[str] = []
    thread = LoopThread("test", held(events))
    began = threading.Event()

    async def wait() -> None:
        began.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(lambda: thread.run(wait()))
        began.wait()
        for closing in [pool.submit(thread.close) for _ in range(2)]:
            closing.result()
        with pytest.raises(CancelledError):
            running.result()
    assert events == ["closed"]


def test_forked_process_does_not_wait_for_the_loop_thread() -> None:
    thread = LoopThread("test")
    forked = multiprocessing.get_context("fork").Process(target=_used_in_a_fork, args=(thread,))
    forked.start()
    forked.join(timeout=60)
    hangs = forked.is_alive()
    forked.kill()
    assert not hangs and forked.exitcode == 42
    thread.run(asyncio.sleep(0))
    thread.close()


_shared: list[LoopThread] = []


def test_forked_process_can_replace_the_loop_thread() -> None:
    _shared.append(LoopThread("test"))
    forked = multiprocessing.get_context("fork").Process(target=_replaced_in_a_fork)
    forked.start()
    forked.join(timeout=60)
    hangs = forked.is_alive()
    forked.kill()
    assert not hangs and forked.exitcode == 42
    _shared.pop().close()


def _replaced_in_a_fork() -> None:
    _shared.clear()
    gc.collect()
    os._exit(LoopThread("test").run(_answer()))


def _used_in_a_fork(thread: LoopThread) -> None:
    thread.close()
    try:
        thread.run(asyncio.sleep(0))
    except RewardKitError as error:
        os._exit(42 if "forked" in str(error) else 43)


def test_thread_whose_context_fails_to_open_is_not_created() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="cannot be opened"):
        LoopThread("test", _Broken())  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_error_is_passed_to_the_held_context() -> None:
    left: list[BaseException | None] = []

    class Held:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
            left.append(error)

    error = ValueError("in the block")
    for given in (None, error):
        LoopThread("test", Held()).close(given)
    assert left == [None, error]


def test_coroutine_sees_context_variables_of_the_caller() -> None:
    own: ContextVar[int] = ContextVar("own")
    thread = LoopThread("test", held([]))
    own.set(3)

    async def look() -> tuple[int, str]:
        return own.get(), _HELD.get()

    assert thread.run(look()) == (3, "open")
    thread.close()


async def _answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_run_blocking_works_inside_and_outside_an_event_loop() -> None:
    assert run_blocking(_answer()) == 42

    async def within() -> int:
        return run_blocking(_answer())

    assert asyncio.run(within()) == 42
