"""A private SQLite database, built by a seed script, for agents that write SQL. `sqlite_guard` restricts the SQL."""

from __future__ import annotations

import hashlib
import math
import re
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio.to_thread
from pydantic import Field, model_validator

from reward_kit.environments.base import (
    ForkableResource,
    StateSnapshot,
    StepOutcome,
    ToolSpec,
    check_call,
    strict_tool,
    tools_by_name,
)
from reward_kit.environments.config import read_config, task_path
from reward_kit.environments.sqlite_guard import GuardedConnection, SeedSource, SqliteLimits
from reward_kit.errors import ConfigError, EnvironmentFailure, ToolError, describe_read_error, did_you_mean

_SEED_TIME_S = 60.0
_MAX_STATEMENTS = 100
_MAX_CELL_CHARS = 4_000


class SqliteConfig(SqliteLimits):
    """The configuration of `sqlite`."""

    seed_sql_file: str | None = Field(default=None, description="an SQL script, relative to the task file")
    seed_sql: str | None = Field(default=None, description="an SQL script")
    task_folder: str | None = Field(default=None, description="directory that contains seed_sql_file")
    max_rows: int = Field(
        default=200,
        gt=0,
        description="maximum number of rows in a result; a longer result is truncated and gets a note",
    )
    expert_queries: list[str] = Field(
        default_factory=list, description="the statements that an expert executes, in order"
    )

    @model_validator(mode="after")
    def _one_seed(self) -> SqliteConfig:
        if self.seed_sql is not None and self.seed_sql_file is not None:
            raise ValueError("set either seed_sql or seed_sql_file")
        return self


