"""The reward `final_state_matches`, which compares the resource's final state with an expected state."""

from __future__ import annotations

import base64
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from reward_kit.environments.snapshots import CompositeState, FilesState, SqliteState
from reward_kit.errors import ConfigError, EnvironmentFailure, RewardError, did_you_mean, type_name
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.json_answers import ComparisonRules, abbreviate, as_json, difference, read_json
from reward_kit.rewards.option_types import Closeness, check_closeness
from reward_kit.rewards.replies import excerpt, quoted, require_truth
from reward_kit.rewards.sql import QueryResult, row_key, same_rows
from reward_kit.typed_interface import reward_function

_MOST_METRICS = 100
Match = Literal["equal", "subset", "paths"]


@reward_function(sandbox="warm")
def final_state_matches(
    messages: list[Message],
    state: Any = None,
    ground_truth: Any = None,
    *,
    match: Match | dict[str, Match] = "equal",
    partial: Literal["none", "things"] = "none",
    tolerance: Closeness = 0.0,
    ordered: bool = False,
    globs: bool = False,
    texts: Literal["exact", "lines"] = "exact",
) -> EvaluateResult:
    """Score 1 if the resource's final state equals the expected state, and 0 otherwise.

    If `partial` is set, the score is the share of correct items. The form of the ground truth depends on the kind of
    state. If the ground truth is a string, it is parsed as JSON. This reward runs in the sandbox, because the agent may
    have created views in the database.

    | State | Ground truth | Item |
    |---|---|---|
    | JSON (python_state) | the value, or `{"/a/0/b": value}` (JSON pointers) for "paths" | the value, a pointer |
    | files | `{path: content}` | a path |
    | database | `{table: rows}` or `{"SELECT …": rows}` | a table, a query |
    | composite | `{name of the resource: any of these}` | the items of the resources |

    A file's content is a string, `{"base64": …}` for bytes, true for any content, or null if the file must not exist.
    Each row is a list or an object whose keys are the column names.

    Args:
        messages: the conversation, which is ignored.
        state: the final state.
        ground_truth: the expected state in one of the forms above.
        match: "equal" to require an equal JSON value, no additional files, and exactly the expected rows in each listed
            table; "subset" to allow additional fields, files and rows; or "paths" to compare only some values in a JSON
            state. For a composite state, a mapping can set this option separately for each resource. Tables and
            resources that the ground truth does not list are never compared.
        partial: "things" to score the share of correct items. An unexpected file counts as an item.
        tolerance: the maximum difference between two numbers, relative or absolute.
        ordered: True to require rows in the expected order. Table rows have no order, so use a query with ORDER BY.
        globs: True to treat paths as patterns, in which `*` matches within a directory and `**` matches any number of
            directories. At least one file must match each pattern, and every matching file must have the given content.
            If the content is null, no file may match.
        texts: "exact" to compare text files exactly, or "lines" to ignore spaces at the ends of lines and empty lines
            at the end of a file.

    Raises:
        RewardError: If the final state or the ground truth is missing or cannot be used. The rollout is then unscored.
        ConfigError: If the tolerance is not in [0, 1), or if `match` does not fit the kind of state.

    Example:
        ```python
        final_state_matches(messages, state, {"SELECT status FROM orders WHERE id = 7": [["paid"]]})
        ```
    """
    check_closeness(tolerance)
    expected = require_truth(ground_truth, "final_state_matches")
    if state is None:
        raise RewardError("final_state_matches: the episode has no final state")
    try:
        expected = read_json(expected) if isinstance(expected, str) else expected
        expected = expected if isinstance(state, SqliteState | CompositeState) else as_json(expected)
    except ValueError as error:
        raise RewardError(f"final_state_matches: ground_truth cannot be read: {error}") from None
    findings = list(_compare(expected, state, StateRules("equal", tolerance, ordered, globs, texts), match))
    if not findings:
        raise RewardError("final_state_matches: ground_truth contains nothing to compare")
    wrong = [finding for finding in findings if finding.problem]
    right = len(findings) - len(wrong)
    reason = f"{right} of {len(findings)} items are as expected"
    if wrong:
        reason += f"; {quoted(wrong[0].name)}: {wrong[0].problem}"
    metrics = {
        excerpt(name, 200): MetricResult(score=float(not problem), reason=problem or "as expected")
        for name, problem in findings[:_MOST_METRICS]
    }
    score = right / len(findings) if partial == "things" else float(not wrong)
    return EvaluateResult(score=score, reason=reason, metrics=metrics)


