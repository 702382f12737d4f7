"""A reward server in the running event loop, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from reward_kit.integrations.reward_server.options import Keys, ServerOptions
from reward_kit.integrations.reward_server.server import NamedReward, serving
from reward_kit.typed_interface import reward_spec

KEY = "a-key-of-this-test-alone"
ROLLOUT = {"messages": [{"role": "assistant", "content": "42"}], "ground_truth": "42"}


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Return the message of an error response."""
        return str(self.json()["error"]["message"])


class RawClient:
    """A client that opens a new connection for each request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = urlsplit(address).port or 0

    async def get(self, path: str, key: str | None = KEY, method: str = "GET", **headers: str) -> Answer:
        return await self.ask(method, path, b"", key, **headers)

    async def post(self, path: str, body: Any, key: str | None = KEY, **headers: str) -> Answer:
        """POST a JSON value, or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", path, data, key, **{"Content-Type": "application/json", **headers})

    async def score(self, name: str, body: Any = ROLLOUT) -> Answer:
        return await self.post(f"/v1/rewards/{name}/score", body)

    async def ask(self, method: str, path: str, body: bytes, key: str | None, **headers: str) -> Answer:
        reader, writer = await self.open(method, path, key, **{"Content-Length": str(len(body)), **headers})
        writer.write(body)
        return await self.answer(reader, writer, method)

    async def open(
        self, method: str, path: str, key: str | None = KEY, **headers: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection on which the head of a request was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        all_headers = {"Host": "x", "Connection": "close", **headers}
        if key is not None:
            all_headers["Authorization"] = f"Bearer {key}"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return reader, writer

    @staticmethod
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str = "GET") -> Answer:
        """Return the response, if any; fail on further data."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = b"" if method == "HEAD" else await reader.readexactly(int(headers["content-length"]))
        writer.close()
        return Answer(int(first.split()[1]), headers, body)


@asynccontextmanager
async def server(
    *rewards: Callable[..., Any], keys: tuple[str, ...] = (KEY,), **options: Any
) -> AsyncIterator[RawClient]:
    """Serve functions in this process."""
    specs = [reward_spec(reward) for reward in rewards]
    named = [NamedReward(spec.id, spec) for spec in specs]
    async with serving(named, Keys(keys), ServerOptions(**options)) as running:
        yield RawClient(running.address)
