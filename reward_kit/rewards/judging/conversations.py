"""What a judge is shown of a rollout: its messages as plain values, without thoughts, cut where they are too long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reward_kit.models import Message
from reward_kit.rewards.reading.texts import last_answer

_SHORTEST = 200


def shown(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as values: who speaks, the text, the tools that are called."""
    return [_shown(message) for message in messages]


def before_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """What comes before the last assistant message: all of it, where there is none."""
    for position in range(len(messages) - 1, -1, -1):
        if messages[position].role == "assistant":
            return messages[:position]
    return messages


def first_request(messages: Sequence[Message]) -> Sequence[Message]:
    """What comes before the first assistant message; the rollouts of one group share it."""
    for position, message in enumerate(messages):
        if message.role == "assistant":
            return messages[:position]
    return messages


def as_text(value: Any) -> str:
    """A ground truth or passage as text: itself where it is one, else its JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def fitting(value: Any, longest: int) -> Any:
    """`value` with its texts cut in the middle, visibly and all to one length, so that together they fit."""
    lengths = [len(text) for text in _texts(value)]
    if sum(lengths) <= longest:
        return value
    return _cut(value, max(_SHORTEST, _common_length(lengths, longest)))


def _common_length(lengths: Sequence[int], longest: int) -> int:
    """The length to which long texts are cut, so that all together have `longest` characters."""
    left, waiting = longest, len(lengths)
    for length in sorted(lengths):
        if length * waiting > left:
            return left // waiting
        left, waiting = left - length, waiting - 1
    return longest


def _shown(message: Message) -> dict[str, Any]:
    text = last_answer([message]) if message.role == "assistant" else message.text
    entry: dict[str, Any] = {"role": message.role, "text": text}
    calls = [call.function for call in message.tool_calls or []]
    calls += [message.function_call] if message.function_call else []
    if calls:
        entry["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return entry


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        if len(value) <= longest:
            return value
        half = longest // 2
        return f"{value[:half]} [… {len(value) - 2 * half} characters left out …] {value[-half:]}"
    if isinstance(value, Mapping):
        return {name: _cut(item, longest) for name, item in value.items()}
    return [_cut(item, longest) for item in value] if isinstance(value, list) else value
