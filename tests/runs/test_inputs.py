"""The copies of a run's inputs, and how a difference is shown."""

from __future__ import annotations

from pathlib import Path

from reward_kit.runs.inputs import differences, keep_inputs
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.store import RunStore


def run_with(folder: Path, text: str, secret: str = "") -> tuple[RunStore, dict[str, Path]]:
    file = folder / "task.yaml"
    file.write_text(text)
    store = RunStore.create(folder / "run", {"task_name": "t"}, Redaction([secret]))
    inputs = {"task file": file}
    keep_inputs(store, inputs)
    return store, inputs


def test_the_lines_that_changed_are_shown(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "name: a\nseed: 1\nnoise: shared\n")
    inputs["task file"].write_text("name: a\nseed: 2\nnoise: shared\n")
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert shown.splitlines()[0] == f"the task file {inputs['task file']} changed:"
    assert shown.splitlines()[-2:] == ["    -seed: 1", "    +seed: 2"]


def test_of_many_lines_the_first_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x\n" * 100)
    inputs["task file"].write_text("y\n" * 100)
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert len(shown.splitlines()) == 22 and shown.endswith("… and 181 more lines")


def test_equal_digests_are_no_difference_and_a_missing_file_is_one(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x")
    assert differences(store.path, {"task file": "1"}, {"task file": "1"}, inputs) == []
    assert differences(store.path, {"reward": "1"}, {}, {}) == ["the reward is not there any more"]


def test_a_file_too_large_to_copy_is_known_by_its_digest(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x" * (4 * 1024 * 1024 + 1))
    assert not list((store.path / "inputs").iterdir())
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert shown == f"the task file {inputs['task file']} changed"


def test_a_copy_holds_no_secret(tmp_path: Path) -> None:
    store, _ = run_with(tmp_path, "api_key: sk-123456789", "sk-123456789")
    assert (store.path / "inputs" / "task_file.yaml").read_text() == "api_key: (hidden)"