class SqliteResource(ForkableResource):
    """A private in-memory database with the tools `execute_sql`, `list_tables` and `describe_table`."""

    fork_kind = "native"
    takes_task_folder = True
    has_cheap_state = True
    state_key_covers_results = False
    per_sample_keys = frozenset({"seed_sql", "expert_queries", "now"})

    def __init__(self) -> None:
        self._settings = SqliteConfig()
        self._initial = b""
        self._pragmas: dict[str, int] = {}
        self._seed = 0
        self._database: GuardedConnection | None = None
        self._key: tuple[tuple[int, int], str] | None = None
        self._expert_next = 0

    @property
    def _open(self) -> GuardedConnection:
        if self._database is None:
            raise EnvironmentFailure("the sqlite resource is closed, or was not set up")
        return self._database

    async def setup(self, config: Mapping[str, Any]) -> None:
        self._settings = read_config(SqliteConfig, config, "sqlite")
        database = await anyio.to_thread.run_sync(_seeded, self._settings)
        self._initial, self._pragmas = database.serialize(), database.pragmas()
        self._replace(database)

    async def reset(self, seed: int | None = None) -> None:
        self._seed, self._expert_next = seed or 0, 0
        await self.restore(self._initial)

    async def fork(self) -> ForkableResource:
        twin = type(self)()
        twin._settings, twin._initial, twin._pragmas = self._settings, self._initial, self._pragmas
        twin._seed, twin._expert_next = self._seed, self._expert_next
        twin._replace(await anyio.to_thread.run_sync(self._open.copy))
        return twin

    async def checkpoint(self) -> Any:
        return await anyio.to_thread.run_sync(self._open.serialize)

    async def restore(self, state: Any) -> None:
        make = GuardedConnection.from_bytes
        self._replace(await anyio.to_thread.run_sync(make, self._settings, state, self._pragmas))

    async def reseed_noise(self, seed: int) -> None:
        self._seed = seed
        self._open.seed = seed

    async def get_observation(self) -> Any:
        return await anyio.to_thread.run_sync(_schema_text, self._open)

    async def get_tools_spec(self) -> list[ToolSpec]:
        return list(_SPECS.values())

    async def state_key(self) -> str:
        return await anyio.to_thread.run_sync(self._cached_key)

    async def final_state(self) -> StateSnapshot:
        return StateSnapshot("sqlite", await anyio.to_thread.run_sync(self._open.serialize))

    async def close(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            await anyio.to_thread.run_sync(database.close)

    async def step(self, action_name: str, action_params: Mapping[str, Any]) -> StepOutcome:
        argument = "".join(check_call(_SPECS, action_name, action_params).values())
        for name in action_params:
            if "\0" in argument:
                raise ToolError(f"{action_name}: {name} contains a NUL character")
            try:
                argument.encode("utf-8")
            except UnicodeEncodeError:
                raise ToolError(f"{action_name}: {name} is not valid Unicode text") from None
        database, max_rows = self._open, self._settings.max_rows
        calls = {
            "execute_sql": lambda: _execute_script(database, argument, max_rows),
            "list_tables": lambda: _list_tables(database),
            "describe_table": lambda: _describe_table(database, argument),
        }
        outcome = StepOutcome(await anyio.to_thread.run_sync(calls[action_name]))
        if self._settings.expert_queries[self._expert_next : self._expert_next + 1] == [argument]:
            self._expert_next += 1
        return outcome

    async def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run one SQL statement for a tool of the task. `params` are bound to its `?` placeholders.

        The limits of `execute_sql` also apply to this statement: the allowed actions, the time, and the size of the
        database.

        Returns:
            All rows. The list is empty for statements without rows, such as INSERT.

        Raises:
            ValueError: the statement is invalid or not allowed, or does not match `params`. This error indicates a bug
                in the tool.
            ToolError: the statement failed with these values, or took too long. The database was not changed.
        """

        def run(database: GuardedConnection) -> list[tuple[Any, ...]]:
            with database.atomic() as connection:
                try:
                    connection.execute(f"EXPLAIN {sql}", params)
                except sqlite3.DataError:  # a value is too large
                    raise
                except sqlite3.Error as error:
                    raise ValueError(f"{database.explain(error)}, in the statement {sql[:1_000]!r}") from error
                return connection.execute(sql, params).fetchall()

        return await anyio.to_thread.run_sync(run, self._open)

    async def expert_action(self) -> Mapping[str, Any] | None:
        """Return the next of the configured `expert_queries`, or None once all have been executed."""
        for query in self._settings.expert_queries[self._expert_next :]:
            return {"type": "tool_call", "name": "execute_sql", "arguments": {"query": query}}
        return None

    def _replace(self, database: GuardedConnection) -> None:
        database.seed = self._seed
        old, self._database, self._key = self._database, database, None
        if old is not None:
            old.close()

    def _cached_key(self) -> str:
        with self._open.trusted() as connection:
            version = (connection.total_changes, connection.execute("PRAGMA schema_version").fetchone()[0])
            if self._key is None or self._key[0] != version:
                self._key = (version, _content_hash(connection))
            return self._key[1]


def _seeded(settings: SqliteConfig) -> GuardedConnection:
    script, where = settings.seed_sql or "", "seed_sql"
    source: SeedSource = "data"
    if settings.seed_sql_file is not None:
        where, source = f"seed_sql_file {settings.seed_sql_file!r}", "file"
        path = task_path(settings.seed_sql_file, settings.task_folder, "sqlite resource: seed_sql_file")
        try:
            script = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"sqlite resource: {where} cannot be read: {describe_read_error(path, error)}") from None
    try:
        return GuardedConnection.seeded(settings, script, _SEED_TIME_S, source)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise ConfigError(f"sqlite resource: {where}: {error}") from None


_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|;""", re.DOTALL)
_COMMENTS = re.compile(r"--[^\n]*|/\*.*?(?:\*/|$)", re.DOTALL)


def split_statements(script: str) -> list[str]:
    """Return the statements in an SQL script. Statements that consist only of comments are omitted."""
    statements, start = [], 0
    for token in _TOKEN.finditer(script):
        # The body of a trigger contains semicolons, so ask SQLite whether the statement is complete.
        if token[0] == ";" and sqlite3.complete_statement(script[start : token.end()]):
            statements.append(script[start : token.end()])
            start = token.end()
    statements.append(script[start:])
    return [text.strip() for text in statements if _COMMENTS.sub("", text).strip(" \t\r\n;\f")]


def _execute_script(database: GuardedConnection, query: str, max_rows: int) -> dict[str, Any]:
    if len(query) > 50_000:
        raise ToolError("the query is longer than 50000 characters")
    statements = split_statements(query)
    if not statements:
        raise ToolError("the query contains no statement")
    if len(statements) > _MAX_STATEMENTS:
        raise ToolError(f"the query has more than {_MAX_STATEMENTS} statements")
    result: dict[str, Any] = {}
    with database.atomic() as connection:
        before = connection.total_changes
        for statement in statements:
            cursor = connection.execute(statement)
            if cursor.description is not None:
                rows = cursor.fetchmany(max_rows)
                columns = [column[0] for column in cursor.description]
                result = {"columns": columns, "rows": [[_cell(value) for value in row] for row in rows]}
                if len(rows) == max_rows and cursor.fetchone() is not None:
                    result["cut"] = f"only the first {max_rows} rows are shown; there are more"
            cursor.close()
        changed = connection.total_changes - before
    if changed or "rows" not in result:
        result["changed_rows"] = changed
    return result


