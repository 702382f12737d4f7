"""`sql_result`: does the model's query return what the gold query returns, on the same database?

Execution accuracy as of Spider (Yu et al. 2018, arXiv:1809.08887; test suites: Zhong et al. 2020, arXiv:2010.02840)
and BIRD (Li et al. 2023, arXiv:2305.03111), without the traps by which wrong queries pass there: duplicates count, the
order counts where the gold query has one, and where a gold query leaves open what it returns, as with LIMIT among
equals, that is reported and not decided by chance.
"""

from __future__ import annotations

import functools
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.environments.snapshots import CompositeState, SqliteState
from reward_kit.environments.sqlite_guard import GuardedConnection, SqliteLimits
from reward_kit.errors import ConfigError, RewardError, ToolError, kind_of
from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.option_types import Closeness, Seconds, check_closeness
from reward_kit.rewards.replies import block_of, last_answer, passed, require_truth
from reward_kit.typed_interface import reward_function

_TAGS = frozenset({"sql", "sqlite", "sqlite3", "postgresql", "mysql"})
_KEYS = {"query", "seed_sql", "database"}
_SEED_TIME_S = 60.0
_LARGEST_DATABASE = 256_000_000
_TIE_BREAKS = ("reward_kit_row()", "-reward_kit_row()", "reward_kit_row() * 56611 % 104729")
_MORE_TIE_BREAKS = tuple(
    f"reward_kit_row() * {factor} % 104729" for factor in (17_389, 27_449, 35_023, 44_771, 71_993, 83_089, 99_991)
)
_FORM = (
    'write the query itself, or {"query": "SELECT …", "seed_sql": "CREATE TABLE …"} where the episode has no database'
)


class _Database(NamedTuple):
    data: bytes
    limits: SqliteLimits
    max_rows: int

    def run(self, query: str, *, is_reversed: bool = False) -> QueryResult:
        """The rows of one query.

        Raises:
            ToolError: it failed, was refused, is no query, or gives too many rows; the message says why.
        """
        connection = GuardedConnection.from_bytes(
            self.limits, self.data, {"reverse_unordered_selects": int(is_reversed)}
        )
        try:
            rows_seen = iter(range(1, 1 << 62))
            connection.connection.create_function("reward_kit_row", 0, lambda: next(rows_seen))
            with connection.atomic() as guarded:
                cursor = guarded.execute(query)
                if cursor.description is None:
                    raise ToolError("it is not a query: it returns no columns")
                rows = cursor.fetchmany(self.max_rows + 1)
                width = len(cursor.description)
                cursor.close()
        except ValueError as error:  # a NUL character
            raise ToolError(str(error)) from None
        finally:
            connection.close()
        if len(rows) > self.max_rows:
            raise ToolError(f"it returns more than {self.max_rows:,} rows")
        return QueryResult(width, rows)


Columns = Literal["in_order", "any_order"]
"""Whether columns must stand in the gold query's order."""