@reward_function
def harbor_tests(messages: list[Message], state: Any = None) -> EvaluateResult:
    """Score the reward that the tests of a Harbor task wrote. Each reward of `reward.json` is also a metric.

    The score is the reward named `reward`, or the mean of all rewards. Without a valid reward file, the episode is
    unscored.
    """
    if not isinstance(state, Mapping) or not {"rewards", "problem"} & state.keys():
        raise RewardError("harbor_tests: the final state is not that of a harbor resource")
    if "rewards" not in state:
        raise RewardError(f"harbor_tests: {state['problem']}; end of the log: {str(state.get('log'))[-500:]}")
    rewards = state["rewards"]
    metrics = {
        name: MetricResult(score=value, reason="written by the tests")
        for name, value in rewards.items()
        if len(rewards) > 1
    }
    return EvaluateResult(score=state["reward"], reason=f"the tests wrote {rewards}", metrics=metrics)


def _compare(expected: Any, state: Any, how: StateRules, match: Match | dict[str, Match]) -> Iterator[StateMismatch]:
    if isinstance(state, CompositeState):
        if not isinstance(expected, Mapping):
            raise RewardError(
                f"final_state_matches: ground_truth must map resource names to states, got {type_name(expected)}"
            )
        for name in (*expected, *(match if isinstance(match, dict) else ())):
            if name not in state:
                raise RewardError(f"final_state_matches: no resource is named {name!r}{did_you_mean(str(name), state)}")
        for name, part in expected.items():
            own: Match = match.get(name, "equal") if isinstance(match, dict) else match
            for finding in _compare(part, state[name], how, own):
                yield StateMismatch(f"{name}: {finding.name}", finding.problem)
        return
    if isinstance(match, dict):
        raise ConfigError("final_state_matches: `match` can be a mapping only if the task has multiple resources")
    how = how._replace(match=match)
    if match == "paths" and isinstance(state, FilesState | SqliteState):
        raise ConfigError('final_state_matches: match="paths" applies only to JSON states')
    if isinstance(state, FilesState):
        yield from _compare_files(expected, state, how)
    elif isinstance(state, SqliteState):
        if not isinstance(expected, Mapping):
            problem = f"ground_truth must be {{table or query: rows}}, got {type_name(expected)}"
            raise RewardError(f"final_state_matches: {problem}")
        for source, rows in expected.items():
            yield StateMismatch(source, _rows_problem(source, rows, state, how))
    else:
        yield from _compare_json(expected, state, how)


MOST_ROWS: Final = 100_000
"""The maximum number of rows in a table or query."""
_CELL_TYPES = (int, float, str, bytes, type(None))
_AUTHORS_MISTAKE: Final = re.compile(r'.{,30}state: (?:near "|incomplete input|unrecognized token|You can)')
"""Errors that the tables and views of the agent cannot cause, because SQLite has already parsed them."""
_QUERY: Final = re.compile(r"\s*(?:\(|--|/\*|(?:select|with|values)\b\s*\S)", re.IGNORECASE | re.DOTALL)


class StateRules(NamedTuple):
    """The rules for comparing states; see `final_state_matches`."""

    match: Match = "equal"
    tolerance: float = 0.0
    ordered: bool = False
    globs: bool = False
    texts: Literal["exact", "lines"] = "exact"


