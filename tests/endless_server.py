"""Servers with endless responses, and the memory that our clients need for them, in separate processes.

    python -m tests.endless_server json 0       # serves the response `json` on a free port, which it prints
    python -m tests.endless_server json 1000    # ends it after 1,000 MB

`peak` calls a client in a new process and returns the increase of its memory in MB, and the error of the call.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MB = 1_000_000
ROOT = Path(__file__).parents[1]
_JSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
_EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_CHUNK = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
_ENTRY = {"token": "a", "logprob": -0.5}
_BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
_DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}


def _event(value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _gzip_bomb() -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(b'{"choices": "') + packer.compress(b"x" * (300 * MB)) + packer.flush()


def _websocket_head(request: bytes) -> bytes:
    key = request.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return head + b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"


def _frame(opcode: int, body: bytes) -> bytes:
    return struct.pack("!BBQ", opcode, 127, len(body)) + body


ANSWERS: dict[str, tuple[str, bytes, bytes]] = {
    "json": (_JSON + "\r\n", b'{"choices": "', b"x" * 65536),
    "json-values": (_JSON + "\r\n", b'{"choices": [', b"[]," * 20000),
    "error": (_JSON.replace("200 OK", "500 Error") + "\r\n", b'{"error": "', b"x" * 65536),
    "refusal": (_JSON.replace("200 OK", "400 Bad Request") + "\r\n", b'{"error": "', b"x" * 65536),
    "event": (_EVENTS, b'data: {"choices": "', b"x" * 65536),
    "data-lines": (_EVENTS, b"", b"data: xxxxxxxx\n" * 4000),
    "comments": (_EVENTS, b"", b": still there\n\n" * 4000),
    "empty-events": (_EVENTS, b"", _event({"choices": [{"delta": {}}]}) * 1000),
    "text-events": (_EVENTS, b"", _event(_CHUNK) * 1000),
    "logprob-events": (_EVENTS, b"", _event({"choices": [{"logprobs": {"content": [_ENTRY] * 50}}]}) * 20),
    "list-events": (_EVENTS, b"", _event({"choices": [{"logprobs": {"content": [[]] * 5000}}]})),
    "call-events": (_EVENTS, b"", b""),
    "item-events": (_EVENTS, b"", _event({"type": "response.output_item.done", "item": {}}) * 1000),
    "long-item-events": (_EVENTS, b"", _event({"type": "response.output_item.done", "item": {"text": "x" * 65536}})),
    "response-text-events": (_EVENTS, b"", _event({"type": "response.output_text.delta", "delta": "word "}) * 1000),
    "block-events": (_EVENTS, b"", b""),
    "message-text-events": (_EVENTS, _event(_BLOCK), _event(_DELTA) * 1000),
    "message-delta-events": (_EVENTS, b"", b""),
    "after-done": (_EVENTS, _event(_CHUNK) + b"data: [DONE]\n\n", b"x" * 65536),
    "trickle": (_JSON + "\r\n", b'{"choices": "', b"x"),
    "event-trickle": (_EVENTS, b"", b":\n"),
    "silence": ("", b"", b""),
    "header": ("HTTP/1.1 200 OK\r\nX: ", b"", b"x" * 65536),
    "headers": ("HTTP/1.1 200 OK\r\n", b"", b"X: y\r\n" * 10000),
    "continues": ("", b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    "trailers": (_JSON + "Transfer-Encoding: chunked\r\n\r\n", b'2\r\n{"\r\n0\r\n', b"X: y\r\n" * 10000),
    "gzip": (_JSON + "Content-Encoding: gzip\r\n\r\n", b"", b""),
    "websocket-frame": ("", struct.pack("!BBQ", 0x81, 127, 2**40), b"x" * 65536),
    "websocket-fragments": ("", _frame(0x01, b"x"), _frame(0x00, b"x" * 65536)),
    "websocket-messages": ("", b"", _frame(0x81, b'{"type": "x"}') * 1000),
    "mcp-event": (_EVENTS, b'data: {"jsonrpc": "', b"x" * 65536),
    "mcp-events": (
        _EVENTS,
        b"",
        _event({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 99}})
        * 400,
    ),
}
"""Each response: its headers, the first bytes of its body, and the bytes to repeat."""


def _numbered(kind: str, number: int) -> bytes:
    """Return the next 1,000 values of a response, with their numbers."""
    numbers = range(number, number + 1000)
    if kind == "block-events":
        return b"".join(_event({**_BLOCK, "index": n}) for n in numbers)
    if kind == "message-delta-events":
        return b"".join(_event({"type": "message_delta", "delta": {f"key {n}": n}}) for n in numbers)
    return _event({"choices": [{"delta": {"tool_calls": [{"index": n, "function": {"name": "f"}} for n in numbers]}}]})


NUMBERED = ("call-events", "block-events", "message-delta-events")
SLOW = ("trickle", "event-trickle", "silence")


def serve(kind: str, most_mb: int) -> None:
    """Answer every request with an endless response, or with `most_mb` MB."""
    head, first, again = ANSWERS[kind]
    bomb = _gzip_bomb() if kind == "gzip" else b""

    def answer(connection: socket.socket) -> None:
        try:
            request = connection.recv(65536)
            if kind.startswith("websocket"):
                connection.sendall(_websocket_head(request))
            connection.sendall(head.encode() + first + bomb)
            sent = number = 0
            while not bomb and (not most_mb or sent < most_mb * MB):
                again_now = _numbered(kind, number) if kind in NUMBERED else again
                number += 1000
                connection.sendall(again_now)
                if kind in SLOW:
                    time.sleep(0.1)
                sent += len(again_now)
        except OSError:
            pass  # the client has enough
        finally:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


@contextmanager
def endless(kind: str, most_mb: int = 0) -> Iterator[int]:
    """Start a server in a subprocess and yield its port."""
    command = [sys.executable, "-m", "tests.endless_server", kind, str(most_mb)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


class Peak(NamedTuple):
    """Memory and error of a client's call.

    Attributes:
        mb: the most memory it had, above that before the call.
        kind: the name of the error's type; "" where there was none.
        message: the error's message.
        seconds: how long the call took.
    """

    mb: float
    kind: str
    message: str
    seconds: float


_CALLER = """
import asyncio, json, logging, re, sys, time
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1000
{prepare}
async def call():
{call}
async def measured():
    open("/proc/self/clear_refs", "w").write("5")
    base, error, started = memory("VmRSS"), None, time.monotonic()
    try:
        await call()
    except BaseException as raised:
        error = raised
    took = time.monotonic() - started
    print(json.dumps([memory("VmHWM") - base, type(error).__name__ if error else "", str(error or ""), took]))
asyncio.run(measured())
"""


def peak(prepare: str, call: str) -> Peak:
    """Call a client in a new process.

    Args:
        prepare: statements before: imports.
        call: statements that call it, in a coroutine.
    """
    code = _CALLER.format(prepare=textwrap.dedent(prepare), call=textwrap.indent(textwrap.dedent(call), "    "))
    path = os.environ.get("REWARD_KIT_MEASURED", str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
