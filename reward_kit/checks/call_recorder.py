"""Record what a reward does during a call: the inputs it changes, the files it opens, and the time and memory it uses.

The recorder runs in the reward's process, even in the sandbox. It therefore cannot restrict the reward, and its records
are untrusted.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pydantic

from reward_kit.display_text import first_difference
from reward_kit.reward_agent.sandbox_worker import WorkerCalls
from reward_kit.typed_interface import RewardSpec

_CHANGEABLE = (
    "messages",
    "ground_truth",
    "sample",
    "step_data",
    "assistant_turns",
    "evaluation_criteria",
    "rollouts_messages",
    "ground_truths",
)
"""The mutable inputs of a reward."""
_MOST_EVENTS = 50
_LONGEST = 300
_EVENTS = {
    **dict.fromkeys(("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"), "network"),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"), "process"),
    **dict.fromkeys(("open", "os.listdir", "os.scandir", "sqlite3.connect"), "file"),
    "compile": "code",
}
_listeners: dict[int, list[list[str]]] = {}
_is_hooked = False


class CallRecorder:
    """A recorder of calls to a reward.

    Attributes:
        wants_memory: whether to measure the peak memory of the next call. The measurement slows the call down.
        wants_inputs: whether to compare the inputs before and after the next call.
        observed: the record of the last call. None before the first call.
    """

    def __init__(self) -> None:
        self.wants_memory = False
        self.wants_inputs = True
        self.observed: dict[str, Any] | None = None
        _install_hooks()

    def wrap(self, spec: RewardSpec) -> RewardSpec:
        """Return a copy of the reward that records each call. Its parameters and results stay the same."""
        function = spec.function
        if isinstance(function, type):
            score = function.score  # type: ignore[attr-defined]
            watched = self._around(score, is_async=spec.is_async)
            return replace(spec, function=type(function.__name__, (function,), {"score": watched}))
        return replace(spec, function=self._around(function, is_async=spec.is_async))

    def _around(self, function: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
        if is_async:

            async def call_async(*self_: Any, **arguments: Any) -> Any:
                with self._watching(arguments):
                    return await function(*self_, **arguments)

            return call_async

        def call(*self_: Any, **arguments: Any) -> Any:
            with self._watching(arguments):
                returned = function(*self_, **arguments)
                if inspect.iscoroutine(returned):
                    returned.close()
                return returned

        return call

    @contextlib.contextmanager
    def _watching(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        compared = _CHANGEABLE if self.wants_inputs else ()
        before = {name: _plain_text(arguments[name]) for name in compared if name in arguments}
        wants_memory, thread = self.wants_memory, threading.get_ident()
        if wants_memory:
            tracemalloc.start()
        events = _listeners[thread] = []
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            del _listeners[thread]
            peak = tracemalloc.get_traced_memory()[1] if wants_memory else 0
            if wants_memory:
                tracemalloc.stop()
            changed = {name: _change(text, _plain_text(arguments[name])) for name, text in before.items()}
            self.observed = {
                "wall_s": wall,
                "cpu_s": cpu,
                "peak_mb": peak / (1 << 20),
                "changed": {name: text for name, text in changed.items() if text},
                "events": events,
            }


class RecordedWorkerCalls(WorkerCalls):
    """A `WorkerCalls` that adds a record of the call to each response, under the key `watched`."""

    _watch: CallRecorder | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request as `WorkerCalls` does. The `watch` entry of the request selects what to record."""
        watch, look = self._watching(), request.get("watch", {})
        watch.wants_memory, watch.wants_inputs = bool(look.get("memory")), bool(look.get("inputs"))
        watch.observed = None
        return {**super().answer(request), "watched": watch.observed}

    def _load(self) -> RewardSpec:
        if self._spec is None:
            self._spec = self._watching().wrap(super()._load())
        return self._spec

    def _watching(self) -> CallRecorder:
        if self._watch is None:
            self._watch = CallRecorder()
        return self._watch


def _plain_text(value: Any) -> str:
    """Serialize a value as JSON, or return "" if it cannot be serialized."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return ""


def _plain(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump()
    return list(value) if isinstance(value, tuple | set | frozenset) else f"<{type(value).__name__}>"


def _change(before: str, now: str) -> str:
    if before == now:
        return ""
    if not before or not now:
        return ": the value can no longer be serialized as JSON"
    return first_difference(json.loads(before), json.loads(now))[:_LONGEST] or ": the order of its keys changed"


def _install_hooks() -> None:
    """Install the audit hook on the first call only, because Python cannot remove an audit hook."""
    global _is_hooked
    if _is_hooked:
        return
    _is_hooked = True
    sys.addaudithook(_on_audit_event)
    environment = type(os.environ)
    look_up = environment.__getitem__

    def noting_look_up(self: Any, key: Any) -> Any:
        _note("environment", key)
        return look_up(self, key)

    environment.__getitem__ = noting_look_up  # type: ignore[method-assign]


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    kind = _EVENTS.get(event)
    if kind is None or not _listeners:
        return
    what = arguments[0] if arguments else ("" if kind in ("file", "code") else event)
    if kind == "file" and _is_library(what):
        return
    if event == "socket.connect" and len(arguments) > 1:
        what = arguments[1]
    _note(kind, what)


def _note(kind: str, what: Any) -> None:
    events = _listeners.get(threading.get_ident())
    if events is None or len(events) >= _MOST_EVENTS or not isinstance(what, str | bytes | int | tuple | list):
        return
    text = what.decode("utf-8", "replace") if isinstance(what, bytes) else str(what)
    record = [kind, text[:_LONGEST].encode("utf-8", "backslashreplace").decode()]
    if record not in events:
        events.append(record)


def _is_library(path: Any) -> bool:
    """Return True if a file belongs to an installed package or to the standard library."""
    if not isinstance(path, str):
        return isinstance(path, int)
    return path.endswith((".py", ".pyc", ".so")) or any(path.startswith(entry) for entry in sys.path if len(entry) > 1)
