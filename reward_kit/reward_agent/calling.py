"""A coroutine awaited as if it were a task of its own, without the cost of one."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

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
from reward_kit.providers.request_queue import Bucket, Rates, RetryPolicy
from reward_kit.reward_agent.score_cache import ScoreCache, content_hash, shared
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest, failure_of
from reward_kit.reward_agent.stats import Tally
from reward_kit.reward_agent.tickets import Ticket
from reward_kit.validation import check_number

_Result = TypeVar("_Result")


class Turn(Generic[_Result]):
    """Awaits a coroutine as if it were a task: in a copy of a context, and others have their turn at least once."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, _Result], context: contextvars.Context) -> None:
        self._coroutine, self._context = coroutine, context.copy()

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


@dataclass(slots=True, eq=False)
class Call:
    """One call of a scorer: of one request, or of a group where the reward scores groups.

    Attributes:
        ticket: what it is for.
        start: the first of its requests in the ticket.
        count: how many they are.
        attempts: how often it was made.
        began: when it was first made, in the time of the loop.
        spans: when each attempt began and ended, likewise.
        given_up: why it is not made again, where that is more than that its attempts are used up.
        key: the hash of its content, where results are cached.
        scope: cancels it while it is being made.
        followers: calls of the same content, which are not made and get its results.
    """

    ticket: Ticket
    start: int
    count: int
    attempts: int = 0
    began: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    given_up: str = ""
    key: str | None = None
    scope: anyio.CancelScope | None = None
    followers: list[Call] = field(default_factory=list)

    @property
    def requests(self) -> Sequence[ScoringRequest]:
        """What is to be scored."""
        return self.ticket.requests[self.start : self.start + self.count]

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for its results."""
        if self.ticket.results[self.start] is None:
            return True
        return bool(self.followers) and any(call.is_wanted for call in self.followers)


class Schedule:
    """The calls that wait, without an order in memory of those that no turn has come to.

    Args:
        in_groups: a call is of a whole group.
    """

    def __init__(self, *, in_groups: bool) -> None:
        self._in_groups = in_groups
        self._begun: deque[Call] = deque()
        self._tickets: deque[tuple[Ticket, int]] = deque()  # with their next group

    def add(self, ticket: Ticket) -> None:
        """All groups of a ticket wait from now on."""
        if ticket.requests:
            self._tickets.append((ticket, 0))

    def again(self, call: Call) -> None:
        """Have a call come next."""
        self._begun.appendleft(call)

    def pop(self) -> Call | None:
        """The next call; None where nothing waits."""
        while not self._begun:
            if not self._tickets:
                return None
            self._begin_group(*self._tickets.popleft())
        return self._begun.popleft()

    def clear(self) -> None:
        """Nothing waits any more."""
        self._begun.clear()
        self._tickets.clear()

    def _begin_group(self, ticket: Ticket, start: int) -> None:
        if ticket.is_done:  # it was cancelled
            return
        size = ticket.group_size
        if self._in_groups:
            self._begun.append(Call(ticket, start, size))
        else:
            self._begun.extend([Call(ticket, index, 1) for index in range(start, start + size)])
        if start + size < len(ticket.requests):
            self._tickets.append((ticket, start + size))


SPARE = 10

"""Calls that may be made again whatever the share, so that an agent of few calls has retries too."""

_SLICES = 20


@dataclass(frozen=True, slots=True)
class Retries:
    """What the agent makes again. A rollout that broke itself is no call, and is never tried again.

    Attributes:
        policy: how often, for how long, and the waits between: exponential with full jitter on top of what the endpoint
            asks for with Retry-After, as for model endpoints. Its budget is of each call.
        classes: of failures that may pass by themselves. Of the errors of somebody's own client, those that may pass
            are a `provider_error`; see `providers/foreign_errors.py`.
        seed: of the jitter; None draws it from the system.
        max_share: retries of an agent, at most, for each call that began within the budget of the policy, and `SPARE`
            besides; None for any number. What fails beyond it is not tried again.

    Raises:
        ConfigError: a class is none, or the share is no positive number.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    classes: tuple[FailureClass, ...] = ("provider_error",)
    seed: int | None = None
    max_share: float | None = 1.0

    def __post_init__(self) -> None:
        for name in self.classes:
            if name not in FAILURE_CLASSES:
                raise ConfigError(f"Retries.classes: no failure class {name!r}{did_you_mean(name, FAILURE_CLASSES)}")
        if self.max_share is not None:
            check_number("Retries.max_share", self.max_share)


