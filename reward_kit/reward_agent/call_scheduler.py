"""The scheduler that determines the order, the concurrency and the retries of a reward agent's calls.

Tickets take turns after each group, and groups that have been started come before new groups. Retries are limited both
for each call and for the whole agent. An endpoint that is down therefore does not receive many times the usual number
of requests.
"""

from __future__ import annotations

import asyncio
import contextvars
import datetime
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from reward_kit.errors import (
    FAILURE_CLASSES,
    ConfigError,
    DeadlineError,
    FailureClass,
    RewardError,
    RewardKitError,
    boundary,
    did_you_mean,
)
from reward_kit.providers.model_calls import MODEL_CALLS, ModelCall
from reward_kit.providers.request_queue import Bucket, Rates, RetryPolicy
from reward_kit.reward_agent.score_cache import ScoreCache, content_hash, shared
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest, failure_from_error
from reward_kit.reward_agent.stats import Tally
from reward_kit.reward_agent.tickets import Ticket
from reward_kit.telemetry.current import CURRENT_TELEMETRY
from reward_kit.validation import check_positive

SPARE = 10
"""The number of retries that are allowed regardless of the share, for agents with few calls."""
_SLICES = 20
_Result = TypeVar("_Result")
Finisher = Callable[[Sequence[ScoringRequest], Sequence[Scored]], Coroutine[Any, Any, Sequence[Scored]]]


@dataclass(frozen=True, slots=True)
class Retries:
    """The policy for retrying failed calls. A failed rollout has no call to retry.

    Attributes:
        policy: the number of attempts, the time budget of each call, and the waits between attempts. As for model
            endpoints, the waits grow exponentially with full jitter, and they are added to the endpoint's Retry-After.
        classes: the failure classes that are retried. A transient error from the client that the reward uses has the
            class `provider_error`. See `providers/faults.py`.
        seed: the seed for the jitter. If None, a random seed is used.
        max_share: the maximum ratio of retries to calls that were started within the policy's time budget. `SPARE`
            additional retries are always allowed. Failures beyond this limit are not retried. If None, no limit
            applies.

    Raises:
        ConfigError: If a class is unknown, or if the share is not positive.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    classes: tuple[FailureClass, ...] = ("provider_error",)
    seed: int | None = None
    max_share: float | None = 1.0

    def __post_init__(self) -> None:
        for name in self.classes:
            if name not in FAILURE_CLASSES:
                raise ConfigError(
                    f"Retries.classes: unknown failure class {name!r}{did_you_mean(name, FAILURE_CLASSES)}"
                )
        if self.max_share is not None:
            check_positive("Retries.max_share", self.max_share)


class SharedBudget:
    """An agent's retry budget: a share of the calls that were started in a time window, plus `SPARE`."""

    def __init__(self, share: float, window_s: float) -> None:
        self._share, self._slice_s = share, window_s / _SLICES
        self._slices: deque[list[int]] = deque()  # [number, calls, retries] of each slice
        self._calls = self._retries = 0

    def begin(self, now_s: float) -> None:
        """Count the first attempt of a call."""
        self._slice(now_s)[1] += 1
        self._calls += 1

    def take(self, now_s: float) -> bool:
        """Use one retry of the budget, or return False if none is left."""
        current = self._slice(now_s)
        if self._retries >= SPARE + self._share * self._calls:
            return False
        current[2] += 1
        self._retries += 1
        return True

    def _slice(self, now_s: float) -> list[int]:
        number = int(now_s / self._slice_s)
        # Keep one more slice than the window has, so that a call counts for the whole window.
        while self._slices and self._slices[0][0] < number - _SLICES:
            _, calls, retries = self._slices.popleft()
            self._calls -= calls
            self._retries -= retries
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        return self._slices[-1]


@dataclass(slots=True, eq=False)
class Call:
    """A call to a scorer for one request or for a group."""

    ticket: Ticket
    start: int  # the index of its first request in the ticket
    count: int  # the number of its requests
    attempts: int = 0
    began: float = 0.0  # start of the first attempt, in event loop time
    spans: list[tuple[float, float]] = field(default_factory=list)  # start and end of each attempt
    model_calls: list[ModelCall] = field(default_factory=list)
    given_up: str = ""  # the reason why the call is not retried, unless its attempts are used up
    key: str | None = None  # the hash of its content, if results are cached
    scope: anyio.CancelScope | None = None  # cancels the call while it is in flight
    followers: list[Call] = field(default_factory=list)  # equal calls, which share its results

    @property
    def requests(self) -> Sequence[ScoringRequest]:
        """The requests that the call scores."""
        return self.ticket.requests[self.start : self.start + self.count]

    @property
    def is_wanted(self) -> bool:
        """True if this call or one of its followers still needs a result."""
        return self.ticket.results[self.start] is None or any(call.is_wanted for call in self.followers)


