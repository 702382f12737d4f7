"""Test Gymnasium's toy environments: typed actions, text, exact forks and experts."""

from __future__ import annotations

import builtins

import numpy as np
import pytest

from reward_kit.environments import GymnasiumResource, open_snapshot
from reward_kit.environments.gymnasium import action_values, blackjack_strategy, plain_text
from reward_kit.errors import ConfigError, ToolError

TOYS = ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"]


async def made(env_id="FrozenLake-v1", seed=0, **config) -> GymnasiumResource:
    resource = GymnasiumResource()
    await resource.setup({"env_id": env_id, **config})
    await resource.reset(seed)
    return resource


async def lake(**config) -> GymnasiumResource:
    return await made(env_kwargs={"is_slippery": False, **config})


async def act(resource, action):
    return await resource.step("act", {"action": action})


async def play_expert(resource) -> tuple[float, bool]:
    total, success = 0.0, False
    while action := await resource.expert_action():
        outcome = await resource.step(action["name"], action["arguments"])
        total, success = total + outcome.reward, bool(outcome.info["success"])
    return total, success


@pytest.mark.parametrize(
    ("env_id", "names"),
    [
        ("FrozenLake-v1", ["left", "down", "right", "up"]),
        ("Taxi-v4", ["south", "north", "east", "west", "pickup", "dropoff"]),
        ("Blackjack-v1", ["stick", "hit"]),
        ("CliffWalking-v1", ["up", "right", "down", "left"]),
    ],
)
async def test_tool_lists_the_actions(env_id, names) -> None:
    (spec,) = await (await made(env_id)).get_tools_spec()
    assert spec["type"] == "function"
    assert spec["function"]["name"] == "act"
    assert spec["function"]["parameters"]["properties"]["action"] == {"type": "string", "enum": names}
    assert spec["function"]["parameters"]["required"] == ["action"]


async def test_other_discrete_environment_gets_an_integer_range() -> None:
    resource = await made("CartPole-v1")
    (spec,) = await resource.get_tools_spec()
    assert spec["function"]["parameters"]["properties"]["action"] == {"type": "integer", "minimum": 0, "maximum": 1}
    outcome = await act(resource, 1)
    assert outcome.reward == 1.0
    assert await resource.expert_action() is None


async def test_agent_position_is_in_brackets() -> None:
    resource = await lake()
    first = await resource.get_observation()
    assert first.startswith("[S] F  F  F\n F  H  F  H\n F  F  F  H\n H  F  F  G")
    assert "Actions: left, down, right, up." in first
    assert (await act(resource, "right")).observation == " S [F] F  F\n F  H  F  H\n F  F  F  H\n H  F  F  G"


async def test_goal_ends_the_episode_with_its_reward() -> None:
    resource = await lake()
    for action in ("down", "down", "right", "right", "down"):
        outcome = await act(resource, action)
        assert (outcome.reward, outcome.terminated) == (0.0, False)
    outcome = await act(resource, "right")
    assert (outcome.reward, outcome.terminated, outcome.info["success"]) == (1.0, True, True)
    state = open_snapshot(await resource.final_state())
    assert (state["success"], state["done"], state["state"], state["last_reward"]) == (True, True, 15, 1.0)
    assert await resource.admissible_actions() == []
    assert await resource.expert_action() is None
    with pytest.raises(ToolError, match="the episode is over"):
        await act(resource, "left")


async def test_hole_ends_the_episode_without_success() -> None:
    resource = await lake()
    await act(resource, "right")
    outcome = await act(resource, "down")
    assert (outcome.reward, outcome.terminated, outcome.info["success"]) == (0.0, True, False)


