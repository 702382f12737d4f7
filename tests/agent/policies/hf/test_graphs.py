"""Test that decoding with CUDA graphs gives the results of decoding without them.

On a GPU, the graphs are CUDA's. On other devices, they are tapes, which break in the same way.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf import graphs
from reward_kit.agent.policies.hf.engine import Engine, Generated
from reward_kit.agent.policies.hf.forward import DecodingChunk, RowModel
from reward_kit.agent.policies.hf.graphs import RECORDERS, CudaRecorder, DecodingGraphs, DecodingShape
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.errors import PolicyError
from tests.agent.policies.hf.tape import TapeRecorder
from tests.agent.policies.hf.test_engine import GREEDY, PLAIN, Played, gap, play, running
from tests.agent.policies.hf.test_engine_constraints import ANY, Pattern
from tests.agent.policies.hf.tiny_models import VOCABULARY, tiny_model
from tests.devices import DEVICE

pytestmark = pytest.mark.device


class CountingCudaRecorder(CudaRecorder):
    """CUDA graphs with the counts of a tape recorder."""

    def __init__(self, device: torch.device) -> None:
        self.recorded = self.replayed = 0
        self.discarded = -1  # the constructor calls discard
        super().__init__(device)

    def discard(self) -> None:
        super().discard()
        self.discarded += 1

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        once = super().record(step)
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            once()

        return replay


RECORDER = CountingCudaRecorder if DEVICE.type == "cuda" else TapeRecorder


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have graphs on the device of the tests, and return the recorder of each engine."""
    made: list[Any] = []

    def make(device: torch.device) -> Any:
        made.append(RECORDER(device))
        return made[-1]

    monkeypatch.setitem(RECORDERS, DEVICE.type, make)
    return made


def long_model(**options: Any) -> PreTrainedModel:
    """Return a model whose contexts may be longer than what the cache initially allocates."""
    model = tiny_model(**options)
    model.config.max_position_embeddings = 2000
    return model


Workload = Callable[[Engine], Awaitable[list[Generated]]]


async def compare(model: PreTrainedModel, workload: Workload, **options: Any) -> list[Generated]:
    """Run a workload with and without graphs, and compare its turns."""
    results = []
    for has_graphs in (False, True):
        async with running(copy.deepcopy(model), cuda_graphs=has_graphs, **options) as engine:
            assert engine.has_graphs is has_graphs
            results.append(await workload(engine))
            assert engine.has_graphs is has_graphs  # they did not fail
    assert_equal(*results)
    return results[1]


def assert_equal(plain: Sequence[Generated], replayed: Sequence[Generated]) -> None:
    assert len(plain) == len(replayed) > 0
    for one, other in zip(plain, replayed, strict=True):
        assert other.token_ids == one.token_ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert other.value == pytest.approx(one.value, abs=1e-4)
        assert (other.finish_reason, other.policy_version) == (one.finish_reason, one.policy_version)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "gptj"])
async def test_sessions_that_join_and_leave(kind: str, recorders: list[Any]) -> None:
    """`mistral` has a sliding window, and `gptj` has padded rows."""
    model, played = tiny_model(kind), list[Played]()

    async def workload(engine: Engine) -> list[Generated]:
        # More sessions than rows: some recompute their contexts.
        played[:] = await asyncio.gather(*(play(engine, number, pauses=9) for number in range(12)))
        return [turn for one in played for _, turn in one.turns]

    await compare(model, workload)
    assert recorders[0].replayed > recorders[0].recorded > 3
    assert gap(model, played, "right") < 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, top_p=0.9, top_k=9)])
async def test_memory_of_the_cache_grows(sampling: Sampling, recorders: list[Any]) -> None:
    async def workload(engine: Engine) -> list[Generated]:
        turns = []
        for count, length in ((1, 5), (3, 240), (6, 250), (7, 600)):
            slots = [engine.open(number, number) for number in range(count)]
            made = (
                engine.generate(slot, [1 + slot.rank] * (length + slot.rank), max_new_tokens=30, sampling=sampling)
                for slot in slots
            )
            turns += await asyncio.gather(*made)
            for slot in slots:
                await engine.close_slot(slot)
        return turns

    await compare(long_model(), workload, max_context=1000, stop_ids=[])
    assert recorders[0].discarded >= 3


