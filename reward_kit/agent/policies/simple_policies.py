"""Policies without a model: a random policy, a script, an expert, and a person at the terminal."""

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
    PastTurn,
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
    """A policy that acts randomly, as a baseline for other agents. It uses the episode's policy seed.

    If the resource lists its admissible actions, all admissible actions that call an available tool are equally likely.
    Otherwise, all tools are equally likely, and the arguments are drawn according to the tool's schema. If there are no
    tools, the policy answers with empty text.
    """

    is_free = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._resource: ForkableResource | None = None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session with a separate random generator."""
        session = RandomPolicy()
        session._random, session._resource = random.Random(context.seed), context.resource
        return session

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Do nothing: each action is random."""

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
    """A policy that executes a list of actions or calls a function, for tests, demos and tutorials.

    Args:
        actions: the actions in order. After the last one, the policy terminates. Alternatively, a synchronous or
            asynchronous function that receives the conversation and the tools, and returns an action, a 4-tuple or a
            `PolicyOutput`.

    Raises:
        PolicyError: If an action in the list is invalid.
    """

    is_free = True

    def __init__(self, actions: Script) -> None:
        if not callable(actions):
            for action in actions:
                check_output(PolicyOutput(action))
        self._script = actions
        self._next: int | None = None  # outside of an episode, the first action in the list is repeated

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that starts at the beginning of the list."""
        if callable(self._script):
            return self
        session = copy.copy(self)
        session._next = 0
        return session

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Skip the actions in the list that belong to earlier turns."""
        self._next = len(turns)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the next action in the list, or the action that the function returns."""
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
    """A policy that executes the resource's `expert_action`. Its score is an upper bound for the task.

    It terminates when the resource returns no action.

    Args:
        resource: the resource of the episode, which `open` sets.
    """

    is_free = True

    def __init__(self, resource: ForkableResource | None = None) -> None:
        self._resource = resource
        self._has_acted = False

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that uses the resource of the episode.

        Raises:
            PolicyError: If the episode has no resource.
        """
        if context.resource is None:
            raise PolicyError("the expert policy needs a resource, but this task has none")
        return ExpertPolicy(context.resource)

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Record that the episode has begun. If the expert then has no action, the episode ends."""
        self._has_acted = bool(turns)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the action of the expert.

        Raises:
            PolicyError: If the resource has no expert, or if the expert calls a tool that the task does not offer.
        """
        action = await self._resource.expert_action() if self._resource else None
        if action is not None:
            output = check_output(PolicyOutput(dict(action), action.get("content")))
            offered = [spec["function"]["name"] for spec in available_tools_specs or []]
            hidden = [call["name"] for call in get_tool_calls(action) if call["name"] not in offered]
            if hidden:
                who = f"the expert of {type(self._resource).__name__}"
                fix = "add it to the task's tools, or choose a different policy"
                raise PolicyError(f"{who} calls {hidden[0]!r}, which the task does not offer: {fix}")
            self._has_acted = True
            return output
        if self._has_acted:
            return PolicyOutput({"type": "terminate"})
        raise PolicyError(
            f"{type(self._resource).__name__} has no expert; define expert_action() or choose a different policy"
        )


class HumanPolicy(AgentPolicy):
    """A person at the terminal. The policy shows the new messages and reads one line for each action.

    Args:
        reader: the source of the lines. The default is standard input.
        writer: the stream to which the conversation is written. The default is standard error.
    """

    is_free = True

    def __init__(self, reader: TextIO | None = None, writer: TextIO | None = None) -> None:
        self._reader, self._writer = reader or sys.stdin, writer or sys.stderr
        self._shown = 0

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session that shows the conversation from its first message."""
        self._show(f"\n--- episode {context.rollout_id} ---\n{HELP}")
        return HumanPolicy(self._reader, self._writer)

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Do nothing: the whole conversation is shown before the next action."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return the action that the person typed.

        Raises:
            PolicyError: If the input has ended.
        """
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
    """Parse arguments in the form `{json}` or `key=value …`. The values are parsed as JSON if possible.

    Raises:
        ValueError: If the text does not have either form.
    """
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
