"""An `environment_factory` for `GRPOTrainer`. It lets TRL's own loop call a resource's tools.

TRL expects an object with `reset(**row)`, a method for each tool, and `get_reward()`. All episodes of a row start from
forks of the same resource. Advantages for each step, and reward-kit's rules for the end of an episode, are available
only with `rollouts.as_rollout_func`.
"""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Literal, Union

from reward_kit.agent.actions import as_text
from reward_kit.agent.samples import derive_seed
from reward_kit.agent.starts import close_quietly, environment_call
from reward_kit.blocking import LoopThread
from reward_kit.environments.base import ForkableResource, StateSnapshot, ToolSpec, canonical_json
from reward_kit.environments.config import merged_config, resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import (
    ConfigError,
    EnvironmentFailure,
    Failure,
    RewardKitError,
    ToolError,
    boundary,
    type_name,
)

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_SCALARS = (str, int, float, bool, type(None))
_RESERVED = ("reset", "get_reward")
_HEADINGS = ("Args:", "Returns:", "Raises:")
_LIMIT = "time_limit_s"


def tool_method(spec: ToolSpec, call: Callable[[Any, str, Mapping[str, Any]], str]) -> Callable[..., str]:
    """Create a method for a tool. Its signature and its docstring are derived from the tool's schema.

    The arguments are passed on unchanged, and the environment checks them.

    Args:
        spec: the tool in OpenAI format.
        call: a function that is called with the object, the name of the tool and the arguments.

    Raises:
        ConfigError: If the name of the tool or of a parameter is not a valid Python name.
    """
    function = spec["function"]
    name, schema = function["name"], function.get("parameters") or {}
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if not _is_name(name) or name.startswith("_") or name in _RESERVED:
        raise ConfigError(f"tool {name!r} cannot become a method of a TRL environment; rename it")
    if wrong := next((each for each in properties if not _is_name(each) or each == "self"), None):
        raise ConfigError(
            f"tool {name!r}: parameter {wrong!r} cannot become a method parameter of a TRL environment; rename it"
        )

    def method(self: Any, **arguments: Any) -> str:
        return call(self, name, arguments)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    # The parameters are keyword-only, so parameters without defaults may follow parameters with defaults.
    parameters += [
        inspect.Parameter(
            each,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each in required else properties[each].get("default"),
            annotation=_type_hint(properties[each]),
        )
        for each in properties
    ]
    lines = [_in_one_line(function.get("description") or name)]
    if properties:
        described = {each: _in_one_line(properties[each].get("description") or each) for each in properties}
        lines += ["", "Args:", *(f"    {each}: {text}" for each, text in described.items())]
    method.__name__ = method.__qualname__ = name
    method.__annotations__ = {each.name: each.annotation for each in parameters[1:]}
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__doc__ = "\n".join(lines)
    return method


def _type_hint(schema: Mapping[str, Any]) -> Any:
    """Return the Python type for a JSON schema, or `Any` if no type is equivalent."""
    values = schema.get("enum")
    if values and all(isinstance(value, _SCALARS) for value in values):
        return Literal[tuple(values)]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return Union[tuple(_type_hint(option) for option in options)]  # noqa: UP007 - known at run time only
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_TYPES.get(each, Any) for each in kind)]  # noqa: UP007 - known at run time only
    if kind == "array" and isinstance(schema.get("items"), Mapping) and schema["items"]:
        return list[_type_hint(schema["items"])]  # type: ignore[misc]
    return _TYPES.get(kind or "", Any)


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def _in_one_line(text: str) -> str:
    """Remove line breaks. Also remove the colons of headings, which would start a section of a docstring."""
    line = " ".join(text.split())
    for heading in _HEADINGS:
        line = line.replace(heading, heading.removesuffix(":"))
    return line


