"""What a chat completion says, read from the JSON of the many servers that almost agree on its form.

Absent is None, never zero: a server that reports no usage gives `usage=None`, one that reports no token ids gives
`token_ids=None`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from reward_kit.errors import ProviderError
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.providers.faults import excerpt
from reward_kit.providers.prices import PriceTable

_TOKEN_ID_PREFIX = "token_id:"  # vLLM writes tokens so under return_tokens_as_token_ids


@dataclass(frozen=True, slots=True)
class Usage:
    """What one completion used.

    Attributes:
        prompt_tokens: tokens read, cached ones included.
        completion_tokens: tokens written, reasoning included.
        cached_tokens: of the prompt's tokens those that the provider had in its cache.
        cost: in US dollars by the price file, else as the provider reports it; None where neither says.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One answer of a model.

    Attributes:
        message: the assistant's message, with `tool_calls` and `reasoning_content` where there are any.
        finish_reason: why it ends, in the provider's word ("stop", "length", "tool_calls", "content_filter").
        usage: None where the provider reports none.
        prompt_ids: (P,) token ids of the prompt as the model saw it.
        token_ids: (N,) token ids sampled.
        logprobs: (N,) natural logarithms of their probabilities.
        retries: attempts that failed before this one.
    """

    message: Message
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What reading an answer needs to know of its request.

    Attributes:
        where: the URL, for messages.
        model: the model asked for, under which prices are looked up.
        message_count: how many messages the conversation had; call ids that the server left out are made from it.
        secrets: texts that must not appear in a message.
    """

    where: str
    model: str
    message_count: int
    secrets: tuple[str, ...] = ()


def read_completion(data: Any, facts: RequestFacts, prices: PriceTable | None = None) -> ChatCompletion:
    """The completion in a server's JSON value.

    Raises:
        ProviderError: it holds no choice, or its message has another form than a chat message.
    """
    choice = _first_choice(data, facts)
    logprobs, spelled_ids = _logprobs(choice.get("logprobs"))
    finish_reason = choice.get("finish_reason")
    return ChatCompletion(
        message=_message(choice["message"], facts),
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        usage=_usage(data, facts.model, prices),
        # vLLM says it once, SGLang with each choice.
        prompt_ids=_integers(data.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        token_ids=_integers(choice.get("token_ids")) or spelled_ids,
        logprobs=logprobs,
    )


def _first_choice(data: Any, facts: RequestFacts) -> Mapping[str, Any]:
    choices = data.get("choices") if isinstance(data, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("message"), Mapping):
        shown = excerpt(json.dumps(data, ensure_ascii=False), facts.secrets)
        missing = "without choices" if choice is None else "whose choice has no message"
        raise ProviderError(f"{facts.where} answered {missing}: {shown}")
    return choice


def _message(raw: Mapping[str, Any], facts: RequestFacts) -> Message:
    content = raw.get("content")
    # A refusal comes beside a null content; it is what the model said.
    content = raw.get("refusal") if content is None else content
    calls = raw.get("tool_calls") or []
    try:
        return Message(
            role="assistant",
            content=_clean(content),
            tool_calls=[_tool_call(call, n, facts.message_count) for n, call in enumerate(calls)] or None,
            # vLLM and OpenRouter say `reasoning` for what others call `reasoning_content`.
            reasoning_content=_clean(raw.get("reasoning_content") or raw.get("reasoning") or None),
        )
    except (ValidationError, AttributeError, KeyError, TypeError) as error:
        shown = excerpt(json.dumps(raw, ensure_ascii=False), facts.secrets)
        raise ProviderError(f"{facts.where} answered with a message in no known form: {shown}") from error


def _tool_call(raw: Mapping[str, Any], position: int, message_count: int) -> ToolCall:
    function = raw["function"]
    arguments = function.get("arguments")
    if arguments is None:
        arguments = "{}"
    elif not isinstance(arguments, str):  # Ollama's form
        arguments = json.dumps(arguments, ensure_ascii=False)
    # Unique in its conversation, because a conversation only grows.
    call_id = str(raw.get("id") or f"call_{message_count}_{position}")
    return ToolCall(id=call_id, function=FunctionCall(name=_clean(function["name"]), arguments=_clean(arguments)))


def _clean(text: Any) -> Any:
    """Text that UTF-8 can carry: surrogates that a stream tore apart are joined, single ones are replaced."""
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
    details = raw.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else raw.get("prompt_cache_hit_tokens")
    prompt, completion, cached = _count(raw.get("prompt_tokens")), _count(raw.get("completion_tokens")), _count(cached)
    if prompt is None or completion is None:
        return None
    cost = prices.cost(model, prompt, completion, cached or 0) if prices else None
    return Usage(prompt, completion, cached or 0, _dollars(raw.get("cost")) if cost is None else cost)


def _dollars(value: Any) -> float | None:
    """What a router such as OpenRouter says that a completion cost."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value >= 0 else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _logprobs(raw: Any) -> tuple[list[float] | None, list[int] | None]:
    """Log-probabilities, and token ids where the tokens are spelled as ids; None for what is not there for all."""
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
