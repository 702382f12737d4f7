"""One private in-memory SQLite database on which an agent's SQL can do nothing but read and change that database.

What may be run is decided by an authorizer that refuses every action code it does not know. A statement ends at its
deadline through the progress handler, and a database, a row and a statement have a largest size. What would make the
outcome depend on anything but the database and the seed is pinned or refused:

- `random()` and `randomblob()` start anew from the episode's seed at each call of a tool, so that there is no hidden
  generator whose position a fork or a state key would miss;
- 'now' and CURRENT_TIMESTAMP are a fixed moment; the modifiers 'localtime' and 'utc' are refused;
- `last_insert_rowid()`, `changes()` and `total_changes()` are refused: they tell what this connection did before.
  `RETURNING` and the tool's result say the same.

A short statement can keep SQLite's parser busy without end (a chain of common table expressions, each naming the one
before twice), before anything that could be interrupted runs. Against that there is only SQLite's heap limit, which all
databases of the process share: a quarter of its memory, at most 4 GiB. Such a statement then fails after some seconds.
"""

from __future__ import annotations

import functools
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.environments.sqlite_seeds import DANGEROUS_FUNCTIONS, SeedSource, attaches, seed_problem
from reward_kit.errors import ToolError

_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_WRITES = frozenset(
    {
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_CREATE_TABLE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_CREATE_VIEW,
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_DROP_TABLE,
        sqlite3.SQLITE_DROP_INDEX,
        sqlite3.SQLITE_DROP_VIEW,
        sqlite3.SQLITE_DROP_TRIGGER,
        sqlite3.SQLITE_ALTER_TABLE,
        # Creating an index on a table with rows asks for this too.
        sqlite3.SQLITE_REINDEX,
    }
)
_NAMES_OF_ACTIONS = {
    sqlite3.SQLITE_ANALYZE: "ANALYZE",
    sqlite3.SQLITE_CREATE_TEMP_INDEX: "CREATE TEMP INDEX",
    sqlite3.SQLITE_CREATE_TEMP_TABLE: "CREATE TEMP TABLE",
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER: "CREATE TEMP TRIGGER",
    sqlite3.SQLITE_CREATE_TEMP_VIEW: "CREATE TEMP VIEW",
    sqlite3.SQLITE_DROP_VTABLE: "DROP of a virtual table",
}
_REASONS = {
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM INTO are refused: there is only this database",
    sqlite3.SQLITE_DETACH: "DETACH is refused: there is only this database",
    sqlite3.SQLITE_TRANSACTION: "transactions are refused: each call happens wholly or not at all",
    sqlite3.SQLITE_SAVEPOINT: "savepoints are refused: each call happens wholly or not at all",
    sqlite3.SQLITE_CREATE_VTABLE: "virtual tables are refused",
}
_REFUSED_FUNCTIONS = DANGEROUS_FUNCTIONS | frozenset(
    {
        "fts5",
        "sqlite_log",
        "sqlite_offset",
        "sqlite_compileoption_get",
        "sqlite_compileoption_used",
        "last_insert_rowid",
        "changes",
        "total_changes",
    }
)
_REFUSED_TABLES = frozenset({"sqlite_dbpage", "dbstat", "sqlite_stmt", "bytecode", "tables_used", "sqlite_dbdata"})
_PRAGMAS_WITH_ARGUMENT = frozenset(
    {
        "table_info",
        "table_xinfo",
        "table_list",
        "index_list",
        "index_info",
        "index_xinfo",
        "foreign_key_list",
        "foreign_key_check",
        "integrity_check",
        "quick_check",
    }
)
_PRAGMAS = _PRAGMAS_WITH_ARGUMENT | {"foreign_keys", "user_version", "encoding", "collation_list"}
_TIME_FUNCTIONS = ("date", "time", "datetime", "julianday", "strftime", "unixepoch")
_CONNECTION_PRAGMAS = ("foreign_keys", "recursive_triggers", "ignore_check_constraints", "reverse_unordered_selects")
_STEPS_BETWEEN_CHECKS = 1_000
_MAX_SQL_BYTES = 100_000
_TRUSTED_TIME_S = 60.0


@dataclass(frozen=True, slots=True)
class SqliteLimits:
    """What an agent's statements may use, and the moment and seed that they see."""

    statement_time_s: float = 5.0
    max_database_bytes: int = 64_000_000
    max_value_bytes: int = 262_144
    read_only: bool = False
    now: str = "2025-01-01 00:00:00"


