"""Test that the lines of an episode are located once for all readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reward_kit.runs.export import CreditLines
from reward_kit.runs.results import index_credit
from tests.report.run_factory import make_run


def credit(name: str, step: int, a: float) -> dict[str, Any]:
    """Return a line of `credit.jsonl`."""
    return {"schema_version": 1, "rollout_id": name, "group_id": "g", "step": step, "A": a}


def run_with(folder: Path, *lines: dict[str, Any]) -> Path:
    run = make_run(folder, [], [])
    (run / "credit.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return run


def test_credit_of_an_episode_is_read_from_indexed_lines(tmp_path: Path) -> None:
    lines = [credit("r1", 0, 1.0), credit("r1", 1, 2.0), credit("r10", 0, 3.0)]
    run = run_with(tmp_path, *lines)
    stored, places = (run / "credit.jsonl").read_bytes(), index_credit(run)
    found = {
        name: [json.loads(line) for line in stored[place.offset : place.offset + place.length].splitlines()]
        for name, place in places.items()
    }
    assert found == {"r1": lines[:2], "r10": lines[2:]}


def test_without_credit_there_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [])
    assert index_credit(run) == {} and CreditLines(run).read("r1") == []


def test_export_uses_the_same_split_lines_as_the_page(tmp_path: Path) -> None:
    lines = [credit("r1", 0, 1.0), credit("r2", 0, 2.0), credit("r1", 0, 3.0)]
    run = run_with(tmp_path, *lines)
    assert CreditLines(run).read("r1") == lines[2:] and CreditLines(run).read("r2") == lines[1:2]
