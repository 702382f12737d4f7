"""`TapeRecorder`, which has graphs on every device, and is as strict as CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """The operations of a step with their tensors, and whatever they read that none of them made.

    A replay runs the operations again, and writes their results into the same memory. As in a CUDA graph, Python values
    and addresses are those of the recording.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.made: dict[int, Tensor] = {}
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {memory_of(tensor): tensor for tensor in tensors_in(args, kwargs)}
        self.outside |= {key: tensor for key, tensor in given.items() if key not in self.made}
        result = func(*args, **kwargs)
        new = [(at, one) for at, one in enumerate(tensors_in(result)) if memory_of(one) not in given]
        self.made |= {memory_of(one): one for _, one in new}
        if new or func._schema.is_mutable:  # otherwise, the result is a view
            self._calls.append((func, args, kwargs, new))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self._calls:
            results = tensors_in(func(*args, **kwargs))
            for at, target in made:
                target.copy_(results[at])


class TapeRecorder:
    """Records tapes. All share one pool of memory: a replay destroys what earlier replays left there."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = self.replayed = self.discarded = 0
        self._tapes: list[Tape] = []

    def discard(self) -> None:
        self._tapes.clear()
        self.discarded += 1

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        warm_up, tape = Tape(), Tape()
        with warm_up:
            step()
        with tape:
            step()
        # Data that came from the host, or that the warm-up left behind, would be outside of only one of the two.
        assert tape.outside.keys() == warm_up.outside.keys(), "the step reads memory that will not be valid in a replay"
        self._tapes.append(tape)
        self.recorded += 1

        def replay() -> None:
            for made in (made for one in self._tapes for made in one.made.values()):
                made.fill_(torch.nan if made.is_floating_point() else 1)
            tape.replay()
            self.replayed += 1

        return replay
