"""The API that an endpoint uses. It determines how a chat request is sent and how the response is read.

Everywhere else in this package, requests and responses have the form of chat completions. A dialect converts them at
the endpoint. `Dialect` is the chat completions API itself. `responses.py` and `messages.py` contain the other APIs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from reward_kit.errors import ProviderError
from reward_kit.models import PROVIDER_ITEMS, Message
from reward_kit.providers.completion import StreamedCompletion

# Escaping all characters outside ASCII preserves lone surrogates, which UTF-8 cannot encode.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode_json(value: Any) -> str:
    """Encode a value as compact ASCII JSON.

    Raises:
        ProviderError: If the value cannot be converted to JSON.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProviderError(f"the request cannot be sent, because it cannot be converted to JSON: {error}") from error


class AnswerStream(Protocol):
    """A parser for a streamed response."""

    def feed(self, chunk: bytes) -> bool:
        """Process bytes of the stream, and return True after the end of the response."""
        ...

    def result(self) -> Any:
        """Return the response as if it had not been streamed."""
        ...


class Dialect:
    """The chat completions API, and the base class of the other dialects.

    Attributes:
        path: the path that is appended to the base URL.
        has_logprobs: whether the API can return log-probabilities.
        provider: the provider that defined the API, as in OpenTelemetry's attribute `gen_ai.provider.name`.
    """

    path = "/chat/completions"
    has_logprobs = True
    provider = "openai"
    key_variable = "OPENAI_API_KEY"
    """The variable that usually contains the key, for messages."""

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the API's headers, including the key if there is one."""
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def encode_message(self, message: Mapping[str, Any]) -> str:
        """Return a message in chat form, encoded as a JSON string that `join_messages` accepts."""
        return encode_json({key: value for key, value in message.items() if key != PROVIDER_ITEMS})

    def join_messages(self, encoded: Sequence[str]) -> dict[str, str]:
        """Return the keys of the body that contain the conversation, and their JSON."""
        return {"messages": f"[{','.join(encoded)}]"}

    def to_body(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the remaining keys of the body, given a chat request without its messages."""
        body = dict(request)
        if body.get("stream") and "stream_options" not in body:
            body["stream_options"] = {"include_usage": True}
        return body

    def encode(self, request: Mapping[str, Any]) -> bytes:
        """Return the body for a chat request. Its `messages` may be an `EncodedMessages`."""
        messages = request.get("messages", ())
        try:
            encoded = messages.encoded if isinstance(messages, EncodedMessages) else map(self.encode_message, messages)
            parts = [f'"{key}":{value}' for key, value in self.join_messages([*encoded]).items()]
            rest = encode_json(self.to_body({key: value for key, value in request.items() if key != "messages"}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProviderError(f"the request cannot be sent, because it is not a chat request: {error!r}") from error
        return f"{rest[:-1]}{',' if len(rest) > 2 else ''}{','.join(parts)}}}".encode("ascii")

    def stream(self, where: str, secrets: Iterable[str]) -> AnswerStream:
        """Return the parser for a streamed response from the URL `where`."""
        return StreamedCompletion(where, secrets)

    def to_completion(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON value of a response in the form of a chat completion.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If the response is malformed.
        """
        return answer


class EncodedMessages:
    """A conversation as a list of JSON strings, one per message, so that each message is encoded only once.

    Args:
        dialect: the dialect of the endpoint.
        to_chat: a function that converts a message to chat form.
    """

    __slots__ = ("_dialect", "_messages", "_to_chat", "encoded")

    def __init__(
        self, dialect: Dialect | None = None, to_chat: Callable[[Message], Mapping[str, Any]] = Message.to_chat
    ) -> None:
        self._dialect, self._to_chat = dialect or Dialect(), to_chat
        self._messages: list[Message] = []
        self.encoded: list[str] = []

    def update(self, conversation: Sequence[Message]) -> None:
        """Set the conversation. A message is encoded only if it is not the same object as before."""
        known = 0
        for old, new in zip(self._messages, conversation, strict=False):
            if old is not new:
                break
            known += 1
        new_messages = conversation[known:]
        self._messages[known:] = new_messages
        self.encoded[known:] = [self._dialect.encode_message(self._to_chat(message)) for message in new_messages]

    def __len__(self) -> int:
        return len(self.encoded)


def text_parts(content: Any) -> list[Mapping[str, Any]]:
    """Return the content of a message as a list of parts, omitting empty strings."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [part for part in parts if part.get("type") != "text" or part.get("text")]


def stored_items(message: Mapping[str, Any], api: str) -> list[Any] | None:
    """Return the items that an API returned for a message, or None if the message has a different origin."""
    stored = message.get(PROVIDER_ITEMS)
    items = stored.get(api) if isinstance(stored, Mapping) else None
    return items if isinstance(items, list) else None
