"""Test resources as Gymnasium environments: Gymnasium's checker, and equal trajectories in both directions."""

from __future__ import annotations

import json
import multiprocessing
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from reward_kit.environments import GymnasiumResource, SokobanResource
from reward_kit.environments.base import ForkableResource, StepOutcome, tool_spec
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError
from reward_kit.integrations.gymnasium_env import ResourceEnv

LAKE = {"env_id": "FrozenLake-v1"}
NOTES = {"initial_state": {"notes": []}}
WORLDS: dict[str, dict[str, Any]] = {
    "lake": {"resource": "gymnasium", "config": LAKE},
    "taxi": {"resource": "gymnasium", "config": {"env_id": "Taxi-v4"}},
    "sokoban": {"resource": "sokoban", "config": {}},
    "chores": {"resource": "alfworld", "config": {}, "max_text": 4096},
    "database": {"resource": "sqlite", "config": {}, "max_text": 4096},
    "files": {"resource": "filesystem", "config": {}, "max_text": 4096},
}


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    """Register a name for `gymnasium.make`."""
    name = f"reward_kit_test/{request.param}-v0"
    gymnasium.register(name, ResourceEnv, kwargs=WORLDS[request.param])
    yield name
    del gymnasium.registry[name]


@pytest.mark.parametrize("registered", WORLDS, indirect=True)
def test_gymnasium_env_checker_passes(registered: str) -> None:
    env = gymnasium.make(registered, disable_env_checker=True, render_mode="ansi").unwrapped
    check_env(env)
    env.close()


def test_action_space_depends_on_the_tools() -> None:
    forms = {}
    for name, world in WORLDS.items():
        env = ResourceEnv(**world)
        forms[name] = type(env.action_space)
        env.close()
    assert forms["lake"] is forms["taxi"] is forms["sokoban"] is spaces.Discrete
    assert issubclass(forms["chores"], spaces.Text)
    assert forms["database"] is forms["files"] is spaces.Dict


def test_wrapped_frozen_lake_equals_the_original() -> None:
    raw, env = gymnasium.make("FrozenLake-v1", render_mode="ansi"), ResourceEnv("gymnasium", LAKE)
    assert env.action_space == raw.action_space
    rng, ends = random.Random(0), 0
    for seed in range(30):
        raw.reset(seed=seed)
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            action = rng.randrange(4)
            _, reward, terminated, truncated, _ = raw.step(action)
            text, *ours, info = env.step(action)
            assert ours == [reward, terminated, truncated]
            assert info["environment_reward"] == reward
            # Both draw the lake; Gymnasium marks the place by its colour, the resource in words.
            lake = raw.unwrapped
            assert text == env.world._family.text(lake, lake.s)  # type: ignore[attr-defined]
            is_over = terminated or truncated
        ends += terminated
    assert ends > 5
    env.close()
    raw.close()


@pytest.mark.parametrize("registered", ["lake", "sokoban"], indirect=True)
async def test_resource_wrapped_twice_has_equal_trajectories(registered: str) -> None:
    first = GymnasiumResource() if "lake" in registered else SokobanResource()
    again = GymnasiumResource()
    await first.setup(LAKE if "lake" in registered else {})
    await again.setup({"env_id": registered})
    (spec,) = await first.get_tools_spec()
    ((argument, schema),) = spec["function"]["parameters"]["properties"].items()
    rng = random.Random(1)
    for seed in range(5):
        await first.reset(seed)
        await again.reset(seed)
        for _ in range(20):
            number = rng.randrange(len(schema["enum"]))
            theirs = await first.step(spec["function"]["name"], {argument: schema["enum"][number]})
            ours = await again.step("act", {"action": number})
            ends = (theirs.terminated, theirs.truncated)
            assert (ours.reward, ours.terminated, ours.truncated) == (theirs.reward or 0.0, *ends)
            # Seen the second time is what the world renders, which leaves out what the last action met.
            assert theirs.observation.partition("\nNothing moves")[0] in ours.observation
            if any(ends):
                break
    await first.close()
    await again.close()


