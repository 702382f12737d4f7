"""Gymnasium's toy-text environments (FrozenLake, Taxi, Blackjack, CliffWalking) as worlds with one typed tool.

Any other environment with discrete actions works as well as its rendering and observations allow.

Time is no part of the state key, although Gymnasium's TimeLimit cuts an episode after so many steps: `truncated` says
that the environment stopped for an outside reason, and a state's value is that of the task without the limit.
Randomness is noise, and no part of it either: a slippery lake goes on differently from one state with other noise.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    canonical_json,
    hash_key,
    tool_spec,
)
from reward_kit.environments.config import read_config
from reward_kit.environments.planning import best_action
from reward_kit.environments.toy_text import FAMILIES, UNKNOWN, Blackjack, Family, blackjack_strategy
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, boundary, did_you_mean, how_to_install

_TOOL = "act"
_DATA_ARGUMENTS = {
    "FrozenLake": ("desc", "map_name", "is_slippery", "success_rate", "reward_schedule"),
    "CliffWalking": ("is_slippery",),
    "Taxi": ("is_rainy", "fickle_passenger"),
    "Blackjack": ("natural", "sab"),
}


class RandomMap(BaseModel):
    """A FrozenLake map drawn from the seed of the reset."""

    model_config = ConfigDict(extra="forbid")

    size: int = Field(default=8, ge=2, le=64)
    p: float = Field(default=0.8, gt=0, le=1, description="the probability that a cell is frozen")


class GymnasiumConfig(BaseModel):
    """The configuration of `gymnasium`."""

    model_config = ConfigDict(extra="forbid")

    env_id: str
    env_kwargs: dict[str, Any] = Field(default_factory=dict, description="handed to gymnasium.make")
    random_map: RandomMap | None = Field(default=None, description="FrozenLake only")


class GymnasiumResource(ForkableResource):
    """One Gymnasium environment; `act(action)` is its only tool."""

    fork_kind = "native"
    per_sample_keys = frozenset({"random_map"})

    def __init__(self) -> None:
        self._settings = GymnasiumConfig(env_id="")
        self._env: Any = None
        self._family: Family = UNKNOWN
        self._names: dict[Any, int] = {}
        self._spec: ToolSpec = {}
        self._world_name = ""
        self._observation: Any = None
        self._reward: float | None = None
        self._terminated = False
        self._truncated = False

    @classmethod
    def per_sample_keys_for(cls, config: Mapping[str, Any]) -> frozenset[str]:
        """`random_map`, and those arguments of a toy-text environment that are data; of others nothing is known."""
        found = re.fullmatch(r"(FrozenLake|CliffWalking|Taxi|Blackjack)\w*(-v\d+)?", str(config.get("env_id")))
        known = _DATA_ARGUMENTS[found[1]] if found else ()
        return cls.per_sample_keys | {f"env_kwargs.{name}" for name in known}

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(GymnasiumConfig, config, "gymnasium")
        self._build(None)
        if self._settings.random_map and type(self._env.unwrapped).__name__ != "FrozenLakeEnv":
            raise ConfigError(f"gymnasium resource: random_map: only FrozenLake has maps, not {self._settings.env_id}")
        self._start(0)

    async def reset(self, seed: int | None = None) -> None:
        if self._settings.random_map:
            self._build(_random_map(self._settings.random_map, seed))
        self._start(seed)

    async def fork(self) -> ForkableResource:
        twin = copy.copy(self)
        twin._env = self._copied_env()
        return twin

    async def checkpoint(self) -> Any:
        return self._state_fields(self._copied_env())

    async def restore(self, state: Any) -> None:
        old = self._env
        vars(self).update(state)
        # A copy once more, so that the checkpoint can be restored again.
        self._env = self._copied_env()
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
        return hash_key(self._world_name, canonical_json([state, self._terminated, self._truncated]))

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
        action = self._action(action_name, action_params)
        with boundary(EnvironmentFailure, f"{self._settings.env_id}.step"):
            self._observation, reward, terminated, truncated, _ = self._env.step(action)
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
        return [{"name": _TOOL, "arguments": {"action": name}} for name in names]

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Optimal for the table environments (value iteration, γ = 0.99), basic strategy for Blackjack, else None."""
        env = self._env.unwrapped
        if self._terminated or self._truncated:
            return None
        if isinstance(self._family, Blackjack):
            total, dealer, usable_ace = self._observation
            index = blackjack_strategy(int(total), int(dealer), bool(usable_ace))
        elif self._family.has_table:
            index = best_action(self._world_name, env.P, int(env.s))
        else:
            return None
        return {"type": "tool_call", "name": _TOOL, "arguments": {"action": list(self._names)[index]}}

    def _build(self, desc: list[str] | None) -> None:
        """Make the environment, with the map `desc` where one was drawn."""
        if self._env is not None:
            self._env.close()
        kwargs = {**self._settings.env_kwargs, **({"desc": desc} if desc else {})}
        self._env = _make_env(self._settings.env_id, kwargs)
        env = self._env.unwrapped
        self._family = FAMILIES.get(type(env).__name__, UNKNOWN)
        self._world_name = hash_key(self._settings.env_id, repr(sorted(kwargs.items())))
        space = self._env.action_space
        if type(space).__name__ != "Discrete":
            raise ConfigError(f"gymnasium resource: {self._settings.env_id} has no discrete actions but {space}")
        first, count = int(space.start), int(space.n)
        if len(self._family.actions) == count:
            self._names = {name: first + index for index, name in enumerate(self._family.actions)}
            schema: dict[str, Any] = {"type": "string", "enum": list(self._names)}
        else:
            self._names = {first + index: first + index for index in range(count)}
            schema = {"type": "integer", "minimum": first, "maximum": first + count - 1}
        parameters = {"type": "object", "properties": {"action": schema}, "required": ["action"]}
        self._spec = tool_spec(_TOOL, "Take one action.", {**parameters, "additionalProperties": False})

    def _start(self, seed: int | None) -> None:
        with boundary(EnvironmentFailure, f"{self._settings.env_id}.reset"):
            self._observation, _ = self._env.reset(seed=seed)
        self._reward, self._terminated, self._truncated = None, False, False

    def _text(self) -> str:
        return self._family.text(self._env.unwrapped, self._observation)

    def _action(self, tool: str, arguments: Mapping[str, Any]) -> int:
        if tool != _TOOL:
            raise ToolError(f"unknown tool {tool!r}{did_you_mean(tool, [_TOOL])}")
        for name in arguments:
            if name != "action":
                raise ToolError(f"{_TOOL}: unknown argument {name!r}{did_you_mean(str(name), ['action'])}")
        if "action" not in arguments:
            raise ToolError(f"{_TOOL}: action: missing")
        action = arguments["action"]
        # True equals 1 in Python; as an action it is a mistake.
        if isinstance(action, bool) or not isinstance(action, str | int) or action not in self._names:
            shown = [str(name) for name in self._names]
            raise ToolError(f"{_TOOL}: action: {action!r} is none of {', '.join(shown[:20])}")
        if self._terminated or self._truncated:
            raise ToolError("the episode is over; no action changes anything")
        return self._names[action]

    def _copied_env(self) -> Any:
        # Tables and specifications never change and are large; a copy shares them.
        env = self._env.unwrapped
        fixed = [getattr(env, name, None) for name in ("P", "spec", "desc", "initial_state_distrib")]
        fixed += [env.action_space, env.observation_space]
        return copy.deepcopy(self._env, {id(value): value for value in fixed if value is not None})

    def _state_fields(self, env: Any) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("_settings", "_env")}
        return {**kept, "_env": env}


def _make_env(env_id: str, kwargs: Mapping[str, Any]) -> Any:
    # Importing and making may warn of deprecated modules and older versions, which is nothing a user of ours can mend.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import gymnasium
        except ImportError:
            raise ConfigError(f"the gymnasium resource needs gymnasium; {how_to_install('games')}") from None
        with boundary(ConfigError, f"gymnasium resource: {env_id}"):
            spec = gymnasium.spec(env_id)
            entry = spec.entry_point
            made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
            modes = getattr(made, "metadata", {}).get("render_modes", ())
            options: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
            return gymnasium.make(env_id, disable_env_checker=True, **{**options, **kwargs})


def _random_map(settings: RandomMap, seed: int | None) -> list[str]:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return list(generate_random_map(size=settings.size, p=settings.p, seed=seed))
