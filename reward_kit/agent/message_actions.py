"""Conversion of assistant messages to actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from reward_kit.models import PROVIDER_ITEMS, Message
from reward_kit.safe_input import parse_json

MAX_NESTING = 100
"""Maximum nesting depth of a call's arguments. Deeper arguments are a model error and could not be stored."""


class RawToolCall(NamedTuple):
    """A tool call as written by the model. The arguments are a string that should contain a JSON object."""

    name: str
    arguments: str
    id: str = ""


def parse_action(message: Message) -> dict[str, Any]:
    """Convert an assistant message to an action.

    The action contains only keys for parts that the message has. If the content has multiple parts, their texts are
    joined.
    """
    calls = [RawToolCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()]
    action = action_from_parts(message.text, calls, message.reasoning_content)
    if items := (message.model_extra or {}).get(PROVIDER_ITEMS):
        action[PROVIDER_ITEMS] = items
    return action


def action_from_parts(text: str, raw_calls: Sequence[RawToolCall], reasoning: str | None) -> dict[str, Any]:
    """Return the action for an assistant message with the given text, calls and reasoning."""
    calls: list[dict[str, Any]] = []
    for call in raw_calls:
        try:
            # Some models send empty text for a tool without parameters.
            arguments = parse_json(call.arguments) if call.arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict) and not _is_too_deep(call.arguments, arguments):
            calls.append({"name": call.name, "arguments": arguments, "id": call.id})
        else:  # stored verbatim; the worker answers with a tool error
            calls.append({"name": call.name, "arguments_text": call.arguments, "id": call.id})
    action: dict[str, Any]
    if not calls:
        action = {"type": "text", "content": text}
    elif len(calls) == 1 and not text:
        action = {"type": "tool_call", **calls[0]}
    else:
        action = {"type": "tool_calls", "calls": calls}
        if text:
            action["content"] = text
    if reasoning:
        action["reasoning_content"] = reasoning
    return action


def _is_too_deep(text: str, value: Any) -> bool:
    if text.count("{") + text.count("[") <= MAX_NESTING:
        return False
    level = [value]
    for _ in range(MAX_NESTING):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
    return any(isinstance(item, dict | list) for item in level)
