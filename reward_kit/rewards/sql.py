"""The reward `sql_result`, which runs the model's query and a gold query on the same database.

This is execution accuracy as in Spider (Yu et al. 2018, arXiv:1809.08887; test suites: Zhong et al. 2020,
arXiv:2010.02840) and BIRD (Li et al. 2023, arXiv:2305.03111), but without the loopholes through which wrong queries can
pass in these benchmarks. Duplicate rows count, and row order counts if the gold query specifies it. If the gold query
is ambiguous, for example because its LIMIT cuts through ties, this is reported instead of letting chance decide.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.display_text import pluralize
from reward_kit.environments.snapshots import CompositeState, SqliteState
from reward_kit.environments.sqlite_guard import GuardedConnection, SqliteLimits
from reward_kit.errors import ConfigError, RewardError, ToolError, type_name
from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.option_types import Closeness, Seconds, check_closeness, is_close
from reward_kit.rewards.replies import last_answer, passed, require_truth, select_block
from reward_kit.typed_interface import reward_function

_TAGS = frozenset({"sql", "sqlite", "sqlite3", "postgresql", "mysql"})
_KEYS = {"query", "seed_sql", "database"}
_SEED_TIME_S = 60.0
_LARGEST_DATABASE = 256_000_000
_TIE_BREAKS = ("reward_kit_row()", "-reward_kit_row()", "reward_kit_row() * 56611 % 104729")
_MORE_TIE_BREAKS = tuple(
    f"reward_kit_row() * {factor} % 104729" for factor in (17_389, 27_449, 35_023, 44_771, 71_993, 83_089, 99_991)
)
_FORM = 'write the query itself, or {"query": "SELECT …", "seed_sql": "CREATE TABLE …"} if the episode has no database'


class _Database(NamedTuple):
    data: bytes
    limits: SqliteLimits
    max_rows: int

    def run(self, query: str, *, is_reversed: bool = False) -> QueryResult:
        """Return the rows of a query. Raise a ToolError if the query fails, is rejected, or returns too many rows."""
        connection = GuardedConnection.from_bytes(
            self.limits, self.data, {"reverse_unordered_selects": int(is_reversed)}
        )
        try:
            rows_seen = iter(range(1, 1 << 62))
            connection.connection.create_function("reward_kit_row", 0, lambda: next(rows_seen))
            with connection.atomic() as guarded:
                cursor = guarded.execute(query)
                if cursor.description is None:
                    raise ToolError("it is not a query, because it returns no columns")
                rows = cursor.fetchmany(self.max_rows + 1)
                width = len(cursor.description)
                cursor.close()
        except ValueError as error:  # a NUL character
            raise ToolError(str(error)) from None
        finally:
            connection.close()
        if len(rows) > self.max_rows:
            raise ToolError(f"it returns more than the limit of {self.max_rows:,} rows")
        return QueryResult(width, rows)


Columns = Literal["in_order", "any_order"]
"""The order of columns when rows are compared: the order of the gold query, or any order."""


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
    """Score 1 if the query in the reply returns the same rows as the gold query, and 0 otherwise.

    The query is the last fenced block tagged as SQL, the last untagged block, or the whole reply. The ground truth is a
    gold query, a list of gold queries, `{"query": …, "seed_sql": …}`, or `{"query": …, "database": path}`. Both queries
    run on a copy of a database. The database comes from the ground truth, from the sample (under the same keys), or
    from the final state of the episode. The queries can only read that database. ATTACH, writes and file system
    functions are rejected.

    Rows are compared as a multiset, so a missing DISTINCT counts as wrong. If the gold query ends with ORDER BY, row
    order counts, except among ties. NULL equals only NULL, 1 equals 1.0, and strings are not numbers. The number and
    the order of columns count, but their names do not. If different query plans for the gold query return different
    rows, because a LIMIT cuts through ties or has no ORDER BY, the rollout is unscored, and the reason states this.

    Args:
        messages: the conversation. Only the last assistant message is read.
        ground_truth: the gold query in one of the forms above.
        state: the final state of the sqlite resource.
        sample: the row of the dataset.
        ordered: "as_gold" to compare the order of rows if the gold query specifies it, "always", or "never".
        columns: "in_order" to require columns in the same order as in the gold query, or "any_order" to accept any
            order.
        tolerance: the maximum difference between two numbers, relative or absolute. The default is not 0, because a sum
            of floats depends on the order of the rows.
        ties: "unscored" to leave the rollout unscored if the gold query is ambiguous, or "any" to accept any possible
            result that is found.
        empty: "compare" to compare an empty gold result like any other result, or "unscored" to leave the rollout
            unscored, because an empty result can match by chance.
        unfenced: how to treat a reply that has no block: "refuse" rejects it, and "whole" uses the whole reply as the
            query.
        resource: the name of the database resource if the environment has multiple resources.
        time_s: the time limit for each query, in seconds.
        max_rows: the maximum number of rows in a result. If the query in the reply returns more rows, it is wrong. If
            the gold query returns more rows, an error is raised.

    Raises:
        RewardError: If the database is missing, or if the gold query fails or has an ambiguous result.
        ConfigError: If an option is invalid.

    Example:
        ```python
        result = sql_result(messages=messages, ground_truth="SELECT count(*) FROM orders", state=state)
        ```
    """
    check_closeness(tolerance)
    if time_s <= 0 or max_rows < 1:
        raise ConfigError(f"option {'max_rows' if time_s > 0 else 'time_s'!r} must be positive")
    truth = require_truth(ground_truth, "sql_result")
    source: Mapping[str, Any] = {}
    if isinstance(truth, Mapping):
        if unknown := sorted(map(str, truth.keys() - _KEYS)):
            raise RewardError(f"ground_truth: unknown key {unknown[0]!r}; {_FORM}")
        source, truth = truth, truth.get("query")
    queries = list(truth) if isinstance(truth, list | tuple) else [truth]
    if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
        raise RewardError(f"ground_truth must contain a query, got {type_name(truth)}; {_FORM}")
    limits = SqliteLimits(statement_time_s=time_s, max_value_bytes=1 << 24, read_only=True)
    database = _Database(_database_bytes(source, sample, state, resource), limits, max_rows)
    results = [_gold_results(database, query, ordered, ties) for query in queries]
    if empty == "unscored" and not any(one.rows for several in results for one in several):
        raise RewardError("the gold query returns no rows, so a match would prove little")
    answer = last_answer(messages)
    block = select_block(answer, _TAGS, "last")
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
        # Each choice is a set of acceptable results.
        choices = [[one] for one in several] if ties == "any" else [several if has_order(gold) else several[:1]]
        problems = [same_rows(golds, result, counts, columns, tolerance) for golds in choices]
        if "" in problems:
            return passed(True, f"it returns the rows of the gold query ({pluralize(len(result.rows), 'row')})")
        problem = problem or problems[0]
    return passed(False, problem)


def _database_bytes(truth: Mapping[str, Any], sample: Any, state: Any, resource: str) -> bytes:
    for source in (truth, sample if isinstance(sample, Mapping) else {}):
        if isinstance(script := source.get("seed_sql"), str):
            return _seeded(script)
        if isinstance(path := source.get("database"), str):
            return _read(path)
    if isinstance(state, CompositeState):
        names = [resource] if resource else [name for name in state if isinstance(state[name], SqliteState)]
        if len(names) != 1 or names[0] not in state:
            raise RewardError(
                f"multiple resources have a state ({', '.join(state)}); select the database with the option 'resource'"
            )
        state = state[names[0]]
    if not isinstance(state, SqliteState):
        raise RewardError(
            "sql_result needs a database; use a sqlite resource in the task, or add seed_sql or database to the "
            "ground_truth or the sample"
        )
    return state.serialize()


@functools.lru_cache(maxsize=8)
def _seeded(script: str) -> bytes:
    """Return the database that a script creates. The database is cached for a sample's rollouts."""
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
        raise RewardError(f"database {path} cannot be read ({error.strerror}); add it to sandbox.read_paths") from None
    if not data.startswith(b"SQLite format 3\0"):
        raise RewardError(f"database {path} is not a SQLite database")
    # Clear the two bytes that request a write-ahead log, which a copy in memory does not have.
    return data[:18] + b"\1\1" + data[20:]


