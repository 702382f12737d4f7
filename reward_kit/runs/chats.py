"""Conversion of episodes to chats for fine-tuning: `{"messages": […], "tools": […]}`.

The format is described in OpenAI's API reference ("The per-line training example of a fine-tuning input file for chat
models"). The roles are system, developer, user, assistant and tool. Tool calls must be answered before any other
message, and the last message must be from the assistant. An episode that cannot be written in this format is rejected,
and the reason is reported. Parts that cannot be written are omitted and reported.

A run does not store the definitions of its tools, so they are read from a file or from the current environment of the
task's first sample.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from reward_kit.agent.starts import GroupStart
from reward_kit.agent.tool_execution import Toolbox
from reward_kit.environments.servers import ServerPool
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.runs.redaction import without_hidden
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.tasks import LoadedTask, load_task

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SPEAKERS = ("system", "developer", "user", "assistant", "tool")
_KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id")
_PARTS = {"user": ("text", "image_url"), "assistant": ("text", "refusal")}


class Unfit(RewardKitError):
    """Raised if an episode cannot be written in the format. The message states the reason."""


class Chat(NamedTuple):
    """An episode as a chat."""

    messages: list[dict[str, Any]]
    called: frozenset[str]
    dropped: Counter[str]

    def line(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the line to write to the file, as ASCII text."""
        known = {tool["function"]["name"] for tool in tools}
        if unknown := sorted(self.called - known):
            raise Unfit(f"calls {unknown[0]!r}, which is not one of the tools")
        return json.dumps({"messages": self.messages, **({"tools": list(tools)} if tools else {})}) + "\n"


def make_chat(messages: Sequence[Any]) -> Chat:
    """Convert the stored messages of an episode to a chat."""
    stored = [from_json_value(message) for message in messages]
    while stored and stored[-1].get("role") != "assistant":
        stored.pop()
    if not stored:
        raise Unfit("has no assistant message")
    dropped: Counter[str] = Counter({"messages after the assistant's last message": len(messages) - len(stored)})
    chat = [_message(message, dropped) for message in stored]
    # Each call needs a result right after it, except calls in the last message, which are the training target.
    waiting: set[str] = set()
    for message in chat:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                raise Unfit("has a tool result without a call")
            waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            raise Unfit("has a tool call without a result")
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        waiting = set(ids)
        if len(waiting) < len(ids) or not all(isinstance(one, str) and one for one in ids):
            raise Unfit("has calls without unique ids")
    called = {call["function"]["name"] for message in chat for call in message.get("tool_calls") or ()}
    return Chat(chat, frozenset(called), +dropped)


def _message(message: Mapping[str, Any], dropped: Counter[str]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in _SPEAKERS:
        raise Unfit(f"has a message with the role {role!r}")
    if message.get("function_call"):
        raise Unfit("uses function_call, which the format no longer supports")
    for key, value in message.items():
        if key not in _KNOWN and value not in (None, [], {}):
            dropped[key] += 1
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if content is not None and not isinstance(content, str):
        for part in content:
            if part.get("type") not in _PARTS.get(role, ("text",)):
                raise Unfit(f"has content of type {part.get('type')!r} in a message with the role {role}")
        content = content or None
    if role == "tool":
        return {"role": role, "tool_call_id": message.get("tool_call_id"), "content": content or ""}
    if content is None and not calls:
        raise Unfit(f"has a message with the role {role} and no content")
    return {
        "role": role,
        **({"content": content} if content is not None else {}),
        **({"name": message["name"]} if message.get("name") else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments") or ""
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise Unfit(f"calls a tool named {name!r}, but the format does not allow that name")
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise Unfit(f"calls {name!r} with arguments that are not a JSON object")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


Tools = Sequence[Mapping[str, Any]]


# The tools of a run's task


class TaskTools(NamedTuple):
    """The tools of a task, and the names of the task files that have changed since the run."""

    tools: Tools
    changed: Sequence[str]


def read_tools(path: Path) -> Tools:
    """Read the tools from a JSON file: a list of `{"type": "function", "function": {"name": …}}`."""
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {path}: {error}") from None
    form = 'a list of {"type": "function", "function": {"name", "description", "parameters"}}'
    if not isinstance(tools, list):
        raise ConfigError(f"--tools {path} is not a list; the file must contain {form}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"--tools {path}: entry {index} is not a tool; the file must contain {form}")
    return tools


def load_task_tools(header: RunHeader) -> TaskTools:
    """Return the tools that the task of a run offers at the start of its first sample."""
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    if task_path is None:
        raise ConfigError(
            "the episodes call tools, but the run has no task that defines the tools; pass --tools FILE.json"
        )
    if "task" in (header.from_python or {}):
        raise ConfigError("this task was defined in Python, so its tools cannot be loaded; pass --tools FILE.json")
    try:
        overrides = without_hidden(header.overrides)
        task = load_task(Path(task_path), overrides, stored=overrides)
        tools = anyio.run(_offered, task, header.seed)
    except RewardKitError as error:
        raise ConfigError(f"cannot load the tools of {task_path}: {error}; pass --tools FILE.json") from error
    changed = [name for name, digest in header.digests.items() if task.digests.get(name) != digest]
    return TaskTools(tools, sorted(changed))


async def _offered(task: LoadedTask, seed: int) -> Tools:
    async with ServerPool(), GroupStart(task.definition, task.samples[0], seed) as group:
        start = await group.episode(0)
        try:
            return await Toolbox(task.definition, start.resource, task.tools).specs() or []
        finally:
            if start.resource is not None:
                await start.resource.close()
