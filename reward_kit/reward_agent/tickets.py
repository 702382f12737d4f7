"""A submitted batch: its results as they arrive, and the queue that delivers them.

Groups are delivered as a whole, unless a caller allows them to be split. Callers are served in order. There is no
polling. A caller sleeps until the group that completes its chunk wakes it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from reward_kit.errors import ConfigError, DeadlineError, Failure, RewardError
from reward_kit.providers.model_calls import ModelCall
from reward_kit.reward_agent.scoring import Scored, ScoringRequest

Order = Literal["completion", "submission"]
"""The order of delivery. Either the groups that complete first or the groups that were submitted first come first."""
Spans = Sequence[tuple[float, float]]
NOT_OPEN = "the reward agent is not open; use `async with AsyncRewardAgent(…)`"
_CANCELLED = Failure("refused", "CancelledError", "the ticket was cancelled before this request was scored")


class _Columns(NamedTuple):
    data_idxs: list[int]
    rewards: list[float | None]
    extra_infos: list[Scored]


class ScoredChunk(_Columns):
    """Results of a batch, sorted by their index. A chunk unpacks as (data_idxs, rewards, extra_infos).

    Attributes:
        data_idxs: the indices in the batch of `ticket`, in ascending order.
        rewards: the rewards. The reward of an unscored rollout is `None`, not zero. `rewards_B` contains the rewards as
            an array.
        extra_infos: the full results, including failures.
        ticket: the ticket of the batch.
    """

    ticket: Ticket

    @classmethod
    def of(cls, ticket: Ticket, indexes: list[int]) -> Self:
        """Return a chunk with the results at these indices. All of them must have arrived."""
        results = [result for index in indexes if (result := ticket.results[index]) is not None]
        chunk = cls(indexes, [result.score for result in results], results)
        chunk.ticket = ticket
        return chunk

    @property
    def rewards_B(self) -> npt.NDArray[np.float64]:
        """The rewards as a (B,) array.

        The reward of an unscored rollout is NaN, so a mean that includes it is also NaN.
        """
        return np.array(self.rewards, dtype=np.float64)

    @property
    def lengths(self) -> list[int | None]:
        """The number of tokens in each response, for trainers that assign the reward to the last token.

        The number is `extra["response_length"]` of the request. If that is not set, it is the number of tokens in the
        episode from the first to the last sampled token, provided that these tokens form one row.
        """
        return [response_length(self.ticket.requests[index]) for index in self.data_idxs]

    @property
    def completion_ranks(self) -> list[int]:
        """The position of each result in the order of arrival, counted from 0 in each batch."""
        return [self.ticket.completion_ranks[index] for index in self.data_idxs]

    @property
    def groups(self) -> list[int]:
        """The group number of each result, counted from 0 in the batch."""
        return [index // self.ticket.group_size for index in self.data_idxs]

    @property
    def incomplete_groups(self) -> list[int]:
        """The numbers of the groups in which a score is missing."""
        pairs = zip(self.groups, self.rewards, strict=True)
        return sorted({group for group, reward in pairs if reward is None})


def response_length(request: ScoringRequest) -> int | None:
    """Return the number of tokens in a response up to the last sampled token, or None if it is unknown."""
    if (length := request.extra.get("response_length")) is not None:
        return int(length)
    rows = list(request.episode.tokens.rows()) if request.episode is not None else []
    if len(rows) != 1:
        return None
    sampled = np.flatnonzero(rows[0].action_mask)
    return int(sampled[-1]) + 1 if len(sampled) else 0


class TicketOwner(Protocol):
    """The methods of an agent that its tickets call."""

    def settled(self, count: int) -> None: ...
    def completed(self, ticket: Ticket, group: int) -> None: ...
    def gave_up(self, ticket: Ticket) -> None: ...


class Arrangement(Protocol):
    """A batch in a trainer's format, and its requests."""

    requests: Sequence[ScoringRequest]

    def result(self, chunk: ScoredChunk) -> Any:
        """Return a chunk in the trainer's format, as three columns."""
        ...


class BatchFormat(Protocol):
    """A converter for a trainer's batches, such as `DataProtoFormat` from `integrations.verl`."""

    def arrange(self, data: Any, group_size: int) -> Arrangement | None:
        """Return the requests of a batch, or None if it is not in this format."""
        ...


