"""Chunks of stored episodes behind a report page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import StoreError
from reward_kit.report.episode_chunks import (
    MOST_TOGETHER,
    ChunkReader,
    LineFitter,
    StoredLines,
    group_text,
    split_chunks,
    split_groups,
)
from reward_kit.report.run_data import read_run
from tests.report.run_factory import episode, facts, make_run, random_run, score


def credit(name: str, step: int, group: str = "g", **numbers: float | None) -> dict:
    """Return a line of `credit.jsonl`."""
    return {"schema_version": 1, "rollout_id": name, "group_id": group, "step": step, **numbers}


def write_credit(run: Path, *lines: dict) -> None:
    (run / "credit.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def lines_of(text: bytes) -> list[tuple[str, object]]:
    """Return the letter and the value of each line of a chunk."""
    return [(line[:1].decode(), json.loads(line[1:])) for line in text.splitlines()]


def texts_of(run: Path) -> list[bytes]:
    with ChunkReader(read_run(run)) as reader:
        return list(reader.texts())


def test_a_chunk_holds_the_stored_lines_of_its_episodes(tmp_path: Path) -> None:
    episodes = [episode("r1", rollout_index=1, group_id="g"), episode("r0", rollout_index=0, group_id="g")]
    scores = [score("r0", 1.0), score("r1", 0.0)]
    run = make_run(tmp_path, episodes, scores)
    write_credit(run, credit("r0", 0, A=0.5), credit("r0", 1, A=None), credit("r1", 0, A=-0.5))
    (text,) = texts_of(run)
    assert lines_of(text) == [
        ("E", episodes[1]),
        ("S", scores[0]),
        ("C", [{"step": 0, "A": 0.5}, {"step": 1, "A": None}]),
        ("E", episodes[0]),
        ("S", scores[1]),
        ("C", [{"step": 0, "A": -0.5}]),
    ]


def test_every_episode_is_in_exactly_one_chunk_and_groups_are_not_split(tmp_path: Path) -> None:
    run = read_run(random_run(tmp_path, 300))
    with ChunkReader(run) as reader:
        names = [facts.row.rollout_id for parts in reader.chunks for part in parts for facts in part.episodes]
        groups = [part.group_id for parts in reader.chunks for part in parts]
        found = [line["rollout_id"] for text in reader.texts() for kind, line in lines_of(text) if kind == "E"]  # type: ignore[index,call-overload]
    assert sorted(names) == sorted(facts.row.rollout_id for facts in run.episodes)
    assert len(groups) == len(set(groups))
    assert names == found, "the index and the lines have one order"


def test_chunks_hold_latest_attempts_and_leave_out_episodes_cut_off_by_a_limit(tmp_path: Path) -> None:
    lines = [episode("r"), episode("s", stop_reason="run_limit"), episode("r", attempt=1, stop_reason="max_steps")]
    run = make_run(tmp_path, lines, [score("r", 0.0), score("r", 1.0, attempt=1)], total=2)
    (text,) = texts_of(run)
    assert lines_of(text) == [("E", lines[2]), ("S", score("r", 1.0, attempt=1))]


def test_large_group_is_split_into_parts_with_their_offsets(tmp_path: Path) -> None:
    count = 2 * MOST_TOGETHER + 5
    run = facts(tmp_path, [episode(f"r{n:03}", rollout_index=n, group_id="g") for n in range(count)], [])
    parts = split_groups(run.episodes)
    assert [(part.first, len(part.episodes), part.size) for part in parts] == [
        (0, 64, 133),
        (64, 64, 133),
        (128, 5, 133),
    ]
    names = [facts.row.rollout_id for part in parts for facts in part.episodes]
    assert names == [f"r{n:03}" for n in range(count)]


def test_group_of_long_episodes_is_split_into_parts(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 1_500_000}]
    run = facts(tmp_path, [episode(f"r{n}", rollout_index=n, group_id="g", messages=long) for n in range(5)], [])
    assert [len(part.episodes) for part in split_groups(run.episodes)] == [2, 2, 1]


def test_chunks_have_about_half_a_megabyte(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 100_000}]
    run = facts(tmp_path, [episode(f"r{n}", group_id=f"g{n}", messages=long) for n in range(12)], [])
    assert [len(chunk) for chunk in split_chunks(split_groups(run.episodes))] == [5, 5, 2]


def test_markup_in_a_chunk_cannot_end_its_script() -> None:
    line = json.dumps(episode("r", messages=[{"role": "user", "content": "</script><!--"}])).encode()
    block = json.dumps(credit("r", 0) | {"state_key": "</script>"}, separators=(",", ":")).encode()
    from reward_kit.runs.run_folder import RunHeader

    text = group_text([StoredLines(line, line, block)], LineFitter(RunHeader(task_name="t", total=1)))
    assert b"<" not in text
    assert lines_of(text)[0] == ("E", json.loads(line))
    assert lines_of(text)[2] == ("C", [{"step": 0, "state_key": "</script>"}])


def test_damaged_credit_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, [episode("r")], [])
    (run / "credit.jsonl").write_text("{nonsense\n")
    with pytest.raises(StoreError, match=r"credit\.jsonl:1: not JSON"):
        ChunkReader(read_run(run))