def environment_factory(
    resource: str | type[ForkableResource],
    config: Mapping[str, Any] | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    run_seed: int = 0,
    gives_reward: bool = True,
    time_limit_s: float | None = 60.0,
) -> EnvironmentFactory:
    """Return an `environment_factory` for `GRPOTrainer`.

    A row of the dataset may have a column `resource_config`, which overrides keys of `config`. Its value is either a
    dictionary or a JSON string. None values in a dictionary are ignored, because datasets fill missing values with
    None. In a JSON string, all keys apply. The column can set only the keys that the resource lists in
    `per_sample_keys`. If there is a column `seed`, rows with equal configurations can start in different states.

    Args:
        resource: the name of a built-in resource, `module:Class`, `file.py:Class`, or the class.
        config: the configuration, as in a task's `base_resource_config`.
        example: a row for which the resource is set up once to determine its tools. The default is an empty row.
        run_seed: the seed for all random choices.
        gives_reward: whether to add the sum of the environment's rewards as a TRL reward, in addition to
            `reward_funcs`.
        time_limit_s: the time limit of a call to the environment in seconds. If None, no limit applies.

    Raises:
        ConfigError: If the resource is unknown, if it rejects its configuration, or if it has a tool that cannot become
            a method.
    """
    kind = resource_class(resource) if isinstance(resource, str) else resource
    return EnvironmentFactory(
        kind,
        config or {},
        example or {},
        run_seed=run_seed,
        gives_reward=gives_reward,
        time_limit_s=time_limit_s,
    )