class StateMismatch(NamedTuple):
    """The name of a compared item, and a description of its problem, or "" if the item is correct."""

    name: str
    problem: str


def _compare_json(expected: Any, state: Any, how: StateRules) -> Iterator[StateMismatch]:
    """Compare a whole JSON state, or only the values at JSON pointers (RFC 6901)."""
    try:
        as_json(state)
    except ValueError as error:
        yield StateMismatch("state", f"the state cannot be compared: {error}")
        return
    comparing = ComparisonRules(how.tolerance, subset=how.match == "subset")
    if how.match != "paths":
        yield StateMismatch("state", difference(expected, state, comparing).removeprefix(": ").lstrip())
        return
    if not isinstance(expected, Mapping):
        raise RewardError('final_state_matches: with match="paths", ground_truth must be {"/a/0/b": value}')
    for pointer, value in expected.items():
        is_there, at_pointer = _follow(state, pointer)
        problem = (
            difference(value, at_pointer, comparing)
            if is_there
            else f": expected {abbreviate(value)}, but it is missing"
        )
        yield StateMismatch(pointer, problem.removeprefix(": ").lstrip())


def _compare_files(expected: Any, state: FilesState, how: StateRules) -> Iterator[StateMismatch]:
    """Compare files by path or by pattern. With "equal", unexpected files are also reported."""
    if not isinstance(expected, Mapping):
        raise RewardError(f"final_state_matches: ground_truth must be {{path: text}}, got {type_name(expected)}")
    known: set[str] = set()
    for path, content in expected.items():
        paths = [path] if path in state else []
        if how.globs and not paths:
            paths = [file for file in state if _matches(path.split("/"), file.split("/"))]
        known.update(paths)
        yield StateMismatch(path, _file_problem(content, {file: state[file] for file in paths}, how))
    if how.match == "equal":
        if not expected and not state:
            yield StateMismatch("files", "")
        yield from (StateMismatch(file, "this file is not expected") for file in state if file not in known)


def _follow(value: Any, pointer: str) -> tuple[bool, Any]:
    """Return True and the value at a JSON pointer, or False and None if the pointer does not resolve to a value."""
    if pointer and not pointer.startswith("/"):
        raise RewardError(
            f"final_state_matches: {pointer!r} is not a JSON pointer; write '/a/0/b', or '' for the whole state"
        )
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif (
            isinstance(value, list) and part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(value)
        ):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _file_problem(expected: Any, files: Mapping[str, str | bytes], how: StateRules) -> str:
    if expected is None:
        return f"{quoted(next(iter(files)))} exists, but no such file is expected" if files else ""
    if not files:
        return "no such file exists"
    if expected is True:
        return ""
    wanted: str | bytes
    if isinstance(expected, str):
        wanted = expected
    elif isinstance(expected, Mapping) and expected.keys() == {"base64"}:
        try:
            wanted = base64.b64decode(expected["base64"], validate=True)
        except (ValueError, TypeError):
            raise RewardError("final_state_matches: the base64 content of an expected file cannot be decoded") from None
    else:
        raise RewardError(
            f"final_state_matches: a file's content cannot be {type_name(expected)}; write a string, null if "
            'the file must not exist, true for any content, or {"base64": …}'
        )

    def as_read(content: str | bytes) -> str | bytes:
        if how.texts == "exact" or isinstance(content, bytes):
            return content
        return "\n".join(line.rstrip() for line in content.split("\n")).rstrip("\n")

    for path, content in files.items():
        if isinstance(wanted, bytes) and isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        if as_read(content) == as_read(wanted):
            continue
        if isinstance(content, bytes) or isinstance(wanted, bytes):
            sizes = (
                f"{type_name(content)} of length {len(content)}, expected {type_name(wanted)} of length {len(wanted)}"
            )
            return f"{quoted(path)} contains {sizes}"
        lines, others = content.splitlines(keepends=True), wanted.splitlines(keepends=True)
        for number, (line, other) in enumerate(zip(lines, others, strict=False), start=1):
            if line != other:
                return f"{quoted(path)} contains {quoted(line)} in line {number}, expected {quoted(other)}"
        return f"{quoted(path)} contains {len(lines)} lines, expected {len(others)}"
    return ""


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Return True if a path matches a pattern. The segment `**` matches any number of directories."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached, default=len(path) + 1), len(path) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(path) and fnmatch.fnmatchcase(path[at], part)}
    return len(path) in reached


