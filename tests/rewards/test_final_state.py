"""Test rewards that compare final states: JSON, files, databases, and several of them."""

from __future__ import annotations

import base64
import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit import EvaluateResult, with_options
from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import compose, open_snapshot
from reward_kit.errors import ConfigError, RewardError
from reward_kit.rewards.final_state import final_state_matches
from reward_kit.typed_interface import reward_spec
from tests.rewards.answers import histories


def of_files(**files: str | bytes) -> StateSnapshot:
    entries = {
        path.replace("__", "/"): {"text": content}
        if isinstance(content, str)
        else {"base64": base64.b64encode(content).decode()}
        for path, content in files.items()
    }
    return StateSnapshot("files", json.dumps({"files": entries, "directories": []}).encode())


def of_sql(script: str) -> StateSnapshot:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript(script)
        return StateSnapshot("sqlite", connection.serialize())


def judge(snapshot: StateSnapshot, truth: Any, **options: Any) -> EvaluateResult:
    state = open_snapshot(snapshot)
    try:
        result = final_state_matches([], state, truth, **options)
    finally:
        if hasattr(state, "close"):
            state.close()
    assert isinstance(result, EvaluateResult)
    return result


WORLD = {"balance": 3, "items": [{"id": 1}, {"id": 2}], "open": False, "note": None}


@pytest.mark.parametrize(
    ("truth", "options", "score"),
    [
        pytest.param(WORLD, {}, 1.0, id="equal"),
        pytest.param(json.dumps(WORLD), {}, 1.0, id="as-text"),
        pytest.param({**WORLD, "balance": 3.0}, {}, 1.0, id="3-is-3.0"),
        pytest.param({**WORLD, "balance": 4}, {}, 0.0, id="other-value"),
        pytest.param({**WORLD, "open": 0}, {}, 0.0, id="false-is-not-0"),
        pytest.param({"balance": 3}, {}, 0.0, id="equal-is-all-of-it"),
        pytest.param({"balance": 3}, {"match": "subset"}, 1.0, id="subset"),
        pytest.param({"items": [{"id": 1}]}, {"match": "subset"}, 0.0, id="arrays-have-no-subsets"),
        pytest.param({"gone": None}, {"match": "subset"}, 0.0, id="null-is-not-missing"),
        pytest.param({"note": None}, {"match": "subset"}, 1.0, id="null-is-null"),
        pytest.param({"/balance": 3, "/items/1/id": 2}, {"match": "paths"}, 1.0, id="pointers"),
        pytest.param({"/balance": 3, "/items/2/id": 2}, {"match": "paths"}, 0.0, id="pointer-to-nothing"),
        pytest.param({"/balance": 3, "/items/2/id": 2}, {"match": "paths", "partial": "things"}, 0.5, id="half"),
        pytest.param({"/items/-1/id": 2}, {"match": "paths"}, 0.0, id="pointers-do-not-count-from-the-end"),
        pytest.param({"": WORLD}, {"match": "paths"}, 1.0, id="pointer-to-all"),
        pytest.param({"balance": 3.0000001}, {"match": "subset", "tolerance": 1e-6}, 1.0, id="tolerance"),
        pytest.param({"balance": 3.0000001}, {"match": "subset"}, 0.0, id="no-tolerance"),
        pytest.param([], {}, 0.0, id="another-kind-of-value"),
    ],
)
def test_json_states_are_compared(truth: Any, options: dict[str, Any], score: float) -> None:
    assert judge(StateSnapshot.from_json(WORLD), truth, **options).score == score


FILES = of_files(**{"report.txt": "total 3\n", "logs__a.txt": "ok", "logs__old__b.txt": "ok", "raw.bin": b"\xff\x00"})
LEFT = {"report.txt": True, "logs/a.txt": True, "logs/old/b.txt": True, "raw.bin": True}


