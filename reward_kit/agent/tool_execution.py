"""Execution of an action's tool calls."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from reward_kit.agent.actions import as_text, call_ids, to_plain_data
from reward_kit.agent.policy_interface import Action, get_tool_calls
from reward_kit.environments.base import ForkableResource, StepOutcome, ToolSpec, tool_spec
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFailure,
    Failure,
    RewardKitError,
    ToolError,
    boundary,
    did_you_mean,
    type_name,
)
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.run_warnings import CURRENT_RUN_WARNINGS
from reward_kit.telemetry.current import EpisodeSpans

NOT_EXECUTED = "Not executed: the episode is over."
logger = logging.getLogger("reward_kit.agent")


@dataclass(slots=True)
class Execution:
    """The results of one action: the messages, the sum of the rewards, and JSON-compatible data for the step."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    wants_end: bool = False  # the agent called the task's terminate tool
    info: dict[str, Any] = field(default_factory=dict)
    is_interrupted: bool = False  # the time limit cancelled a call to the resource, so its state is unknown
    failure: Failure | None = None
    spans: list[tuple[float, float]] = field(default_factory=list)  # start and end of each call, as in `info["tools"]`

    @property
    def is_over(self) -> bool:
        """True if the remaining calls of this action will not be executed."""
        ended = self.terminated or self.truncated or self.wants_end
        return ended or self.is_interrupted or self.failure is not None


