"""Policies without a model."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import anyio.to_thread

from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput, check_output
from reward_kit.environments.base import ForkableResource, ToolSpec
from reward_kit.environments.sampling import sample_arguments
from reward_kit.errors import PolicyError
from reward_kit.models import Message
from reward_kit.shown_text import printable


class RandomPolicy(AgentPolicy):
    """Acts at random, from the episode's policy seed.

    Where the resource lists its admissible actions, each is equally likely; otherwise each tool is, with arguments
    drawn from its schema. Without tools it answers with an empty text.
    """

    is_free = True

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._resource: ForkableResource | None = None

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session with a random generator of its own."""
        session = RandomPolicy()
        session._random, session._resource = random.Random(context.seed), context.resource
        return session

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """A random action."""
        admissible = await self._resource.admissible_actions() if self._resource else None
        if admissible:
            return PolicyOutput({"type": "tool_call", **self._random.choice(list(admissible))})
        if not available_tools_specs:
            return PolicyOutput({"type": "text", "content": ""}, "")
        tool = self._random.choice(available_tools_specs)["function"]
        arguments = sample_arguments(tool["parameters"], self._random)
        return PolicyOutput({"type": "tool_call", "name": tool["name"], "arguments": arguments})


Script = Sequence[Action] | Callable[[Sequence[Message], list[ToolSpec] | None], Any]


class ScriptedPolicy(AgentPolicy):
    """Plays a script.

    Args:
        actions: the actions in order, after which the policy terminates; or a function, sync or async, of the
            conversation and the tools that returns an action, a 4-tuple or a `PolicyOutput`.

    Raises:
        PolicyError: an action of the list is none.
    """

    is_free = True

    def __init__(self, actions: Script) -> None:
        if not callable(actions):
            for action in actions:
                check_output(PolicyOutput(action))
        self._script = actions

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session with a cursor of its own."""
        return self if callable(self._script) else _Playback(self._script)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The function's action; for a list, its first."""
        if not callable(self._script):
            return await _Playback(self._script).get_action(observation)
        result = self._script(observation, available_tools_specs)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, tuple) else _output(result)  # type: ignore[return-value]


class _Playback(AgentPolicy):
    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions, self._next = actions, 0

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        if self._next >= len(self._actions):
            return _output({"type": "terminate"})
        action = self._actions[self._next]
        self._next += 1
        return _output(action)


def _output(action: Action) -> PolicyOutput:
    content = action.get("content") if isinstance(action, dict) else None
    return PolicyOutput(action, content, None, None)


class ExpertPolicy(AgentPolicy):
    """Takes the resource's `expert_action`, and terminates where it has none left.

    Args:
        resource: the episode's world; `open` fills it in.
    """

    is_free = True

    def __init__(self, resource: ForkableResource | None = None) -> None:
        self._resource = resource
        self._has_acted = False

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session that asks the episode's own world.

        Raises:
            PolicyError: the task has no resource.
        """
        if context.resource is None:
            raise PolicyError("the expert policy asks the resource, and this task has none")
        return ExpertPolicy(context.resource)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The expert's action.

        Raises:
            PolicyError: the resource has no expert.
        """
        action = await self._resource.expert_action() if self._resource else None
        if action is not None:
            self._has_acted = True
            return PolicyOutput(dict(action), action.get("content"))
        if self._has_acted:
            return PolicyOutput({"type": "terminate"})
        raise PolicyError(f"{type(self._resource).__name__} has no expert; define expert_action() or choose a policy")


HELP = 'Type text to answer, "NAME {json}" or "NAME key=value …" to call a tool, /tools to list them, /end to stop.'

_NEXT_LINE = "\n  "  # set in, so that a text cannot look like another message


class HumanPolicy(AgentPolicy):
    """Shows what is new and reads one line for each action.

    Args:
        reader: where lines come from, standard input by default.
        writer: where the conversation is shown, standard error by default.
    """

    is_free = True

    def __init__(self, reader: TextIO | None = None, writer: TextIO | None = None) -> None:
        self._reader, self._writer = reader or sys.stdin, writer or sys.stderr
        self._shown = 0

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """A session that begins at the first message."""
        self._show(f"\n--- episode {context.rollout_id} ---\n{HELP}")
        return HumanPolicy(self._reader, self._writer)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The action that the person types.

        Raises:
            PolicyError: standard input has ended.
        """
        for message in observation[self._shown :]:
            self._show(f"[{message.role}] {message.text}".replace("\n", _NEXT_LINE))
        self._shown = len(observation) + 1
        while True:
            self._show("> ", end="")
            line = await anyio.to_thread.run_sync(self._reader.readline, abandon_on_cancel=True)
            if not line:
                raise PolicyError("standard input ended")
            action = self._parse(line.strip(), available_tools_specs or [])
            if action is not None:
                return PolicyOutput(action, line.strip())

    def _parse(self, line: str, tools: list[ToolSpec]) -> Action | None:
        names = {tool["function"]["name"]: tool["function"] for tool in tools}
        if line == "/tools":
            for name, tool in names.items():
                told = f"  {name}: {tool['description']} {json.dumps(tool['parameters'].get('properties', {}))}"
                self._show(told.replace("\n", _NEXT_LINE))
            return None
        if not line:
            return None
        if line == "/end":
            return {"type": "terminate"}
        name, _, rest = line.partition(" ")
        if name not in names:
            return {"type": "text", "content": line}
        try:
            return {"type": "tool_call", "name": name, "arguments": parse_arguments(rest)}
        except ValueError as error:
            self._show(f"  {error}")
            return None

    def _show(self, text: str, end: str = "\n") -> None:
        self._writer.write(printable(text) + end)
        self._writer.flush()


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments from `{json}` or `key=value …`; values are JSON where they can be, else text.

    Raises:
        ValueError: the text is neither; the message says how to write it.
    """
    text = text.strip()
    if text.startswith("{"):
        parsed: dict[str, Any] = json.loads(text)
        return parsed
    arguments = {}
    for word in text.split():
        key, separator, value = word.partition("=")
        if not separator:
            raise ValueError(f"{word!r} is not key=value; write JSON where values have spaces")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments
