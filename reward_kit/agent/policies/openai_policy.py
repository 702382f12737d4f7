"""The policy behind an OpenAI-compatible endpoint: a conversation goes out, an action comes back.

One policy owns one `ChatEndpoint`; the sessions of all episodes share its connections. A session holds what belongs to
one episode: its seed, and its messages as they were already encoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, ProviderError
from reward_kit.models import Message, ToolCall
from reward_kit.providers.chat import ChatEndpoint
from reward_kit.providers.completion import ChatCompletion, Usage
from reward_kit.providers.encoding import EncodedMessages, encode_json
from reward_kit.providers.environment import resolve_endpoint
from reward_kit.providers.prices import load_prices
from reward_kit.providers.retry import RetryPolicy

_SEED_RANGE = 2**31  # servers keep seeds in a signed 32-bit integer
_OWN_KEYS = ("model", "messages", "tools", "stream", "stream_options", "seed")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode  # Python alone reads NaN and Infinity


class OpenAIAgentPolicy(AgentPolicy):
    """Acts by chat completions.

    Args:
        model: the model's name at the endpoint.
        base_url: by default OPENAI_BASE_URL, else OpenAI's own.
        api_key: by default the value of `api_key_env`, else OPENAI_API_KEY; both also from `.env`.
        api_key_env: name of the variable that holds the key.
        temperature: sent where given, as the three below; the endpoint's defaults rule otherwise.
        top_p: as in the chat completions API.
        max_tokens: of one answer.
        parallel_tool_calls: whether one answer may hold several calls.
        logprobs: ask for the log-probabilities of the sampled tokens.
        stream: have answers streamed, so that long ones do not run into `idle_timeout_s`.
        send_seed: send the episode's seed (modulo 2**31) with each request.
        send_reasoning: send earlier `reasoning_content` back; some endpoints need it, others refuse it.
        extra_body: further keys of the request, such as `return_token_ids` or `max_completion_tokens`.
        idle_timeout_s: seconds without a byte after which an attempt ends and is retried; by default 60 where `stream`
            is set, and no other limit than the total where it is not, because then nothing comes before the whole.
        total_timeout_s: seconds after which an attempt ends.
        max_attempts: attempts for one action, the first included.
        retry_budget_s: seconds from the first attempt after which no further one begins.
        retry_base_s: upper bound in seconds of the first random wait between attempts; it doubles.
        price_file: YAML or JSON with US dollars per million tokens; see `providers/prices.py`.
        trust_env: take proxies from the environment.

    Raises:
        ConfigError: an option is wrong, a key is missing, or the price file cannot be read.
    """

    path_options = ("price_file",)

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        logprobs: bool = False,
        stream: bool = False,
        send_seed: bool = True,
        send_reasoning: bool = False,
        parallel_tool_calls: bool | None = None,
        extra_body: Mapping[str, Any] | None = None,
        idle_timeout_s: float | None = None,
        total_timeout_s: float = 600.0,
        max_attempts: int = 5,
        retry_budget_s: float = 300.0,
        retry_base_s: float = 0.5,
        price_file: str | Path | None = None,
        trust_env: bool = False,
    ) -> None:
        if idle_timeout_s is None:
            idle_timeout_s = min(60.0, total_timeout_s) if stream else total_timeout_s
        self._send_seed = send_seed
        self._to_chat = Message.to_chat if send_reasoning else _without_reasoning
        self._parallel_tool_calls = parallel_tool_calls
        self._request = _request_options(model, temperature, top_p, max_tokens, logprobs, stream, extra_body)
        for name, value in (
            ("total_timeout_s", total_timeout_s),
            ("idle_timeout_s", idle_timeout_s),
            ("retry_budget_s", retry_budget_s),
            ("retry_base_s", retry_base_s),
        ):
            _check_number(name, value)
        _check_number("max_attempts", max_attempts, whole=True)
        settings = resolve_endpoint(base_url, api_key, api_key_env)
        self._endpoint = ChatEndpoint(
            settings.base_url,
            settings.api_key,
            idle_timeout_s=idle_timeout_s,
            total_timeout_s=total_timeout_s,
            retry=RetryPolicy(max_attempts, retry_budget_s, retry_base_s),
            prices=load_prices(price_file) if price_file is not None else None,
            trust_env=trust_env,
        )

    def __repr__(self) -> str:
        return f"OpenAIAgentPolicy({self._request['model']!r}, {self._endpoint!r})"

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The session of one episode, with its seed."""
        return _Session(self, context.seed % _SEED_RANGE if self._send_seed else None)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """One action outside of any episode, without a seed."""
        return await _Session(self, None).get_action(observation, available_tools_specs)

    async def close(self) -> None:
        """Close the endpoint's connections."""
        await self._endpoint.aclose()


