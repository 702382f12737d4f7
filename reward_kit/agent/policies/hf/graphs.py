"""`DecodingGraphs`, which replays decoding steps as CUDA graphs.

A decoding step computes one token in each row. Its kernels are so short that a GPU waits for Python to launch them. A
CUDA graph launches all of them at once, but always with the shapes, addresses and Python values of its capture.
Therefore, the numbers of rows and positions are rounded up, a graph is captured for each pair, and a step first copies
its inputs into memory with a fixed address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRAPHS = 96
"""Maximum number of graphs that are kept."""
LENGTH = 256
"""Minimum number of positions to which a step attends."""
_one_capture = threading.Lock()  # a process may capture only one graph at a time


class DecodingShape(NamedTuple):
    """The shape of a decoding step: one token in each of `lines`, which attends to the first `length` positions.

    If `is_in_place` is True, line i belongs to row `first` + i, whose keys and values are read in place. Otherwise,
    those of the row of each line are copied.
    """

    lines: int
    length: int
    is_in_place: bool
    first: int = 0

    @classmethod
    def covering(cls, rows_B: NDArray[np.int64], end: int, rows: int, capacity: int) -> DecodingShape:
        """Return the shape for the next tokens of `rows_B`, which attend to positions below `end`.

        `rows` and `capacity` are the largest sizes. The shape depends on nothing else, in particular not on earlier
        steps, because steps of different shapes may differ in the last bits.
        """
        copied, in_place = (min(1 << (count - 1).bit_length(), rows) for count in (len(rows_B), int(rows_B.max()) + 1))
        power = max(LENGTH, 1 << (end - 1).bit_length())
        length = power * 3 // 4 if LENGTH < end <= power * 3 // 4 else power
        # Copying keys reads them twice and writes them once.
        is_in_place = in_place <= 2 * copied
        return cls(in_place if is_in_place else copied, min(length, capacity), is_in_place)


class GraphRecorder(Protocol):
    """Captures steps as graphs, for one type of device."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step and return a function that replays it. Results exist only after a replay."""

    def discard(self) -> None:
        """Prepare for new graphs. All earlier ones have been discarded."""


class CudaRecorder:
    """Captures CUDA graphs that share their memory. Only one of them may be replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.discard()

    def discard(self) -> None:
        """Use a new memory pool: PyTorch forbids graphs in a pool whose graphs have all been deleted."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step. It runs once before, in the same stream, because libraries then allocate their memory."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                step()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a learner's, may allocate memory in the meantime.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                step()
        replay: Callable[[], None] = graph.replay
        return replay


RECORDERS: dict[str, Callable[[torch.device], GraphRecorder]] = {"cuda": CudaRecorder}
"""The recorder for each type of device that has graphs."""


class _CaptureCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error at operations that wait for the device or copy to or from it, and collects what a step reads.

    Most of these operations fail in a capture as well, but PyTorch before 2.12 then keeps the memory of the graph.

    Attributes:
        read: the tensors that were not made by the step itself, by the address of their storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}  # a reference prevents that the memory is used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        with self:  # inference mode does not decompose operations such as `bool`, which reads an element
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            # Only the elements of a mask must be counted.
            waits = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if waits:
            raise RuntimeError(f"the model's code waits for the device in {func}")
        result = func(*args, **kwargs)
        given, made = (
            {one.untyped_storage()._cdata: one for one in tree_leaves(values) if isinstance(one, Tensor)}
            for values in ((args, kwargs), result)
        )
        is_copy = func.overloadpacket in (aten._to_copy, aten.copy_)
        # Other operations receive a number from the CPU as an argument of their kernel, and may return one.
        if len({one.device for one in (*given.values(), *made.values()) if is_copy or one.dim()}) > 1:
            raise RuntimeError(f"the model's code copies between devices in {func}")
        self.read |= {address: one for address, one in given.items() if address not in self._made}
        self._made |= {address: one for address, one in made.items() if address not in given}
        return result


class DecodingGraphs:
    """The graphs of decoding steps, and the memory for their inputs and results.

    Args:
        compute: the step. It receives its shape and its inputs, a tensor of shape (K, lines), and returns the logits
            (lines, V) and the last hidden states (lines, H). It must not depend on anything else that changes.
        recorder: captures the step.
        device: the device of the step.
    """

    def __init__(
        self,
        compute: Callable[[DecodingShape, Tensor], tuple[Tensor, Tensor]],
        recorder: GraphRecorder,
        device: torch.device,
    ) -> None:
        self._compute, self._recorder, self._device = compute, recorder, device
        self._replays: dict[DecodingShape, Callable[[], None]] = {}  # the most recently used graph is the last
        self._inputs: dict[int, Tensor] = {}  # by the number of lines
        self._results: dict[int, tuple[Tensor, Tensor]] = {}
        self._checked: tuple[Tensor, Tensor] | None = None  # results of the step that was checked

    def discard(self) -> None:
        """Discard all graphs, because the memory that they use has moved."""
        if self._replays:
            self._replays = {}
            self._recorder.discard()

    def run(self, shape: DecodingShape, inputs_KL: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Replay the graph of this shape, or capture it first.

        Returns:
            The logits and the last hidden states. The next step overwrites them.
        """
        given = torch.from_numpy(inputs_KL)
        if shape.lines not in self._inputs:
            self._inputs[shape.lines] = torch.empty_like(given, device=self._device)
        self._inputs[shape.lines].copy_(given, non_blocking=True)
        replay = self._replays.pop(shape, None)
        if replay is None:
            while len(self._replays) >= GRAPHS:
                del self._replays[next(iter(self._replays))]
            with _one_capture:
                replay = self._record(shape)
        self._replays[shape] = replay
        replay()
        return self._results[shape.lines]

    def _record(self, shape: DecodingShape) -> Callable[[], None]:
        inputs = self._inputs[shape.lines]
        if self._checked is None:
            self._checked = self._check(shape, inputs)
        if shape.lines not in self._results:  # later graphs reuse the memory of a graph, so results have their own
            logits, hidden = (one.new_empty(shape.lines, one.shape[-1]) for one in self._checked)
            self._results[shape.lines] = (logits, hidden)

        def step() -> None:
            for target, result in zip(self._results[shape.lines], self._compute(shape, inputs), strict=True):
                target.copy_(result)

        return self._recorder.record(step)

    def _check(self, shape: DecodingShape, inputs: Tensor) -> tuple[Tensor, Tensor]:
        checks = _CaptureCheck(), _CaptureCheck()
        for check in checks:
            with check:
                results = self._compute(shape, inputs)
        if checks[1].read.keys() - checks[0].read.keys():  # for example, indices in a list, which indexing copies
            raise RuntimeError("the model's code reads memory that will not be valid in a replay")
        return results
