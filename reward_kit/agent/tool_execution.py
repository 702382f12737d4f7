"""Execute the tool calls of an action."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from reward_kit import errors
from reward_kit.agent.actions import as_text, call_ids, plain
from reward_kit.agent.policy_interface import Action, tool_calls_of
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
    kind_of,
    safe_str,
    user_traceback,
)
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.shown_text import counted, shown

NOT_CARRIED_OUT = "Not carried out: the episode is over."

logger = logging.getLogger("reward_kit.agent")


@dataclass(slots=True)
class Execution:
    """What came of one action.

    Attributes:
        messages: the tools' answers, or a nudge; they follow the assistant message.
        reward: the sum of the environment's rewards, None where it gave none.
        terminated: the environment ended the task.
        truncated: the environment stopped for an outside reason.
        wants_end: the agent called the task's terminate tool.
        info: JSON-safe facts for the step.
        is_interrupted: the resource was cut off in a call by the episode's time limit; its state is unknown.
        failure: what broke, where something did.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    wants_end: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    is_interrupted: bool = False
    failure: Failure | None = None

    @property
    def is_over(self) -> bool:
        """No further call of this action is carried out."""
        ended = self.terminated or self.truncated or self.wants_end
        return ended or self.is_interrupted or self.failure is not None


class Toolbox:
    """Everything an agent can call in one episode: the resource's tools, the task's own, and the terminate tool.

    Args:
        task: its limits and its terminate tool.
        resource: the episode's world.
        registry: the task's own tools.
    """

    def __init__(
        self, task: TaskDefinitionModel, resource: ForkableResource | None, registry: ToolRegistry | None
    ) -> None:
        self._resource, self._registry = resource, registry
        self._terminate_tool = task.terminate_tool
        self._tool_time_s, self._output_chars = task.limits.tool_time_s, task.limits.tool_output_chars
        self._own = list(registry.get_openai_tools()) if registry else []
        if self._terminate_tool:
            self._own.append(terminate_spec(self._terminate_tool))
        self._offered: list[str] = []

    async def specs(self) -> list[ToolSpec] | None:
        """The tools that can be called now, None where there are none.

        Raises:
            ConfigError: two tools have one name.
        """
        specs = list(self._own)
        with boundary(EnvironmentFailure, "get_tools_spec"):
            if self._resource is not None:
                specs = [*await self._resource.get_tools_spec(), *specs]
            names = [spec["function"]["name"] for spec in specs]
            is_ambiguous = len(set(names)) < len(names)
        if is_ambiguous:
            twice = {name for name in names if names.count(name) > 1}
            raise ConfigError(f"two tools are called {', '.join(sorted(twice))}; rename one of them")
        self._offered = names
        return specs or None

    async def execute(
        self, action: Action, step: int, seconds_left: float | None, done: Execution | None = None
    ) -> Execution:
        """Make the calls of an action, one after another; what comes of them is added to `done`, where it is given.

        A call that fails answers the agent with the error. A resource that breaks, or does not answer in time, ends the
        episode: its state is no longer known.
        """
        done = Execution() if done is None else done
        calls, ids = tool_calls_of(action), call_ids(action, step)
        began = time.perf_counter()
        for position, call in enumerate(calls):
            left = None if seconds_left is None else max(seconds_left - (time.perf_counter() - began), 0.0)
            text, facts = await self._call(call, done, left)
            shown, cut = cut_text(text, self._output_chars)
            name = call["name"]
            done.messages.append(Message(role="tool", name=name, tool_call_id=ids[position], content=shown))
            done.info.setdefault("tools", []).append({**facts, "name": name, **({"cut": True} if cut else {})})
        if calls:
            done.info["is_action_valid"] = all(tool.get("is_valid", True) for tool in done.info["tools"])
        return done

    async def _call(
        self, call: Mapping[str, Any], done: Execution, seconds_left: float | None
    ) -> tuple[str, dict[str, Any]]:
        """The text that answers one call, and facts about it."""
        if done.is_over:
            return NOT_CARRIED_OUT, {"skipped": True}
        try:
            return await self._carry_out(call, done, seconds_left)
        except ToolError as error:
            if error.__cause__ is not None:
                note_failed(call["name"], error)
                logger.info("tool %s failed: %s", call["name"], user_traceback(_origin_of(error)) or error)
            return f"Error: {error}", {"error": str(error), "is_valid": False}
        except RewardKitError as error:
            logger.info("%s failed", call["name"], exc_info=error)
            done.failure = Failure.from_exception(error)
            return f"Error: {error}", {"error": str(error), "is_valid": False}

    async def _carry_out(
        self, call: Mapping[str, Any], done: Execution, seconds_left: float | None
    ) -> tuple[str, dict[str, Any]]:
        name, arguments = call["name"], _arguments_of(call)
        if name == self._terminate_tool:
            done.wants_end = True
            return "The episode ends.", {}
        is_own = self._registry is not None and name in self._registry.get_tools()
        if not is_own and self._resource is not None and self._resource.never_waits:
            return await self._call_resource(name, arguments, done)
        limit, left = self._tool_time_s, seconds_left
        allowed = [seconds for seconds in (limit, left) if seconds is not None]
        with anyio.move_on_after(min(allowed) if allowed else None):
            if is_own:
                return await self._call_own(name, arguments)
            return await self._call_resource(name, arguments, done)
        if left is not None and (limit is None or left < limit):
            done.is_interrupted = not is_own
            raise ToolError(f"tool {name!r} was cut off: the episode's time is up (limits.wall_time_s)")
        # The task's own tool may be tried again; a resource that was interrupted is in an unknown state.
        raise (ToolError if is_own else DeadlineError)(
            f"tool {name!r} did not answer within {limit:g} s (limits.tool_time_s)"
        )

    async def _refuse_unknown(self, name: str) -> None:
        """Offer the nearest of all tools, the task's own included, which a resource does not know of."""
        if name not in self._offered:
            await self.specs()  # an earlier call of the same action may have brought new tools
        if name not in self._offered:
            note_missing(name, self._offered)
            raise ToolError(f"unknown tool {name!r}{did_you_mean(name, self._offered)}")

    async def _call_own(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        assert self._registry is not None
        try:
            with boundary(ToolError, f"tool {name!r}"):
                return as_text(await self._registry.get_tool(name).call(arguments, self._resource)), {}
        except EnvironmentFailure:
            raise
        except RewardKitError as error:
            raise ToolError(str(error)) from error

    async def _call_resource(
        self, name: str, arguments: Mapping[str, Any], done: Execution
    ) -> tuple[str, dict[str, Any]]:
        await self._refuse_unknown(name)
        assert self._resource is not None
        with boundary(EnvironmentFailure, f"{type(self._resource).__name__} in {name!r}"):
            outcome = await self._resource.step(name, arguments)
            if not isinstance(outcome, StepOutcome):
                raise EnvironmentFailure(f"step({name!r}) returned {type(outcome).__name__}, not a StepOutcome")
            text, facts = as_text(outcome.observation), plain(dict(outcome.info))
            reward = None if outcome.reward is None else float(outcome.reward)
        if reward is not None:
            if not math.isfinite(reward):
                raise EnvironmentFailure(f"step({name!r}) gave the reward {reward}; a reward is finite")
            done.reward = (done.reward or 0.0) + reward
        done.terminated, done.truncated = outcome.terminated, outcome.truncated
        if facts.pop("is_action_valid", True) is False:
            facts["is_valid"] = False
        return text, facts


def terminate_spec(name: str) -> ToolSpec:
    """The tool with which an agent ends its episode."""
    parameters = {
        "type": "object",
        "properties": {"message": {"type": "string", "description": "a closing remark"}},
        "additionalProperties": False,
    }
    return tool_spec(name, "End the episode. Call this when the task is done.", parameters)


def answers_of(action: Action) -> list[Message]:
    """The answers to an action's calls that the policy brought along, because it made the calls itself."""
    return [Message.model_validate(message) for message in action["results"]]


def _arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "arguments_text" in call:
        shown = str(call["arguments_text"])[:200]
        raise ToolError(f"the arguments of {call['name']!r} are not a JSON object: {shown}")
    arguments = call.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments of {call['name']!r} are {kind_of(arguments)}, not an object")
    return dict(arguments)


def cut_text(text: str, limit: int) -> tuple[str, bool]:
    """`text`, or its two ends with a visible note between them where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text, False
    half = limit // 2
    note = f"\n[… {len(text) - 2 * half:,} of {len(text):,} characters left out …]\n"
    return f"{text[:half]}{note}{text[len(text) - half :]}", True


def _origin_of(error: BaseException) -> BaseException:
    """What was raised first; what it was then raised as says the same again."""
    seen = {id(error)}  # `raise error from error` makes a ring
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


_PACKAGE = f"{Path(errors.__file__).parent}{os.sep}"

_SLIPS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
)

"""What Python itself raises where code is wrong; not ValueError, OSError and RuntimeError, with which tools refuse."""

_MOST_KINDS = 200  # a model may invent names for ever

_MOST_NAMES, _MOST_OFFERED, _LONGEST = 3, 8, 200


class ToolTroubles:
    """Counts what went wrong, by tool, exception and place, and by the names of tools that are not there."""

    def __init__(self) -> None:
        self._raised: Counter[tuple[str, str, str]] = Counter()
        self._messages: dict[tuple[str, str, str], str] = {}
        self._missing: Counter[str] = Counter()
        self._missing_calls = 0
        self._offered: Sequence[str] = ()

    def failed(self, tool: str, error: RewardKitError) -> None:
        """Count a call that failed of `error`, where that came from a slip in the tool's own code."""
        slip = _slip_behind(error)
        if slip is None:
            return
        key = (tool, type(slip).__name__, _place_of(slip))
        if key in self._messages or len(self._messages) < _MOST_KINDS:
            self._messages.setdefault(key, safe_str(slip))
            self._raised[key] += 1

    def named_none(self, name: str, offered: Sequence[str]) -> None:
        """Count a call of a tool that is not among those that are offered."""
        self._missing_calls += 1
        self._offered = offered
        if name in self._missing or len(self._missing) < _MOST_KINDS:
            self._missing[name] += 1

    def told(self, log: Path, most: int = 3) -> list[str]:
        """A line for each of the commonest slips, and one for all tools that are not there.

        Args:
            log: where the tracebacks are.
            most: so many slips are told.
        """
        lines = []
        for key, times in self._raised.most_common(most):
            tool, kind, place = key
            message = " ".join(self._messages[key].split())
            what = f"{shown(tool, _LONGEST)} raised {kind}{f': {shown(message, _LONGEST)}' if message else ''}"
            lines.append(f"tool {what}{f' ({place})' if place else ''}, {counted(times, 'call')}; more in {log}")
        return [*lines, *([self._told_of_missing()] if self._missing_calls else [])]

    def _told_of_missing(self) -> str:
        names = [repr(shown(name, 60)) for name, _ in self._missing.most_common(_MOST_NAMES)]
        more = len(self._missing) - len(names)
        offered = ", ".join([*self._offered[:_MOST_OFFERED], *(["…"] if len(self._offered) > _MOST_OFFERED else [])])
        named = f"{', '.join(names)}{f' and {more:,} more' if more else ''}"
        there = f"there are: {offered}" if offered else "there is none"
        return f"{counted(self._missing_calls, 'call')} named a tool that is not there: {named} ({there})"


CURRENT_TROUBLES: ContextVar[ToolTroubles | None] = ContextVar("CURRENT_TROUBLES", default=None)

"""Where the episodes of this run count; None where nobody asks."""


def note_failed(tool: str, error: RewardKitError) -> None:
    """Count a failed call, where somebody asks."""
    if (troubles := CURRENT_TROUBLES.get()) is not None:
        troubles.failed(tool, error)


def note_missing(name: str, offered: Sequence[str]) -> None:
    """Count a call of a tool that is not there, where somebody asks."""
    if (troubles := CURRENT_TROUBLES.get()) is not None:
        troubles.named_none(name, offered)


def _slip_behind(error: BaseException) -> BaseException | None:
    """The error of Python that one of ours was made of; None where a tool raised ours itself, or another on purpose."""
    cause: BaseException | None = error
    while isinstance(cause, RewardKitError):
        if not _is_raised_here(cause):  # by a tool's own code, and so on purpose, whatever was behind it
            return None
        cause = cause.__cause__
    # An exception of one's own that derives from these says something on purpose.
    return cause if isinstance(cause, _SLIPS) and type(cause).__module__ == "builtins" else None


def _is_raised_here(error: BaseException) -> bool:
    """Whether the line that raised it is one of this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _place_of(error: BaseException) -> str:
    """`file.py:31`, the innermost line of the tool's own code; "" where none is in the traceback."""
    lines = user_traceback(error, max_lines=2).splitlines()
    return Path(lines[1].strip().rpartition(" in ")[0]).name if len(lines) > 1 else ""
