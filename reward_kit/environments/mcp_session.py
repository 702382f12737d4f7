"""A session with an MCP server, and its two transports: stdio to a child process, and streamable HTTP to a URL.

The SDK's client must be entered and exited in the same asyncio task, but a resource is set up, used and closed in
different tasks. The session therefore owns a task that runs the client. `StdioServer` replaces the SDK's
`stdio_client`, which needs O(n²) time to read a message of n bytes, hides the exit status, and starts processes that
the process guardian does not track.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import httpx2
import mcp_types
import pydantic
from mcp import Client, InputRequiredRoundsExceededError, MCPError
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.message import SessionMessage

from reward_kit.environments.elicitation import FormAnswer, without_deadline
from reward_kit.environments.mcp_tasks import TasksExtension, UnknownEffectError
from reward_kit.environments.schema_check import schema_violation
from reward_kit.errors import DeadlineError, EnvironmentFailure, RewardKitError, ToolError, boundary
from reward_kit.lazy import package_version
from reward_kit.processes import ChildProcess, start_process
from reward_kit.safe_input import (
    MCP_MESSAGE_BYTES,
    MCP_MESSAGE_VALUES,
    MCP_STREAM_BYTES,
    MCP_TOOLS,
    MCP_TOOLS_BYTES,
    TooLargeError,
    check_values,
    format_size,
)

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

_MAX_PAGES = 1_000
_MAX_ROUNDS = 10
_MAX_FORMS = 20
_RELISTEN_S, _MAX_RELISTEN_S = 1.0, 60.0
_LOGGED_CHARS = 2_000
_CLOSE_S = 20.0
_SESSION_GONE = "Session terminated"

# The SDK logs a traceback for an invalid response, in addition to the error that the session raises.
logging.getLogger("mcp").addHandler(logging.NullHandler())

logger = logging.getLogger("reward_kit.environments.mcp")


FillForm = Callable[[str, Mapping[str, Any]], Awaitable[FormAnswer]]
"""A function that takes the message and the schema of a form and returns an answer."""


class McpServer(ABC):
    """The connection to a server."""

    @abstractmethod
    def connect(self) -> Transport:
        """Yield the message streams from and to the server."""

    async def exited(self, seconds: float) -> bool:
        """Wait up to `seconds` for the server to exit, and return True if it did. For a URL, always return False."""
        return False

    def describe(self) -> str:
        """Return a description of how the server ended, for messages."""
        return ""


class McpSession:
    """A session with a server. Call `start`, then list and call tools, and finally call `close`.

    `tools_changed` is set when the server reports that its tools have changed, and cleared by `list_tools`. `forms`
    contains the forms that the server requested during the last call, and the answers to them. The client declares that
    it supports forms only if `takes_forms` is true. If `protocol` is "legacy", only versions of the protocol that allow
    requests from the server are used.
    """

    def __init__(
        self,
        server: McpServer,
        name: str,
        *,
        start_timeout_s: float,
        call_timeout_s: float,
        root: Path | None,
        takes_forms: bool = False,
        protocol: Literal["auto", "legacy"] = "auto",
    ) -> None:
        self._server, self._name, self._root, self._takes_forms = server, name, root, takes_forms
        self._protocol = protocol
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()
        self._output_schemas: dict[str, dict[str, Any]] = {}
        self._fill: Callable[[str, Mapping[str, Any]], asyncio.Task[FormAnswer]] | None = None
        self._scope: anyio.CancelScope | None = None
        self._one_form = anyio.Lock()
        self._user_failure: RewardKitError | None = None
        self.forms: list[dict[str, Any]] = []
        self.tools_changed = False

    async def start(self) -> None:
        """Connect and perform the handshake."""
        ready = self._ready = asyncio.get_running_loop().create_future()
        task = self._task = asyncio.create_task(self._serve(), name=f"session with {self._name}")
        try:
            with anyio.move_on_after(self._start_timeout_s):
                await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() and not task.done():
                late = f"{self._name} did not respond within {self._start_timeout_s:g} s (start_timeout_s)"
                raise EnvironmentFailure(self._described(late))
            if not ready.done():
                raise self._end_of(task, "could not be started")
        except BaseException:
            await self.close()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def instructions(self) -> str | None:
        return self._client().instructions

    async def list_tools(self) -> list[mcp_types.Tool]:
        """Return the tools from all pages."""
        self.tools_changed = False
        with boundary(EnvironmentFailure, f"the tools of {self._name}"), anyio.move_on_after(self._start_timeout_s):
            tools = await self._all_pages()
            self._output_schemas = {tool.name: tool.output_schema for tool in tools if tool.output_schema is not None}
            return tools
        raise EnvironmentFailure(
            f"{self._name} did not list its tools within {self._start_timeout_s:g} s (start_timeout_s)"
        )

    async def _all_pages(self) -> list[mcp_types.Tool]:
        tools: list[mcp_types.Tool] = []
        cursor, size = None, 0
        for _ in range(_MAX_PAGES):
            try:
                page = await self._client().list_tools(cursor=cursor, cache_mode="bypass")
            except MCPError as error:
                raise await self._lost(f"did not list its tools: {error.message}") from error
            tools += page.tools
            if len(tools) > MCP_TOOLS:
                raise EnvironmentFailure(f"{self._name} lists more than {MCP_TOOLS:,} tools")
            size += len(page.model_dump_json())
            if size > MCP_TOOLS_BYTES:
                raise EnvironmentFailure(
                    f"{self._name}: the list of tools is larger than the limit of {format_size(MCP_TOOLS_BYTES)}"
                )
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise EnvironmentFailure(f"{self._name} lists its tools on more than {_MAX_PAGES:,} pages")

    async def call(
        self, tool: str, arguments: dict[str, Any], fill: FillForm | None = None
    ) -> mcp_types.CallToolResult:
        """Call a tool and return its result. If the call continues as a task, wait until the task ends.

        Args:
            tool: the server's name for the tool.
            arguments: the arguments of the call.
            fill: a function that answers the server's forms. The time that it takes does not count towards the timeout.

        Raises:
            ToolError: the server rejected the call.
            UnknownEffectError: the response violates the protocol.
            DeadlineError: the response did not arrive in time. The call was cancelled, and the session continues.
            EnvironmentFailure: the connection to the server was lost, or the result violates the tool's output schema.
            RewardKitError: `fill` failed.
        """
        client = self._client()
        self.forms, self._user_failure = [], None
        if fill is not None:
            # The server's requests arrive in the task of the session, which does not have the episode's context.
            context = contextvars.copy_context()
            self._fill = lambda *form: asyncio.create_task(_awaited(fill(*form)), context=context)
        try:
            with anyio.move_on_after(self._call_timeout_s) as self._scope:
                result = await client.call_tool(tool, arguments, progress_callback=self._on_progress)
                self._raise_user_failure()
                return result
        except ToolError:  # from a task
            self._raise_user_failure()
            raise
        except MCPError as error:
            self._raise_user_failure()
            if error.code == mcp_types.CONNECTION_CLOSED or error.message == _SESSION_GONE:
                raise await self._lost(f"ended during the call of {tool!r}") from error
            raise ToolError(f"{tool}: {error.message}") from error
        except pydantic.ValidationError as error:
            raise UnknownEffectError(
                f"{tool}: the server's response is not a valid result: {error.errors()[0]['msg']}"
            ) from error
        except InputRequiredRoundsExceededError as error:
            raise UnknownEffectError(f"{tool}: the server asked for input more than {_MAX_ROUNDS} times") from error
        finally:
            self._fill = self._scope = None
        self._raise_user_failure()
        raise DeadlineError(
            f"{tool} did not respond within {self._call_timeout_s:g} s and was cancelled (call_timeout_s)"
        )

    def _raise_user_failure(self) -> None:
        if self._user_failure is not None:
            raise self._user_failure

    async def _check_result(self, name: str, result: mcp_types.CallToolResult) -> None:
        """Validate a result against the tool's output schema.

        The SDK's validation is not used, because it is unbounded.
        """
        schema = self._output_schemas.get(name)
        if schema is None:
            return
        try:
            if "structured_content" not in result.model_fields_set:
                problem = "the result has no structured content"
            else:
                problem = schema_violation(result.structured_content, schema)
        except TooLargeError as error:
            logger.warning(
                "%s: a result of %r was not validated, because validation is limited to %s", self._name, name, error
            )
            return
        except ValueError as error:
            raise EnvironmentFailure(f"{self._name}: the output schema of {name!r} is invalid: {error}") from None
        if problem:
            raise EnvironmentFailure(f"{self._name}: a result of {name!r} violates its output schema: {problem}")

    async def close(self) -> None:
        """End the session and its server, even if the current task is being cancelled."""
        task, ready = self._task, self._ready
        if task is None or ready is None:
            return
        self._closing.set()
        if not ready.done():
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task}, timeout=_CLOSE_S)
        if not task.done():
            task.cancel()
        elif not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s ended with %s", self._name, error)

    async def _serve(self) -> None:
        assert self._ready is not None
        with boundary(EnvironmentFailure, self._name):
            try:
                async with Client(
                    self._server.connect(),
                    mode=self._protocol,
                    cache=None,
                    client_info=mcp_types.Implementation(name="reward-kit", version=package_version()),
                    log_level="info",
                    logging_callback=self._on_log,
                    message_handler=self._on_message,
                    list_roots_callback=self._on_roots if self._root is not None else None,
                    elicitation_callback=self._on_form if self._takes_forms else None,
                    input_required_max_rounds=_MAX_ROUNDS,
                    extensions=[TasksExtension()],
                ) as client:
                    client.session.validate_tool_result = self._check_result  # type: ignore[method-assign]
                    logger.info("%s uses version %s of the protocol", self._name, client.protocol_version)
                    self._ready.set_result(client)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._listen, client)
                        await self._closing.wait()
                        tasks.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                first: BaseException = group  # the original error
                while isinstance(first, BaseExceptionGroup):
                    first = first.exceptions[0]
                raise first from group

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes to the tools if the protocol version requires a subscription."""
        offered = client.server_capabilities.tools
        if offered is None or not offered.list_changed:
            return
        wait, is_renewed = _RELISTEN_S, False
        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    if not changes.honored.tools_list_changed:
                        return
                    self.tools_changed |= is_renewed  # a change may have been missed
                    is_renewed = True
                    async for _ in changes:
                        self.tools_changed = True
                        wait = _RELISTEN_S
            except ListenNotSupportedError:
                return  # older versions of the protocol report changes without a subscription
            except (MCPError, TimeoutError) as error:
                logger.debug("%s: the server does not report changes to its tools: %s", self._name, error)
                return
            except SubscriptionLost as error:
                logger.debug("%s: the subscription was lost: %s", self._name, error)
            await anyio.sleep(wait)
            wait = min(2 * wait, _MAX_RELISTEN_S)

    def _client(self) -> Client:
        if self._task is None or self._ready is None or self._closing.is_set():
            raise EnvironmentFailure(f"the session with {self._name} is closed, or was not started")
        if self._task.done():
            raise self._end_of(self._task, "is gone")
        return self._ready.result()

    async def _lost(self, what: str) -> RewardKitError:
        """Return the error to raise when the connection to the server is lost."""
        assert self._task is not None
        if not await self._server.exited(1.0):
            await asyncio.wait({self._task}, timeout=0.2)
        if self._task.done():
            return self._end_of(self._task, what)
        return EnvironmentFailure(self._described(f"{self._name} {what}"))

    def _end_of(self, task: asyncio.Task[None], what: str) -> RewardKitError:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RewardKitError) and not isinstance(error, EnvironmentFailure):
            return error
        cause = error.__cause__ if error is not None and error.__cause__ is not None else error
        detail = cause.message if isinstance(cause, MCPError) else str(cause or "")
        failure = EnvironmentFailure(self._described(f"{self._name} {what}{f': {detail}' if detail else ''}"))
        failure.__cause__ = cause
        return failure

    def _described(self, message: str) -> str:
        end = self._server.describe()
        return f"{message}; {end}" if end else message

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self.tools_changed = True
        elif isinstance(message, Exception):
            logger.debug("%s sent a line that is not a message: %s", self._name, message)

    async def _on_log(self, params: mcp_types.LoggingMessageNotificationParams) -> None:
        logger.info("%s logged (%s): %.*s", self._name, params.level, _LOGGED_CHARS, params.data)

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        logger.debug("%s reports progress %s of %s: %.*s", self._name, progress, total, _LOGGED_CHARS, message)

    async def _on_form(
        self, context: Any, params: mcp_types.ElicitRequestParams
    ) -> mcp_types.ElicitResult | mcp_types.ErrorData:
        """Let the user answer a form. Forms are answered one at a time."""
        async with self._one_form:
            if self._fill is None or self._user_failure is not None:
                return mcp_types.ErrorData(code=mcp_types.INVALID_REQUEST, message="No user can answer at the moment")
            if len(self.forms) == _MAX_FORMS:
                message = f"There were more than {_MAX_FORMS} requests for input in one call"
                return mcp_types.ErrorData(code=mcp_types.INVALID_REQUEST, message=message)
            if isinstance(params, mcp_types.ElicitRequestURLParams):
                answer = FormAnswer("decline", reason="a simulated user cannot open a URL")
            else:
                try:
                    with without_deadline(self._scope):
                        answer = await self._fill(params.message, params.requested_schema)
                except RewardKitError as error:
                    self._user_failure = error
                    return mcp_types.ErrorData(code=mcp_types.INTERNAL_ERROR, message="The user cannot answer")
            form = {"message": params.message[:_LOGGED_CHARS], "action": answer.action, "content": answer.content}
            known = {**form, "reason": answer.reason or None, "user": dict(answer.facts) or None}
            self.forms.append({key: value for key, value in known.items() if value is not None})
            return mcp_types.ElicitResult(action=answer.action, content=answer.content)

    async def _on_roots(self, context: Any) -> mcp_types.ListRootsResult:
        assert self._root is not None
        uri = pydantic.FileUrl(self._root.as_uri())
        return mcp_types.ListRootsResult(roots=[mcp_types.Root(uri=uri, name="working copy")])


