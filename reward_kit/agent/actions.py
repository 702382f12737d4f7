"""Actions of a policy as chat messages, and chat messages as actions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from reward_kit.agent.policy_interface import Action, tool_calls_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import kind_of
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.strict_json import read_strictly


def as_text(value: Any) -> str:
    """What a tool returned, as the agent reads it: text as it is, None as "", everything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_text(value)


def json_text(value: Any) -> str:
    """`value` as JSON, NumPy values, pydantic models and dataclasses included.

    Raises:
        TypeError: it has no JSON form.
    """
    return _AS_TEXT.encode(value)


def plain(value: Any) -> Any:
    """`value` as the JSON it will be stored as.

    Raises:
        TypeError: it has no JSON form.
    """
    return json.loads(_AS_STORED.encode(value))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{kind_of(value)} has no JSON form; return text or plain data")


# Made once: `json.dumps` makes one at every call that has options.
_AS_TEXT, _AS_STORED = json.JSONEncoder(ensure_ascii=False, default=_plain), json.JSONEncoder(default=_plain)

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


def episode_of(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    """The episode, terminated. Its `custom_data` is left to the caller.

    What was said before the first action is its first observation, and what followed an action the next one.
    """
    episode = SingleAgentEpisode(rollout_id)
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    episode.add_messages(messages)
    episode.assistant_turns.extend(turns)
    episode.add_env_reset(_shown(messages[: turns[0] if turns else len(messages)]))
    for t, turn in enumerate(turns):
        episode.add_env_step(_shown(episode.answers_to(t)), action_of(messages[turn]), None)
    episode.is_terminated = True
    return episode


def _shown(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages)
