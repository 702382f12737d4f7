"""Training of one module in multiple processes. FSDP2 shards the module, and micro-batches are distributed.

Every process receives the same rows and draws the same random order; only the micro-batches differ. Results are summed
over processes. Gradients, too, are summed rather than averaged, because the loss of a micro-batch is part of the loss
of the whole batch (see `losses.GlobalBatch`). If `torch.distributed` is not initialized, there is only one process, and
the functions in this module do nothing.

The first process sends orders, which the other processes follow (`ShardedLearner`, `follow`). All processes must enter
each collective operation, so if one process failed, the others would wait forever. Failures are therefore recorded in a
store that all processes share (`ProcessGroup`). Processes check this store while they wait in a collective operation.
"""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from reward_kit.rl.loss_terms import Diagnostics, merge_diagnostics
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array, Ints
from reward_kit.tokens.layout import split_to_multiple

Value = TypeVar("Value")
_STARTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's rank among the processes that train a module, and the number of processes."""

    rank: int = 0
    size: int = 1
    is_group: bool = False

    @classmethod
    def current(cls) -> Processes:
        """Return the `torch.distributed` processes, or this process alone if `torch.distributed` is not used."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), True)

    @property
    def is_first(self) -> bool:
        """True in the process that collects episodes, writes files and reports progress."""
        return self.rank == 0

    def shard(self, module: nn.Module, precision: torch.dtype = torch.float32) -> None:
        """Shard the parameters of a module over the processes, in place. Call this before creating an optimizer.

        Each layer that `transformers` does not split forms a separate unit. The unit's parameters are gathered for the
        forward and backward passes and then freed. The remaining layers form another unit. All processes start with the
        first process's weights.

        The module must be on its final device. Once it is sharded, it must be called as a whole so that its hooks run.
        If `precision` is bfloat16, parameters are gathered in bfloat16, and gradients are summed in float32. If
        `precision` is float32, the type of the weights is used for both.
        """
        if not self.is_group or isinstance(module, FSDPModule):
            return
        self.same_weights(module)
        mesh = init_device_mesh(_device_of(module).type, (self.size,))
        policy = MixedPrecisionPolicy()
        if precision == torch.bfloat16:
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        for layer in shardable_layers(module):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for one in module.modules():
            if isinstance(one, FSDPModule):
                one.set_gradient_divide_factor(1.0)
                one.set_force_sum_reduction_for_comms(True)

    def same_weights(self, module: nn.Module) -> None:
        """Copy the first process's weights to all processes without sharding the module."""
        if not self.is_group:
            return
        if _device_of(module).type == "cuda" and _local_rank() >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"process {_local_rank()} on this machine has no GPU, because there are only {count} GPUs; "
                "start at most that many processes"
            )
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)

    def share(self, parts: Sequence[Ints]) -> list[Ints]:
        """Return the micro-batches of this process.

        All processes receive the same number of micro-batches, as collective operations require. Micro-batches are
        halved until there are enough of them. Empty micro-batches pass through the module like any other micro-batch.
        """
        return split_to_multiple(parts, self.size)[self.rank :: self.size]

    def merged(self, parts: Sequence[Diagnostics]) -> Sequence[Diagnostics]:
        """Merge the diagnostics of all micro-batches in all processes."""
        if self.size == 1:
            return parts
        mine = {name: one._replace(parts=one.parts.cpu()) for name, one in merge_diagnostics(parts).statistics.items()}
        return [Diagnostics(one) for one in self._gathered(mine)]

    def added(self, values: Array) -> Array:
        """Sum arrays of the same shape over all processes."""
        if self.size == 1:
            return values
        return np.sum(self._gathered(values), axis=0, dtype=values.dtype)

    def _gathered(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@contextmanager
def process_group() -> Iterator[Processes]:
    """Open the process group that `torchrun` or Ray Train started, if any.

    CPU tensors use gloo, and accelerator tensors use NCCL. Each process uses the accelerator whose index is its local
    rank. If the block raises an exception, the group is not closed, because other processes may have ended or may still
    be waiting.
    """
    if dist.is_initialized() or not os.environ.keys() >= _STARTED:
        yield Processes.current()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if _local_rank() < torch.cuda.device_count():  # Without an accelerator, a process trains on the CPU.
            torch.cuda.set_device(_local_rank())
    dist.init_process_group(backend)
    yield Processes.current()
    dist.destroy_process_group()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters(), torch.empty(0)).device


def shardable_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers to shard separately, which are those that `transformers` does not split."""
    names: set[str] = set()
    for one in module.modules():
        names.update(getattr(one, "_no_split_modules", None) or ())
    return [one for one in module.modules() if type(one).__name__ in names]


def whole(state: Any, *, keep: bool = True) -> Any:
    """Gather all processes' shards of a module's or an optimizer's `state_dict` on the CPU.

    Every process must call this function with a tree of the same structure. If `keep` is false, tensors are replaced
    with None.
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
def copy_weights_into(module: nn.Module, target: nn.Module | None) -> None:
    """Copy the weights of a module, sharded or not, to an unsharded target. All processes must call this function."""
    own = target.state_dict() if target is not None else {}
    for name, tensor in module.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if target is not None:
            own[name].copy_(full)