@reward_function(sandbox="warm")
def sql_result(
    messages: list[Message],
    ground_truth: Any = None,
    state: Any = None,
    sample: Any = None,
    *,
    ordered: Literal["as_gold", "always", "never"] = "as_gold",
    columns: Columns = "in_order",
    tolerance: Closeness = 1e-9,
    ties: Literal["unscored", "any"] = "unscored",
    empty: Literal["compare", "unscored"] = "compare",
    unfenced: Literal["refuse", "whole"] = "whole",
    resource: str = "",
    time_s: Seconds = 5.0,
    max_rows: Annotated[int, Field(ge=1)] = 100_000,
) -> EvaluateResult:
    """1 where the query in the reply returns the rows of the gold query, else 0.

    The query is the last fenced block tagged as SQL, or untagged, else the whole reply. The ground truth is the gold
    query or several that are right, or `{"query": …, "seed_sql": …}`, `{"query": …, "database": path}`. Both queries
    run on a copy of the database: that of the ground truth, else the sample's (the same keys), else the state in which
    the episode ended. They can read it and nothing else: ATTACH, writes, and functions of the file system are refused.

    Rows are compared as a multiset, so that a missing DISTINCT is wrong; in order where the gold query ends with ORDER
    BY, rows that it holds for equal in any order. NULL equals NULL only, 1 equals 1.0, a text is not a number. Names of
    columns do not count, their number and order do. Where other plans of the gold query return other rows (LIMIT among
    equals, LIMIT without ORDER BY), the rollout is unscored and the reason says so.

    Args:
        messages: the conversation; the last assistant message counts.
        ground_truth: the gold query, as above.
        state: the final state of the sqlite resource.
        sample: the sample's row.
        ordered: "as_gold", or the order counts always or never.
        columns: "any_order" accepts the same columns in another order.
        tolerance: how far numbers may lie apart, relative or absolute: sums of floats depend on the order of rows.
        ties: "any" accepts each result that the gold query may return, as far as they are tried.
        empty: "unscored" where the gold query returns nothing, which proves little.
        unfenced: what a reply without a block is: no query, or a query as a whole.
        resource: the database among several resources.
        time_s: of one query.
        max_rows: of one result; more is no answer, and of a gold query an error.

    Raises:
        RewardError: there is no database, the gold query fails, or what it returns is left open.
        ConfigError: an option is nonsense.

    Example:
        ```python
        result = sql_result(messages=messages, ground_truth="SELECT count(*) FROM orders", state=state)
        ```
    """
    check_closeness(tolerance)
    if time_s <= 0 or max_rows < 1:
        raise ConfigError(f"option {'max_rows' if time_s > 0 else 'time_s'!r}: it is positive")
    queries, place = _golds(require_truth(ground_truth, "sql_result"))
    limits = SqliteLimits(statement_time_s=time_s, max_value_bytes=1 << 24, read_only=True)
    database = _Database(_bytes_of(place, sample, state, resource), limits, max_rows)
    results = [_gold_results(database, query, ordered, ties) for query in queries]
    if empty == "unscored" and not any(one.rows for several in results for one in several):
        raise RewardError("the gold query returns no rows, which any wrong query may do too")
    answer = last_answer(messages)
    block = block_of(answer, _TAGS, "last")
    query = block if block is not None else answer if unfenced == "whole" else ""
    query = query.encode("utf-8", "replace").decode("utf-8").strip()
    if not query:
        return passed(False, "the reply has no query")
    try:
        result = database.run(query)
    except ToolError as error:
        return passed(False, f"the query cannot be used: {error}")
    problem = ""
    for gold, several in zip(queries, results, strict=True):
        counts = ordered == "always" or (ordered == "as_gold" and has_order(gold))
        # Sets of results, any one of which may be what was returned.
        choices = [[one] for one in several] if ties == "any" else [several if has_order(gold) else several[:1]]
        found = [same_rows(golds, result, counts, columns, tolerance) for golds in choices]
        if "" in found:
            return passed(True, f"it returns what the gold query returns; rows: {len(result.rows)}")
        problem = problem or found[0]
    return passed(False, problem)


def _golds(ground_truth: Any) -> tuple[list[str], Mapping[str, Any]]:
    """The gold queries, and what names the database, where anything does."""
    place: Mapping[str, Any] = {}
    if isinstance(ground_truth, Mapping):
        if unknown := sorted(map(str, ground_truth.keys() - _KEYS)):
            raise RewardError(f"ground_truth: unknown key {unknown[0]!r}; {_FORM}")
        place, ground_truth = ground_truth, ground_truth.get("query")
    queries = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
        raise RewardError(f"ground_truth holds {kind_of(ground_truth)} instead of a query; {_FORM}")
    return queries, place


