"""The changes between an episode's initial and final states, as a short list for the episode's record.

An agent may have written the states, so the size of the states, the number of changes and the length of their texts are
all bounded. In a database, only the stored columns of ordinary tables are read, because views and generated columns
could compute large values.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NotRequired, TypedDict

from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import FilesState, SqliteState, close_state, open_snapshot
from reward_kit.errors import EnvironmentFailure

MOST_BYTES = 1_000_000
"""The maximum size of a state in bytes. Larger states are not compared."""
MOST_CHANGES = 100
LONGEST_TEXT = 400
_ABSENT = object()


class StateChange(TypedDict):
    """A changed value. It was added if `old` is missing, and removed if `new` is missing.

    Values other than files are JSON. For a moved file, only `to`, the new path, is set.
    """

    at: str  # a JSON pointer, the path of a file, or a table and the key of the row
    old: NotRequired[str]
    new: NotRequired[str]
    to: NotRequired[str]


def state_changes(before: StateSnapshot, after: StateSnapshot) -> dict[str, Any] | None:
    """Return the first 100 changes from one state to another as `changes`, and the number of further changes as `more`.

    Return None if a state is too large or cannot be read, or if the kinds differ.
    """
    if before.kind != after.kind or max(len(before.payload), len(after.payload)) > MOST_BYTES:
        return None
    if before.payload == after.payload:
        return {"changes": [], "more": 0}
    opened: list[Any] = []
    try:
        opened += open_snapshot(before), open_snapshot(after)
        changes = _changes(*opened)
        kept = list(islice(changes, MOST_CHANGES))
        return {"changes": kept, "more": sum(1 for _ in changes)}
    except (EnvironmentFailure, RecursionError):
        return None
    finally:
        for state in opened:
            close_state(state)


def _changes(old: Any, new: Any) -> Iterator[StateChange]:
    if isinstance(old, SqliteState):
        yield from _database_changes(old, new)
    elif isinstance(old, FilesState):
        yield from _file_changes(old, new)
    else:
        yield from _json_changes(old, new, "")


def _file_changes(old: FilesState, new: FilesState) -> Iterator[StateChange]:
    added: dict[str | bytes, list[str]] = {}
    for path in sorted(new.keys() - old.keys(), reverse=True):
        added.setdefault(new[path], []).append(path)
    for path in sorted(old):
        if path in new:
            if old[path] != new[path]:
                yield _change(path, _file_text(old[path]), _file_text(new[path]))
        elif targets := added.get(old[path]):
            yield StateChange(at=_short(path), to=_short(targets.pop()))
        else:
            yield _change(path, _file_text(old[path]), _ABSENT)
    for path in sorted(path for paths in added.values() for path in paths):
        yield _change(path, _ABSENT, _file_text(new[path]))


def _json_changes(old: Any, new: Any, at: str) -> Iterator[StateChange]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            where = f"{at}/{str(name).replace('~', '~0').replace('/', '~1')}"
            if name not in old or name not in new:
                yield _change(where, *(_json(value.get(name, _ABSENT)) for value in (old, new)))
            else:
                yield from _json_changes(old[name], new[name], where)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _json_changes(one, other, f"{at}/{index}")
    elif isinstance(old, list) and isinstance(new, list):
        yield from _list_changes(old, new, at)
    elif type(old) is not type(new) or old != new:
        yield _change(at or "/", _json(old), _json(new))


def _list_changes(old: Sequence[Any], new: Sequence[Any], at: str) -> Iterator[StateChange]:
    """Yield the changed items between the common beginning and the common end of two lists."""
    shorter = min(len(old), len(new))
    begin = next((index for index in range(shorter) if old[index] != new[index]), shorter)
    rest = shorter - begin
    end = next((index for index in range(rest) if old[-1 - index] != new[-1 - index]), rest)
    for index, item in enumerate(old[begin : len(old) - end], begin):
        yield _change(f"{at}/{index}", _json(item), _ABSENT)
    for index, item in enumerate(new[begin : len(new) - end], begin):
        yield _change(f"{at}/{index}", _ABSENT, _json(item))


def _database_changes(old: SqliteState, new: SqliteState) -> Iterator[StateChange]:
    """Yield the changed rows of two databases. Rows with the same primary key are compared."""
    tables = [_tables(state) for state in (old, new)]
    for table in sorted(tables[0].keys() | tables[1].keys()):
        if table not in tables[0] or table not in tables[1]:
            yield _change(
                f"table {table}", *(_json(known[table][0]) if table in known else _ABSENT for known in tables)
            )
        columns, keys = tables[1].get(table) or tables[0][table]
        rows = [_rows(state, table, known) for state, known in zip((old, new), tables, strict=True)]
        added: dict[str, dict[str, Any]] = {}
        for index, text in enumerate((rows[1] - rows[0]).elements()):
            row = json.loads(text)
            key = _key(row, keys)
            added[key if keys and key not in added else f"{index}\0"] = row  # rows without a key cannot be matched
        for text in (rows[0] - rows[1]).elements():
            row = json.loads(text)
            key = _key(row, keys)
            other = added.pop(key, None)
            if other is None:
                yield _change(f"{table} {key}".rstrip(), text, _ABSENT)
                continue
            for column in columns:
                if row.get(column) != other.get(column):
                    yield _change(f"{table} {key} {column}", _json(row.get(column)), _json(other.get(column)))
        for row in added.values():
            yield _change(f"{table} {_key(row, keys)}".rstrip(), _ABSENT, _json(row))


def _tables(state: SqliteState) -> dict[str, tuple[list[str], list[str]]]:
    """Return the stored columns and the primary key of each ordinary table."""
    known = {}
    sql = (
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND sql LIKE 'CREATE TABLE%'"
    )
    for (name,) in state.query(sql):
        columns = state.query(f"PRAGMA table_xinfo({_quoted(name)})")
        keys = sorted((rank, column) for _, column, _, _, _, rank, hidden in columns if rank and not hidden)
        known[name] = [column for _, column, *_, hidden in columns if not hidden], [column for _, column in keys]
    return known


def _rows(state: SqliteState, table: str, known: Mapping[str, tuple[list[str], list[str]]]) -> Counter[str]:
    """Return the rows of a table as JSON objects, in order. If the table is missing, there are no rows."""
    if table not in known or not known[table][0]:
        return Counter()
    columns = known[table][0]
    rows = state.query(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)}")
    return Counter(
        _json({name: _bytes_text(value) if isinstance(value, bytes) else value for name, value in pairs})
        for pairs in (zip(columns, row, strict=True) for row in rows)
    )


def _key(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(f"{name}={_json(row.get(name))}" for name in keys)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _file_text(content: str | bytes) -> str:
    return content if isinstance(content, str) else _bytes_text(content)


def _bytes_text(content: bytes) -> str:
    return f"<{len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()[:8]}>"


def _json(value: Any) -> Any:
    return value if value is _ABSENT else json.dumps(value, ensure_ascii=False)


def _change(at: str, old: Any, new: Any) -> StateChange:
    change = StateChange(at=_short(at))
    if old is not _ABSENT:
        change["old"] = _short(old)
    if new is not _ABSENT:
        change["new"] = _short(new)
    return change


def _short(text: str) -> str:
    """Shorten a string, but never within a word, because redaction would not recognize part of a secret."""
    if len(text) <= LONGEST_TEXT:
        return text
    words = re.match(r'.*[\s",]', text[:LONGEST_TEXT], re.DOTALL)
    return f"{words[0] if words else ''}… ({len(text):,} characters)"
