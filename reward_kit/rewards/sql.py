"""`sql_result`: does the model's query return what the gold query returns, on the same database?

Execution accuracy as of Spider (Yu et al. 2018, arXiv:1809.08887; test suites: Zhong et al. 2020, arXiv:2010.02840)
and BIRD (Li et al. 2023, arXiv:2305.03111), without the traps by which wrong queries pass there: duplicates count, the
order counts where the gold query has one, and where a gold query leaves open what it returns, as with LIMIT among
equals, that is told and not decided by chance.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.environments.snapshots import CompositeState, SqliteState
from reward_kit.environments.sqlite_guard import GuardedConnection, SqliteLimits
from reward_kit.errors import ConfigError, RewardError, ToolError, kind_of
from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.comparing.sql_rows import Columns, Result, has_order, same_rows, with_tie_break
from reward_kit.rewards.option_types import Closeness, Seconds, check_closeness
from reward_kit.rewards.reading.fenced import block_of
from reward_kit.rewards.reading.texts import last_answer, needed, passed
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

    def run(self, query: str, *, is_reversed: bool = False) -> Result:
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
                    raise ToolError("it is no query: it returns no columns")
                rows = cursor.fetchmany(self.max_rows + 1)
                width = len(cursor.description)
                cursor.close()
        except ValueError as error:  # a NUL character
            raise ToolError(str(error)) from None
        finally:
            connection.close()
        if len(rows) > self.max_rows:
            raise ToolError(f"it returns more than {self.max_rows:,} rows")
        return Result(width, rows)


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
    BY, rows that it holds for equal in any order. NULL equals NULL only, 1 equals 1.0, a text is no number. Names of
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
    queries, place = _golds(needed(ground_truth, "sql_result"))
    limits = SqliteLimits(statement_time_s=time_s, max_value_bytes=1 << 24, read_only=True)
    database = _Database(_bytes_of(place, sample, state, resource), limits, max_rows)
    results = [_gold_results(database, query, ordered, ties) for query in queries]
    if empty == "unscored" and not any(one.rows for several in results for one in several):
        raise RewardError("the gold query returns no rows, which any wrong query may do too")
    query = _query(messages, unfenced)
    if not query:
        return passed(False, "the reply has no query")
    try:
        result = database.run(query)
    except ToolError as error:
        return passed(False, f"the query cannot be used: {error}")
    problem = ""
    for gold, several in zip(queries, results, strict=True):
        counts = ordered == "always" or (ordered == "as_gold" and has_order(gold))
        choices = _choices(several, has_order(gold), ties)
        found = [same_rows(golds, result, counts, columns, tolerance) for golds in choices]
        if "" in found:
            return passed(True, f"it returns what the gold query returns; rows: {len(result.rows)}")
        problem = problem or found[0]
    return passed(False, problem)


def _choices(several: list[Result], has_order: bool, ties: str) -> list[list[Result]]:
    """The results of one gold query, in the sets of which any may be what was returned."""
    if ties == "any":
        return [[one] for one in several]
    return [several if has_order else several[:1]]


def _query(messages: list[Message], unfenced: str) -> str:
    answer = last_answer(messages)
    found = block_of(answer, _TAGS, "last")
    if found is None:
        found = answer if unfenced == "whole" else ""
    return found.encode("utf-8", "replace").decode("utf-8").strip()


def _golds(ground_truth: Any) -> tuple[list[str], Mapping[str, Any]]:
    """The gold queries, and what names the database, where anything does."""
    place: Mapping[str, Any] = {}
    if isinstance(ground_truth, Mapping):
        if unknown := sorted(map(str, ground_truth.keys() - _KEYS)):
            raise RewardError(f"ground_truth: unknown key {unknown[0]!r}; {_FORM}")
        place, ground_truth = ground_truth, ground_truth.get("query")
    queries = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
        raise RewardError(f"ground_truth holds {kind_of(ground_truth)} in the place of a query; {_FORM}")
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
        raise RewardError(f"database {path} is no SQLite database")
    # In a copy in memory there is no write-ahead log, which these two bytes would ask for.
    return data[:18] + b"\1\1" + data[20:]


def _gold_results(database: _Database, gold: str, ordered: str, ties: str) -> list[Result]:
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
