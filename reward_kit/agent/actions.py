"""Conversion between policy actions and assistant messages.

The two conversions are inverses up to normalization: `assistant_message(parse_action(message), step)` converts
`message` to its normal form, and applying it again changes nothing. A conversation therefore has the same actions
whether it is live or was read from a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel

from reward_kit.agent.message_actions import (
    parse_action,
)
from reward_kit.agent.policy_interface import Action, get_tool_calls
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import type_name
from reward_kit.models import PROVIDER_ITEMS, FunctionCall, Message, ToolCall


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
    if PROVIDER_ITEMS in action:
        message = message.model_copy(update={PROVIDER_ITEMS: action[PROVIDER_ITEMS]})
    return message


def call_ids(action: Action, step: int) -> list[str]:
    """Return the ids of an action's tool calls. A call without an id is assigned a deterministic id.

    The new id is derived from the step and the position of the call. A duplicate id is also replaced, because results
    are matched to calls by their ids, and endpoints reject duplicate ids.
    """
    ids: list[str] = []
    for position, call in enumerate(get_tool_calls(action)):
        call_id = str(call.get("id") or "")
        ids.append(call_id if call_id and call_id not in ids else f"call_{step}_{position}")
    return ids


def episode_from_messages(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    """Convert a conversation to a terminated episode without rewards. Each assistant message becomes a step.

    The messages before the first action become the first observation. The messages that follow an action become the
    next observation. The caller must set `custom_data`.
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
    """Return a tool's result as text for the agent.

    A string is returned unchanged, None becomes "", and any other value becomes JSON.
    """
    if isinstance(value, str):
        return value
    return "" if value is None else json_text(value)


def json_text(value: Any) -> str:
    """Return a value as JSON text. NumPy, pydantic and dataclass values are converted.

    Raises:
        TypeError: If a value cannot be represented in JSON.
    """
    if type(value) is dict and all(type(key) is str and type(item) is str for key, item in value.items()):
        # Most arguments. The encoder would take five times as long.
        return "{" + ", ".join(f"{_quoted(key)}: {_quoted(item)}" for key, item in value.items()) + "}"
    return _TEXT_ENCODER.encode(value)


def to_plain_data(value: Any) -> Any:
    """Return a value as JSON data that can be stored.

    Raises:
        TypeError: If a value cannot be represented in JSON.
    """
    if type(value) is dict and all(type(key) is str and _is_flat(item) for key, item in value.items()):
        return {key: [*item] if type(item) is list else item for key, item in value.items()}
    return json.loads(_STORED_ENCODER.encode(value))


def _is_flat(value: Any) -> bool:
    """Return True for scalars and for lists of scalars."""
    return type(value) in _SCALARS or (type(value) is list and all(type(item) in _SCALARS for item in value))


def _json_default(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type_name(value)} cannot be converted to JSON; return text or plain data")


_SCALARS = frozenset({str, int, float, bool, type(None)})
_quoted = json.encoder.encode_basestring
# Created once, because `json.dumps` with options creates an encoder per call.
_TEXT_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_json_default)
_STORED_ENCODER = json.JSONEncoder(default=_json_default)


def action_text(action: Mapping[str, Any]) -> str:
    """Format an action: its text, or its tool calls."""
    texts = []
    for call in action.get("calls") or ([action] if "name" in action else []):
        given = call.get("arguments")
        if isinstance(given, Mapping):
            given = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in given.items())
        texts.append(f"{call.get('name')}({given or ''})")
    return "; ".join(texts) or str(action.get("content", action.get("type", action)))
