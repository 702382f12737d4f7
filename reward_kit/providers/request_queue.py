"""The queue for one model at an endpoint. It handles rate limits, concurrency, outages and retries for a whole run.

Each request has a `Permit` from its `RequestQueue`. The permit makes the request wait for its turn before each attempt.
This wait counts neither as an attempt nor toward the retry budget. `development/traffic.md` explains the reasons.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from reward_kit.errors import DeadlineError, LimitError, ProviderError
from reward_kit.providers.faults import (
    ENDPOINT_ERRORS,
    AccessError,
    EndpointError,
    IdleTimeoutError,
    TransientError,
    UnknownHostError,
    UnreachableError,
    WrongEndpointError,
)
from reward_kit.validation import check_positive

T = TypeVar("T")
_log = logging.getLogger(__name__)
_EPSILON = 1e-9
_MEMORY = 0.1  # the weight of the latest response in a running average


@dataclass(frozen=True, slots=True)
class Rates:
    """The rate limits that the user sets for one model at one endpoint. None means that no limit applies.

    Attributes:
        requests_per_minute: the maximum number of attempts that begin in a minute.
        tokens_per_minute: the maximum number of prompt and completion tokens in a minute. `TokenEstimate` estimates the
            number of tokens in a request in advance.
        max_connections: the maximum number of concurrent requests.

    Raises:
        ConfigError: If a value is not a positive number.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_connections: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_connections"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value, is_integer=name == "max_connections")

    @property
    def is_unlimited(self) -> bool:
        """True if no limit is set."""
        return self == Rates()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on the number and the duration of attempts.

    Attributes:
        max_attempts: the maximum number of attempts, including the first.
        budget_s: the number of seconds after the first attempt during which further attempts may begin.
        base_s: the upper bound in seconds for the first random wait. The bound doubles with each retry.
        cap_s: the upper bound in seconds for every random wait.
    """

    max_attempts: int = 5
    budget_s: float = 300.0
    base_s: float = 0.5
    cap_s: float = 30.0

    def wait_s(self, retry: int, retry_after_s: float | None, jitter: random.Random) -> float:
        """Return the number of seconds to wait before a retry: the Retry-After plus a random wait.

        `retry` is the number of earlier retries. The random wait is uniform in [0, min(cap_s, base_s * 2**retry)], so
        that requests that were rejected together are not retried together.
        """
        # Far beyond 2**64, the cap applies anyway. The bound ensures that the power fits a float.
        return (retry_after_s or 0.0) + jitter.uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** min(retry, 64)))


class Bucket:
    """A token bucket. Its capacity is one second's supply, but at least 1.

    In any window of w minutes, the total taken is at most `per_minute` * w, plus one bucket, plus one amount that
    exceeds the bucket. A full bucket allows such an amount, and later requests wait until the overdraft is repaid.
    """

    __slots__ = ("_at", "_capacity", "_level", "_rate")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        self._capacity = self._level = max(1.0, self._rate)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the number of seconds until `amount` can be taken."""
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        lacking = min(amount, self._capacity) - self._level
        return lacking / self._rate if lacking > _EPSILON else 0.0

    def take(self, amount: float) -> None:
        """Take `amount` from the bucket. A negative amount is put back."""
        self._level = min(self._capacity, self._level - amount)