@pytest.mark.parametrize("kind", ["llama", "gptj"])
async def test_few_sessions_in_the_last_rows_leave_the_other_rows_unchanged(kind: str, recorders: list[Any]) -> None:
    """The last three of sixteen rows are copied to four lines, the first three are read in place."""

    async def workload(engine: Engine) -> list[Generated]:
        slots = [engine.open(number, number) for number in range(16)]
        played[:] = [Played([1, 2, 3, number]) for number in range(16)]
        turns = []
        for numbers in (range(16), (0, 1, 2), (12, 13, 15), (14, 12, 13), (15, 13), (15, 1), range(16)):
            made = await asyncio.gather(
                *(engine.generate(slots[at], played[at].context, max_new_tokens=5, sampling=PLAIN) for at in numbers)
            )
            for number, turn in zip(numbers, made, strict=True):
                played[number].turns.append((len(played[number].context), turn))
                played[number].context += turn.token_ids
            turns += made
        assert gap(model, played, "right") < 1e-4
        return turns

    model, played = tiny_model(kind), list[Played]()
    await compare(model, workload, max_slots=16, stop_ids=[])
    assert recorders[0].recorded >= 4


async def test_constraints_values_and_published_weights(recorders: list[Any]) -> None:
    head = nn.Linear(32, 1).to(DEVICE)
    counts = []

    async def workload(engine: Engine) -> list[Generated]:
        turns, slots = [], [engine.open(number, number) for number in range(5)]
        for version in range(3):
            made = (
                engine.generate(
                    slot,
                    [1, 2, 3, slot.rank],
                    max_new_tokens=9,
                    sampling=Sampling(temperature=0.8),
                    constraint=Pattern(ANY, [5, 6, 7], [4], *[ANY] * slot.rank) if slot.rank % 2 else None,
                )
                for slot in slots
            )
            turns += await asyncio.gather(*made)
            counts.append([recorder.recorded for recorder in recorders])
            await engine.publish(tiny_model(seed=version + 1).state_dict(), version + 1)
        return turns

    turns = await compare(tiny_model(), workload, value_head=head, stop_ids=[])
    assert {turn.policy_version for turn in turns} == {0, 1, 2}
    assert counts[-1] == counts[-3]  # published weights are copied to the same addresses


