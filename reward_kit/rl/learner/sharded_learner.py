"""A learner of several processes: the first has it as any learner, the others do what it is told to do."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from torch import nn

from reward_kit.errors import RewardKitError
from reward_kit.rl.learner.crew import Crew, in_thread
from reward_kit.rl.learner.lora import add_adapters
from reward_kit.rl.learner.optimizer import widen
from reward_kit.rl.learner.sharding import gather_into
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array

MakeLearner = Callable[[nn.Module], PPOLearner]
_LAST_ORDER_S = 1.0
_CHANGING = ("update", "load_state_dict")
_NOT_KEPT: Mapping[str, Mapping[str, Any]] = {"state_dict": {"keep": False}}


class ShardedLearner:
    """The learner, on the first process. A copy of the module is sharded; the module itself stays whole, and after each
    update has the new weights, for whoever acts with it or saves it.

    Args:
        module: the weights in training.
        make: the learner over a module, the same on every process.
        crew: the processes.
        told: from which the others make theirs, at least one word; see `work_for`.

    Raises:
        ConfigError: the module cannot be trained so.
        TrainingError: another process broke off.
    """

    def __init__(self, module: nn.Module, make: MakeLearner, crew: Crew, told: Sequence[Any]) -> None:
        self.module, self._crew = module, crew
        crew.call(lambda: crew.order(*told))
        self._own = crew.call(lambda: make(copy.deepcopy(module)))
        if (lora := self._own.config.lora) is not None:
            add_adapters(module, lora)
        widen(module)
        crew.call(lambda: gather_into(self._own.module, module))

    def update(self, rows: TokenBatch, *, version: int) -> dict[str, float]:
        """As `PPOLearner.update`, each process on its parts of the rows."""

        def together() -> dict[str, float]:
            found: dict[str, float] = self._told("update", rows, version=version)
            gather_into(self._own.module, self.module)
            return found

        return self._crew.call(together)

    def logprobs(self, rows: TokenBatch) -> Array:
        """As `PPOLearner.logprobs`."""
        return self._crew.call(lambda: self._told("logprobs", rows))

    def state_dict(self) -> dict[str, Any]:
        """That of a learner in one process: any number of them can go on from it."""
        return self._crew.call(lambda: self._told("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on every process."""

        def together() -> None:
            self._told("load_state_dict", state)
            gather_into(self._own.module, self.module)

        self._crew.call(together)

    def _told(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._crew.order(name, arguments, options)
        return getattr(self._own, name)(*arguments, **options)


def work_for(crew: Crew, make: Callable[..., PPOLearner]) -> bool:
    """Do what the first process says, until its last order or its end. Of the other processes.

    Signals are for the first process, which stops the others: whoever sends them to all of them would else cut an
    update off that the first still waits for.

    Args:
        crew: the processes.
        make: the learner over the same module, by the first order's words.

    Returns:
        Whether the first process gave its last order; else a collective may still be waited for: best exit.

    Raises:
        RewardKitError: this process alone could not go on, and the first has not heard of it.
    """
    try:
        return _worked_for(crew, make)
    finally:
        crew.leave()


def _worked_for(crew: Crew, make: Callable[..., PPOLearner]) -> bool:
    is_ending = threading.Event()
    if threading.current_thread() is threading.main_thread():  # elsewhere, as under Ray Train, they are not ours
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
    work = in_thread(lambda: _obey(crew, make))
    while not wait([work], timeout=0.2).done:
        # Without a last order it ended by an error of its own, and nobody will answer.
        if crew.is_over and not wait([work], timeout=_LAST_ORDER_S).done:
            return False
    if (error := work.exception()) is None:
        return True
    # A connection that is lost while everybody is being ended is nobody's error.
    if not (is_ending.is_set() or crew.break_off(error) or is_ending.is_set()):
        raise error
    return False


def _obey(crew: Crew, make: Callable[..., PPOLearner]) -> None:
    if (order := crew.next_order()) is None:
        return
    learner = make(*order)
    gather_into(learner.module, None)
    while (order := crew.next_order()) is not None:
        name, arguments, options = order
        try:
            getattr(learner, name)(*arguments, **options, **_NOT_KEPT.get(name, {}))
        except RewardKitError:
            # What is refused here is refused by all, and the first of them says so.
            if not crew.is_over_within(5.0):
                raise
            return
        if name in _CHANGING:
            gather_into(learner.module, None)