class Notebook(ForkableResource):
    """A resource that takes notes and rewards only the third."""

    fork_kind = "none"
    closed = 0

    async def setup(self, config: Any) -> None:
        if config:
            raise ConfigError("notebook: no keys")
        self.notes: list[Any] = []

    async def reset(self, seed: int | None = None) -> None:
        self.notes = [seed]

    async def step(self, action_name: str, action_params: Any) -> StepOutcome:
        if action_params.keys() != {"text", "times"}:
            raise ToolError("text and times, please")
        self.notes += [action_params["text"]] * action_params["times"]
        is_full = len(self.notes) > 3
        return StepOutcome({"notes": self.notes}, 1.5 if is_full else None, is_full, False, {"count": len(self.notes)})

    async def get_observation(self) -> Any:
        return {"notes": self.notes}

    async def get_tools_spec(self) -> list[Any]:
        properties = {"text": {"type": "string"}, "times": {"type": "integer"}}
        return [tool_spec("note", "Note.", {"type": "object", "properties": properties})]

    async def state_key(self) -> str:
        return str(self.notes)

    async def close(self) -> None:
        type(self).closed += 1


def call(**arguments: Any) -> dict[str, str]:
    return {"name": "note", "arguments": json.dumps(arguments)}


def test_tool_calls_return_answers_and_invalid_calls_are_rejected() -> None:
    env = ResourceEnv(Notebook, render_mode="ansi")
    assert env.reset(seed=7) == ('{"notes": [7]}', {})
    seen, reward, terminated, truncated, info = env.step(call(text="ä", times=1))
    assert (seen, reward, terminated, truncated) == ('{"notes": [7, "ä"]}', 0.0, False, False)
    assert info == {"is_action_valid": True, "count": 2, "environment_reward": None}
    for wrong, told in (
        (call(text="ä"), "text and times, please"),
        ({"name": "note", "arguments": "no"}, "the arguments are not JSON"),
        ({"name": "note", "arguments": "[]"}, "the arguments must be a JSON object"),
    ):
        seen, reward, terminated, truncated, info = env.step(wrong)
        assert told in seen
        assert (reward, terminated, info) == (0.0, False, {"is_action_valid": False, "environment_reward": None})
    assert env.render() == '{"notes": [7, "ä"]}'
    assert env.step(call(text="b", times=2))[1:4] == (1.5, True, False)
    env.close()


def test_resets_without_a_seed_continue_the_last_seed() -> None:
    env = ResourceEnv(Notebook)

    def drawn() -> list[str]:
        return [env.reset()[0] for _ in range(3)]

    env.reset(seed=1)
    first = drawn()
    env.reset(seed=1)
    assert drawn() == first
    assert len(set(first)) == 3
    env.close()