class TokenEstimate:
    """An estimate of the number of tokens in a request, based on the usage of earlier requests.

    Before the first response, the estimate assumes that a token has 4 bytes and that the response has the maximum
    length.
    """

    __slots__ = ("_completion", "_tokens_per_byte")

    def __init__(self) -> None:
        self._tokens_per_byte = 0.25
        self._completion: float | None = None

    def tokens(self, size: int, max_completion: float) -> float:
        """Return the estimate for a request of `size` bytes with a response of at most `max_completion` tokens."""
        return size * self._tokens_per_byte + (max_completion if self._completion is None else self._completion)

    def learn(self, size: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Record the usage of a request of `size` bytes."""
        self._tokens_per_byte += _MEMORY * (prompt_tokens / max(size, 1) - self._tokens_per_byte)
        before = float(completion_tokens) if self._completion is None else self._completion
        self._completion = before + _MEMORY * (completion_tokens - before)


_CUT = 0.7
_TOLERATED_SHARE = 0.1
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Concurrency:
    """The limit on concurrent requests. It is learned from the endpoint's rejections.

    The rule is that of TCP (RFC 5681). A rejection reduces the limit to 70% of the requests in flight, as in CUBIC (RFC
    9438), or to the number of requests that the endpoint did not reject if that number is lower. After that, the limit
    doubles in each round trip until it reaches the 70%. From then on, it grows by one in each round trip. As in BBRv2,
    rejections that are rare and do not depend on the load cause no cut: once a request has been answered, the limit is
    cut only if the share of rejections, averaged over about two round trips, exceeds 10%.

    Attributes:
        limit: the current limit. It is infinite until the first rejection, unless `most` is set.
        tolerates: True if the latest rejection caused no cut because rejections are rare.
    """

    __slots__ = (
        *("_cut_at", "_cuts_in_a_row", "_has_answers", "_most", "_rejections", "_share", "_threshold", "_unrefused"),
        *("limit", "tolerates"),
    )

    def __init__(self, most: int | None = None) -> None:
        self._most = math.inf if most is None else float(most)
        self.limit = self._most
        self.tolerates = False
        self._threshold = math.inf
        self._cut_at = -1
        self._cuts_in_a_row = 0
        self._unrefused = 0
        self._share = 0.0  # running average of the share of rejections since the last cut
        self._has_answers = False  # whether any request was answered since the last cut
        self._rejections = 0  # rejections that caused or followed the last cut

    def answered(self, is_scarce: bool, in_flight: int = 1) -> None:
        """Record a response. If requests are waiting because of the limit (`is_scarce`), the limit grows."""
        self._cuts_in_a_row = 0
        self._has_answers = True
        self._share -= self._weight(in_flight) * self._share
        if is_scarce and self.limit < self._most:
            step = 1.0 if self.limit < self._threshold else 1.0 / self.limit
            self.limit = min(self.limit + step, self._most)

    def refused(self, number: int, latest: int, in_flight: int) -> bool:
        """Record that the attempt with this number was rejected, and return True if the rejection reduces the limit.

        A burst of rejections reduces the limit only once. Rejections of attempts that were sent before the cut do not
        reduce it again.
        """
        is_news = number > self._cut_at
        self.tolerates = False
        if is_news:
            self._share += self._weight(in_flight) * (1.0 - self._share)
            if self._share <= _TOLERATED_SHARE and self._has_answers:
                self.tolerates = True
                return False
            self._share, self._has_answers = 0.0, False
            self._cut_at, self._unrefused = latest, in_flight
            self._cuts_in_a_row, self._rejections = self._cuts_in_a_row + 1, 0
            self._threshold = max(1.0, _CUT * in_flight)
            self.limit = min(self.limit, self._threshold)
        self._rejections += 1
        self._unrefused -= 1
        self.limit = max(1.0, min(self.limit, float(self._unrefused)))
        return is_news

    @property
    def is_isolated(self) -> bool:
        """True if only the latest request was rejected, so other requests in the same round trip may be accepted."""
        return self._rejections == 1 and self._cuts_in_a_row <= 1 and self._unrefused > 0

    @staticmethod
    def _weight(in_flight: int) -> float:
        """Return the weight of one response in the share of rejections.

        The share is averaged over about two round trips.
        """
        return min(0.2, 0.5 / max(in_flight, 1))

    def pause_s(self) -> float:
        """Return the number of seconds to pause after a rejection without a Retry-After.

        The pause grows with each consecutive cut of the limit.
        """
        doublings = self._cuts_in_a_row - (2 if self._unrefused > 0 else 1)
        return 0.0 if doublings < 0 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(doublings, 64))


STREAK = 5
_FIRST_PROBE_S = 1.0
_LONGEST_PROBE_S = 30.0


class Fault(Enum):
    """The problem that a failed attempt reveals."""

    REFUSED = "rate limited"
    FAILED = "no response in time"
    UNREACHABLE = "no connection"


class Outage:
    """The failures of one endpoint since its last response. They may amount to an outage.

    An outage begins after `STREAK` consecutive failures of at least two different requests. If a single request keeps
    failing while no other request is in flight, that request is assumed to be the cause, and its retry limits end it. A
    failure to connect is never attributed to a request.
    """

    __slots__ = ("_first", "_interval_s", "count", "is_open", "is_shared", "next_probe", "since")

    def __init__(self) -> None:
        self.is_open = False  # True while the endpoint is considered to be down
        self.is_shared = False  # True if more than one request failed
        self.since: float | None = None  # time of the first failure since the last response
        self.count, self._first = (
            0,
            -1,
        )  # failures other than rejections since the last response; the first failed request
        self.next_probe: float | None = (
            0.0  # time of the next request that may probe the endpoint; None while a request is probing it
        )
        self._interval_s = _FIRST_PROBE_S

    def answered(self) -> float | None:
        """Record a response. If the endpoint was down, return the time at which the outage began, otherwise None."""
        since = self.since if self.is_open else None
        self.is_open = self.is_shared = False
        self.since, self.count, self._first = None, 0, -1
        self._interval_s = _FIRST_PROBE_S
        return since

    def failed(self, request: int, fault: Fault, now: float, *, is_last: bool = False) -> bool:
        """Record a failed attempt, and return True if an outage begins.

        `is_last` is True if it was the last attempt of its request.
        """
        if self.since is None:
            self.since, self._first = now, request
        self.is_shared = self.is_shared or request != self._first
        if fault is Fault.REFUSED:
            return False
        self.count += 1
        is_unreachable = fault is Fault.UNREACHABLE
        enough = self.count >= STREAK and (self.is_shared or is_unreachable)
        if self.is_open or not (enough or (is_last and is_unreachable)):
            return False
        self.is_open = True
        self.probe_later(now)
        return True

    def probe_later(self, now: float) -> None:
        """Schedule the next probe. Each wait is twice as long as the previous one, up to 30 s."""
        self.next_probe = now + self._interval_s
        self._interval_s = min(_LONGEST_PROBE_S, 2 * self._interval_s)


_OUTAGE_S = 600.0
_FIRST_OUTAGE_S = 60.0  # an endpoint that has never answered is more likely a wrong address than an outage
_FIRST_REFUSAL_S = 3.0  # if nothing listens at the address, waiting rarely helps
_TELL_AGAIN_S = 30.0
_NOTICED_S = 5.0  # a program that waits this long for a retry seems to hang
_BURST_S = 1.0  # the rejections of one burst arrive within about this time


WHILE_WAITING: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar("WHILE_WAITING", default=nullcontext)
"""A context that is entered while a request of this task waits in a queue. It may pause the clock of an episode."""


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None: ...


class Clock:
    """The clock and the timers of the event loop. Tests can replace them."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class EndpointWatcher(Protocol):
    """An object that receives notices about an endpoint and decides how long to wait for it."""

    outage_time_s: float | None

    def tell(self, line: str) -> None: ...
    def give_up(self, reason: str) -> None: ...


@dataclass(eq=False, slots=True)
class Permit:
    """Permission for one request to use a queue. The permit covers all attempts of the request."""

    queue: RequestQueue
    request: int  # number of the request
    size: int  # bytes of the request's body
    max_completion: float  # maximum number of completion tokens, 0 if unknown
    budget_s: float  # the seconds during which rejections are retried if only this request is rejected
    attempts: int = 0  # number of attempts made so far
    number: int = 0  # number of the latest attempt; the queue numbers all its attempts as they are sent
    tokens: float = 0.0  # number of tokens that were estimated for the latest attempt
    admitted: float = 0.0  # when the latest attempt was sent
    waited_s: float = 0.0  # seconds that do not count towards the retry budget
    is_in: bool = False
    is_probe: bool = False

    async def enter(self) -> None:
        """Wait until the next attempt may start.

        Raises:
            ProviderError: If the run has given up on the endpoint.
        """
        await self.queue.enter(self)

    def answered(self, prompt_tokens: int | None = None, completion_tokens: int = 0) -> None:
        """Report that the attempt was answered. Pass the usage if it is known."""
        self.queue.answered(self, prompt_tokens, completion_tokens)

    def failed(self, error: EndpointError, *, is_last: bool) -> bool:
        """Report that the attempt failed.

        Returns:
            True if the endpoint is the cause. In that case, the attempt does not count.
        """
        return self.queue.failed(self, error, is_last)

    def leave(self) -> None:
        """Release the permit, even during an attempt."""
        self.queue.leave(self)


class _Waiter(NamedTuple):
    permit: Permit
    turn: asyncio.Future[None]
    since: float


class Wait(NamedTuple):
    """The time that a request has been in flight or in the queue."""

    seconds: float
    is_queued: bool


class RequestQueue:
    """The queue for all requests that a run sends to one model at an endpoint."""

    def __init__(self, name: str, rates: Rates, watcher: EndpointWatcher, clock: Clock | None = None) -> None:
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
        self._sending: dict[int, Permit] = {}
        self._first_sent = math.inf
        self._sent = self._known = 0
        self._paused_until = self._last_answer = self._notified_at = float("-inf")
        self._given_up: str | None = None
        self._has_completed, self._rejections = False, 0

    @property
    def is_down(self) -> bool:
        """True if the endpoint is down and requests must wait."""
        return self._outage.is_open

    @property
    def in_flight(self) -> int:
        """The number of requests that have been sent but not answered."""
        return len(self._sending)

    def longest_wait(self) -> Wait | None:
        """Return the longest time for which a request has been waiting, or None without requests."""
        now = self._clock.now()
        waits = [Wait(now - permit.admitted, False) for permit in self._sending.values()]
        waits += [Wait(now - waiter.since, True) for waiter in self._waiting]
        return max(waits, default=None)

    def permit(self, size: int, max_completion: float = 0.0, budget_s: float = 300.0) -> Permit:
        """Return a permit for one request whose body has `size` bytes."""
        self._known += 1
        return Permit(self, self._known, size, max_completion, budget_s)

    async def enter(self, permit: Permit) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # requests in flight in a different loop ended with that loop
            self._loop, self._timer = loop, None
            self._sending.clear()
            self._waiting.clear()
        began = self._clock.now()
        if self._tokens is not None:
            permit.tokens = self._estimate.tokens(permit.size, permit.max_completion)
        if not self._waiting and self._wait_s(permit, began) == 0:
            self._admit(permit, began)
            return
        if self._given_up is not None:
            raise ProviderError(self._given_up)
        waiter = _Waiter(permit, loop.create_future(), began)
        if permit.attempts and not self._outage.is_open:
            self._waiting.appendleft(waiter)  # it has already waited for its turn
        else:
            self._waiting.append(waiter)
        self._admit_waiting()
        try:
            with WHILE_WAITING.get()():
                await waiter.turn
        except asyncio.CancelledError:
            if permit.is_in:  # admitted and cancelled at the same moment
                self.leave(permit)
            else:
                self._admit_waiting()
            raise
        finally:
            permit.waited_s += self._clock.now() - began

    def _admit_waiting(self) -> None:
        """Admit the requests that may be sent now, and schedule the next check."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.now()
        while self._waiting:
            permit, turn, _ = self._waiting[0]
            if not turn.done():
                wait_s = self._wait_s(permit, now)
                if wait_s is None:
                    return
                if wait_s > 0:
                    self._timer = self._clock.call_later(wait_s, self._admit_waiting)
                    return
                self._admit(permit, now)
                turn.set_result(None)
            self._waiting.popleft()

    def _wait_s(self, permit: Permit, now: float) -> float | None:
        """Return the number of seconds until the request may be sent.

        Return None if it must wait until a request in flight ends.
        """
        if self._outage.is_open:
            return None if self._outage.next_probe is None else max(0.0, self._outage.next_probe - now)
        if self.in_flight + 1 > self._concurrency.limit + _EPSILON:
            return None
        wait_s = max(0.0, self._paused_until - now)
        if self._requests is not None:
            wait_s = max(wait_s, self._requests.wait_s(1.0, now))
        if self._tokens is not None:
            wait_s = max(wait_s, self._tokens.wait_s(permit.tokens, now))
        return wait_s

    def _admit(self, permit: Permit, now: float) -> None:
        self._sending[permit.request] = permit
        self._first_sent = min(self._first_sent, now)
        self._sent += 1
        permit.attempts += 1
        permit.number, permit.admitted, permit.is_in = self._sent, now, True
        if self._outage.is_open:
            permit.is_probe = True
            self._outage.next_probe = None
        if self._requests is not None:
            self._requests.take(1.0)
        if self._tokens is not None:
            self._tokens.take(permit.tokens)

    def _release(self, permit: Permit) -> bool:
        """Release the slot of an attempt, and return True if the attempt was a probe."""
        self._sending.pop(permit.request, None)
        was_probe, permit.is_in, permit.is_probe = permit.is_probe, False, False
        return was_probe

    def leave(self, permit: Permit) -> None:
        if not permit.is_in:
            return
        if self._release(permit) and self._outage.is_open:
            self._outage.next_probe = self._clock.now()
        self._admit_waiting()

    def answered(self, permit: Permit, prompt_tokens: int | None, completion_tokens: int) -> None:
        self._release(permit)
        self._is_alive()
        self._has_completed = True
        if self._tokens is not None and prompt_tokens is not None:
            self._tokens.take(prompt_tokens + completion_tokens - permit.tokens)
            self._estimate.learn(permit.size, prompt_tokens, completion_tokens)
        self._concurrency.answered(bool(self._waiting), self.in_flight + 1)
        if self._waiting:
            self._admit_waiting()

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
            self._watcher.tell(f"{self._name} is responding again after {now - since:.0f} s; the run continues")

    def failed(self, permit: Permit, error: EndpointError, is_last: bool) -> bool:
        was_probe = self._release(permit)
        now = self._clock.now()
        fault = self._fault(error)
        if fault is None:
            self._is_alive()
            self._admit_waiting()
            self._rejected(error)
            return False
        if isinstance(error, TransientError) and error.is_overloaded:
            self._refused(permit.number, error.retry_after_s, now)
        # The content of a first request cannot make an endpoint refuse the connection.
        is_last = is_last or self._last_answer < 0
        if self._outage.failed(permit.request, fault, now, is_last=is_last):
            self._pause(error, now)
        elif was_probe and self._outage.is_open:
            self._outage.probe_later(now)
        silent_s = now - self._first_sent
        if self._last_answer < 0 and isinstance(error, DeadlineError) and silent_s >= self._patience_s(error):
            self._stop_soon(f"{self._name} has not responded for {silent_s:.0f} s: {self._what(str(error))}", fail=True)
        excused = self._outage.is_open
        is_overloaded = isinstance(error, TransientError) and error.is_overloaded
        # If no request has been answered since this one was sent, a rejection concerns the endpoint, not this request.
        if not excused and is_overloaded and self._last_answer < permit.admitted:
            waited_s = 0.0 if self._outage.since is None else now - self._outage.since
            if waited_s >= self._patience_s(error):
                what = self._what(str(error))
                self._stop_soon(f"{self._name} has not responded for {waited_s:.0f} s: {what}", fail=True)
            excused = self._outage.is_shared or waited_s < permit.budget_s
        if excused:
            permit.waited_s += now - permit.admitted
        self._admit_waiting()
        return excused

    def _rejected(self, error: EndpointError) -> None:
        """Stop the run if all requests so far were rejected, because further requests would be rejected too."""
        if self._has_completed or isinstance(error, AccessError | LimitError):
            return
        self._rejections += 1
        if isinstance(error, WrongEndpointError):
            self._stop_soon(str(error))
        elif self._rejections == STREAK:
            self._stop_soon(f"the first {STREAK} requests all failed; the latest error: {error}")

    def _fault(self, error: EndpointError) -> Fault | None:
        """Return the problem that an error reveals about the endpoint, or None if it concerns only the request."""
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
        """Reduce the concurrency after a rejection, and pause.

        The pause is as long as the endpoint requests. If the endpoint requests no pause, the pause grows with each
        consecutive cut. A rare rejection delays only the rejected request.
        """
        is_news = self._concurrency.refused(number, self._sent, self.in_flight + 1)
        if asked_s is not None:
            most_s = self._watcher.outage_time_s or _OUTAGE_S
            if asked_s > most_s:
                self._stop_soon(f"{self._name} requests a pause of {asked_s:g} s")
            if not (self._concurrency.tolerates or self._concurrency.is_isolated):
                self._paused_until = max(self._paused_until, now + min(asked_s, most_s))
        elif is_news:
            self._paused_until = max(self._paused_until, now + self._concurrency.pause_s())
        if is_news and now - self._notified_at >= _TELL_AGAIN_S:
            self._notified_at = now
            self._clock.call_later(_BURST_S, self._notify_limit)

    def _notify_limit(self) -> None:
        wait_s = self._paused_until - self._clock.now()
        pause = f", after a pause of {wait_s:.0f} s" if wait_s >= 1 else ""
        most = int(self._concurrency.limit)
        self._watcher.tell(
            f"{self._name} limits the rate; at most {most} requests will be in flight from now on{pause}"
        )

    def _patience_s(self, error: EndpointError) -> float:
        if self._watcher.outage_time_s is not None:
            return self._watcher.outage_time_s
        if self._last_answer >= 0:
            return _OUTAGE_S
        return _FIRST_REFUSAL_S if self._is_first_refusal(error) else _FIRST_OUTAGE_S

    def _is_first_refusal(self, error: EndpointError) -> bool:
        """Return True if nothing has ever listened at the address and the user has not set how long to wait for it."""
        is_default = self._watcher.outage_time_s is None
        return is_default and self._last_answer < 0 and isinstance(error, UnreachableError)

    def _pause(self, error: EndpointError, now: float) -> None:
        """Report an outage, and stop the run if it lasts too long."""
        began = now if self._outage.since is None else self._outage.since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - began)))
        times = "once" if self._outage.count == 1 else f"{self._outage.count} times in a row since {since}"
        what = self._what(str(error))
        patience_s = self._patience_s(error)
        if not self._is_first_refusal(error):
            pause = "the run pauses and retries, first after 1 s and later every 30 s"
            self._watcher.tell(f"{self._name} has failed {times}; {pause}: {what}")

        def lose_patience() -> None:
            if self._outage.is_open and self._outage.since is not None:
                waited_s = self._clock.now() - self._outage.since
                advice = "; to wait longer, set run_limits.outage_time_s"
                self._stop(f"{self._name} has not responded for {waited_s:.0f} s: {what}{advice}", fail=True)

        left_s = max(0.0, patience_s - (now - began))
        self._patience = self._clock.call_later(left_s, lose_patience)

    def _what(self, message: str) -> str:
        """Return an error's message without the URL, because this queue's name already contains it."""
        return message.removeprefix(self._name.partition(" ")[0]).lstrip(": ")

    def _stop_soon(self, reason: str, *, fail: bool = False) -> None:
        """Stop the run outside any request, so that the request that revealed the problem can be cancelled."""
        asyncio.get_running_loop().call_soon(lambda: self._stop(reason, fail=fail))

    def _stop(self, reason: str, *, fail: bool) -> None:
        """Notify the run, which may cancel the waiting requests.

        If `fail` is true, requests that are still waiting after the notification raise an error.
        """
        self._watcher.give_up(reason)
        if not fail:
            return
        self._given_up = reason
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(ProviderError(reason))


async def with_retries(
    attempt: Callable[[], Awaitable[T]], policy: RetryPolicy, jitter: random.Random, permit: Permit | None = None
) -> tuple[T, int]:
    """Return the result of `attempt`, and the number of retries.

    The number of attempts is limited, and so is the period in which attempts may begin. A wait that would extend beyond
    this period is not started. A Retry-After is never shortened, because an earlier request would be rejected again.

    Only a `TransientError` or an `IdleTimeoutError` is retried. All other errors are raised immediately. If there is a
    permit, each attempt waits for its turn. In that case, a failure that is caused by an outage or an overload of the
    endpoint counts neither as an attempt nor as time. The caller must report a response to the permit.

    Raises:
        ProviderError, DeadlineError: If all attempts failed or the time is used up. The error is the last failure, and
            its message names the limit that was reached.
        LimitError: If the attempt raises it.
    """
    started = time.monotonic()
    retries = counted = 0
    while True:
        if permit is not None:
            await permit.enter()
        try:
            return await attempt(), retries
        except ENDPOINT_ERRORS as error:
            retries += 1
            may_pass = isinstance(error, TransientError | IdleTimeoutError)
            is_last = not may_pass or counted + 1 >= policy.max_attempts
            if permit is not None and permit.failed(error, is_last=is_last):
                continue
            if not may_pass:
                raise
            counted += 1
            waited_s = permit.waited_s if permit is not None else 0.0
            left_s = policy.budget_s - (time.monotonic() - started - waited_s)
            asked_s = error.retry_after_s if isinstance(error, TransientError) else None
            why, budget = None, f"retry_budget_s={policy.budget_s:g}"
            if is_last:
                why = f"; gave up after {counted} attempts (max_attempts)" if counted > 1 else ""
            elif asked_s is not None and asked_s > left_s:
                why = f"; its Retry-After of {asked_s:g} s exceeds the time left in {budget}"
                why += "; raise retry_budget_s to wait for it"
            else:
                wait_s = policy.wait_s(counted - 1, asked_s, jitter)
                if left_s <= 0 or (asked_s is None and wait_s > left_s):
                    why = f"; gave up after {counted} attempt{'' if counted == 1 else 's'}: {budget} is used up"
            if why is not None:
                final = DeadlineError if isinstance(error, DeadlineError) else ProviderError
                raise final(f"{error}{why}") from error
            wait_s = min(wait_s, left_s)
            level = logging.WARNING if wait_s >= _NOTICED_S else logging.DEBUG
            _log.log(level, "attempt %d failed; the next attempt starts in %.2f s: %s", retries, wait_s, error)
        await asyncio.sleep(wait_s)
