"""One module trained by several processes: FSDP2 shards it, micro-batches are dealt out, and what is summed is summed.

Every process is given the same rows and draws the same order, so each knows the counts of the whole mini-batch without
asking. Only micro-batches differ. Gradients are summed over processes, not averaged: the losses of micro-batches are
shares of the loss of the whole (`losses.participants.GlobalBatch`), and add up wherever they were computed.

Where `torch.distributed` is not initialised there is one process, and everything here does nothing.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reward_kit.errors import ConfigError, RewardKitError, TrainingError
from reward_kit.rl.learner.optimizer import add_adapters, widen
from reward_kit.rl.losses.base import Diagnostics, merge_diagnostics
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array, Ints

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that train a module together, as one of them sees them.

    Attributes:
        rank: which of them this is.
        size: how many there are.
        is_group: whether they are a process group; a group may well have one member.
    """

    rank: int = 0
    size: int = 1
    is_group: bool = False

    @classmethod
    def current(cls) -> Processes:
        """Those of `torch.distributed`; this one alone where it is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), True)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that collects, writes and reports."""
        return self.rank == 0

    def shard(self, module: nn.Module, precision: torch.dtype = torch.float32) -> None:
        """Shard a module's parameters over the processes, in place; nothing where they are no group.

        Before an optimizer is made. Each layer that `transformers` does not split is a unit of its own, gathered for
        its forward and its backward pass and then freed; what is left is one more. All processes begin with the
        weights of the first.

        Args:
            module: on the device where it will be; from now on called as a whole, so that its hooks run.
            precision: bfloat16 gathers parameters in it and sums gradients in float32, beside weights that are kept as
                they are; float32 leaves everything in the weights' own type.
        """
        if not self.is_group or isinstance(module, FSDPModule):
            return
        self.same_weights(module)
        mesh = init_device_mesh(_device_of(module).type, (self.size,))
        policy = MixedPrecisionPolicy()
        if precision == torch.bfloat16:
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in layers_of(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.set_gradient_divide_factor(1.0)
                one.set_force_sum_reduction_for_comms(True)

    def same_weights(self, module: nn.Module) -> None:
        """Give every process the weights that the first has; nothing where they are no group.

        Args:
            module: not sharded.

        Raises:
            ConfigError: it is on an accelerator, and this process has none of its own.
        """
        if not self.is_group:
            return
        _check_accelerator(_device_of(module))
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def share(self, parts: Sequence[Ints]) -> list[Ints]:
        """This process's micro-batches, as many as every other process has.

        Collectives are met in step, so nobody may have one more. Parts are halved until there are enough; a part
        without rows is for a process that has nothing to do, and goes through the module like any other.

        Args:
            parts: the rows of each micro-batch, the same on every process.
        """
        found = list(parts)
        wanted = -(-len(found) // self.size) * self.size
        while len(found) < wanted:
            most = max(range(len(found)), key=lambda index: len(found[index]))
            half = len(found[most]) // 2
            found[most : most + 1] = [found[most][:half], found[most][half:]] if half else [found[most], _NO_ROWS]
        return found[self.rank :: self.size]

    def merged(self, parts: Sequence[Diagnostics]) -> Sequence[Diagnostics]:
        """The diagnostics of all processes, the same on each.

        Args:
            parts: of this one's micro-batches.
        """
        if self.size == 1:
            return parts
        mine = {name: one._replace(parts=one.parts.cpu()) for name, one in merge_diagnostics(parts).statistics.items()}
        return [Diagnostics(one) for one in _gathered(mine, self.size)]

    def added(self, values: Array) -> Array:
        """Arrays of one shape, added up over the processes. What one has computed and all others left 0, all have."""
        if self.size == 1:
            return values
        return np.sum(_gathered(values, self.size), axis=0, dtype=values.dtype)

    def from_first(self, value: Value) -> Value:
        """What the first process gives; what others give is not looked at.

        Args:
            value: anything that can be pickled, such as the rows of a batch.
        """
        if self.size == 1:
            return value
        box = [value if self.is_first else None]
        dist.broadcast_object_list(box, 0)
        return box[0]  # type: ignore[return-value]


_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


_STARTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@contextmanager
def process_group() -> Iterator[Processes]:
    """The processes that `torchrun` or Ray Train started, as a group until the end of the block; else this one alone.

    What is on a CPU goes over gloo; what is on accelerators over NCCL, each process on the one of its local rank. A
    block that ends by an error leaves the group as it is: others may be gone, or wait for this one.
    """
    if dist.is_initialized() or not os.environ.keys() >= _STARTED:
        yield Processes.current()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if _local_rank() < torch.cuda.device_count():  # else it may well train on the CPU
            torch.cuda.set_device(_local_rank())
    dist.init_process_group(backend)
    yield Processes.current()
    dist.destroy_process_group()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _check_accelerator(device: torch.device) -> None:
    if device.type == "cuda" and _local_rank() >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"this is process {_local_rank()} of this machine, which has {count} GPUs; start as many or less"
        )


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters(), torch.empty(0)).device


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers that are sharded one by one: those that `transformers` names as not to be split."""
    names: set[str] = set()
    for one in module.modules():
        names.update(getattr(one, "_no_split_modules", None) or ())
    return [one for one in module.modules() if type(one).__name__ in names]


def _gathered(value: Value, size: int) -> list[Value]:
    """What every process gives, in the order of their ranks."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def whole(state: Any, *, keep: bool = True) -> Any:
    """A state with the shards of all processes put together, on the CPU: what one process alone would have.

    Every process calls it, with a tree of the same form, such as the `state_dict` of a module or an optimizer.

    Args:
        state: tensors, and dicts, lists and tuples of them; anything else stays.
        keep: False only takes part, for who needs no copy: the tensors are None in what comes back.
    """
    if isinstance(state, DTensor):
        full: Tensor = state.full_tensor()
        return full.detach().cpu() if keep else None
    if isinstance(state, Tensor):
        return state.detach().cpu() if keep else None
    if isinstance(state, Mapping):
        return {key: whole(value, keep=keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(value, keep=keep) for value in state)
    return state


@torch.no_grad()
def gather_into(module: nn.Module, target: nn.Module | None) -> None:
    """Copy the weights of a module into one that is not sharded, a tensor after the other.

    Args:
        module: sharded over the processes, each of which calls this, or not.
        target: has weights of the same names and shapes; None only takes part.
    """
    own = target.state_dict() if target is not None else {}
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if target is not None:
            own[name].copy_(full)


def load_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module, sharded or not.

    Args:
        module: as it is trained.
        state: `whole` of a module's `state_dict`, however many processes it was trained by.

    Raises:
        RuntimeError: names or shapes differ, as of `Module.load_state_dict`.
    """
    own = module.state_dict()
    module.load_state_dict({name: _sharded_as(value, own.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the whole state of an optimizer into one over parameters that are sharded or not.

    Args:
        optimizer: over the parameters, in the order of the one that was saved. Its options stay its own.
        state: `whole` of an optimizer's `state_dict`.

    Raises:
        ValueError: the groups differ, as of `Optimizer.load_state_dict`.
    """
    parameters = _in_order(group["params"] for group in optimizer.param_groups)
    kept = {
        index: {key: _sharded_as(value, parameters.get(int(index))) for key, value in moments.items()}
        for index, moments in state["state"].items()
    }
    own = [{key: option for key, option in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict({**state, "state": kept})
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)


def _in_order(groups: Iterable[Sequence[Tensor]]) -> dict[int, Tensor]:
    return dict(enumerate(parameter for group in groups for parameter in group))


def _sharded_as(value: Any, like: Any) -> Any:
    """A copy of a whole tensor, sharded as another one is that has its shape; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if not (isinstance(like, DTensor) and value.shape == like.shape):
        return value.clone()  # an optimizer would take the tensor for its own, and change it
    # Every process has the whole, so nothing needs to be sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


_ORDERS_WAIT = timedelta(days=365)  # others wait for orders as long as the first one collects

_LOOK_S = 0.1

_GRACE_S = 10.0

_LEAVING_S = 2.0

_groups = itertools.count()

_BROKEN, _HEARD, _OVER, _LEFT = "broken", "heard", "over", "left"


class ProcessGroup:
    """The processes, as one of them sees them. Made on each by `open_process_group`.

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
def open_process_group() -> Iterator[ProcessGroup | None]:
    """The processes that were started together, until the end of the block; None where this one is alone.

    Where the block of the first process ends by an error, the others end without another order; else this is the last.

    Raises:
        ConfigError: the group was made by somebody who does not say where its store is.
    """
    with process_group() as processes:
        if not processes.is_group:
            yield None
            return
        group = ProcessGroup(processes, _store())
        try:
            yield group
            if processes.is_first:
                group.call(group.order)  # an empty one is the last
        finally:
            if processes.is_first:
                group.end()


def _store() -> Any:
    """A connection of our own: the one of the collectives may be held by one that waits."""
    place, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not (place and port):
        raise ConfigError("torch.distributed was set up without MASTER_ADDR and MASTER_PORT; start us by torchrun")
    stores: Any = dist
    store = stores.TCPStore(place, int(port), is_master=False, wait_for_workers=False)
    # All processes make as many, and what was noted for an earlier one is not about this one.
    number = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_groups)}"
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


