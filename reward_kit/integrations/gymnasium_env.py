"""A `gymnasium.Env` that wraps a resource, for trainers and tools that expect an environment.

This is the inverse of the resource `gymnasium`. All environments in a process share one thread, in which their
asynchronous resources run. An action has one of three forms:

- `discrete`: the number of a tool call, if the arguments of all tools have a finite number of values;
- `text`: the argument of the only tool, such as the command of a text game;
- `tool_call`: a dict with the `name` of the tool and its `arguments` as a JSON string.

An observation is the text that the resource returns, or a JSON string. If an action is rejected, the environment still
returns an observation. The reward is then 0.0, and `is_action_valid` in the infos is false.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
from gymnasium import spaces

from reward_kit.agent.actions import as_text
from reward_kit.blocking import LoopThread
from reward_kit.environments.base import ForkableResource, StepOutcome, ToolSpec
from reward_kit.environments.config import resource_class
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError

ActionForm = Literal["auto", "discrete", "text", "tool_call"]
_MOST_CALLS = 10_000
_SEEDS = 2**31
_Result = TypeVar("_Result")


class _SharedLoop:
    """An event loop that runs in a thread and is shared by all environments of the process."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._thread: LoopThread | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._thread is None:
                self._thread = LoopThread("resource-env")

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._thread is not None:
                self._thread.close()
                self._thread = None

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        assert self._thread is not None, "the loop was not entered"
        return self._thread.run(coroutine)


_shared = _SharedLoop()
# A forked child does not have the thread. It starts its own loop when it creates environments.
os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]