@pytest.mark.parametrize("has_graphs", [False, True])
async def test_lockstep_results_do_not_depend_on_earlier_batches(
    has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes of a step must not depend on memory and graphs that earlier steps left.

    They decide the last bits on some devices only, so they are compared as well.
    """
    shapes: list[Any] = []
    run, compute = DecodingGraphs.run, RowModel._compute

    def spied_run(self: DecodingGraphs, shape: DecodingShape, inputs: Any) -> Any:
        shapes.append(shape)
        return run(self, shape, inputs)

    def spied_compute(self: RowModel, chunk: Any) -> Any:
        if not has_graphs or not isinstance(chunk, DecodingChunk):  # otherwise, it may be captured or not
            shapes.append((chunk.length, *chunk.inputs["input_ids"].shape))
        return compute(self, chunk)

    monkeypatch.setattr(DecodingGraphs, "run", spied_run)
    monkeypatch.setattr(RowModel, "_compute", spied_compute)

    async def batch(engine: Engine, sizes: Sequence[int]) -> tuple[list[Generated], list[Any]]:
        shapes.clear()
        slots = [engine.open(number, number) for number in range(len(sizes))]
        made = (
            engine.generate(slot, [1, *[2 + slot.rank] * size], max_new_tokens=20 + slot.rank, sampling=PLAIN)
            for slot, size in zip(slots, sizes, strict=True)
        )
        turns = await asyncio.gather(*made)
        for slot in slots:
            await engine.close_slot(slot)
        return turns, list(shapes)

    options: dict[str, Any] = {"lockstep": True, "cuda_graphs": has_graphs, "max_context": 700, "stop_ids": []}
    for last in ([3, 90, 40], [250, 2, 3, 4, 5]):
        async with running(long_model(), **options) as engine:
            alone = await batch(engine, last)
        async with running(long_model(), **options) as engine:
            await batch(engine, [400, 5, 6, 7, 8, 9, 10])
            await batch(engine, [600])
            assert await batch(engine, last) == alone
            assert engine.has_graphs is has_graphs


async def test_least_recently_used_graphs_are_discarded(monkeypatch: pytest.MonkeyPatch, recorders: list[Any]) -> None:
    monkeypatch.setattr(graphs, "GRAPHS", 2)

    async def workload(engine: Engine) -> list[Generated]:
        turns, slots = [], [engine.open(number, number) for number in range(8)]
        for count in (8, 1, 2, 4) * 3:
            made = (engine.generate(slot, [slot.rank, 1], max_new_tokens=4, sampling=PLAIN) for slot in slots[:count])
            turns += await asyncio.gather(*made)
            assert engine._model._graphs is None or len(engine._model._graphs._replays) <= 2
        return turns

    await compare(tiny_model(), workload, stop_ids=[])
    assert recorders[0].recorded >= 12


async def test_insufficient_memory_frees_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"max_new_tokens": 4, "sampling": GREEDY}
    async with running(long_model(), stop_ids=[], max_context=1000, cuda_graphs=True) as engine:
        layers, slot = engine._model.slots._layers, engine.open("a", 0)
        before = await engine.generate(slot, [1], **short)

        def no_memory(_: tuple[int, int]) -> None:
            raise MemoryError("cannot allocate")

        with monkeypatch.context() as patch:
            patch.setattr(layers[0], "grow", no_memory)
            with pytest.raises(PolicyError, match="cannot allocate"):
                await engine.generate(slot, [3] * 400, **short)
            assert await engine.generate(slot, [1], **short) == before  # a prompt of one token
        assert len((await engine.generate(slot, [3] * 400, **short)).token_ids) == 4
        assert engine.has_graphs


@pytest.mark.parametrize(
    ("rows", "end", "expected"),
    [
        ([0], 1, (1, 256, True)),
        ([0, 1, 2], 256, (4, 256, True)),
        ([2], 257, (1, 384, False)),
        ([5, 1], 385, (2, 512, False)),
        ([3, 1], 600, (4, 768, True)),
        (range(5), 769, (6, 1000, True)),  # at most six rows of 1000 positions
        ([5, 4, 0], 999, (6, 1000, True)),
    ],
)
def test_shapes_are_rounded_up(rows: Sequence[int], end: int, expected: tuple[int, int, bool]) -> None:
    assert DecodingShape.covering(np.array(rows), end, 6, 1000)[:3] == expected


class FailingRecorder:
    """A recorder whose n-th recording fails."""

    def __init__(self, at: int) -> None:
        self._inner, self._at = RECORDER(DEVICE), at

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        if self._inner.recorded + 1 == self._at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self._inner.record(step)

    def discard(self) -> None:
        self._inner.discard()


class FrozenRecorder:
    """A recorder whose replays do nothing, so the results remain those of the first step."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    def discard(self) -> None:
        pass


def reads_a_number(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    assert inputs[0].max().item() < VOCABULARY


def reads_a_truth_value(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    assert inputs[0].max() < VOCABULARY


def writes_under_a_mask(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    inputs[0][inputs[0] < 0] = inputs[0][0, :0]


def counts_elements(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    torch.where(inputs[0] < 0)


def reads_a_mask(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    assert inputs[0][inputs[0] >= VOCABULARY].shape == (0,)


def adds_an_array(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0] + torch.from_numpy(np.zeros(1, dtype=np.int64)).to(inputs[0].device),)


WAITS = "the model's code waits for the device in aten"
COPIES = "the model's code copies between devices in aten"
INVALID = "the model's code reads memory that will not be valid in a replay"


@pytest.mark.parametrize(
    ("make", "hook", "reason"),
    [
        (None, None, f"there are no graphs on a device of type {DEVICE.type}"),
        (lambda _: FailingRecorder(1), None, "operation not permitted when stream is capturing"),
        (lambda _: FailingRecorder(4), None, "operation not permitted when stream is capturing"),
        (lambda _: FrozenRecorder(), None, "their last hidden states differ by"),
        (lambda _: 1 / 0, None, "ZeroDivisionError"),
        (RECORDER, reads_a_number, WAITS),
        (RECORDER, reads_a_truth_value, WAITS),
        (RECORDER, reads_a_mask, WAITS),
        (RECORDER, writes_under_a_mask, WAITS),
        (RECORDER, counts_elements, WAITS),
        (RECORDER, adds_an_array, INVALID if DEVICE.type == "cpu" else COPIES),
    ],
)
async def test_decoding_continues_without_graphs(
    make: Any, hook: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def turns(engine: Engine) -> list[Generated]:
        episodes = await asyncio.gather(*(play(engine, number) for number in range(6)))
        return [turn for played in episodes for _, turn in played.turns]

    async with running(tiny_model()) as engine:
        expected = await turns(engine)
    if make is None:
        monkeypatch.delitem(RECORDERS, DEVICE.type)
    else:
        monkeypatch.setitem(RECORDERS, DEVICE.type, make)
    model = tiny_model()
    if hook is not None:
        model.get_input_embeddings().register_forward_pre_hook(hook)
    async with running(model, cuda_graphs=True) as engine:
        assert_equal(expected, await turns(engine))
        assert not engine.has_graphs
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("cuda_graphs: decoding continues without graphs: ")
    assert reason in message


async def test_model_that_indexes_with_host_data_is_sampled_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("falcon")
    async with running(copy.deepcopy(model), cuda_graphs=True) as engine:
        episodes = await asyncio.gather(*(play(engine, number) for number in range(8)))
        assert not engine.has_graphs
    assert gap(model, episodes, "right") < 1e-4
    assert INVALID in caplog.text


async def test_contexts_too_short_for_a_trial_are_sampled_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    async with running(tiny_model(), cuda_graphs=True, max_context=2) as engine:
        assert not engine.has_graphs
        assert len((await engine.generate(engine.open("a", 0), [1], max_new_tokens=1, sampling=GREEDY)).token_ids) == 1
    assert "contexts of 2 tokens are too short" in caplog.text


async def test_shortest_possible_contexts_and_a_single_row() -> None:
    async def workload(engine: Engine) -> list[Generated]:
        return [await engine.generate(engine.open(0, 0), [1], max_new_tokens=2, sampling=PLAIN)]

    await compare(tiny_model(), workload, max_context=3, max_slots=1, stop_ids=[])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the graphs of the other tests are CUDA's")
def test_cuda_graphs_are_captured_after_a_run_in_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drive `torch.cuda.graph` without a GPU, as far as the calls into CUDA."""
    events: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device | None = None) -> None:
            self.device = device

        def wait_stream(self, other: Stream) -> None:
            events.append(("waits", self is current, other is current))

    class CUDAGraph:
        def capture_begin(self, pool: int, *, capture_error_mode: str, **_: Any) -> None:
            events.append(("begin", pool, capture_error_mode))

        def capture_end(self) -> None:
            events.append("end")

        def replay(self) -> None:
            events.append("replay")

    @contextmanager
    def entered(what: Any) -> Iterator[None]:
        events.append(("enter", what))
        yield
        events.append(("leave", what))

    current, pools = Stream(), iter(range(9))
    fakes = {"Stream": Stream, "CUDAGraph": CUDAGraph, "stream": entered, "device": entered}
    fakes |= {"current_stream": lambda: current, "graph_pool_handle": lambda: next(pools)}
    for name, fake in {**fakes, "synchronize": lambda: None, "empty_cache": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    device = torch.device("cuda:1")
    recorder = CudaRecorder(device)
    own = recorder._stream
    replay = recorder.record(lambda: events.append("step"))
    assert own.device == device
    assert events == [
        *[("enter", device), ("waits", False, True), ("enter", own), "step", ("leave", own), ("waits", True, False)],
        *[("enter", own), ("begin", 0, "thread_local"), "step", "end", ("leave", own), ("leave", device)],
    ]
    replay()
    assert events[-1] == "replay"
    recorder.discard()
    recorder.record(lambda: None)
    assert ("begin", 1, "thread_local") in events
