"""Gymnasium's toy-text environments (FrozenLake, Taxi, Blackjack, CliffWalking), each with one typed tool.

Each environment has a `Family`, which names its actions and renders its state as text. Gymnasium's rendering is not
sufficient, because it marks the agent only by color and shows the last action. Other environments with discrete actions
work if their rendering and observations are usable. The state key excludes randomness and elapsed time (a TimeLimit
truncates the episode).
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    check_call,
    hash_key,
    strict_tool,
)
from reward_kit.environments.config import ResourceConfig, read_config
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary, install_hint

Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""Gymnasium's transition table: state -> action -> [(probability, next state, reward, terminated)]."""
_CACHE_SIZE = 256
_cache: dict[str, NDArray[np.float64]] = {}
"""The action values of recently used tables, keyed by environment name."""
_COLORED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_TAXI_STOPS = ("R", "G", "Y", "B")
_TAXI_STOP_NAMES = ("R (red)", "G (green)", "Y (yellow)", "B (blue)")
_DATA_ARGUMENTS = {
    "FrozenLake": ("desc", "map_name", "is_slippery", "success_rate", "reward_schedule"),
    "CliffWalking": ("is_slippery",),
    "Taxi": ("is_rainy", "fickle_passenger"),
    "Blackjack": ("natural", "sab"),
}


def action_values(transitions: Transitions, discount: float = 0.99, tolerance: float = 1e-10) -> NDArray[np.float64]:
    """Return the optimal action values as a (states, actions) array.

        Q(s, a) = Σ p(s', r | s, a) · (r + γ · max_a' Q(s', a'))    (Sutton and Barto 2018, section 4.4)

    Value iteration runs until no value changes by more than `tolerance`. `discount` is the discount factor γ. It must
    be below 1, so that shorter paths have higher values.
    """
    width = max(len(outcomes) for row in transitions.values() for outcomes in row.values())
    table = np.zeros((len(transitions), len(transitions[0]), width, 4))
    for state, row in transitions.items():
        for action, outcomes in row.items():
            table[state, action, : len(outcomes)] = outcomes
    probability, target, reward, ended = np.moveaxis(table, 3, 0)
    expected_reward = (probability * reward).sum(axis=2)
    weight, following = discount * probability * (1.0 - ended), target.astype(np.int64)
    values = np.zeros(len(transitions))
    while True:
        q_values: NDArray[np.float64] = expected_reward + (weight * values[following]).sum(axis=2)
        best = q_values.max(axis=1)
        if np.abs(best - values).max() <= tolerance:
            return q_values
        values = best


class Family:
    """The text and state of one kind of environment with a transition table.

    Every method takes the unwrapped environment.
    """

    actions: tuple[str, ...] = ()
    legend: str = ""
    has_table = True

    def text(self, env: Any, observation: Any) -> str:
        """Return the state as the agent sees it. Equal states have equal texts."""
        raise NotImplementedError

    def state(self, env: Any, observation: Any) -> Any:
        """Return everything that determines the future, except the configuration and noise, as a JSON value."""
        return int(env.s)

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        """Return True if the goal has been reached, False if not, and None if the environment has no goal."""
        return terminated

    def admissible(self, env: Any, count: int) -> list[int]:
        """Return the actions that make sense in the current state."""
        return list(range(count))


class FrozenLake(Family):
    actions = ("left", "down", "right", "up")
    legend = "S start, F frozen, H hole, G goal; you are in the [brackets]. Reach G without falling into H."

    def text(self, env: Any, observation: Any) -> str:
        return _grid([[cell.decode() for cell in row] for row in env.desc], int(env.s))

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return bool(env.desc.reshape(-1)[int(env.s)] == b"G")


class CliffWalking(Family):
    actions = ("up", "right", "down", "left")
    legend = (
        "S start, G goal, C cliff (it costs 100 and leads back to S); you are in the [brackets]. Each move costs 1."
    )

    def text(self, env: Any, observation: Any) -> str:
        cells = [["C" if cliff else "." for cliff in row] for row in env._cliff]
        cells[-1][0], cells[-1][-1] = "S", "G"
        return _grid(cells, int(env.s))