class _Session(AgentPolicy):
    """One episode's conversation with the policy's endpoint."""

    def __init__(self, policy: OpenAIAgentPolicy, seed: int | None) -> None:
        self._endpoint = policy._endpoint
        self._request = policy._request if seed is None else {**policy._request, "seed": seed}
        self._parallel_tool_calls = policy._parallel_tool_calls
        self._messages = EncodedMessages(policy._to_chat)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Ask the model for its next message.

        Raises:
            ProviderError: the endpoint refused, or failed to the end of the retries.
            DeadlineError: it took too long.
        """
        self._messages.update(observation)
        request = {**self._request, "messages": self._messages}
        if available_tools_specs:
            request["tools"] = available_tools_specs
            if self._parallel_tool_calls is not None:  # refused by endpoints where there are no tools
                request["parallel_tool_calls"] = self._parallel_tool_calls
        completion = await self._endpoint.complete(request)
        message = completion.message
        text = message.text
        raw = text if text or not message.tool_calls else None
        return PolicyOutput(_action(message, text), raw, _token_facts(completion))


def _request_options(
    model: str,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    logprobs: bool,
    stream: bool,
    extra_body: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The part of the request that is the same in every turn."""
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model: expected the model's name, got {model!r}")
    if temperature is not None:
        _check_number("temperature", temperature, zero=True)
    if top_p is not None:
        _check_number("top_p", top_p)
    if max_tokens is not None:
        _check_number("max_tokens", max_tokens, whole=True)
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    request: dict[str, Any] = {"model": model, **{key: value for key, value in options.items() if value is not None}}
    request.update({key: True for key, wanted in (("logprobs", logprobs), ("stream", stream)) if wanted})
    return {**request, **_checked_extra(extra_body)}


def _checked_extra(extra_body: Mapping[str, Any] | None) -> dict[str, Any]:
    if extra_body is None:
        return {}
    if not isinstance(extra_body, Mapping):
        raise ConfigError(f"extra_body: expected a mapping, got {extra_body!r}")
    for key in _OWN_KEYS:
        if key in extra_body:
            raise ConfigError(f"extra_body.{key}: this key belongs to the policy and cannot be set here")
    try:
        encode_json(dict(extra_body))
    except ProviderError as error:
        raise ConfigError(f"extra_body: {error}") from error
    return dict(extra_body)


def _check_number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> None:
    """Positive, or zero where that is allowed."""
    kinds = int if whole else int | float
    number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        kind = "whole number" if whole else "number"
        raise ConfigError(f"{name}: expected a {kind} {'of at least' if zero else 'above'} 0, got {value!r}")


def _without_reasoning(message: Message) -> dict[str, Any]:
    chat = message.to_chat()
    chat.pop("reasoning_content", None)
    return chat


def _action(message: Message, text: str) -> Action:
    """The message as an action. Its parts that are not there are left out."""
    calls = [_call(call) for call in message.tool_calls or ()]
    action: Action
    if not calls:
        action = {"type": "text", "content": text}
    elif len(calls) == 1 and not text:
        action = {"type": "tool_call", **calls[0]}
    else:
        action = {"type": "tool_calls", "calls": calls}
        if text:
            action["content"] = text
    if message.reasoning_content:
        action["reasoning_content"] = message.reasoning_content
    return action


def _call(call: ToolCall) -> dict[str, Any]:
    """One call; arguments that are no JSON object go along verbatim, for the worker to send back as a tool error."""
    text = call.function.arguments
    try:
        # Some models write nothing at all for a tool without parameters.
        arguments = _decode(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return {"name": call.function.name, "arguments_text": text, "id": call.id}
    return {"name": call.function.name, "arguments": arguments, "id": call.id}


def _token_facts(completion: ChatCompletion) -> dict[str, Any]:
    """`PolicyOutput.log_probs`: only what the endpoint said."""
    facts = {
        "prompt_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "usage": _usage(completion.usage) if completion.usage else None,
        "finish_reason": completion.finish_reason,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _usage(usage: Usage) -> dict[str, Any]:
    facts: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    if usage.cached_tokens:
        facts["cached_tokens"] = usage.cached_tokens
    if usage.cost is not None:
        facts["cost"] = usage.cost
    return facts
