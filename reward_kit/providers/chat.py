"""Chat completions from an endpoint: sending requests, retrying them, and parsing and pricing the responses.

The endpoint's dialect is defined in `dialect.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reward_kit.errors import ProviderError, did_you_mean
from reward_kit.providers.completion import ChatCompletion, RequestFacts, read_completion
from reward_kit.providers.dialect import AnswerStream, Dialect
from reward_kit.providers.faults import (
    ENDPOINT_ERRORS,
    AccessError,
    HtmlError,
    UnknownHostError,
    WrongEndpointError,
    error_in_body,
    excerpt,
)
from reward_kit.providers.messages import Messages
from reward_kit.providers.model_calls import MODEL_CALLS, recorded_call
from reward_kit.providers.prices import PriceTable
from reward_kit.providers.request_queue import Rates, RequestQueue, RetryPolicy, with_retries
from reward_kit.providers.responses import Responses
from reward_kit.providers.session import ProviderSession
from reward_kit.providers.transport import Transport, header_secrets

if TYPE_CHECKING:
    from reward_kit.providers.response_cache import ResponseCache

_log = logging.getLogger(__name__)
_ADVICE_TIMEOUT_S = 2.0
_MOST_NAMES = 8
_PROVIDERS = {
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "api.mistral.ai": "mistral_ai",
    "openrouter.ai": "openrouter",
}
"""Providers that use the dialect of a different provider, keyed by host."""


DIALECTS: Mapping[str, Dialect] = {"chat": Dialect(), "responses": Responses(), "messages": Messages()}
"""The dialects, keyed by the value of the option `api`."""
_API_PATHS = tuple(dialect.path for dialect in DIALECTS.values())


def _model_names(listed: Any) -> list[str]:
    """Return the names of the models in a response from `/models`. The names are untrusted, so they are shortened."""
    rows = listed.get("data") if isinstance(listed, Mapping) else None
    found = [row.get("id") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
    return [excerpt(name, limit=80) for name in found if isinstance(name, str)]


class ChatEndpoint:
    """An endpoint and its connections. All users of the endpoint in a run share them.

    Args:
        base_url: the base URL, such as "http://127.0.0.1:8000/v1". The dialect's path is appended to it.
        api_key: the key to send. If None, no key is sent.
        idle_timeout_s: the maximum time in seconds between bytes. An attempt that exceeds it ends and is retried.
        total_timeout_s: the maximum duration of an attempt in seconds. An attempt that exceeds it ends and is not
            retried.
        retry: the retry policy.
        jitter: the random generator for the waits between retries. The default generator has the seed 0.
        prices: the prices for `Usage.cost`.
        trust_env: whether to use the proxies that are set in the environment.
        transport: the object that sends requests. The default is a `Transport` with the timeouts above.
        traffic: the state that all endpoints of a run share: queues, outages and recordings. If neither this state nor
            `rates` is set, requests wait neither for each other nor for an endpoint that is down.
        rates: the rate limits set by the user for each model.
        no_key: the reason why no key is sent. The reason is shown if the endpoint requires a key.
        headers: headers to send with each request. They replace headers with the same name, ignoring case.
        dialect: the API of the endpoint. The default is chat completions.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        idle_timeout_s: float = 60.0,
        total_timeout_s: float = 600.0,
        retry: RetryPolicy | None = None,
        jitter: random.Random | None = None,
        prices: PriceTable | None = None,
        trust_env: bool = False,
        transport: Transport | None = None,
        traffic: ProviderSession | None = None,
        rates: Rates | None = None,
        no_key: str = "",
        headers: Mapping[str, str] | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        self.dialect = dialect or Dialect()
        self._no_key = no_key
        path, _, query = base_url.partition("?")
        self._base = path.rstrip("/")
        self._url = f"{self._base}{self.dialect.path}"
        address = urlsplit(self._url)
        self._server = address.netloc.rpartition("@")[2]
        self._provider = _PROVIDERS.get(address.hostname or "", self.dialect.provider)
        self._answering: set[str] = set()  # the models with a completion so far
        self._advice: asyncio.Task[str] | None = None
        self._headers = {"Content-Type": "application/json", **self.dialect.headers(api_key)}
        own = {name.lower() for name in headers or ()}
        self._headers = {name: value for name, value in self._headers.items() if name.lower() not in own}
        self._headers.update(headers or {})
        self._secrets = tuple(dict.fromkeys([*([api_key] if api_key else []), *header_secrets(self._headers)]))
        self._retry = retry or RetryPolicy()
        self._jitter = jitter or random.Random(0)
        self._prices = prices
        self._rates = rates or Rates()
        self._traffic = traffic if traffic is not None or self._rates.is_unlimited else ProviderSession()
        self._queues: dict[str, RequestQueue] = {}
        self._transport = transport or Transport(
            idle_timeout_s=idle_timeout_s, total_timeout_s=total_timeout_s, trust_env=trust_env, query=query
        )

    def __repr__(self) -> str:
        return f"ChatEndpoint({self._url!r})"

    def queue(self, model: str) -> RequestQueue | None:
        """Return the queue for a model, or None if there is no `ProviderSession`.

        Raises:
            ConfigError: If a different endpoint in the same session has different rates for the model.
        """
        if self._traffic is None:
            return None
        if model not in self._queues:
            self._queues[model] = self._traffic.queue(self._url, model, self._rates)
        return self._queues[model]

    async def complete(self, request: Mapping[str, Any], *, scope: str = "") -> ChatCompletion:
        """Send a request and return the first choice of the completion.

        Args:
            request: the body of a chat completion request. Its `messages` may be an `EncodedMessages`. If `stream` is
                true, the response is streamed, but it is returned as a whole.
            scope: the id of the sender, such as an episode id. Recordings are kept separately for each scope.

        Raises:
            ProviderError: If the endpoint rejected the request, if all retries failed, or if a replay has no response.
            DeadlineError: If the request took too long. The message names the limit and explains how to raise it.
            LimitError: If the conversation is now too long for the model's context.
        """
        if (calls := MODEL_CALLS.get()) is None:
            return await self._complete(request, scope)
        with recorded_call(calls, str(request.get("model", "")), self._provider, self._server) as call:
            completion = await self._complete(request, scope)
            call.finish_reason, call.retries = completion.finish_reason, completion.retries
            call.reported_model = completion.model
            if completion.usage is not None:
                call.usage = {key: value for key, value in dataclasses.asdict(completion.usage).items() if value}
            return completion

    def record_cached_call(self, model: str, prompt_hash: str) -> None:
        """Record a call that the caller answered from its own cache, without usage."""
        if (calls := MODEL_CALLS.get()) is not None:
            with recorded_call(calls, model, self._provider, self._server) as call:
                call.prompt_hash, call.is_cached = prompt_hash, True

    async def _complete(self, request: Mapping[str, Any], scope: str) -> ChatCompletion:
        body = self.dialect.encode(request)
        facts = RequestFacts(self._url, str(request.get("model", "")), len(request.get("messages", ())), self._secrets)
        cassette = self._traffic.cassette if self._traffic is not None else None
        cache = self._traffic.cache if self._traffic is not None else None
        if cache is not None:
            return await self._ask_cached(cache, scope, request, body, facts)
        if cassette is None:
            return (await self._ask(request, body, facts))[1]
        question = cassette.lookup(body, scope, self._url)
        if cassette.is_replaying:
            value, retries = cassette.answer(question)
            return dataclasses.replace(read_completion(value, facts, self._prices), retries=retries)
        try:
            value, completion = await self._ask(request, body, facts)
        except ENDPOINT_ERRORS as error:
            cassette.record_error(question, error)
            raise
        cassette.record_answer(question, value, completion.retries)
        return completion

    async def _ask_for_advice(self, model: str) -> str:
        """Return advice about a wrong URL or model. Requests that fail at the same time share the advice."""
        loop = asyncio.get_running_loop()
        if self._advice is None or self._advice.get_loop() is not loop:
            self._advice = loop.create_task(self._find_advice(model))
        return await asyncio.shield(self._advice)

    async def _find_advice(self, model: str) -> str:
        """Request the list of models from the endpoint, and derive advice about a wrong URL or model from the list."""
        if surplus := next((path for path in _API_PATHS if self._base.endswith(path)), None):
            return f"; remove {surplus} from the end of base_url"
        is_versioned = re.search(r"/v\d", urlsplit(self._base).path) is not None
        for base in [self._base] if is_versioned else [self._base, f"{self._base}/v1"]:
            names = _model_names(await self._transport.get(f"{base}/models", self._headers, _ADVICE_TIMEOUT_S))
            if names and base == self._base:
                return "; check base_url" if model in names else did_you_mean(model, names)
            if names:
                return f"; set base_url to {base}, which offers the models {', '.join(names[:_MOST_NAMES])}"
        return "; check base_url" if is_versioned else "; check base_url, which usually ends in /v1"

    def _to_completion(self, answer: Any, stream: AnswerStream | None) -> Any:
        """Convert a response, streamed or not, to a chat completion."""
        try:
            if stream is not None and answer is None:  # a server may ignore `stream` and return the response as a whole
                answer = stream.result()
            if isinstance(answer, Mapping) and answer.get("error") and not answer.get("choices"):
                raise error_in_body(answer["error"], self._url, self._secrets)
            return self.dialect.to_completion(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            shown = excerpt(json.dumps(answer, ensure_ascii=False), self._secrets)
            reason = excerpt(f"{type(error).__name__}: {error}", self._secrets)
            raise ProviderError(f"{self._url} returned a response in an unknown format ({reason}): {shown}") from error

    async def aclose(self) -> None:
        """Close the connections. Call this once, when no requests are in flight."""
        await self._transport.aclose()

    async def _ask_cached(
        self, cache: ResponseCache, scope: str, request: Mapping[str, Any], body: bytes, facts: RequestFacts
    ) -> ChatCompletion:
        """Return the cached response from an earlier run, at no cost. Otherwise, send the request."""
        key = cache.key(self._url, body, scope)
        if (known := cache.find(key)) is None:
            value, completion = await self._ask(request, body, facts)
            cache.keep(key, value)
            return completion
        completion = read_completion(known, facts, self._prices)
        if completion.usage is None or completion.usage.cost is None:
            return completion
        return dataclasses.replace(completion, usage=dataclasses.replace(completion.usage, cost=0.0))

    async def _ask(self, request: Mapping[str, Any], body: bytes, facts: RequestFacts) -> tuple[Any, ChatCompletion]:
        """Send a request, and return the JSON value of the response and the completion that it contains."""
        began = time.monotonic()

        async def attempt() -> tuple[Any, ChatCompletion]:
            stream = self.dialect.stream(self._url, self._secrets) if request.get("stream") else None
            try:
                data = await self._transport.post(self._url, self._headers, body, stream.feed if stream else None)
            except AccessError as error:
                raise error.explained(self._no_key) from error
            except (WrongEndpointError, HtmlError) as error:
                is_maybe_passing = isinstance(error, HtmlError) and self._traffic is None
                if facts.model in self._answering or is_maybe_passing:
                    raise
                advice = await self._ask_for_advice(facts.model)
                raise WrongEndpointError(f"{str(error).rstrip('.')}{advice}") from error
            value = self._to_completion(data, stream)
            return value, read_completion(value, facts, self._prices)

        queue, permit = self.queue(facts.model), None
        if queue is not None:
            most = request.get("max_completion_tokens") or request.get("max_tokens")
            permit = queue.permit(len(body), most if isinstance(most, int) else 0, self._retry.budget_s)
        try:
            (value, completion), retries = await with_retries(attempt, self._retry, self._jitter, permit)
        except ProviderError as error:
            if permit is not None:
                await asyncio.sleep(0)  # if this stops the run, let it do so before it counts as a failure
            if isinstance(error, AccessError | UnknownHostError | WrongEndpointError):
                raise ProviderError(str(error)) from error
            raise
        else:
            self._answering.add(facts.model)
            if permit is not None and (usage := completion.usage) is not None:
                permit.answered(usage.prompt_tokens, usage.completion_tokens)
            elif permit is not None:
                permit.answered()
            if _log.isEnabledFor(logging.DEBUG):
                details = {"model": facts.model, "took_s": round(time.monotonic() - began, 6), "retries": retries}
                _log.debug("the endpoint answered", extra=details)
            return value, dataclasses.replace(completion, retries=retries) if retries else completion
        finally:
            if permit is not None:
                permit.leave()
