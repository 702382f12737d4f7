"""Fast parsing of episode lines agrees with parsing the whole line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import StoreError
from reward_kit.report.run_data import EpisodeOutline, episode_outline, read_run
from tests.report.run_factory import episode, make_run

FAILURE = {"class": "crash", "where": "ToolError", "message": ',"messages":[ ,"timing":'}


def read_facts(folder: Path, line: dict[str, Any]) -> EpisodeOutline:
    """Return the facts read from a run of this one line, as the store writes it."""
    run = make_run(folder, [], [])
    (run / "episodes.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
    (found,) = read_run(run).episodes
    return found


def stored(name: str = "r", **changes: Any) -> dict[str, Any]:
    """Return a line with its keys in the store's order."""
    line = episode(name, 1.0, 2.0)
    changes = {key: changes.get(key) for key in changes}
    middle = {key: changes.pop(key, line.pop(key, [])) for key in ("messages", "steps")}
    after = {key: changes.pop(key) for key in ("final", "tokens", "sample", "custom_data") if key in changes}
    timing = line.pop("timing")
    return line | changes | middle | after | {"timing": timing}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"messages": [{"role": "user", "content": 'a text with ,"timing": and ,"messages":[ in it'}]},
        {"failure": FAILURE, "stop_reason": "error"},
        {"start": {"key": 1, "messages": []}},
        {"custom_data": {"a": 1, "timing": {"duration_s": 99.0}}},
        {"custom_data": {"user_usage": {"prompt_tokens": 7}}},
        {"steps": [{}, {"info": {"tools": [{"name": "f", "error": "it broke"}]}}]},
        {"final": {"info": {"tools": [{"name": "f", "error": "it broke"}]}}},
        {"usage": {"prompt_tokens": 3, "cost": 0.5}},
        {"attempt": 2, "rollout_index": 5, "environment_return": -1.5},
    ],
)
def test_fast_parser_agrees_with_full_parser(tmp_path: Path, changes: dict[str, Any]) -> None:
    line = stored(**changes)
    found = read_facts(tmp_path, line)
    header = read_run(tmp_path / "run").header
    assert found == episode_outline(line, header, None, found.place)


def test_tool_errors_are_counted(tmp_path: Path) -> None:
    steps = [{}, {"info": {"tools": [{"name": "f", "error": "it broke"}, {"name": "g"}]}}]
    assert read_facts(tmp_path, stored(steps=steps)).row.tool_errors == 1


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [], [])
    (run / "episodes.jsonl").write_text('{"rollout_id":"r","messages":[],"timing":{}\n')
    with pytest.raises(StoreError, match=r"episodes\.jsonl:1: not JSON"):
        read_run(run)


def test_facts_record_offset_and_length_of_their_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("a"), episode("long name")], [])
    text = (run / "episodes.jsonl").read_bytes()
    for facts in read_run(run).episodes:
        assert facts.place is not None
        line = text[facts.place.offset : facts.place.offset + facts.place.length]
        assert json.loads(line)["rollout_id"] == facts.row.rollout_id
