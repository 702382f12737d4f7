"""The recording endpoint's requests and responses in chat format, and the base class of its APIs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web

from reward_kit.models import PROVIDER_ITEMS
from reward_kit.providers.completion import ChatCompletion

ChatMessage = dict[str, Any]
"""A message in chat form, unmodified."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a recording endpoint.

    Attributes:
        name: the name of the model, which responses contain.
        api: the API of the model's own endpoint, a key of `DIALECTS`.
        has_logprobs: whether responses contain log-probabilities.
    """

    name: str
    api: str = "chat"
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A client's request in chat format.

    Attributes:
        messages: the conversation. If the model's own endpoint uses the same API as the client, messages that cannot be
            expressed in chat format contain the client's items as `PROVIDER_ITEMS`.
        options: the other keys of the request, except those that the server sets.
        api: the API of the client, a key of `APIS`.
        body: the request as received.
    """

    messages: list[ChatMessage]
    options: dict[str, Any]
    api: str = "chat"
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stream(self) -> bool:
        """True if the client requests a stream."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A completion that is returned to a client, an id that is unique in the run, and the name of the model."""

    completion: ChatCompletion
    id: str
    model: str


class AgentApi:
    """An API of the recording endpoint, for one episode.

    Attributes:
        name: the name of the API, a key of `DIALECTS`.
        end_of_stream: the text after the last event of a stream.
    """

    name: ClassVar[str]
    end_of_stream: ClassVar[str] = ""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._is_native = model.api == self.name

    def parse(self, body: Mapping[str, Any]) -> ChatRequest:
        """Return a request in chat format.

        Raises:
            HTTPBadRequest: If the request is invalid, or contains something that the endpoint does not support.
            AttributeError, KeyError, TypeError, ValueError: If the request is malformed.
        """
        raise NotImplementedError

    def to_json(self, request: ChatRequest, answer: RecordedAnswer) -> dict[str, Any]:
        """Return the response to a request as a JSON object."""
        raise NotImplementedError

    def events(self, request: ChatRequest, answer: RecordedAnswer) -> Iterator[Mapping[str, Any]]:
        """Yield the events of a streamed response. If an event has a `type`, this becomes the event's name."""
        raise NotImplementedError


def error_body(message: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI's APIs."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def bad_request(message: str) -> web.HTTPBadRequest:
    """Return the error for a request that cannot be answered."""
    return web.HTTPBadRequest(text=message)


def content_of_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: the text of a single text part, or the parts."""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return str(parts[0]["text"])
    return parts or ""


def with_items(message: ChatMessage, api: str, items: list[Any]) -> ChatMessage:
    """Return a message together with the items that express it in an API."""
    return {**message, PROVIDER_ITEMS: {api: items}}


def only(value: Any, kind: type | tuple[type, ...], where: str) -> Any:
    """Return `value` if it has the expected type.

    Raises:
        HTTPBadRequest: If the value has a different type.
    """
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = {"str": "a string", "list": "a list", "dict": "an object", "Mapping": "an object"}
        expected = " or ".join(names[one.__name__] for one in kinds)
        raise bad_request(f"{where}: expected {expected}, got {value!r:.80}")
    return value
