"""Chat completions as a server speaks them: requests read and checked, answers written whole or as a stream.

The form is that of OpenAI's API reference ("Create chat completion" and "The chat completion chunk object").
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from reward_kit.errors import kind_of
from reward_kit.models import Message, ToolCall
from reward_kit.providers.completion import ChatCompletion, Usage
from reward_kit.safe_input import read_strictly
from reward_kit.validation import describe_validation_error

ChatMessage = dict[str, Any]
"""A message in chat form, as it came."""

_MESSAGES = pydantic.TypeAdapter(list[Message])
_NOT_PASSED_ON = frozenset({"model", "messages", "stream", "stream_options", "n", "seed", "logprobs", "top_logprobs"})


class RefusedRequest(Exception):
    """A request that cannot be served; the client reads the message with a status of 400."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asked for.

    Attributes:
        messages: the conversation in chat form, every key as it came.
        options: the further keys, such as `tools` and `response_format`, without those that the server decides on.
        stream: the answer is wanted as server-sent events.
        include_usage: the stream ends with a chunk that holds the usage.
    """

    messages: list[ChatMessage]
    options: dict[str, Any]
    stream: bool = False
    include_usage: bool = False


def read_request(data: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        RefusedRequest: it is no chat completion request, or asks for what the recording endpoint does not do.
    """
    try:
        body = read_strictly(data)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedRequest(f"the body is a JSON object, not {kind_of(body)}")
    _refuse_unserved(body)
    stream_options = body.get("stream_options")
    return ChatRequest(
        _checked_messages(body.get("messages")),
        {key: value for key, value in body.items() if key not in _NOT_PASSED_ON and value is not None},
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage")),
    )


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise RefusedRequest(f"n: one answer a request, got {body['n']!r}; ask several times for several")
    for key in ("logprobs", "top_logprobs"):
        if body.get(key):
            raise RefusedRequest(f"{key}: log-probabilities go into the record, not to the agent; leave this key out")
    for key in ("functions", "function_call"):
        if body.get(key):
            raise RefusedRequest(f"{key}: this form is no longer served; use tools and tool_choice")


def _checked_messages(messages: Any) -> list[ChatMessage]:
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest("messages: expected a list of at least one message")
    try:
        _MESSAGES.validate_python(messages)
    except pydantic.ValidationError as error:
        raise RefusedRequest(f"messages: {describe_validation_error(error)[0]}") from error
    return messages


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion on its way to a client.

    Attributes:
        completion: what the model said.
        id: of this answer.
        model: the name of the model that gave it.
    """

    completion: ChatCompletion
    id: str
    model: str

    def to_json(self) -> dict[str, Any]:
        """The chat completion object."""
        choice = {"index": 0, "message": self.completion.message.to_chat(), "logprobs": None}
        whole = {**self._head("chat.completion"), "choices": [{**choice, "finish_reason": self._finish_reason()}]}
        return {**whole, "usage": _usage(self.completion.usage)} if self.completion.usage else whole

    def chunks(self, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The same as chat completion chunks; one that holds the usage comes last, where it is wanted and known."""
        head = self._head("chat.completion.chunk")
        for delta in _deltas(self.completion.message):
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self._finish_reason()}]}
        if include_usage and self.completion.usage:
            yield {**head, "choices": [], "usage": _usage(self.completion.usage)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _finish_reason(self) -> str:
        return self.completion.finish_reason or ("tool_calls" if self.completion.message.tool_calls else "stop")


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message.tool_calls and not message.text else ""}
    if message.reasoning_content:
        yield {"reasoning_content": message.reasoning_content}
    if message.text:
        yield {"content": message.text}
    for index, call in enumerate(message.tool_calls or ()):
        yield from _call_deltas(index, call)


def _call_deltas(index: int, call: ToolCall) -> Iterator[dict[str, Any]]:
    name = {"name": call.function.name, "arguments": ""}
    yield {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": name}]}
    yield {"tool_calls": [{"index": index, "function": {"arguments": call.function.arguments}}]}


def _usage(usage: Usage) -> dict[str, Any]:
    total = usage.prompt_tokens + usage.completion_tokens
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": total}
    return {**counts, "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
