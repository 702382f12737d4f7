"""Actions of a policy as assistant messages, and assistant messages as actions.

The two are inverses: `assistant_message(parse_action(message), step)` normalizes the spelling of `message`, and is
idempotent. So a conversation has the same actions whether it is live or read from a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from reward_kit.agent.policy_interface import Action, get_tool_calls
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import type_name
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.safe_input import parse_json

MAX_NESTING = 100
"""Nesting levels of a call's arguments; deeper ones are a model's mistake, and could not be stored."""


class RawToolCall(NamedTuple):
    """A call as the model wrote it: `arguments` is text that should be a JSON object."""

    name: str
    arguments: str
    id: str = ""


def parse_action(message: Message) -> Action:
    """Return an assistant message as an action. Absent parts are left out; content parts are joined to text."""
    calls = [RawToolCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ()]
    return action_from_parts(message.text, calls, message.reasoning_content)


def action_from_parts(text: str, raw_calls: Sequence[RawToolCall], reasoning: str | None) -> Action:
    """Return the action of an assistant message with these parts."""
    calls: list[dict[str, Any]] = []
    for call in raw_calls:
        try:
            # Some models write nothing at all for a tool without parameters.
            arguments = parse_json(call.arguments) if call.arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict) and not _is_too_deep(call.arguments, arguments):
            calls.append({"name": call.name, "arguments": arguments, "id": call.id})
        else:  # kept verbatim; the worker answers with a tool error
            calls.append({"name": call.name, "arguments_text": call.arguments, "id": call.id})
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


def _is_too_deep(text: str, value: Any) -> bool:
    if text.count("{") + text.count("[") <= MAX_NESTING:
        return False
    level = [value]
    for _ in range(MAX_NESTING):
        inside = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inside for item in items]
    return any(isinstance(item, dict | list) for item in level)


def assistant_message(action: Action, step: int) -> Message:
    """Return the message that an action adds to the conversation."""
    calls = []
    for call_id, call in zip(call_ids(action, step), get_tool_calls(action), strict=True):
        is_text = "arguments_text" in call
        arguments = str(call["arguments_text"]) if is_text else json_text(call.get("arguments") or {})
        calls.append(ToolCall(id=call_id, function=FunctionCall(name=call["name"], arguments=arguments)))
    message = Message(role="assistant", content=action.get("content") or ("" if not calls else None))
    if calls:
        message.tool_calls = calls
    if action.get("reasoning_content"):
        message.reasoning_content = action["reasoning_content"]
    return message


def call_ids(action: Action, step: int) -> list[str]:
    """Return the ids of an action's calls: their own, or one from step and position, equal in equal runs.

    A repeated id is replaced too, since answers are matched by id and endpoints reject duplicates.
    """
    ids: list[str] = []
    for position, call in enumerate(get_tool_calls(action)):
        call_id = str(call.get("id") or "")
        ids.append(call_id if call_id and call_id not in ids else f"call_{step}_{position}")
    return ids


def episode_from_messages(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    """Return a conversation as a terminated episode without rewards; each assistant message is a step.

    The messages before the first action are its first observation, those after an action the next one. Its
    `custom_data` is left to the caller.
    """
    episode = SingleAgentEpisode(rollout_id)
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    episode.add_messages(messages)
    episode.assistant_turns.extend(turns)
    episode.add_env_reset("\n".join(message.text for message in messages[: turns[0] if turns else len(messages)]))
    for t, turn in enumerate(turns):
        observation = "\n".join(message.text for message in episode.answers_to(t))
        episode.add_env_step(observation, parse_action(messages[turn]), None)
    episode.is_terminated = True
    return episode


def as_text(value: Any) -> str:
    """Return a tool's result as text for the agent: strings unchanged, None as "", everything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_text(value)


def json_text(value: Any) -> str:
    """Return `value` as JSON text, NumPy values, pydantic models and dataclasses included; else raise a TypeError."""
    return _TEXT_ENCODER.encode(value)


def to_plain_data(value: Any) -> Any:
    """Return `value` as the JSON data that is stored; a value without a JSON form raises a TypeError."""
    return json.loads(_STORED_ENCODER.encode(value))


def _json_default(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type_name(value)} has no JSON form; return text or plain data")


# Made once: `json.dumps` with options makes one per call.
_TEXT_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_json_default)
_STORED_ENCODER = json.JSONEncoder(default=_json_default)
