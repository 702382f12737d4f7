"""Requests as bytes, with each message of a conversation encoded once and not again in every later turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reward_kit.errors import ProviderError
from reward_kit.models import Message

# Escaping everything outside ASCII also carries lone surrogates, which UTF-8 cannot.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class EncodedMessages:
    """A conversation as JSON texts, one a message.

    Args:
        to_chat: a message in the form that the endpoint takes.
    """

    __slots__ = ("_encoded", "_messages", "_to_chat")

    def __init__(self, to_chat: Callable[[Message], Mapping[str, Any]] = Message.to_chat) -> None:
        self._to_chat = to_chat
        self._messages: list[Message] = []
        self._encoded: list[str] = []

    def update(self, conversation: Sequence[Message]) -> None:
        """Become `conversation`; only messages that are not the same objects as before are encoded."""
        known = 0
        for old, new in zip(self._messages, conversation, strict=False):
            if old is not new:
                break
            known += 1
        new_messages = conversation[known:]
        self._messages[known:] = new_messages
        self._encoded[known:] = [encode_json(self._to_chat(message)) for message in new_messages]

    def __len__(self) -> int:
        return len(self._encoded)

    def to_json(self) -> str:
        """The conversation as a JSON array."""
        return f"[{','.join(self._encoded)}]"


def encode_json(value: Any) -> str:
    """`value` as compact ASCII JSON.

    Raises:
        ProviderError: it holds something that JSON cannot express.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProviderError(f"the request cannot be sent, it is no JSON: {error}") from error


def encode_request(request: Mapping[str, Any]) -> bytes:
    """A request as the body to send; its `messages` may be an `EncodedMessages`.

    Raises:
        ProviderError: it holds something that JSON cannot express.
    """
    messages = request.get("messages")
    if not isinstance(messages, EncodedMessages):
        return encode_json(dict(request)).encode("ascii")
    rest = encode_json({key: value for key, value in request.items() if key != "messages"})
    comma = "," if len(rest) > 2 else ""
    return f'{rest[:-1]}{comma}"messages":{messages.to_json()}}}'.encode("ascii")