class TrlEpisode:
    """An episode in its own resource. If the resource fails, `failure` is set and the episode is unscored."""

    def __init__(self, world: ForkableResource, time_limit_s: float | None, thread: LoopThread) -> None:
        self.environment_return: float | None = None
        self.is_over = False
        self.failure: Failure | None = None
        self._world, self._limit, self._thread = world, time_limit_s, thread

    async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, and return its observation."""
        if self.is_over or self.failure is not None:
            raise ToolError("the episode is over; no tool can be called")
        try:
            with environment_call(f"step of {type_name(self._world)}", self._limit, self._world, _LIMIT):
                outcome = await self._world.step(name, arguments)
        except ToolError:
            raise
        except RewardKitError as error:
            self.failure = Failure.from_exception(error)
            raise
        if outcome.reward is not None:
            self.environment_return = (self.environment_return or 0.0) + outcome.reward
        self.is_over = outcome.terminated or outcome.truncated
        return as_text(outcome.observation)

    def final_state(self) -> StateSnapshot | None:
        """Return the state of the resource for reward functions.

        If the resource fails, set `failure` and return None.
        """

        async def read() -> StateSnapshot | None:
            with environment_call(f"final_state of {type_name(self._world)}", self._limit, self._world, _LIMIT):
                return await self._world.final_state()

        if self.failure is None:
            try:
                return self._thread.run(read())
            except RewardKitError as error:
                self.failure = Failure.from_exception(error)
        return None

    async def close(self) -> None:
        await close_quietly(self._world)


class EnvironmentFactory:
    """The factory that `environment_factory` returns. It creates one TRL environment for each concurrent rollout.

    The resources of a row are forks of one resource.

    Attributes:
        environment_class: the class of the environments. It has a method for each tool.
        tools: the tools of the example row in OpenAI format.
    """

    def __init__(
        self,
        kind: type[ForkableResource],
        config: Mapping[str, Any],
        example: Mapping[str, Any],
        *,
        run_seed: int,
        gives_reward: bool,
        time_limit_s: float | None,
    ) -> None:
        self.kind, self.time_limit_s = kind, time_limit_s
        self._config, self._run_seed = config, run_seed
        self._base: ForkableResource | None = None
        self._base_row, self._base_key, self._count = "", "", 0
        self._made: list[Environment] = []
        self._is_closed = False
        self.thread = LoopThread("environments for TRL", ServerPool())
        name = kind.__name__
        try:
            self.tools = self.thread.run(self._read_tools(example))
            if not self.tools:
                raise ConfigError(
                    f"{name} has no tools in this configuration, but in TRL, a model acts only through tools"
                )
            methods: dict[str, Any] = {
                spec["function"]["name"]: tool_method(spec, Environment._call) for spec in self.tools
            }
            if gives_reward:
                methods["get_reward"] = _get_reward
            # TRL logs the reward under the name of the class.
            self.environment_class = type(name.removesuffix("Resource") or name, (Environment,), methods)
        except BaseException:
            self.thread.close()
            raise

    def __call__(self) -> Environment:
        """Create an environment. TRL resets it before each rollout."""
        environment: Environment = self.environment_class(self)
        self._made.append(environment)
        return environment

    def close(self) -> None:
        """Close all resources and their thread. The environments cannot be used afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        for environment in self._made:
            if environment._play is not None:
                self.thread.run(environment._play.close())
                environment._play = None
        self.thread.run(self._close_base())
        self.thread.close()

    async def world(self, row: Mapping[str, Any]) -> ForkableResource:
        """Return a new resource for an episode of this row."""
        where = f"row {row['id']!r}" if row.get("id") is not None else "a row of the dataset"
        config = merged_config(self.kind, self._config, _row_config(row), where)
        wanted = canonical_json([config, row.get("seed")])
        seed = row["seed"] if row.get("seed") is not None else derive_seed("environment", self._run_seed, wanted)
        self._count += 1
        if self.kind.fork_kind_for(config) == "none":
            return await self._make(config, seed)
        if self._base is None or wanted != self._base_row:
            await self._close_base()
            self._base, self._base_row = await self._make(config, seed), wanted
            self._base_key = await self._base.state_key()
        with self._call("fork"):
            world = await self._base.fork()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(close_quietly, world)
            if (key := await world.state_key()) != self._base_key:
                raise EnvironmentFailure(
                    f"{self.kind.__name__}: a fork has the state key {key}, but its origin has {self._base_key}"
                )
            with self._call("reseed_noise"):
                await world.reseed_noise(derive_seed("noise", self._run_seed, wanted, self._count))
            undo.pop_all()
        return world

    async def _make(self, config: Mapping[str, Any], seed: int) -> ForkableResource:
        with boundary(EnvironmentFailure, f"creating a {self.kind.__name__}"):
            world = self.kind()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(close_quietly, world)
            with self._call("setup"):
                await world.setup(config)
            with self._call("reset"):
                await world.reset(seed)
            undo.pop_all()
        return world

    def _call(self, what: str) -> environment_call:
        return environment_call(f"{what} of {self.kind.__name__}", self.time_limit_s, limit=_LIMIT)

    async def _read_tools(self, row: Mapping[str, Any]) -> list[ToolSpec]:
        world = await self.world(row)
        try:
            return await world.get_tools_spec()
        finally:
            await close_quietly(world)

    async def _close_base(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            await close_quietly(base)


class Environment:
    """The environment that TRL uses. Its subclasses have a method for each tool."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory
        self._play: TrlEpisode | None = None

    def reset(self, **row: Any) -> str | None:
        """Start an episode of this row. TRL appends the returned observation to the last user message."""
        return self._factory.thread.run(self._begin(row))

    async def _begin(self, row: Mapping[str, Any]) -> str | None:
        before, self._play = self._play, None
        if before is not None:
            await before.close()
        factory = self._factory
        world = await factory.world(row)
        self._play = TrlEpisode(world, factory.time_limit_s, factory.thread)
        with environment_call(f"get_observation of {factory.kind.__name__}", factory.time_limit_s, world, _LIMIT):
            shown = as_text(await world.get_observation())
        last = (row.get("prompt") or [{}])[-1]
        return f"\n\n{shown}" if shown and isinstance(last, Mapping) and last.get("content") else shown or None

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self._play is None:
            raise ToolError("no episode has started; call reset first")
        return self._factory.thread.run(self._play.step(name, arguments))


def _get_reward(self: Environment) -> float | None:
    """Return the sum of the resource's rewards. If there were none or the resource failed, return None (unscored)."""
    play = self._play
    return None if play is None or play.failure is not None else play.environment_return


def _row_config(row: Mapping[str, Any]) -> Mapping[str, Any]:
    config = row.get("resource_config")
    if isinstance(config, str):
        with boundary(ConfigError, "resource_config is not JSON"):
            config = json.loads(config)
        if not isinstance(config, Mapping):
            raise ConfigError(f"resource_config must be a mapping of keys, got {type_name(config)}")
        return config
    return _without_none(config or {})


def _without_none(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if value is not None}
    return {key: _without_none(value) if isinstance(value, Mapping) else value for key, value in kept.items()}