async def test_time_limit_truncates() -> None:
    resource = await lake(max_episode_steps=2)
    assert not (await act(resource, "left")).truncated
    outcome = await act(resource, "left")
    assert (outcome.truncated, outcome.terminated) == (True, False)


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("atc", {"action": "left"}, "did you mean 'act'"),
        ("act", {}, "action: missing"),
        ("act", {"action": "sideways"}, "'sideways' is not one of left, down, right, up"),
        ("act", {"action": 1}, "1 is not one of"),
        ("act", {"action": ["left"]}, "is not one of"),
        ("act", {"action": "left", "speed": 1}, "unknown argument 'speed'"),
    ],
)
async def test_invalid_call_is_rejected_and_changes_nothing(tool, arguments, message) -> None:
    resource = await made()
    before = await resource.state_key()
    with pytest.raises(ToolError, match=message):
        await resource.step(tool, arguments)
    assert await resource.state_key() == before


async def test_boolean_is_not_an_integer_action() -> None:
    with pytest.raises(ToolError):
        await act(await made("CartPole-v1"), True)


@pytest.mark.parametrize("env_id", [*TOYS, "CliffWalkingSlippery-v1"])
async def test_fork_has_the_same_future_and_is_independent(env_id) -> None:
    origin = await made(env_id, seed=3)
    fork = await origin.fork()
    key, text = await origin.state_key(), await origin.get_observation()
    (spec,) = await origin.get_tools_spec()
    names = spec["function"]["parameters"]["properties"]["action"]["enum"]
    rng = np.random.default_rng(0)
    walk, outcomes = [], []
    for _ in range(30):
        walk.append(str(rng.choice(names)))
        outcomes.append(await act(fork, walk[-1]))
        if outcomes[-1].terminated or outcomes[-1].truncated:
            break
    assert await origin.state_key() == key
    assert await origin.get_observation() == text
    assert [await act(origin, action) for action in walk] == outcomes
    assert await origin.state_key() == await fork.state_key()


async def test_fork_keeps_the_remaining_time() -> None:
    resource = await lake(max_episode_steps=2)
    await act(resource, "left")
    assert (await act(await resource.fork(), "left")).truncated


async def test_checkpoint_can_be_restored_repeatedly() -> None:
    resource = await made(seed=5)
    saved, key = await resource.checkpoint(), await resource.state_key()
    runs = []
    for _ in range(2):
        await resource.restore(saved)
        assert await resource.state_key() == key
        runs.append([(await act(resource, "right")).observation for _ in range(3)])
    assert runs[0] == runs[1]


async def test_reseeding_the_noise_changes_the_future_and_not_the_state() -> None:
    async def future(noise: int) -> list[str]:
        resource = await made("CliffWalkingSlippery-v1")
        before = await resource.state_key()
        await resource.reseed_noise(noise)
        assert await resource.state_key() == before
        return [(await act(resource, "up")).observation for _ in range(8)]

    futures = [await future(noise) for noise in (1, 1, 2, 3, 4)]
    assert futures[0] == futures[1]
    assert len({tuple(found) for found in futures}) > 1


async def test_state_key_depends_on_the_position_only() -> None:
    resource = await lake()
    first = await resource.state_key()
    await act(resource, "left")
    assert await resource.state_key() == first
    await act(resource, "right")
    assert await resource.state_key() != first
    await act(resource, "left")
    assert await resource.state_key() == first
    assert await (await made("FrozenLake8x8-v1")).state_key() != first


async def test_blackjack_state_key_includes_the_hidden_card_and_no_order() -> None:
    resource = await made("Blackjack-v1")
    hand = resource._env.unwrapped
    hand.player, hand.dealer = [2, 9], [10, 7]
    first = await resource.state_key()
    hand.player = [9, 2]
    assert await resource.state_key() == first
    hand.dealer = [10, 8]
    assert await resource.state_key() != first


async def test_random_map_follows_the_seed() -> None:
    config = {"random_map": {"size": 6, "p": 0.7}, "env_kwargs": {"is_slippery": False}}
    one, same, other = [await made(seed=seed, **config) for seed in (1, 1, 2)]
    assert await one.get_observation() == await same.get_observation()
    assert await one.state_key() == await same.state_key()
    assert await one.get_observation() != await other.get_observation()
    assert await one.state_key() != await other.state_key()
    assert len((await one.get_observation()).split("\n\n")[0].splitlines()) == 6
    await one.reset(2)
    assert await one.state_key() == await other.state_key()


