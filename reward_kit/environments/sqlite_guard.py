"""A private in-memory SQLite database. An agent's SQL can read and change only this database.

An authorizer rejects every action that is not explicitly allowed. Statements have a time limit, and databases, rows and
statements have size limits. Results depend only on the database and the seed: `random()` restarts from the seed at each
tool call, 'now' is a fixed time, and functions that reveal the connection's earlier actions are rejected.
"""

from __future__ import annotations

import functools
import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from reward_kit.environments.config import ResourceConfig
from reward_kit.errors import ToolError

SeedSource = Literal["data", "file"]
"""The origin of a seed script. A "data" script may come from a dataset row. It may therefore create no virtual tables
and set only the pragmas that dumps need, since virtual tables and other pragmas could corrupt a database. No script may
attach databases or change the process.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _actions(names: str) -> frozenset[int]:
    return frozenset(getattr(sqlite3, f"SQLITE_{name}") for name in names.split())


_ATTACHING = _actions("ATTACH DETACH")
"""The actions of ATTACH and DETACH. VACUUM INTO counts as ATTACH."""
_READS = _actions("SELECT READ FUNCTION RECURSIVE")
# Creating an index on a table that has rows also requires REINDEX.
_WRITES = _actions(
    "INSERT UPDATE DELETE CREATE_TABLE CREATE_INDEX CREATE_VIEW CREATE_TRIGGER DROP_TABLE DROP_INDEX DROP_VIEW "
    "DROP_TRIGGER ALTER_TABLE REINDEX"
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
    sqlite3.SQLITE_ATTACH: "ATTACH and VACUUM INTO are not allowed; this is the only database",
    sqlite3.SQLITE_DETACH: "DETACH is not allowed; this is the only database",
    sqlite3.SQLITE_TRANSACTION: "transactions are not allowed; each call takes effect completely or not at all",
    sqlite3.SQLITE_SAVEPOINT: "savepoints are not allowed; each call takes effect completely or not at all",
    sqlite3.SQLITE_CREATE_VTABLE: "virtual tables are not allowed",
}
# These functions load code, access files or take memory addresses (`fts3_tokenizer`). Even the package's own statements
# may not call them.
_DANGEROUS_FUNCTIONS = _words("load_extension readfile writefile edit lsmode fsdir zipfile fts3_tokenizer")
_REFUSED_FUNCTIONS = _DANGEROUS_FUNCTIONS | _words(
    "fts5 sqlite_log sqlite_offset sqlite_compileoption_get sqlite_compileoption_used last_insert_rowid changes "
    "total_changes"
)
_REFUSED_TABLES = _words("sqlite_dbpage dbstat sqlite_stmt bytecode tables_used sqlite_dbdata")
_PRAGMAS_WITH_ARGUMENT = _words(
    "table_info table_xinfo table_list index_list index_info index_xinfo foreign_key_list foreign_key_check "
    "integrity_check quick_check"
)
_PRAGMAS = _PRAGMAS_WITH_ARGUMENT | _words("foreign_keys user_version encoding collation_list")
_PRAGMAS_OF_THE_PROCESS = _words("hard_heap_limit soft_heap_limit temp_store_directory data_store_directory")
_PRAGMAS_OF_DATA = _PRAGMAS | _words(
    "application_id auto_vacuum cache_size case_sensitive_like defer_foreign_keys ignore_check_constraints "
    "journal_mode legacy_alter_table locking_mode page_size recursive_triggers reverse_unordered_selects secure_delete "
    "synchronous temp_store"
)
_TIME_FUNCTIONS = ("date", "time", "datetime", "julianday", "strftime", "unixepoch")
_CONNECTION_PRAGMAS = ("foreign_keys", "recursive_triggers", "ignore_check_constraints", "reverse_unordered_selects")
_STEPS_BETWEEN_CHECKS = 1_000
_MAX_SQL_BYTES = 100_000
_TRUSTED_TIME_S = 60.0


class SqliteLimits(ResourceConfig):
    """The limits on an agent's statements, and the time that they see as 'now'."""

    statement_time_s: float = Field(default=5.0, gt=0)
    max_database_bytes: int = Field(default=64_000_000, ge=65_536)
    max_value_bytes: int = Field(default=262_144, ge=1_024, description="bytes of one value or row")
    read_only: bool = False
    now: str = Field(default="2025-01-01 00:00:00", description="the value of 'now' and CURRENT_TIMESTAMP, in UTC")

    @field_validator("now")
    @classmethod
    def _is_a_moment(cls, text: str) -> str:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", text):
            raise ValueError("must be written as YYYY-MM-DD HH:MM:SS")
        return text


