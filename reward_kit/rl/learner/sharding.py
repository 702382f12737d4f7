"""One module trained by several processes: FSDP2 shards it, micro-batches are dealt out, and what is summed is summed.

Every process is given the same rows and draws the same order, so each knows the counts of the whole mini-batch without
asking. Only micro-batches differ. Gradients are summed over processes, not averaged: the losses of micro-batches are
shares of the loss of the whole (`losses.participants.GlobalBatch`), and add up wherever they were computed.

Where `torch.distributed` is not initialised there is one process, and everything here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from reward_kit.errors import ConfigError
from reward_kit.rl.losses.diagnostics import Diagnostics, merge_diagnostics
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
