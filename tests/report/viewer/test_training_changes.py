"""Change detection for the page of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from reward_kit.report.viewer_server import training_mark
from reward_kit.runs.files import write_atomically
from tests.report.run_factory import make_run


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "summary.json", "episodes/update-000001.jsonl"])
def test_added_and_changed_files_change_the_training_mark(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, [], [], training={"train_path": "x"})
    (run / "episodes").mkdir()
    marks = [training_mark(run)]
    assert training_mark(run) == marks[0]
    for text in (b"1", b"12"):
        write_atomically(run / name, text)
        marks.append(training_mark(run))
    assert len(set(marks)) == 3
