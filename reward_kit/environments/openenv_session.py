"""One session with an OpenEnv server over its WebSocket: a question, an answer, and what can go wrong between them.

The wire of OpenEnv 0.10 is a few JSON messages, so it is spoken here with the HTTP client that is installed anyway;
the `openenv` package would bring a hundred others along. A server pings a client that thinks for long, and hangs up
where nothing comes back; aiohttp answers only while somebody reads, so a task of the session always does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from reward_kit.environments.http_client import JsonClient
from reward_kit.errors import DeadlineError, EnvironmentFailure
from reward_kit.safe_input import (
    ENVIRONMENT_ANSWER_BYTES,
    ENVIRONMENT_ANSWER_VALUES,
    TooLargeError,
    check_values,
    read_strictly,
    shown_size,
)

if TYPE_CHECKING:
    import aiohttp

_CLOSE_S = 5.0
_TOO_BIG = 1009  # RFC 6455, 7.4.1
_AGAIN_S = 0.2
_MOST_UNREAD = 2
_AT_CAPACITY = "CAPACITY_REACHED"
_NO_SESSION = (_AT_CAPACITY, "FACTORY_ERROR", "SESSION_ERROR")
_MORE_SESSIONS = "; serve it with a larger max_concurrent_envs, or lower the run's concurrency"


class RefusedError(Exception):
    """The server answered with an error, and the session goes on.

    Attributes:
        code: as the server calls it, such as "VALIDATION_ERROR".
        message: for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class OpenEnvSession:
    """A world of its own on the server, as long as the connection is open.

    Args:
        base_url: of the server, `http://…` or `ws://…`.
        headers: sent when the connection is opened.
        connect_timeout: seconds until there is a session; where the server is full, it is asked again until then.
        timeout: seconds for one answer.
        obituary: how a server of ours ended, "" where it runs; added to the message of a broken connection.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        connect_timeout: float,
        timeout: float,
        obituary: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._http_url = "http" + base_url.rstrip("/").removeprefix("http").removeprefix("ws")
        self._url = f"ws{self._http_url.removeprefix('http')}/ws"
        self._headers = dict(headers)
        self._connect_timeout, self._timeout, self._obituary = connect_timeout, timeout, obituary
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._ended = self._spoilt = ""
        self._has_begun = False

    async def open(self) -> None:
        """Connect, and wait until the server has made a world.

        Raises:
            EnvironmentFailure: there is no server, it is full, or it cannot make a world.
        """
        full: RefusedError | None = None
        with anyio.move_on_after(self._connect_timeout):
            while True:
                await self._connect()
                try:
                    await self._first_answer()
                    return
                except RefusedError as refusal:
                    await self.close()
                    full = refusal
                if full.code != _AT_CAPACITY:
                    raise EnvironmentFailure(f"{self._url}: {full.code}: {full.message}")
                await anyio.sleep(_AGAIN_S)
        await self.close()
        reason = f": {full.message}{_MORE_SESSIONS}" if full is not None else ""
        await self._fail(f"{self._url}: no session within {self._connect_timeout:g} s{reason}", None, DeadlineError)

    async def _connect(self) -> None:
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_redirect)
        self._client = aiohttp.ClientSession(headers=self._headers, trace_configs=[trace])
        self._answers, self._ended, self._spoilt, self._has_begun = asyncio.Queue(), "", "", False
        try:
            self._socket = await self._client.ws_connect(self._url, max_msg_size=ENVIRONMENT_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            await self._fail(f"{self._url}: {type(error).__name__}: {error}".removesuffix(": "), error)
        self._reader = asyncio.create_task(self._read(self._socket, self._answers))

    async def _first_answer(self) -> None:
        """A server that has no world for us says so unasked; it would be taken for the answer to the first question."""
        try:
            await self.ask("state")
        except RefusedError as refusal:
            if refusal.code in _NO_SESSION:
                raise
            # It has a world, which shows no state before it is reset.

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, answers: asyncio.Queue[str | None]) -> None:
        import aiohttp

        try:
            async for message in socket:
                # What is unread waits in the server: it may send as much as it likes.
                if message.type is aiohttp.WSMsgType.ERROR or answers.qsize() >= _MOST_UNREAD:
                    break
                answers.put_nowait(message.data if message.type is aiohttp.WSMsgType.TEXT else "(a binary message)")
        finally:
            problem = f": {socket.exception()}" if socket.exception() else ""
            if socket.close_code == _TOO_BIG:
                limit = shown_size(ENVIRONMENT_ANSWER_BYTES)
                problem = f": the answer has more than {limit}, which is the limit"
            code = f" (code {socket.close_code})" if socket.close_code else ""
            self._ended = f"the connection was closed{code}{problem}"
            answers.put_nowait(None)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """The `data` of the server's answer to one message.

        A session whose answer did not come in time, or was not waited for, is of no use any more: the answer might
        come later and would be taken for that to the next question. Nor is one whose server says something unasked.

        Raises:
            RefusedError: the server answered with an error.
            DeadlineError: it did not answer in time.
            EnvironmentFailure: the connection broke, or the answer has another shape than it should.
        """
        source = f"{kind} at {self._url}"
        message = json.dumps({"type": kind, **({} if data is None else {"data": dict(data)})}, allow_nan=False)
        text = await self._exchange(source, message)
        if text is None:
            self._spoilt = self._ended
            await self._fail(f"{source}: {self._ended}", None)
        return _data_of(text, "observation" if kind in ("reset", "step") else kind, source)

    async def _exchange(self, source: str, message: str) -> str | None:
        if self._socket is None or self._spoilt:
            raise EnvironmentFailure(f"{source}: there is no session{f': {self._spoilt}' if self._spoilt else ''}")
        # Before the first question a server may say that it has no world. Later it would shift every answer by one.
        if self._has_begun and (said := self._unasked()) is not None:
            self._spoilt = f"the server said what nobody had asked for: {said[:200]}"
            raise EnvironmentFailure(f"{source}: {self._spoilt}")
        self._has_begun = True
        self._spoilt = "an answer was not waited for"
        try:
            with anyio.fail_after(self._timeout):
                # A server that hangs up may have said why, and that is still to be read.
                with suppress(ConnectionError):
                    await self._socket.send_str(message)
                answer = await self._answers.get()
        except TimeoutError as error:
            self._spoilt = f"no answer within {self._timeout:g} s"
            raise DeadlineError(f"{source}: {self._spoilt}") from error
        self._spoilt = ""
        return answer

    def _unasked(self) -> str | None:
        """What the server said that is no answer; None where it said nothing, or hung up alone."""
        if self._answers.empty():
            return None
        said = self._answers.get_nowait()
        if said is None:
            self._answers.put_nowait(None)
        return said

    async def schemas(self) -> Mapping[str, Any]:
        """What the server says of its actions, observations and state: JSON schemas under these names.

        Raises:
            EnvironmentFailure: it does not say.
        """
        client = JsonClient(self._http_url, self._headers, self._timeout, self._obituary)
        try:
            return (await client.get("/schema")).fields()
        finally:
            await client.close()

    async def close(self) -> None:
        """Let the server end the world, and wait until it has: a full server has room then."""
        client, socket, reader = self._client, self._socket, self._reader
        self._client = self._socket = self._reader = None
        with anyio.CancelScope(shield=True):
            if socket is not None and reader is not None:
                # A server that owes an answer does not listen; it is told by the end of the connection.
                with anyio.move_on_after(0.0 if self._spoilt or self._ended else _CLOSE_S), suppress(ConnectionError):
                    await socket.send_str('{"type": "close"}')
                    await asyncio.wait([reader])
                    await socket.close()
                reader.cancel()
                await asyncio.wait([reader])
            if client is not None:
                await client.close()

    async def _fail(
        self,
        problem: str,
        error: Exception | None,
        kind: type[EnvironmentFailure] | type[DeadlineError] = EnvironmentFailure,
    ) -> NoReturn:
        said = await self._obituary() if self._obituary is not None else ""
        raise kind(f"{problem}{said}") from error


async def _refuse_redirect(session: aiohttp.ClientSession, context: object, params: Any) -> None:
    """The headers, which may hold a key, are for the server that was named."""
    import aiohttp

    params.response.close()
    target = params.response.headers.get("Location", "nowhere")
    raise aiohttp.ClientError(f"it redirects (HTTP {params.response.status}) to {target:.200}; name that address")


def _data_of(text: str, expected: str, source: str) -> Mapping[str, Any]:
    try:
        check_values(text, ENVIRONMENT_ANSWER_VALUES)
        answer = read_strictly(text)
    except TooLargeError as error:
        raise EnvironmentFailure(f"{source}: the answer has more than {error}, which is the limit") from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentFailure(f"{source}: the answer is not JSON ({error}): {text[:200]}") from None
    kind = answer.get("type") if isinstance(answer, Mapping) else None
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if kind not in (expected, "error") or not isinstance(data, Mapping):
        shape = '{"type": "' + expected + '", "data": {…}}'
        raise EnvironmentFailure(f"{source}: expected {shape}, got {text[:200]}")
    if kind == "error":
        raise RefusedError(str(data.get("code", "")), _told(data))
    return data


def _told(data: Mapping[str, Any]) -> str:
    """An error in one line; of a refused action each field and what is wrong with it."""
    errors = data.get("errors")
    if not isinstance(errors, list) or not errors:
        return str(data.get("message", "no message"))
    listed = [error for error in errors if isinstance(error, Mapping)]
    return "; ".join(f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in listed)