class GuardedConnection:
    """A private database with its guards up. Its methods block; use them in a thread."""

    def __init__(self, limits: SqliteLimits) -> None:
        self.limits = limits
        self.seed = 0
        self._lock = threading.RLock()
        # No statement cache: a statement prepared by us must not be found again by an agent that types the same text.
        self.connection = sqlite3.connect(
            ":memory:", check_same_thread=False, isolation_level=None, cached_statements=0
        )
        self.connection.text_factory = _readable
        self._clock = sqlite3.connect(":memory:", check_same_thread=False)
        self._random = random.Random(0)
        self._deadline = float("inf")
        self._trusted = True
        self._seeding: SeedSource | None = None
        self._refusal = ""
        self._register_functions()
        self._arm()

    @classmethod
    def seeded(cls, limits: SqliteLimits, script: str, time_s: float, source: SeedSource = "file") -> GuardedConnection:
        """A database made by a script, which may do what `sqlite_seeds` allows.

        Raises:
            ValueError: the script does what it may not.
            sqlite3.Error: the script fails, takes longer than `time_s` or makes too large a database.
        """
        builder = cls(limits)
        builder._seeding = source
        try:
            # A dump is one long script; what it may not do is attach, or make a value that could not be read later.
            builder.connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1_000_000_000)
            builder.connection.setlimit(sqlite3.SQLITE_LIMIT_VDBE_OP, 250_000_000)
            builder._deadline = time.monotonic() + time_s
            builder.connection.executescript(script)
            if builder.connection.in_transaction:
                builder.connection.commit()
            builder._seeding = None
            return builder.copy()
        except sqlite3.Error as error:
            if builder._refusal:
                raise ValueError(builder._refusal) from error
            raise
        finally:
            builder.close()

    @classmethod
    def from_bytes(cls, limits: SqliteLimits, data: bytes, pragmas: dict[str, int]) -> GuardedConnection:
        """A database from what `serialize` gave."""
        made = cls(limits)
        # Deserializing attaches, which the authorizer would refuse.
        made.connection.set_authorizer(None)
        made.connection.deserialize(data)
        made._set_pragmas(pragmas)
        made._arm()
        return made

    def copy(self) -> GuardedConnection:
        """An independent database in the same state, through SQLite's backup API; anything attached is left behind."""
        with self._lock, self.trusted():
            twin = GuardedConnection(self.limits)
            twin.seed = self.seed
            with twin.trusted():
                twin.connection.execute(f"PRAGMA page_size = {self._pragma('page_size')}")
                twin.connection.execute("PRAGMA max_page_count = 1073741823")
                self.connection.backup(twin.connection)
                twin._set_pragmas(self.pragmas())
            twin._arm()
            return twin

    def serialize(self) -> bytes:
        """The database as the bytes of a database file."""
        with self._lock, self.trusted():
            return self.connection.serialize()

    def pragmas(self) -> dict[str, int]:
        """The settings of the connection that a seed script may have changed and a copy must share."""
        with self._lock, self.trusted():
            return {name: self._pragma(name) for name in _CONNECTION_PRAGMAS}

    def close(self) -> None:
        """Release the database."""
        with self._lock:
            self.connection.close()
            self._clock.close()

    @contextmanager
    def trusted(self) -> Iterator[sqlite3.Connection]:
        """The connection for statements of our own, which may not attach or load anything either."""
        with self._lock:
            before = self._trusted, self._deadline
            # An agent's generated columns are computed by our own reads too, and must not keep them for ever.
            self._trusted, self._deadline = True, min(self._deadline, time.monotonic() + _TRUSTED_TIME_S)
            try:
                yield self.connection
            finally:
                self._trusted, self._deadline = before

    @contextmanager
    def atomic(self) -> Iterator[sqlite3.Connection]:
        """The connection for an agent's statements, within the time limit; undone as a whole where one fails.

        Raises:
            ToolError: a statement failed or was refused; the message says why.
        """
        with self._lock:
            with self.trusted():
                self.connection.execute("SAVEPOINT tool_call")
            self._random.seed(self.seed)
            self._refusal, self._trusted = "", False
            self._deadline = time.monotonic() + self.limits.statement_time_s
            try:
                yield self.connection
                self._trusted = True
                self.connection.execute("RELEASE tool_call")
            except (sqlite3.Error, sqlite3.Warning, OverflowError, MemoryError) as error:
                self._undo()
                raise ToolError(self._explain(error)) from None
            except BaseException:
                self._undo()
                raise
            finally:
                self._trusted, self._deadline = True, float("inf")

    def _undo(self) -> None:
        self._trusted, self._deadline = True, float("inf")
        # SQLite itself may have rolled everything back already (ON CONFLICT ROLLBACK, a full database).
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK TO tool_call")
            self.connection.execute("RELEASE tool_call")

    def _explain(self, error: Exception) -> str:
        text = str(error)
        if isinstance(error, MemoryError):
            return "the statement needs too much memory; nothing was changed"
        if self._refusal:
            return self._refusal
        if text == "interrupted":
            return f"the statement took longer than {self.limits.statement_time_s:g} s; nothing was changed"
        if text == "database or disk is full":
            return f"the database would be larger than {self.limits.max_database_bytes} bytes; nothing was changed"
        if text == "string or blob too big":
            return f"a value or row would be larger than {self.limits.max_value_bytes} bytes; nothing was changed"
        return text

    def _pragma(self, name: str) -> int:
        row = self.connection.execute(f"PRAGMA {name}").fetchone()
        return int(row[0])

    def _set_pragmas(self, pragmas: dict[str, int]) -> None:
        for name, value in pragmas.items():
            self.connection.execute(f"PRAGMA {name} = {value}")

    def _arm(self) -> None:
        connection, limits = self.connection, self.limits
        connection.set_authorizer(None)
        # A rollback journal on disk would be an "other file"; this one lives in memory.
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit = {_heap_limit()}")
        connection.execute(f"PRAGMA max_page_count = {max(1, limits.max_database_bytes // self._pragma('page_size'))}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.max_value_bytes)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _MAX_SQL_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 50)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000)
        connection.setlimit(sqlite3.SQLITE_LIMIT_VDBE_OP, 100_000)
        connection.set_progress_handler(self._is_late, _STEPS_BETWEEN_CHECKS)
        connection.set_authorizer(self._authorize)

    def _is_late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def _authorize(self, action: int, first: str | None, second: str | None, _db: str | None, _by: str | None) -> int:
        if self._seeding is not None:
            problem = seed_problem(self._seeding, action, (first or "").lower(), (second or "").lower())
        elif self._trusted:
            calls_dangerous = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in DANGEROUS_FUNCTIONS
            return sqlite3.SQLITE_DENY if calls_dangerous or attaches(action) else sqlite3.SQLITE_OK
        else:
            problem = self._problem(action, first or "", second)
        self._refusal = self._refusal or problem
        return sqlite3.SQLITE_DENY if problem else sqlite3.SQLITE_OK

    def _problem(self, action: int, first: str, second: str | None) -> str:
        """Why an action of an agent's statement is refused; "" where it is allowed."""
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
            hint = "; use RETURNING" if second == "last_insert_rowid" else ""
            return f"the function {second}() is refused{hint}"
        if action == sqlite3.SQLITE_PRAGMA:
            name = first.lower()
            allowed = name in _PRAGMAS and (second is None or name in _PRAGMAS_WITH_ARGUMENT)
            return "" if allowed else f"PRAGMA {first} is refused; allowed, to read: {', '.join(sorted(_PRAGMAS))}"
        if action in _WRITES or action == sqlite3.SQLITE_READ:
            if first.lower() in _REFUSED_TABLES:
                return f"the table {first} is refused"
            if action in _WRITES and self.limits.read_only:
                return "the database is read-only"
        if action in _READS or action in _WRITES:
            return ""
        name = _NAMES_OF_ACTIONS.get(action, str(action))
        return _REASONS.get(action, f"this kind of statement is refused ({name})")

    def _register_functions(self) -> None:
        connection = self.connection
        connection.create_function("random", 0, lambda: self._random.randrange(-(2**63), 2**63))
        connection.create_function("randomblob", 1, self._random_blob)
        for name in _TIME_FUNCTIONS:
            connection.create_function(name, -1, self._time_function(name), deterministic=True)
        for name, kind in (("current_timestamp", "datetime"), ("current_date", "date"), ("current_time", "time")):
            connection.create_function(name, 0, self._time_function(kind), deterministic=True)

    def _random_blob(self, size: Any) -> bytes:
        count = size if isinstance(size, int) and size > 0 else 1
        if count > self.limits.max_value_bytes:
            self._refusal = f"randomblob({count}): larger than {self.limits.max_value_bytes} bytes"
            raise ValueError(self._refusal)
        return self._random.randbytes(count)

    def _time_function(self, name: str) -> Callable[..., Any]:
        leading = 1 if name == "strftime" else 0

        def call(*arguments: Any) -> Any:
            values = [self.limits.now if _is_now(value) else value for value in arguments]
            if len(values) == leading:
                values.append(self.limits.now)
            if any(str(value).strip().lower() in ("localtime", "utc") for value in values[leading + 1 :]):
                self._refusal = "the modifiers 'localtime' and 'utc' are refused: all times are UTC"
                raise ValueError(self._refusal)
            marks = ", ".join("?" * len(values))
            return self._clock.execute(f"SELECT {name}({marks})", values).fetchone()[0]

        return call


@functools.cache
def _heap_limit() -> int:
    """How many bytes SQLite may hold in this process."""
    memory = 16 << 30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # not in a control group, or in one without a limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(memory // 4, 4 << 30)


def _is_now(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "now"


def _readable(data: bytes) -> str:
    """Text as an agent can be shown it; SQLite does not promise that it is UTF-8."""
    return data.decode("utf-8", "replace")
