"""Chat completions from an OpenAI-compatible endpoint: encode, send, retry, read, price.

`ChatEndpoint` is shared by everything that talks to one endpoint in a run, so that connections are too.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from reward_kit.providers.completion import ChatCompletion, RequestFacts, Usage, read_completion
from reward_kit.providers.encoding import encode_request
from reward_kit.providers.faults import error_in_body
from reward_kit.providers.prices import PriceTable
from reward_kit.providers.retry import RetryPolicy, with_retries
from reward_kit.providers.stream import StreamedCompletion
from reward_kit.providers.transport import Transport

__all__ = ["ChatCompletion", "ChatEndpoint", "Usage"]


class ChatEndpoint:
    """One endpoint and its connections.

    Args:
        base_url: such as "http://127.0.0.1:8000/v1"; "/chat/completions" is appended.
        api_key: sent as a bearer token; None sends none.
        idle_timeout_s: seconds without a byte after which an attempt ends, and is retried.
        total_timeout_s: seconds after which an attempt ends and is not retried.
        retry: how often and how long to try.
        jitter: what retry waits are drawn from, by default seeded with 0.
        prices: for `Usage.cost`.
        trust_env: take proxies from the environment.
        transport: what sends the bytes; by default a `Transport` with the timeouts above.
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
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._secrets = (api_key,) if api_key else ()
        self._retry = retry or RetryPolicy()
        self._jitter = jitter or random.Random(0)
        self._prices = prices
        self._transport = transport or Transport(
            idle_timeout_s=idle_timeout_s, total_timeout_s=total_timeout_s, trust_env=trust_env
        )

    def __repr__(self) -> str:
        return f"ChatEndpoint({self._url!r})"

    async def complete(self, request: Mapping[str, Any]) -> ChatCompletion:
        """The first choice of a completion.

        Args:
            request: the body of a chat completion request. `messages` may be an `EncodedMessages`; with
                `stream: true` the answer is streamed and comes back whole all the same.

        Raises:
            ProviderError: the endpoint refused, or failed to the end of the retries.
            DeadlineError: it took too long; the message says which limit and how to raise it.
        """
        streamed = bool(request.get("stream"))
        if streamed and "stream_options" not in request:
            request = {**request, "stream_options": {"include_usage": True}}
        body = encode_request(request)
        facts = RequestFacts(self._url, str(request.get("model", "")), len(request.get("messages", ())), self._secrets)

        async def attempt() -> ChatCompletion:
            data = await (self._streamed(body) if streamed else self._transport.post(self._url, self._headers, body))
            if isinstance(data, Mapping) and data.get("error") and not data.get("choices"):
                raise error_in_body(data["error"], self._url, self._secrets)
            return read_completion(data, facts, self._prices)

        completion, retries = await with_retries(attempt, self._retry, self._jitter)
        return dataclasses.replace(completion, retries=retries) if retries else completion

    async def aclose(self) -> None:
        """Close the connections. Called once, when nothing is in flight any more."""
        await self._transport.aclose()

    async def _streamed(self, body: bytes) -> Any:
        stream = StreamedCompletion(self._url, self._secrets)
        whole = await self._transport.post(self._url, self._headers, body, stream.feed)
        # A server may ignore `stream` and answer in one piece.
        return stream.result() if whole is None else whole
