"""Test that numbers on the command line must be finite."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from reward_kit.cli.main import program


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "line",
    [
        ["run", "task.yaml", "--fail-under"],
        ["run", "task.yaml", "--max-cost"],
        ["score", "rows.jsonl", "--reward", "r.py:f", "--pass-threshold"],
        ["compare", "a", "b", "--fail-under"],
        ["compare", "a", "b", "--fail-on-regression"],
        ["score", "a", "--reward", "r.py:f", "--fail-under"],
        ["export", "a", "--format", "csv", "--min-score"],
    ],
    ids=" ".join,
)
def test_non_finite_number_is_rejected(line: list[str], number: str) -> None:
    *_, option = line
    answer = CliRunner().invoke(program, [*line[:-1], f"{option}={number}"])
    assert answer.exit_code == 2
    assert f"Invalid value for '{option}'" in answer.output
