"""Sends requests to model endpoints with aiohttp. Each kind of failure has a separate error type.

`development/transport.md` explains, with measurements, why aiohttp is used instead of an SDK. All other modules call
`Transport.post`, so a test or a recorder only needs to replace this method. aiohttp is imported on the first request.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reward_kit.errors import DeadlineError, ProviderError
from reward_kit.providers.faults import (
    HtmlError,
    IdleTimeoutError,
    TransientError,
    UnknownHostError,
    UnreachableError,
    excerpt,
    status_error,
    too_large_error,
)
from reward_kit.safe_input import (
    ERROR_BODY_BYTES,
    MODEL_ANSWER_BYTES,
    MODEL_ANSWER_VALUES,
    TooLargeError,
    check_values,
    read_body,
    read_prefix,
)

if TYPE_CHECKING:
    import aiohttp

_PLAIN = ("content-type", "anthropic-version")
_SECRET_CHARS = 3  # masking shorter values would hide ordinary words
_DRAIN_S = 0.25
_DRAIN_BYTES = 2**20


class Transport:
    """A client for POST requests. The first request creates its pool of keep-alive connections.

    Args:
        idle_timeout_s: the number of seconds without a byte from the endpoint after which an attempt ends.
        total_timeout_s: the number of seconds after which an attempt ends in any case.
        trust_env: whether to use the proxies that are set in the environment (`HTTPS_PROXY`). Passwords in `~/.netrc`
            are ignored.
        query: a query that is appended to each URL and is not shown in messages.
    """

    def __init__(
        self,
        *,
        idle_timeout_s: float = 60.0,
        total_timeout_s: float = 600.0,
        trust_env: bool = False,
        query: str = "",
    ) -> None:
        self._query = query
        self._idle_timeout_s = idle_timeout_s
        self._total_timeout_s = total_timeout_s
        self._trust_env = trust_env
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        on_chunk: Callable[[bytes], bool] | None = None,
    ) -> Any:
        """Send one request and return the JSON value of the response.

        If the response is an event stream, its bytes are passed to `on_chunk`, and the result is `None`.

        Args:
            url: the URL. Messages contain the URL, so it must not contain a secret.
            headers: the headers. Long values, such as credentials, are masked in messages.
            body: the bytes to send.
            on_chunk: a function that receives the bytes of an event stream as they arrive. The function returns True
                once it needs no more bytes.

        Raises:
            TransientError: If a connection is missing (`UnreachableError`), if the connection is dropped, if the status
                is worth a retry, or if the response is HTML or not JSON.
            ProviderError: For any other failure, including `UnknownHostError`, `AccessError`, and a response that is
                larger than `MODEL_ANSWER_BYTES`.
            IdleTimeoutError: If no byte arrived for `idle_timeout_s`.
            DeadlineError: If the attempt took longer than `total_timeout_s`.
        """
        import aiohttp

        session = await self._session_of_this_loop()
        secrets = header_secrets(headers)
        try:
            proxy = None
            if self._trust_env:  # `trust_env` of aiohttp would also send the credentials in `~/.netrc`
                from urllib.request import getproxies, proxy_bypass

                parts = urlsplit(url)
                proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
            target = f"{url}?{self._query}" if self._query else url
            async with session.post(target, data=body, headers=headers, allow_redirects=False, proxy=proxy) as response:
                if on_chunk and response.status == 200 and response.content_type == "text/event-stream":
                    await _feed(response.content, on_chunk)
                    return None
                status, answer_headers = response.status, response.headers
                if not 200 <= status < 300:
                    answer = await read_prefix(response, ERROR_BODY_BYTES)
                    raise status_error(status, answer_headers, answer, url, secrets)
                answer = await read_body(response, MODEL_ANSWER_BYTES)
            kind = answer_headers.get("Content-Type", "")
            return parse_answer(answer, f"{url} returned status {status}", kind, secrets)
        except TooLargeError as error:
            raise too_large_error(url, error) from None
        except (aiohttp.ClientError, OSError) as error:  # OSError covers TimeoutError
            raise self._fault(error, url, secrets) from error

    async def get(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Any:
        """Return the JSON value at a URL, or None if it does not arrive within `timeout_s` seconds."""
        import aiohttp

        session = await self._session_of_this_loop()
        with suppress(aiohttp.ClientError, OSError, TooLargeError, ProviderError):
            async with asyncio.timeout(timeout_s), session.get(url, headers=headers, allow_redirects=False) as response:
                if response.status == 200:
                    answer = await read_body(response, ERROR_BODY_BYTES)
                    return parse_answer(answer, url, response.headers.get("Content-Type", ""), [])
        return None

    async def aclose(self) -> None:
        """Close all connections. A later request opens new connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _session_of_this_loop(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            # A second `asyncio.run` creates a new loop. The connections of the old loop are closed with it. The new
            # session is in place before the first await, so that concurrent requests share it.
            old, self._loop = self._session, loop
            self._session = aiohttp.ClientSession(
                # Queues and the run limit the requests in flight. A wait here would be attributed to the endpoint.
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=self._total_timeout_s, sock_connect=self._idle_timeout_s, sock_read=self._idle_timeout_s
                ),
                headers={"User-Agent": "reward-kit"},
            )
            if old is not None:
                await old.close()
        return self._session

    def _fault(self, error: Exception, url: str, secrets: list[str]) -> ProviderError | DeadlineError:
        """Return the endpoint error for an aiohttp error."""
        import aiohttp

        if isinstance(error, aiohttp.ServerTimeoutError):
            if self._idle_timeout_s >= self._total_timeout_s:  # as for judges, whose responses are not streamed
                return IdleTimeoutError(
                    f"{url} sent nothing for total_timeout_s={self._total_timeout_s:g}; raise total_timeout_s"
                )
            return IdleTimeoutError(
                f"{url} sent nothing for idle_timeout_s={self._idle_timeout_s:g}; raise idle_timeout_s, or "
                "stream the response (stream: true) so that data arrives while the model writes"
            )
        if isinstance(error, TimeoutError):
            return DeadlineError(
                f"{url} did not finish its response within total_timeout_s={self._total_timeout_s:g}; "
                "raise total_timeout_s, or lower max_tokens"
            )
        detail = excerpt(str(error) or type(error).__name__, secrets)
        if isinstance(error, aiohttp.ClientPayloadError):
            return TransientError(f"{url} cut the response short: {detail}")
        if isinstance(error, aiohttp.ClientConnectorDNSError | aiohttp.ClientSSLError):
            return UnknownHostError(f"{url} cannot be reached; check base_url: {detail}")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            # Lower concurrency also helps against this error.
            return TransientError(f"{url}: no file descriptor is available; raise `ulimit -n`: {detail}", status=429)
        if isinstance(error, aiohttp.ClientConnectorError):
            if error.os_error.errno == errno.ECONNREFUSED:
                return UnreachableError(f"{url} refused the connection; is the server running?")
            return UnreachableError(f"{url} cannot be reached; is the server running? {detail}")
        if isinstance(error, aiohttp.ClientConnectionError | OSError):
            return TransientError(f"{url} dropped the connection: {detail}")
        return ProviderError(f"{url}: request failed: {type(error).__name__}: {detail}")


