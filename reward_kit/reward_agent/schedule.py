"""Which call is made next: tickets take turns, group by group, and a group that was begun comes before a new one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.reward_agent.tickets import Ticket


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