def load_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load weights returned by `whole` into a module, sharded or not, like `Module.load_state_dict`."""
    own = module.state_dict()
    module.load_state_dict({name: _shard_like(value, own.get(name)) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state returned by `whole` into an optimizer whose parameters may be sharded. Options are unchanged."""
    parameters = dict(enumerate(one for group in optimizer.param_groups for one in group["params"]))
    kept = {
        index: {key: _shard_like(value, parameters.get(int(index))) for key, value in moments.items()}
        for index, moments in state["state"].items()
    }
    own = [{key: option for key, option in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict({**state, "state": kept})
    for group, options in zip(optimizer.param_groups, own, strict=True):
        group.update(options)


def _shard_like(value: Any, like: Any) -> Any:
    """Return a copy of a tensor, sharded in the same way as `like`. Other values are returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    if not (isinstance(like, DTensor) and value.shape == like.shape):
        return value.clone()  # The optimizer changes the tensors that are passed to it.
    # Every process has the whole tensor, so nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


_ORDERS_WAIT = timedelta(days=365)  # The other processes wait for orders while the first process collects episodes.
_LOOK_S = 0.1
_GRACE_S = 10.0
_LEAVING_S = 2.0
_LAST_ORDER_S = 1.0
_groups = itertools.count()
_BROKEN, _HEARD, _OVER, _LEFT = "broken", "heard", "over", "left"


class ProcessGroup:
    """Sends orders from the first process to the others and records failures in a store that all processes share."""

    def __init__(self, processes: Processes, store: Any) -> None:
        self.processes, self._store = processes, store
        # Create a group on the CPU that has a separate time limit.
        self._orders = dist.new_group(backend="gloo", timeout=_ORDERS_WAIT)

    def order(self, *order: Any) -> None:
        """Send an order to the other processes. An order is a name and picklable arguments."""
        dist.broadcast_object_list([order], 0, group=self._orders)

    def next_order(self) -> tuple[Any, ...] | None:
        """Wait for the next order from the first process and return it. After the last order, return None."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0, group=self._orders)
        order: tuple[Any, ...] = box[0]
        return order or None

    def call(self, make: Callable[[], Value]) -> Value:
        """Make a call in which all processes take part.

        If another process fails, a `TrainingError` with the reason is raised.
        """
        made = _in_thread(make)
        while not wait([made], timeout=_LOOK_S).done:
            self._raise_if_broken()
        try:
            return made.result()
        except RewardKitError:
            raise
        except Exception as error:
            self._raise_if_broken(within_s=2.0)  # A lost connection may result from a failure of another process.
            if isinstance(error, dist.DistError) or "gloo" in str(error):
                raise TrainingError(
                    "another process ended without reporting a reason; it may have been killed"
                ) from error
            raise

    def _raise_if_broken(self, within_s: float = 0.0) -> None:
        end = time.monotonic() + within_s
        while not self._is_noted(_BROKEN):
            if time.monotonic() >= end:
                return
            time.sleep(_LOOK_S)
        self._store.set(_HEARD, "1")
        raise TrainingError(self._store.get(_BROKEN).decode())

    def end(self) -> None:
        """Record that the run is over, and wait until the other processes stop using the store."""
        self._store.set(_OVER, "1")
        end = time.monotonic() + _LEAVING_S
        while self._store.add(_LEFT, 0) < self.processes.size - 1 and time.monotonic() < end:
            time.sleep(_LOOK_S / 4)

    def leave(self) -> None:
        """Stop using the store. The other processes call this when they end."""
        with suppress(RuntimeError):  # see `_is_noted`
            self._store.add(_LEFT, 1)

    @property
    def is_over(self) -> bool:
        """True if the first process has ended or is about to end. That process reports the reason itself."""
        return self._is_noted(_OVER) or self._is_noted(_HEARD)

    def _is_noted(self, note: str) -> bool:
        try:
            return bool(self._store.check([note]))
        except RuntimeError:  # The store is gone because the first process or the launcher has ended.
            return note != _BROKEN

    def break_off(self, error: BaseException) -> bool:
        """Report to the first process why this process cannot continue. Return True if the message arrived."""
        reason = str(error) if isinstance(error, RewardKitError) else f"{type(error).__name__}: {error}"
        note = f"process {self.processes.rank + 1} of {self.processes.size}: {reason}"
        with suppress(RuntimeError):  # see `_is_noted`
            self._store.compare_set(_BROKEN, "", note)  # The first failure causes the later failures.
        return self.is_over_within(_GRACE_S)

    def is_over_within(self, seconds: float) -> bool:
        """Wait for the first process to end, and return True if it ended in time."""
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.is_over


@contextmanager
def open_process_group() -> Iterator[ProcessGroup | None]:
    """Open the group of processes that were started together, or return None if there is only one process.

    If the block of the first process raises an exception, the other processes end without a further order. Otherwise,
    the first process sends a last order.
    """
    with process_group() as processes:
        if not processes.is_group:
            yield None
            return
        host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not (host and port):
            raise ConfigError(
                "torch.distributed was initialized without MASTER_ADDR and MASTER_PORT; "
                "start the processes with torchrun"
            )
        stores: Any = dist
        # Use a separate connection, since a waiting collective operation may occupy the other connection.
        store = stores.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        # All processes create the same number of groups. The number separates the records of different groups.
        number = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_groups)}"
        group = ProcessGroup(processes, stores.PrefixStore(f"reward-kit/{number}", store))
        try:
            yield group
            if processes.is_first:
                group.call(group.order)  # An empty order is the last order.
        finally:
            if processes.is_first:
                group.end()


