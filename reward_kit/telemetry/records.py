"""Span values derived from an episode's record: times, ids, attributes and messages."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_FINISH_REASONS = {
    "tool_calls": "tool_call",
    "function_call": "tool_call",
}  # maps the finish reasons of models to those of messages


class RecordClock:
    """The times of an episode, in seconds since its start.

    A record written by an earlier release contains only the durations of the policy calls, and a transcript contains no
    times at all. In these cases, it is assumed that the steps follow each other without gaps, and `is_estimated` is
    True.
    """

    def __init__(self, timing: Record, run_start: datetime.datetime | None) -> None:
        started = timing.get("started_at")
        start = datetime.datetime.fromisoformat(started) if started else run_start
        self.zero_ns = nanoseconds(start or datetime.datetime.now(datetime.UTC))
        self.duration_s: float = timing.get("duration_s") or 0.0
        self.model_calls: Sequence[Record] = timing.get("model_calls") or ()
        self.is_estimated = True if "steps" not in timing else None
        self._steps, self._tools = timing.get("steps") or (), timing.get("tools") or ()
        self._policy_s = timing.get("steps_policy_s") or ()

    def step_times(self, count: int) -> Iterator[Sequence[float]]:
        """Yield four points in time for each of `count` steps.

        These are the times at which the step began, the policy was called, the policy returned, and the step ended. A
        step that ended with an error is included.
        """
        if not self.is_estimated:
            yield from ([*times, *[self.duration_s] * (4 - len(times))] for times in self._steps)
            return
        now = 0.0
        for t in range(count):
            answered = now + (self._policy_s[t] if t < len(self._policy_s) else 0.0)
            yield now, now, answered, answered
            now = answered

    def tool_times(self, t: int, answered: float, ended: float) -> Iterator[Sequence[float]]:
        """Yield the times at which each tool call of a step began and ended."""
        yield from self._tools[t] if t < len(self._tools) else ()
        while self.is_estimated:
            yield answered, ended


def nanoseconds(time: datetime.datetime) -> int:
    """Return the time in nanoseconds since 1970."""
    return (time - datetime.datetime.fromtimestamp(0, datetime.UTC)) // datetime.timedelta(microseconds=1) * 1000


def derive_id(size: int, *parts: Any) -> int:
    """Return a non-zero id of `size` bytes."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:size]) or 1


def error_of(failure: Record | None) -> tuple[str, str] | None:
    """Return the type and the message of a failure."""
    return (str(failure.get("where") or failure.get("class")), str(failure.get("message"))) if failure else None


def usage_attributes(usage: Record) -> dict[str, Any]:
    """Return the attributes for the token usage and the cost."""
    names = {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
        "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
        "cost": "reward_kit.usage.cost",
    }
    return {name: usage[key] for key, name in names.items() if usage.get(key) is not None}


def episode_attributes(record: Record) -> dict[str, Any]:
    """Return the attributes of the root span, except for the usage."""
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": record.get("policy"),
        "gen_ai.conversation.id": record["rollout_id"],
        "reward_kit.sample.id": record.get("sample_id"),
        "reward_kit.group.id": record.get("group_id"),
        "reward_kit.rollout.index": record.get("rollout_index"),
        "reward_kit.stop_reason": record.get("stop_reason"),
        "reward_kit.steps": len(record["steps"]),
        "reward_kit.environment_return": record.get("environment_return"),
    }


def step_outcome(record: Record, t: int) -> Record:
    """Return the data about the outcome of a step, which is stored with the next observation."""
    steps = record["steps"]
    following = steps[t + 1] if t + 1 < len(steps) else record.get("final") or {}
    return following.get("info") or {}


def has_tokens(record: Record, t: int) -> bool:
    """Return True if the token ids of a step are known. In that case, a model sampled them."""
    return any(action[0] == t for action in (record.get("tokens") or {}).get("actions") or ())


def tool_messages(record: Record, t: int) -> list[Record]:
    """Return the messages with the results of the tool calls in a step."""
    steps, messages = record["steps"], record["messages"]
    begin = steps[t].get("assistant_turn")
    if begin is None:
        return []
    end = steps[t + 1].get("assistant_turn") if t + 1 < len(steps) else None
    return [message for message in messages[begin + 1 : end] if message.get("role") == "tool"]


def call_arguments(record: Record, t: int, call_id: str | None) -> str | None:
    """Return the arguments of a tool call as a JSON string."""
    calls = record["messages"][record["steps"][t]["assistant_turn"]].get("tool_calls") or () if call_id else ()
    return next((call["function"]["arguments"] for call in calls if call.get("id") == call_id), None)


def conversation(record: Record, t: int, finish_reason: str | None) -> dict[str, str]:
    """Return the messages that the model read and wrote in a step, in the format defined by the conventions."""
    turn = record["steps"][t].get("assistant_turn")
    if turn is None:
        return {}
    messages = [_message(message) for message in record["messages"][: turn + 1]]
    reason = _FINISH_REASONS.get(finish_reason or "", finish_reason or "unknown")
    output = {**messages[-1], "finish_reason": reason}
    return {
        "gen_ai.input.messages": json.dumps(messages[:-1], ensure_ascii=False),
        "gen_ai.output.messages": json.dumps([output], ensure_ascii=False),
    }


def _part(part: Record) -> Record:
    """Return a message part in the format defined by the conventions. An unknown part is returned unchanged."""
    if "text" in part:
        return {"type": "text", "content": part["text"]}
    picture = part.get("image_url")
    url = picture.get("url") if isinstance(picture, Mapping) else picture
    if part.get("type") != "image_url" or not isinstance(url, str):
        return part
    kind, is_inline, data = url.removeprefix("data:").partition(";base64,")
    if url.startswith("data:") and is_inline:
        return {"type": "blob", "modality": "image", "mime_type": kind, "content": data}
    return {"type": "uri", "modality": "image", "uri": url}


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a tool call as a value, or unchanged if they are not JSON."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _message(message: Record) -> dict[str, Any]:
    content = message.get("content")
    parts: list[Record] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, list):
        parts += map(_part, content)
    elif content:
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        facts = {"id": call.get("id"), "name": function["name"], "arguments": _parsed(function.get("arguments"))}
        parts.append({"type": "tool_call", **facts})
    return {"role": message.get("role"), "parts": parts}