async def _awaited(answer: Awaitable[FormAnswer]) -> FormAnswer:
    return await answer


_CHUNK_BYTES = 1 << 20
_TOOL_MARK = b'"inputSchema"'  # tools are counted before they are parsed, because a parsed tool takes 4 kB of memory
_FLUSH_S = 0.5
_GRACE_S = 2.0
_SHOWN_CHARS = 200
_CLOSED_INPUT = "it closed its standard input"


class StdioServer(McpServer):
    """A server in a child process.

    Messages are lines on its standard input and standard output. Its standard error is written to a log.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], cwd: Path | None, log_name: str) -> None:
        self.command, self._environment, self._cwd, self._log_name = command, environment, cwd, log_name
        self._child: ChildProcess | None = None
        self._strays = 0
        self._first_stray = ""
        self._problem = ""

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[TransportStreams, None]:
        """Start the server, and exchange messages with it.

        Finally, stop the server and all processes that it started.
        """
        child = self._child = await start_process(
            self.command, cwd=self._cwd, env=self._environment, log_name=self._log_name, piped=True
        )
        arrive, arrived = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        leave, leaving = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with arrive, arrived, leave, leaving, anyio.create_task_group() as tasks:
                loop = asyncio.get_running_loop()
                stdin, stdout = child.pipes
                reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
                await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdout)
                # The write end needs a protocol with flow control, but the reader of this protocol is not used.
                transport, protocol = await loop.connect_write_pipe(
                    lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stdin
                )
                writer = asyncio.StreamWriter(transport, protocol, None, loop)
                tasks.start_soon(self._read, reader, arrive)
                written = anyio.Event()
                tasks.start_soon(self._write, leaving, writer, written, arrive)
                try:
                    yield arrived, leave
                finally:
                    with anyio.CancelScope(shield=True):
                        # Read and discard further messages; otherwise the server could block before it reads the last
                        # ones sent to it.
                        arrived.close()
                        leave.close()
                        with anyio.move_on_after(_FLUSH_S):
                            await written.wait()
                        writer.close()
                        await self.exited(_GRACE_S)
                        await child.end(_GRACE_S)
                    tasks.cancel_scope.cancel()
        finally:
            await child.end(_GRACE_S)

    async def exited(self, seconds: float) -> bool:
        """Wait for the process to exit by itself. Return True if it did."""
        with anyio.move_on_after(seconds):
            # The status can only be polled, because the process is not reaped yet.
            while self._child is not None and self._child.returncode is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        return self._child is not None and self._child.returncode is not None

    def describe(self) -> str:
        if self._child is None:
            return ""
        code = self._child.returncode
        # The exit explains why the server closed its input, and either may be noticed first.
        parts = [self._problem] if self._problem and (code is None or self._problem != _CLOSED_INPUT) else []
        if code is not None:
            parts.append(f"exit code {code}" if code >= 0 else f"ended by signal {-code}")
        if self._strays:
            parts.append(
                f"{self._strays} lines on its standard output are not messages; the first is {self._first_stray}"
            )
        tail = self._child.log_tail()
        return "; ".join([*parts, f"its log ends with:\n{tail}" if tail else "its log is empty"])

    async def _read(
        self, reader: asyncio.StreamReader, arrive: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        is_open = True
        async with arrive:
            try:
                async for line in _limited_lines(reader):
                    message = _message(line) if is_open and line.strip() else None
                    if message is not None:
                        try:
                            await arrive.send(message)
                        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                            is_open = False
                    elif is_open and line.strip():
                        self._strays += 1
                        if self._strays == 1:
                            text = repr(line[:_SHOWN_CHARS].decode("utf-8", "replace"))
                            self._first_stray = text + (" …" if len(line) > _SHOWN_CHARS else "")
                            logger.info(
                                "%s prints a line that is not a message: %s", self.command[0], self._first_stray
                            )
            except TooLargeError as error:
                self._problem = f"it sent a message larger than the limit of {error}"

    async def _write(
        self,
        leaving: MemoryObjectReceiveStream[SessionMessage],
        writer: asyncio.StreamWriter,
        written: anyio.Event,
        arrive: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        try:
            async with leaving:
                async for message in leaving:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    writer.write(f"{text}\n".encode())
                    await writer.drain()
        except OSError:
            # The server no longer reads its input. The closed stream raises an error in waiting callers.
            self._problem = self._problem or _CLOSED_INPUT
            arrive.close()
        finally:
            written.set()


async def _limited_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield each line without its line ending.

    Raises:
        TooLargeError: a line has too many bytes or JSON values.
    """
    line = bytearray()
    while chunk := await reader.read(_CHUNK_BYTES):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line += piece
            whole, line = bytes(line), bytearray()
            check_values(whole, MCP_MESSAGE_VALUES)
            if whole.count(_TOOL_MARK) > MCP_TOOLS:
                raise TooLargeError(f"{MCP_TOOLS:,} tools")
            yield whole
        line += rest
        if len(line) > MCP_MESSAGE_BYTES:
            raise TooLargeError(format_size(MCP_MESSAGE_BYTES))


