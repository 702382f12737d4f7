"""`final_state_matches`: did the agent leave the world as it should be? Nothing that it says counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from reward_kit.environments.snapshots import CompositeState, FilesState, SqliteState
from reward_kit.errors import ConfigError, RewardError, did_you_mean, kind_of
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.comparing.json_values import as_json, read_json
from reward_kit.rewards.comparing.state_parts import (
    Checking,
    Finding,
    Match,
    file_findings,
    json_findings,
    table_findings,
)
from reward_kit.rewards.option_types import Closeness, check_closeness
from reward_kit.rewards.reading.texts import needed, shown
from reward_kit.typed_interface import reward_function

_MOST_METRICS = 100


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
    """1 where the resource's final state is the expected one, else 0, or the share of things that `partial` asks for.

    The ground truth has the form that fits the state; a text is read as JSON text. It runs behind walls, since a
    database's views are the agent's.

    | state | ground truth | a thing |
    |---|---|---|
    | JSON, such as python_state's | the value; with "paths" `{"/a/0/b": value}` by JSON pointer | the value, a path |
    | files | `{path: text}`, null for no such file, true for any content, `{"base64": …}` for bytes | a path |
    | database | `{table: rows}` or `{"SELECT …": rows}`, rows as lists or as objects by column | a table or query |
    | composite | `{name of the resource: any of these}` | those of the parts |

    Args:
        messages: the conversation; it is not read.
        state: the final state.
        ground_truth: as above.
        match: "equal": JSON values are equal, no file is there besides, each table has these rows and no others;
            "subset": objects may have further fields, folders further files, tables further rows; "paths" is for JSON.
            A mapping gives each resource of a composite its own. Tables, and resources, that are not named are not
            compared.
        partial: "things" pays the share of things that are right. A file that should not be there counts as a thing.
        tolerance: how far numbers may lie apart, relative or absolute.
        ordered: rows must come in the expected order; a table has none, so give a query with ORDER BY.
        globs: paths are patterns, `*` within a folder and `**` across: at least one file matches, and each has that
            content; for null none matches.
        texts: "lines" overlooks blanks at the ends of lines and empty lines at the end of a file.

    Raises:
        RewardError: there is no final state or ground truth, or the ground truth does not fit it: it is unscored.
        ConfigError: the tolerance is below 0.

    Example:
        ```python
        final_state_matches(messages, state, {"SELECT status FROM orders WHERE id = 7": [["paid"]]})
        ```
    """
    check_closeness(tolerance)
    expected = needed(ground_truth, "final_state_matches")
    if state is None:
        raise RewardError("final_state_matches: the episode has no final state")
    try:
        expected = read_json(expected) if isinstance(expected, str) else expected
        expected = expected if isinstance(state, SqliteState | CompositeState) else as_json(expected)
    except ValueError as error:
        raise RewardError(f"final_state_matches: the ground_truth cannot be read: {error}") from None
    how = Checking("equal", tolerance, ordered, globs, texts)
    return _result(list(_findings(expected, state, how, match)), partial)


def _findings(expected: Any, state: Any, how: Checking, match: Match | dict[str, Match]) -> Iterator[Finding]:
    if isinstance(state, CompositeState):
        yield from _of_parts(expected, state, how, match)
        return
    if isinstance(match, dict):
        raise ConfigError("final_state_matches: `match` by name is for a task with several resources")
    how = how._replace(match=match)
    if match == "paths" and isinstance(state, FilesState | SqliteState):
        raise ConfigError('final_state_matches: match="paths" is for JSON states; this one has paths or tables already')
    if isinstance(state, FilesState):
        yield from file_findings(expected, state, how)
    elif isinstance(state, SqliteState):
        yield from table_findings(expected, state, how)
    else:
        yield from json_findings(expected, state, how)


def _of_parts(
    expected: Any, state: CompositeState, how: Checking, match: Match | dict[str, Match]
) -> Iterator[Finding]:
    if not isinstance(expected, Mapping):
        raise RewardError(f"final_state_matches: several resources are expected by name, not as {kind_of(expected)}")
    for name in (*expected, *(match if isinstance(match, dict) else ())):
        if name not in state:
            raise RewardError(f"final_state_matches: no resource is named {name!r}{did_you_mean(str(name), state)}")
    for name, part in expected.items():
        own: Match = match.get(name, "equal") if isinstance(match, dict) else match
        findings = _findings(part, state[name], how, own)
        yield from (Finding(f"{name}: {found.name}", found.problem) for found in findings)


def _result(findings: list[Finding], partial: str) -> EvaluateResult:
    if not findings:
        raise RewardError("final_state_matches: the ground_truth names nothing to compare")
    wrong = [finding for finding in findings if finding.problem]
    right = len(findings) - len(wrong)
    reason = f"{right} of {len(findings)} things are as expected"
    if wrong:
        reason += f"; {shown(wrong[0].name)}: {wrong[0].problem}"
    metrics = {
        shown(name, 200)[1:-1]: MetricResult(score=float(not problem), reason=problem or "as expected")
        for name, problem in findings[:_MOST_METRICS]
    }
    score = right / len(findings) if partial == "things" else float(not wrong)
    return EvaluateResult(score=score, reason=reason, metrics=metrics)