@pytest.mark.parametrize(
    ("truth", "options", "score"),
    [
        pytest.param({**LEFT, "report.txt": "total 3\n"}, {}, 1.0, id="set"),
        pytest.param({**LEFT, "report.txt": "total 3"}, {}, 0.0, id="newline-at-the-end"),
        pytest.param({**LEFT, "report.txt": "total 3"}, {"texts": "lines"}, 1.0, id="newline-overlooked"),
        pytest.param({**LEFT, "report.txt": "total  3"}, {"texts": "lines"}, 0.0, id="blanks-inside-count"),
        pytest.param({"report.txt": "total 3\n"}, {}, 0.0, id="other-files-are-wrong"),
        pytest.param({"report.txt": "total 3\n"}, {"match": "subset"}, 1.0, id="subset"),
        pytest.param({"report.txt": "total 3\n", "gone": None}, {"match": "subset"}, 1.0, id="absent"),
        pytest.param({"report.txt": None}, {"match": "subset"}, 0.0, id="absent-but-there"),
        pytest.param({"gone": True}, {"match": "subset"}, 0.0, id="there-but-absent"),
        pytest.param({"Report.txt": "total 3\n"}, {"match": "subset"}, 0.0, id="case-of-a-path"),
        pytest.param({"raw.bin": {"base64": "/wA="}}, {"match": "subset"}, 1.0, id="bytes"),
        pytest.param({"raw.bin": {"base64": "/wE="}}, {"match": "subset"}, 0.0, id="other-bytes"),
        pytest.param({"raw.bin": "\xff\x00"}, {"match": "subset"}, 0.0, id="bytes-are-no-text"),
        pytest.param({"report.txt": {"base64": "dG90YWwgMwo="}}, {"match": "subset"}, 1.0, id="text-given-as-bytes"),
        pytest.param({"logs/*.txt": "ok"}, {"match": "subset"}, 0.0, id="pattern-only-by-option"),
        pytest.param({"logs/*.txt": "ok"}, {"match": "subset", "globs": True}, 1.0, id="pattern"),
        pytest.param({"logs/*.csv": "ok"}, {"match": "subset", "globs": True}, 0.0, id="pattern-without-a-file"),
        pytest.param({"*.csv": None, "logs/*.csv": None}, {"match": "subset", "globs": True}, 1.0, id="pattern-absent"),
        pytest.param({"**/*.txt": "ok"}, {"match": "subset", "globs": True}, 0.0, id="each-file-of-a-pattern"),
        pytest.param({"logs/**": "ok", "*": True}, {"globs": True}, 1.0, id="patterns-cover-the-set"),
        pytest.param({"logs/*": "ok", "*": True}, {"globs": True}, 0.0, id="star-stays-in-its-folder"),
        pytest.param({"report.txt": "x", "logs/a.txt": "ok"}, {"match": "subset", "partial": "things"}, 0.5, id="half"),
        pytest.param({**LEFT, "raw.bin": None}, {"partial": "things"}, 0.75, id="three-of-four"),
    ],
)
def test_file_trees_are_compared(truth: Any, options: dict[str, Any], score: float) -> None:
    assert judge(FILES, truth, **options).score == score


def test_empty_folder_can_be_expected() -> None:
    assert judge(of_files(), {}).score == 1.0
    assert judge(FILES, {}).score == 0.0


def test_base64_content_equals_the_file_bytes() -> None:
    assert judge(of_files(**{"a": "é"}), {"a": {"base64": base64.b64encode("é".encode()).decode()}}).score == 1.0


SHOP = of_sql(
    """
    CREATE TABLE orders (id INTEGER, status TEXT, amount REAL);
    INSERT INTO orders VALUES (1, 'paid', 2.5), (2, 'open', 3.0), (2, 'open', 3.0);
    CREATE TABLE empty (x);
    CREATE TABLE "odd ` name" (x BLOB);
    INSERT INTO "odd ` name" VALUES (NULL);
    CREATE VIEW endless AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n;
    """
)
ROWS = [[1, "paid", 2.5], [2, "open", 3], [2, "open", 3]]
IDS = "SELECT id FROM orders ORDER BY id DESC;"