def _message(line: bytes) -> SessionMessage | None:
    """Parse the message in a line. Lone surrogates are replaced by U+FFFD."""
    with suppress(ValueError):
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    try:
        text = json.dumps(json.loads(line.decode("utf-8", "replace")), ensure_ascii=False)
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(whole, by_name=False))
    except (ValueError, RecursionError):
        return None


class HttpServer(McpServer):
    """A server at a URL (streamable HTTP). The size of each response is checked before the SDK reads the response."""

    def __init__(self, url: str, headers: dict[str, str], call_timeout_s: float) -> None:
        # A small compressed response could decompress to any size.
        self._url, self._headers = url, {**headers, "Accept-Encoding": "identity"}
        # There is no timeout here, because the deadline of the call cancels the request as the protocol requires.
        self._timeout = httpx2.Timeout(30.0, read=call_timeout_s + 30.0)

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[TransportStreams, None]:
        hooks = {"response": [_limit]}
        async with (
            httpx2.AsyncClient(headers=self._headers, timeout=self._timeout, event_hooks=hooks) as client,
            streamable_http_client(self._url, http_client=client, max_sse_event_size=MCP_MESSAGE_BYTES) as streams,
        ):
            yield streams


class AnswerTooLargeError(httpx2.SSEError):
    """Raised if a response exceeds its size limit.

    The SDK re-raises errors with this base class and keeps their message.
    """


