"""Messages as verifiers' traces hold them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.models import FunctionCall, Message, ToolCall

_ROLES = {"developer": "system", "function": "tool"}
_PARTS = ("text", "image_url")


def to_verifiers(message: Message) -> dict[str, Any]:
    """The message in the form of verifiers, which has no room for all that ours may hold; see `is_same`."""
    role = _ROLES.get(message.role, message.role)
    if role != "assistant":
        parts = message.content if isinstance(message.content, list) else None
        kept = [part for part in parts or () if part.get("type") in _PARTS]
        shown: dict[str, Any] = {"role": role, "content": (message.content or "") if parts is None else kept}
        if role == "tool":
            shown |= {"tool_call_id": message.tool_call_id or "", "name": message.name}
        return shown
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    text = message.content if message.content is None else message.text
    return {
        "role": role,
        "content": text,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
    }


def from_verifiers(message: Mapping[str, Any]) -> Message:
    """The message of a trace's node."""
    content = message.get("content")
    if isinstance(content, list):
        content = [dict(part) for part in content]
    calls = [
        ToolCall(id=call["id"], function=FunctionCall(name=call["name"], arguments=call["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return Message(
        role=message["role"],
        content=content,
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
        tool_calls=calls or None,
        reasoning_content=message.get("reasoning_content"),
    )


def is_same(message: Message) -> bool:
    """Whether verifiers' form of the message holds all of it."""
    return from_verifiers(to_verifiers(message)) == message


def is_restated(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether one node's message says once more what another's does; reasoning is what a rewritten context drops."""
    return _said(first) == _said(second)


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = tuple((call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls") or ())
    return message["role"], message.get("content") or "", message.get("tool_call_id") or None, calls
