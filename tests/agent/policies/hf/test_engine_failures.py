"""Test that engine failures stay in the affected turns and leave no caller waiting."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from reward_kit.agent.policies.hf.constraints import Choices, ChoiceTrie
from reward_kit.agent.policies.hf.engine import Engine
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.errors import ConfigError, PolicyError
from tests.agent.policies.hf.test_engine import GREEDY, running
from tests.agent.policies.hf.tiny_models import masked_window_model, tiny_model
from tests.devices import DEVICE

pytestmark = pytest.mark.device

LONG = {"max_new_tokens": 100, "sampling": Sampling()}


class Gate:
    """Blocks a model's forward passes in the worker thread until released, and signals the first."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.is_open = threading.Event()
        self.reached = asyncio.Event()
        self._loop, self.passes = asyncio.get_running_loop(), 0
        self._hook = model.get_input_embeddings().register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.passes += 1
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self.is_open.wait(20)


async def test_cancelled_turn_frees_its_slot_and_other_turns_continue() -> None:
    model = tiny_model()
    async with running(copy.deepcopy(model), stop_ids=[]) as engine:
        alone = await engine.generate(engine.open("b", 2), [4, 5], **LONG)
    async with running(model, stop_ids=[], max_slots=2) as engine:
        gate = Gate(model)
        slot = engine.open("a", 1)
        cancelled = asyncio.create_task(engine.generate(slot, [1, 2, 3], **LONG))
        other = asyncio.create_task(engine.generate(engine.open("b", 2), [4, 5], **LONG))
        third = asyncio.create_task(engine.generate(engine.open("c", 3), [6], **LONG))  # waits for a place
        await gate.reached.wait()
        cancelled.cancel()
        gate.is_open.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await other).token_ids == alone.token_ids
        assert len((await third).token_ids) == 100
        assert gate.passes < 150  # the third was begun when the cancelled one's place was free
        assert len((await engine.generate(slot, [1, 2, 3], **LONG)).token_ids) == 100


@pytest.mark.parametrize("lockstep", [False, True])
async def test_closing_a_session_ends_its_turn(lockstep: bool) -> None:
    model = tiny_model()
    async with running(model, stop_ids=[], lockstep=lockstep) as engine:
        gate = Gate(model)
        slots = [engine.open(number, number) for number in range(2)]
        turns = [asyncio.create_task(engine.generate(slot, [1, 2], **LONG)) for slot in slots]
        await gate.reached.wait()
        await engine.close_slot(slots[0])
        gate.is_open.set()
        with pytest.raises(PolicyError, match="the session of 0 was closed during this turn"):
            await turns[0]
        assert len((await turns[1]).token_ids) == 100
        with pytest.raises(PolicyError, match="the session of 0 is closed"):
            await engine.generate(slots[0], [1], **LONG)


async def test_lockstep_does_not_wait_for_closed_sessions() -> None:
    async with running(tiny_model(), lockstep=True) as engine:
        first, second = engine.open(0, 0), engine.open(1, 1)
        turn = asyncio.create_task(engine.generate(first, [1, 2], **LONG))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not turn.done()
        await engine.close_slot(second)
        assert (await turn).token_ids