def header_secrets(headers: Mapping[str, str]) -> list[str]:
    """Return the header values that messages must not contain."""
    values = (value.removeprefix("Bearer ") for name, value in headers.items() if name.lower() not in _PLAIN)
    return [value for value in values if len(value) >= _SECRET_CHARS]


def parse_answer(answer: bytes, what: str, content_type: str, secrets: list[str]) -> Any:
    """Parse the JSON value of a response.

    Raises:
        TransientError: If the response is not JSON.
        TooLargeError: If the response has too many values.
    """
    if "html" in content_type.lower() or answer[:64].lstrip()[:1] == b"<":
        raise HtmlError(f"{what} with an HTML page: {excerpt(answer, secrets)}")
    check_values(answer, MODEL_ANSWER_VALUES)
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        shown = excerpt(answer, secrets) or "(empty)"
        raise TransientError(f"{what} with text that is not JSON: {shown}") from None


async def _feed(content: aiohttp.StreamReader, on_chunk: Callable[[bytes], bool]) -> None:
    """Pass the bytes of an event stream to `on_chunk` until it needs no more bytes."""
    import aiohttp

    async for chunk in content.iter_any():
        if on_chunk(chunk):
            # Reading to the end lets the connection be reused. The read does not wait for a server that keeps the
            # stream open, cuts off one that continues to send, and ignores errors of the connection, which no longer
            # affect the answer.
            with suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(_DRAIN_S):
                    left = _DRAIN_BYTES
                    async for rest in content.iter_any():
                        left -= len(rest)
                        if left < 0:
                            break
            return
