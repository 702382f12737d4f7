"""Test that the engine records what the model computes: turns, groups, ragged batches and new weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from reward_kit.agent.policies.hf.engine import Engine, Generated
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.errors import ConfigError, LimitError, PolicyError
from tests.agent.policies.hf.tiny_models import VOCABULARY, full_logits, tiny_model
from tests.devices import DEVICE

pytestmark = pytest.mark.device

STOP = VOCABULARY - 1
GREEDY, PLAIN = Sampling(temperature=0), Sampling()


@asynccontextmanager
async def running(model: PreTrainedModel, **options: Any) -> AsyncIterator[Engine]:
    engine = Engine(model, **{"stop_ids": [STOP], "max_context": 160, "max_slots": 8, **options})
    try:
        yield engine
    finally:
        await engine.close()


@dataclass
class Played:
    """An episode: its final context, and each turn with the length of its prompt."""

    context: list[int] = field(default_factory=list)
    turns: list[tuple[int, Generated]] = field(default_factory=list)


async def play(
    engine: Engine, number: int, *, group: int = 4, turns: int = 4, sampling: Sampling = PLAIN, pauses: int = 0
) -> Played:
    """Play an episode of a group with a shared prompt; observations differ in content and length."""
    played = Played(np.random.default_rng(number // group).integers(1, STOP, 40).tolist())
    rng = np.random.default_rng(1000 + number)
    slot = engine.open((number,), number)
    for _ in range(turns):
        prompt = list(played.context)
        turn = await engine.generate(slot, prompt, max_new_tokens=1 + number % 7, sampling=sampling)
        played.turns.append((len(prompt), turn))
        played.context += turn.token_ids + rng.integers(1, STOP, rng.integers(1, 9)).tolist()
        for _ in range(rng.integers(pauses + 1)):
            await asyncio.sleep(0)
    await engine.close_slot(slot)
    return played


def gap(model: PreTrainedModel, episodes: Sequence[Played], side: str, sampling: Sampling = PLAIN) -> float:
    """Return the largest difference of recorded log-probabilities from a full forward pass."""
    logits = full_logits(model, [played.context for played in episodes], side)
    gaps = [
        abs(float((logits_TV[start + index - 1] / sampling.temperature).log_softmax(-1)[token]) - logprob)
        for played, logits_TV in zip(episodes, logits, strict=True)
        for start, turn in played.turns
        for index, (token, logprob) in enumerate(zip(turn.token_ids, turn.logprobs, strict=True))
    ]
    assert len(gaps) > 100
    return max(gaps)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "falcon", "gptj"])
async def test_recorded_logprobs_equal_a_full_forward_pass(kind: str) -> None:
    model, sampling = tiny_model(kind), Sampling(temperature=0.7)
    async with running(copy.deepcopy(model)) as engine:
        # More sessions than rows: some recompute their contexts.
        episodes = await asyncio.gather(*(play(engine, number, sampling=sampling, pauses=9) for number in range(12)))
    for side in ("left", "right"):
        assert gap(model, episodes, side, sampling) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
async def test_greedy_turns_equal_transformers_generate(kind: str) -> None:
    model = tiny_model(kind)
    async with running(copy.deepcopy(model)) as engine:
        episodes = await asyncio.gather(*(play(engine, number, sampling=GREEDY) for number in range(8)))
    for number, played in enumerate(episodes):
        for start, turn in played.turns:
            prompt = torch.tensor([played.context[:start]])
            expected = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=1 + number % 7,
                eos_token_id=STOP,
                pad_token_id=0,
            )
            assert turn.token_ids == expected[0, start:].tolist()
            assert turn.logprobs == [0.0] * len(turn.token_ids)


async def test_turn_ends_at_a_stop_token_or_its_limit() -> None:
    async with running(tiny_model(), stop_ids=range(0, VOCABULARY, 4)) as engine:
        slot = engine.open("a", 0)
        turns = [
            await engine.generate(slot, [1, 2, 3], max_new_tokens=5, sampling=Sampling(temperature=3.0))
            for _ in range(20)
        ]
    assert {turn.finish_reason for turn in turns} == {"stop", "length"}
    for turn in turns:
        assert all(token % 4 for token in turn.token_ids[:-1])
        assert (turn.token_ids[-1] % 4 == 0) == (turn.finish_reason == "stop")
        assert turn.finish_reason == "stop" or len(turn.token_ids) == 5


class Counting:
    """A count of the tokens and forward passes of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = self.passes = 0
        model.get_input_embeddings().register_forward_pre_hook(self._see)

    def _see(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self.tokens += inputs[0].numel()
        self.passes += 1

    def reset(self) -> None:
        self.tokens = self.passes = 0


async def test_turn_computes_only_new_tokens() -> None:
    model = tiny_model()
    async with running(model) as engine:
        counting, slot, context = Counting(model), engine.open("a", 0), list(range(1, 31))
        turn = await engine.generate(slot, context, max_new_tokens=4, sampling=GREEDY)
        assert (counting.tokens, counting.passes) == (30 + 3, 4)
        counting.reset()
        await engine.generate(slot, [*context, *turn.token_ids, 7, 8], max_new_tokens=1, sampling=GREEDY)
        assert (counting.tokens, counting.passes) == (1 + 2, 1)  # the last sampled token and two new ones
        counting.reset()
        await engine.generate(slot, [*context[:10], 9], max_new_tokens=1, sampling=GREEDY)  # rewritten from there on
        assert counting.tokens == 1


async def test_shared_prefix_of_a_group_is_computed_once() -> None:
    model = tiny_model()
    async with running(model) as engine:
        counting, slots = Counting(model), [engine.open(number, number) for number in range(8)]
        prompts = [[*range(1, 41), *([number] * (number % 3))] for number in range(8)]
        turns = [
            engine.generate(slot, prompt, max_new_tokens=2, sampling=Sampling())
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
        await asyncio.gather(*turns)
        # 39 or 40 shared ones, what each adds, and the first of the two sampled ones.
        assert counting.tokens <= 40 + 8 * 1 + sum(number % 3 for number in range(8)) + 8
        assert counting.passes == 3
        counting.reset()
        late = engine.open(9, 9)
        await engine.close_slot(slots[0])
        await engine.generate(late, prompts[0], max_new_tokens=1, sampling=Sampling())
        assert counting.tokens == 1


async def test_long_prompts_are_computed_in_chunks() -> None:
    model = tiny_model()
    async with running(copy.deepcopy(model), tokens_per_forward=16) as engine:
        episodes = await asyncio.gather(*(play(engine, number, group=2, pauses=3) for number in range(8)))
    assert gap(model, episodes, "right") < 1e-4


async def dataset_rows(numbers: Sequence[int], **options: Any) -> dict[int, list[list[int]]]:
    async with running(tiny_model(), **options) as engine:
        episodes = await asyncio.gather(*(play(engine, number, pauses=5) for number in numbers))
    return {
        number: [turn.token_ids for _, turn in played.turns] for number, played in zip(numbers, episodes, strict=True)
    }


async def test_samples_of_a_session_do_not_depend_on_other_sessions() -> None:
    together = await dataset_rows(range(12))
    for number in (3, 6):
        assert (await dataset_rows([number]))[number] == together[number]
    assert (await dataset_rows(range(12), max_slots=3, lockstep=True)) == together


@pytest.mark.parametrize("slots", [8, 3])
async def test_lockstep_is_bitwise_reproducible(slots: int) -> None:
    async def once(order: Sequence[int]) -> list[list[Generated]]:
        async with running(tiny_model(), lockstep=True, max_slots=slots) as engine:
            gate = asyncio.Event()
            opened = [0]

            async def one(number: int) -> Played:
                opened[0] += 1
                if opened[0] == len(order):
                    gate.set()
                await gate.wait()
                return await play(engine, number, pauses=number % 5)

            episodes = await asyncio.gather(*(one(number) for number in order))
        by_number = dict(zip(order, episodes, strict=True))
        return [[turn for _, turn in by_number[number].turns] for number in sorted(order)]

    first = await once(range(8))
    assert await once(range(8)) == first
    assert await once([5, 2, 7, 0, 1, 6, 3, 4]) == first


async def test_lockstep_does_not_reuse_earlier_computation() -> None:
    """Shapes decide the last bits on some CPUs, so a batch may not reuse earlier sessions' results."""
    model = tiny_model()
    async with running(model, lockstep=True) as engine:
        counting, computed = Counting(model), []
        for _ in range(2):
            await asyncio.gather(*(play(engine, number) for number in range(4)))
            computed.append((counting.tokens, counting.passes))
            counting.reset()
    assert computed[1] == computed[0]


async def test_published_weights_apply_from_the_next_turn_without_old_cache() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    async with running(copy.deepcopy(old)) as engine:
        slot, context = engine.open("a", 0), list(range(1, 20))
        first = await engine.generate(slot, context, max_new_tokens=12, sampling=Sampling())
        await engine.publish(new.state_dict(), 7)
        again = context + first.token_ids
        second = await engine.generate(slot, again, max_new_tokens=12, sampling=Sampling())
    assert (first.policy_version, second.policy_version) == (0, 7)
    for model, start, turn in ((old, 19, first), (new, len(again), second)):
        logits = full_logits(model, [again[:start] + turn.token_ids], "right")[0]
        expected = logits.log_softmax(-1)[torch.arange(start - 1, start + 11), turn.token_ids]
        torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)


async def test_running_turn_finishes_with_its_own_weights() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    acting = copy.deepcopy(old)
    async with running(acting) as engine:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        acting.get_input_embeddings().register_forward_pre_hook(
            lambda *_: loop.call_soon_threadsafe(begun.set) and None
        )
        turn = asyncio.create_task(
            engine.generate(engine.open("a", 0), [1, 2, 3], max_new_tokens=100, sampling=Sampling())
        )
        await begun.wait()
        publishing = asyncio.create_task(engine.publish(new.state_dict(), 1))
        await asyncio.sleep(0)
        later = engine.generate(engine.open("b", 0), [1, 2, 3], max_new_tokens=100, sampling=Sampling())
        first, _, second = await asyncio.gather(turn, publishing, later)
    for model, version, generated in ((old, 0, first), (new, 1, second)):
        assert generated.policy_version == version
        count = len(generated.token_ids)
        logits = full_logits(model, [[1, 2, 3, *generated.token_ids]], "right")[0]
        expected = logits.log_softmax(-1)[torch.arange(2, 2 + count), generated.token_ids]
        torch.testing.assert_close(torch.tensor(generated.logprobs), expected, atol=1e-4, rtol=0)


async def test_mismatched_weights_are_rejected_and_change_nothing() -> None:
    weights = tiny_model(seed=1).state_dict()
    async with running(tiny_model()) as engine:
        slot = engine.open("a", 0)
        before = await engine.generate(slot, [1, 2, 3], max_new_tokens=4, sampling=GREEDY)
        cut = {name: weight for name, weight in weights.items() if "norm" not in name}
        for bad, reason in ((weights | {"more": weights["lm_head.weight"]}, "unknown more"), (cut, "missing .*norm")):
            with pytest.raises(PolicyError, match=reason):
                await engine.publish(bad, 1)
        with pytest.raises(PolicyError, match="has the shape \\(3,\\), expected \\(64, 32\\)"):
            await engine.publish(weights | {"lm_head.weight": torch.zeros(3)}, 1)
        assert await engine.generate(slot, [1, 2, 3], max_new_tokens=4, sampling=GREEDY) == before


async def test_value_is_computed_at_the_last_prompt_token() -> None:
    model, head = tiny_model(), nn.Linear(32, 1).to(DEVICE)
    async with running(copy.deepcopy(model), value_head=head) as engine:
        episodes = await asyncio.gather(*(play(engine, number) for number in range(6)))
    for played in episodes:
        with torch.no_grad():
            hidden = model(torch.tensor([played.context]), output_hidden_states=True).hidden_states[-1][0]
            for start, turn in played.turns:
                assert turn.value == pytest.approx(float(head(hidden[start - 1])), abs=1e-5)


async def test_engine_leaves_the_model_unchanged() -> None:
    model, ids = tiny_model(), torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    async with running(model) as engine:
        assert torch.equal(model(ids).logits, expected)
        await engine.generate(engine.open("a", 0), [1], max_new_tokens=1, sampling=GREEDY)
    assert torch.equal(model(ids).logits, expected)
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_output_embeddings()._forward_pre_hooks


async def test_context_overflow_raises_a_limit_error() -> None:
    async with running(tiny_model(), max_context=10) as engine:
        slot = engine.open("a", 0)
        with pytest.raises(LimitError, match="7 prompt tokens and 4 new tokens do not fit into a context of 10"):
            await engine.generate(slot, [1] * 7, max_new_tokens=4, sampling=GREEDY)
        assert len((await engine.generate(slot, [1] * 6, max_new_tokens=4, sampling=GREEDY)).token_ids) == 4


@pytest.mark.parametrize(
    ("prompt", "count", "reason"),
    [
        ([], 1, "must be at least 1 token"),
        ([1], 0, "must be at least 1 token"),
        ([64], 1, "outside"),
        ([-1], 1, "outside"),
    ],
)
async def test_invalid_prompt_is_rejected(prompt: list[int], count: int, reason: str) -> None:
    async with running(tiny_model()) as engine:
        with pytest.raises(PolicyError, match=reason):
            await engine.generate(engine.open("a", 0), prompt, max_new_tokens=count, sampling=GREEDY)


def test_context_beyond_the_model_positions_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_context: 257 exceeds the 256 positions of GPT2LMHeadModel"):
        Engine(tiny_model("gpt2"), stop_ids=[], max_context=257)


@pytest.mark.parametrize("options", [{"max_context": 0}, {"max_slots": 0}])
def test_invalid_sizes_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be at least 1, got 0"):
        Engine(tiny_model(), **{"stop_ids": [], "max_context": 9, **options})