class AnyText(spaces.Text):
    """A space that contains all strings. Samples consist of letters and digits, as in `spaces.Text`."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length


class ResourceEnv(gymnasium.Env[str, Any]):
    """A Gymnasium environment that wraps a resource.

    Args:
        resource: the name of a built-in resource, `module:Class`, or the class.
        config: the configuration that is passed to `setup`.
        actions: the form of an action. "auto" selects the first of discrete, text and tool_call that the tools allow.
        max_text: the maximum length of an observation, and of the string in an action.
        render_mode: "ansi" if `render` should return the current observation.

    Attributes:
        calls: for discrete actions, the tool and the arguments for each number.

    Raises:
        ConfigError: If the resource is unknown, if its configuration is invalid, or if its tools do not allow
            `actions`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]

    def __init__(
        self,
        resource: str | type[ForkableResource],
        config: Mapping[str, Any] | None = None,
        *,
        actions: ActionForm = "auto",
        max_text: int = 65_536,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode must be None or 'ansi', got {render_mode!r}")
        self.render_mode = render_mode
        self._max_text, self._pid = max_text, os.getpid()
        kind = resource_class(resource) if isinstance(resource, str) else resource
        self._world: ForkableResource | None = kind()
        _shared.enter()
        with ExitStack() as undo:
            undo.callback(self.close)
            _shared.run(self._world.setup(dict(config or {})))
            _shared.run(self._world.reset(0))
            specs = _shared.run(self._world.get_tools_spec())
            self._set_actions(specs, actions)
            undo.pop_all()
        self.observation_space = AnyText(max_length=max_text, min_length=0)

    def _set_actions(self, specs: Sequence[ToolSpec], asked: ActionForm) -> None:
        if asked not in ("auto", "discrete", "text", "tool_call"):
            raise ConfigError(f"actions must be auto, discrete, text or tool_call, got {asked!r}")
        self.calls = _list_calls(specs) if asked in ("auto", "discrete") else []
        self._text_argument = _text_argument(specs)
        fits = {"discrete": bool(self.calls), "text": self._text_argument is not None, "tool_call": True}
        self._form = next(form for form, does_fit in fits.items() if does_fit) if asked == "auto" else asked
        if not fits[self._form]:
            why = {
                "discrete": (
                    "every argument must be a boolean or have an enum or bounds, "
                    f"and there can be at most {_MOST_CALLS} calls"
                ),
                "text": "there must be exactly one tool, with exactly one argument that is a string",
            }
            names = ", ".join(spec["function"]["name"] for spec in specs)
            raise ConfigError(f"actions={asked!r} cannot be used with the tools {names}: {why[asked]}")
        text = AnyText(max_length=self._max_text, min_length=0)
        action_spaces: dict[str, spaces.Space[Any]] = {
            "text": text,
            "tool_call": spaces.Dict({"name": AnyText(max_length=64), "arguments": text}),
        }
        self.action_space = spaces.Discrete(len(self.calls)) if self._form == "discrete" else action_spaces[self._form]

    @property
    def world(self) -> ForkableResource:
        """The resource.

        Raises:
            EnvironmentFailure: If the environment is closed or was created before this process was forked.
        """
        if self._world is None:
            raise EnvironmentFailure("the environment is closed")
        if self._pid != os.getpid():
            raise EnvironmentFailure(
                "the environment was created before this process was forked; create a new one in this process"
            )
        return self._world

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Reset the resource with `seed`.

        If no seed is given, a seed is drawn from a generator that the last seed initialized.

        Raises:
            ConfigError: If `options` is not empty. Options are not supported.
        """
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"reset does not accept options, got {', '.join(options)}")
        drawn = int(self.np_random.integers(_SEEDS)) if seed is None else seed
        _shared.run(self.world.reset(drawn))
        return self._shown(_shared.run(self.world.get_observation())), {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one action. If the resource returns no reward, the reward is 0.0.

        The infos contain the original reward as `environment_reward`.
        """
        try:
            name, arguments = self._call(action)
            outcome: StepOutcome = _shared.run(self.world.step(name, arguments))
        except ToolError as error:
            return self._shown(str(error)), 0.0, False, False, {"is_action_valid": False, "environment_reward": None}
        info = {"is_action_valid": True, **outcome.info, "environment_reward": outcome.reward}
        reward = 0.0 if outcome.reward is None else outcome.reward
        return self._shown(outcome.observation), reward, outcome.terminated, outcome.truncated, info

    def _call(self, action: Any) -> tuple[str, Mapping[str, Any]]:
        """Return the tool and the arguments that an action represents."""
        if self._form == "discrete":
            if not self.action_space.contains(action):
                raise ToolError(f"invalid action {action!r}; expected an integer from 0 to {len(self.calls) - 1}")
            return self.calls[int(action)]
        if self._form == "text" and self._text_argument is not None:
            name, argument = self._text_argument
            return name, {argument: str(action)}
        try:
            arguments = json.loads(action["arguments"])
        except ValueError as error:
            raise ToolError(f"the arguments are not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ToolError(f"the arguments must be a JSON object, got {action['arguments']!r:.80}")
        return str(action["name"]), arguments

    def _shown(self, observation: Any) -> str:
        text = as_text(observation)
        if len(text) > self._max_text:
            raise EnvironmentFailure(
                f"an observation has {len(text)} characters, but at most {self._max_text} are allowed; raise max_text"
            )
        return text

    def render(self) -> Any:
        """Return the current observation if `render_mode` is "ansi"."""
        return self._shown(_shared.run(self.world.get_observation())) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the resource. A second call, or a call in a forked process, has no effect."""
        world, self._world = self._world, None
        if world is not None and self._pid == os.getpid():
            try:
                _shared.run(world.close())
            finally:
                _shared.leave()


def _text_argument(specs: Sequence[ToolSpec]) -> tuple[str, str] | None:
    """Return the names of the tool and of its argument, if there is only one of each and the argument is a string."""
    properties = specs[0]["function"].get("parameters", {}).get("properties", {}) if len(specs) == 1 else {}
    if len(properties) != 1:
        return None
    ((argument, schema),) = properties.items()
    return (specs[0]["function"]["name"], argument) if schema.get("type") == "string" else None


def _list_calls(specs: Sequence[ToolSpec]) -> list[tuple[str, Mapping[str, Any]]]:
    """List all possible tool calls. If there are too many or infinitely many of them, return []."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    for spec in specs:
        properties = spec["function"].get("parameters", {}).get("properties", {})
        values = [_values(schema) for schema in properties.values()]
        count = math.prod(len(some) for some in values)
        if not count or len(calls) + count > _MOST_CALLS:
            return []
        rows = itertools.product(*values)
        calls += [(spec["function"]["name"], dict(zip(properties, row, strict=True))) for row in rows]
    return calls


def _values(schema: Mapping[str, Any]) -> Sequence[Any]:
    if "enum" in schema:
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [False, True]
    if schema.get("type") == "integer" and {"minimum", "maximum"} <= schema.keys():
        values = range(schema["minimum"], schema["maximum"] + 1)
        # `len` fails for a range that is longer than its integer type.
        return values if values[:_MOST_CALLS] == values else []
    return []