@pytest.mark.parametrize("seed", range(5))
async def test_expert_solves_every_deterministic_map(seed) -> None:
    resource = await made(seed=seed, random_map={"size": 5, "p": 0.7}, env_kwargs={"is_slippery": False})
    assert await play_expert(resource) == (1.0, True)


async def test_expert_takes_the_shortest_path_along_the_cliff() -> None:
    assert await play_expert(await made("CliffWalking-v1")) == (-13.0, True)


@pytest.mark.parametrize("seed", range(3))
async def test_expert_delivers_the_passenger(seed) -> None:
    total, success = await play_expert(await made("Taxi-v4", seed=seed))
    assert success
    assert total >= 3


async def test_expert_beats_chance_on_slippery_lakes_and_blackjack() -> None:
    lakes = [await play_expert(await made(seed=seed)) for seed in range(60)]
    assert np.mean([success for _, success in lakes]) > 0.55
    hands = [await play_expert(await made("Blackjack-v1", seed=seed)) for seed in range(200)]
    assert np.mean([total for total, _ in hands]) > -0.25


async def test_taxi_offers_only_useful_actions() -> None:
    resource = await made("Taxi-v4")
    names = {action["arguments"]["action"] for action in await resource.admissible_actions()}
    assert names < {"south", "north", "east", "west", "pickup", "dropoff"}
    assert "dropoff" not in names


def test_action_values_match_a_hand_computed_table() -> None:
    # State 0: action 0 stays for nothing, action 1 goes on; state 1: action 0 goes back, action 1 ends with 1.
    table = {
        0: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 0, 0.0, False)], 1: [(0.5, 0, 0.0, False), (0.5, 1, 1.0, True)]},
    }
    value = action_values(table, discount=0.9)
    best_1 = 0.5 / (1 - 0.5 * 0.81)
    assert value == pytest.approx(np.array([[0.81 * best_1, 0.9 * best_1], [0.81 * best_1, best_1]]))


@pytest.mark.parametrize(
    ("total", "dealer", "ace", "hits"),
    [
        (11, 6, False, True),
        (12, 4, False, False),
        (12, 2, False, True),
        (16, 7, False, True),
        (16, 6, False, False),
        (17, 1, False, False),
        (17, 6, True, True),
        (18, 9, True, True),
        (18, 8, True, False),
        (19, 1, True, False),
    ],
)
def test_blackjack_strategy_follows_the_basic_table(total, dealer, ace, hits) -> None:
    assert blackjack_strategy(total, dealer, ace) == int(hits)


def test_terminal_colors_become_brackets() -> None:
    assert plain_text("\n\x1b[41mS\x1b[0mF\n") == "[S]F"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "env_id: missing"),
        ({"env_id": "FrozenLake-v1", "env_kwarg": {}}, "did you mean 'env_kwargs'"),
        ({"env_id": "FrozenLakes-v1"}, "FrozenLakes"),
        ({"env_id": "FrozenLake-v1", "env_kwargs": {"slippery": 1}}, "slippery"),
        ({"env_id": "FrozenLake-v1", "random_map": {"siz": 4}}, "random_map.siz: unknown key"),
        ({"env_id": "Taxi-v4", "random_map": {"size": 4}}, "random_map is only supported for FrozenLake"),
        ({"env_id": "Pendulum-v1"}, "the actions must be discrete"),
    ],
)
async def test_invalid_configuration_is_one_clear_error(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        await GymnasiumResource().setup(config)


async def test_missing_gymnasium_names_the_extra(monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gymnasium":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install '/path/to/reward-kit\[games\]'"):
        await GymnasiumResource().setup({"env_id": "FrozenLake-v1"})


async def test_closing_twice_is_allowed() -> None:
    resource = await made()
    await resource.close()
    await resource.close()
