"""`HumanPolicy`: a person at the terminal plays the agent; the quickest way to feel what a task asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import anyio.to_thread

from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.display_text import printable
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import PolicyError
from reward_kit.models import Message

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
