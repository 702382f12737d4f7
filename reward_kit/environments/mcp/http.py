"""A server behind a URL (streamable HTTP), with limits on what is read of its answers.

The SDK reads a JSON answer whole, whatever its size. So every answer is counted on its way to the SDK, and one that is
too large breaks its stream, which closes the connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx2
from mcp.client.streamable_http import streamable_http_client

from reward_kit.safe_input import MCP_MESSAGE_BYTES, MCP_MESSAGE_VALUES, MCP_STREAM_BYTES, shown_size

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams


class HttpServer:
    """A server behind a URL (streamable HTTP)."""

    def __init__(self, url: str, headers: dict[str, str], call_timeout_s: float) -> None:
        # Compressed, a small answer could be of any size.
        self._url, self._headers = url, {**headers, "Accept-Encoding": "identity"}
        # The call's own deadline ends it, so that it ends with the protocol's cancellation.
        self._timeout = httpx2.Timeout(30.0, read=call_timeout_s + 30.0)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[TransportStreams, None]:
        """The streams of messages; the protocol's session ends with them."""
        hooks = {"response": [_limit]}
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=self._timeout, event_hooks=hooks) as client,
            streamable_http_client(self._url, http_client=client, max_sse_event_size=MCP_MESSAGE_BYTES) as streams,
        ):
            yield streams

    async def exited(self, seconds: float) -> bool:
        """Nothing is known of a process behind a URL."""
        return False

    def describe(self) -> str:
        """Nothing more than the error says."""
        return ""


class AnswerTooLargeError(httpx2.SSEError):
    """An answer is larger than its limit. The SDK hands on errors of this base class with their message."""


async def _limit(response: httpx2.Response) -> None:
    """Have the body of an answer counted while it is read."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise AnswerTooLargeError(f"the answer is compressed ({encoding:.20}), which was not asked for")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    if response.request.method == "DELETE":  # the farewell, whose answer says nothing
        await response.stream.aclose()
        response.stream = httpx2.ByteStream(b"")
        return
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        response.stream = _CountedStream(response.stream, MCP_MESSAGE_BYTES, is_events=False)
    else:
        # The stream of a GET lasts as long as the session; its events are limited one by one.
        most = None if response.request.method == "GET" else MCP_STREAM_BYTES
        response.stream = _CountedStream(response.stream, most, is_events=True)


class _CountedStream(httpx2.AsyncByteStream):
    """A body that ends with an error where it is too large.

    Args:
        body: what is read.
        most_bytes: of all of it; None for no limit.
        is_events: values are counted for each event alone.
    """

    def __init__(self, body: httpx2.AsyncByteStream, most_bytes: int | None, *, is_events: bool) -> None:
        self._body, self._most_bytes, self._is_events = body, most_bytes, is_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = values = 0
        async for piece in self._body:
            size += len(piece)
            if self._most_bytes is not None and size > self._most_bytes:
                raise AnswerTooLargeError(
                    f"the answer has more than {shown_size(self._most_bytes)}, which is the limit"
                )
            end = piece.rfind(b"\n\n") + 1 if self._is_events else 0
            values = _count_values(piece[end:]) + (0 if end else values)
            if values > MCP_MESSAGE_VALUES:
                raise AnswerTooLargeError(f"the answer has more than {MCP_MESSAGE_VALUES:,} JSON values")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()


def _count_values(piece: bytes) -> int:
    return piece.count(b",") + piece.count(b"[") + piece.count(b"{")
