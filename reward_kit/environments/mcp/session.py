"""One session with one server, in a task of its own.

The SDK's client must be entered and left by one task, and a world is set up, used and closed by several, each in its
own cancel scope. So a task owns the client and waits to be told to end; calls are made by whoever wants an answer, and
one that is given up sends the protocol's cancellation and leaves the session as it was.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import anyio
import mcp_types
import pydantic
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

from reward_kit.environments.mcp.tools import NoAnswerError
from reward_kit.errors import DeadlineError, EnvironmentFailure, RewardKitError, ToolError, boundary
from reward_kit.safe_input import MCP_TOOLS_BYTES, shown_size

_MAX_PAGES = 1_000
_LOGGED_CHARS = 2_000
_CLOSE_S = 20.0
_SESSION_GONE = "Session terminated"

# The SDK logs a traceback for an answer that it cannot hand on; the session's own error says what happened. A program
# that configures logging still gets it.
logging.getLogger("mcp").addHandler(logging.NullHandler())
logger = logging.getLogger("reward_kit.environments.mcp")


class Server(Protocol):
    """What a session talks to."""

    def connect(self) -> Transport:
        """The streams of messages from and to the server, as long as the context lasts."""
        ...

    async def exited(self, seconds: float) -> bool:
        """Wait until the server is known to be gone; whether it is."""
        ...

    def describe(self) -> str:
        """What is known of the server's end, for messages."""
        ...


class McpSession:
    """A session: `start` it, list and call tools, `close` it.

    Attributes:
        tools_changed: the server said that its tools are others now; `list_tools` clears it.
    """

    def __init__(
        self, server: Server, name: str, *, start_timeout_s: float, call_timeout_s: float, root: Path | None = None
    ) -> None:
        self._server, self._name, self._root = server, name, root
        self._start_timeout_s, self._call_timeout_s = start_timeout_s, call_timeout_s
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._closing = asyncio.Event()
        self.tools_changed = False

    async def start(self) -> None:
        """Connect and shake hands.

        Raises:
            ConfigError: there is no such program.
            EnvironmentFailure: the server crashed, cannot be reached, or speaks something else.
        """
        ready = self._ready = asyncio.get_running_loop().create_future()
        task = self._task = asyncio.create_task(self._serve(), name=f"session with {self._name}")
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            with anyio.move_on_after(self._start_timeout_s):
                await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() and not task.done():
                late = f"{self._name} did not answer within {self._start_timeout_s:g} s (start_timeout_s)"
                raise EnvironmentFailure(self._described(late))
            if not ready.done():
                raise self._end_of(task, "could not be started")
            undo.pop_all()

    @property
    def instructions(self) -> str | None:
        """What the server tells an agent about its use."""
        return self._client().instructions

    async def list_tools(self) -> list[mcp_types.Tool]:
        """All tools, over all pages.

        Raises:
            EnvironmentFailure: the server does not say.
        """
        self.tools_changed = False
        tools: list[mcp_types.Tool] = []
        cursor, size = None, 0
        with boundary(EnvironmentFailure, f"the tools of {self._name}"):
            for _ in range(_MAX_PAGES):
                try:
                    with anyio.fail_after(self._call_timeout_s):
                        page = await self._client().list_tools(cursor=cursor, cache_mode="bypass")
                except MCPError as error:
                    raise await self._lost(f"did not list its tools: {error.message}") from error
                tools += page.tools
                size += len(page.model_dump_json())
                if size > MCP_TOOLS_BYTES:
                    raise EnvironmentFailure(
                        f"{self._name} lists tools of more than {shown_size(MCP_TOOLS_BYTES)}, which is the limit"
                    )
                cursor = page.next_cursor
                if cursor is None:
                    return tools
        raise EnvironmentFailure(f"{self._name} lists its tools on more than {_MAX_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool.

        Raises:
            ToolError: the server refuses the call.
            NoAnswerError: the answer breaks the protocol, or the tool's own output schema.
            DeadlineError: no answer came in time; the call was cancelled and the session goes on.
            EnvironmentFailure: the server is gone.
        """
        client = self._client()
        try:
            with anyio.move_on_after(self._call_timeout_s):
                return await client.call_tool(tool, arguments, progress_callback=self._on_progress)
        except MCPError as error:
            if error.code == mcp_types.CONNECTION_CLOSED or error.message == _SESSION_GONE:
                raise await self._lost(f"is gone during {tool!r}") from error
            raise ToolError(f"{tool}: {error.message}") from error
        except pydantic.ValidationError as error:
            raise NoAnswerError(f"{tool}: the server's answer is no result: {error.errors()[0]['msg']}") from error
        except RuntimeError as error:  # the SDK's word for an answer that breaks the tool's output schema
            raise NoAnswerError(f"{tool}: {error}") from error
        raise DeadlineError(
            f"{tool} did not answer within {self._call_timeout_s:g} s and was cancelled (call_timeout_s)"
        )

    async def close(self) -> None:
        """End the session and the server that it started, also while this task is being cancelled."""
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
                    cache=None,
                    log_level="info",
                    logging_callback=self._on_log,
                    message_handler=self._on_message,
                    list_roots_callback=self._on_roots if self._root is not None else None,
                ) as client:
                    self._ready.set_result(client)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._listen, client)
                        await self._closing.wait()
                        tasks.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                raise _first(group) from group

    async def _listen(self, client: Client) -> None:
        """Ask for the news that the tools have changed, where the protocol's version wants to be asked."""
        offered = client.server_capabilities.tools
        if offered is None or not offered.list_changed:
            return
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self.tools_changed = True
        except ListenNotSupportedError:
            return  # an older version, which sends the news unasked
        except (SubscriptionLost, MCPError, TimeoutError) as error:
            logger.debug("%s: no news of changed tools: %s", self._name, error)

    def _client(self) -> Client:
        if self._task is None or self._ready is None or self._closing.is_set():
            raise EnvironmentFailure(f"the session with {self._name} is closed, or was not started")
        if self._task.done():
            raise self._end_of(self._task, "is gone")
        return self._ready.result()

    async def _lost(self, what: str) -> RewardKitError:
        """The failure of a server that is gone, with what can be learnt of its end."""
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
        found = self._server.describe()
        return f"{message}; {found}" if found else message

    async def _on_message(self, message: Any) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            self.tools_changed = True
        elif isinstance(message, Exception):
            logger.debug("%s sent what is no message: %s", self._name, message)

    async def _on_log(self, params: mcp_types.LoggingMessageNotificationParams) -> None:
        logger.info("%s says (%s): %.*s", self._name, params.level, _LOGGED_CHARS, params.data)

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        logger.debug("%s is at %s of %s: %.*s", self._name, progress, total, _LOGGED_CHARS, message)

    async def _on_roots(self, context: Any) -> mcp_types.ListRootsResult:
        assert self._root is not None
        uri = pydantic.FileUrl(self._root.as_uri())
        return mcp_types.ListRootsResult(roots=[mcp_types.Root(uri=uri, name="working copy")])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single error in a group, which is the one that ended the others."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
