"""A server that is a child process: messages are lines on its standard input and output, its errors go to a log.

A transport of our own in the place of the SDK's `stdio_client`, which reads a message of n bytes in O(n²), logs a
traceback for every line that is no message, hides the exit status, and starts what our guardian does not know.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import mcp_types
from mcp.shared.message import SessionMessage

from reward_kit.environments.mcp.config import Launch
from reward_kit.processes import ChildProcess, child_environment, start_process
from reward_kit.safe_input import MCP_MESSAGE_BYTES, MCP_MESSAGE_VALUES, TooLargeError, check_values, shown_size

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.client._transport import TransportStreams

_CHUNK_BYTES = 1 << 20
_FLUSH_S = 0.5
_GRACE_S = 2.0
_SHOWN_CHARS = 200

logger = logging.getLogger("reward_kit.environments.mcp")


class StdioServer:
    """One server process. `connect` runs it; `describe` says what became of it."""

    def __init__(self, launch: Launch, log_name: str) -> None:
        self._launch, self._log_name = launch, log_name
        self._child: ChildProcess | None = None
        self._strays = 0
        self._first_stray = ""
        self._problem = ""

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[TransportStreams, None]:
        """Start the server, exchange messages with it, and end it with all that it has started.

        Raises:
            ConfigError: there is no such program, or it cannot be run.
        """
        environment = child_environment(self._launch.env, pass_names=self._launch.pass_env)
        child = self._child = await start_process(
            self._launch.command, cwd=self._launch.cwd, env=environment, log_name=self._log_name, piped=True
        )
        arrive, arrived = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        leave, leaving = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with arrive, arrived, leave, leaving, anyio.create_task_group() as tasks:
                reader, writer = await _pipes(child)
                tasks.start_soon(self._read, reader, arrive)
                written = anyio.Event()
                tasks.start_soon(self._write, leaving, writer, written, arrive)
                try:
                    yield arrived, leave
                finally:
                    with anyio.CancelScope(shield=True):
                        # What the server still wants to say is read and dropped, or it could not read our farewell.
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
        """Wait for the process to exit by itself; whether it did."""
        with anyio.move_on_after(seconds):
            # A status that nobody reaped yet can only be polled.
            while self._child is not None and self._child.returncode is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        return self._child is not None and self._child.returncode is not None

    def describe(self) -> str:
        """What the process left: its exit status, what was no message, and the end of its log."""
        if self._child is None:
            return ""
        code = self._child.returncode
        parts = [self._problem] if self._problem else []
        if code is not None:
            parts.append(f"exit code {code}" if code >= 0 else f"ended by signal {-code}")
        if self._strays:
            parts.append(f"{self._strays} lines on its standard output are no messages, the first {self._first_stray}")
        tail = self._child.log_tail()
        return "; ".join([*parts, f"its log ends with:\n{tail}" if tail else "its log is empty"])

    async def _read(
        self, reader: asyncio.StreamReader, arrive: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        is_open = True
        async with arrive:
            async for line in self._lines(reader):
                message = self._parsed(line) if is_open and line.strip() else None
                if message is not None:
                    try:
                        await arrive.send(message)
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        is_open = False

    async def _lines(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """The lines up to the first one that is larger than a message may be, which ends the session."""
        try:
            async for line in _limited_lines(reader):
                yield line
        except TooLargeError as error:
            self._problem = f"it sent a message of more than {error}, which is the limit"

    def _parsed(self, line: bytes) -> SessionMessage | None:
        try:
            return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            pass_on = _repaired(line)
        if pass_on is None:
            self._note_stray(line)
        return pass_on

    def _note_stray(self, line: bytes) -> None:
        shown = repr(line[:_SHOWN_CHARS].decode("utf-8", "replace")) + (" …" if len(line) > _SHOWN_CHARS else "")
        self._strays += 1
        if self._strays == 1:
            self._first_stray = shown
            logger.info("%s prints on its standard output what is no message: %s", self._launch.command[0], shown)

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
            # It no longer reads. Whoever waits for an answer learns it from the closed stream.
            self._problem = self._problem or "it closed its standard input"
            arrive.close()
        finally:
            written.set()


async def _limited_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line without its end.

    Raises:
        TooLargeError: a line has too many bytes, or too many JSON values.
    """
    line = bytearray()
    while chunk := await reader.read(_CHUNK_BYTES):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            line += piece
            whole, line = bytes(line), bytearray()
            check_values(whole, MCP_MESSAGE_VALUES)
            yield whole
        line += rest
        if len(line) > MCP_MESSAGE_BYTES:
            raise TooLargeError(shown_size(MCP_MESSAGE_BYTES))


def _repaired(line: bytes) -> SessionMessage | None:
    """A message with half characters, which JSON can write and UTF-8 cannot, as U+FFFD; None where it is no message."""
    try:
        text = json.dumps(json.loads(line.decode("utf-8", "replace")), ensure_ascii=False)
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(whole, by_name=False))
    except (ValueError, RecursionError):
        return None


async def _pipes(child: ChildProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The child's pipes as asyncio's streams."""
    loop = asyncio.get_running_loop()
    stdin, stdout = child.pipes
    reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdout)
    # The writing end needs a protocol with flow control; the reader in it reads nothing.
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stdin
    )
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)
