"""The tables of a run that other programs read: which columns each has, and the cells of one episode in them.

A cell is a text, a number, a count or a flag, or None where nobody knows. Structures are JSON text, as in the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from reward_kit.episodes.json_codec import from_json_value
from reward_kit.runs.results import Result
from reward_kit.runs.summary import whole_usage

Kind = Literal["text", "number", "count", "flag"]
Cell = str | float | int | bool | None
Row = Sequence[Cell]
_LARGEST_COUNT = 2**63 - 1


class Column(NamedTuple):
    """A column, and what its cells are."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        name: of it, and of its file.
        columns: in order.
    """

    name: str
    columns: Sequence[Column]

    @classmethod
    def of(cls, name: str, **kinds: str) -> Table:
        """`Table.of("steps", text="policy action", count="step")`, in the order of `order`."""
        order = kinds.pop("order").split()
        kind_of: dict[str, Any] = {column: kind for kind, columns in kinds.items() for column in columns.split()}
        return cls(name, tuple(Column(column, kind_of[column]) for column in order))


_WHOSE = "rollout_id sample_id group_id rollout_index policy"
EPISODES = Table.of(
    "episodes",
    order=f"{_WHOSE} attempt score passed is_imputed reason stop_reason error_class error num_steps environment_return "
    "terminated truncated prompt_tokens completion_tokens cost_usd started_at duration_s policy_s environment_s "
    "ground_truth sample messages",
    text="rollout_id sample_id group_id policy reason stop_reason error_class error started_at ground_truth sample "
    "messages",
    number="score environment_return cost_usd duration_s policy_s environment_s",
    count="rollout_index attempt num_steps prompt_tokens completion_tokens",
    flag="passed is_imputed terminated truncated",
)
SCORES = Table.of(
    "scores",
    order=f"{_WHOSE} name score reason is_score_valid scorer scorer_hash failure_class duration_s",
    text="rollout_id sample_id group_id policy name reason scorer scorer_hash failure_class",
    number="score duration_s",
    count="rollout_index",
    flag="is_score_valid",
)
STEPS = Table.of(
    "steps",
    order=f"{_WHOSE} step state_key observation action raw_action reward is_action_valid step_score step_reason "
    "base_reward return_to_go value A_E A_S A anchor peers",
    text="rollout_id sample_id group_id policy state_key observation action raw_action step_reason",
    number="reward step_score base_reward return_to_go value A_E A_S A",
    count="rollout_index step anchor peers",
    flag="is_action_valid",
)
TABLES = {table.name: table for table in (EPISODES, SCORES, STEPS)}


def rows_of(table: Table, result: Result, pass_threshold: float, credit: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """The rows of one episode.

    Args:
        table: one of `TABLES`.
        result: the episode with its score.
        pass_threshold: a score of at least this passes.
        credit: its lines of `credit.jsonl`, for the steps.
    """
    if table is EPISODES:
        yield _row(table, _episode(result, pass_threshold))
    elif table is SCORES:
        yield from (_row(table, cells) for cells in _scores(result))
    else:
        yield from (_row(table, cells) for cells in _steps(result, credit))


def _row(table: Table, cells: Mapping[str, Any]) -> Row:
    return [_AS[column.kind](cells.get(column.name)) for column in table.columns]


def _whose(result: Result) -> dict[str, Any]:
    return {name: result.episode.get(name) for name in _WHOSE.split()}


def _episode(result: Result, pass_threshold: float) -> dict[str, Any]:
    record, row = result.episode, result.row()
    usage, timing = whole_usage(record), record.get("timing") or {}
    names = ("attempt", "stop_reason", "num_steps", "environment_return", "terminated", "truncated")
    cells = _whose(result) | {name: record.get(name) for name in (*names, "ground_truth", "sample", "messages")}
    cells |= {name: timing.get(name) for name in ("started_at", "duration_s", "policy_s", "environment_s")}
    cells |= {"prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": usage.get("completion_tokens")}
    return cells | {
        "cost_usd": usage.get("cost"),
        "score": row.score,
        "passed": None if row.score is None else row.score >= pass_threshold,
        "is_imputed": row.is_imputed,
        "reason": _result(result).get("reason"),
        "error_class": row.error_class or row.score_error,
        "error": row.error_message,
    }


def _result(result: Result) -> Mapping[str, Any]:
    return (result.score or {}).get("result") or {}


def _scores(result: Result) -> Iterator[dict[str, Any]]:
    """A row for the score, called "score", and one for each metric; none where the episode waits for its score."""
    if result.score is None:
        return
    line, found = result.score, _result(result)
    scorer = line.get("scorer") or {}
    common = _whose(result) | {
        "scorer": scorer.get("id"),
        "scorer_hash": scorer.get("hash"),
        "duration_s": (line.get("timing") or {}).get("duration_s"),
        "failure_class": (line.get("failure") or {}).get("class"),
    }
    is_valid = line.get("score") is not None
    yield {
        **common,
        "name": "score",
        "score": line.get("score"),
        "reason": found.get("reason"),
        "is_score_valid": is_valid,
    }
    for name, metric in (found.get("metrics") or {}).items():
        told = {key: metric.get(key) for key in ("score", "reason", "is_score_valid")}
        yield {**common, "name": name, **told}


def _steps(result: Result, credit: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    record = result.episode
    outputs = {output.get("step_index"): output for output in _result(result).get("step_outputs") or ()}
    worth = {line.get("step"): line for line in credit}
    parts = [*record["steps"], record.get("final") or {}]
    for t, step in enumerate(record["steps"]):
        told, credited = outputs.get(t) or {}, worth.get(t) or {}
        yield {
            **{name: credited.get(name) for name in ("return_to_go", "value", "A_E", "A_S", "A", "anchor", "peers")},
            **_whose(result),
            "step": t,
            "state_key": step.get("state_key"),
            "observation": _observation(record, step),
            "action": _action(step.get("action")),
            "raw_action": (step.get("outputs") or {}).get("raw_policy_output"),
            "reward": step.get("reward"),
            "is_action_valid": (parts[t + 1].get("info") or {}).get("is_action_valid"),
            "step_score": told.get("base_reward"),
            "step_reason": told.get("reason"),
            "base_reward": credited.get("base_reward"),
        }


def _observation(record: Mapping[str, Any], step: Mapping[str, Any]) -> Any:
    """What was seen; where the line does not repeat it, it is the message before the action."""
    if "observation" in step:
        return step["observation"]
    turn = step.get("assistant_turn")
    return record["messages"][turn - 1].get("content") if turn else None


def _action(action: Any) -> Any:
    """The text of an action that is nothing else."""
    return action.get("content") if isinstance(action, Mapping) and action.get("type") == "text" else action


# Cells


def _text(value: Any) -> str | None:
    """A text as it was, a structure as JSON; halves of surrogate pairs, which no UTF-8 can hold, are written out."""
    if value is None:
        return None
    plain = from_json_value(value) if isinstance(value, Mapping) else value
    text = plain if isinstance(plain, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: Any) -> float | None:
    value = from_json_value(value) if isinstance(value, Mapping) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


def _count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or abs(number) >= _LARGEST_COUNT else int(value)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_AS = {"text": _text, "number": _number, "count": _count, "flag": _flag}