def _rows_problem(source: str, rows: Any, state: SqliteState, how: StateRules) -> str:
    wanted, columns = _wanted_rows(source, rows)

    def backticked(name: str) -> str:  # SQLite would treat an unknown name in double quotes as a string.
        return "`" + name.replace("`", "``") + "`"

    names = ", ".join(map(backticked, columns)) or "*"
    inner = f"({source.strip().rstrip(';')}\n)" if _QUERY.match(source) else backticked(source)
    try:  # Limit the number of rows, because a view may return rows endlessly.
        got = state.query(f"SELECT {names} FROM {inner} LIMIT {MOST_ROWS + 1}")
    except EnvironmentFailure as error:
        if _AUTHORS_MISTAKE.match(str(error)):
            raise RewardError(f"final_state_matches: {error}") from None
        return f"the rows cannot be read: {excerpt(str(error), 120)}"
    if len(got) > MOST_ROWS:
        return f"there are more than {MOST_ROWS:,} rows"
    expected_rows, given_rows = Counter(map(row_key, wanted)), Counter(map(row_key, got))
    missing = expected_rows - given_rows
    if how.match == "subset":
        if how.tolerance or how.ordered:
            raise RewardError(
                'final_state_matches: for rows, match="subset" cannot be combined with tolerance or ordered'
            )
        first = next((row for row in wanted if row_key(row) in missing), None)
        return "" if first is None else f"the row {_shown_row(first)} is missing"
    width = len(wanted[0]) if wanted else len(got[0]) if got else 0
    result = QueryResult(len(got[0]) if got else width, got)
    if not same_rows([QueryResult(width, wanted)], result, how.ordered, "in_order", how.tolerance):
        return ""
    extra = given_rows - expected_rows
    problems = [f"the row {_shown_row(row)} is missing" for row in wanted if row_key(row) in missing][:1]
    problems += [f"the row {_shown_row(row)} is not expected" for row in got if row_key(row) in extra][:1]
    return "; ".join(problems) or "the rows are in a different order"


def _wanted_rows(source: str, rows: Any) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the expected rows, and the names of their columns if the rows are objects."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple | Mapping) for row in rows):
        raise RewardError(f"final_state_matches: the rows of {source!r} must be a list of lists or of objects")
    columns = list(rows[0]) if rows and isinstance(rows[0], Mapping) else []
    if any(
        (list(row) != columns and set(row) != set(columns)) if isinstance(row, Mapping) else columns for row in rows
    ):
        raise RewardError(f"final_state_matches: the rows of {source!r} must all have the same columns")
    wanted = [tuple(row[column] for column in columns) if columns else tuple(row) for row in rows]
    if len({len(row) for row in wanted}) > 1:
        raise RewardError(f"final_state_matches: the rows of {source!r} must all have the same length")
    for cell in (cell for row in wanted for cell in row):
        if isinstance(cell, bool) or not isinstance(cell, _CELL_TYPES):
            raise RewardError(f"final_state_matches: a row of {source!r} contains {type_name(cell)}; use 0 or 1")
    return wanted, columns


def _shown_row(row: Sequence[Any]) -> str:
    cells = [abbreviate(cell) if not isinstance(cell, bytes) else f"{len(cell)} bytes" for cell in row[:6]]
    return f"({', '.join(cells)}{', …' if len(row) > 6 else ''})"