class Taxi(Family):
    actions = ("south", "north", "east", "west", "pickup", "dropoff")
    legend = (
        "T is your taxi, | a wall, : a way through; R, G, Y and B are the stops. Pick the passenger up and drop them "
        "off at the destination. Each step costs 1, a wrong pickup or dropoff 10."
    )

    def text(self, env: Any, observation: Any) -> str:
        row, column, passenger, destination = env.decode(int(env.s))
        cells = [[cell.decode() for cell in line] for line in env.desc]
        cells[1 + row][2 * column + 1] = "T"
        where = "in the taxi" if passenger == 4 else f"at {_TAXI_STOP_NAMES[passenger]}"
        here = [_TAXI_STOPS[index] for index, stop in enumerate(env.locs) if tuple(stop) == (row, column)]
        lines = ["".join(line) for line in cells]
        lines.append(f"The taxi is in row {row}, column {column}{f', at {here[0]}' if here else ''}.")
        lines.append(f"The passenger is {where}; the destination is {_TAXI_STOP_NAMES[destination]}.")
        return "\n".join(lines)

    def state(self, env: Any, observation: Any) -> Any:
        # A fickle passenger changes the destination once; whether this has happened is hidden and affects the future.
        return [int(env.s), bool(getattr(env, "fickle_step", False))]

    def admissible(self, env: Any, count: int) -> list[int]:
        return [int(action) for action in np.flatnonzero(env.action_mask(int(env.s)))]


class Blackjack(Family):
    """Blackjack in which cards are drawn with replacement.

    The state consists of both hands. The order of the cards in the player's hand does not matter.
    """

    actions = ("stick", "hit")
    legend = "Come closer to 21 than the dealer without going over. An ace counts 1 or 11, a picture card 10."
    has_table = False

    def text(self, env: Any, observation: Any) -> str:
        total, _, usable_ace = observation
        names = ["A" if card == 1 else str(int(card)) for card in (*sorted(env.player), env.dealer[0])]
        ace = ", with an ace counted as 11" if usable_ace else ""
        return f"Your hand: {' '.join(names[:-1])} ({int(total)}{ace}). The dealer shows {names[-1]}."

    def state(self, env: Any, observation: Any) -> Any:
        return {"player": sorted(int(card) for card in env.player), "dealer": [int(card) for card in env.dealer]}

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return terminated and reward is not None and reward > 0


class Unknown(Family):
    """A fallback for all other environments with discrete actions.

    The state is the state of the transition table or, without a table, the observation.
    """

    has_table = False

    def text(self, env: Any, observation: Any) -> str:
        if env.render_mode == "ansi":
            return plain_text(str(env.render()))
        return str(to_json(observation))

    def state(self, env: Any, observation: Any) -> Any:
        return to_json(env.s if hasattr(env, "s") else observation)

    def succeeded(self, env: Any, reward: float | None, terminated: bool) -> bool | None:
        return None


FAMILIES: dict[str, Family] = {
    "FrozenLakeEnv": FrozenLake(),
    "CliffWalkingEnv": CliffWalking(),
    "TaxiEnv": Taxi(),
    "BlackjackEnv": Blackjack(),
}
UNKNOWN = Unknown()


def blackjack_strategy(total: int, dealer: int, usable_ace: bool) -> int:
    """Return the action of the basic strategy: stick (0) or hit (1).

    `dealer` is the visible card, where an ace is 1.
    """
    if usable_ace:
        return int(total <= 17 or (total == 18 and dealer in (1, 9, 10)))
    if total <= 11:
        return 1
    if total == 12:
        return int(dealer not in (4, 5, 6))
    return int(total <= 16 and dealer not in (2, 3, 4, 5, 6))


def plain_text(text: str) -> str:
    """Return terminal text without color codes. Colored parts are enclosed in brackets."""
    return _COLORED.sub(r"[\1]", text).replace("\x1b", "").strip("\n")


