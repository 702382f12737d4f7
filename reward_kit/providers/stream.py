"""Streamed completions: server-sent events, added up to the JSON value that the same answer has when not streamed.

Both kinds of answer are then read by the same function, so streaming cannot mean anything else. Events follow the
WHATWG standard (html.spec.whatwg.org, "Server-sent events"), of which chat completions use the `data` field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from reward_kit.errors import ProviderError
from reward_kit.providers.faults import TransientError, error_in_body, excerpt

_DONE = "[DONE]"


class EventReader:
    """Cuts bytes into the `data` texts of events, wherever the network cut the bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that `chunk` completes."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        # A last line that ends in CR may be half of CR LF.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        events = []
        for line in lines:
            text = line.rstrip(b"\r\n")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not text and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


class StreamedCompletion:
    """Adds up the chunks of one streamed chat completion.

    Args:
        where: the URL, for messages.
        secrets: texts that must not appear in a message.
    """

    def __init__(self, where: str, secrets: Iterable[str] = ()) -> None:
        self._where = where
        self._secrets = tuple(secrets)
        self._events = EventReader()
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: list[_CallParts] = []
        self._logprobs: list[Any] = []
        self._token_ids: list[Any] = []
        self._done = False

    def feed(self, chunk: bytes) -> bool:
        """Take bytes of the stream; True once its end marker was read.

        Raises:
            ProviderError: the stream carries an error, or an event that is no JSON.
        """
        for event in self._events.feed(chunk):
            if event.strip() == _DONE:
                self._done = True
                break
            self._take(event)
        return self._done

    def result(self) -> dict[str, Any]:
        """The completion as a non-streamed answer would have it.

        Raises:
            TransientError: the stream ended before the answer did.
        """
        if not self._done and self._choice.get("finish_reason") is None:
            raise TransientError(
                f"{self._where} cut its stream short: it ended without a finish_reason and without {_DONE}"
            )
        if not self._choice:
            return {**self._top, "choices": []}
        message: dict[str, Any] = {key: "".join(parts) for key, parts in self._texts.items()}
        if self._calls:
            message["tool_calls"] = [call.to_json() for call in self._calls]
        choice = {**self._choice, "message": message}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs}
        if self._token_ids:
            choice["token_ids"] = self._token_ids
        return {**self._top, "choices": [choice]}

    def _take(self, event: str) -> None:
        chunk = self._parse(event)
        try:
            self._add(chunk)
        except (AttributeError, TypeError) as error:
            shown = excerpt(event, self._secrets)
            raise ProviderError(f"{self._where} sent a stream event in no known form: {shown}") from error

    def _parse(self, event: str) -> Mapping[str, Any]:
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping):
            shown = excerpt(event, self._secrets)
            raise TransientError(f"{self._where} sent a stream event that is not a JSON object: {shown}")
        if chunk.get("error"):
            raise error_in_body(chunk["error"], self._where, self._secrets)
        return chunk

    def _add(self, chunk: Mapping[str, Any]) -> None:
        for key in ("usage", "prompt_token_ids"):
            if chunk.get(key):
                self._top[key] = chunk[key]
        for choice in chunk.get("choices") or []:
            if isinstance(choice, Mapping) and not choice.get("index"):
                self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        self._choice["finish_reason"] = choice.get("finish_reason") or self._choice.get("finish_reason")
        self._token_ids += choice.get("token_ids") or []
        self._logprobs += (choice.get("logprobs") or {}).get("content") or []
        delta = choice.get("delta") or {}
        for key in ("content", "refusal", "reasoning_content", "reasoning"):
            if delta.get(key) is not None:
                self._texts.setdefault(key, []).append(_text(delta[key]))
        for call in delta.get("tool_calls") or []:
            self._call_of(call).add(call)

    def _call_of(self, delta: Mapping[str, Any]) -> _CallParts:
        """The call that a delta belongs to: by index, else by id, else the latest."""
        index, call_id = delta.get("index"), delta.get("id")
        if index is not None:
            found = [call for call in self._calls if call.index == index]
        elif call_id:
            found = [call for call in self._calls if call.call_id == call_id]
        else:
            found = self._calls[-1:]
        if not found:
            found = [_CallParts(index)]
            self._calls += found
        return found[0]


class _CallParts:
    """One tool call as its pieces arrive."""

    __slots__ = ("arguments", "call_id", "index", "name")

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.call_id: str | None = None
        self.name = ""
        self.arguments: list[str] = []

    def add(self, delta: Mapping[str, Any]) -> None:
        self.call_id = self.call_id or delta.get("id")
        function = delta.get("function") or {}
        name = _text(function.get("name") or "")
        # Some servers repeat the whole name in each delta, none is known to split it over equal pieces.
        if name and name != self.name:
            self.name += name
        arguments = function.get("arguments")
        if arguments:
            self.arguments.append(arguments if isinstance(arguments, str) else json.dumps(arguments))

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
