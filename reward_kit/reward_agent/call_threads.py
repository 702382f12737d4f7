"""Threads that call plain functions for an event loop, where most calls take less time than it takes to wake a thread.

Calls wait in one queue. A thread makes one after the other and hands their results back together, so a burst of calls
costs two hand-overs, not two for each call. So that a slow call holds no other one back, a further thread is started
where a call has waited for a millisecond, and at once where calls have taken longer than that of late.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio.lowlevel

try:
    from sniffio import current_async_library_cvar as _library
except ModuleNotFoundError:  # then nothing asks it
    _library = None  # type: ignore[assignment]

MAX_THREADS = 40  # anyio's own limit for the threads of a loop

_PATIENCE_S = 0.001
_WEIGHT = 0.25  # of the last call in how long calls take of late

logger = logging.getLogger("reward_kit.reward_agent")


class OverdueError(TimeoutError):
    """A call exceeded its deadline and was given up. Its thread may still be at it."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    context: contextvars.Context
    done: asyncio.Future[None]
    is_bounded: bool
    asked: float
    began: float = 0.0
    thread: _Thread | None = None
    result: Any = None
    error: BaseException | None = None
    is_over: bool = False
    is_given_up: bool = False


class CallThreads:
    """Daemon threads for the running event loop, started as they are needed and kept until they are closed.

    Args:
        deadline_s: for one call, from its beginning: the wait for a thread is not counted.
        most: threads at work at a time. One whose call was given up is not counted any more, and ends with that call.
    """

    def __init__(self, deadline_s: float | None = None, most: int = MAX_THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s, self._most = deadline_s, most
        self._look: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._over: deque[_Call] = deque()
        self._is_told = False

        self._lock = threading.Lock()  # of everything below
        self._waiting: deque[_Call] = deque()
        self._threads: set[_Thread] = set()
        self._idle: list[_Thread] = []
        self._active = 0
        self._of_late_s = 0.0
        self._is_closed = False

    async def run(self, function: Callable[[], Any], *, is_bounded: bool = True) -> Any:
        """What `function` returns, called in a thread, with a copy of the caller's context variables.

        Where this is cancelled, a call that waits is never made. One that has begun is given up: a thread cannot be
        ended, so it goes on, and nobody listens.

        Args:
            function: called without arguments.
            is_bounded: the deadline is for it too.

        Raises:
            OverdueError: the call exceeded the deadline.
            BaseException: whatever the function raised, as it raised it; but a `KeyboardInterrupt` or the like as the
                cause of a `RuntimeError`, since it would end the event loop.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        context = contextvars.copy_context()
        if _library is not None:
            context.run(_library.set, None)  # the thread may run an event loop of its own
        call = _Call(function, context, self._loop.create_future(), is_bounded, time.monotonic())
        self._put(call)
        try:
            await call.done
        except asyncio.CancelledError:
            with self._lock:
                self._give_up(call)
            raise
        if call.error is None:
            return call.result
        try:
            raise call.error
        finally:
            call.error = None  # its traceback holds this frame

    def close(self) -> None:
        """End the threads: those that are at nothing now, the others after what they are at."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._start()
            ending = [thread for thread in self._threads if thread.call is None or thread.call.is_over]
            is_quiet = len(ending) == len(self._threads) and not self._waiting
        if is_quiet:
            for timer in filter(None, (self._look, self._alarm)):
                timer.cancel()
            self._look = self._alarm = None
            for thread in ending:
                thread.join()

    def _put(self, call: _Call) -> None:
        with self._lock:
            if self._active == 0 or (self._of_late_s > _PATIENCE_S and self._active < self._most):
                self._start()
            self._waiting.append(call)
        if self._look is None:
            self._look = self._loop.call_later(_PATIENCE_S, self._look_after)
        if call.is_bounded and self._deadline_s is not None and self._alarm is None:
            self._alarm = self._loop.call_later(self._deadline_s, self._ring, self._deadline_s)

    def _look_after(self) -> None:
        """While calls wait, every millisecond: take the results there are, and start threads for calls that waited."""
        self._look = None
        self._deliver()
        with self._lock:
            if not self._waiting:
                return
            self._look = self._loop.call_later(_PATIENCE_S, self._look_after)
            if time.monotonic() - self._waiting[0].asked >= _PATIENCE_S:
                for _ in range(min(len(self._waiting), self._most - self._active, max(self._active, 1))):
                    self._start()

    def _deliver(self) -> None:
        self._is_told = False  # first, so that what comes from here on is told of again
        while self._over:
            call = self._over.popleft()
            if not call.done.done():
                call.done.set_result(None)

    def _ring(self, deadline_s: float) -> None:
        """Give up what is overdue. One timer serves all: no call can be due before those that run, or `deadline_s`."""
        now = time.monotonic()
        with self._lock:
            calls = [thread.call for thread in self._threads if thread.call is not None]
            running = [call for call in calls if call.is_bounded and not call.is_over]
            due = [call for call in running if call.began + deadline_s <= now]
            for call in due:
                self._give_up(call)
            next_due = min((call.began + deadline_s for call in running if not call.is_given_up), default=None)
            if next_due is None and self._waiting:
                next_due = now + deadline_s
        for call in due:
            if not call.done.done():
                call.done.set_exception(OverdueError())
        self._alarm = None if next_due is None else self._loop.call_later(next_due - now, self._ring, deadline_s)

    # Below, `_give_up` and `_start` are called with the lock.

    def _give_up(self, call: _Call) -> None:
        call.is_given_up = True
        if (thread := call.thread) is not None and thread.call is call and not thread.is_lost:
            thread.is_lost = True
            self._threads.remove(thread)
            self._active -= 1

    def _start(self) -> None:
        if self._idle:
            self._idle.pop().wake.release()
        else:
            thread = _Thread(self._make_calls)
            thread.start()
            self._threads.add(thread)
        self._active += 1

    # In the threads.

    def _make_calls(self, thread: _Thread) -> None:
        while (call := self._next(thread)) is not None:
            try:
                call.result = call.context.run(call.function)
            except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
                call.error = _as_failure(error)
            call.is_over = True
            self._over.append(call)
            del call  # nothing of it is held while the thread waits for the next
        self._tell()

    def _next(self, thread: _Thread) -> _Call | None:
        """The thread's next call, when there is one; None where the thread is to end."""
        while True:
            with self._lock:
                if thread.is_lost:
                    return None
                if (call := self._take(thread)) is not None:
                    return call
                self._active -= 1
                if self._is_closed:
                    self._threads.remove(thread)
                    return None
                self._idle.append(thread)
            # Results are told of here and not earlier: the loop would take them one by one. While there is a next call,
            # others waited for it, and `_look_after` comes for the results should it be a long one.
            self._tell()
            thread.wake.acquire()

    def _take(self, thread: _Thread) -> _Call | None:
        now = time.monotonic()
        if thread.call is not None:
            self._of_late_s += _WEIGHT * (now - thread.call.began - self._of_late_s)
            thread.call = None
        while self._waiting:
            call = self._waiting.popleft()
            if not call.is_given_up:
                call.began, call.thread, thread.call = now, thread, call
                return call
        return None

    def _tell(self) -> None:
        if not self._over or self._is_told:
            return
        self._is_told = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:
            logger.debug("a thread ended after its event loop: %s", error)


class _Thread(threading.Thread):
    """A thread and the call it is at. It is lost where that call was given up."""

    def __init__(self, make_calls: Callable[[_Thread], None]) -> None:
        super().__init__(name="reward-kit calls", daemon=True)
        self._make_calls = make_calls
        self.call: _Call | None = None
        self.is_lost = False
        self.wake = threading.Lock()
        self.wake.acquire()

    def run(self) -> None:
        """Make calls until there is no need for it."""
        self._make_calls(self)


def _as_failure(error: BaseException) -> BaseException:
    """Ctrl-C reaches the main thread alone: what looks like it here was raised by the function itself."""
    if isinstance(error, Exception | SystemExit | asyncio.CancelledError):
        return error
    failure = RuntimeError(f"it raised {type(error).__name__}")
    failure.__cause__ = error
    return failure
