"""The server of `reward-kit view`. It is restricted to this machine and protected by a token.

The server writes only `labels.jsonl`."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
from aiohttp import web
from anyio.to_thread import run_sync

from reward_kit.display_text import escape_text
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary
from reward_kit.report.episode_chunks import LineFitter, group_text, served
from reward_kit.report.rendering import NAME_LENGTH, as_script_data, asset, bundle, name_from_link, render
from reward_kit.report.run_figures import (
    Cell,
    DataTable,
    TableColumn,
    episodes_table,
    groups_table,
    metric_columns,
    samples_table,
    tables_data,
)
from reward_kit.report.run_page import labels_data, run_page
from reward_kit.report.run_slices import slice_columns
from reward_kit.report.training_data import read_training
from reward_kit.report.training_page import training_page
from reward_kit.report.trend_page import LatencyReader, trend_page
from reward_kit.report.viewer_access import TOKEN, Access
from reward_kit.report.viewer_runs import GroupLines, RunCatalog, RunRow, WatchedRun
from reward_kit.runs.files import KEPT_EPISODES, METRICS_FILE, RUN_FILE, SUMMARY_FILE
from reward_kit.runs.label_file import append_label, parse_label
from reward_kit.runs.run_folder import RunHeader

LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.5
_ALIVE_EVERY = 30
_MOST_IN_MEMORY = 8
_MESSAGE_LENGTH = 600
_TREND = "/-/trend"  # no page of a run has this path, even of a run named "-"
_MOST_POSTED = 1 << 16  # the maximum size of a request's body in bytes
_COLUMNS = (
    TableColumn("run", "run", "link"),
    TableColumn("policy", "policy", "id"),
    TableColumn("task", "task", "link"),
    TableColumn("status", "status", "word"),
    TableColumn("episodes", "episodes", "count"),
    TableColumn("mean", "mean score", "score"),
    TableColumn("low", "95% from", "score"),
    TableColumn("high", "to", "score"),
    TableColumn("cost", "cost", "cost"),
    TableColumn("began", "began (UTC)", "word"),
    TableColumn("note", "note", "text"),
)
Event = tuple[str, Mapping[str, Any]]
EventSource = Callable[[str], Awaitable[tuple[str, list[Event]]]]
"""A function from a page's mark to the current mark and the events since then, each a name and data."""


