"""A served viewer of a folder and an HTTP client for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from reward_kit.report.viewer_runs import RunCatalog
from reward_kit.report.viewer_server import serving


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: str


class ViewerClient:
    """A client of one server; `cookie` is sent with each request if set."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        self.port = parts.port or 0
        self.token = parts.query.removeprefix("token=")
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = ""

    async def enter(self) -> ViewerClient:
        """Exchange the token for the cookie, as a browser does."""
        answer = await self.get(f"/?token={self.token}")
        assert answer.status == 303
        self.cookie = answer.headers["set-cookie"].split(";")[0]
        return self

    async def get(self, path: str, **headers: str | None) -> Answer:
        """`get("/x", Host="evil.example")`: a header of None is not sent."""
        return await self.ask("GET", path, **headers)

    async def post(self, path: str, document: Any, **headers: str | None) -> Answer:
        """Post a document as JSON, as the viewer's pages do; bytes are sent unchanged."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        given = {"Origin": f"http://{self.host}", "Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
        given |= {"Content_Type": "application/json", "Content_Length": str(len(body))}
        return await self.ask("POST", path, body=body, **{**given, **headers})

    async def ask(self, method: str, path: str, *, body: bytes = b"", **headers: str | None) -> Answer:
        reader, writer = await self.sent(method, path, headers)
        writer.write(body)
        data = await reader.read()
        writer.close()
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        told = dict(line.split(": ", 1) for line in lines)
        return Answer(int(first.split()[1]), {key.lower(): value for key, value in told.items()}, body.decode())

    async def sent(
        self, method: str, path: str, headers: Mapping[str, str | None] = MappingProxyType({})
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        given = {"Host": self.host, "Cookie": self.cookie or None, "Connection": "close"}
        given |= {key.replace("_", "-"): value for key, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{key}: {value}" for key, value in given.items() if value is not None)]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        return reader, writer

    @asynccontextmanager
    async def events(self, path: str) -> AsyncIterator[asyncio.Queue[tuple[str, Any, str]]]:
        """Yield the events of a stream: name, data, mark."""
        reader, writer = await self.sent("GET", path)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        found: asyncio.Queue[tuple[str, Any, str]] = asyncio.Queue()

        async def read() -> None:
            event: dict[str, str] = {}
            while line := await reader.readline():
                key, _, value = line.decode().rstrip("\r\n").partition(": ")
                if key in ("event", "id", "data"):
                    event[key] = value
                elif event and not key:
                    await found.put((event["event"], json.loads(event["data"]), event["id"]))
                    event = {}

        task = asyncio.create_task(read())
        try:
            yield found
        finally:
            task.cancel()
            writer.close()


@asynccontextmanager
async def visiting(folder: Path, only: str | None = None) -> AsyncIterator[ViewerClient]:
    """Yield a client that has opened the address of a viewer of this folder."""
    async with serving(RunCatalog(folder, only)) as address:
        yield await ViewerClient(address).enter()
