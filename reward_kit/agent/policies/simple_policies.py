"""Policies without a model: random, scripted, expert, and a person at the terminal."""

from __future__ import annotations

import copy
import inspect
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import anyio.to_thread

from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    check_output,
    get_tool_calls,
)
from reward_kit.display_text import printable
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.environments.sampling import sample_arguments
from reward_kit.errors import PolicyError
from reward_kit.models import Message

Script = Sequence[Action] | Callable[[Sequence[Message], list[ToolSpec] | None], Any]
HELP = 'Type text to answer, "NAME {json}" or "NAME key=value …" to call a tool, /tools to list them, /end to stop.'
_NEXT_LINE = "\n  "  # indented so that a text cannot look like another message


class RandomPolicy(AgentPolicy):
    """Acts randomly, seeded by the episode's policy seed; a baseline for other agents.

    If the resource lists its admissible actions, each action that calls an offered tool is equally likely. Otherwise
    each tool is equally likely, with arguments drawn from its schema. Without tools, the policy answers with an empty
    text.
    """

    is_free = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._resource: ForkableResource | None = None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session with its own random generator."""
        session = RandomPolicy()
        session._random, session._resource = random.Random(context.seed), context.resource
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return a random action."""
        offered = {spec["function"]["name"] for spec in available_tools_specs or []}
        listed = await self._resource.admissible_actions() if self._resource else None
        if admissible := [action for action in listed or () if action["name"] in offered]:
            return PolicyOutput({"type": "tool_call", **self._random.choice(admissible)})
        if not available_tools_specs:
            return PolicyOutput({"type": "text", "content": ""}, "")
        tool = self._random.choice(available_tools_specs)["function"]
        arguments = sample_arguments(tool["parameters"], self._random)
        return PolicyOutput({"type": "tool_call", "name": tool["name"], "arguments": arguments})


class ScriptedPolicy(AgentPolicy):
    """Executes a list of actions or calls a function, for tests, demos and tutorials.

    Args:
        actions: the actions in order, after which the policy terminates; or a sync or async function of the
            conversation and the tools that returns an action, a 4-tuple or a `PolicyOutput`.

    Raises:
        PolicyError: an action in the list is invalid.
    """

    is_free = True

    def __init__(self, actions: Script) -> None:
        if not callable(actions):
            for action in actions:
                check_output(PolicyOutput(action))
        self._script = actions
        self._next: int | None = None  # outside of an episode, the list's first action is repeated

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session with its own position in the list."""
        if callable(self._script):
            return self
        session = copy.copy(self)
        session._next = 0
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the function's or the list's next action."""
        if callable(self._script):
            result = self._script(observation, available_tools_specs)
            result = await result if inspect.isawaitable(result) else result
            if isinstance(result, tuple):
                return result  # type: ignore[return-value]  # checked by the caller
        else:
            position = self._next or 0
            result = self._script[position] if position < len(self._script) else {"type": "terminate"}
            if self._next is not None:
                self._next += 1
        return PolicyOutput(result, result.get("content") if isinstance(result, dict) else None)


class ExpertPolicy(AgentPolicy):
    """Executes the resource's `expert_action`, and terminates when it returns no action; an upper bound for the task.

    Args:
        resource: the episode's resource, set by `open`.
    """

    is_free = True

    def __init__(self, resource: ForkableResource | None = None) -> None:
        self._resource = resource
        self._has_acted = False

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that uses the episode's resource; raise a PolicyError without a resource."""
        if context.resource is None:
            raise PolicyError("the expert policy needs a resource, but this task has none")
        return ExpertPolicy(context.resource)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the expert's action.

        Raises:
            PolicyError: the resource has no expert, or the expert calls a hidden tool.
        """
        action = await self._resource.expert_action() if self._resource else None
        if action is not None:
            output = check_output(PolicyOutput(dict(action), action.get("content")))
            offered = [spec["function"]["name"] for spec in available_tools_specs or []]
            hidden = [call["name"] for call in get_tool_calls(action) if call["name"] not in offered]
            if hidden:
                who = f"the expert of {type(self._resource).__name__}"
                fix = "add it to the task's tools, or choose another policy"
                raise PolicyError(f"{who} calls {hidden[0]!r}, which the task does not offer: {fix}")
            self._has_acted = True
            return output
        if self._has_acted:
            return PolicyOutput({"type": "terminate"})
        raise PolicyError(
            f"{type(self._resource).__name__} has no expert; define expert_action() or choose another policy"
        )


class HumanPolicy(AgentPolicy):
    """Shows new messages and reads one input line per action.

    Args:
        reader: the source of lines, standard input by default.
        writer: the output for the conversation, standard error by default.
    """

    is_free = True

    def __init__(self, reader: TextIO | None = None, writer: TextIO | None = None) -> None:
        self._reader, self._writer = reader or sys.stdin, writer or sys.stderr
        self._shown = 0

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that starts at the first message."""
        self._show(f"\n--- episode {context.rollout_id} ---\n{HELP}")
        return HumanPolicy(self._reader, self._writer)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the typed action; raise a PolicyError at the end of the input."""
        for message in observation[self._shown :]:
            self._show(f"[{message.role}] {message.text}".replace("\n", _NEXT_LINE))
        self._shown = len(observation) + 1
        functions = {tool["function"]["name"]: tool["function"] for tool in available_tools_specs or []}
        while True:
            self._show("> ", end="")
            read = await anyio.to_thread.run_sync(self._reader.readline, abandon_on_cancel=True)
            if not read:
                raise PolicyError("standard input ended")
            line = read.strip()
            name, _, rest = line.partition(" ")
            if line == "/tools":
                for tool in functions.values():
                    properties = json.dumps(tool["parameters"].get("properties", {}))
                    self._show(f"  {tool['name']}: {tool['description']} {properties}".replace("\n", _NEXT_LINE))
            elif line == "/end":
                return PolicyOutput({"type": "terminate"}, line)
            elif line and name not in functions:
                return PolicyOutput({"type": "text", "content": line}, line)
            elif line:
                try:
                    return PolicyOutput({"type": "tool_call", "name": name, "arguments": parse_arguments(rest)}, line)
                except ValueError as error:
                    self._show(f"  {error}")

    def _show(self, text: str, end: str = "\n") -> None:
        self._writer.write(printable(text) + end)
        self._writer.flush()


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse `{json}` or `key=value …` arguments, with JSON values if possible; raise a ValueError otherwise."""
    text = text.strip()
    if text.startswith("{"):
        return dict(json.loads(text))
    arguments: dict[str, Any] = {}
    for word in text.split():
        key, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not key=value; write JSON if a value contains spaces")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments
