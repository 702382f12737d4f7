"""Makes the calls: as many at a time as allowed and as fast as allowed, each cancellable, again where that may help."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.abc

from reward_kit.errors import DeadlineError, RewardError, RewardKitError, boundary
from reward_kit.providers.request_queue import Bucket, Rates
from reward_kit.reward_agent.deliveries import WakeUp
from reward_kit.reward_agent.retrying import Retrier, Retries, asked_s, given_up
from reward_kit.reward_agent.schedule import Call, Schedule
from reward_kit.reward_agent.score_cache import ScoreCache, content_hash, shared
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest, failure_of
from reward_kit.reward_agent.stats import Tally
from reward_kit.reward_agent.tickets import Ticket
from reward_kit.reward_agent.turns import Turn

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
        self._time_came = WakeUp()
        tasks.start_soon(self._wait_for_timers)

    def close(self) -> None:
        """Forget what waits."""
        self._tasks = None
        self._time_came.tell()
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
        self._time_came.tell()

    async def _wait_for_timers(self) -> None:
        """Start workers when a timer says so: it runs outside of any task, where none can be started."""
        while self._tasks is not None:
            self._start_workers()
            await self._time_came.wait()

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
            self._time_came.tell()

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
