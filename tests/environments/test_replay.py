"""Test forks by replay, and the report of the first difference."""

from __future__ import annotations

import itertools
import random

import pytest

from reward_kit.display_text import first_difference
from reward_kit.environments import ReplayForkResource, StepOutcome, tool_spec
from reward_kit.errors import EnvironmentFailure, ToolError

OPEN: list[Dice] = []
LIFETIMES = itertools.count()


class Dice(ReplayForkResource):
    """Throws dice; `flaky` makes the third throw of every later world differ."""

    def __init__(self) -> None:
        super().__init__()
        self.throws: list[int] = []
        OPEN.append(self)

    async def _setup(self, config) -> None:
        self.flaky = config.get("flaky", False)
        self.lifetime = next(LIFETIMES)

    async def _reset(self, seed) -> None:
        self.rng, self.throws = random.Random(seed), []

    def _reseed(self, seed) -> None:
        self.rng = random.Random(seed)

    async def _step(self, action_name, action_params) -> StepOutcome:
        if action_name != "throw":
            raise ToolError(f"unknown tool {action_name!r}")
        value = self.rng.randint(1, 6)
        if self.flaky and len(self.throws) == 2:
            value = 100 + self.lifetime
        self.throws.append(value)
        return StepOutcome({"throws": list(self.throws)}, reward=float(value))

    async def get_tools_spec(self):
        return [tool_spec("throw", "Throw.")]

    async def state_key(self) -> str:
        return str(self.throws)

    async def close(self) -> None:
        OPEN.remove(self)


async def made(**config) -> Dice:
    OPEN.clear()
    dice = Dice()
    await dice.setup(config)
    await dice.reset(4)
    return dice


async def test_fork_repeats_the_actions_and_continues_independently() -> None:
    dice = await made()
    for _ in range(3):
        await dice.step("throw", {})
    with pytest.raises(ToolError):
        await dice.step("roll", {})
    fork = await dice.fork()
    assert isinstance(fork, Dice)
    assert fork.throws == dice.throws
    await fork.step("throw", {})
    assert len(dice.throws) == 3
    assert (await dice.step("throw", {})).observation == {"throws": fork.throws}


async def test_fork_of_a_fork_has_the_whole_history() -> None:
    dice = await made()
    await dice.step("throw", {})
    fork = await dice.fork()
    await fork.step("throw", {})
    assert (await fork.fork()).throws == fork.throws


async def test_resource_reset_without_a_seed_can_be_forked() -> None:
    dice = await made()
    await dice.reset()
    await dice.step("throw", {})
    assert (await dice.fork()).throws == dice.throws


async def test_reseeded_noise_is_part_of_the_history() -> None:
    dice = await made()
    await dice.step("throw", {})
    await dice.reseed_noise(99)
    await dice.step("throw", {})
    assert (await dice.fork()).throws == dice.throws


async def test_checkpoint_is_restored_by_replay() -> None:
    dice = await made()
    await dice.step("throw", {})
    saved, before = await dice.checkpoint(), list(dice.throws)
    for _ in range(2):
        await dice.step("throw", {})
        await dice.restore(saved)
        assert dice.throws == before


async def test_history_is_isolated_from_returned_observations() -> None:
    dice = await made()
    outcome = await dice.step("throw", {})
    outcome.observation["throws"].append("changed by the caller")
    assert (await dice.fork()).throws == dice.throws


async def test_diverging_replay_reports_the_first_difference_and_closes_the_fork() -> None:
    dice = await made(flaky=True)
    for _ in range(4):
        await dice.step("throw", {})
    with pytest.raises(EnvironmentFailure, match=r"step 2 \(throw {}\): the observation differs at \.throws\[2\]"):
        await dice.fork()
    assert [dice] == OPEN


async def test_hidden_difference_is_detected_by_the_state_key() -> None:
    dice = await made()
    await dice.step("throw", {})
    dice.throws.append(6)
    with pytest.raises(EnvironmentFailure, match="after the replay: the state key differs"):
        await dice.fork()


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (1, 1, ""),
        (1, 2, ": 1 became 2"),
        (1, 1.0, ": 1 became 1.0"),
        (True, 1, ": True became 1"),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, " at .a[1].b: 2 became 3"),
        ({"a": 1}, {"b": 1}, ": {'a': 1} became {'b': 1}"),
        ([1], [1, 2], ": [1] became [1, 2]"),
        ((1, 2), [1, 2], ""),
    ],
)
def test_first_difference_is_named_by_its_position(before, now, message) -> None:
    assert first_difference(before, now) == message
