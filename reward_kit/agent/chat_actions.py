"""An assistant message as a policy's action, and an action as the one message it becomes: each the other's inverse.

`assistant_message(action_of(message), step)` says what `message` said, in one spelling, and saying it again changes
nothing. So a conversation has the same actions whether its model was asked just now or it comes from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.agent.plain_json import json_text
from reward_kit.agent.policy_interface import Action, tool_calls_of
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.safe_input import read_strictly

MAX_NESTING = 100
"""Levels of a call's arguments. What is deeper is no call that somebody meant, and could not be stored."""


class WrittenCall(NamedTuple):
    """A call as the model wrote it: `arguments` is a text that should be a JSON object."""

    name: str
    arguments: str
    id: str = ""


def action_of(message: Message) -> Action:
    """The action that an assistant message is. What it does not say is left out; parts of a content are their text."""
    calls = [WrittenCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()]
    return action_written(message.text, calls, message.reasoning_content)


def action_written(text: str, written: Sequence[WrittenCall], reasoning: str | None) -> Action:
    """The action of an assistant message that says these things."""
    calls = [_call(call) for call in written]
    action: Action
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


def assistant_message(action: Action, step: int) -> Message:
    """The one message an action becomes in the conversation."""
    calls = [
        ToolCall(
            id=call_id,
            function=FunctionCall(name=call["name"], arguments=_arguments_text(call)),
        )
        for call_id, call in zip(call_ids(action, step), tool_calls_of(action), strict=True)
    ]
    message = Message(role="assistant", content=action.get("content") or ("" if not calls else None))
    if calls:
        message.tool_calls = calls
    if action.get("reasoning_content"):
        message.reasoning_content = action["reasoning_content"]
    return message


def call_ids(action: Action, step: int) -> list[str]:
    """The ids of an action's calls: their own, or one made from the place in the episode.

    A made one does not differ between equal runs. It also stands in for an id that an earlier call of the same action
    has: answers are told apart by it, and endpoints refuse a conversation in which they are not.
    """
    ids: list[str] = []
    for position, call in enumerate(tool_calls_of(action)):
        own = str(call.get("id") or "")
        ids.append(own if own and own not in ids else f"call_{step}_{position}")
    return ids


def _call(call: WrittenCall) -> dict[str, Any]:
    """One call; arguments that are no JSON object go along verbatim, for the worker to send back as a tool error."""
    text = call.arguments
    try:
        # Some models write nothing at all for a tool without parameters.
        arguments = read_strictly(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    # Most texts have too few brackets to be worth a look at their depth.
    is_suspect = text.count("{") + text.count("[") > MAX_NESTING
    if not isinstance(arguments, dict) or (is_suspect and _is_deeper(arguments, MAX_NESTING)):
        return {"name": call.name, "arguments_text": text, "id": call.id}
    return {"name": call.name, "arguments": arguments, "id": call.id}


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
    return any(isinstance(item, dict | list) for item in level)


def _arguments_text(call: Mapping[str, Any]) -> str:
    if "arguments_text" in call:
        return str(call["arguments_text"])
    return json_text(call.get("arguments") or {})
