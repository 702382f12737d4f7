"""The server of `reward-kit view`: on the loopback address alone, read-only, for whoever has the token."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from aiohttp import web

from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.runs.viewer import pages
from reward_kit.runs.viewer.access import TOKEN, Access
from reward_kit.runs.viewer.catalogue import Catalogue
from reward_kit.runs.viewer.shown_runs import Event, ShownRuns

LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.5
_ALIVE_EVERY = 30
Given = TypeVarTuple("Given")
Result = TypeVar("Result")
Told = Callable[[str], Awaitable[tuple[str, list[Event]]]]
"""From the mark of what a page knows to the mark of what is told now, and that: pairs of an event's name and data."""


class Viewer:
    """The handlers of one server.

    Args:
        catalogue: the runs that it shows.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._runs = ShownRuns(catalogue)
        self._looking = anyio.Lock()
        self._ending = anyio.Event()

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        return [
            web.get("/", self._index),
            web.get("/events", self._index_events),
            web.get("/{run}", self._with_slash),
            web.get("/{run}/", self._page),
            web.get("/{run}/figures", self._figures),
            web.get("/{run}/events", self._events),
            web.get("/{run}/episode/{id:.+}", self._episode),
            web.get("/{run}/group/{id:.+}", self._group),
        ]

    def end(self) -> None:
        """Let the streams of events end."""
        self._ending.set()

    async def _index(self, request: web.Request) -> web.Response:
        async with self._looking:
            return _html(await _in_thread(self._index_now))

    async def _index_events(self, request: web.Request) -> web.StreamResponse:
        async def told(mark: str) -> tuple[str, list[Event]]:
            async with self._looking:
                return await _in_thread(self._index_news, mark)

        return await self._stream(request, told)

    def _index_now(self) -> str:
        with self._catalogue.held():
            self._catalogue.look()
            return pages.index_page(self._catalogue)

    def _index_news(self, mark: str) -> tuple[str, list[Event]]:
        # A visitor who hangs up lets go of `_looking` while the thread still looks, so the catalogue is held as well.
        with self._catalogue.held():
            self._catalogue.look()
            now, known = self._catalogue.change, int(mark) if mark.isdecimal() else -1
            if not 0 <= known <= now:  # of another start of the server
                return str(now), [("reload", {})]
            return str(now), [("rows", pages.index_rows(self._catalogue, known))] if known < now else []

    async def _with_slash(self, request: web.Request) -> web.Response:
        name = request.match_info["run"]
        if self._catalogue.path_of(name) is None:
            raise web.HTTPNotFound(text="There is no such run.\n")
        return web.Response(status=303, headers={"Location": f"./{pages.quoted(name)}/"})

    async def _page(self, request: web.Request) -> web.Response:
        with _refusals("text/html"):
            return _html(await _in_thread(self._runs.page, request.match_info["run"]))

    async def _figures(self, request: web.Request) -> web.Response:
        with _refusals("text/html"):
            return _html(await _in_thread(self._runs.figures, request.match_info["run"]))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        async def told(mark: str) -> tuple[str, list[Event]]:
            return await _in_thread(self._runs.news, request.match_info["run"], mark)

        return await self._stream(request, told)

    async def _episode(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            text = await _in_thread(self._runs.episode, request.match_info["run"], request.match_info["id"])
            return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _group(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            run, group, around = request.match_info["run"], request.match_info["id"], request.query.get("around")
            text = await _in_thread(self._runs.group, run, group, around)
            return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _stream(self, request: web.Request, told: Told) -> web.StreamResponse:
        """Tell a page what is new to it until it hangs up, a file is damaged, or the server ends."""
        mark = request.headers.get("Last-Event-ID") or request.query.get("since", "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        with contextlib.suppress(ConnectionError):
            async for event in self._news(told, mark):
                await response.write(_written(*event))
        return response

    async def _news(self, told: Told, mark: str) -> AsyncIterator[tuple[str, Any, str]]:
        silent = 0
        while not self._ending.is_set():
            try:
                mark, events = await told(mark)
            except (ConfigError, StoreError) as error:
                yield "trouble", {"message": pages.in_words(error)}, mark
                return
            for name, data in events:
                yield name, data, mark
            silent = 0 if events else silent + 1
            if silent % _ALIVE_EVERY == _ALIVE_EVERY - 1:  # so that a page that is gone is noticed
                yield "alive", {}, mark
            with anyio.move_on_after(_LOOK_EVERY_S):
                await self._ending.wait()


@asynccontextmanager
async def serving(catalogue: Catalogue, port: int = 0, access: Access | None = None) -> AsyncIterator[str]:
    """Serve the runs of a catalogue inside the block.

    Args:
        catalogue: the runs.
        port: on which; 0 takes a free one.
        access: who may read; by default whoever has the token of the address.

    Yields:
        The address to open, with its token.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """
    access = access or Access()
    app = web.Application()
    access.install(app)
    viewer = Viewer(catalogue)
    app.add_routes(viewer.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            told = error.strerror or error
            raise ConfigError(f"--port {port}: {told}; choose another, or none for a free one") from error
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/?{TOKEN}={access.token}"
    finally:
        viewer.end()
        await runner.cleanup()


async def _in_thread(function: Callable[[*Given], Result], *arguments: *Given) -> Result:
    """A call that reads files or makes a page, beside the event loop."""
    return await anyio.to_thread.run_sync(function, *arguments)


def _written(name: str, data: Any, mark: str) -> bytes:
    """One event of a stream; JSON has no line breaks, so its data is one line.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    return f"event: {name}\nid: {mark}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode("ascii")


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", charset="utf-8")


@contextlib.contextmanager
def _refusals(kind: str) -> Iterator[None]:
    """What cannot be shown is answered with why: as a page ("text/html") or as a sentence ("text/plain")."""
    try:
        with boundary(StoreError, "this cannot be shown"):
            yield
    except (ConfigError, StoreError) as error:
        told = pages.in_words(error)
        text = pages.problem_page(told) if kind == "text/html" else told
        raise web.HTTPNotFound(text=text, content_type=kind) from error