async def _limit(response: httpx2.Response) -> None:
    """Limit the size of a response body while the body is read."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise AnswerTooLargeError(f"the response is compressed ({encoding:.20}), but compression was not requested")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    if response.request.method == "DELETE":  # the response to the end of the session has no content
        await response.stream.aclose()
        response.stream = httpx2.ByteStream(b"")
        return
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        response.stream = _CountedStream(response.stream, MCP_MESSAGE_BYTES, is_events=False)
    else:
        # The stream of a GET request lasts as long as the session, so the limit applies to each of its events.
        most = None if response.request.method == "GET" else MCP_STREAM_BYTES
        response.stream = _CountedStream(response.stream, most, is_events=True)


class _CountedStream(httpx2.AsyncByteStream):
    """A body that raises an error if it is too large.

    JSON values are counted per event. If the limit is `None`, no limit applies.
    """

    def __init__(self, body: httpx2.AsyncByteStream, most_bytes: int | None, *, is_events: bool) -> None:
        self._body, self._most_bytes, self._is_events = body, most_bytes, is_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = values = tools = 0
        async for piece in self._body:
            size += len(piece)
            if self._most_bytes is not None and size > self._most_bytes:
                raise AnswerTooLargeError(f"the response is larger than the limit of {format_size(self._most_bytes)}")
            end = piece.rfind(b"\n\n") + 1 if self._is_events else 0
            values = sum(piece.count(mark, end) for mark in (b",", b"[", b"{")) + (0 if end else values)
            if values > MCP_MESSAGE_VALUES:
                raise AnswerTooLargeError(f"the response has more than {MCP_MESSAGE_VALUES:,} JSON values")
            tools += piece.count(_TOOL_MARK)
            if tools > MCP_TOOLS:
                raise AnswerTooLargeError(f"the response lists more than {MCP_TOOLS:,} tools")
            yield piece

    async def aclose(self) -> None:
        await self._body.aclose()