class Ticket:
    """A submitted batch. Its indices start at 0.

    Attributes:
        requests: the requests of the batch.
        group_size: the number of consecutive requests that form a group.
        number: the number of the batch in its agent, counted from 1.
        results: the result of each request, or None until it arrives. If the scorer finishes groups, a result may
            change until its group is delivered.
        completion_ranks: the position of each result in the order of arrival, or -1 until it arrives.
        submitted_at: the time of submission, in loop time.
        spans: the start and the end of each attempt for a result, in loop time. It is empty if the result came from the
            cache or from an identical call, or if there was no call.
        model_calls: the calls to models, such as judges, that the reward made for a result. The calls of a group belong
            to its first result.
        context: the context variables of the submitter.
        arrangement: the batch in a trainer's format, or None for a list of requests.
    """

    arrangement: Arrangement | None = None

    def __init__(
        self,
        requests: Iterable[ScoringRequest],
        group_size: int,
        owner: TicketOwner,
        *,
        number: int = 0,
        finishes_groups: bool = False,
    ) -> None:
        self.requests: Sequence[ScoringRequest] = tuple(requests)
        self.group_size, self.number = group_size, number
        self.results: list[Scored | None] = [None] * len(self.requests)
        self.completion_ranks = [-1] * len(self.requests)
        self.spans: list[Spans] = [()] * len(self.requests)
        self.model_calls: dict[int, Sequence[ModelCall]] = {}
        self.context = contextvars.copy_context()
        name = f"batch {number} ({len(self.requests)} requests)"
        self.deliveries = DeliveryQueue(len(self.requests), group_size, name)
        self._owner: TicketOwner | None = owner
        self._finishes_groups = finishes_groups
        self._loop = asyncio.get_running_loop()
        self.submitted_at = self._loop.time()
        self._missing = [group_size] * (len(self.requests) // group_size)
        self._is_complete = bytearray(len(self._missing))
        self._open_groups = len(self._missing)
        self._settled = 0
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_done(self) -> bool:
        """True if all results, including failures, have arrived."""
        return self._open_groups == 0

    def belongs_to(self, owner: TicketOwner) -> bool:
        """Return True if `owner` created this ticket and is still open."""
        return self._owner is owner

    def cancel(self) -> None:
        """Cancel all requests without a score, and their calls. This method can be called in any thread.

        These requests are unscored with the class `refused`, and they are delivered like the others. If the scorer
        finishes groups, all requests of an unfinished group are cancelled.
        """
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._end(_CANCELLED)
        elif self._owner is not None:
            self._loop.call_soon_threadsafe(self._end, _CANCELLED)

    def expire_in(self, seconds: float) -> None:
        """After this time, mark all requests without a score as unscored with the class `timeout`."""
        error = DeadlineError(f"not scored within deadline_s={seconds:g} of the ticket")
        if not self.is_done:
            self._deadline = self._loop.call_later(seconds, self._end, Failure.from_exception(error))

    def close(self) -> None:
        """End the ticket without further results, because the agent was closed."""
        self._owner = None
        if self._deadline is not None:
            self._deadline.cancel()
        self.deliveries.close()

    def group_slice(self, group: int) -> slice:
        """Return the indices of a group."""
        return slice(group * self.group_size, (group + 1) * self.group_size)

    def timing(self, index: int, zero: float) -> dict[str, Any]:
        """Return the times of a result, in seconds since `zero` in loop time."""
        calls = [call.to_json(zero) for call in self.model_calls.get(index, ())]
        return {
            "submitted_s": round(self.submitted_at - zero, 6),
            "attempts": [[round(began - zero, 6), round(ended - zero, 6)] for began, ended in self.spans[index]],
            **({"model_calls": calls} if calls else {}),
        }

    def settle(
        self, start: int, scored: Sequence[Scored], spans: Spans = (), model_calls: Sequence[ModelCall] = ()
    ) -> int | None:
        """Store the results of a call, starting at index `start`. Results that already exist are kept.

        If the group is now complete and the scorer must finish it, return the number of the group. Otherwise, return
        None.
        """
        if self._owner is None:
            return None
        fresh = 0
        if model_calls and self.results[start] is None:
            self.model_calls[start] = model_calls
        for index, result in enumerate(scored, start):
            if self.results[index] is None:
                self._keep(index, result)
                self.spans[index] = spans
                fresh += 1
        group = start // self.group_size
        self._missing[group] -= fresh
        self._owner.settled(fresh)
        if self._missing[group] or not fresh:
            return None
        if self._finishes_groups:
            return group
        self._complete(group)
        return None

    def finish(self, group: int, scored: Sequence[Scored]) -> None:
        """Store the finished results of a group, and release the group for delivery unless it is closed."""
        if self.is_open(group):
            self.results[self.group_slice(group)] = scored
            self._complete(group)

    def is_open(self, group: int) -> bool:
        """Return True if the group can still be finished."""
        return self._owner is not None and not self._is_complete[group]

    def _keep(self, index: int, result: Scored) -> None:
        self.results[index] = result
        self.completion_ranks[index] = self._settled
        self._settled += 1

    def _complete(self, group: int) -> None:
        assert self._owner is not None
        self._is_complete[group] = True
        self._open_groups -= 1
        if not self._open_groups and self._deadline is not None:
            self._deadline.cancel()
        self._owner.completed(self, group)

    def _end(self, failure: Failure) -> None:
        """Complete all groups. Requests without a score get this failure."""
        if self._owner is None:
            return
        ended = [group for group, is_complete in enumerate(self._is_complete) if not is_complete]
        fresh = 0
        for group in ended:
            for index in range(group * self.group_size, (group + 1) * self.group_size):
                lost = Scored(self.requests[index].rollout_id, None, failure)
                if self.results[index] is None:
                    self._keep(index, lost)
                    fresh += 1
                elif self._finishes_groups:  # An unfinished score is on a different scale.
                    self.results[index] = lost
        self._owner.settled(fresh)
        for group in ended:
            self._complete(group)
        self._owner.gave_up(self)


@dataclass(slots=True, eq=False)
class _ResultWaiter:
    size: int
    order: Order
    wake_up: asyncio.Event = field(default_factory=asyncio.Event)


class DeliveryQueue:
    """A queue that delivers the results of a batch by index. `batch` describes the batch in messages."""

    def __init__(self, size: int, group_size: int, batch: str) -> None:
        self.outstanding = size  # complete results for which no caller waits
        self.undelivered = size  # results not yet delivered
        self._group_size, self._batch = group_size, batch
        self._undelivered = OrderedDict.fromkeys(range(size // group_size))
        self._ready: OrderedDict[int, None] = OrderedDict()
        self._rest: list[int] = []  # the remaining indexes of a split group
        self._takers: deque[_ResultWaiter] = deque()
        self._is_closed = False

    def complete(self, group: int) -> None:
        """Release a group for delivery."""
        self._ready[group] = None
        self._wake_first()

    def close(self) -> None:
        """Wake all callers, because no further groups will be complete."""
        self._is_closed = True
        for taker in self._takers:
            taker.wake_up.set()

    def has_ready_group(self) -> bool:
        """Return True if there is a complete group that no caller is waiting for."""
        return bool(self._ready) and self.outstanding >= self._group_size

    def take_group(self) -> list[int]:
        """Return the indices of the group that completed first. Call it only if `has_ready_group` is true."""
        self.outstanding -= self._group_size
        return self._hand_out([next(iter(self._ready))])

    async def take(self, size: int, order: Order, *, cut_groups: bool) -> list[int]:
        """Wait until the groups of the next `size` results are complete, and return their indices in ascending order.

        Raises:
            ConfigError: If fewer results are left, or if a group would be split.
            RewardError: If the agent is closed.
        """
        if size < 0:
            raise ConfigError(f"get({size}): chunk_size must not be negative")
        if order not in ("completion", "submission"):
            raise ConfigError(f"get: order must be 'completion' or 'submission', got {order!r}")
        outstanding = f"{self.outstanding} results of {self._batch} are outstanding"
        if size > self.outstanding:
            raise ConfigError(f"get({size}) cannot return: {outstanding}")
        # The rest of a group that earlier callers split comes first.
        over = (size - self.outstanding) % self._group_size
        if over and not cut_groups:
            below, above = size - over, size - over + self._group_size
            sizes = [str(fitting) for fitting in (below, above) if 1 <= fitting <= self.outstanding]
            raise ConfigError(
                f"get({size}) would split a group of {self._group_size}; request "
                f"{' or '.join(sizes)}, or set cut_groups=True; {outstanding}"
            )
        self.outstanding -= size
        taker = _ResultWaiter(size, order)
        self._takers.append(taker)
        try:
            while True:
                if self._is_closed:
                    raise RewardError(NOT_OPEN)
                if self._takers[0] is taker and (groups := self._groups_for(taker)) is not None:
                    break
                await taker.wake_up.wait()
                taker.wake_up.clear()
        except BaseException:
            self._takers.remove(taker)
            self.outstanding += size
            self._wake_first()
            raise
        indexes = self._rest + self._hand_out(groups, size)
        taken, self._rest = indexes[:size], indexes[size:]
        self._takers.popleft()
        self._wake_first()
        return sorted(taken)

    def put_back(self, indexes: Sequence[int]) -> list[int]:
        """Make taken results available again, before all others. Return the groups that are whole."""
        counts = Counter(index // self._group_size for index in indexes)
        whole = [group for group, count in counts.items() if count == self._group_size]
        self._rest = sorted([*self._rest, *(i for i in indexes if i // self._group_size not in set(whole))])
        self._ready = OrderedDict.fromkeys([*whole, *self._ready])
        self._undelivered = OrderedDict.fromkeys(sorted([*whole, *self._undelivered]))
        self.outstanding += len(indexes)
        self.undelivered += len(indexes)
        self._wake_first()
        return whole

    def _groups_for(self, taker: _ResultWaiter) -> list[int] | None:
        """Return the groups for the first caller, or None if they are not complete yet."""
        count = max(0, -(-(taker.size - len(self._rest)) // self._group_size))
        if len(self._ready) < count:
            return None
        if taker.order == "completion":
            return list(islice(self._ready, count))
        groups = list(islice(self._undelivered, count))
        return groups if all(group in self._ready for group in groups) else None

    def _hand_out(self, groups: list[int], size: int | None = None) -> list[int]:
        """Remove groups that are ready, and return their indices.

        `size` is the number of results to count as delivered. If None, all results are counted.
        """
        for group in groups:
            del self._ready[group], self._undelivered[group]
        step = self._group_size
        self.undelivered -= len(groups) * step if size is None else size
        return [index for group in groups for index in range(group * step, (group + 1) * step)]

    def _wake_first(self) -> None:
        if self._takers and self._groups_for(self._takers[0]) is not None:
            self._takers[0].wake_up.set()
