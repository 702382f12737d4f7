"""Compare the final database with the expected rows by a query. The agent's messages do not count."""

from __future__ import annotations

from typing import Any

from reward_kit import EvaluateResult, reward_function


@reward_function
def right_state(messages: list, ground_truth: list[list[Any]], sample: dict[str, Any], state: Any) -> EvaluateResult:
    """Return 1 if the sample's `check_sql` returns the ground truth from the final database, else 0."""
    found = [list(row) for row in state.query(sample["check_sql"])]
    right = len(found) == len(ground_truth) and all(map(same_row, found, ground_truth))
    return EvaluateResult(score=float(right), reason=f"the query found {found}, expected {ground_truth}"[:300])


def same_row(found: list[Any], expected: list[Any]) -> bool:
    """Compare cell by cell; numbers, also as text, may differ by half a cent."""
    return len(found) == len(expected) and all(map(same_value, found, expected))


def same_value(found: Any, expected: Any) -> bool:
    """Compare as numbers if both are numeric, otherwise as text."""
    try:
        return abs(float(found) - float(expected)) < 0.005
    except (TypeError, ValueError):
        return str(found).strip() == str(expected)
