"""The stored final states that reward functions open: JSON values, databases, files, or combinations of these."""

from __future__ import annotations

import base64
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from reward_kit.environments.base import StateSnapshot, canonical_json
from reward_kit.errors import EnvironmentFailure, did_you_mean

_QUERY_TIME_S = 30.0
_ALLOWED = frozenset(
    getattr(sqlite3, f"SQLITE_{name}") for name in ("SELECT", "READ", "FUNCTION", "RECURSIVE", "PRAGMA")
)


class SqliteState(AbstractContextManager["SqliteState"]):
    """The database as the agent left it. It is read-only. Close it, or use it in a `with` statement.

    Example:
        ```python
        (total,) = state.query("SELECT sum(amount) FROM orders WHERE customer = ?", 7)[0]
        ```
    """

    def __init__(self, payload: bytes) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._deadline = float("inf")
        try:
            self._connection.deserialize(payload)
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            self._connection.close()
            raise EnvironmentFailure(f"the snapshot is not a SQLite database: {error}") from error
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection.execute("PRAGMA query_only = ON")
        # Views and triggers come from the agent, and must not make a query run forever.
        self._connection.set_progress_handler(lambda: int(time.monotonic() > self._deadline), 10_000)
        self._connection.set_authorizer(_authorize)

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Execute one SELECT statement with its placeholders bound to `params`, and return the rows.

        Raises:
            EnvironmentFailure: the query fails, tries to write, or takes longer than 30 s.
        """
        self._deadline = time.monotonic() + _QUERY_TIME_S
        try:
            return self._connection.execute(sql, params).fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise EnvironmentFailure(f"query on the final state: {error}: {sql}") from error

    def tables(self) -> list[str]:
        """Return the sorted names of the tables."""
        return [name for (name,) in self.query("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]

    def serialize(self) -> bytes:
        """Return the database as the bytes of a database file."""
        return self._connection.serialize()

    def close(self) -> None:
        """Release the database. Calling this method again has no effect."""
        self._connection.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _authorize(action: int, first: str | None, second: str | None, _db: str | None, _by: str | None) -> int:
    writes_pragma = action == sqlite3.SQLITE_PRAGMA and second is not None and not str(first).endswith(("info", "list"))
    loads = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in ("load_extension", "fts3_tokenizer")
    return sqlite3.SQLITE_OK if action in _ALLOWED and not writes_pragma and not loads else sqlite3.SQLITE_DENY


class FilesState(Mapping[str, str | bytes]):
    """The files as the agent left them. Maps each path to a string, or to bytes if the file is not UTF-8 text."""

    def __init__(self, payload: bytes) -> None:
        try:
            value = json.loads(payload.decode("utf-8", "surrogateescape"))
            self._files: dict[str, str | bytes] = {
                path: entry["text"] if "text" in entry else base64.b64decode(entry["base64"], validate=True)
                for path, entry in value["files"].items()
            }
            self.directories: tuple[str, ...] = tuple(value["directories"])
            self.executables = frozenset(path for path, entry in value["files"].items() if entry.get("executable"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(f"the snapshot is not a set of files: {error}") from error

    def __getitem__(self, path: str) -> str | bytes:
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class CompositeState(Mapping[str, Any], AbstractContextManager["CompositeState"]):
    """The final states of a task's resources, keyed by resource name.

    Close it, or use it in a `with` statement.

    Example:
        ```python
        (total,) = state["db"].query("SELECT sum(amount) FROM orders")[0]
        report = state["filesystem"]["report.txt"]
        ```
    """

    def __init__(self, payload: bytes) -> None:
        self._states: dict[str, Any] = {}
        try:
            for name, snapshot in decompose(StateSnapshot("composite", payload)).items():
                self._states[name] = open_snapshot(snapshot)
        except EnvironmentFailure:
            self.close()
            raise

    def __getitem__(self, name: str) -> Any:
        if name not in self._states:
            raise KeyError(f"unknown resource {name!r}: it has no final state{did_you_mean(name, self._states)}")
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def close(self) -> None:
        """Release the states of the parts. Calling this method again has no effect."""
        for state in self._states.values():
            close_state(state)

    def __exit__(self, *error: object) -> None:
        self.close()


def compose(parts: Mapping[str, StateSnapshot]) -> StateSnapshot:
    """Combine the snapshots of multiple resources into one snapshot of kind "composite"."""
    value = {
        name: {"kind": part.kind, "payload": base64.b64encode(part.payload).decode("ascii")}
        for name, part in parts.items()
    }
    return StateSnapshot("composite", canonical_json(value).encode("ascii"))


def decompose(snapshot: StateSnapshot) -> dict[str, StateSnapshot]:
    """Return the parts of a composite snapshot, keyed by name.

    Raises:
        EnvironmentFailure: the snapshot is not a composite.
    """
    try:
        return {
            name: StateSnapshot(part["kind"], base64.b64decode(part["payload"], validate=True))
            for name, part in json.loads(snapshot.payload).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFailure(f"the snapshot is not a composite: {error}") from error


def open_snapshot(snapshot: StateSnapshot) -> Any:
    """Open a final state for a reward function.

    Returns:
        The value itself if the kind is "json", a `FilesState` for "files", a `SqliteState` for "sqlite", and a
        `CompositeState` for "composite". The caller must close a `SqliteState` or `CompositeState`.

    Raises:
        EnvironmentFailure: the kind is unknown, or the payload is corrupt.
    """
    if snapshot.kind == "json":
        try:
            return json.loads(snapshot.payload.decode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise EnvironmentFailure(f"the snapshot is not JSON: {error}") from error
    kinds = {"sqlite": SqliteState, "files": FilesState, "composite": CompositeState}
    if snapshot.kind not in kinds:
        raise EnvironmentFailure(f"unknown snapshot kind {snapshot.kind!r}; known: json, {', '.join(kinds)}")
    return kinds[snapshot.kind](snapshot.payload)


def close_state(state: Any) -> None:
    """Release the resources that an opened state holds, if any."""
    if isinstance(state, SqliteState | CompositeState):
        state.close()