class SharedBudget:
    """The retries that an agent has left: a share of the calls that began in the last while, and some to spare.

    Args:
        share: retries for each call.
        window_s: how long a call counts.
    """

    def __init__(self, share: float, window_s: float) -> None:
        self._share, self._slice_s = share, window_s / _SLICES
        self._slices: deque[list[int]] = deque()  # each its number, calls and retries
        self._calls = self._retries = 0

    def begin(self, now_s: float) -> None:
        """A call is made for the first time."""
        self._slice(now_s)[1] += 1
        self._calls += 1

    def take(self, now_s: float) -> bool:
        """Whether there is a retry left, which then is taken."""
        current = self._slice(now_s)
        if self._retries >= SPARE + self._share * self._calls:
            return False
        current[2] += 1
        self._retries += 1
        return True

    def _slice(self, now_s: float) -> list[int]:
        number = int(now_s / self._slice_s)
        # One slice more than the window has, so that a call counts for the whole of it.
        while self._slices and self._slices[0][0] < number - _SLICES:
            _, calls, retries = self._slices.popleft()
            self._calls -= calls
            self._retries -= retries
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append([number, 0, 0])
        return self._slices[-1]


class Retrier:
    """Decides for one agent whether a call that failed is made again.

    Args:
        retries: the agent's.
    """

    def __init__(self, retries: Retries) -> None:
        self._policy, self._classes = retries.policy, retries.classes
        self._jitter = random.Random(retries.seed)
        share = retries.max_share
        self._budget = None if share is None else SharedBudget(share, retries.policy.budget_s)

    def begin(self, now_s: float) -> None:
        """A call is made for the first time."""
        if self._budget is not None:
            self._budget.begin(now_s)

    def may_pass(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> bool:
        """Whether a call failed in a way that another attempt may mend."""
        return any(
            result.failure is not None and request.failure is None and result.failure.failure_class in self._classes
            for request, result in zip(requests, scored, strict=True)
        )

    def wait_s(self, attempts: int, elapsed_s: float, asked_s: float | None, now_s: float) -> float | str:
        """Seconds until a call is made again; or why it is not, "" where its attempts are used up.

        Args:
            attempts: made so far.
            elapsed_s: since the first began.
            asked_s: for how long the endpoint asked to be left alone, which is never shortened; None where it did not.
            now_s: the time.
        """
        if attempts >= self._policy.max_attempts:
            return ""
        left_s = self._policy.budget_s - elapsed_s
        if asked_s is not None and asked_s > left_s:
            return f"its Retry-After of {asked_s:g} s is more than what is left of budget_s={self._policy.budget_s:g}"
        wait_s = self._policy.wait_s(attempts - 1, asked_s, self._jitter)
        if asked_s is None and wait_s > left_s:
            return f"budget_s={self._policy.budget_s:g} is used up"
        if self._budget is not None and not self._budget.take(now_s):
            return "the agent's retries are used up (max_share)"
        return min(wait_s, left_s)


def asked_s(scored: Sequence[Scored]) -> float | None:
    """For how long the endpoint asked to be left alone, by the results of one call."""
    return max((one.retry_after_s for one in scored if one.retry_after_s is not None), default=None)


def given_up(requests: Sequence[ScoringRequest], scored: Sequence[Scored], attempts: int, why: str) -> list[Scored]:
    """Results of the last attempt, whose failures tell that there were others, and why there is no further one."""
    told = f"; {attempts} attempt{'' if attempts == 1 else 's'}" + (f": {why}" if why else "")
    return [
        replace(result, failure=replace(result.failure, message=f"{result.failure.message}{told}"))
        if result.failure is not None and request.failure is None
        else result
        for request, result in zip(requests, scored, strict=True)
    ]


Finisher = Callable[[Sequence[ScoringRequest], Sequence[Scored]], Coroutine[Any, Any, Sequence[Scored]]]


class CallerOptions(NamedTuple):
    """What an agent says of its calls; see there."""

    max_concurrency: int
    deadline_s: float | None
    rates: Rates
    retries: Retries | None


class Caller:
    """Serves tickets in the order of their `Schedule`.

    Args:
        scorer: is called.
        options: of the agent.
        cache: see `ScoreCache`.
        tally: counts what is done.

    Attributes:
        finishes_groups: the scorer has a `finish_group`, which is given all results of a group when they are there.
    """

    def __init__(self, scorer: Scorer, options: CallerOptions, cache: ScoreCache | None, tally: Tally) -> None:
        self._scorer, self._options, self._cache, self._tally = scorer, options, cache, tally
        self._in_groups = scorer.mode == "batch"
        self._finisher: Finisher | None = getattr(scorer, "finish_group", None)
        self.finishes_groups = self._finisher is not None
        self._schedule = Schedule(in_groups=self._in_groups)
        self._retrier = Retrier(options.retries) if options.retries is not None else None
        self._making: set[Call] = set()
        self._finishing: dict[anyio.CancelScope, tuple[Ticket, int]] = {}
        self._leading: dict[str, Call] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._bucket: Bucket | None = None
        self._workers = 0

    def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Work in these tasks from now on."""
        self._tasks, self._loop = tasks, asyncio.get_running_loop()
        per_minute = self._options.rates.requests_per_minute
        self._bucket = Bucket(per_minute, self._loop.time()) if per_minute else None
        self._time_came = asyncio.Event()
        tasks.start_soon(self._wait_for_timers)

    def close(self) -> None:
        """Forget what waits."""
        self._tasks = None
        self._time_came.set()
        for timer in (*self._timers, *filter(None, [self._pause])):
            timer.cancel()
        self._timers.clear()
        self._pause = None
        self._schedule.clear()
        self._leading.clear()

    def add(self, ticket: Ticket) -> None:
        """Begin with the calls of a ticket."""
        self._schedule.add(ticket)
        self._start_workers()

    def cancel_unwanted(self) -> None:
        """Cancel calls that nobody waits for any more."""
        for call in [call for call in self._making if not call.is_wanted]:
            self._leads_no_more(call)
            if call.scope is not None:
                call.scope.cancel()
        for scope, (ticket, group) in list(self._finishing.items()):
            if not ticket.is_open(group):
                scope.cancel()

    def _start_workers(self) -> None:
        while self._tasks is not None and self._workers < self._options.max_concurrency:
            if (call := self._take()) is None:
                return
            self._workers += 1
            self._tasks.start_soon(self._work, call)

    def _take(self) -> Call | None:
        """The next call that may be made now."""
        while (call := self._schedule.pop()) is not None:
            if not call.is_wanted:
                self._leads_no_more(call)
            elif self._may_begin(call):
                return call
            else:
                return None
        return None

    def _may_begin(self, call: Call) -> bool:
        """Whether the rate allows it; else it comes first when it does."""
        if self._bucket is None:
            return True
        wait_s = self._bucket.wait_s(1.0, self._loop.time())
        if wait_s == 0:
            self._bucket.take(1.0)
            return True
        self._schedule.again(call)
        if self._pause is None:
            self._pause = self._loop.call_later(wait_s, self._go_on)
        return False

    def _go_on(self) -> None:
        self._pause = None
        self._time_came.set()

    async def _wait_for_timers(self) -> None:
        """Start workers when a timer says so: it runs outside of any task, where none can be started."""
        while self._tasks is not None:
            self._start_workers()
            await self._time_came.wait()
            self._time_came.clear()

    async def _work(self, first: Call) -> None:
        """Make one call after the other. A task for each of them would cost as much as a short reward."""
        call: Call | None = first
        try:
            while call is not None:
                await self._serve(call)
                call = self._take()
        finally:
            self._workers -= 1

    async def _serve(self, call: Call) -> None:
        if not call.is_wanted:
            return self._leads_no_more(call)
        if self._cache is not None and await self._is_answered(call, self._cache):
            if self._bucket is not None:
                self._bucket.take(-1.0)
            return None
        scored = await self._make(call)
        if not self._is_made_again(call, scored):
            await self._settle(call, scored)
        return None

    async def _make(self, call: Call) -> list[Scored]:
        """The results of one attempt, which is counted."""
        began = self._loop.time()
        self._making.add(call)
        self._tally.begin_call(call.count)
        try:
            scored = await self._ask(call)
        finally:
            self._making.discard(call)
            self._tally.end_call(call.count)
        ended = self._loop.time()
        call.spans.append((began, ended))
        # What was cancelled says nothing of the scorer, nor does a rollout that broke, for which it is not asked.
        if call.is_wanted and any(request.failure is None for request in call.requests):
            self._tally.latencies.add(ended - began)
        self._tally.spend(scored)
        return scored

    async def _ask(self, call: Call) -> list[Scored]:
        """The results of one attempt; what goes wrong with it is in them."""
        call.attempts += 1
        if call.attempts == 1:
            call.began = self._loop.time()
            if self._retrier is not None:
                self._retrier.begin(call.began)
        error: RewardKitError | None = None
        with anyio.CancelScope(deadline=self._deadline()) as call.scope:
            try:
                with boundary(RewardError, "scorer"):
                    return _checked(await Turn(self._scored(call), call.ticket.context), call.requests)
            except RewardKitError as raised:
                error = raised
        return _failed(call.requests, error or self._too_long())

    def _deadline(self) -> float:
        seconds = self._options.deadline_s
        return math.inf if seconds is None else self._loop.time() + seconds

    def _too_long(self) -> DeadlineError:
        return DeadlineError(f"the call took longer than its {self._options.deadline_s} s (deadline_s)")

    async def _scored(self, call: Call) -> Sequence[Scored]:
        if self._in_groups:
            return await self._scorer.score_group(call.requests)
        return [await self._scorer.score(call.ticket.requests[call.start])]

    def _is_made_again(self, call: Call, scored: Sequence[Scored]) -> bool:
        """Whether the call waits for another attempt, without a place among those in flight."""
        if self._retrier is None or not call.is_wanted or not self._retrier.may_pass(call.requests, scored):
            return False
        now_s = self._loop.time()
        wait_s = self._retrier.wait_s(call.attempts, now_s - call.began, asked_s(scored), now_s)
        if isinstance(wait_s, str):
            call.given_up = wait_s
            return False
        self._tally.retries += 1

        def again() -> None:
            self._timers.discard(timer)
            self._schedule.again(call)
            self._time_came.set()

        timer = self._loop.call_later(wait_s, again)
        self._timers.add(timer)
        return True

    async def _settle(self, call: Call, scored: Sequence[Scored]) -> None:
        """Hand results to the ticket, and to those of equal calls."""
        self._leads_no_more(call)
        if call.attempts > 1 or call.given_up:
            scored = given_up(call.requests, scored, call.attempts, call.given_up)
        if self._cache is not None and call.key is not None:
            self._cache.keep(call.key, scored)
        for follower in call.followers:  # in tasks, since a group that is finished may take its time
            if self._tasks is not None:
                self._tasks.start_soon(self._hand_over, follower, shared(scored, follower.requests))
        await self._hand_over(call, scored)

    async def _hand_over(self, call: Call, scored: Sequence[Scored]) -> None:
        group = call.ticket.settle(call.start, scored, call.spans)
        if group is not None and self._finisher is not None:
            await self._finish(call.ticket, group, self._finisher)

    async def _finish(self, ticket: Ticket, group: int, finisher: Finisher) -> None:
        """Have the scorer finish a group whose last result is there. A failure is that of the whole group."""
        requests = ticket.requests[ticket.group_of(group)]
        scored = [result for result in ticket.results[ticket.group_of(group)] if result is not None]
        error: RewardKitError | None = None
        with anyio.CancelScope(deadline=self._deadline()) as scope:
            self._finishing[scope] = (ticket, group)
            try:
                with boundary(RewardError, "finish_group"):
                    finished = await Turn(finisher(requests, scored), ticket.context)
                    ticket.finish(group, _checked(finished, requests))
            except RewardKitError as raised:
                error = raised
            finally:
                del self._finishing[scope]
        if ticket.is_open(group):
            ticket.finish(group, _failed(requests, error or self._too_long()))

    async def _is_answered(self, call: Call, cache: ScoreCache) -> bool:
        """Whether the answer is known, or on its way as that of an equal call."""
        if call.attempts:
            return False  # it is that equal call
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
        await asyncio.sleep(0)  # a batch that is known as a whole holds up nobody
        return True

    def _leads_no_more(self, call: Call) -> None:
        if call.key is not None and self._leading.get(call.key) is call:
            del self._leading[call.key]


def _checked(scored: Sequence[Scored], requests: Sequence[ScoringRequest]) -> list[Scored]:
    """Results as they must be: one for each request, in their order.

    Raises:
        RewardError: they are not; whose they are is then not known.
    """
    found = list(scored)
    if [getattr(one, "rollout_id", None) for one in found] != [request.rollout_id for request in requests]:
        raise RewardError(f"the scorer gave {len(found)} results that are not those of the {len(requests)} requests")
    return found


def _failed(requests: Sequence[ScoringRequest], error: RewardKitError) -> list[Scored]:
    failure, asked = failure_of(error)
    return [Scored(each.rollout_id, None, each.failure or failure, retry_after_s=asked) for each in requests]
