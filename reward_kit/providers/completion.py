"""A parser for streamed and non-streamed chat completions in the slightly different formats of many servers.

A missing value, such as `usage` or `token_ids`, is `None`, never zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from reward_kit.errors import ProviderError, type_name
from reward_kit.models import PROVIDER_ITEMS, FunctionCall, Message, ToolCall
from reward_kit.providers.faults import TransientError, error_in_body, excerpt, too_large_error
from reward_kit.providers.prices import PriceTable
from reward_kit.safe_input import (
    MODEL_ANSWER_BYTES,
    MODEL_ANSWER_CALLS,
    MODEL_ANSWER_VALUES,
    MODEL_STREAM_BYTES,
    TooLargeError,
    check_values,
    format_size,
)

_LONGEST_MODEL = 200
_TOKEN_ID_PREFIX = "token_id:"  # vLLM writes tokens in this form with return_tokens_as_token_ids


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens and the cost of one completion.

    Attributes:
        prompt_tokens: the number of tokens read, including cached tokens.
        completion_tokens: the number of tokens written, including reasoning tokens.
        cached_tokens: the number of prompt tokens that were in the provider's cache.
        cost: the cost in US dollars according to the price file. If the file does not list the model, this is the cost
            that the provider reported. None if the provider did not report a cost either.
        cache_write_tokens: the number of prompt tokens that were written to the cache. None if not reported.
        reasoning_tokens: the number of tokens written as reasoning. None if not reported.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cost: float | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None

    def to_json(self) -> dict[str, float]:
        """Return the usage for the record of an episode. Unknown values and cache counts of 0 are omitted."""
        figures: dict[str, float | None] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens or None,
            "cache_write_tokens": self.cache_write_tokens or None,
            "reasoning_tokens": self.reasoning_tokens,
            "cost": self.cost,
        }
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A response from a model.

    Attributes:
        message: the assistant's message, including `tool_calls` and `reasoning_content` if present.
        finish_reason: the reason why the response ended, as the provider reports it ("stop", "length", "tool_calls",
            "content_filter").
        usage: the usage. None if the provider does not report it.
        prompt_ids: a list of length P with the token ids of the prompt as read by the model.
        token_ids: a list of length N with the ids of the sampled tokens.
        logprobs: a list of length N with the natural log-probabilities of the sampled tokens.
        logprob_entries: a list of length N with the log-probability entries as sent by the provider.
        retries: the number of attempts that failed before the response arrived.
        model: the model that answered, as the server reports it.
        weight_versions: the labels of the weights that sampled the response, in order, if a vLLM or SGLang server
            reports them.
    """

    message: Message
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    logprob_entries: list[dict[str, Any]] | None = None
    retries: int = 0
    model: str | None = None
    weight_versions: list[str] | None = None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The data about a request that is needed to parse the response."""

    where: str  # the URL, for messages
    model: str  # the requested model, used to look up prices
    message_count: int | None  # used to create missing call ids; if None, no ids are created
    secrets: tuple[str, ...] = ()  # strings that must not appear in a message


def read_completion(data: Any, facts: RequestFacts, prices: PriceTable | None = None) -> ChatCompletion:
    """Parse a server's JSON response to a completion request.

    Raises:
        ProviderError: If the value has no choice, or if the choice is malformed.
    """
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
        shown = excerpt(json.dumps(data, ensure_ascii=False), facts.secrets)
        missing = "a response without choices" if choice is None else "a choice without a message"
        raise ProviderError(f"{facts.where} returned {missing}: {shown}")
    logprobs, spelled_ids = _logprobs(choice.get("logprobs"))
    finish_reason = choice.get("finish_reason")
    return ChatCompletion(
        message=_message(choice["message"], facts),
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        usage=_usage(data, facts.model, prices),
        # vLLM reports it once, SGLang with each choice.
        prompt_ids=_integers(data.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        # SGLang names the sampled ids of a chat completion `response_token_ids`.
        token_ids=_integers(choice.get("token_ids") or choice.get("response_token_ids")) or spelled_ids,
        logprobs=logprobs,
        logprob_entries=choice["logprobs"]["content"] if logprobs else None,
        model=_clean(data["model"])[:_LONGEST_MODEL] if isinstance(data.get("model"), str) else None,
        weight_versions=_weight_versions(data, choice),
    )


def _weight_versions(data: Mapping[str, Any], choice: Mapping[str, Any]) -> list[str] | None:
    """Return the labels that vLLM reports with the choice and SGLang in the metadata; None if they are missing."""
    metadata = data.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    spans = choice.get("weight_versions") or metadata.get("weight_versions")
    if isinstance(spans, list) and spans and all(isinstance(span, Mapping) for span in spans):
        return [str(span.get("version")) for span in spans]
    label = metadata.get("weight_version")
    return [label] if isinstance(label, str) else None


def _message(raw: Mapping[str, Any], facts: RequestFacts) -> Message:
    # A refusal comes with null content. The refusal is the text of the model.
    content = raw.get("refusal") if raw.get("content") is None else raw["content"]
    calls: list[ToolCall] = []
    try:
        for call in raw.get("tool_calls") or []:
            function = call["function"]
            arguments = function.get("arguments")
            if arguments is None:
                arguments = "{}"
            elif not isinstance(arguments, str):  # Ollama's form
                arguments = json.dumps(arguments, ensure_ascii=False)
            # Unique in its conversation, because a conversation only grows.
            made = f"call_{facts.message_count}_{len(calls)}" if facts.message_count is not None else ""
            call_id = str(call.get("id") or made)
            named = FunctionCall(name=_clean(function["name"]), arguments=_clean(arguments))
            calls.append(ToolCall(id=call_id, function=named))
        return Message(
            role="assistant",
            content=_clean(content),
            tool_calls=calls or None,
            # vLLM and OpenRouter use `reasoning` for `reasoning_content`.
            reasoning_content=_clean(raw.get("reasoning_content") or raw.get("reasoning") or None),
            **{key: raw[key] for key in (PROVIDER_ITEMS,) if key in raw},
        )
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        shown = excerpt(json.dumps(raw, ensure_ascii=False), facts.secrets)
        raise ProviderError(f"{facts.where} returned a message in an unknown format: {shown}") from error


def _clean(text: Any) -> Any:
    """Make a string encodable as UTF-8.

    Surrogate pairs that a stream has split are joined, and lone surrogates are replaced.
    """
    if not isinstance(text, str):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _usage(data: Mapping[str, Any], model: str, prices: PriceTable | None) -> Usage | None:
    raw = data.get("usage")
    if not isinstance(raw, Mapping):
        return None
    read, written = raw.get("prompt_tokens_details"), raw.get("completion_tokens_details")
    read = read if isinstance(read, Mapping) else {"cached_tokens": raw.get("prompt_cache_hit_tokens")}
    prompt, completion = _count(raw.get("prompt_tokens")), _count(raw.get("completion_tokens"))
    if prompt is None or completion is None:
        return None
    cached, cache_write = _count(read.get("cached_tokens")) or 0, _count(read.get("cache_write_tokens"))
    reasoning = _count(written.get("reasoning_tokens")) if isinstance(written, Mapping) else None
    cost = prices.cost(model, prompt, completion, cached, cache_write or 0) if prices else None
    if cost is None:  # a router such as OpenRouter reports it
        reported = raw.get("cost")
        if isinstance(reported, int | float) and not isinstance(reported, bool):
            cost = float(reported) if math.isfinite(reported) and reported >= 0 else None
    return Usage(prompt, completion, cached, cost, cache_write, reasoning)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _logprobs(raw: Any) -> tuple[list[float] | None, list[int] | None]:
    """Return the log-probabilities, and the token ids if the tokens are written as ids. Missing values are `None`."""
    entries = raw.get("content") if isinstance(raw, Mapping) else None
    if not entries:
        return None, None
    try:
        values = [float(entry["logprob"]) for entry in entries]
        tokens = [entry.get("token", "") for entry in entries]
        spelled = all(token.startswith(_TOKEN_ID_PREFIX) for token in tokens)
        return values, [int(token[len(_TOKEN_ID_PREFIX) :]) for token in tokens] if spelled else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None, None


def _integers(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and value and all(type(item) is int for item in value) else None


_DONE = "[DONE]"
_PIECE_BYTES = 56


class EventReader:
    """A parser that extracts the `data` fields of server-sent events from a stream of bytes.

    An event may span multiple chunks. Events follow the WHATWG standard (html.spec.whatwg.org, "Server-sent events"),
    but chat completions use only `data`.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of the events that `chunk` completes."""
        self._rest += chunk
        if len(self._rest) + self._data_bytes > MODEL_ANSWER_BYTES:
            raise TooLargeError(format_size(MODEL_ANSWER_BYTES))
        if b"\n" not in chunk and b"\r" not in chunk:
            return []  # the line continues; scanning a long line again for each chunk would be slow
        lines = bytes(self._rest).splitlines(keepends=True)
        # If the last line ends in CR, the CR may be the first half of CR LF.
        self._rest = bytearray(lines.pop() if lines and not lines[-1].endswith(b"\n") else b"")
        events = []
        for line in lines:
            text = line.rstrip(b"\r\n")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" ").decode("utf-8", "replace"))
                self._data_bytes += len(line) + _PIECE_BYTES
            elif not text and self._data:
                events.append("\n".join(self._data))
                self._data, self._data_bytes = [], 0
        return events


class EventStream:
    """A reader for the JSON events of a streamed response. It limits the memory used by the events.

    Error messages contain the URL `where`. The `secrets` are masked in them. Subclasses define `add` and `result`.
    """

    def __init__(self, where: str, secrets: Iterable[str] = ()) -> None:
        self._where = where
        self._secrets = tuple(secrets)
        self._events = EventReader()
        # The remaining amounts that may be received and stored. All limits bound memory: a stored string also counts
        # `_PIECE_BYTES`, Python's overhead per string.
        self._stream_left, self._bytes_left = MODEL_STREAM_BYTES, MODEL_ANSWER_BYTES
        self._values_left = MODEL_ANSWER_VALUES
        self._done = False

    def feed(self, chunk: bytes) -> bool:
        """Process bytes of the stream, and return True after the end of the response.

        Raises:
            ProviderError: If the stream contains an error, an event that is not JSON, or more data than `safe_input`
                allows.
        """
        try:
            self._stream_left -= len(chunk)
            if self._stream_left < 0:
                raise TooLargeError(f"{format_size(MODEL_STREAM_BYTES)} of stream events")
            for event in self._events.feed(chunk):
                if event.strip() == _DONE:
                    self._done = True
                    break
                self._take(event)
        except TooLargeError as error:
            raise too_large_error(self._where, error) from None
        return self._done

    def add(self, event: Mapping[str, Any]) -> None:
        """Process an event."""
        raise NotImplementedError

    def _take(self, text: str) -> None:
        check_values(text, MODEL_ANSWER_VALUES)
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, Mapping):
            shown = excerpt(text, self._secrets)
            raise TransientError(f"{self._where} sent a stream event that is not a JSON object: {shown}")
        if event.get("error"):
            raise error_in_body(event["error"], self._where, self._secrets)
        try:
            self.add(event)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            shown = excerpt(text, self._secrets)
            raise ProviderError(f"{self._where} sent a stream event in an unknown format: {shown}") from error

    def keep_text(self, text: str) -> str:
        """Check the limits for a string that will be stored, and return the string."""
        self._bytes_left -= len(text) + _PIECE_BYTES
        if self._bytes_left < 0:
            raise TooLargeError(format_size(MODEL_ANSWER_BYTES))
        return text

    def keep_values(self, values: Any) -> list[Any]:
        """Check the limits for a list of values that will be stored, and return the list."""
        if not isinstance(values, list):
            raise TypeError(f"expected a list, got {type_name(values)}")
        pending: list[Any] = [values]
        while pending:
            value = pending.pop()
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            self._values_left -= len(inner)
            self._bytes_left -= sum(len(one) for one in inner if isinstance(one, str))
            pending += [one for one in inner if isinstance(one, dict | list)]
        if self._values_left < 0:
            raise TooLargeError(f"{MODEL_ANSWER_VALUES:,} JSON values")
        if self._bytes_left < 0:
            raise TooLargeError(format_size(MODEL_ANSWER_BYTES))
        return values

    def closed_early(self, missing: str) -> TransientError:
        """Return the error for a stream that ended before the response was complete."""
        return TransientError(f"{self._where} closed the stream early, without {missing}")


class StreamedCompletion(EventStream):
    """A reader that combines the chunks of a streamed completion into the JSON value of a non-streamed response."""

    def __init__(self, where: str, secrets: Iterable[str] = ()) -> None:
        super().__init__(where, secrets)
        self._top: dict[str, Any] = {}
        self._choice: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: list[_CallParts] = []
        self._logprobs: list[Any] = []
        self._token_ids: list[Any] = []

    def result(self) -> dict[str, Any]:
        """Return the completion as if it had not been streamed.

        Raises:
            TransientError: If the stream was interrupted.
        """
        if not self._done and self._choice.get("finish_reason") is None:
            raise self.closed_early(f"a finish_reason or {_DONE}")
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

    def add(self, event: Mapping[str, Any]) -> None:
        """Process a chunk of a completion."""
        for key in ("usage", "prompt_token_ids", "model"):
            if event.get(key):
                self._top[key] = event[key]
        for choice in event.get("choices") or []:
            if isinstance(choice, Mapping) and not choice.get("index"):
                self._add(choice)

    def _add(self, choice: Mapping[str, Any]) -> None:
        self._choice["finish_reason"] = choice.get("finish_reason") or self._choice.get("finish_reason")
        self._token_ids += self.keep_values(choice.get("token_ids") or [])
        self._logprobs += self.keep_values((choice.get("logprobs") or {}).get("content") or [])
        delta = choice.get("delta") or {}
        for key in ("content", "refusal", "reasoning_content", "reasoning"):
            if delta.get(key) is not None:
                self._texts.setdefault(key, []).append(self.keep_text(_text(delta[key])))
        for call in delta.get("tool_calls") or []:
            # The delta belongs to the call with its index, else to the call with its id, else to the latest call.
            index, call_id, function = call.get("index"), call.get("id"), call.get("function") or {}
            if index is not None:
                parts = next((one for one in self._calls if one.index == index), None)
            elif call_id:
                parts = next((one for one in self._calls if one.call_id == call_id), None)
            else:
                parts = self._calls[-1] if self._calls else None
            if parts is None:
                if len(self._calls) == MODEL_ANSWER_CALLS:
                    raise TooLargeError(f"{MODEL_ANSWER_CALLS:,} tool calls")
                parts = _CallParts(index)
                self._calls.append(parts)
            parts.call_id = parts.call_id or call_id
            name = _text(function.get("name") or "")
            # Some servers repeat the whole name in each delta. No known server splits a name into equal pieces.
            if name and name != parts.name:
                parts.name += self.keep_text(name)
            if arguments := function.get("arguments"):
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                parts.arguments.append(self.keep_text(text))


@dataclass(slots=True)
class _CallParts:
    """A tool call that is assembled from pieces of a stream."""

    index: int | None
    call_id: str | None = None
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value