def _cell(value: Any) -> Any:
    """Return a row's value as a JSON value."""
    if isinstance(value, bytes):
        value = f"x'{value[: _MAX_CELL_CHARS // 2 + 1].hex()}'"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > _MAX_CELL_CHARS:
        return f"{value[:_MAX_CELL_CHARS]}… (cut)"
    return value


def _list_tables(database: GuardedConnection) -> list[dict[str, str]]:
    with database.trusted() as connection:
        rows = connection.execute(
            "SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' "
            "ESCAPE '\\' ORDER BY name"
        )
        return [{"name": name, "type": kind} for name, kind in rows]


def _describe_table(database: GuardedConnection, name: str) -> dict[str, Any]:
    known = {entry["name"].lower(): entry for entry in _list_tables(database)}
    if name.lower() not in known:
        raise ToolError(f"unknown table {name!r}{did_you_mean(name, known)}")
    with database.atomic() as connection:
        columns = connection.execute(
            'SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?) ORDER BY cid', (name,)
        ).fetchall()
        keys = connection.execute(
            'SELECT "from", "table", "to" FROM pragma_foreign_key_list(?) ORDER BY id, seq', (name,)
        ).fetchall()
    return {
        **known[name.lower()],
        "columns": [
            {"name": column, "type": kind, "not_null": bool(not_null), "default": default, "primary_key": bool(key)}
            for column, kind, not_null, default, key in columns
        ],
        "foreign_keys": [{"column": column, "table": table, "references": target} for column, table, target in keys],
    }


def _schema_text(database: GuardedConnection) -> str:
    with database.trusted() as connection:
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    statements = [f"{sql};" for (sql,) in rows]
    return "The schema of the SQLite database:\n\n" + "\n".join(statements) if statements else "The database is empty."


def _content_hash(connection: sqlite3.Connection) -> str:
    """Return a hash of the schema and of every row in a fixed order.

    Row ids are included because they determine the next id and the order of rows in an unordered query. Free pages are
    excluded.
    """
    digest = hashlib.blake2b(digest_size=16)
    factory = connection.text_factory
    connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
    try:
        schema = connection.execute("SELECT type, name, tbl_name, sql, rootpage FROM sqlite_master ORDER BY rowid")
        tables = []
        for kind, name, table, sql, rootpage in schema.fetchall():
            digest.update(repr((kind, name, table, sql)).encode("utf-8", "surrogatepass"))
            if kind == "table" and rootpage:
                tables.append(name)
        for name in tables:
            digest.update(b"\0table")
            quoted = '"' + name.replace('"', '""') + '"'
            empty = connection.execute(f"SELECT * FROM {quoted} LIMIT 0")
            columns = [column[0].lower() for column in empty.description]
            order = ", ".join(str(number + 1) for number in range(len(columns)))
            query = f"SELECT * FROM {quoted} ORDER BY {order}"
            if row_id := next((row_id for row_id in ("rowid", "_rowid_", "oid") if row_id not in columns), ""):
                with suppress(sqlite3.OperationalError):  # WITHOUT ROWID
                    by_id = f"SELECT {row_id}, * FROM {quoted} ORDER BY 1"
                    connection.execute(f"{by_id} LIMIT 0")
                    query = by_id
            for row in connection.execute(query):
                digest.update(repr(row).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
    finally:
        connection.text_factory = factory


_QUERY = {"type": "string", "description": "one or more SQL statements; the rows of the last query are returned"}
_NAME = {"type": "string", "description": "the name of the table"}
_SPECS = tools_by_name(
    strict_tool(
        "execute_sql",
        "Run SQL (SQLite's dialect). All statements of a call take effect, or none.",
        query=_QUERY,
    ),
    strict_tool("list_tables", "List the tables and views."),
    strict_tool("describe_table", "Describe the columns of a table or view.", name=_NAME),
)