class CallScheduler:
    """A scheduler that makes the calls of all tickets and limits their concurrency and rates."""

    def __init__(
        self,
        scorer: Scorer,
        tally: Tally,
        *,
        max_concurrency: int,
        deadline_s: float | None,
        rates: Rates,
        retries: Retries | None,
        cache: ScoreCache | None,
    ) -> None:
        self._scorer, self._tally, self._cache = scorer, tally, cache
        self._max_concurrency, self._deadline_s, self._rates, self._retries = (
            max_concurrency,
            deadline_s,
            rates,
            retries,
        )
        self._in_groups = scorer.mode == "batch"
        self._scorer_id: str = getattr(scorer, "id", type(scorer).__name__)
        # Receives all results of a complete group.
        self._finisher: Finisher | None = getattr(scorer, "finish_group", None)
        self.finishes_groups = self._finisher is not None
        self._begun: deque[Call] = deque()  # calls of started groups
        self._tickets: deque[tuple[Ticket, int]] = deque()  # each with the index of its next group
        self._making: set[Call] = set()
        self._finishing: dict[anyio.CancelScope, tuple[Ticket, int]] = {}
        self._leading: dict[str, Call] = {}
        self._jitter = random.Random(retries.seed if retries is not None else None)
        self._budget: SharedBudget | None = None
        if retries is not None and retries.max_share is not None:
            self._budget = SharedBudget(retries.max_share, retries.policy.budget_s)
        self._timers: set[asyncio.TimerHandle] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._bucket: Bucket | None = None
        self._workers = 0

    def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Start making calls in workers that run in this task group."""
        self._tasks, self._loop = tasks, asyncio.get_running_loop()
        per_minute = self._rates.requests_per_minute
        self._bucket = Bucket(per_minute, self._loop.time()) if per_minute else None
        self._time_came = asyncio.Event()
        tasks.start_soon(self._wait_for_timers)

    def close(self) -> None:
        """Discard all calls that have not started."""
        self._tasks = None
        self._time_came.set()
        for timer in (*self._timers, *filter(None, [self._pause])):
            timer.cancel()
        self._timers.clear()
        self._pause = None
        self._begun.clear()
        self._tickets.clear()
        self._leading.clear()

    def add(self, ticket: Ticket) -> None:
        """Schedule the calls of a ticket."""
        self._tickets.append((ticket, 0))
        self._start_workers()

    def cancel_unwanted(self) -> None:
        """Cancel calls whose results are no longer needed."""
        for call in [call for call in self._making if not call.is_wanted]:
            self._promote_follower(call)
            if call.scope is not None:
                call.scope.cancel()
        for scope, (ticket, group) in list(self._finishing.items()):
            if not ticket.is_open(group):
                scope.cancel()

    def _start_workers(self) -> None:
        while self._tasks is not None and self._workers < self._max_concurrency:
            if (call := self._take()) is None:
                return
            self._workers += 1
            self._tasks.start_soon(self._work, call)

    def _take(self) -> Call | None:
        """Return the next call, or None if the queue is empty or the rate limit does not allow one yet."""
        while (call := self._next()) is not None:
            if not call.is_wanted:
                self._promote_follower(call)
                continue
            wait_s = self._bucket.wait_s(1.0, self._loop.time()) if self._bucket is not None else 0.0
            if wait_s:  # put the call back at the front
                self._begun.appendleft(call)
                if self._pause is None:
                    self._pause = self._loop.call_later(wait_s, self._resume)
                return None
            if self._bucket is not None:
                self._bucket.take(1.0)
            return call
        return None

    def _next(self) -> Call | None:
        while not self._begun and self._tickets:
            ticket, start = self._tickets.popleft()
            if ticket.is_done:  # the ticket was cancelled
                continue
            size = ticket.group_size
            if self._in_groups:
                self._begun.append(Call(ticket, start, size))
            else:
                self._begun.extend([Call(ticket, index, 1) for index in range(start, start + size)])
            if start + size < len(ticket.requests):
                self._tickets.append((ticket, start + size))
        return self._begun.popleft() if self._begun else None

    def _resume(self) -> None:
        self._pause = None
        self._time_came.set()

    async def _wait_for_timers(self) -> None:
        """Start workers after a timer has fired. Timers run outside of tasks, so they cannot start workers."""
        while self._tasks is not None:
            self._start_workers()
            await self._time_came.wait()
            self._time_came.clear()

    async def _work(self, first: Call) -> None:
        """Make one call after another. A separate task for each call would cost as much as a short reward."""
        call: Call | None = first
        try:
            while call is not None:
                if not call.is_wanted:
                    self._promote_follower(call)
                elif self._cache is not None and await self._answer_without_call(call, self._cache):
                    if self._bucket is not None:
                        self._bucket.take(-1.0)
                else:
                    scored = await self._make(call)
                    if not self._schedule_retry(call, scored):
                        await self._settle(call, scored)
                call = self._take()
        finally:
            self._workers -= 1

    async def _make(self, call: Call) -> list[Scored]:
        """Make one attempt of a call, and return the results, which may be failures."""
        began = self._loop.time()
        call.attempts += 1
        if call.attempts == 1:
            call.began = began
            if self._budget is not None:
                self._budget.begin(began)
        self._making.add(call)
        self._tally.begin_call(call.count)
        error: RewardKitError | None = None
        scored: list[Scored] | None = None
        try:
            with anyio.CancelScope(deadline=self._loop.time() + (self._deadline_s or math.inf)) as call.scope:
                try:
                    with boundary(RewardError, "scorer"):
                        context = call.ticket.context.copy()
                        context.run(MODEL_CALLS.set, call.model_calls)
                        if (telemetry := context.get(CURRENT_TELEMETRY)) is not None:
                            for each in reversed(call.requests):  # a group uses the context of its first rollout
                                context.run(telemetry.begin_reward, each.rollout_id, each.timing)
                        if self._in_groups:
                            turn = CallTurn(self._scorer.score_group(call.requests), context)
                            scored = _checked(await turn, call.requests)
                        else:
                            request = call.ticket.requests[call.start]
                            one = await CallTurn(self._scorer.score(request), context)
                            scored = _checked([one], [request])
                except RewardKitError as raised:
                    error = raised
        finally:
            self._making.discard(call)
            self._tally.in_flight -= 1
            self._tally.requests_in_flight -= call.count
        if scored is None:
            scored = _failed(call.requests, error or self._too_long())
        ended = self._loop.time()
        call.spans.append((began, ended))
        # Cancelled calls and failed rollouts are not included in the latencies of the scorer.
        if call.is_wanted and any(request.failure is None for request in call.requests):
            self._tally.latencies.add(ended - began)
        self._tally.spend(scored)
        return scored

    def _too_long(self) -> DeadlineError:
        return DeadlineError(f"the call exceeded deadline_s={self._deadline_s}")

    def _schedule_retry(self, call: Call, scored: Sequence[Scored]) -> bool:
        """Schedule a further attempt if it is allowed. While the call waits, it does not count as in flight."""
        retries = self._retries
        if retries is None or not call.is_wanted:
            return False
        may_pass = any(
            result.failure is not None and request.failure is None and result.failure.failure_class in retries.classes
            for request, result in zip(call.requests, scored, strict=True)
        )
        if not may_pass or call.attempts >= retries.policy.max_attempts:
            return False
        now_s = self._loop.time()
        left_s = retries.policy.budget_s - (now_s - call.began)
        # Never shorten the endpoint's Retry-After.
        asked_s = max((one.retry_after_s for one in scored if one.retry_after_s is not None), default=None)
        budget = f"budget_s={retries.policy.budget_s:g}"
        if asked_s is not None and asked_s > left_s:
            call.given_up = f"its Retry-After of {asked_s:g} s exceeds the time left in {budget}"
            return False
        wait_s = retries.policy.wait_s(call.attempts - 1, asked_s, self._jitter)
        if asked_s is None and wait_s > left_s:
            call.given_up = f"{budget} is used up"
            return False
        if self._budget is not None and not self._budget.take(now_s):
            call.given_up = "the agent's retry budget is used up (max_share)"
            return False
        self._tally.retries += 1

        def again() -> None:
            self._timers.discard(timer)
            self._begun.appendleft(call)
            self._time_came.set()

        timer = self._loop.call_later(min(wait_s, left_s), again)
        self._timers.add(timer)
        return True

    async def _settle(self, call: Call, scored: Sequence[Scored]) -> None:
        """Pass the results to the ticket of the call and to the tickets of identical calls."""
        self._promote_follower(call)
        if call.attempts > 1 or call.given_up:
            attempts = f"; {call.attempts} attempt{'' if call.attempts == 1 else 's'}"
            attempts += f": {call.given_up}" if call.given_up else ""
            scored = [
                replace(result, failure=replace(result.failure, message=f"{result.failure.message}{attempts}"))
                if result.failure is not None and request.failure is None
                else result
                for request, result in zip(call.requests, scored, strict=True)
            ]
        if self._cache is not None and call.key is not None:
            self._cache.keep(call.key, scored)
        for follower in call.followers:  # in tasks, because finishing a group may take time
            if self._tasks is not None:
                self._tasks.start_soon(self._hand_over, follower, shared(scored, follower.requests))
        await self._hand_over(call, scored)

    async def _hand_over(self, call: Call, scored: Sequence[Scored]) -> None:
        """Store the results in the ticket. If a group is now complete, let the scorer finish it."""
        ticket, group = call.ticket, call.ticket.settle(call.start, scored, call.spans, call.model_calls)
        if self._finisher is None:
            self._trace(ticket, call.start, call.start + call.count)
        if group is None or self._finisher is None:
            return
        requests = ticket.requests[ticket.group_slice(group)]
        complete = [result for result in ticket.results[ticket.group_slice(group)] if result is not None]
        error: RewardKitError | None = None
        with anyio.CancelScope(deadline=self._loop.time() + (self._deadline_s or math.inf)) as scope:
            self._finishing[scope] = (ticket, group)
            try:
                with boundary(RewardError, "finish_group"):
                    finished = await CallTurn(self._finisher(requests, complete), ticket.context.copy())
                    ticket.finish(group, _checked(finished, requests))
            except RewardKitError as raised:
                error = raised
            finally:
                del self._finishing[scope]
        if ticket.is_open(group):  # a failure applies to the whole group
            ticket.finish(group, _failed(requests, error or self._too_long()))
        whole = ticket.group_slice(group)
        self._trace(ticket, whole.start, whole.stop)

    def _trace(self, ticket: Ticket, start: int, stop: int) -> None:
        """Create the spans of final results if telemetry is on."""
        if (telemetry := ticket.context.get(CURRENT_TELEMETRY)) is None:
            return
        zero = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=self._loop.time())
        for index in range(start, stop):
            if (result := ticket.results[index]) is not None:
                score = {
                    "rollout_id": result.rollout_id,
                    "scorer": {"id": self._scorer_id},
                    "score": result.score,
                    "result": result.result.model_dump(mode="json") if result.result is not None else None,
                    "failure": result.failure.to_json() if result.failure is not None else None,
                    "timing": {"duration_s": result.duration_s, **ticket.timing(index, 0.0)},
                }
                ticket.context.run(telemetry.end_reward, score, zero, ticket.requests[index].timing)

    async def _answer_without_call(self, call: Call, cache: ScoreCache) -> bool:
        """Use the cached results for a call, or let the call follow an identical call in flight.

        Return True if one of these was possible.
        """
        if call.attempts:
            return False  # This call is now the call in flight.
        call.key = content_hash(call.requests)
        if call.key is None:
            return False
        if (known := cache.find(call.key, call.requests)) is not None:
            await self._hand_over(call, known)
        elif (leader := self._leading.setdefault(call.key, call)) is not call:
            leader.followers.append(call)
        else:
            return False
        self._tally.cached += 1
        await asyncio.sleep(0)  # so that a batch that is completely cached does not block the loop
        return True

    def _promote_follower(self, call: Call) -> None:
        if call.key is not None and self._leading.get(call.key) is call:
            del self._leading[call.key]


def _checked(scored: Sequence[Scored], requests: Sequence[ScoringRequest]) -> list[Scored]:
    """Return the results as a list.

    Raises:
        RewardError: If the results do not match the requests in number or order.
    """
    results = list(scored)
    if [getattr(one, "rollout_id", None) for one in results] != [request.rollout_id for request in requests]:
        raise RewardError(f"the scorer returned {len(results)} results that do not match the {len(requests)} requests")
    return results


def _failed(requests: Sequence[ScoringRequest], error: RewardKitError) -> list[Scored]:
    failure, asked = failure_from_error(error)
    return [Scored(each.rollout_id, None, each.failure or failure, retry_after_s=asked) for each in requests]


class CallTurn(Generic[_Result]):
    """An awaitable that runs a coroutine in a context. It yields at least once, as a task does, but at a lower cost."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, _Result], context: contextvars.Context) -> None:
        self._coroutine, self._context = coroutine, context

    def __await__(self) -> Generator[Any, Any, _Result]:
        step, given, has_waited = self._coroutine.send, None, False
        while True:
            try:
                awaited = self._context.run(step, given)
            except StopIteration as end:
                if not has_waited:
                    yield None
                result: _Result = end.value
                return result
            has_waited = True
            try:
                step, given = self._coroutine.send, (yield awaited)
            except BaseException as error:  # noqa: BLE001 - thrown in from outside, and handed on
                step, given = self._coroutine.throw, error