def _gold_results(database: _Database, gold: str, ordered: str, ties: str) -> list[QueryResult]:
    """Return the gold query's results under multiple query plans.

    Unless `ties` is "any", all results have the same rows.

    Raises:
        RewardError: If the query fails, or if its rows depend on the query plan.
    """
    try:
        results = [database.run(gold), database.run(gold, is_reversed=True)]
    except ToolError as error:
        raise RewardError(f"the gold query fails: {error}: {gold[:200]}") from None
    with suppress(ToolError):  # for example UNION, whose ORDER BY accepts only column names
        for tie_break in (*_TIE_BREAKS, *(_MORE_TIE_BREAKS if ties == "any" else ())):
            if text := with_tie_break(gold, tie_break):
                results.append(database.run(text))
    if ties == "unscored" and any(same_rows([results[0]], one, False, "in_order", 1e-9) for one in results):
        raise RewardError(
            "the gold query can return different rows, because its ORDER BY has ties or its LIMIT has no ORDER BY; "
            f"add a tie-break, or accept every possible result with ties='any': {gold[:200]}"
        )
    return results


_MOST_ASSIGNMENTS = 720
_TOKEN = re.compile(
    r"""'[^']*'|"[^"]*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|[()]|[A-Za-z_][\w$]*""",
    re.DOTALL,
)
_RANKS = {type(None): 0, int: 1, float: 1, str: 2, bytes: 3}


class QueryResult(NamedTuple):
    """The result of a query: the number of columns, and the rows in order."""

    width: int
    rows: Sequence[tuple[Any, ...]]


