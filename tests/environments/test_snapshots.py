"""Test final states as rewards open them: JSON, a read-only database, and files."""

from __future__ import annotations

import sqlite3

import pytest

from reward_kit.environments import SqliteState, StateSnapshot, open_snapshot
from reward_kit.environments.snapshots import compose, decompose
from reward_kit.errors import EnvironmentFailure


def database(script: str) -> StateSnapshot:
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    payload = connection.serialize()
    connection.close()
    return StateSnapshot("sqlite", payload)


def test_json_snapshot_opens_as_its_value() -> None:
    assert open_snapshot(StateSnapshot.from_json({"a": [1, "é\ud800"]})) == {"a": [1, "é\ud800"]}


def test_equal_values_have_equal_digests() -> None:
    assert StateSnapshot.from_json({"a": 1, "b": 2}).digest == StateSnapshot.from_json({"b": 2, "a": 1}).digest


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t VALUES (1)",
        "DROP TABLE t",
        "CREATE TABLE u (a)",
        "ATTACH ':memory:' AS x",
        "PRAGMA query_only = OFF",
        "SELECT load_extension('x')",
        "VACUUM INTO '/tmp/never.db'",
    ],
)
def test_database_is_read_only(statement) -> None:
    with open_snapshot(database("CREATE TABLE t (a);")) as state:
        with pytest.raises(EnvironmentFailure, match="query on the final state"):
            state.query(statement)
        assert state.query("SELECT * FROM t") == []
        assert state.query("PRAGMA table_info(t)")


def test_opening_does_not_change_the_snapshot() -> None:
    snapshot = database("CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    with open_snapshot(snapshot) as one, open_snapshot(snapshot) as two:
        assert one.query("SELECT a FROM t") == two.query("SELECT a FROM t") == [(1,)]


def test_closed_state_raises() -> None:
    state = open_snapshot(database("CREATE TABLE t (a);"))
    state.close()
    state.close()
    with pytest.raises(EnvironmentFailure, match="closed"):
        state.tables()


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (StateSnapshot("pickle", b""), "unknown snapshot kind 'pickle'; known: json, sqlite, files, composite"),
        (StateSnapshot("json", b"{"), "not JSON"),
        (StateSnapshot("sqlite", b"not a database at all" * 100), "not a SQLite database"),
        (StateSnapshot("files", b"{}"), "not a set of files"),
        (StateSnapshot("composite", b"[]"), "not a composite"),
        (StateSnapshot("composite", b'{"a": {"kind": "json", "payload": "?"}}'), "not a composite"),
        (StateSnapshot("files", b'{"files": {"a": {}}, "directories": []}'), "not a set of files"),
    ],
)
def test_damaged_or_unknown_snapshot_is_one_clear_error(snapshot, message) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        open_snapshot(snapshot)


def test_files_are_text_or_bytes() -> None:
    payload = b'{"directories":["d"],"files":{"a":{"text":"x"},"b":{"base64":"/w==","executable":true}}}'
    state = open_snapshot(StateSnapshot("files", payload))
    assert dict(state) == {"a": "x", "b": b"\xff"}
    assert state.executables == {"b"}
    assert state.directories == ("d",)


def test_damaged_part_closes_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(SqliteState, "close", lambda state: closed.append(state))
    parts = {"db": database("CREATE TABLE t (a);"), "notes": StateSnapshot("json", b"{")}
    with pytest.raises(EnvironmentFailure, match="not JSON"):
        open_snapshot(compose(parts))
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].close()
    assert decompose(compose(parts)) == parts