class Toolbox:
    """The tools that the agent can call in one episode, including the terminate tool.

    If the task lists `tools`, the agent can call only those. Otherwise, the agent can call the tools that the task
    defines or, if it defines none, the resource's tools.

    Attributes:
        missing: the names in the task's `tools` that did not exist when `specs` was last called, each mapped to a
            message.
        scope: the cancel scope that enforces the deadline of the running call.
    """

    def __init__(
        self,
        task: TaskDefinitionModel,
        resource: ForkableResource | None,
        registry: ToolRegistry | None,
        spans: EpisodeSpans | None = None,
    ) -> None:
        self._resource, self._registry, self._spans = resource, registry, spans or EpisodeSpans()
        self._terminate_tool = task.terminate_tool
        self._tool_time_s, self._output_chars = task.limits.tool_time_s, task.limits.tool_output_chars
        self._selected = None if task.tools is None else {*task.tools}
        self._own = list(registry.get_openai_tools()) if registry else []
        self._hides_resource = self._selected is None and bool(self._own)
        self._terminate: list[ToolSpec] = []
        if task.terminate_tool:
            properties = {"message": {"type": "string", "description": "a closing remark"}}
            parameters = {"type": "object", "properties": properties, "additionalProperties": False}
            about = "End the episode. Call this when the task is done."
            self._terminate = [tool_spec(task.terminate_tool, about, parameters)]
        self._offered: list[str] = []
        self.missing: dict[str, str] = {}
        self.scope: anyio.CancelScope | None = None

    async def specs(self) -> list[ToolSpec] | None:
        """Return the tools that can be called now, or None.

        Raises:
            ConfigError: If two tools have the same name.
        """
        specs = self._own
        with boundary(EnvironmentFailure, "get_tools_spec"):
            if self._resource is not None and not self._hides_resource:
                specs = [*await self._resource.get_tools_spec(), *specs]
            if (selected := self._selected) is not None:
                known = {spec["function"]["name"] for spec in [*specs, *self._terminate]}
                self.missing = {name: f"unknown tool {name!r}{did_you_mean(name, known)}" for name in selected - known}
                specs = [spec for spec in specs if spec["function"]["name"] in selected]
            specs = [*specs, *self._terminate]
            names = [spec["function"]["name"] for spec in specs]
            is_unique = len(set(names)) == len(names)
        if not is_unique:
            twice = {name for name in names if names.count(name) > 1}
            raise ConfigError(f"two tools are named {', '.join(sorted(twice))}; rename one of them")
        self._offered = names
        return specs or None

    async def execute(
        self, action: Action, step: int, seconds_left: float | None, done: Execution | None = None
    ) -> Execution:
        """Execute an action's calls in order, and add the results to `done`.

        If a call raises a `ToolError`, the agent receives its message. Any other exception from a tool or a resource
        ends the episode with a failure, because it is not the agent's mistake. A resource that times out also ends the
        episode, because its state is unknown.
        """
        done = Execution() if done is None else done
        calls, limit = get_tool_calls(action), self._output_chars
        began = time.perf_counter()
        for call, call_id in zip(calls, call_ids(action, step), strict=True):
            started = time.perf_counter()
            left = None if seconds_left is None else max(seconds_left - (started - began), 0.0)
            with self._spans.tool(step, len(done.spans)):
                name, (text, facts) = call["name"], await self._call(call, done, left)
            done.spans.append((started, time.perf_counter()))
            facts["name"] = name
            if len(text) > limit:
                half, facts["cut"] = limit // 2, True
                note = f"\n[… {len(text) - 2 * half:,} of {len(text):,} characters omitted …]\n"
                text = f"{text[:half]}{note}{text[len(text) - half :]}"
            done.messages.append(Message(role="tool", name=name, tool_call_id=call_id, content=text))
            done.info.setdefault("tools", []).append(facts)
        if calls:
            done.info["is_action_valid"] = all(tool.get("is_valid", True) for tool in done.info["tools"])
        return done

    async def _call(
        self, call: Mapping[str, Any], done: Execution, seconds_left: float | None
    ) -> tuple[str, dict[str, Any]]:
        """Return the text that the agent receives as the result of a call, together with data about the call."""
        if done.is_over:
            return NOT_EXECUTED, {"skipped": True}
        name, arguments = call["name"], call.get("arguments") or {}
        try:
            if "arguments_text" in call:
                text = str(call["arguments_text"])[:200]
                raise ToolError(f"the arguments of {name!r} are not a JSON object: {text}")
            if not isinstance(arguments, Mapping):
                raise ToolError(f"the arguments of {name!r} must be an object, got {type_name(arguments)}")
            if name == self._terminate_tool:
                done.wants_end = True
                return "The episode ends.", {}
            is_own = self._is_own(name)
            if not is_own and self._resource is not None and self._resource.never_waits:
                return await self._call_resource(name, dict(arguments), done)
            limit = self._tool_time_s
            allowed = [seconds for seconds in (limit, seconds_left) if seconds is not None]
            with anyio.move_on_after(min(allowed) if allowed else None) as self.scope:
                if is_own:
                    return await self._call_own(name, dict(arguments))
                return await self._call_resource(name, dict(arguments), done)
            if seconds_left is not None and (limit is None or seconds_left < limit):
                done.is_interrupted = not is_own
                raise ToolError(
                    f"tool {name!r} was interrupted: the time limit of the episode was reached (limits.wall_time_s)"
                )
            # A task's own tool may be retried, but an interrupted resource is in an unknown state.
            raise (ToolError if is_own else DeadlineError)(
                f"tool {name!r} did not respond within {limit:g} s (limits.tool_time_s)"
            )
        except ToolError as error:
            return f"Error: {error}", {"error": str(error), "is_valid": False}
        except RewardKitError as error:
            logger.info("%s failed", name, exc_info=error)
            done.failure = Failure.from_exception(error)
            return f"Error: {error}", {"error": str(error)}  # not an invalid action: the agent is not at fault

    def _is_own(self, name: str) -> bool:
        is_own = self._registry is not None and name in self._registry.get_tools()
        return is_own and (self._selected is None or name in self._selected)

    async def _call_own(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        assert self._registry is not None
        with boundary(EnvironmentFailure, f"tool {name!r}"):
            return as_text(await self._registry.get_tool(name).call(arguments, self._resource)), {}

    async def _call_resource(
        self, name: str, arguments: Mapping[str, Any], done: Execution
    ) -> tuple[str, dict[str, Any]]:
        if name not in self._offered:
            await self.specs()  # an earlier call of the same action may have added tools
        if name not in self._offered:
            if (warnings := CURRENT_RUN_WARNINGS.get()) is not None:
                warnings.add_unknown_tool(name, self._offered)
            raise ToolError(f"unknown tool {name!r}{did_you_mean(name, self._offered)}")
        assert self._resource is not None
        with boundary(EnvironmentFailure, f"{type(self._resource).__name__} in {name!r}"):
            outcome = await self._resource.step(name, arguments)
            if not isinstance(outcome, StepOutcome):
                raise EnvironmentFailure(f"step({name!r}) returned {type(outcome).__name__}, not a StepOutcome")
            text, facts = as_text(outcome.observation), to_plain_data(dict(outcome.info))
            reward = None if outcome.reward is None else float(outcome.reward)
        if reward is not None:
            if not math.isfinite(reward):
                raise EnvironmentFailure(f"step({name!r}) returned the reward {reward}; a reward must be finite")
            done.reward = (done.reward or 0.0) + reward
        done.terminated, done.truncated = outcome.terminated, outcome.truncated
        if facts.pop("is_action_valid", True) is False:
            facts["is_valid"] = False
        return text, facts