def to_json(value: Any) -> Any:
    """Return an observation as a JSON value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _grid(cells: list[list[str]], position: int) -> str:
    row, column = divmod(position, len(cells[0]))
    shown = [[f" {cell} " for cell in line] for line in cells]
    shown[row][column] = f"[{cells[row][column]}]"
    return "\n".join("".join(line).rstrip() for line in shown)


class RandomMap(ResourceConfig):
    """A random FrozenLake map, which the seed passed to the reset determines."""

    size: int = Field(default=8, ge=2, le=64)
    p: float = Field(default=0.8, gt=0, le=1, description="the probability that a cell is frozen")


class GymnasiumConfig(ResourceConfig):
    """The configuration of `gymnasium`."""

    env_id: str
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to gymnasium.make")
    random_map: RandomMap | None = Field(default=None, description="FrozenLake only")


class GymnasiumResource(ForkableResource):
    """A Gymnasium environment with a single tool, `act(action)`."""

    fork_kind = "native"
    per_sample_keys = frozenset({"random_map"})

    def __init__(self) -> None:
        self._settings = GymnasiumConfig(env_id="")
        self._env: Any = None
        self._family: Family = UNKNOWN
        self._names: dict[Any, int] = {}
        self._spec: ToolSpec = {}
        self._name = ""
        self._observation: Any = None
        self._reward: float | None = None
        self._terminated = False
        self._truncated = False

    @classmethod
    def per_sample_keys_for(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """Return `random_map` and, for a toy-text environment, those of its arguments that contain only data."""
        match = re.fullmatch(r"(FrozenLake|CliffWalking|Taxi|Blackjack)\w*(-v\d+)?", str(config.get("env_id")))
        known = _DATA_ARGUMENTS[match[1]] if match else ()
        return cls.per_sample_keys | {f"env_kwargs.{name}" for name in known}

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(GymnasiumConfig, config, "gymnasium")
        self._build(None)
        if self._settings.random_map and type(self._env.unwrapped).__name__ != "FrozenLakeEnv":
            raise ConfigError(
                f"gymnasium resource: random_map is only supported for FrozenLake, got {self._settings.env_id}"
            )
        self._start(0)

    async def reset(self, seed: int | None = None) -> None:
        if self._settings.random_map:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            drawn = self._settings.random_map
            self._build(list(generate_random_map(size=drawn.size, p=drawn.p, seed=seed)))
        self._start(seed)

    async def fork(self) -> ForkableResource:
        twin = copy.copy(self)
        twin._env = self._copy_env()
        return twin

    async def checkpoint(self) -> Any:
        kept = {name: value for name, value in vars(self).items() if name not in ("_settings", "_env")}
        return {**kept, "_env": self._copy_env()}

    async def restore(self, state: Any) -> None:
        old = self._env
        vars(self).update(state)
        # Copy again, so that the checkpoint can be restored repeatedly.
        self._env = self._copy_env()
        old.close()

    async def close(self) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            env.close()

    async def get_tools_spec(self) -> list[ToolSpec]:
        return [self._spec]

    async def get_observation(self) -> Any:
        board = self._text()
        choices = ", ".join(str(name) for name in self._names) if self._family.actions else ""
        notes = [self._family.legend, f"Actions: {choices}." if choices else ""]
        return "\n".join([board, "", *(note for note in notes if note)]).rstrip()

    async def state_key(self) -> str:
        state = self._family.state(self._env.unwrapped, self._observation)
        return hash_key(self._name, canonical_json([state, self._terminated, self._truncated]))

    async def final_state(self) -> StateSnapshot:
        env = self._env.unwrapped
        return StateSnapshot.from_json(
            {
                "env_id": self._settings.env_id,
                "state": self._family.state(env, self._observation),
                "last_reward": self._reward,
                "done": self._terminated or self._truncated,
                "terminated": self._terminated,
                "truncated": self._truncated,
                "success": self._family.succeeded(env, self._reward, self._terminated),
                "text": self._text(),
            }
        )

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        action = check_call({"act": self._spec}, action_name, action_params)["action"]
        # True equals 1 in Python, but is not a valid action.
        if isinstance(action, bool) or not isinstance(action, str | int) or action not in self._names:
            names = [str(name) for name in self._names]
            raise ToolError(f"act: action: {action!r} is not one of {', '.join(names[:20])}")
        if self._terminated or self._truncated:
            raise ToolError("the episode is over; no action changes anything")
        with boundary(EnvironmentFailure, f"{self._settings.env_id}.step"):
            self._observation, reward, terminated, truncated, _ = self._env.step(self._names[action])
        self._reward, self._terminated, self._truncated = float(reward), bool(terminated), bool(truncated)
        success = self._family.succeeded(self._env.unwrapped, self._reward, self._terminated)
        info = {} if success is None else {"success": success}
        return StepOutcome(self._text(), self._reward, self._terminated, self._truncated, info)

    async def reseed_noise(self, seed: int) -> None:
        from gymnasium.utils import seeding

        self._env.unwrapped.np_random = seeding.np_random(seed)[0]

    async def admissible_actions(self) -> Sequence[Mapping[str, Any]] | None:
        if self._terminated or self._truncated:
            return []
        sensible = set(self._family.admissible(self._env.unwrapped, len(self._names)))
        names = [name for index, name in enumerate(self._names) if index in sensible]
        return [{"name": "act", "arguments": {"action": name}} for name in names]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the optimal action, or None for an environment that has no expert.

        The optimal action is the best action according to the transition table (γ = 0.99) or, for Blackjack, the basic
        strategy.
        """
        env = self._env.unwrapped
        if self._terminated or self._truncated:
            return None
        if isinstance(self._family, Blackjack):
            total, dealer, usable_ace = self._observation
            index = blackjack_strategy(int(total), int(dealer), bool(usable_ace))
        elif self._family.has_table:
            if self._name not in _cache:
                if len(_cache) >= _CACHE_SIZE:
                    del _cache[next(iter(_cache))]
                _cache[self._name] = action_values(env.P)
            # The values are rounded so that the order of equivalent actions does not depend on the last bit.
            index = int(np.argmax(np.round(_cache[self._name][int(env.s)], 8)))
        else:
            return None
        return {"type": "tool_call", "name": "act", "arguments": {"action": list(self._names)[index]}}

    def _build(self, desc: list[str] | None) -> None:
        """Create the environment. If a map was drawn, pass it as `desc`."""
        if self._env is not None:
            self._env.close()
        env_id, kwargs = self._settings.env_id, {**self._settings.env_kwargs, **({"desc": desc} if desc else {})}
        # The import and the creation may warn about deprecated modules and older versions, which users cannot fix.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                import gymnasium
            except ImportError:
                raise ConfigError(f"the gymnasium resource needs gymnasium; {install_hint('games')}") from None
            with boundary(ConfigError, f"gymnasium resource: {env_id}"):
                entry = gymnasium.spec(env_id).entry_point
                made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
                modes = getattr(made, "metadata", {}).get("render_modes", ())
                options: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
                self._env = gymnasium.make(env_id, disable_env_checker=True, **{**options, **kwargs})
        self._family = FAMILIES.get(type(self._env.unwrapped).__name__, UNKNOWN)
        self._name = hash_key(env_id, repr(sorted(kwargs.items())))
        space = self._env.action_space
        if type(space).__name__ != "Discrete":
            raise ConfigError(f"gymnasium resource: {env_id}: the actions must be discrete, got {space}")
        first, count = int(space.start), int(space.n)
        if len(self._family.actions) == count:
            self._names = {name: first + index for index, name in enumerate(self._family.actions)}
            schema: dict[str, Any] = {"type": "string", "enum": list(self._names)}
        else:
            self._names = {first + index: first + index for index in range(count)}
            schema = {"type": "integer", "minimum": first, "maximum": first + count - 1}
        self._spec = strict_tool("act", "Take one action.", action=schema)

    def _start(self, seed: int | None) -> None:
        with boundary(EnvironmentFailure, f"{self._settings.env_id}.reset"):
            self._observation, _ = self._env.reset(seed=seed)
        self._reward, self._terminated, self._truncated = None, False, False

    def _text(self) -> str:
        return self._family.text(self._env.unwrapped, self._observation)

    def _copy_env(self) -> Any:
        # Tables and specifications are large and never change, so copies share them.
        env = self._env.unwrapped
        fixed = [getattr(env, name, None) for name in ("P", "spec", "desc", "initial_state_distrib")]
        fixed += [env.action_space, env.observation_space]
        return copy.deepcopy(self._env, {id(value): value for value in fixed if value is not None})