def _bytes_of(place: Mapping[str, Any], sample: Any, state: Any, resource: str) -> bytes:
    for source in (place, sample if isinstance(sample, Mapping) else {}):
        if isinstance(script := source.get("seed_sql"), str):
            return _seeded(script)
        if isinstance(path := source.get("database"), str):
            return _read(path)
    if isinstance(state, CompositeState):
        names = [resource] if resource else [name for name in state if isinstance(state[name], SqliteState)]
        if len(names) != 1 or names[0] not in state:
            raise RewardError(f"which of {', '.join(state)} is the database? Name it with the option resource")
        state = state[names[0]]
    if not isinstance(state, SqliteState):
        raise RewardError(
            "sql_result needs a database: a sqlite resource in the task, or seed_sql or database beside the query"
        )
    return state.serialize()


@functools.lru_cache(maxsize=8)
def _seeded(script: str) -> bytes:
    """The database that a script makes; rollouts of a sample share it."""
    try:
        made = GuardedConnection.seeded(SqliteLimits(max_database_bytes=_LARGEST_DATABASE), script, _SEED_TIME_S)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise RewardError(f"seed_sql cannot be run: {error}") from None
    try:
        return made.serialize()
    finally:
        made.close()


def _read(path: str) -> bytes:
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_DATABASE:
            raise RewardError(f"database {path} has more than {_LARGEST_DATABASE:,} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise RewardError(f"database {path} cannot be read ({error.strerror}); name it in sandbox.read_paths") from None
    if not data.startswith(b"SQLite format 3\0"):
        raise RewardError(f"database {path} is not a SQLite database")
    # In a copy in memory there is no write-ahead log, which these two bytes would ask for.
    return data[:18] + b"\1\1" + data[20:]


def _gold_results(database: _Database, gold: str, ordered: str, ties: str) -> list[QueryResult]:
    """What the gold query returns, under several plans that it leaves open; all the same rows unless ties are taken.

    Raises:
        RewardError: it fails, or may return other rows.
    """
    try:
        results = [database.run(gold), database.run(gold, is_reversed=True)]
    except ToolError as error:
        raise RewardError(f"the gold query fails: {error}: {gold[:200]}") from None
    for tie_break in (*_TIE_BREAKS, *(_MORE_TIE_BREAKS if ties == "any" else ())):
        if text := with_tie_break(gold, tie_break):
            try:
                results.append(database.run(text))
            except ToolError:  # such as for UNION, whose ORDER BY takes names of columns only
                break
    if ties == "unscored" and any(same_rows([results[0]], one, False, "in_order", 1e-9) for one in results):
        raise RewardError(
            "the gold query may return other rows too, since some are equal in its ORDER BY or it has a LIMIT without "
            f"one; add a tie-break, or take any of them with ties='any': {gold[:200]}"
        )
    return results


_MOST_ASSIGNMENTS = 720
_TOKEN = re.compile(
    r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|[()]|[A-Za-z_][\w$]*""",
    re.DOTALL,
)
_RANKS = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}


class QueryResult(NamedTuple):
    """What a query returned.

    Attributes:
        width: how many columns.
        rows: in the order in which they came.
    """

    width: int
    rows: Sequence[tuple[Any, ...]]


def same_rows(
    golds: Sequence[QueryResult], result: QueryResult, is_ordered: bool, columns: Columns, tolerance: float
) -> str:
    """Why a result is not the gold one; "" where it is.

    Args:
        golds: the same rows in the orders in which the gold query may return them; the first one as it does.
        result: the other one.
        is_ordered: rows must come in one of those orders. Rows that change places among them may come in any.
        columns: whether columns may stand in another order.
        tolerance: how far numbers may lie apart, relative or absolute.
    """
    gold = golds[0]
    if result.width != gold.width:
        return f"it returns {_count(result.width, 'column')}, and {gold.width} were expected"
    if len(result.rows) != len(gold.rows):
        return f"it returns {_count(len(result.rows), 'row')}, and {len(gold.rows)} were expected"
    blocks = _blocks(golds) if is_ordered else [(0, len(gold.rows))]
    for order in _assignments(gold, result) if columns == "any_order" else [range(gold.width)]:
        rows = [tuple(row[place] for place in order) for row in result.rows]
        if all(_are_same(gold.rows[start:end], rows[start:end], tolerance) for start, end in blocks):
            return ""
    if is_ordered and not same_rows([gold], result, False, columns, tolerance):
        return "it returns the expected rows in another order"
    return "it returns other rows"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _blocks(golds: Sequence[QueryResult]) -> list[tuple[int, int]]:
    """Start and end of the shortest runs of rows that stand in the same place in all orders."""
    others = [gold.rows for gold in golds[1:] if len(gold.rows) == len(golds[0].rows)]
    blocks, start = [], 0
    balances: list[Counter[Any]] = [Counter() for _ in others]
    for place, row in enumerate(golds[0].rows):
        for balance, rows in zip(balances, others, strict=True):
            for moved, by in ((row, 1), (rows[place], -1)):
                key = _exact(moved)
                balance[key] += by
                if not balance[key]:
                    del balance[key]
        if not any(balances):
            blocks.append((start, place + 1))
            start = place + 1
    return blocks + ([(start, len(golds[0].rows))] if start < len(golds[0].rows) else [])


def _exact(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row as a key: values with the rank of their type, since 1 equals 1.0 and not "1" """
    return tuple((_RANKS[type(value)], value) for value in row)


def _are_same(gold: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]], tolerance: float) -> bool:
    """Whether two lists are the same rows in any order."""
    if Counter(map(_exact, gold)) == Counter(map(_exact, rows)):
        return True
    if not tolerance:
        return False
    for left, right in zip(sorted(gold, key=_rough), sorted(rows, key=_rough), strict=True):
        for one, other in zip(left, right, strict=True):
            if _RANKS[type(one)] != _RANKS[type(other)]:
                return False
            is_float = isinstance(one, float) or isinstance(other, float)
            if one != other and not (is_float and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)):
                return False
    return True