def same_rows(
    golds: Sequence[QueryResult], result: QueryResult, is_ordered: bool, columns: Columns, tolerance: float
) -> str:
    """Describe the difference between a result and the gold result, or return "" if absent.

    Args:
        golds: the gold results, which contain the same rows in each possible order.
        result: the result to compare.
        is_ordered: True to require the order of the gold results. Rows whose order differs among the gold results may
            come in any order.
        columns: how column order is treated.
        tolerance: the maximum difference between two numbers, relative or absolute.
    """
    gold = golds[0]
    if result.width != gold.width:
        return f"it returns {pluralize(result.width, 'column')}, but {gold.width} were expected"
    if len(result.rows) != len(gold.rows):
        return f"it returns {pluralize(len(result.rows), 'row')}, but {len(gold.rows)} were expected"
    blocks = _blocks(golds) if is_ordered else [(0, len(gold.rows))]
    for order in _assignments(gold, result) if columns == "any_order" else [range(gold.width)]:
        rows = [tuple(row[column] for column in order) for row in result.rows]
        if all(_are_same(gold.rows[start:end], rows[start:end], tolerance) for start, end in blocks):
            return ""
    if is_ordered and not same_rows([gold], result, False, columns, tolerance):
        return "it returns the expected rows in a different order"
    return "it returns different rows"


def _blocks(golds: Sequence[QueryResult]) -> list[tuple[int, int]]:
    """Return the start and end of each of the shortest ranges that contain the same rows in all orders."""
    others = [gold.rows for gold in golds[1:] if len(gold.rows) == len(golds[0].rows)]
    blocks, start = [], 0
    balances: list[Counter[Any]] = [Counter() for _ in others]
    for index, row in enumerate(golds[0].rows):
        for balance, rows in zip(balances, others, strict=True):
            for moved, by in ((row, 1), (rows[index], -1)):
                key = row_key(moved)
                balance[key] += by
                if not balance[key]:
                    del balance[key]
        if not any(balances):
            blocks.append((start, index + 1))
            start = index + 1
    return blocks + ([(start, len(golds[0].rows))] if start < len(golds[0].rows) else [])


def row_key(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key for a row, in which each value is paired with its type.

    The number 1 equals 1.0, but it does not equal the string "1".
    """
    return tuple((_RANKS[type(value)], value) for value in row)


def _are_same(gold: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]], tolerance: float) -> bool:
    """Return True if two lists contain the same rows in any order."""
    if Counter(map(row_key, gold)) == Counter(map(row_key, rows)):
        return True
    if not tolerance:
        return False
    for left, right in zip(sorted(gold, key=_rough), sorted(rows, key=_rough), strict=True):
        for one, other in zip(left, right, strict=True):
            is_float = isinstance(one, float) or isinstance(other, float)
            if _RANKS[type(one)] != _RANKS[type(other)]:
                return False
            if one != other and not (is_float and is_close(one, other, tolerance)):
                return False
    return True


def _rough(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a sort key that ignores the last digits of floats."""
    values = (float(f"{value:.8g}") if isinstance(value, float) else 0 if value is None else value for value in row)
    return tuple((_RANKS[type(value)], rough) for value, rough in zip(row, values, strict=True))


def _assignments(gold: QueryResult, result: QueryResult) -> Iterator[Sequence[int]]:
    """Yield orders of the result's columns in which each column has the same values as the gold column.

    Only a limited number of orders is tried.
    """

    def columns(of: QueryResult) -> list[Counter[Any]]:  # floats without their last digits
        return [Counter(_rough((row[index],)) for row in of.rows) for index in range(of.width)]

    wanted, actual = columns(gold), columns(result)
    tried = 0
    pending: list[tuple[int, ...]] = [()]
    while pending and tried < _MOST_ASSIGNMENTS:
        chosen = pending.pop()
        tried += 1
        if len(chosen) == gold.width:
            yield chosen
            continue
        fitting = [i for i in range(result.width) if i not in chosen and actual[i] == wanted[len(chosen)]]
        pending += [(*chosen, index) for index in reversed(fitting)]


def has_order(query: str) -> bool:
    """Return True if a query's outermost SELECT has an ORDER BY."""
    return _terms(_plain(query)) is not None


def with_tie_break(query: str, expression: str) -> str:
    """Return the query with a term added to its outermost ORDER BY, or "" if it has no ORDER BY."""
    text = _plain(query)
    end = _terms(text)
    return "" if end is None else f"{text[:end].rstrip()}, {expression} {text[end:]}"


def _plain(query: str) -> str:
    """Return a query without comments and without the final semicolon."""
    text = _TOKEN.sub(lambda match: " " if match[0].startswith(("--", "/*")) else match[0], query)
    return text.rstrip().rstrip(";").rstrip()


def _terms(text: str) -> int | None:
    """Return the position at which the terms of the outermost ORDER BY end, or None without ORDER BY."""
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
