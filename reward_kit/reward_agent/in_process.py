"""Scoring in this process without a sandbox. The reward is called in a thread or in the event loop.

Most calls take less time than it takes to wake a thread, so calls wait in one queue. A thread makes one call after
another and returns the results together. A burst of calls therefore costs two thread switches rather than two for each
call. To ensure that a slow call does not delay the others, an additional thread is started when a call has waited for a
millisecond, or immediately if recent calls were slow.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.lowlevel

from reward_kit.environments.snapshots import close_state
from reward_kit.errors import RewardError, RewardKitError, boundary
from reward_kit.loading import load_object
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.scoring import (
    Scored,
    ScoringRequest,
    failure_from_error,
    result_error,
    score_unbroken,
    unscored_result,
)
from reward_kit.reward_calls import OpenReward
from reward_kit.typed_interface import EvaluationMode, RewardSpec

try:
    from sniffio import current_async_library_cvar as _library
except ModuleNotFoundError:  # If it is not installed, it is not used either.
    _library = None  # type: ignore[assignment]

MAX_THREADS = 40  # anyio's default thread limit
_PATIENCE_S = 0.001
_WEIGHT = 0.25  # the weight of the last call in the moving average of durations
logger = logging.getLogger("reward_kit.reward_agent")


class OverdueError(TimeoutError):
    """Raised if a call exceeded its deadline and was abandoned. Its thread may still be running the call."""


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
    """Daemon threads that make calls for the running event loop. They are kept until `close`.

    The time of a call is counted from its start. If a call is abandoned, its thread ends with the call and no longer
    counts toward `most`, the maximum number of working threads.
    """

    def __init__(self, deadline_s: float | None = None, most: int = MAX_THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s, self._most = deadline_s, most
        self._look: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._over: deque[_Call] = deque()
        self._is_notified = False

        self._lock = threading.Lock()  # guards everything below
        self._waiting: deque[_Call] = deque()
        self._threads: set[_Thread] = set()
        self._idle: list[_Thread] = []
        self._active = 0
        self._of_late_s = 0.0
        self._is_closed = False

    async def run(self, function: Callable[[], Any], *, is_bounded: bool = True) -> Any:
        """Call `function` in a thread, with a copy of the context variables of the caller.

        If the caller is cancelled, a waiting call is dropped, and a running call is abandoned. A thread cannot be
        killed, so an abandoned call continues and its result is discarded. If the function raises a
        `KeyboardInterrupt`, or any other exception that is not an `Exception`, the exception is replaced with a
        `RuntimeError`, because it would end the event loop.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        context = contextvars.copy_context()
        if _library is not None:
            context.run(_library.set, None)  # the thread may run its own event loop
        call = _Call(function, context, self._loop.create_future(), is_bounded, time.monotonic())
        with self._lock:
            if self._active == 0 or (self._of_late_s > _PATIENCE_S and self._active < self._most):
                self._start()
            self._waiting.append(call)
        if self._look is None:
            self._look = self._loop.call_later(_PATIENCE_S, self._look_after)
        if is_bounded and self._deadline_s is not None and self._alarm is None:
            self._alarm = self._loop.call_later(self._deadline_s, self._ring, self._deadline_s)
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
            call.error = None  # The traceback references this frame.

    def close(self) -> None:
        """End idle threads immediately, and end the others when their calls end."""
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

    def _look_after(self) -> None:
        """Collect results, and start threads for waiting calls.

        This method is called every millisecond while calls are waiting.
        """
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
        self._is_notified = False  # Set this first, so that later results notify again.
        while self._over:
            call = self._over.popleft()
            if not call.done.done():
                call.done.set_result(None)

    def _ring(self, deadline_s: float) -> None:
        """Abandon the calls that have exceeded the deadline.

        One timer is enough, because a call that starts later also becomes due later.
        """
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

    def _give_up(self, call: _Call) -> None:  # Call this with the lock held, like `_start`.
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

    # The following methods run in the threads.

    def _make_calls(self, thread: _Thread) -> None:
        while (call := self._next(thread)) is not None:
            try:
                call.result = call.context.run(call.function)
            except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
                # Ctrl-C reaches only the main thread, so the function itself raised this exception.
                if not isinstance(error, Exception | SystemExit | asyncio.CancelledError):
                    failure = RuntimeError(f"the function raised {type(error).__name__}")
                    failure.__cause__, error = error, failure
                call.error = error
            call.is_over = True
            self._over.append(call)
            del call  # Free the call while the thread waits for the next one.
        self._notify()

    def _next(self, thread: _Thread) -> _Call | None:
        """Wait for the next call of this thread, or return None if the thread must end."""
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
            # Notify the loop only now, so that it takes results in batches. While calls are waiting, `_look_after`
            # takes the results.
            self._notify()
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

    def _notify(self) -> None:
        if not self._over or self._is_notified:
            return
        self._is_notified = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:
            logger.debug("a thread ended after its event loop: %s", error)


