"""What of one batch is ready, what has been handed out, and who waits for how much of it.

Groups are handed out whole, unless a caller allows that one is cut. Callers are served in the order in which they
asked. Nothing is polled: a caller sleeps until the group that completes its chunk wakes it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from reward_kit.errors import ConfigError, RewardError

Order = Literal["completion", "submission"]
"""Which groups are handed out next: those that completed first, or those that were submitted first."""

NOT_OPEN = "the reward agent is not open; use `async with AsyncRewardAgent(…)`"


class WakeUp:
    """Something to wait for, again and again; what was told before is not forgotten."""

    __slots__ = ("_future", "_is_told")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._is_told = False

    def tell(self) -> None:
        """Wake up whoever waits."""
        self._is_told = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Until told, and once for each time."""
        if not self._is_told:
            self._future = asyncio.get_running_loop().create_future()
            try:
                await self._future
            finally:
                self._future = None
        self._is_told = False


@dataclass(slots=True, eq=False)
class _Taker:
    size: int
    order: Order
    wake_up: WakeUp = field(default_factory=WakeUp)


class Deliveries:
    """The results of one batch on their way out, by index.

    Args:
        size: how many they will be.
        group_size: how many consecutive ones are a group.
        batch: names the batch, for messages.

    Attributes:
        outstanding: results that nobody has asked for.
        undelivered: results that nobody has got.
    """

    def __init__(self, size: int, group_size: int, batch: str) -> None:
        self.outstanding = self.undelivered = size
        self._group_size, self._batch = group_size, batch
        self._undelivered = OrderedDict.fromkeys(range(size // group_size))
        self._ready: OrderedDict[int, None] = OrderedDict()
        self._rest: list[int] = []  # of a group that was cut
        self._takers: deque[_Taker] = deque()
        self._is_closed = False

    def complete(self, group: int) -> None:
        """A group is there to be handed out."""
        self._ready[group] = None
        self._wake_first()

    def close(self) -> None:
        """Nothing will complete any more; whoever waits is told."""
        self._is_closed = True
        for taker in self._takers:
            taker.wake_up.tell()

    def has_ready_group(self) -> bool:
        """Whether a group is there that nobody has asked for."""
        return bool(self._ready) and self.outstanding >= self._group_size

    def take_group(self) -> list[int]:
        """The indexes of the group that completed first; see `has_ready_group`."""
        self.outstanding -= self._group_size
        return self._hand_out([next(iter(self._ready))])

    async def take(self, size: int, order: Order, *, cut_groups: bool) -> list[int]:
        """The next `size` indexes, sorted, once their groups are complete.

        Raises:
            ConfigError: it can never be met. Nothing has been waited for then, and nothing is lost.
            RewardError: the agent was closed before.
        """
        self._check(size, order, cut_groups)
        self.outstanding -= size
        taker = _Taker(size, order)
        self._takers.append(taker)
        try:
            while True:
                if self._is_closed:
                    raise RewardError(NOT_OPEN)
                if self._takers[0] is taker and (taken := self._pick(taker)) is not None:
                    break
                await taker.wake_up.wait()
        except BaseException:
            self._takers.remove(taker)
            self.outstanding += size
            self._wake_first()
            raise
        self._takers.popleft()
        self._wake_first()
        return taken

    def _check(self, size: int, order: Order, cut_groups: bool) -> None:
        if size < 0:
            raise ConfigError(f"get({size}): a chunk has no negative size")
        if order not in ("completion", "submission"):
            raise ConfigError(f"get: order is 'completion' or 'submission', not {order!r}")
        if size > self.outstanding:
            raise ConfigError(
                f"get({size}) can never be met: {self.outstanding} results are outstanding of {self._batch}"
            )
        # What is left of a cut group when all who have asked before are served comes first.
        over = (size - self.outstanding) % self._group_size
        if over and not cut_groups:
            below, above = size - over, size - over + self._group_size
            sizes = [str(fitting) for fitting in (below, above) if 1 <= fitting <= self.outstanding]
            raise ConfigError(
                f"get({size}) would cut a group of {self._group_size}: ask for {' or '.join(sizes)}, or allow it with "
                f"cut_groups=True; {self.outstanding} results are outstanding of {self._batch}"
            )

    def _groups_for(self, taker: _Taker) -> int:
        return max(0, -(-(taker.size - len(self._rest)) // self._group_size))

    def _can_pick(self, taker: _Taker) -> bool:
        groups = self._groups_for(taker)
        if len(self._ready) < groups:
            return False
        return taker.order == "completion" or all(group in self._ready for group in islice(self._undelivered, groups))

    def _pick(self, taker: _Taker) -> list[int] | None:
        if not self._can_pick(taker):
            return None
        source = self._ready if taker.order == "completion" else self._undelivered
        groups = list(islice(source, self._groups_for(taker)))
        indexes = self._rest + self._hand_out(groups, taker.size)
        taken, self._rest = indexes[: taker.size], indexes[taker.size :]
        return sorted(taken)

    def _hand_out(self, groups: list[int], size: int | None = None) -> list[int]:
        """The indexes of ready groups, which are there no more; `size` where that is not theirs."""
        for group in groups:
            del self._ready[group], self._undelivered[group]
        step = self._group_size
        self.undelivered -= len(groups) * step if size is None else size
        return [index for group in groups for index in range(group * step, (group + 1) * step)]

    def _wake_first(self) -> None:
        if self._takers and self._can_pick(self._takers[0]):
            self._takers[0].wake_up.tell()
