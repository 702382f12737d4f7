"""`RemoteSandbox`: calls of confined code on another machine or in a container, as `Sandbox` makes them here."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from reward_kit.errors import ConfigError, Failure
from reward_kit.sandbox.back_ends import BackEnd, Launch, back_end_of
from reward_kit.sandbox.frames import FrameError, decode
from reward_kit.sandbox.host import Sandbox
from reward_kit.sandbox.limits import Limits
from reward_kit.sandbox.link import Link, LinkLost, NotConfined
from reward_kit.sandbox.outcome import Level, Outcome, Strength, Walls
from reward_kit.sandbox.program import Program
from reward_kit.sandbox.wire import Answer, ToldOutcome, WireError, fields_of, most_bytes_of
from reward_kit.sandbox.worker import request_of

_SLACK_S = 150.0
"""How much longer than a call may take its answer is waited for: a zygote there may first have much to import."""
_MOST_LINKS = 4

_Paths = tuple[str, ...]
_WarmKey = tuple[Program, Limits]


class Confinement(Protocol):
    """What `Sandbox` and `RemoteSandbox` have in common; the one is as good as the other for who calls code."""

    @property
    def strength(self) -> Walls:
        """The walls in use."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def call(
        self, program: Program, request: Any, *, limits: Limits | None = None, level: Level = "isolated"
    ) -> Outcome:
        """As `Sandbox.call`."""

    async def ask(self, program: Program, inputs: Sequence[Any], *, limits: Limits | None = None) -> list[Outcome]:
        """As `Sandbox.ask`."""


def sandbox_at(
    back_end: str | None, *, strength: Strength | Literal["auto"] = "auto", slots: int | None = None
) -> Confinement:
    """A sandbox on this machine, or in the back end that is named.

    Raises:
        ConfigError: there is no such back end.
    """
    if back_end is None:
        return Sandbox(strength=strength, slots=slots)
    return RemoteSandbox(back_end_of(back_end), strength=strength, slots=slots)