class _Thread(threading.Thread):
    """A thread and its current call. If the call is abandoned, the thread counts as lost."""

    def __init__(self, make_calls: Callable[[_Thread], None]) -> None:
        super().__init__(name="reward-kit calls", daemon=True)
        self._make_calls = make_calls
        self.call: _Call | None = None
        self.is_lost = False
        self.wake = threading.Lock()
        self.wake.acquire()

    def run(self) -> None:
        """Make calls until the thread must end."""
        self._make_calls(self)


_Result = TypeVar("_Result")


class InProcessScorer:
    """A scorer that calls a reward in this process without a sandbox.

    A synchronous function is called in a thread, and an async function in the event loop.

    Args:
        spec: the reward. Its resources are opened and its instance is created before the first call.
        deadline_s: the time limit in seconds for opening the reward, and for one call. The wait for a thread is not
            included. If a call exceeds the limit, its rollouts are unscored, with the failure class `timeout`.
        max_threads: the maximum number of concurrent calls to a synchronous function.
    """

    def __init__(self, spec: RewardSpec, deadline_s: float | None = None, *, max_threads: int = MAX_THREADS) -> None:
        self._spec, self._deadline_s, self._max_threads = spec, deadline_s, max_threads
        folder = spec.origin.file.parent if spec.origin else None
        self._load = functools.partial(load_object, folder=folder)
        self._opened: OpenReward | None = None
        self._threads: CallThreads | None = None
        self._opening = anyio.Lock()
        self._sandbox = {"level": "in_process"}
        if spec.weakened_from is not None:
            self._sandbox["asked"] = spec.weakened_from

    @property
    def id(self) -> str:
        return self._spec.id

    @property
    def mode(self) -> EvaluationMode:
        return self._spec.mode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            with anyio.CancelScope(shield=True), boundary(RewardError, f"close of reward {self._spec.id!r}"):
                await opened.close()
        except RewardKitError as problem:  # All scores exist, so log only a warning.
            logger.warning("%s", problem, exc_info=problem)
        finally:
            if self._threads is not None:
                self._threads.close()

    async def score(self, request: ScoringRequest) -> Scored:
        if self._spec.mode == "batch":
            return (await self.score_group([request]))[0]
        if request.failure is not None:
            return Scored(request.rollout_id, None, request.failure)
        began = time.perf_counter()
        result: EvaluateResult | RewardKitError
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                opened = self._opened or await self._open()
                values = request.named_values(self._spec.parameters)
                result = await self._closing([values], opened.call(values))
        except RewardKitError as error:
            result = error
        return self._scored(request, result, time.perf_counter() - began)

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        if self._spec.mode == "pointwise":
            return [await self.score(request) for request in requests]
        return await score_unbroken(requests, self._score_complete)

    async def _score_complete(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        began = time.perf_counter()
        results: Sequence[EvaluateResult | RewardKitError]
        try:
            with boundary(RewardError, f"reward {self._spec.id!r}"):
                opened = self._opened or await self._open()
                rollouts: list[dict[str, Any] | RewardKitError] = []
                for request in requests:
                    try:
                        with boundary(RewardError, f"reward {self._spec.id!r}"):
                            rollouts.append(request.named_values(self._spec.parameters))
                    except RewardKitError as error:  # Exclude a rollout whose state is unreadable from the call.
                        rollouts.append(error)
                given = [values for values in rollouts if not isinstance(values, RewardKitError)]
                results = await self._closing(given, opened.call_group(rollouts))
        except RewardKitError as error:
            results = [error] * len(requests)
        duration_s = time.perf_counter() - began
        return [self._scored(*pair, duration_s) for pair in zip(requests, results, strict=True)]

    def _scored(self, request: ScoringRequest, result: EvaluateResult | RewardKitError, duration_s: float) -> Scored:
        if isinstance(result, RewardKitError):
            kept, error = unscored_result(str(result), [result.judge_usage] if result.judge_usage else []), result
        else:
            kept, invalid = result, result_error(self._spec.id, result, len(request.assistant_turns))
            if invalid is None:
                return Scored(request.rollout_id, kept, None, duration_s, self._sandbox)
            error = invalid
        logger.info("episode %s cannot be scored", request.rollout_id, exc_info=error)
        failure, asked_s = failure_from_error(error)
        return Scored(request.rollout_id, kept, failure, duration_s, self._sandbox, retry_after_s=asked_s)

    async def _closing(self, given: Iterable[Mapping[str, Any]], call: Coroutine[Any, Any, _Result]) -> _Result:
        """Await a call within the deadline, and then close the states of its rollouts."""
        try:
            result = await self._in_time(call)
        except OverdueError:
            raise  # States stay open, as on cancellation, because the abandoned call may still use them.
        except Exception:
            _close_states(given)
            raise
        _close_states(given)
        return result

    async def _in_time(self, call: Coroutine[Any, Any, _Result]) -> _Result:
        if self._deadline_s is None or not self._spec.is_async:
            return await call  # The threads enforce the deadline.
        with anyio.move_on_after(self._deadline_s):
            return await call
        raise OverdueError

    async def _open(self) -> OpenReward:
        with anyio.fail_after(self._deadline_s):
            async with self._opening:
                if self._opened is None:
                    threads = CallThreads(self._deadline_s, self._max_threads)
                    run = functools.partial(threads.run, is_bounded=False)
                    opened = OpenReward(self._spec, self._load, run, threads.run)
                    with ExitStack() as undo:
                        undo.callback(threads.close)
                        await opened.open()
                        undo.pop_all()
                    self._opened, self._threads = opened, threads
                return self._opened


def _close_states(given: Iterable[Mapping[str, Any]]) -> None:
    for values in given:
        close_state(values.get("state"))


def warn_unconfined(spec: RewardSpec) -> None:
    """Log a warning, once, if a reward requests a sandbox but was passed as a function.

    A reward that is passed as a function runs without a sandbox.
    """
    if spec.sandbox not in (None, "in_process") and spec.weakened_from is None:
        _warn_unconfined(spec.id, spec.sandbox)


@functools.lru_cache(maxsize=1000)
def _warn_unconfined(id: str, level: str) -> None:
    advice = "to run it in the sandbox, pass a reference, as in load_reward('file.py:function')"
    logger.warning("reward %r requests %s but runs in_process, without a sandbox; %s", id, level, advice)


async def score_one(spec: RewardSpec, request: ScoringRequest, deadline_s: float | None = None) -> Scored:
    """Call a reward for one rollout in this process, and close its resources."""
    warn_unconfined(spec)
    async with InProcessScorer(spec, deadline_s) as scorer:
        return await scorer.score(request)
