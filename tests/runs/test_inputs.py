"""Test the copies of a run's inputs, and the display of their differences."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs import inputs as module
from reward_kit.runs.inputs import copy_inputs, differences, hash_path, scorer_hash
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import RunFolder, RunHeader
from reward_kit.runs.tasks import load_task


def digests_of(inputs: dict[str, Path]) -> dict[str, str]:
    return {name: hash_path(path) for name, path in inputs.items()}


def run_with(folder: Path, text: str, secret: str = "") -> tuple[RunFolder, dict[str, Path]]:
    file = folder / "task.yaml"
    file.write_text(text)
    store = RunFolder.create(folder / "run", RunHeader(task_name="t"), Redaction([secret]))
    inputs = {"task file": file}
    copy_inputs(store, inputs, digests_of(inputs))
    return store, inputs


def test_the_lines_that_changed_are_shown(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "name: a\nseed: 1\nnoise: shared\n")
    inputs["task file"].write_text("name: a\nseed: 2\nnoise: shared\n")
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert shown.splitlines()[0] == f"the task file {inputs['task file']} changed:"
    assert shown.splitlines()[-2:] == ["    -seed: 1", "    +seed: 2"]


def test_long_difference_shows_first_lines_and_counts_the_rest(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x\n" * 100)
    inputs["task file"].write_text("y\n" * 100)
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert len(shown.splitlines()) == 22 and shown.endswith("… and 181 more lines")


def test_equal_digests_are_no_difference_and_a_missing_file_is_one(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x")
    assert differences(store.path, {"task file": "1"}, {"task file": "1"}, inputs) == []
    assert differences(store.path, {"reward": "1"}, {}, {}) == ["the reward is missing"]


def test_added_input_is_reported_as_new(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x")
    assert differences(store.path, {}, {"task file": "1"}, inputs) == [f"the task file {inputs['task file']} is new"]


def test_file_changed_during_startup_is_not_recorded_as_read(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x")
    digests = digests_of(inputs)
    inputs["task file"].write_text("y")
    with pytest.raises(ConfigError, match="changed while the run was starting; start the run again"):
        copy_inputs(store, inputs, digests)


def test_copies_of_similar_names_do_not_collide(tmp_path: Path) -> None:
    store = RunFolder.create(tmp_path / "run", RunHeader(task_name="t"))
    inputs = {}
    for number, name in enumerate(["a/b.py", "a_b.py", "a b.py", f"{'x' * 200}/y.py", f"{'z' * 200}/y.py"]):
        inputs[f"file {name}"] = tmp_path / name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(number))
    copy_inputs(store, inputs, digests_of(inputs))
    copies = [file.read_text() for file in (store.path / "inputs").iterdir()]
    assert sorted(copies) == ["0", "1", "2", "3", "4"]


def test_file_too_large_to_copy_is_compared_by_digest(tmp_path: Path) -> None:
    store, inputs = run_with(tmp_path, "x" * (4 * 1024 * 1024 + 1))
    assert not list((store.path / "inputs").iterdir())
    (shown,) = differences(store.path, {"task file": "1"}, {"task file": "2"}, inputs)
    assert shown == f"the task file {inputs['task file']} changed"


def test_copied_input_contains_no_secret(tmp_path: Path) -> None:
    store, _ = run_with(tmp_path, "api_key: sk-123456789", "sk-123456789")
    assert (store.path / "inputs" / "task_file.yaml").read_text() == "api_key: (hidden)"


TASK = """name: t
initial_user_prompt: hello
dataset_path: rows.jsonl
reward_function_path: reward.py:fair
tools_module_path: tools.py
policy: {type: acts.py:Acts, script: lines.txt, agent: "agents/mine.py:run"}
resource_type: sqlite
base_resource_config: {seed_sql_file: seed.sql}
sandbox: {read_paths: [words, table.csv]}
"""
FILES = {
    "rows.jsonl": '{"id": "a"}\n',
    "reward.py": "from helper import one\ndef fair(messages):\n    return one()\n",
    "helper.py": "def one():\n    import deeper\n    return 1.0\n",
    "deeper.py": "",
    "tools.py": "from reward_kit import ToolRegistry\nimport shapes\nr = ToolRegistry('r')\n",
    "shapes.py": "",
    "acts.py": "class Acts: pass\n",
    "lines.txt": "hello",
    "agents/mine.py": "def run(): pass\n",
    "seed.sql": "CREATE TABLE t (x);\n",
    "words/a.txt": "a",
    "words/inner/b.txt": "b",
    "table.csv": "x,y\n",
    "stranger.py": "imported by nobody",
}
NAMED = {"rows.jsonl": "dataset", "reward.py": "reward", "tools.py": "tools", "acts.py": "policy"}


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    for name, text in {**FILES, "task.yaml": TASK}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "task.yaml"


class TestDigests:
    def test_each_changed_input_changes_only_its_digest(self, task_file: Path) -> None:
        task = load_task(task_file)
        before = task.digests
        changed = {"task.yaml": "task file", "stranger.py": None, **{name: f"file {name}" for name in FILES}, **NAMED}
        changed |= {"stranger.py": None, "words/a.txt": "folder words", "words/inner/b.txt": "folder words"}
        assert before.keys() == set(changed.values()) - {None}
        for file, name in changed.items():
            target = task_file.parent / file
            kept = target.read_text()
            target.write_text(kept + "\n")
            after = digests_of(task.inputs)
            assert {key for key in before if before[key] != after[key]} == {name} - {None}, file
            target.write_text(kept)
        assert load_task(task_file).digests == before

    def test_adjacent_file_without_a_suffix_is_not_used_as_the_reward(self, task_file: Path) -> None:
        (task_file.parent / "reward").write_text("no code")
        assert load_task(task_file).inputs["reward"] == task_file.parent / "reward.py"

    @pytest.mark.parametrize("level", ["warm", "in_process"])
    def test_changed_helper_changes_the_scorer_hash(self, task_file: Path, level: str) -> None:
        def hashed() -> str:
            reward = load_task(task_file, {"sandbox.level": level}).reward
            assert reward is not None
            return scorer_hash(reward)

        before = hashed()
        assert hashed() == before
        (task_file.parent / "stranger.py").write_text("changed")
        assert hashed() == before
        (task_file.parent / "deeper.py").write_text("changed = 1")
        assert hashed() != before


class TestFolders:
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "data"
        for name in ("b", "a/c"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        return folder

    def test_names_and_contents_count_and_times_do_not(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        digest = hash_path(folder)
        os.utime(folder / "b", (1, 1))
        assert hash_path(folder) == digest
        (folder / "b").rename(folder / "d")
        assert hash_path(folder) != digest
        (folder / "d").rename(folder / "b")
        (folder / "b").write_text("B")
        assert hash_path(folder) != digest
        (folder / "b").write_text("b")
        (folder / "nowhere").symlink_to("no such file")
        assert hash_path(folder) == digest

    def test_large_folder_is_compared_by_sizes_and_times(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.folder(tmp_path)
        monkeypatch.setattr(module, "_LARGEST_FOLDER", 3)
        digest = hash_path(folder)
        assert hash_path(folder) == digest
        os.utime(folder / "b", (1, 1))
        assert hash_path(folder) != digest

    def test_of_very_many_files_the_first_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.folder(tmp_path)
        monkeypatch.setattr(module, "_MOST_FILES", 1)
        digest = hash_path(folder)
        (folder / "a" / "c").write_text("C")
        assert hash_path(folder) == digest, "what lies in a folder comes before what lies in the folders in it"
        (folder / "b").write_text("B")
        assert hash_path(folder) != digest