@pytest.mark.parametrize(
    ("truth", "options", "score"),
    [
        pytest.param({"orders": ROWS}, {}, 1.0, id="table"),
        pytest.param({"orders": ROWS[::-1]}, {}, 1.0, id="tables-have-no-order"),
        pytest.param({"orders": ROWS[:2]}, {}, 0.0, id="duplicates-count"),
        pytest.param({"orders": [*ROWS, ROWS[0]]}, {}, 0.0, id="row-missing"),
        pytest.param({"orders": [[1, "paid", 2.6], *ROWS[1:]]}, {}, 0.0, id="other-cell"),
        pytest.param({"orders": [["1", "paid", 2.5], *ROWS[1:]]}, {}, 0.0, id="text-is-no-number"),
        pytest.param({"orders": [[1, "paid", 2.5 + 1e-12], *ROWS[1:]]}, {}, 0.0, id="no-tolerance"),
        pytest.param({"orders": [[1, "paid", 2.5 + 1e-12], *ROWS[1:]]}, {"tolerance": 1e-9}, 1.0, id="tolerance"),
        pytest.param({"orders": ROWS[:1]}, {"match": "subset"}, 1.0, id="subset"),
        pytest.param({"orders": [ROWS[1]] * 3}, {"match": "subset"}, 0.0, id="subset-counts-duplicates"),
        pytest.param({"orders": [{"id": 1, "status": "paid"}]}, {"match": "subset"}, 1.0, id="columns-by-name"),
        pytest.param({"orders": [{"id": 1, "stutas": "stutas"}]}, {"match": "subset"}, 0.0, id="no-such-column"),
        pytest.param({"empty": []}, {}, 1.0, id="empty-table"),
        pytest.param({"orders": []}, {}, 0.0, id="not-empty"),
        pytest.param({"gone": []}, {}, 0.0, id="dropped-table-is-not-empty"),
        pytest.param({"odd ` name": [[None]]}, {}, 1.0, id="odd-name"),
        pytest.param({"orders; DROP TABLE orders": []}, {}, 0.0, id="a-name-is-a-name"),
        pytest.param({"SELECT count(*) FROM orders": [[3]]}, {}, 1.0, id="query"),
        pytest.param({"select sum(amount) from orders -- all": [[8.5]]}, {}, 1.0, id="query-with-a-remark"),
        pytest.param({"WITH o AS (SELECT id FROM orders) SELECT max(id) FROM o": [[2]]}, {}, 1.0, id="with"),
        pytest.param({IDS: [[2], [1], [2]]}, {}, 1.0, id="query-without-order"),
        pytest.param({IDS: [[2], [1], [2]]}, {"ordered": True}, 0.0, id="query-out-of-order"),
        pytest.param({IDS: [[2], [2], [1]]}, {"ordered": True}, 1.0, id="query-in-order"),
        pytest.param({"endless": [[1]]}, {}, 0.0, id="view-without-end"),
        pytest.param({"SELECT i FROM endless": [[1]]}, {"match": "subset"}, 0.0, id="query-of-a-view-without-end"),
        pytest.param({"orders": ROWS, "gone": []}, {"partial": "things"}, 0.5, id="half"),
    ],
)
def test_databases_are_compared(truth: Any, options: dict[str, Any], score: float) -> None:
    assert judge(SHOP, truth, **options).score == score


BOTH = compose({"db": SHOP, "files": FILES, "world": StateSnapshot.from_json(WORLD)})


@pytest.mark.parametrize(
    ("truth", "options", "score"),
    [
        ({"db": {"empty": []}, "world": WORLD}, {}, 1.0),
        ({"db": {"empty": [[1]]}, "world": WORLD}, {}, 0.0),
        ({"db": {"empty": [[1]]}, "world": WORLD}, {"partial": "things"}, 0.5),
        ({"files": {"report.txt": True}, "world": {"balance": 3}}, {"match": "subset"}, 1.0),
        ({"files": {"report.txt": True}, "world": WORLD}, {"match": {"files": "subset"}}, 1.0),
        ({"files": LEFT, "world": {"/balance": 3}}, {"match": {"world": "paths"}}, 1.0),
        ({"files": {"report.txt": True}, "world": WORLD}, {"match": {"world": "subset"}}, 0.0),
    ],
)
def test_states_of_several_resources_are_compared(truth: Any, options: dict[str, Any], score: float) -> None:
    assert judge(BOTH, truth, **options).score == score


@pytest.mark.parametrize(
    ("snapshot", "truth", "options", "reason"),
    [
        (StateSnapshot.from_json(WORLD), {**WORLD, "balance": 4}, {}, "at .balance: expected 4, found 3"),
        (StateSnapshot.from_json(WORLD), {"/gone": 1}, {"match": "paths"}, '"/gone": expected 1, but it is missing'),
        (FILES, {"report.txt": "total 4\n"}, {"match": "subset"}, '"total 3" in line 1, expected "total 4"'),
        (FILES, LEFT | {"more": "x"}, {}, '"more": no such file exists'),
        (SHOP, {"orders": ROWS[:2]}, {}, 'the row (2, "open", 3.0) is not expected'),
        (SHOP, {"gone": []}, {}, "no such table"),
        (BOTH, {"world": {"a": 1}}, {"match": "subset"}, '"world: state": at .a: expected 1, but it is missing'),
    ],
)
def test_the_reason_names_the_first_difference(
    snapshot: StateSnapshot, truth: Any, options: dict[str, Any], reason: str
) -> None:
    assert reason in judge(snapshot, truth, **options).reason