class GuardedConnection:
    """A private, guarded database. Its methods block, so call them in a thread."""

    def __init__(self, limits: SqliteLimits) -> None:
        self.limits = limits
        self.seed = 0
        self._lock = threading.RLock()
        # There is no statement cache, because an agent's statement must not reuse a statement that the package prepared
        # from the same text.
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
        define = self.connection.create_function
        define("random", 0, lambda: self._random.randrange(-(2**63), 2**63))
        define("randomblob", 1, self._random_blob)
        for name in _TIME_FUNCTIONS:
            define(name, -1, functools.partial(self._time, name), deterministic=True)
        for name, kind in (("current_timestamp", "datetime"), ("current_date", "date"), ("current_time", "time")):
            define(name, 0, functools.partial(self._time, kind), deterministic=True)
        self._arm()

    @classmethod
    def seeded(cls, limits: SqliteLimits, script: str, time_s: float, source: SeedSource = "file") -> GuardedConnection:
        """Create a database from a seed script.

        Raises:
            ValueError: the script contains an action that is not allowed.
            sqlite3.Error: the script fails, takes longer than `time_s`, or the database becomes too large.
        """
        builder = cls(limits)
        builder._seeding = source
        try:
            # A dump may be one long script, so these two limits are raised. It may still not attach databases or
            # exceed the value size.
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
        """Create a database from the bytes of `serialize`."""
        made = cls(limits)
        # Deserializing attaches a database, which the authorizer would reject.
        made.connection.set_authorizer(None)
        made.connection.deserialize(data)
        made._set_pragmas(pragmas)
        made._arm()
        return made

    def copy(self) -> GuardedConnection:
        """Return an independent database in the same state.

        The copy is made with the backup API, so no database needs to be attached.
        """
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
        """Return the database as the bytes of a database file."""
        with self._lock, self.trusted():
            return self.connection.serialize()

    def pragmas(self) -> dict[str, int]:
        """Return the connection settings that a seed script may change and that a copy must therefore share."""
        with self._lock, self.trusted():
            return {name: self._pragma(name) for name in _CONNECTION_PRAGMAS}

    def close(self) -> None:
        """Release the database."""
        with self._lock:
            self.connection.close()
            self._clock.close()

    @contextmanager
    def trusted(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for statements of this package, which may not attach databases or load code either."""
        with self._lock:
            before = self._trusted, self._deadline
            # Reads by the package also compute generated columns that an agent defined. These must not block forever.
            self._trusted, self._deadline = True, min(self._deadline, time.monotonic() + _TRUSTED_TIME_S)
            try:
                yield self.connection
            finally:
                self._trusted, self._deadline = before

    @contextmanager
    def atomic(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for an agent's statements, and apply the time limit.

        If a statement fails, roll back all of them.
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
                self._roll_back()
                raise ToolError(self.explain(error)) from None
            except BaseException:
                self._roll_back()
                raise
            finally:
                self._trusted, self._deadline = True, float("inf")

    def _roll_back(self) -> None:
        self._trusted, self._deadline = True, float("inf")
        # SQLite itself may have rolled everything back already (ON CONFLICT ROLLBACK, a full database).
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK TO tool_call")
            self.connection.execute("RELEASE tool_call")

    def explain(self, error: Exception) -> str:
        """Return the reason why the current statement failed."""
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
        return int(self.connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _set_pragmas(self, pragmas: dict[str, int]) -> None:
        for name, value in pragmas.items():
            self.connection.execute(f"PRAGMA {name} = {value}")

    def _arm(self) -> None:
        connection, limits = self.connection, self.limits
        connection.set_authorizer(None)
        # Keep the rollback journal in memory, since a journal on disk would be another file.
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
        function = (second or "").lower() if action == sqlite3.SQLITE_FUNCTION else ""
        if self._seeding is not None:
            problem = self._seed_problem(action, (first or "").lower(), function)
        elif self._trusted:
            is_refused = function in _DANGEROUS_FUNCTIONS or action in _ATTACHING
            return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK
        else:
            problem = self._problem(action, first or "", second)
        self._refusal = self._refusal or problem
        return sqlite3.SQLITE_DENY if problem else sqlite3.SQLITE_OK

    def _seed_problem(self, action: int, first: str, function: str) -> str:
        """Return the reason why an action of a seed script is not allowed, or "" if it is allowed."""
        if action in _ATTACHING:
            return "ATTACH, DETACH and VACUUM are not allowed; this is the only database"
        if function in _DANGEROUS_FUNCTIONS:
            return f"the function {function}() is not allowed"
        is_data = self._seeding == "data"
        if action == sqlite3.SQLITE_PRAGMA:
            is_refused = first not in _PRAGMAS_OF_DATA if is_data else first in _PRAGMAS_OF_THE_PROCESS
            return f"PRAGMA {first} is not allowed" if is_refused else ""
        if action == sqlite3.SQLITE_CREATE_VTABLE and is_data:
            return "virtual tables are not allowed here; put the script into a file and set seed_sql_file to it"
        return ""

    def _problem(self, action: int, first: str, second: str | None) -> str:
        """Return the reason why an action of an agent's statement is not allowed, or "" if it is allowed."""
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
            hint = "; use RETURNING" if second == "last_insert_rowid" else ""
            return f"the function {second}() is not allowed{hint}"
        if action == sqlite3.SQLITE_PRAGMA:
            name = first.lower()
            allowed = name in _PRAGMAS and (second is None or name in _PRAGMAS_WITH_ARGUMENT)
            return "" if allowed else f"PRAGMA {first} is not allowed; these can be read: {', '.join(sorted(_PRAGMAS))}"
        if action in _WRITES or action == sqlite3.SQLITE_READ:
            if first.lower() in _REFUSED_TABLES:
                return f"the table {first} is not allowed"
            if action in _WRITES and self.limits.read_only:
                return "the database is read-only"
        if action in _READS or action in _WRITES:
            return ""
        name = _NAMES_OF_ACTIONS.get(action, str(action))
        return _REASONS.get(action, f"this kind of statement is not allowed ({name})")

    def _random_blob(self, size: Any) -> bytes:
        count = size if isinstance(size, int) and size > 0 else 1
        if count > self.limits.max_value_bytes:
            self._refusal = f"randomblob({count}): larger than {self.limits.max_value_bytes} bytes"
            raise ValueError(self._refusal)
        return self._random.randbytes(count)

    def _time(self, name: str, *arguments: Any) -> Any:
        leading = 1 if name == "strftime" else 0
        is_now = [isinstance(value, str) and value.strip().lower() == "now" for value in arguments]
        values = [self.limits.now if now else value for now, value in zip(is_now, arguments, strict=True)]
        if len(values) == leading:
            values.append(self.limits.now)
        if any(str(value).strip().lower() in ("localtime", "utc") for value in values[leading + 1 :]):
            self._refusal = "the modifiers 'localtime' and 'utc' are not allowed; all times are UTC"
            raise ValueError(self._refusal)
        marks = ", ".join("?" * len(values))
        return self._clock.execute(f"SELECT {name}({marks})", values).fetchone()[0]


@functools.cache
def _heap_limit() -> int:
    """Return SQLite's memory limit in this process, in bytes.

    A short statement can keep SQLite's parser busy indefinitely before any interruptible code runs. An example is a
    chain of common table expressions in which each expression refers to the previous one twice. Only this limit stops
    such a statement.
    """
    memory = 16 << 30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # the process is not in a control group, or the group has no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(memory // 4, 4 << 30)


def _readable(data: bytes) -> str:
    """Decode text to show to an agent. SQLite does not guarantee that text is valid UTF-8."""
    return data.decode("utf-8", "replace")