async def test_failed_forward_pass_fails_only_the_turns_in_its_batch() -> None:
    model = tiny_model()
    async with running(model, stop_ids=[]) as engine:
        slots = [engine.open(number, number) for number in range(3)]
        before = await engine.generate(slots[0], [1, 2, 3], max_new_tokens=4, sampling=GREEDY)

        def break_down(*_: Any) -> None:
            raise RuntimeError("out of memory, say")

        hook = model.get_input_embeddings().register_forward_pre_hook(break_down)
        turns = (engine.generate(slot, [1, 2, 3], **LONG) for slot in slots)
        errors = await asyncio.gather(*turns, return_exceptions=True)
        assert [type(error) for error in errors] == [PolicyError] * 3
        assert all("RuntimeError: out of memory, say" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 3
        hook.remove()
        assert await engine.generate(slots[0], [1, 2, 3], max_new_tokens=4, sampling=GREEDY) == before


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
async def test_nan_logits_raise_an_error(sampling: Sampling) -> None:
    model = tiny_model()
    async with running(model) as engine:
        weights = {name: torch.full_like(weight, torch.nan) for name, weight in model.state_dict().items()}
        await engine.publish(weights, 1)
        for number, constraint in enumerate((None, Choices(ChoiceTrie({"a": [5, 6], "b": [7, 8]}, 2)))):
            options: dict[str, Any] = {"max_new_tokens": 4, "sampling": sampling, "constraint": constraint}
            with pytest.raises(PolicyError, match="logits are not finite"):
                await engine.generate(engine.open(number, 0), [1, 2], **options)


async def test_contexts_are_finite_again_after_finite_weights() -> None:
    model = tiny_model()
    good = {name: weight.clone() for name, weight in model.state_dict().items()}
    async with running(model, stop_ids=[]) as engine:
        slot = engine.open("a", 0)
        before = await engine.generate(slot, [1, 2, 3], max_new_tokens=4, sampling=GREEDY)
        await engine.publish({name: torch.full_like(weight, torch.nan) for name, weight in good.items()}, 1)
        with pytest.raises(PolicyError, match="logits are not finite"):
            await engine.generate(slot, [*range(1, 20)], max_new_tokens=4, sampling=GREEDY)
        await engine.publish(good, 2)
        after = await engine.generate(slot, [1, 2, 3], max_new_tokens=4, sampling=GREEDY)
    assert after == before._replace(policy_version=2)


async def test_closing_the_engine_ends_every_waiting_call() -> None:
    model = tiny_model()
    engine = Engine(model, stop_ids=[], max_context=160, max_slots=1)
    gate = Gate(model)
    turns = [asyncio.create_task(engine.generate(engine.open(n, n), [1, 2], **LONG)) for n in range(3)]
    await gate.reached.wait()
    publishing = asyncio.create_task(engine.publish(model.state_dict(), 1))
    await asyncio.sleep(0)
    gate.is_open.set()
    await engine.close()
    results = await asyncio.gather(*turns, publishing, return_exceptions=True)
    assert [type(result) for result in results] == [PolicyError] * 4
    await engine.close()
    for call in (lambda: engine.open("x", 0), lambda: engine.publish({}, 2)):
        with pytest.raises(PolicyError, match="the engine is closed"):
            await call()


async def test_cancelled_publication_does_not_change_the_weights() -> None:
    model = tiny_model()
    async with running(model, stop_ids=[]) as engine:
        gate = Gate(model)
        turn = asyncio.create_task(engine.generate(engine.open("a", 0), [1, 2], **LONG))
        await gate.reached.wait()
        publishing = asyncio.create_task(engine.publish(tiny_model(seed=1).state_dict(), 1))
        await asyncio.sleep(0)
        publishing.cancel()
        gate.is_open.set()
        await turn
        assert (await engine.generate(engine.open("b", 0), [1, 2], **LONG)).policy_version == 0


async def test_unorderable_lockstep_ranks_raise_an_error() -> None:
    async with running(tiny_model(), lockstep=True) as engine:
        slots = [engine.open("a", 0), engine.open(1, 0)]
        turns = (engine.generate(slot, [1, 2], **LONG) for slot in slots)
        errors = await asyncio.gather(*turns, return_exceptions=True)
    assert [type(error) for error in errors] == [PolicyError] * 2


async def test_second_concurrent_turn_of_a_session_is_rejected() -> None:
    async with running(tiny_model()) as engine:
        slot = engine.open("a", 0)
        turn = asyncio.create_task(engine.generate(slot, [1, 2], **LONG))
        await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="the session of 'a' is already sampling a turn"):
            await engine.generate(slot, [1, 2], **LONG)
        assert (await turn).token_ids


def test_engine_can_serve_consecutive_event_loops() -> None:
    async def once() -> list[int]:
        slot = engine.open("a", 0)
        turn = await engine.generate(slot, [1, 2], max_new_tokens=5, sampling=GREEDY)
        await engine.close_slot(slot)
        return turn.token_ids

    engine = Engine(tiny_model(), stop_ids=[], max_context=20)
    assert asyncio.run(once()) == asyncio.run(once())
    asyncio.run(engine.close())


def test_model_without_key_value_cache_is_rejected() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, eos_token_id=None, bos_token_id=None)
    with pytest.raises(ConfigError, match="MambaForCausalLM does not produce the same results with a cache in rows"):
        Engine(MambaForCausalLM(config), stop_ids=[], max_context=20)


def test_sliding_window_below_max_context_is_rejected_with_the_fix() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        eos_token_id=None,
    )
    with pytest.raises(ConfigError, match="set max_context to 16"):
        Engine(Gemma2ForCausalLM(config), stop_ids=[], max_context=20)


@pytest.mark.skipif(DEVICE.type == "standin", reason="the stand-in device has no experts")
def test_sliding_window_that_only_the_mask_contains_is_not_packed() -> None:
    with pytest.raises(ConfigError, match="set max_context to 8"):
        Engine(masked_window_model(), stop_ids=[], max_context=20)
    engine = Engine(masked_window_model(), stop_ids=[], max_context=8)
    assert engine._model.is_packed


async def test_cache_memory_grows_with_use_not_with_the_limits() -> None:
    model = tiny_model()
    model.config.max_position_embeddings = 10**6
    async with running(model, stop_ids=[], max_context=10**6, max_slots=500) as engine:
        slots = [engine.open(number, number) for number in range(3)]
        await asyncio.gather(*(engine.generate(slot, [1, 2], **LONG) for slot in slots))
        await engine.generate(slots[0], [3] * 400, **LONG)
        for store in engine._model.slots._layers[0].stores or ():
            assert store.shape[0] <= 4 and 500 <= store.shape[1] <= 1000


async def test_out_of_memory_frees_the_cache_and_shorter_turns_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.config.max_position_embeddings = 1000
    short = {"max_new_tokens": 4, "sampling": GREEDY}
    async with running(model, stop_ids=[], max_context=1000) as engine:
        layers, slot = engine._model.slots._layers, engine.open("a", 0)
        before = await engine.generate(slot, [1, 2, 3], **short)

        def no_memory(_: tuple[int, int]) -> None:
            raise MemoryError("cannot allocate")

        with monkeypatch.context() as patch:
            patch.setattr(layers[0], "grow", no_memory)
            with pytest.raises(PolicyError, match="cannot allocate"):
                await engine.generate(slot, [3] * 400, **LONG)
            assert all(layer.stores is None for layer in layers)
            assert await engine.generate(slot, [1, 2, 3], **short) == before
        assert len((await engine.generate(slot, [3] * 400, **LONG)).token_ids) == 100