class RemoteSandbox:
    """Runs programs behind walls elsewhere, for the length of an `async with`.

    A connection that is lost fails the calls under way, which may be made again, and is made again by the next call.

    Args:
        back_end: where.
        strength: the walls there. "auto" takes the strongest; where a container engine allows none inside, "container":
            the container itself, and one for each call. "container" can be named as well.
        slots: calls at once; by default the number of CPUs there.

    Raises:
        ConfigError: on entering, where the back end cannot be used or does not confine; it says what to do.
    """

    def __init__(
        self, back_end: BackEnd, *, strength: Walls | Literal["auto"] = "auto", slots: int | None = None
    ) -> None:
        if slots is not None and slots < 1:
            raise ConfigError(f"slots must be at least 1, not {slots}")
        if strength == "process" or (strength == "container" and not back_end.can_contain):
            raise ConfigError(f"{back_end.name} is not used with strength {strength!r}, which confines nothing there")
        self._back_end, self._slots = back_end, slots
        self._may_contain = back_end.can_contain and strength in ("auto", "container")
        self._inner: Strength | Literal["auto"] = "process" if strength == "container" else strength
        self._strength: Walls | None = None
        self._open_links: set[Link] = set()
        self._links: OrderedDict[_Paths, asyncio.Future[Link]] = OrderedDict()
        self._warm: OrderedDict[Link, _WarmKey] = OrderedDict()
        self._is_open = False

    @property
    def strength(self) -> Walls:
        """The walls in use."""
        if self._strength is None:
            raise ConfigError("the sandbox is used before `async with` has opened it")
        return self._strength

    async def __aenter__(self) -> Self:
        link = await self._first_link()
        self._slots = self._slots or link.processors
        self._free = asyncio.Semaphore(self._slots)
        self._inner, self._is_open = link.strength, True
        if link.strength == "process":
            self._strength = "container"
            await self._close(link)
        else:
            self._strength = link.strength
            self._links[()] = asyncio.get_running_loop().create_future()
            self._links[()].set_result(link)
        return self

    async def _first_link(self) -> Link:
        if self._inner != "process":
            try:
                return await self._open(self._back_end.launch(), self._slots)
            except NotConfined:
                if not self._may_contain:
                    raise
        self._inner = "process"
        return await self._open(self._back_end.launch(limits=Limits()), 1)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        opening, self._links, self._warm = list(self._links.values()), OrderedDict(), OrderedDict()
        for attempt in opening:
            attempt.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(self._close(link) for link in list(self._open_links)))

    async def call(
        self, program: Program, request: Any, *, limits: Limits | None = None, level: Level = "isolated"
    ) -> Outcome:
        """As `Sandbox.call`; `program.read_paths` and `search_paths` are of the place where it runs.

        Raises:
            ConfigError: as for `Sandbox.call`.
        """
        calls = [request_of(program, request)]
        return (await self._put("call", program, calls, limits or Limits(), level))[0]

    async def ask(self, program: Program, inputs: Sequence[Any], *, limits: Limits | None = None) -> list[Outcome]:
        """As `Sandbox.ask`.

        Raises:
            ConfigError: as for `call`.
        """
        calls = [request_of(program, value) for value in inputs]
        return await self._put("ask", program, calls, limits or Limits(), "isolated")

    async def _put(
        self, do: str, program: Program, calls: Sequence[bytes], limits: Limits, level: Level
    ) -> list[Outcome]:
        if not self._is_open:
            raise ConfigError("the sandbox is used outside of its `async with`")
        order = {"do": do, "program": fields_of(program), "limits": asdict(limits), "level": level}
        body = b"[" + b",".join(calls) + b"]"
        wait_s, most = limits.wall_s + _SLACK_S, most_bytes_of(limits, len(calls))
        async with self._free:
            try:
                async with self._linked(program, limits, level) as link:
                    answer, values = await link.ask(order, body, wait_s=wait_s, max_bytes=most)
                    outcomes = self._outcomes(link, answer, values, len(calls), level)
                    if self._strength == "container" and any(outcome.failure for outcome in outcomes):
                        link.lose("a call failed in it")  # nothing else tells what it may have left there
                    return outcomes
            except LinkLost as error:
                return [self._lost(error, level)] * len(calls)

    def _outcomes(self, link: Link, answer: Answer, values: bytes, count: int, level: Level) -> list[Outcome]:
        if answer.refusal:
            raise ConfigError(f"{self._back_end.name}: {answer.refusal}")
        try:
            found = decode(values)
            if not isinstance(found, list) or not len(found) == len(answer.outcomes) == count:
                raise WireError(f"it gave {len(answer.outcomes)} outcomes to {count} requests")
            return [
                _outcome(told, value, level, self.strength) for told, value in zip(answer.outcomes, found, strict=True)
            ]
        except (WireError, FrameError) as error:
            link.lose(str(error))
            raise LinkLost(str(error)) from None

    def _lost(self, error: LinkLost, level: Level) -> Outcome:
        message = f"the connection to {self._back_end.name} was lost: {error}; the call may be made again"
        return Outcome(None, Failure("crash", "Sandbox", message), "connection", level=level, strength=self.strength)

    @asynccontextmanager
    async def _linked(self, program: Program, limits: Limits, level: Level) -> AsyncIterator[Link]:
        """The connection for one call."""
        paths = _paths_of(program) if self._back_end.shows_paths else ()
        if self._strength != "container":
            yield await self._shared(paths)
            return
        key = (program, limits)
        link = (await self._take_warm(key) if level == "warm" else None) or await self._reopen(paths, limits)
        try:
            yield link
            if level == "warm" and link.is_alive and self._is_open:
                self._warm[link] = key
        finally:
            if link not in self._warm:
                await self._close(link)

    async def _take_warm(self, key: _WarmKey) -> Link | None:
        """A container that has had calls of this program only; where there are too many idle, one is given up."""
        for link in [link for link, other in self._warm.items() if other == key or not link.is_alive]:
            del self._warm[link]
            if link.is_alive:
                return link
            await self._close(link)
        if self._slots is not None and len(self._warm) >= 2 * self._slots:
            await self._close(self._warm.popitem(last=False)[0])
        return None

    async def _shared(self, paths: _Paths) -> Link:
        """The connection of all calls that are shown these paths; one attempt to make it is shared by all who wait."""
        attempt = self._links.get(paths)
        if attempt is None or (attempt.done() and not _is_usable(attempt)):
            attempt = self._links[paths] = asyncio.get_running_loop().create_task(self._replace(paths))
            attempt.add_done_callback(_look_at)
        self._links.move_to_end(paths)
        return await asyncio.shield(attempt)

    async def _replace(self, paths: _Paths) -> Link:
        """A new connection, after those that are lost, and the idle where there are many, have been closed."""
        for other, attempt in list(self._links.items()):
            if len(self._links) > _MOST_LINKS and attempt.done() and _is_usable(attempt) and attempt.result().is_idle:
                del self._links[other]
                await self._close(attempt.result())
        for link in [link for link in self._open_links if not link.is_alive]:
            await self._close(link)
        return await self._reopen(paths, None)

    async def _reopen(self, paths: _Paths, limits: Limits | None) -> Link:
        launch = self._back_end.launch(paths, limits)
        try:
            return await self._open(launch, self._slots if limits is None else 1)
        except ConfigError as error:
            raise LinkLost(str(error)) from None

    async def _open(self, launch: Launch, slots: int | None) -> Link:
        link = await Link.open(self._back_end, launch, strength=self._inner, slots=slots)
        self._open_links.add(link)
        return link

    async def _close(self, link: Link) -> None:
        await link.close()
        self._open_links.discard(link)


def _is_usable(attempt: asyncio.Future[Link]) -> bool:
    return not attempt.cancelled() and attempt.exception() is None and attempt.result().is_alive


def _look_at(attempt: asyncio.Future[Link]) -> None:
    """An attempt that failed after everyone who waited had gone is nobody's error."""
    if not attempt.cancelled():
        attempt.exception()


def _paths_of(program: Program) -> _Paths:
    return tuple(sorted({*program.read_paths, *program.search_paths}))


def _outcome(told: ToldOutcome, value: Any, level: Level, strength: Walls) -> Outcome:
    """An outcome as the other side tells it, with the walls that this side knows of.

    Raises:
        WireError: it contradicts itself.
    """
    failure = told.failure
    if (failure is None) != (told.kind == "ok") or (failure is not None and value is not None):
        raise WireError("it gave an outcome that contradicts itself")
    kept = None if failure is None else Failure(failure.failure_class, "Sandbox", failure.message, failure.traceback)
    return Outcome(
        value,
        kept,
        told.kind,
        told.stdout,
        told.stderr,
        told.is_output_cut,
        level,
        strength,
        told.wall_s,
        told.cpu_s,
        told.peak_memory_mb,
        told.exit,
    )
