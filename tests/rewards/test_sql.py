"""Test `sql_result`: known traps of execution accuracy, and hostile SQL."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.environments.base import StateSnapshot
from reward_kit.environments.snapshots import SqliteState, compose, open_snapshot
from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult
from reward_kit.reward_calls import with_options
from reward_kit.rewards.sql import QueryResult, has_order, same_rows, sql_result, with_tie_break
from reward_kit.typed_interface import reward_spec
from tests.profiles import examples

SEED = """
CREATE TABLE person(id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER, pay REAL);
INSERT INTO person VALUES (1, 'Ann', 'Rome', 30, 10.5), (2, 'Bob', 'Oslo', 25, 20.25), (3, 'Cid', 'Rome', 30, NULL),
    (4, 'Dee', NULL, 41, 10.5), (5, 'Eve', 'Oslo', 25, 0.1);
CREATE TABLE empty(x);
"""


class Case(NamedTuple):
    id: str
    gold: str
    query: str
    score: float
    says: str = ""
    options: tuple[tuple[str, Any], ...] = ()


CITY = "SELECT city FROM person WHERE city IS NOT NULL"
BY_AGE = "SELECT name FROM person ORDER BY age"
SUM = "SELECT sum(age) FROM person"
NAMES = "SELECT name FROM person"
CASES = [
    Case("the same query", NAMES, NAMES, 1.0),
    Case("another way to say it", SUM, "WITH a AS (SELECT age FROM person) SELECT sum(age) AS total FROM a;", 1.0),
    Case("Spider: aliases and case do not count", NAMES, "select P.Name as who from PERSON p", 1.0),
    Case(
        "BIRD: sets hide duplicates: a missing DISTINCT",
        f"SELECT DISTINCT city FROM ({CITY})",
        CITY,
        0.0,
        "4 rows, but 2",
    ),
    Case("a superfluous DISTINCT", CITY, CITY.replace("SELECT", "SELECT DISTINCT"), 0.0),
    Case("the same set, other counts", CITY, CITY + " AND id < 4 UNION ALL SELECT 'Rome'", 0.0, "different rows"),
    Case("no order asked, any is right", NAMES, NAMES + " ORDER BY name DESC", 1.0),
    Case("order asked and kept", "SELECT id FROM person ORDER BY id DESC", "SELECT id FROM person ORDER BY -id", 1.0),
    Case(
        "order asked and missed",
        "SELECT id FROM person ORDER BY id DESC",
        "SELECT id FROM person",
        0.0,
        "different order",
    ),
    Case("order of a subquery is none", f"SELECT * FROM ({NAMES} ORDER BY name)", NAMES + " ORDER BY name DESC", 1.0),
    Case(
        "order of a window is none",
        "SELECT id, row_number() OVER (ORDER BY id) FROM person",
        "SELECT id, id FROM person ORDER BY id DESC",
        1.0,
    ),
    Case(
        "ORDER BY in a text is none",
        "SELECT name, ' ORDER BY ' FROM person",
        "SELECT name, ' ORDER BY ' FROM person ORDER BY name DESC",
        1.0,
    ),
    Case("ties may stand in any order", BY_AGE, BY_AGE + ", name DESC", 1.0),
    Case("ties may, others may not", BY_AGE, "SELECT name FROM person ORDER BY age DESC, name", 0.0, "different order"),
    Case("order never counts", BY_AGE, NAMES + " ORDER BY name DESC", 1.0, "", (("ordered", "never"),)),
    Case("order always counts", NAMES, NAMES + " ORDER BY name DESC", 0.0, "", (("ordered", "always"),)),
    Case(
        "LIMIT without ties",
        "SELECT name FROM person ORDER BY age DESC LIMIT 1",
        "SELECT name FROM person WHERE age = 41",
        1.0,
    ),
    Case("LIMIT among equals: any of them", BY_AGE + " LIMIT 1", "SELECT 'Eve'", 1.0, "", (("ties", "any"),)),
    Case("LIMIT among equals: none of them", BY_AGE + " LIMIT 1", "SELECT 'Ann'", 0.0, "", (("ties", "any"),)),
    Case("columns in another order", "SELECT name, age FROM person", "SELECT age, name FROM person", 0.0),
    Case(
        "columns in any order",
        "SELECT name, age, id FROM person",
        "SELECT id, name, age FROM person",
        1.0,
        "",
        (("columns", "any_order"),),
    ),
    Case(
        "any order, but whole columns",
        "SELECT id, age FROM person WHERE id < 3",
        "SELECT 1, 25 UNION ALL SELECT 2, 30",
        0.0,
        "",
        (("columns", "any_order"),),
    ),
    Case("a column too many", NAMES, "SELECT name, id FROM person", 0.0, "2 columns, but 1"),
    Case("a column too few", "SELECT name, id FROM person", NAMES, 0.0, "1 column, but 2"),
    Case("a row too many", NAMES + " WHERE id < 3", NAMES, 0.0, "5 rows, but 2"),
    Case("NULL is not 0", "SELECT pay FROM person WHERE id = 3", "SELECT 0", 0.0),
    Case("NULL is not ''", "SELECT city FROM person WHERE id = 4", "SELECT ''", 0.0),
    Case("NULL is NULL", "SELECT pay FROM person WHERE id = 3", "SELECT city FROM person WHERE id = 4", 1.0),
    Case(
        "NOT IN meets NULL",
        "SELECT id FROM person WHERE city IS NOT 'Rome'",
        "SELECT id FROM person WHERE city NOT IN ('Rome')",
        0.0,
    ),
    Case("count(*) is not count(column)", "SELECT count(city) FROM person", "SELECT count(*) FROM person", 0.0),
    Case("1.0 is 1", SUM, "SELECT total(age) FROM person", 1.0),
    Case("'1' is not 1", "SELECT count(*) FROM person", "SELECT '5'", 0.0),
    Case("integer division", "SELECT 1.0 * sum(age) / 2 FROM person", "SELECT sum(age) / 2 FROM person", 0.0),
    Case("floats summed in another order", "SELECT 0.1 + 0.2 + 0.3", "SELECT 0.3 + 0.2 + 0.1", 1.0),
    Case("floats exactly", "SELECT 0.1 + 0.2 + 0.3", "SELECT 0.3 + 0.2 + 0.1", 0.0, "", (("tolerance", 0.0),)),
    Case("rounded by the model", "SELECT 1 / 3.0", "SELECT 0.33", 0.0),
    Case("rounded, and it was asked for", "SELECT 1 / 3.0", "SELECT 0.33", 1.0, "", (("tolerance", 0.02),)),
    Case("large integers are not rounded", "SELECT 9007199254740993", "SELECT 9007199254740992", 0.0),
    Case("case of texts counts", "SELECT 'Rome'", "SELECT 'rome'", 0.0),
    Case("a blob is no text", "SELECT x'41'", "SELECT 'A'", 0.0),
    Case("nothing is nothing", "SELECT x FROM empty", "SELECT id FROM person WHERE 0", 1.0),
    Case("nothing, with other columns", "SELECT x FROM empty", "SELECT id, name FROM person WHERE 0", 0.0, "2 columns"),
    Case("nothing is not something", "SELECT x FROM empty", NAMES, 0.0),
    Case("one row of NULL is not nothing", "SELECT x FROM empty", "SELECT max(x) FROM empty", 0.0),
    Case("UNION with an order", "SELECT 2 AS a UNION SELECT 1 ORDER BY a", "SELECT 1 UNION ALL SELECT 2", 1.0),
    Case("now is the same moment", "SELECT date('now')", "SELECT substr(CURRENT_TIMESTAMP, 1, 10)", 1.0),
    Case("random is the same draw", "SELECT random() IS NULL", "SELECT 0", 1.0),
    Case("does not parse", NAMES, "SELECT FROM person", 0.0, "syntax error"),
    Case("no such column", NAMES, "SELECT nme FROM person", 0.0, "no such column"),
    Case("prose", NAMES, "The answer is Ann.", 0.0, "cannot be used"),
    Case("two statements", "SELECT 1", "SELECT 1; SELECT 1", 0.0, "one statement"),
    Case("writes", NAMES, "DELETE FROM person", 0.0, "read-only"),
    Case(
        "writes and returns",
        "SELECT 'Ann'",
        "UPDATE person SET name = 'x' WHERE id = 1 RETURNING 'Ann'",
        0.0,
        "read-only",
    ),
    Case("attaches", NAMES, "ATTACH '/etc/passwd' AS x", 0.0, "ATTACH"),
    Case("reads a file", NAMES, "SELECT readfile('/etc/passwd')", 0.0),
    Case("loads an extension", NAMES, "SELECT load_extension('x')", 0.0),
    Case("changes a pragma", NAMES, "PRAGMA writable_schema = 1", 0.0, "is not allowed"),
    Case(
        "runs without end",
        NAMES,
        "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT count(*) FROM x",
        0.0,
        "took longer",
        (("time_s", 0.1),),
    ),
    Case(
        "rows without end",
        NAMES,
        "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT n FROM x",
        0.0,
        "more than the limit of 50 rows",
        (("max_rows", 50),),
    ),
    Case("a value without end", NAMES, "SELECT zeroblob(1000000000)", 0.0, "larger than"),
    Case("a NUL character", NAMES, "SELECT 1\0", 0.0),
    Case("half a surrogate pair", NAMES, "SELECT '\ud800'", 0.0),
    Case("nothing said", NAMES, "", 0.0, "no query"),
    Case("a fenced block", SUM, f"Thus:\n```sql\n{SUM}\n```\nwhich is 151.", 1.0),
    Case("the last block", SUM, f"```sql\nSELECT 1\n```\nno,\n```sqlite\n{SUM}\n```", 1.0),
    Case("no block, and one is asked for", SUM, SUM, 0.0, "no query", (("unfenced", "refuse"),)),
    Case("what was thought", SUM, f"<think>{SUM}</think>SELECT 1", 0.0),
]


def judged(query: str, truth: Any, **given: Any) -> EvaluateResult:
    options = {name: given.pop(name) for name in list(given) if name not in ("state", "sample")}
    reward = with_options(sql_result, **options) if options else sql_result
    result: EvaluateResult = reward(messages=[{"role": "assistant", "content": query}], ground_truth=truth, **given)
    return result


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_query_gets_the_expected_score(case: Case) -> None:
    result = judged(case.query, {"query": case.gold, "seed_sql": SEED}, **dict(case.options))
    assert result.score == case.score, result.reason
    assert case.says in (result.reason or "")


def snapshot(script: str = SEED) -> StateSnapshot:
    connection = sqlite3.connect(":memory:")
    connection.executescript(script)
    data = connection.serialize()
    connection.close()
    return StateSnapshot("sqlite", data)


def test_database_is_the_final_state_of_the_episode() -> None:
    with SqliteState(snapshot().payload) as state:
        assert judged("SELECT 151", SUM, state=state).score == 1.0
        assert judged("SELECT 151", [NAMES, SUM], state=state).score == 1.0
        assert state.query("SELECT count(*) FROM person") == [(5,)]


def test_database_is_found_among_several_resources() -> None:
    parts = {"db": snapshot(), "notes": StateSnapshot("json", b"{}")}
    with open_snapshot(compose(parts)) as state:
        assert judged("SELECT 151", SUM, state=state).score == 1.0
    with open_snapshot(compose({"a": snapshot(), "b": snapshot("CREATE TABLE other(x);")})) as state:
        assert judged("SELECT 151", SUM, state=state, resource="a").score == 1.0
        with pytest.raises(RewardError, match="option 'resource'"):
            judged("SELECT 151", SUM, state=state)


def test_database_can_come_from_the_sample_or_a_file(tmp_path: Path) -> None:
    assert judged("SELECT 151", SUM, sample={"seed_sql": SEED, "id": 3}).score == 1.0
    file = tmp_path / "a.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SEED)
    connection.close()
    before = file.read_bytes()
    assert judged("SELECT 151", {"query": SUM, "database": str(file)}).score == 1.0
    assert judged("DROP TABLE person", {"query": SUM, "database": str(file)}).score == 0.0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        (None, "the sample has none"),
        (3, "must contain a query, got an int"),
        ([], "must contain a query"),
        ({"query": "", "seed_sql": ""}, "must contain a query"),
        ({"sql": NAMES}, "unknown key 'sql'"),
        (NAMES, "needs a database"),
        ({"query": "SELECT nothing", "seed_sql": SEED}, "the gold query fails"),
        ({"query": NAMES, "seed_sql": "CREATE"}, "seed_sql cannot be run"),
        ({"query": NAMES, "database": "/nowhere.sqlite"}, "cannot be read"),
        ({"query": NAMES, "database": __file__}, "not a SQLite database"),
        ({"query": BY_AGE + " LIMIT 1", "seed_sql": SEED}, "can return different rows"),
        ({"query": NAMES + " LIMIT 2", "seed_sql": SEED}, "can return different rows"),
    ],
)
def test_unsuitable_ground_truth_is_unscored(truth: Any, says: str) -> None:
    with pytest.raises(RewardError) as caught:
        judged(NAMES, truth)
    assert says in str(caught.value)


def test_empty_gold_result_is_unscored_on_request() -> None:
    with pytest.raises(RewardError, match="returns no rows"):
        judged("SELECT 1", {"query": "SELECT x FROM empty", "seed_sql": SEED}, empty="unscored")


@pytest.mark.parametrize("options", [{"tolerance": -1.0}, {"time_s": 0.0}, {"max_rows": 0}])
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        judged(NAMES, {"query": NAMES, "seed_sql": SEED}, **options)


def test_sql_result_requires_a_sandbox() -> None:
    assert reward_spec(sql_result).sandbox == "warm"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT a FROM t ORDER BY b", "SELECT a FROM t ORDER BY b, X "),
        ("SELECT a FROM t ORDER BY b DESC LIMIT 3;", "SELECT a FROM t ORDER BY b DESC, X LIMIT 3"),
        ("select a from t order /* c */ by b -- LIMIT 3\n;", "select a from t order   by b, X "),
        ("SELECT a FROM (SELECT 1 AS a ORDER BY 1 LIMIT 2)", ""),
        ("SELECT 'ORDER BY b', \"order by\", [order by] FROM t", ""),
        (
            "SELECT a FROM t ORDER BY 'LIMIT', (SELECT 1 LIMIT 1) LIMIT 2",
            "SELECT a FROM t ORDER BY 'LIMIT', (SELECT 1 LIMIT 1), X LIMIT 2",
        ),
    ],
)
def test_tie_break_is_added_to_the_outermost_order_by(query: str, expected: str) -> None:
    assert with_tie_break(query, "X") == expected
    assert has_order(query) == bool(expected)


VALUES = st.one_of(
    st.none(), st.integers(-3, 3), st.floats(allow_nan=False, width=32), st.text(max_size=2), st.binary(max_size=2)
)
ROWS = st.integers(0, 3).flatmap(
    lambda width: st.lists(st.tuples(*[VALUES] * width), max_size=8).map(lambda rows: (width, rows))
)


@given(ROWS, st.randoms(use_true_random=False))
@settings(max_examples=examples(100), deadline=None)
def test_rows_are_equal_in_any_order_but_not_with_another_count(table: tuple[int, list[Any]], draw: Any) -> None:
    width, rows = table
    shuffled = draw.sample(rows, len(rows))
    gold = QueryResult(width, rows)
    assert same_rows([gold], QueryResult(width, shuffled), False, "in_order", 0.0) == ""
    assert same_rows([gold], QueryResult(width, rows), True, "in_order", 0.0) == ""
    assert same_rows([gold], QueryResult(width, [*rows, (None,) * width]), False, "in_order", 0.0) != ""
    places = draw.sample(range(width), width)
    moved = QueryResult(width, [tuple(row[place] for place in places) for row in shuffled])
    assert same_rows([gold], moved, False, "any_order", 0.0) == ""


@given(ROWS, ROWS)
@settings(max_examples=examples(100), deadline=None)
def test_comparison_without_tolerance_is_multiset_equality(
    one: tuple[int, list[Any]], other: tuple[int, list[Any]]
) -> None:
    def typed(rows: list[Any]) -> Counter[Any]:
        return Counter(tuple((isinstance(value, int | float), value) for value in row) for row in rows)

    expected = one[0] == other[0] and typed(one[1]) == typed(other[1])
    assert (same_rows([QueryResult(*one)], QueryResult(*other), False, "in_order", 0.0) == "") == expected