def _rough(row: Sequence[Any]) -> tuple[Any, ...]:
    """A key to sort by that is the same for numbers that differ in their last digits."""
    return tuple(
        (_RANKS[type(value)], float(f"{value:.8g}") if isinstance(value, float) else value or 0)
        if not isinstance(value, str | bytes)
        else (_RANKS[type(value)], value)
        for value in row
    )


def _assignments(gold: QueryResult, result: QueryResult) -> Iterator[Sequence[int]]:
    """Ways to place the result's columns so that each holds the values of its gold column, a bounded number of them."""
    wanted = [_column(gold, place) for place in range(gold.width)]
    found = [_column(result, place) for place in range(result.width)]
    tried = 0
    pending: list[tuple[int, ...]] = [()]
    while pending and tried < _MOST_ASSIGNMENTS:
        chosen = pending.pop()
        tried += 1
        if len(chosen) == gold.width:
            yield chosen
            continue
        fitting = [
            place for place in range(result.width) if place not in chosen and found[place] == wanted[len(chosen)]
        ]
        pending += [(*chosen, place) for place in reversed(fitting)]


def _column(result: QueryResult, place: int) -> Counter[Any]:
    """The values of a column, floats without their last digits."""
    return Counter(_rough((row[place],)) for row in result.rows)


def has_order(query: str) -> bool:
    """Whether the outermost SELECT of a query has an ORDER BY."""
    return _terms(_plain(query)) is not None


def with_tie_break(query: str, expression: str) -> str:
    """The query with one more term in its outermost ORDER BY; "" where it has none."""
    text = _plain(query)
    end = _terms(text)
    return "" if end is None else f"{text[:end].rstrip()}, {expression} {text[end:]}"


def _plain(query: str) -> str:
    """A query without its comments and the semicolon at its end."""
    text = _TOKEN.sub(lambda match: " " if match[0].startswith(("--", "/*")) else match[0], query)
    return text.rstrip().rstrip(";").rstrip()


def _terms(text: str) -> int | None:
    """Where the terms of the outermost ORDER BY end; None if there is none."""
    depth, before, end = 0, "", None
    for match in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        word = match[0].upper() if depth == 0 else ""
        if word == "BY" and before == "ORDER":
            end = len(text)
        elif word == "LIMIT" and end is not None:
            return match.start()
        before = word
    return end
