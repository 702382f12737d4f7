"""`OpenAIAgentPolicy`, which acts through an OpenAI-compatible endpoint.

A policy has one `ChatEndpoint`. The sessions of all episodes share its connections. A session holds the state of its
episode: the seed and the messages that are already encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PastTurn, PolicyOutput, policy_output
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, ProviderError, did_you_mean, type_name
from reward_kit.models import Message
from reward_kit.providers.chat import DIALECTS, ChatEndpoint
from reward_kit.providers.client_transport import ClientTransport, http_sender, openai_sender
from reward_kit.providers.completion import ChatCompletion
from reward_kit.providers.dialect import EncodedMessages, encode_json
from reward_kit.providers.keys import EndpointSettings
from reward_kit.providers.prices import load_prices
from reward_kit.providers.request_queue import Rates, RetryPolicy
from reward_kit.providers.session import ProviderSession, endpoint_for
from reward_kit.validation import check_positive

_CREDENTIALS = ("authorization", "api-key", "x-api-key")  # headers that replace a bearer token
_SEED_RANGE = 2**31  # servers store seeds in a signed 32-bit integer
_OWN_KEYS = ("model", "messages", "tools", "stream", "stream_options", "seed")


class OpenAIAgentPolicy(AgentPolicy):
    """A policy that requests its actions as chat completions.

    Args:
        model: the name of the model at the endpoint.
        client: an `openai.AsyncOpenAI` or `AsyncAzureOpenAI` client that sends the requests with its URL, key and
            headers. You must close it. Its `max_retries` and `timeout` are ignored; use the options below instead.
        http_client: an `httpx.AsyncClient` to use instead of the built-in client, for proxies and certificates. You
            must close it.
        default_headers: the headers to send with each request, such as `{"api-key": …}`.
        base_url: the URL of the endpoint, which may include a query such as `?api-version=1`. The default is
            OPENAI_BASE_URL or, if that is not set, the URL of OpenAI.
        api_key: the key. The default is the value of `api_key_env` or, if that is not set, of OPENAI_API_KEY. Both
            variables may also come from `.env`.
        api_key_env: the name of the environment variable that contains the key. If it is "", no key is sent. In Python,
            any variable is allowed. A task file may name only variables that are configured for the origin
            (`providers/keys.py`).
        temperature: the sampling temperature. If this option or one of the next three is not set, it is not sent, and
            the endpoint's default applies.
        top_p: the total probability of the tokens to sample from.
        max_tokens: the maximum number of tokens in one answer.
        parallel_tool_calls: True if one answer may contain multiple calls.
        logprobs: True to request the log-probabilities of the sampled tokens.
        stream: True to stream the answers. A long answer then does not exceed `idle_timeout_s`.
        send_seed: True to send the seed of the episode (modulo 2**31) with each request.
        send_reasoning: True to send earlier `reasoning_content` back to the endpoint. Some endpoints require it, while
            others reject it.
        api: the API of the endpoint: "chat" for chat completions, "responses" for OpenAI's Responses, or "messages" for
            Anthropic's Messages.
        extra_body: additional keys for the body of each request, such as `return_token_ids` or `max_completion_tokens`.
        idle_timeout_s: the number of seconds after which an attempt is ended and retried if no byte arrives. With
            `stream`, the default is 60. Without `stream`, only the total timeout applies by default, because no byte
            arrives before the answer is complete.
        total_timeout_s: the number of seconds after which an attempt is ended.
        max_attempts: the maximum number of attempts for each action, including the first.
        retry_budget_s: the number of seconds after the first attempt within which further attempts may begin.
        retry_base_s: the upper bound, in seconds, of the first random wait between attempts. It doubles after each
            attempt.
        price_file: a YAML or JSON file with prices in US dollars per million tokens; see `providers/prices.py`.
        trust_env: True to use the proxies that are set in the environment.
        requests_per_minute: the maximum number of attempts per minute over all episodes of the run. The attempts are
            spread evenly.
        tokens_per_minute: the maximum number of prompt and answer tokens per minute, over all episodes of the run.
        max_connections: the maximum number of concurrent requests. The default is the run's concurrency, which is
            reduced if the endpoint rejects requests.
        traffic: the session that all requests of a run share. The program sets it; a task file cannot.

    Raises:
        ConfigError: If an option is invalid, a key is missing, or the price file cannot be read.
    """

    path_options = ("price_file",)

    def __init__(
        self,
        model: str,
        *,
        client: Any = None,
        http_client: Any = None,
        default_headers: Mapping[str, str] | None = None,
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
        api: str = "chat",
        extra_body: Mapping[str, Any] | None = None,
        idle_timeout_s: float | None = None,
        total_timeout_s: float = 600.0,
        max_attempts: int = 5,
        retry_budget_s: float = 300.0,
        retry_base_s: float = 0.5,
        price_file: str | Path | None = None,
        trust_env: bool = False,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        max_connections: int | None = None,
        traffic: ProviderSession | None = None,
    ) -> None:
        if idle_timeout_s is None:
            idle_timeout_s = min(60.0, total_timeout_s) if stream else total_timeout_s
        self._send_seed, self._send_reasoning = send_seed, send_reasoning
        self._parallel_tool_calls = parallel_tool_calls
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model: expected the model's name, got {model!r}")
        sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        sampling = {key: value for key, value in sampling.items() if value is not None}
        for key, value in sampling.items():
            check_positive(key, value, is_integer=key == "max_tokens", allow_zero=key == "temperature")
        self._request: dict[str, Any] = {
            "model": model,
            **sampling,
            **{key: True for key, wanted in (("logprobs", logprobs), ("stream", stream)) if wanted},
            **_check_extra_body({} if extra_body is None else extra_body),
        }
        check_positive("total_timeout_s", total_timeout_s)
        check_positive("idle_timeout_s", idle_timeout_s)
        check_positive("retry_budget_s", retry_budget_s)
        check_positive("retry_base_s", retry_base_s)
        check_positive("max_attempts", max_attempts, is_integer=True)
        if api not in DIALECTS:
            raise ConfigError(f"api: unknown API {api!r}{did_you_mean(str(api), DIALECTS)}")
        dialect = DIALECTS[api]
        transport, settings = None, EndpointSettings("", None)
        if client is not None:
            own = {"http_client": http_client, "default_headers": default_headers, "base_url": base_url}
            own |= {"api_key": api_key, "api_key_env": api_key_env, "trust_env": trust_env or None}
            if given := [name for name, value in own.items() if value is not None]:
                raise ConfigError(f"{given[0]}: the client defines this setting; set it on the client, or omit client")
            transport = ClientTransport(
                openai_sender(client), idle_timeout_s=idle_timeout_s, total_timeout_s=total_timeout_s
            )
            settings = EndpointSettings(str(client.base_url).partition("?")[0], None)
        else:
            _check_headers(default_headers)
            has_key = any(name.lower() in _CREDENTIALS for name in default_headers or ())
            named = (base_url, api_key, "" if has_key and not api_key else api_key_env)
            settings = endpoint_for(traffic, *named, usual_key=dialect.key_variable)
            if http_client is not None:
                if trust_env:
                    raise ConfigError("trust_env: http_client defines this setting; set it on the client")
                send = http_sender(http_client, settings.base_url.partition("?")[2])
                transport = ClientTransport(send, idle_timeout_s=idle_timeout_s, total_timeout_s=total_timeout_s)
        self.api, self.has_logprobs = api, bool(self._request.get("logprobs"))
        if client is not None and api != "chat":
            raise ConfigError(
                f"api: client= supports only chat completions; omit client, or use http_client with api={api!r}"
            )
        if logprobs and not dialect.has_logprobs:
            raise ConfigError(f"logprobs: the API {api!r} does not return log-probabilities; omit the option")
        self._prices = load_prices(price_file) if price_file is not None else None
        self._endpoint = ChatEndpoint(
            settings.base_url,
            settings.api_key,
            idle_timeout_s=idle_timeout_s,
            total_timeout_s=total_timeout_s,
            retry=RetryPolicy(max_attempts, retry_budget_s, retry_base_s),
            prices=self._prices,
            trust_env=trust_env,
            traffic=traffic,
            rates=Rates(requests_per_minute, tokens_per_minute, max_connections),
            no_key=settings.no_key,
            headers=default_headers,
            transport=transport,
            dialect=dialect,
        )
        self._endpoint.queue(model)  # reject two policies with different rates before the run

    def __repr__(self) -> str:
        return f"OpenAIAgentPolicy({self._request['model']!r}, {self._endpoint!r})"

    @property
    def knows_cost(self) -> bool:
        """True if the price file lists the model. The cost of every response with reported usage is then known."""
        return self._prices is not None and self._request["model"] in self._prices.models

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """Return a session for one episode. If `send_seed` is set, its requests contain the episode's seed."""
        return _ChatSession(self, context.seed % _SEED_RANGE if self._send_seed else None, context.rollout_id)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Return one action outside of an episode, without a seed."""
        return await _ChatSession(self, None).get_action(observation, available_tools_specs)

    async def complete(self, request: Mapping[str, Any], seed: int, scope: str = "") -> ChatCompletion:
        """Return the model's response to a chat request. This policy's options override keys of the request.

        Raises:
            ProviderError: If the endpoint rejected the request, or all retries failed.
            DeadlineError: If the request took too long.
        """
        own = {**self._request, **({"seed": seed % _SEED_RANGE} if self._send_seed else {})}
        if request.get("tools") and self._parallel_tool_calls is not None:
            own["parallel_tool_calls"] = self._parallel_tool_calls
        synonyms = ("max_tokens", "max_completion_tokens")  # endpoints reject both together
        overridden = synonyms if any(key in own for key in synonyms) else ()
        merged = {key: value for key, value in request.items() if key not in overridden} | own
        if not self._send_reasoning:
            merged["messages"] = [_without_reasoning(message) for message in request["messages"]]
        return await self._endpoint.complete(merged, scope=scope)

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        await self._endpoint.aclose()


class _ChatSession(AgentPolicy):
    """A session for one episode."""

    def __init__(self, policy: OpenAIAgentPolicy, seed: int | None, scope: str = "") -> None:
        self._endpoint, self._scope = policy._endpoint, scope
        self._request = policy._request if seed is None else {**policy._request, "seed": seed}
        self._parallel_tool_calls = policy._parallel_tool_calls
        self._messages = EncodedMessages(
            policy._endpoint.dialect,
            Message.to_chat if policy._send_reasoning else lambda message: _without_reasoning(message.to_chat()),
        )

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        """Do nothing: each request contains the whole conversation."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """Request the next message from the model.

        Raises:
            ProviderError: If the endpoint rejected the request, or all retries failed.
            DeadlineError: If the request took too long.
        """
        self._messages.update(observation)
        request = {**self._request, "messages": self._messages}
        if available_tools_specs:
            request["tools"] = available_tools_specs
            if self._parallel_tool_calls is not None:  # endpoints reject it without tools
                request["parallel_tool_calls"] = self._parallel_tool_calls
        return policy_output(await self._endpoint.complete(request, scope=self._scope))


def _check_headers(headers: Any) -> None:
    is_text = isinstance(headers, Mapping) and all(isinstance(one, str) for pair in headers.items() for one in pair)
    if headers is not None and not is_text:
        raise ConfigError(f"default_headers must be a mapping of names to strings, got {type_name(headers)}")


def _check_extra_body(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(extra_body, Mapping):
        raise ConfigError(f"extra_body: expected a mapping, got {extra_body!r}")
    for key in _OWN_KEYS:
        if key in extra_body:
            raise ConfigError(f"extra_body.{key}: this key is set by the policy and cannot be overridden")
    try:
        encode_json(dict(extra_body))
    except ProviderError as error:
        raise ConfigError(f"extra_body: {error}") from error
    return dict(extra_body)


def _without_reasoning(chat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in chat.items() if key != "reasoning_content"}
