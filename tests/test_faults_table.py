"""The fault table names an existing test for every row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "development" / "faults.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| Fault |")]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`(tests/[^`]+)`", row)})


@cache
def names_in(file: Path) -> set[str]:
    """Return the tests of a file, those of classes as `Class::test`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, functions):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, functions)}
    return found


def test_every_row_names_a_test() -> None:
    assert len(ROWS) >= 50
    assert [row for row in ROWS if "`tests/" not in row.rsplit("|", 2)[1]] == []


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert test in names_in(ROOT / file)
