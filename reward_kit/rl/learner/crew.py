"""The processes of one training run: orders from the first to the others, and word of one that broke off.

Collectives alone would not do. They are met in step, so a process that fails leaves the others waiting for it, and none
of them could say why. What went wrong is therefore noted in the store by which the processes found one another, and
whoever waits in a collective looks there.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from reward_kit.errors import ConfigError, RewardKitError, TrainingError
from reward_kit.rl.learner.sharding import Processes, process_group

Value = TypeVar("Value")

_ORDERS_WAIT = timedelta(days=365)  # others wait for orders as long as the first one collects
_LOOK_S = 0.1
_GRACE_S = 10.0
_LEAVING_S = 2.0
_crews = itertools.count()
_BROKEN, _HEARD, _OVER, _LEFT = "broken", "heard", "over", "left"


class Crew:
    """The processes, as one of them sees them. Made on each by `crew_of_processes`.

    Args:
        processes: a group, which may well have one member.
        store: what they note, for all of them to read.

    Attributes:
        processes: as given.
    """

    def __init__(self, processes: Processes, store: Any) -> None:
        self.processes, self._store = processes, store
        # Over the CPU whatever the weights are on, with a time limit of its own.
        self._orders = dist.new_group(backend="gloo", timeout=_ORDERS_WAIT)

    def order(self, *order: Any) -> None:
        """Tell the others what is next; of the first process.

        Args:
            *order: a name and its arguments, which can be pickled.
        """
        dist.broadcast_object_list([order], 0, group=self._orders)

    def next_order(self) -> tuple[Any, ...] | None:
        """What the first process says, once it does; None at the end of all orders. Of the others."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0, group=self._orders)
        found: tuple[Any, ...] = box[0]
        return found or None

    def call(self, make: Callable[[], Value]) -> Value:
        """Make a call in which the others take part; of the first process.

        Raises:
            TrainingError: one of the others broke off, and why.
        """
        made = in_thread(make)
        while not wait([made], timeout=_LOOK_S).done:
            self._refuse_broken()
        try:
            return made.result()
        except RewardKitError:
            raise
        except Exception as error:
            self._refuse_broken(within_s=2.0)  # theirs is the cause where a connection was lost
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise TrainingError("another process has ended without a word; was it killed?") from error
            raise

    def _refuse_broken(self, within_s: float = 0.0) -> None:
        end = time.monotonic() + within_s
        while not self._is_noted(_BROKEN):
            if time.monotonic() >= end:
                return
            time.sleep(_LOOK_S)
        self._store.set(_HEARD, "1")
        raise TrainingError(self._store.get(_BROKEN).decode())

    def end(self) -> None:
        """It is over; the others need not wait. Of the first process, in which the store may live: they leave it."""
        self._store.set(_OVER, "1")
        end = time.monotonic() + _LEAVING_S
        while self._store.add(_LEFT, 0) < self.processes.size - 1 and time.monotonic() < end:
            time.sleep(_LOOK_S / 4)

    def leave(self) -> None:
        """Look at the store no more. Of the others, when they have nothing more to do."""
        with suppress(RuntimeError):  # see `_is_noted`
            self._store.add(_LEFT, 1)

    @property
    def is_over(self) -> bool:
        """Whether the first process has ended, or is about to: then it says why itself."""
        return self._is_noted(_OVER) or self._is_noted(_HEARD)

    def _is_noted(self, what: str) -> bool:
        try:
            return bool(self._store.check([what]))
        except RuntimeError:  # the store is gone, and the first process with it, or whoever started us all
            return what != _BROKEN

    def break_off(self, error: BaseException) -> bool:
        """Tell the first process why this one cannot go on; whether it has heard, so that no more need be said."""
        told = f"process {self.processes.rank + 1} of {self.processes.size}: {_words(error)}"
        with suppress(RuntimeError):  # see `_is_noted`
            self._store.compare_set(_BROKEN, "", told)  # the first reason is the cause of what follows
        return self.is_over_within(_GRACE_S)

    def is_over_within(self, seconds: float) -> bool:
        """Whether the first process ends so soon."""
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.is_over


@contextmanager
def crew_of_processes() -> Iterator[Crew | None]:
    """The processes that were started together, until the end of the block; None where this one is alone.

    Where the block of the first process ends by an error, the others end without another order; else this is the last.

    Raises:
        ConfigError: the group was made by somebody who does not say where its store is.
    """
    with process_group() as processes:
        if not processes.is_group:
            yield None
            return
        crew = Crew(processes, _store())
        try:
            yield crew
            if processes.is_first:
                crew.call(crew.order)  # an empty one is the last
        finally:
            if processes.is_first:
                crew.end()


def _store() -> Any:
    """A connection of our own: the one of the collectives may be held by one that waits."""
    place, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (place and port):
        raise ConfigError("torch.distributed was set up without MASTER_ADDR and MASTER_PORT; start us by torchrun")
    stores: Any = dist
    store = stores.TCPStore(place, int(port), is_master=False, wait_for_workers=False)
    # All processes make as many, and what was noted for an earlier one is not about this one.
    number = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_crews)}"
    return stores.PrefixStore(f"reward-kit/{number}", store)


def in_thread(call: Callable[[], Value]) -> Future[Value]:
    """Make a call in a thread that the end of the process does not wait for, on the accelerator of this one."""
    made: Future[Value] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            made.set_exception(error)

    threading.Thread(target=work, daemon=True, name="with the other processes").start()
    return made


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, RewardKitError) else f"{type(error).__name__}: {error}"
