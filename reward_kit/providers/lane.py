"""The one queue to a model of an endpoint: pace, concurrency and outages for all requests of a run together.

A request passes through it with each of its attempts. Waiting costs nothing: requests stand in one queue in the order
in which they came, one timer serves the first of them, and each that leaves lets the next in. What a request waits here
uses up neither its attempts nor its retry budget.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from reward_kit.errors import DeadlineError, ProviderError
from reward_kit.providers.concurrency import Concurrency
from reward_kit.providers.faults import AccessError, EndpointError, TransientError, UnknownHostError, UnreachableError
from reward_kit.providers.outage import Fault, Outage
from reward_kit.providers.rates import Bucket, Rates, TokenEstimate

_FIRST_PATIENCE_S = 60.0  # an endpoint that never answered is more likely a wrong address than an outage
_TELL_AGAIN_S = 30.0
_BURST_S = 1.0  # the refusals of one burst come within about this time


WHILE_WAITING: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("WHILE_WAITING", default=nullcontext)
"""What surrounds the time that a request of this task waits in a lane, such as an episode's clock standing still."""


class Timer(Protocol):
    """Something that will happen."""

    def cancel(self) -> None: ...


class Clock:
    """The time of the running loop."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Have `callback` called after a while."""
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Watcher(Protocol):
    """Who is told how an endpoint is doing, and decides how long to wait for it."""

    outage_patience_s: float

    def tell(self, line: str) -> None: ...

    def give_up(self, reason: str) -> None: ...


class Passage:
    """One request's way through a lane, with all its attempts.

    Args:
        lane: the lane.
        request: the request's number.
        size: bytes of its body.
        max_completion: tokens that its answer may have, 0 where unknown.
        budget_s: seconds for which refusals of it alone are waited for.
    """

    __slots__ = (
        "_lane",
        "admitted",
        "attempts",
        "budget_s",
        "is_in",
        "is_probe",
        "max_completion",
        "number",
        "request",
        "size",
        "tokens",
        "waited_s",
    )

    def __init__(self, lane: Lane, request: int, size: int, max_completion: float, budget_s: float) -> None:
        self._lane, self.request = lane, request
        self.size, self.max_completion, self.budget_s = size, max_completion, budget_s
        self.attempts = self.number = 0
        self.tokens = self.waited_s = self.admitted = 0.0
        self.is_in = self.is_probe = False

    async def enter(self) -> None:
        """Wait until the next attempt may be made.

        Raises:
            ProviderError: the endpoint has been given up.
        """
        await self._lane.enter(self)

    def answered(self, prompt_tokens: int | None = None, completion_tokens: int = 0) -> None:
        """The attempt brought an answer, with this usage where it is known."""
        self._lane.answered(self, prompt_tokens, completion_tokens)

    def failed(self, error: EndpointError, *, is_last: bool) -> bool:
        """The attempt failed; True where that is the endpoint's trouble and the attempt does not count."""
        return self._lane.failed(self, error, is_last)

    def leave(self) -> None:
        """No more attempts, also in the middle of one."""
        self._lane.leave(self)


class _Waiter(NamedTuple):
    passage: Passage
    turn: asyncio.Future[None]