@asynccontextmanager
async def serving(catalog: RunCatalog, port: int = 0, access: Access | None = None) -> AsyncIterator[str]:
    """Serve the runs of a catalog during the block and yield the address."""
    access = access or Access()
    app = web.Application(client_max_size=_MOST_POSTED)
    access.install(app)
    viewer = _Viewer(catalog)
    app.add_routes(
        [
            web.get("/", viewer.index),
            web.get("/events", viewer.index_events),
            web.get(_TREND, viewer.trend),
            web.get("/{run}", viewer.with_slash),
            web.get("/{run}/", viewer.page),
            web.get("/{run}/figures", viewer.figures),
            web.get("/{run}/events", viewer.events),
            web.get("/{run}/search", viewer.search),
            web.get("/{run}/labels", viewer.labels),
            web.post("/{run}/labels", viewer.add_label),
            web.get("/{run}/episode/{id:.+}", viewer.episode),
            web.get("/{run}/group/{id:.+}", viewer.group),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"--port {port}: {why}; choose another port, or omit the option to use a free one"
            ) from error
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/?{TOKEN}={access.token}"
    finally:
        viewer.ending.set()
        await runner.cleanup()


class _Viewer:
    """The handlers of a server. Its event streams end when the event `ending` is set."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.ending = anyio.Event()
        self._catalog = catalog
        self._runs = _OpenRuns(catalog)
        self._looking = anyio.Lock()
        self._latencies = LatencyReader()

    async def index(self, request: web.Request) -> web.Response:
        def page() -> str:
            with self._catalog.held():
                self._catalog.poll()
                return _index_page(self._catalog)

        async with self._looking:
            return _html(await run_sync(page))

    async def trend(self, request: web.Request) -> web.Response:
        def page() -> str:
            with self._catalog.held():
                self._catalog.poll()
            return trend_page(self._catalog, request.query.get("task", ""), self._latencies)

        async with self._looking:
            with _refusals("text/html"):
                return _html(await run_sync(page))

    async def index_events(self, request: web.Request) -> web.StreamResponse:
        def poll(mark: str) -> tuple[str, list[Event]]:
            # A disconnecting client releases `_looking` while the thread still polls, so hold the catalog too.
            with self._catalog.held():
                self._catalog.poll()
                now, known = self._catalog.change, int(mark) if mark.isdecimal() else -1
                if not 0 <= known <= now:  # the mark is from an earlier start of the server
                    return str(now), [("reload", {})]
                changed = [_cells(row) for row in self._catalog.changed_since(known)]
                # Send the names of all runs, since some may have been removed.
                return str(now), [("rows", {"changed": changed, "all": self._catalog.names})] if known < now else []

        async def news(mark: str) -> tuple[str, list[Event]]:
            async with self._looking:
                return await run_sync(poll, mark)

        return await self._stream(request, news)

    async def with_slash(self, request: web.Request) -> web.Response:
        name = request.match_info["run"]
        if self._catalog.run_path(name) is None:
            raise web.HTTPNotFound(text="Unknown run.\n")
        return web.Response(status=303, headers={"Location": f"./{_quoted(name)}/"})

    async def page(self, request: web.Request) -> web.Response:
        with _refusals("text/html"):
            return _html(await run_sync(self._runs.page, request.match_info["run"]))

    async def figures(self, request: web.Request) -> web.Response:
        with _refusals("text/html"):
            return _html(await run_sync(self._runs.figures, request.match_info["run"]))

    async def events(self, request: web.Request) -> web.StreamResponse:
        async def news(mark: str) -> tuple[str, list[Event]]:
            return await run_sync(self._runs.news, request.match_info["run"], mark)

        return await self._stream(request, news)

    async def search(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            ids = await run_sync(self._runs.search, request.match_info["run"], request.query.get("q", ""))
            return web.json_response({"ids": ids})

    async def labels(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            run, rollout_id = request.match_info["run"], request.query.get("rollout_id", "")
            return web.json_response(await run_sync(self._runs.labels, run, rollout_id))

    async def add_label(self, request: web.Request) -> web.Response:
        try:
            line = parse_label(await request.json())
        except (ValueError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"The body is not JSON: {error}\n"[:_MESSAGE_LENGTH]) from error
        except ConfigError as error:
            raise web.HTTPBadRequest(text=_message(error)) from error
        with _refusals("text/plain"):
            return web.json_response(await run_sync(self._runs.add_label, request.match_info["run"], line))

    async def episode(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            text = await run_sync(self._runs.episode, request.match_info["run"], request.match_info["id"])
            return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def group(self, request: web.Request) -> web.Response:
        with _refusals("text/plain"):
            run, group, around = request.match_info["run"], request.match_info["id"], request.query.get("around")
            text = await run_sync(self._runs.group, run, group, around)
            return web.Response(body=text, content_type="text/plain", charset="utf-8")

    async def _stream(self, request: web.Request, news: EventSource) -> web.StreamResponse:
        """Send events to a page until it disconnects, a file is damaged, or the server stops."""
        mark = request.headers.get("Last-Event-ID") or request.query.get("since", "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        silent, is_damaged = 0, False
        with contextlib.suppress(ConnectionError):
            while not self.ending.is_set() and not is_damaged:
                try:
                    mark, events = await news(mark)
                except (ConfigError, StoreError) as error:
                    events, is_damaged = [("trouble", {"message": _message(error)})], True
                silent = 0 if events else silent + 1
                if silent % _ALIVE_EVERY == _ALIVE_EVERY - 1:  # to notice closed pages
                    events = [("alive", {})]
                for name, data in events:
                    # JSON text has no line breaks here, so the data is one line.
                    # https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
                    text = f"event: {name}\nid: {mark}\ndata: {json.dumps(data, allow_nan=False)}\n\n"
                    await response.write(text.encode("ascii"))
                if not is_damaged:
                    with anyio.move_on_after(_LOOK_EVERY_S):
                        await self.ending.wait()
        return response


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", charset="utf-8")


@contextlib.contextmanager
def _refusals(kind: str) -> Iterator[None]:
    """Convert errors to responses with the error message, as a page ("text/html") or as text ("text/plain")."""
    try:
        with boundary(StoreError, "this page cannot be shown"):
            yield
    except (ConfigError, StoreError) as error:
        text = _message(error)
        page = _viewer_page("problem.html.j2", "", message=text) if kind == "text/html" else text
        raise web.HTTPNotFound(text=page, content_type=kind) from error


# Pages


def _index_page(catalog: RunCatalog) -> str:
    """Return the table of runs as of the last poll."""
    cells = [_cells(row) for row in catalog.rows]
    table = DataTable("runs", "Runs", _COLUMNS, cells, key=2).with_choices("task", "policy", "status")
    script = bundle(("base.js", "tables.js", "events.js")) + _mark_script(str(catalog.change)) + asset("index.js")
    data = as_script_data(tables_data([table]))
    return _viewer_page("index.html.j2", script, data, table=table, folder=catalog.title)


def _viewer_page(template: str, script: str, data: str = "", **values: Any) -> str:
    styles = ("page.css", "viewer.css")
    return render(template, None, styles=styles, script=script, trusted={"data": data}, may_connect=True, **values)


def _cells(row: RunRow) -> list[Cell]:
    figures = (row.episodes, row.mean, row.low, row.high, row.cost, row.began, row.note)
    run = [escape_text(row.run, NAME_LENGTH), f"./{_quoted(row.run)}/"]
    task = [row.task, f".{_TREND}?task={_quoted(row.task)}"] if row.episodes is not None else row.task
    return [run, row.policy, task, row.status, *figures]


def _live_script(mark: str) -> str:
    """Return the script that updates a page, starting from a mark."""
    return _mark_script(mark) + bundle(("events.js", "live.js"))


def _mark_script(mark: str) -> str:
    """Return the script that sets the mark of a page. A mark consists of digits, letters and dashes."""
    return f'RK.mark = "{mark}";\n'


def _message(error: RewardKitError) -> str:
    return escape_text(str(error), _MESSAGE_LENGTH)


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")


# Open runs


@dataclass(slots=True)
class _Shown:
    """A run in memory, and its latest figures."""

    watch: WatchedRun
    fitter: LineFitter
    lock: threading.Lock = field(default_factory=threading.Lock)
    figures: str = ""
    figures_are_of: str = ""
    columns: Collection[str] = ()  # dataset columns that form slices, as of the last page
    metrics: Sequence[str] = ()  # metrics with a column, as of the last page

    @property
    def mark(self) -> str:
        return f"{self.watch.epoch}-{self.watch.change}"

    def text(self, group: GroupLines) -> bytes:
        """Return the lines of a group for the script of the page. The first line describes the group."""
        return b'G{"size":%d,"first":%d}\n' % (group.size, group.first) + group_text(group.lines, self.fitter)


class _OpenRuns:
    """The recently used runs, and the pages of training runs."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._runs: OrderedDict[str, _Shown] = OrderedDict()
        self._training: OrderedDict[Path, tuple[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, name: str) -> str:
        """Return the current page of a run."""
        path = self._run_path(name)
        if _is_training(path):
            return self._training_page(path)
        run = self._shown(name, path)
        with run.lock:
            run.watch.poll_all()
            facts, script = run.watch.facts(), _live_script(run.mark) + asset("viewer.js")
            run.columns, run.metrics = slice_columns(facts.episodes), metric_columns(facts.episodes)
            return run_page(facts, served(path), script, columns=run.columns, metrics=run.metrics)

    def figures(self, name: str) -> str:
        """Return the page without table rows. It is used to update the figures of an open page."""
        path = self._run_path(name)
        if _is_training(path):
            return self._training_page(path)
        run = self._shown(name, path)
        with run.lock:
            run.watch.poll_all()
            if run.mark != run.figures_are_of:
                mark, facts = run.mark, run.watch.facts()
                run.figures, run.figures_are_of = (
                    run_page(facts, served(path), has_rows=False, columns=run.columns, metrics=run.metrics),
                    mark,
                )
            return run.figures

    def news(self, name: str, mark: str) -> tuple[str, list[Event]]:
        """Return the events since the mark of a page."""
        path = self._run_path(name)
        if _is_training(path):
            return (now := training_mark(path)), [("figures", {})] if now != mark else []
        run = self._shown(name, path)
        with run.lock:
            run.watch.poll()
            now, (epoch, _, change) = run.mark, mark.partition("-")
            if epoch != run.watch.epoch or not change.isdecimal():
                return now, [("reload", {})]
            if now == mark:
                return now, []
            changed, threshold = run.watch.changed_since(int(change)), run.watch.pass_threshold
            if not run.metrics and metric_columns(changed):
                return now, [("reload", {})]  # the first scores add columns
            beside = run.watch.beside(changed)
            tables = (
                samples_table(beside, threshold),
                groups_table(beside),
                episodes_table(changed, threshold, run.watch.labels, run.columns, run.metrics, run.watch.curves),
            )
            rows: Event = ("rows", {table.name: table.rows for table in tables})
            return now, [*([rows] if changed else []), ("figures", {})]

    def search(self, name: str, query: str) -> list[str]:
        """Return the ids of the episodes whose text contains a query."""
        return self._ready(name).watch.find(query)

    def labels(self, name: str, rollout_id: str) -> dict[str, Any]:
        """Return the labels of an episode."""
        return labels_data(self._ready(name).watch.labels.get(_decoded(rollout_id), {}))

    def add_label(self, name: str, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append a label to the file of the run, and return the labels of the episode."""
        watch = self._ready(name).watch
        watch.check_step(line["rollout_id"], line.get("step"))
        append_label(watch.path, line)
        return labels_data(self._ready(name).watch.labels.get(line["rollout_id"], {}))

    def episode(self, name: str, rollout_id: str) -> bytes:
        """Return the stored lines of an episode's group for the script of the page."""
        run = self._ready(name)
        return run.text(run.watch.episode_lines(_decoded(rollout_id)))

    def group(self, name: str, group_id: str, around: str | None) -> bytes:
        """Return the stored lines of a group.

        For a large group, return the part that contains the episode `around`.
        """
        run = self._ready(name)
        return run.text(run.watch.group_lines(_decoded(group_id), _decoded(around) if around is not None else None))

    def _ready(self, name: str) -> _Shown:
        run = self._shown(name, self._run_path(name))
        with run.lock:
            run.watch.poll_all()
        return run

    def _run_path(self, name: str) -> Path:
        path = self._catalog.run_path(name)
        if path is None:
            raise ConfigError("Unknown run. It may have been removed.")
        return path

    def _shown(self, name: str, path: Path) -> _Shown:
        with self._lock:
            known = self._runs.get(name)
            if known is None:
                watch = WatchedRun(path)
                known = self._runs[name] = _Shown(watch, LineFitter(watch.header))
            self._runs.move_to_end(name)
            while len(self._runs) > _MOST_IN_MEMORY:
                self._runs.popitem(last=False)
            return known

    def _training_page(self, run: Path) -> str:
        """Return the page of a training run. It is created again if a file has changed."""
        with self._lock:
            mark = training_mark(run)
            if run not in self._training or self._training[run][0] != mark:
                page = training_page(read_training(run), _live_script(mark), is_served=True)
                self._training[run] = (mark, page)
            self._training.move_to_end(run)
            while len(self._training) > _MOST_IN_MEMORY:
                self._training.popitem(last=False)
            return self._training[run][1]


def training_mark(run: Path) -> str:
    """Return the state of the files of a training run as digits and dashes.

    Only complete files of episodes are moved into their directory, so the directory's modification time reflects every
    change.
    """
    parts = []
    for name in (RUN_FILE, METRICS_FILE, SUMMARY_FILE, KEPT_EPISODES):
        try:
            facts = (run / name).stat()
            parts += [facts.st_ino, facts.st_size, facts.st_mtime_ns]
        except OSError:
            parts.append(0)
    return "-".join(map(str, parts))


def _is_training(run: Path) -> bool:
    return RunHeader.read_folder(run).training is not None


def _decoded(name: str) -> str:
    try:
        return name_from_link(name)
    except ValueError:
        raise ConfigError(f"{name!r} is not a valid name") from None