MakeLearner = Callable[[nn.Module], Any]

_LAST_ORDER_S = 1.0

_CHANGING = ("update", "load_state_dict")

_NOT_KEPT: Mapping[str, Mapping[str, Any]] = {"state_dict": {"keep": False}}


class ShardedLearner:
    """The learner, on the first process. A copy of the module is sharded; the module itself stays whole, and after each
    update has the new weights, for whoever acts with it or saves it.

    Args:
        module: the weights in training.
        make: the learner over a module, the same on every process.
        group: the processes.
        told: from which the others make theirs, at least one word; see `follow`.

    Raises:
        ConfigError: the module cannot be trained so.
        TrainingError: another process broke off.
    """

    def __init__(self, module: nn.Module, make: MakeLearner, group: ProcessGroup, told: Sequence[Any]) -> None:
        self.module, self._crew = module, group
        group.call(lambda: group.order(*told))
        self._own = group.call(lambda: make(copy.deepcopy(module)))
        if (lora := self._own.config.lora) is not None:
            add_adapters(module, lora)
        widen(module)
        group.call(lambda: gather_into(self._own.module, module))

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


def follow(group: ProcessGroup, make: Callable[..., Any]) -> bool:
    """Do what the first process says, until its last order or its end. Of the other processes.

    Signals are for the first process, which stops the others: whoever sends them to all of them would else cut an
    update off that the first still waits for.

    Args:
        group: the processes.
        make: the learner over the same module, by the first order's words.

    Returns:
        Whether the first process gave its last order; else a collective may still be waited for: best exit.

    Raises:
        RewardKitError: this process alone could not go on, and the first has not heard of it.
    """
    try:
        return _worked_for(group, make)
    finally:
        group.leave()


def _worked_for(group: ProcessGroup, make: Callable[..., Any]) -> bool:
    is_ending = threading.Event()
    if threading.current_thread() is threading.main_thread():  # elsewhere, as under Ray Train, they are not ours
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
    work = in_thread(lambda: _obey(group, make))
    while not wait([work], timeout=0.2).done:
        # Without a last order it ended by an error of its own, and nobody will answer.
        if group.is_over and not wait([work], timeout=_LAST_ORDER_S).done:
            return False
    if (error := work.exception()) is None:
        return True
    # A connection that is lost while everybody is being ended is nobody's error.
    if not (is_ending.is_set() or group.break_off(error) or is_ending.is_set()):
        raise error
    return False


def _obey(group: ProcessGroup, make: Callable[..., Any]) -> None:
    if (order := group.next_order()) is None:
        return
    learner = make(*order)
    gather_into(learner.module, None)
    while (order := group.next_order()) is not None:
        name, arguments, options = order
        try:
            getattr(learner, name)(*arguments, **options, **_NOT_KEPT.get(name, {}))
        except RewardKitError:
            # What is refused here is refused by all, and the first of them says so.
            if not group.is_over_within(5.0):
                raise
            return
        if name in _CHANGING:
            gather_into(learner.module, None)
