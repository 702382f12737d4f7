"""Test constrained turns: recorded masks, forced tokens, and constraints that fail."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from reward_kit.agent.policies.hf.engine import Engine, Generated
from reward_kit.agent.policies.hf.sampling import Sampling
from reward_kit.errors import PolicyError
from tests.agent.policies.hf.test_engine import GREEDY, STOP, Counting, running
from tests.agent.policies.hf.tiny_models import full_logits, tiny_model
from tests.devices import DEVICE

pytestmark = pytest.mark.device

ANY = None


class Pattern:
    """A constraint that gives the allowed ids of each position; None allows any."""

    def __init__(self, *places: Sequence[int] | None) -> None:
        self._places, self._next = places, 0

    @property
    def is_done(self) -> bool:
        return self._next == len(self._places)

    def allowed(self) -> Sequence[int] | None:
        return self._places[self._next]

    def advance(self, token_id: int) -> None:
        place = self._places[self._next]
        assert place is None or token_id in place
        self._next += 1


def listed(turn: Generated) -> list[list[int] | None]:
    assert turn.allowed_ids is not None
    return [None if ids is None else ids.tolist() for ids in turn.allowed_ids]


async def test_allowed_ids_are_recorded_and_logprobs_are_renormalized() -> None:
    model, prompt = tiny_model(), [1, 2, 3, 4]
    places = [[5, 6, 7], ANY, [8, 9], [10], [11, 12, 13]]
    async with running(copy.deepcopy(model)) as engine:
        turns = await asyncio.gather(
            *(
                engine.generate(
                    engine.open(number, number),
                    [*prompt, number],
                    max_new_tokens=9,
                    sampling=Sampling(temperature=0.8),
                    constraint=Pattern(*places) if number % 2 else None,
                )
                for number in range(6)
            )
        )
    for number, turn in enumerate(turns):
        if number % 2 == 0:
            assert turn.allowed_ids is None
            continue
        count = len(turn.token_ids)
        assert listed(turn) == places[:count]
        assert turn.finish_reason == "stop"
        assert count == 5 or turn.token_ids[-1] == STOP
        logits_TV = full_logits(model, [[*prompt, number, *turn.token_ids]], "right")[0] / 0.8
        for index, (token, allowed) in enumerate(zip(turn.token_ids, turn.allowed_ids, strict=True)):
            logits_V = logits_TV[len(prompt) + index]
            chosen = logits_V if allowed is None else logits_V[list(allowed)]
            expected = float(logits_V[token] - chosen.logsumexp(-1))
            assert turn.logprobs[index] == pytest.approx(expected, abs=1e-4)


async def test_forced_tokens_cost_no_forward_pass() -> None:
    model = tiny_model()
    async with running(model) as engine:
        counting, slot = Counting(model), engine.open("a", 0)
        turn = await engine.generate(
            slot, [1, 2], max_new_tokens=9, sampling=Sampling(), constraint=Pattern([4], [5], [6])
        )
        assert (turn.token_ids, turn.logprobs, turn.finish_reason) == ([4, 5, 6], [0.0] * 3, "stop")
        assert counting.passes == 0
        pattern = Pattern([3], [4, 5], [6], [7], [8, 9], [10])
        turn = await engine.generate(slot, [1, 2], max_new_tokens=9, sampling=Sampling(), constraint=pattern)
        assert counting.passes == 2
        # The prompt and what is forced after it; then what was sampled and what is forced after that.
        assert counting.tokens == 3 + 3


async def test_value_is_recorded_if_every_token_is_forced() -> None:
    head = torch.nn.Linear(32, 1).to(DEVICE)
    async with running(tiny_model(), value_head=head) as engine:
        free = await engine.generate(engine.open("a", 0), [1, 2], max_new_tokens=1, sampling=GREEDY)
        turn = await engine.generate(
            engine.open("b", 0), [1, 2], max_new_tokens=9, sampling=GREEDY, constraint=Pattern([4], [5])
        )
    assert turn.token_ids == [4, 5]
    assert turn.value == pytest.approx(free.value, abs=1e-6)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_forced_tokens_respect_the_token_limit(limit: int) -> None:
    async with running(tiny_model()) as engine:
        turn = await engine.generate(
            engine.open("a", 0), [1], max_new_tokens=limit, sampling=GREEDY, constraint=Pattern([4, 5], [6], [7], [8])
        )
    assert (len(turn.token_ids), turn.finish_reason) == (limit, "length")
    assert listed(turn) == [[4, 5], [6], [7]][:limit]


async def test_forced_stop_token_ends_the_turn() -> None:
    async with running(tiny_model()) as engine:
        turn = await engine.generate(
            engine.open("a", 0), [1], max_new_tokens=9, sampling=GREEDY, constraint=Pattern([4], [STOP], [5])
        )
    assert (turn.token_ids, turn.finish_reason) == ([4, STOP], "stop")


class Broken(Pattern):
    """A constraint that raises after two tokens."""

    def advance(self, token_id: int) -> None:
        super().advance(token_id)
        if self._next == 2:
            raise ZeroDivisionError("a fault of its own")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Broken(ANY, ANY, ANY), "ZeroDivisionError: a fault of its own"),
        (Pattern(ANY, []), "allows no token but is not complete"),
        (Pattern([3, 64]), "outside the model's vocabulary of 64"),
        (Pattern([-1, 3]), "outside the model's vocabulary of 64"),
    ],
)
async def test_failing_constraint_fails_only_its_own_turn(constraint: Pattern, reason: str) -> None:
    async def one(engine: Engine, number: int) -> list[int]:
        under = constraint if number == 1 else None
        prompt = [*range(1, 20), number]
        slot = engine.open(number, number)
        turn = await engine.generate(slot, prompt, max_new_tokens=8, sampling=Sampling(), constraint=under)
        return turn.token_ids

    async with running(tiny_model(), stop_ids=[]) as engine:
        results = await asyncio.gather(*(one(engine, number) for number in range(3)), return_exceptions=True)
        assert isinstance(results[1], PolicyError)
        assert reason in str(results[1])
        assert [len(results[0]), len(results[2])] == [8, 8]


async def test_allowed_ids_may_be_an_array() -> None:
    async with running(tiny_model()) as engine:
        turn = await engine.generate(
            engine.open("a", 0), [1], max_new_tokens=2, sampling=GREEDY, constraint=Pattern(np.array([4, 5]), [6, 7])
        )
    assert listed(turn) == [[4, 5], [6, 7]]


async def test_equal_allowed_ids_share_one_array() -> None:
    ids = np.arange(2, 60)
    async with running(tiny_model()) as engine:
        turn = await engine.generate(
            engine.open("a", 0), [1], max_new_tokens=3, sampling=GREEDY, constraint=Pattern(ids, ids, ids)
        )
    assert turn.allowed_ids is not None
    assert {id(each) for each in turn.allowed_ids} == {id(ids)}


@pytest.mark.parametrize("last", [[8, 9], [8]])
async def test_constraint_completed_at_the_token_limit_counts_as_stop(last: list[int]) -> None:
    async with running(tiny_model()) as engine:
        turn = await engine.generate(
            engine.open("a", 0), [1], max_new_tokens=2, sampling=GREEDY, constraint=Pattern([4, 5], last)
        )
    assert (len(turn.token_ids), turn.finish_reason) == (2, "stop")