class Lane:
    """All requests of a run to one model of one endpoint.

    Args:
        name: for messages.
        rates: what the user allows.
        watcher: is told of outages and rate limits.
        clock: replaced in tests.
    """

    def __init__(self, name: str, rates: Rates, watcher: Watcher, clock: Clock | None = None) -> None:
        self.rates = rates
        self._name, self._watcher, self._clock = name, watcher, clock or Clock()
        now = self._clock.now()
        self._requests = Bucket(rates.requests_per_minute, now) if rates.requests_per_minute else None
        self._tokens = Bucket(rates.tokens_per_minute, now) if rates.tokens_per_minute else None
        self._estimate = TokenEstimate()
        self._concurrency = Concurrency(rates.max_connections)
        self._outage = Outage()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[_Waiter] = deque()
        self._timer: Timer | None = None
        self._patience: Timer | None = None
        self._in_flight = self._sent = self._known = 0
        self._paused_until = self._last_answer = self._told_at = float("-inf")
        self._given_up: str | None = None

    @property
    def is_down(self) -> bool:
        """Whether the endpoint is down, so that requests wait."""
        return self._outage.is_open

    @property
    def in_flight(self) -> int:
        """Requests that are being answered now."""
        return self._in_flight

    def passage(self, size: int, max_completion: float = 0.0, budget_s: float = 300.0) -> Passage:
        """The way of one request; see `Passage`."""
        self._known += 1
        return Passage(self, self._known, size, max_completion, budget_s)

    async def enter(self, passage: Passage) -> None:
        """As `Passage.enter`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # whatever was in flight in another loop ended with it
            self._loop, self._timer, self._in_flight = loop, None, 0
            self._waiting.clear()
        now = self._clock.now()
        if self._tokens is not None:
            passage.tokens = self._estimate.tokens(passage.size, passage.max_completion)
        if not self._waiting and self._wait_s(passage, now) == 0:
            self._admit(passage, now)
            return
        if self._given_up is not None:
            raise ProviderError(self._given_up)
        await self._queue(passage, now, loop)

    async def _queue(self, passage: Passage, began: float, loop: asyncio.AbstractEventLoop) -> None:
        waiter = _Waiter(passage, loop.create_future())
        if passage.attempts and not self._outage.is_open:
            self._waiting.appendleft(waiter)  # it has waited for its turn before
        else:
            self._waiting.append(waiter)
        self._let_in()
        try:
            with WHILE_WAITING.get()():
                await waiter.turn
        except asyncio.CancelledError:
            if passage.is_in:  # let in and cancelled at the same moment
                self.leave(passage)
            else:
                self._let_in()
            raise
        finally:
            passage.waited_s += self._clock.now() - began

    def _let_in(self) -> None:
        """Let in whoever may go now, and come back when the next one may."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.now()
        while self._waiting:
            passage, turn = self._waiting[0]
            if not turn.done():
                wait_s = self._wait_s(passage, now)
                if wait_s is None:
                    return
                if wait_s > 0:
                    self._timer = self._clock.call_later(wait_s, self._let_in)
                    return
                self._admit(passage, now)
                turn.set_result(None)
            self._waiting.popleft()

    def _wait_s(self, passage: Passage, now: float) -> float | None:
        """Seconds until this one may go; None where that is up to those in flight."""
        if self._outage.is_open:
            return self._outage.probe_wait_s(now)
        if self._in_flight + 1 > self._concurrency.limit + 1e-9:
            return None
        wait_s = max(0.0, self._paused_until - now)
        if self._requests is not None:
            wait_s = max(wait_s, self._requests.wait_s(1.0, now))
        if self._tokens is not None:
            wait_s = max(wait_s, self._tokens.wait_s(passage.tokens, now))
        return wait_s

    def _admit(self, passage: Passage, now: float) -> None:
        self._in_flight += 1
        self._sent += 1
        passage.attempts += 1
        passage.number, passage.admitted, passage.is_in = self._sent, now, True
        if self._outage.is_open:
            passage.is_probe = True
            self._outage.probe()
        if self._requests is not None:
            self._requests.take(1.0)
        if self._tokens is not None:
            self._tokens.take(passage.tokens)

    def _release(self, passage: Passage) -> bool:
        """Give back the slot; whether the attempt was a probe."""
        self._in_flight -= 1
        was_probe, passage.is_in, passage.is_probe = passage.is_probe, False, False
        return was_probe

    def leave(self, passage: Passage) -> None:
        """As `Passage.leave`."""
        if not passage.is_in:
            return
        if self._release(passage) and self._outage.is_open:
            self._outage.probe_again(self._clock.now())
        self._let_in()

    def answered(self, passage: Passage, prompt_tokens: int | None, completion_tokens: int) -> None:
        """As `Passage.answered`."""
        self._release(passage)
        self._is_alive()
        if self._tokens is not None and prompt_tokens is not None:
            self._tokens.take(prompt_tokens + completion_tokens - passage.tokens)
            self._estimate.learn(passage.size, prompt_tokens, completion_tokens)
        self._concurrency.answered(bool(self._waiting))
        if self._waiting:
            self._let_in()

    def _is_alive(self) -> None:
        self._last_answer = now = self._clock.now()
        if self._outage.since is None:
            return
        since = self._outage.answered()
        self._given_up = None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if since is not None:
            self._watcher.tell(f"{self._name} answers again after {now - since:.0f} s; the run goes on")

    def failed(self, passage: Passage, error: EndpointError, is_last: bool) -> bool:
        """As `Passage.failed`."""
        was_probe = self._release(passage)
        now = self._clock.now()
        fault = self._fault(error)
        if fault is None:
            self._is_alive()
            self._let_in()
            return False
        if isinstance(error, TransientError) and error.is_overloaded:
            self._refused(passage.number, error.retry_after_s, now)
        if self._outage.failed(passage.request, fault, now, is_last=is_last):
            self._pause(error, now)
        elif was_probe and self._outage.is_open:
            self._outage.probe_later(now)
        excused = self._outage.is_open or self._is_everyones(passage, error, now)
        if excused:
            passage.waited_s += now - passage.admitted
        self._let_in()
        return excused

    def _fault(self, error: EndpointError) -> Fault | None:
        """What an error says of the endpoint; None where it is an answer to the request."""
        has_answered = self._last_answer >= 0
        if isinstance(error, AccessError) and (error.is_certain or not has_answered):
            self._stop_soon(str(error))
        if isinstance(error, UnknownHostError):
            if has_answered:
                return Fault.UNREACHABLE
            self._stop_soon(str(error))
            return Fault.FAILED
        if isinstance(error, UnreachableError):
            return Fault.UNREACHABLE
        if isinstance(error, TransientError):
            return Fault.REFUSED if error.is_refusal else Fault.FAILED
        return Fault.FAILED if isinstance(error, DeadlineError) else None

    def _refused(self, number: int, asked_s: float | None, now: float) -> None:
        """Cut the concurrency, and leave the endpoint alone for as long as it asks, or as experience says."""
        is_news = self._concurrency.refused(number, self._sent, self._in_flight + 1)
        if asked_s is not None:
            if asked_s > self._watcher.outage_patience_s:
                self._stop_soon(f"{self._name} asks to be left alone for {asked_s:g} s")
            self._paused_until = max(self._paused_until, now + min(asked_s, self._watcher.outage_patience_s))
        elif is_news:
            self._paused_until = max(self._paused_until, now + self._concurrency.pause_s())
        if is_news and now - self._told_at >= _TELL_AGAIN_S:
            self._told_at = now
            self._clock.call_later(_BURST_S, self._tell_limit)

    def _tell_limit(self) -> None:
        most = int(self._concurrency.limit)
        wait_s = self._paused_until - self._clock.now()
        pause = f", none for {wait_s:.0f} s" if wait_s >= 1 else ""
        self._watcher.tell(f"{self._name} limits the rate: at most {most} requests in flight from now on{pause}")

    def _is_everyones(self, passage: Passage, error: EndpointError, now: float) -> bool:
        """Whether a refusal is the endpoint's state and not this request's: nothing was answered since it was sent."""
        if not isinstance(error, TransientError) or not error.is_overloaded or self._last_answer >= passage.admitted:
            return False
        since = self._outage.since
        waited_s = 0.0 if since is None else now - since
        if waited_s >= self._patience_s():
            what = self._what(str(error))
            self._stop_soon(f"{self._name} has answered nothing for {waited_s:.0f} s: {what}", fail=True)
        return self._outage.is_shared or waited_s < passage.budget_s

    def _patience_s(self) -> float:
        patience_s = self._watcher.outage_patience_s
        return patience_s if self._last_answer >= 0 else min(patience_s, _FIRST_PATIENCE_S)

    def _pause(self, error: EndpointError, now: float) -> None:
        """An outage begins."""
        began = now if self._outage.since is None else self._outage.since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - began)))
        times = "once" if self._outage.count == 1 else f"{self._outage.count} times in a row since {since}"
        what = self._what(str(error))
        pause = "the run pauses and tries again, after 1 s at first and every 30 s at last"
        self._watcher.tell(f"{self._name} has failed {times}; {pause}: {what}")
        left_s = max(0.0, self._patience_s() - (now - began))
        self._patience = self._clock.call_later(left_s, lambda: self._lose_patience(str(error)))

    def _what(self, said: str) -> str:
        """What an error says, without the URL that this lane's name begins with already."""
        return said.removeprefix(self._name.partition(" ")[0]).lstrip(": ")

    def _lose_patience(self, last: str) -> None:
        if self._outage.is_open and self._outage.since is not None:
            waited_s = self._clock.now() - self._outage.since
            self._stop(f"{self._name} has answered nothing for {waited_s:.0f} s: {self._what(last)}", fail=True)

    def _stop_soon(self, reason: str, *, fail: bool = False) -> None:
        """`_stop`, outside of any request, so that the request that brought this to light can be cancelled too."""
        asyncio.get_running_loop().call_soon(lambda: self._stop(reason, fail=fail))

    def _stop(self, reason: str, *, fail: bool) -> None:
        """Tell the run, which may cancel those who wait; `fail` those who still do then."""
        self._watcher.give_up(reason)
        if not fail:
            return
        self._given_up = reason
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(ProviderError(reason))