def _in_thread(call: Callable[[], Value]) -> Future[Value]:
    """Run a call in a daemon thread on the current accelerator, so the process can end without waiting for the call."""
    made: Future[Value] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller that waits
            made.set_exception(error)

    threading.Thread(target=work, daemon=True, name="with the other processes").start()
    return made


class ShardedLearner:
    """The learner in the first of multiple processes.

    It has the methods of `PPOLearner` that a trainer calls; all processes run each call.

    A copy of the module is sharded. The module itself, which is used for acting and saving, is not sharded and receives
    the new weights after each update.

    Args:
        module: the module to train.
        make: a function that creates the `PPOLearner` for a module. It must be the same in every process.
        group: the processes.
        setup: the first order, from which the other processes create their learners; see `follow`.
    """

    def __init__(
        self, module: nn.Module, make: Callable[[nn.Module], Any], group: ProcessGroup, setup: Sequence[Any]
    ) -> None:
        self.module, self._group = module, group
        group.call(lambda: group.order(*setup))
        self._own = group.call(lambda: make(copy.deepcopy(module)))
        if (lora := self._own.config.lora) is not None:
            add_adapters(module, lora)
        widen(module)
        group.call(lambda: copy_weights_into(self._own.module, module))

    def update(self, rows: TokenBatch, *, version: int, progress: float = 0.0) -> dict[str, float]:
        diagnostics: dict[str, float] = self._together("update", rows, version=version, progress=progress)
        return diagnostics

    def logprobs(self, rows: TokenBatch) -> Array:
        logprobs_BT: Array = self._together("logprobs", rows)
        return logprobs_BT

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._together("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._together("load_state_dict", state)

    def _together(self, name: str, *arguments: Any, **options: Any) -> Any:
        def call() -> Any:
            self._group.order(name, arguments, options)
            result = getattr(self._own, name)(*arguments, **options)
            if name in _CHANGING:
                copy_weights_into(self._own.module, self.module)
            return result

        return self._group.call(call)


_CHANGING = ("update", "load_state_dict")


def follow(group: ProcessGroup, make: Callable[..., Any]) -> bool:
    """Execute the first process's orders until it sends its last order or ends. The other processes call this function.

    Signals are ignored, because the first process stops the others. Otherwise, a signal sent to all processes would
    interrupt an update that the first process is still waiting for.

    Args:
        group: the processes.
        make: a function that creates the learner for the same module from the first order.

    Returns:
        True if the last order was received, or False if it was not. If False, a thread may still be waiting in a
        collective operation, so the process should exit.

    Raises:
        RewardKitError: If this process cannot continue and cannot report its failure to the first process.
    """

    def obey() -> None:
        if (order := group.next_order()) is None:
            return
        learner = make(*order)
        copy_weights_into(learner.module, None)
        while (order := group.next_order()) is not None:
            name, arguments, options = order
            try:
                extra = {"keep": False} if name == "state_dict" else {}
                getattr(learner, name)(*arguments, **options, **extra)
            except RewardKitError:
                # All processes raise the same error, and the first process reports it.
                if not group.is_over_within(5.0):
                    raise
                return
            if name in _CHANGING:
                copy_weights_into(learner.module, None)

    is_ending = threading.Event()
    try:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # In other threads (Ray Train), signals are handled elsewhere
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
        work = _in_thread(obey)
        while not wait([work], timeout=0.2).done:
            # Without a last order, the first process ended with an error and will not respond.
            if group.is_over and not wait([work], timeout=_LAST_ORDER_S).done:
                return False
        if (error := work.exception()) is None:
            return True
        # A connection that is lost while all processes are being ended is not an error.
        if not (is_ending.is_set() or group.break_off(error) or is_ending.is_set()):
            raise error
        return False
    finally:
        group.leave()
