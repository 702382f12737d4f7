"""A transport that uses the user's client: an `AsyncOpenAI`, an `AsyncAzureOpenAI` or an `httpx.AsyncClient`.

The client determines the proxies, certificates, headers and tokens. The run determines the retries and queues.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from reward_kit.errors import ConfigError, DeadlineError, type_name
from reward_kit.providers.faults import client_errors, status_error, too_large_error
from reward_kit.providers.transport import Transport, header_secrets, parse_answer
from reward_kit.safe_input import ERROR_BODY_BYTES, MODEL_ANSWER_BYTES, TooLargeError, format_size

Send = Callable[[str, Mapping[str, str], bytes, float], AbstractAsyncContextManager[Any]]
"""A function that sends a body to a URL with headers and an idle timeout, and yields the unread response."""


class ClientTransport(Transport):
    """A transport that sends requests with the user's client. The transport does not close the client."""

    def __init__(self, send: Send, *, idle_timeout_s: float, total_timeout_s: float) -> None:
        super().__init__(idle_timeout_s=idle_timeout_s, total_timeout_s=total_timeout_s)
        self._send = send

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes, on_chunk: Callable[[bytes], bool] | None = None
    ) -> Any:
        """Send one request and return the response. See `Transport.post`."""
        try:
            with client_errors(url):
                async with asyncio.timeout(self._total_timeout_s):
                    async with self._send(url, headers, body, self._idle_timeout_s) as response:
                        return await _read_answer(response, url, header_secrets(headers), on_chunk)
        except TooLargeError as error:
            raise too_large_error(url, error) from None
        except TimeoutError as error:
            raise DeadlineError(
                f"{url} did not finish its response within total_timeout_s={self._total_timeout_s:g}; "
                "raise total_timeout_s, or lower max_tokens"
            ) from error

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Any:
        """Return None, because the client should send only the requests that the run needs."""

    async def aclose(self) -> None:
        """Do nothing, because the owner of the client closes it."""


async def _read_answer(response: Any, url: str, secrets: list[str], on_chunk: Callable[[bytes], bool] | None) -> Any:
    status, kind = response.status_code, response.headers.get("Content-Type", "")
    if on_chunk and status == 200 and kind.startswith("text/event-stream"):
        async for chunk in response.aiter_bytes():
            if on_chunk(chunk):
                break
        return None
    is_answer, body = 200 <= status < 300, bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > (MODEL_ANSWER_BYTES if is_answer else ERROR_BODY_BYTES):
            if is_answer:
                raise TooLargeError(format_size(MODEL_ANSWER_BYTES))
            break
    if not is_answer:
        raise status_error(status, response.headers, bytes(body), url, secrets)
    return parse_answer(bytes(body), f"{url} returned status {status}", kind, secrets)


def http_sender(client: Any, query: str = "") -> Send:
    """Return a function that sends requests with an `httpx.AsyncClient`.

    Raises:
        ConfigError: If the client has a different type.
    """
    if not (hasattr(client, "stream") and hasattr(client, "__aenter__")):
        raise ConfigError(f"http_client: expected an httpx.AsyncClient, got {type_name(client)}")

    def send(
        url: str, headers: Mapping[str, str], body: bytes, idle_timeout_s: float
    ) -> AbstractAsyncContextManager[Any]:
        target = f"{url}?{query}" if query else url
        stream: AbstractAsyncContextManager[Any] = client.stream(
            "POST", target, headers=dict(headers), content=body, timeout=idle_timeout_s
        )
        return stream

    return send


def openai_sender(client: Any) -> Send:
    """Return a function that sends requests with an `AsyncOpenAI` or an `AsyncAzureOpenAI`.

    Raises:
        ConfigError: If the client has a different type.
    """
    if not (hasattr(client, "chat") and hasattr(client, "with_options") and hasattr(client, "__aenter__")):
        raise ConfigError(f"client: expected an AsyncOpenAI or AsyncAzureOpenAI, got {type_name(client)}")
    create = client.with_options(max_retries=0).chat.completions.with_streaming_response.create

    @asynccontextmanager
    async def send(_: str, __: Mapping[str, str], body: bytes, idle_timeout_s: float) -> AsyncIterator[Any]:
        request = json.loads(body)
        # The keys of the body take precedence, so the installed version of the package does not have to know all of
        # them.
        asked = {"model": request["model"], "messages": [], "stream": request.get("stream", False)}
        async with create(**asked, extra_body=request, timeout=idle_timeout_s) as answer:
            yield answer.http_response

    return send