def test_each_compared_item_is_a_metric() -> None:
    metrics = judge(FILES, {"report.txt": True, "gone": True}, match="subset").metrics
    assert {name: metric.score for name, metric in metrics.items()} == {"report.txt": 1.0, "gone": 0.0}


@pytest.mark.parametrize(
    ("snapshot", "truth", "options", "why"),
    [
        (StateSnapshot.from_json(WORLD), None, {}, "sample has none"),
        (StateSnapshot.from_json(WORLD), "{oops", {}, "cannot be read"),
        (StateSnapshot.from_json(WORLD), {"balance": 3}, {"match": "paths"}, "not a JSON pointer"),
        (StateSnapshot.from_json(WORLD), [1], {"match": "paths"}, '"/a/0/b"'),
        (StateSnapshot.from_json(WORLD), {}, {"match": "paths"}, "nothing to compare"),
        (FILES, ["report.txt"], {}, "{path: text}"),
        (FILES, {"report.txt": 3}, {}, "an int"),
        (FILES, {"report.txt": {"base64": "?"}}, {}, "base64"),
        (SHOP, ["orders"], {}, "{table or query: rows}"),
        (SHOP, {"orders": 3}, {}, "list of lists"),
        (SHOP, {"orders": [[1], [1, 2]]}, {}, "the same length"),
        (SHOP, {"orders": [{"id": 1}, {"amount": 1}]}, {}, "same columns"),
        (SHOP, {"orders": [[True]]}, {}, "a bool"),
        (SHOP, {"SELECT FROM orders": []}, {}, "syntax error"),
        (SHOP, {"SELECT 1; SELECT 2": []}, {}, "final state"),
        (SHOP, {"orders": ROWS}, {"match": "subset", "tolerance": 0.1}, "cannot be combined with tolerance"),
        (BOTH, {"dbs": {}}, {}, "did you mean 'db'"),
        (BOTH, {"db": {"empty": []}}, {"match": {"flies": "subset"}}, "did you mean 'files'"),
        (BOTH, [], {}, "must map resource names"),
    ],
)
def test_unsuitable_ground_truth_leaves_the_rollout_unscored(
    snapshot: StateSnapshot, truth: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RewardError) as raised:
        judge(snapshot, truth, **options)
    assert why in str(raised.value)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(RewardError, match="no final state"):
        final_state_matches([], None, {})
    with pytest.raises(ConfigError, match="tolerance"):
        judge(SHOP, {"empty": []}, tolerance=-1.0)
    with pytest.raises(ConfigError, match="multiple resources"):
        judge(SHOP, {"empty": []}, match={"db": "equal"})
    with pytest.raises(ConfigError, match="JSON states"):
        judge(SHOP, {"empty": []}, match="paths")
    with pytest.raises(ConfigError, match="match"):
        with_options(final_state_matches, match="some")


def test_final_state_is_compared_in_the_sandbox() -> None:
    assert reward_spec(final_state_matches).sandbox == "warm"


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab~/", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab~/0", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def pointers(value: Any, path: str = "") -> dict[str, Any]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {path: value}
    for name, item in inside:
        found |= pointers(item, f"{path}/{str(name).replace('~', '~0').replace('/', '~1')}")
    return found


@given(values)
def test_state_equals_itself_wholly_and_at_every_pointer(value: Any) -> None:
    if value is not None:
        assert final_state_matches([], value, json.dumps(value)).score == 1.0
        assert final_state_matches([], value, json.dumps(value), match="subset").score == 1.0
        assert final_state_matches([], value, pointers(value), match="paths").score == 1.0


cells = st.none() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0]) | st.sampled_from(["a", "1", ""])
rows_of = st.lists(st.tuples(cells, cells), max_size=4)


@settings(deadline=None)
@given(rows_of, rows_of)
def test_database_rows_are_compared_as_multisets(there: list[Any], expected: list[Any]) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (a, b)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", there)
        snapshot = StateSnapshot("sqlite", connection.serialize())
    left = list(there)
    is_inside = all(row in left and left.remove(row) is None for row in expected)
    assert judge(snapshot, {"t": expected}, match="subset").score == float(is_inside)
    assert judge(snapshot, {"t": expected}).score == float(is_inside and not left)


@settings(deadline=None)
@given(histories)
def test_messages_do_not_affect_the_score(messages: list[Any]) -> None:
    assert final_state_matches(messages, WORLD, WORLD).score == 1.0
    assert final_state_matches(messages, WORLD, []).score == 0.0


def test_too_deeply_nested_state_scores_zero() -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    result = final_state_matches([], deep, {"a": 1})
    assert result.score == 0.0
    assert "nested deeper" in result.reason
