"""Incremental reading of a file of lines that grows, is damaged or is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import StoreError
from reward_kit.report.viewer_runs import TailReader


def line(name: str, **more: object) -> bytes:
    return json.dumps({"rollout_id": name, **more}).encode() + b"\n"


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def names(reader: TailReader) -> list[str]:
    return [placed.record["rollout_id"] for placed in reader.news().lines]


def test_each_line_is_returned_and_read_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    reader = TailReader(path)
    assert names(reader) == []
    for number in range(20):
        add(path, line(f"r{number}"))
        assert names(reader) == [f"r{number}"]
        assert names(reader) == []
    assert reader.bytes_read == path.stat().st_size


def test_offsets_locate_lines_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, line("a") + line("é\u2028b") + line("c"))
    reader = TailReader(path)
    placed = reader.news().lines
    add(path, line("d"))
    placed += reader.news().lines
    data = path.read_bytes()
    lines = [data[place.offset : place.offset + place.length] for place, _ in placed]
    assert b"".join(lines) == data
    assert [json.loads(one)["rollout_id"] for one in lines] == ["a", "é\u2028b", "c", "d"]


def test_incomplete_line_is_returned_once_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    whole = line("b")
    add(path, line("a") + whole[:9])
    reader = TailReader(path)
    assert names(reader) == ["a"]
    assert names(reader) == []
    add(path, whole[9:] + whole[:3])
    assert names(reader) == ["b"]


def test_long_file_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, b"".join(line(f"r{number}", text="x" * 700_000) for number in range(5)))
    reader = TailReader(path, most_bytes=1)
    found = []
    for _ in range(10):
        news = reader.news()
        found += [placed.record["rollout_id"] for placed in news.lines]
        if news.is_all:
            break
        assert 1 <= len(news.lines) <= 2
    assert found == [f"r{number}" for number in range(5)] and news.is_all


def test_line_longer_than_a_part_is_returned_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, line("long", text="x" * 5_000_000))
    (placed,) = TailReader(path, most_bytes=1).news().lines
    assert len(placed.record["text"]) == 5_000_000


def test_replaced_file_is_reported_and_read_from_the_start(tmp_path: Path) -> None:
    path, other = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    add(path, line("a") + line("b"))
    reader = TailReader(path)
    assert not reader.news().is_new_file
    add(other, line("c") + line("d") + line("e"))
    other.replace(path)
    news = reader.news()
    assert news.is_new_file and [placed.record["rollout_id"] for placed in news.lines] == ["c", "d", "e"]
    path.write_bytes(line("f"))
    news = reader.news()
    assert news.is_new_file and [placed.record["rollout_id"] for placed in news.lines] == ["f"]
    path.unlink()
    assert reader.news() == ([], True, True)
    assert reader.news() == ([], False, True)


def test_damaged_line_is_named_on_every_read_until_fixed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, line("a"))
    reader = TailReader(path)
    assert names(reader) == ["a"]
    add(path, line("b") + b'{"no": 1}\n')
    for _ in range(2):
        with pytest.raises(StoreError, match=r"x.jsonl:3: expected an object with a string rollout_id"):
            reader.news()
    path.write_bytes(line("a") + line("b") + line("c"))
    assert names(reader) == ["b", "c"]


def test_custom_check_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    add(path, line("a"))

    def refuse(record: object) -> None:
        raise StoreError("not this one")

    with pytest.raises(StoreError, match=r"x.jsonl:1: not this one"):
        TailReader(path, refuse).news()
