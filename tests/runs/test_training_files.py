"""Test the lookup of kept training episodes by update number."""

from __future__ import annotations

from pathlib import Path

from reward_kit.runs.files import episodes_file, episodes_files


def test_episodes_files_are_ordered_and_other_files_ignored(tmp_path: Path) -> None:
    assert episodes_files(tmp_path) == {}
    written = {update: episodes_file(tmp_path, update) for update in (1_000_000, 12, 3)}
    for file in [*written.values(), tmp_path / "episodes" / "update-old.jsonl", tmp_path / "episodes" / "mine.jsonl"]:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert list(episodes_files(tmp_path).items()) == sorted(written.items())