def test_unsuitable_resources_are_rejected() -> None:
    for form, why in (
        ("discrete", "every argument must be a boolean or have an enum"),
        ("text", "exactly one tool, with exactly one argument that is a string"),
    ):
        with pytest.raises(ConfigError, match=f"actions='{form}' cannot be used with the tools note: .*{why}"):
            ResourceEnv(Notebook, actions=form)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="actions must be auto, discrete, text or tool_call, got 'json'"):
        ResourceEnv(Notebook, actions="json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="notebook: no keys"):
        ResourceEnv(Notebook, {"a": 1})
    with pytest.raises(ConfigError, match="render_mode must be None or 'ansi', got 'human'"):
        ResourceEnv(Notebook, render_mode="human")
    env = ResourceEnv(Notebook, max_text=20)
    with pytest.raises(ConfigError, match="reset does not accept options, got difficulty"):
        env.reset(options={"difficulty": 3})
    with pytest.raises(
        EnvironmentFailure, match=r"an observation has \d+ characters, but at most \d+ are allowed; raise max_text"
    ):
        env.step(call(text="a longer note", times=1))
    env.close()


def test_every_resource_is_closed_once_and_the_thread_ends_with_the_last() -> None:
    before, Notebook.closed = threading.active_count(), 0
    first, second = ResourceEnv(Notebook), ResourceEnv(Notebook)
    assert threading.active_count() == before + 1
    first.close()
    first.close()
    assert Notebook.closed == 1
    second.reset(seed=0)
    second.close()
    assert (Notebook.closed, threading.active_count()) == (2, before)
    with pytest.raises(EnvironmentFailure, match="the environment is closed"):
        second.reset()
    with pytest.raises(ConfigError):
        ResourceEnv(Notebook, {"a": 1})
    assert (Notebook.closed, threading.active_count()) == (3, before)


def test_environment_works_inside_an_event_loop_and_unclosed_programs_exit() -> None:
    program = """
import asyncio
from reward_kit.integrations.gymnasium_env import ResourceEnv
async def main():
    env = ResourceEnv("sokoban")
    env.reset(seed=0)
    print(env.step(0)[1:4])
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.endswith("False, False)\n")


def test_many_environments_run_concurrently() -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: ResourceEnv("gymnasium", LAKE) for _ in range(3)])
    seen, _ = envs.reset(seed=0)
    assert len(seen) == 3
    _, rewards, *_ = envs.step([0, 1, 2])
    assert rewards.shape == (3,)
    envs.close()


def test_forked_process_has_its_own_event_loop() -> None:
    here = ResourceEnv("gymnasium", LAKE)
    made = [lambda: ResourceEnv("gymnasium", LAKE)] * 2
    envs = gymnasium.vector.AsyncVectorEnv(made, shared_memory=False, context="fork")
    seen, _ = envs.reset(seed=0)
    assert list(seen) == [here.reset(seed=0)[0]] * 2
    envs.close()
    here.close()


class Wide(Notebook):
    """A tool with bounded integers, and more values than can be listed."""

    bounds: ClassVar[list[tuple[int, int]]] = []

    async def get_tools_spec(self) -> list[Any]:
        properties = {
            f"n{place}": {"type": "integer", "minimum": low, "maximum": high}
            for place, (low, high) in enumerate(self.bounds)
        }
        return [tool_spec("pick", "Pick.", {"type": "object", "properties": properties})]


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 2**31 - 1), (-(2**31), 2**31 - 1)],  # 2**63 calls, which is a negative number in 64 bits
        [(-(2**63), 2**63 - 1)],
        [(0, 10_000)],
        [(0, 99), (0, 100)],
        [(3, 2)],
    ],
)
def test_unlistable_calls_have_no_discrete_actions(bounds: list[tuple[int, int]]) -> None:
    kind = type("OfTest", (Wide,), {"bounds": bounds})
    env = ResourceEnv(kind)
    assert isinstance(env.action_space, spaces.Dict)
    env.close()


def test_listable_calls_are_discrete_actions() -> None:
    env = ResourceEnv(type("OfTest", (Wide,), {"bounds": [(-50, 49), (0, 99)]}))
    assert env.action_space == spaces.Discrete(10_000)
    assert (env.calls[0], env.calls[-1]) == (("pick", {"n0": -50, "n1": 0}), ("pick", {"n0": 49, "n1": 99}))
    env.close()


def test_closing_inherited_environments_keeps_those_of_the_fork() -> None:
    inherited = ResourceEnv("gymnasium", LAKE)
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        with pytest.raises(EnvironmentFailure) as caught:
            inherited.reset(seed=0)
        inherited.close()
        first, second = ResourceEnv("gymnasium", LAKE), ResourceEnv("gymnasium", LAKE)
        second.close()
        writer.send((str(caught.value), first.reset(seed=0)[0]))
        first.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    writer.close()  # where the child breaks, there is an end and nothing to wait for
    assert reader.poll(30)
    told, seen = reader.recv()
    process.join(30)
    assert "was created before this process was forked; create a new one in this process" in told
    assert seen == inherited.reset(seed=0)[0]
    inherited.close()
