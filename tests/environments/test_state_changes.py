"""Test the changes between two states: JSON values, files and databases, with bounds on untrusted ones."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit.environments import StateSnapshot
from reward_kit.environments.filesystem import FilesystemResource
from reward_kit.environments.python_state import PythonStateResource
from reward_kit.environments.state_changes import LONGEST_TEXT, MOST_BYTES, MOST_CHANGES, state_changes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


def json_changes(old: Any, new: Any) -> list[Any]:
    found = state_changes(StateSnapshot.from_json(old), StateSnapshot.from_json(new))
    assert found is not None and found["more"] == 0
    return list(found["changes"])


def database(*statements: str) -> StateSnapshot:
    connection = sqlite3.connect(":memory:")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    return StateSnapshot("sqlite", connection.serialize())


def database_changes(before: list[str], then: list[str]) -> list[Any]:
    found = state_changes(database(*before), database(*before, *then))
    assert found is not None
    return list(found["changes"])


def test_changed_added_and_removed_keys_of_json() -> None:
    old = {"a": {"b/c": 1, "same": [1]}, "gone": "x"}
    new = {"a": {"b/c": True, "same": [1]}, "new": None}
    assert json_changes(old, new) == [
        {"at": "/a/b~1c", "old": "1", "new": "true"},
        {"at": "/gone", "old": '"x"'},
        {"at": "/new", "new": "null"},
    ]


def test_item_inserted_into_a_list_is_one_change() -> None:
    assert json_changes({"l": [1, 2, 3]}, {"l": [1, 9, 2, 3]}) == [{"at": "/l/1", "new": "9"}]
    assert json_changes([1, 1], [1]) == [{"at": "/1", "old": "1"}]


@given(VALUES, VALUES)
def test_json_values_have_changes_only_if_they_differ(old: Any, new: Any) -> None:
    before, after = StateSnapshot.from_json(old), StateSnapshot.from_json(new)
    assert bool(json_changes(old, new)) == (before.payload != after.payload)


def test_rows_with_a_key_are_compared_by_column() -> None:
    before = ["CREATE TABLE o (id INTEGER PRIMARY KEY, s TEXT, n)", "INSERT INTO o VALUES (1, 'new', 2), (2, 'new', 3)"]
    then = [
        "UPDATE o SET s = 'paid' WHERE id = 1",
        "DELETE FROM o WHERE id = 2",
        "INSERT INTO o VALUES (3, 'é', x'00')",
    ]
    assert database_changes(before, then) == [
        {"at": "o id=1 s", "old": '"new"', "new": '"paid"'},
        {"at": "o id=2", "old": '{"id": 2, "s": "new", "n": 3}'},
        {"at": "o id=3", "new": '{"id": 3, "s": "é", "n": "<1 bytes, SHA-256 6e340b9c>"}'},
    ]


def test_rows_without_a_key_are_added_and_removed() -> None:
    before = ['CREATE TABLE "a ""b" (v)', 'INSERT INTO "a ""b" VALUES (1), (1), (2)']
    then = ['DELETE FROM "a ""b" WHERE rowid = 1', 'INSERT INTO "a ""b" VALUES (3)']
    assert database_changes(before, then) == [{"at": 'a "b', "old": '{"v": 1}'}, {"at": 'a "b', "new": '{"v": 3}'}]


def test_created_table_is_reported_with_its_rows() -> None:
    then = ["CREATE TABLE t (v)", "INSERT INTO t VALUES (7)"]
    assert database_changes(["CREATE TABLE base (v)"], then) == [
        {"at": "table t", "new": '["v"]'},
        {"at": "t", "new": '{"v": 7}'},
    ]


def test_views_and_generated_columns_of_an_agent_are_not_computed() -> None:
    then = ["CREATE TABLE t (v, big AS (zeroblob(999999999)))", "INSERT INTO t VALUES (7)"]
    then += ["CREATE VIEW w AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c"]
    assert [change["at"] for change in database_changes(["CREATE TABLE base (v)"], then)] == ["table t", "t"]


def test_number_and_length_of_changes_are_bounded() -> None:
    found = state_changes(
        StateSnapshot.from_json({}), StateSnapshot.from_json({str(i): "x" * 1000 for i in range(150)})
    )
    assert found is not None
    assert (len(found["changes"]), found["more"]) == (MOST_CHANGES, 50)
    assert all(len(change["new"]) < LONGEST_TEXT + 30 for change in found["changes"])


def test_long_text_is_not_cut_within_a_word() -> None:
    (change,) = json_changes("", f"{'word ' * 70}{'secret' * 20} end")
    assert change["new"].endswith("word … (476 characters)") and "secret" not in change["new"]


@pytest.mark.parametrize("kind", ["sqlite", "files", "unknown"])
def test_unreadable_or_large_states_have_no_changes(kind: str) -> None:
    assert state_changes(StateSnapshot(kind, b"a"), StateSnapshot(kind, b"b")) is None
    assert state_changes(StateSnapshot.from_json(1), StateSnapshot.from_json("x" * MOST_BYTES)) is None


async def test_files_of_a_resource_are_compared_by_path() -> None:
    resource = FilesystemResource()
    await resource.setup({"files": {"a.txt": "one", "b.txt": "two", "d.txt": "gone"}})
    await resource.reset(0)
    before = await resource.final_state()
    await resource.step("move_path", {"source": "a.txt", "target": "c.txt"})
    await resource.step("write_file", {"path": "b.txt", "content": "2"})
    await resource.step("delete_path", {"path": "d.txt"})
    await resource.step("write_file", {"path": "e.txt", "content": "new"})
    found = state_changes(before, await resource.final_state())
    await resource.close()
    assert found is not None and found["changes"] == [
        {"at": "a.txt", "to": "c.txt"},
        {"at": "b.txt", "old": "two", "new": "2"},
        {"at": "d.txt", "old": "gone"},
        {"at": "e.txt", "new": "new"},
    ]


def test_only_resources_in_this_process_have_a_cheap_state() -> None:
    from reward_kit.environments.http import HttpResource

    assert PythonStateResource.has_cheap_state and not HttpResource.has_cheap_state
