"""Task files and datasets: what is accepted, and what an error about them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs.tasks import load_task, parse_override, read_rows, selected

MINIMAL = "name: t\ninitial_user_prompt: hello\n"


def write(folder: Path, text: str, name: str = "task.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_task_without_a_dataset_is_its_own_only_sample(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, MINIMAL + "num_rollouts: 3\nground_truth: 4\n"))
    assert [(sample.id, sample.ground_truth) for sample in task.samples] == [("t", 4)]
    assert task.rollouts_per_sample == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"id": "a", "q": "1"}\n\n{"id": "b", "q": "2"}\n'),
        ("rows.csv", "id,q\na,1\nb,2\n"),
        ("rows.yaml", "- {id: a, q: '1'}\n- {id: b, q: '2'}\n"),
    ],
)
def test_rows_read_the_same_from_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    rows = list(read_rows(write(tmp_path, text, name)))
    assert [row for _, row in rows] == [{"id": "a", "q": "1"}, {"id": "b", "q": "2"}]
    assert [where.rpartition(":")[2] for where, _ in rows] in (["1", "3"], ["2", "3"], ["1", "2"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.jsonl", '{"a": 1}\nnot json\n', r"r\.jsonl:2: not JSON"),
        ("r.jsonl", "[1]\n", r"r\.jsonl:1: a row is a mapping"),
        ("r.csv", "id,q\na\n", r"r\.csv:2: the row does not have the header's"),
        ("r.csv", "id,q\na,b,c\n", r"r\.csv:2: the row does not have the header's"),
        ("r.yaml", "a: 1\n", "a list of rows"),
        ("r.txt", "x", "unknown kind '.txt'"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_rows(write(tmp_path, text, name)))


def test_two_samples_of_one_id_are_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path, '{"id": "a"}\n{"id": "a"}\n', "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2.*'a' stands already at .*rows\.jsonl:1"):
        load_task(write(tmp_path, MINIMAL + "dataset_path: rows.jsonl\n"))


def test_every_problem_is_named_with_its_own_line(tmp_path: Path) -> None:
    text = "name: t\ninitial_user_prompt: x\nlimits:\n  wall_time_s: -1\n  total_token: 5\nmax_episode_steps: 0\n"
    with pytest.raises(ConfigError) as caught:
        load_task(write(tmp_path, text))
    problems = str(caught.value).splitlines()
    assert len(problems) == 3
    assert any("task.yaml:4: limits.wall_time_s" in line for line in problems)
    assert any(
        "task.yaml:5: limits.total_token: unknown key; did you mean 'total_tokens'?" in line for line in problems
    )
    assert any("task.yaml:6: max_episode_steps" in line and "got 0" in line for line in problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", r"task\.yaml:\d+: not YAML"),
        ("- a\n", "a mapping of keys"),
        ("", "a mapping of keys"),
        ("name: t\nname: u\n", r"task\.yaml:2: 'name' stands there twice"),
        ("name: t\n", "nothing to begin with"),
        ("name: t\npoc_max_turns: 3\nmax_episode_steps: 4\ninitial_user_prompt: x\n", "two names of one key"),
    ],
)
def test_a_file_that_is_no_task(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, text))


def test_the_earlier_names_of_keys_still_work(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, MINIMAL + "poc_max_turns: 7\n"))
    assert task.definition.max_episode_steps == 7


def test_paths_are_relative_to_the_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    write(folder, '{"id": "a"}\n', "rows.jsonl")
    write(folder, "CREATE TABLE t (x);", "seed.sql")
    text = "dataset_path: rows.jsonl\nresource_type: sqlite\nbase_resource_config: {seed_sql_file: seed.sql}\n"
    path = write(folder, MINIMAL + text)
    monkeypatch.chdir(tmp_path)
    task = load_task(path.relative_to(tmp_path))
    assert task.definition.base_resource_config["task_folder"] == str(folder)


def test_a_change_of_any_file_that_decides_the_results_changes_its_digest(tmp_path: Path) -> None:
    write(tmp_path, '{"id": "a"}\n', "rows.jsonl")
    write(tmp_path, "def fair(messages):\n    return None\n", "reward.py")
    write(tmp_path, "from reward_kit import ToolRegistry\nr = ToolRegistry('r')\n", "tools.py")
    keys = "dataset_path: rows.jsonl\nreward_function_path: reward.py:fair\ntools_module_path: tools.py\n"
    path = write(tmp_path, MINIMAL + keys)
    before = load_task(path).digests
    assert before == load_task(path).digests and len(before) == 4
    files = {"task file": path, "dataset": "rows.jsonl", "reward": "reward.py", "tools": "tools.py"}
    for name, file in files.items():
        target = tmp_path / file
        kept = target.read_text()
        target.write_text(kept + "\n")
        after = load_task(path).digests
        assert {key for key in before if before[key] != after[key]} == {name}
        target.write_text(kept)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("base_resource_config: {a: 1}\n", "base_resource_config has no effect"),
        ("num_rollouts_per_sample: 2\n", "num_rollouts_per_sample has no effect"),
        ("num_rollouts: 2\ndataset_path: rows.jsonl\n", "num_rollouts has no effect"),
        ("resource_server: {start_command: x, health_check_url: y}\n", "resource_server has no effect"),
    ],
)
def test_a_key_without_effect_is_an_error(tmp_path: Path, keys: str, message: str) -> None:
    write(tmp_path, '{"id": "a"}\n', "rows.jsonl")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + keys))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def r(messages, groundtruth):\n    pass\n", "asks for 'groundtruth'.*did you mean 'ground_truth'"),
        ("def r(messages, ground_truth):\n    pass\n", "asks for ground_truth, and no sample has it"),
        (
            "from reward_kit import reward_function\n"
            "@reward_function(requirements=['no-such-package>=3'])\ndef r(messages):\n    pass\n",
            "requires 'no-such-package>=3'",
        ),
    ],
)
def test_a_reward_that_would_break_on_every_episode_is_refused(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path, source, "reward.py")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + "reward_function_path: reward.py:r\n"))


def test_overrides_reach_inner_keys_and_are_validated(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    overrides = dict(map(parse_override, ["limits.wall_time_s=2.5", "stop_phrases=[a, b]"]))
    task = load_task(path, overrides)
    assert task.definition.limits.wall_time_s == 2.5
    assert task.definition.stop_phrases == ["a", "b"]
    with pytest.raises(ConfigError, match="unknown key"):
        load_task(path, {"limits.wall": 1})
    for text in ("novalue", "=3", "a=["):
        with pytest.raises(ConfigError, match="-T"):
            parse_override(text)


def test_selection(tmp_path: Path) -> None:
    write(tmp_path, "".join(json.dumps({"id": f"s{n}"}) + "\n" for n in range(5)), "rows.jsonl")
    task = load_task(write(tmp_path, MINIMAL + "dataset_path: rows.jsonl\n"))
    assert [sample.id for sample in selected(task, limit=2)] == ["s0", "s1"]
    assert [sample.id for sample in selected(task, sample_ids=["s3", "s1"])] == ["s3", "s1"]
    with pytest.raises(ConfigError, match="no sample 's9'"):
        selected(task, sample_ids=["s9"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "must define one ToolRegistry; found none"),
        (
            "from reward_kit import ToolRegistry\na, b = ToolRegistry('a'), ToolRegistry('b')\n",
            "must define one ToolRegistry; found a, b",
        ),
        ("raise RuntimeError('at import')\n", "at import"),
    ],
)
def test_a_tools_module_defines_exactly_one_registry(tmp_path: Path, source: str, message: str) -> None:
    write(tmp_path, source, "tools.py")
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, MINIMAL + "tools_module_path: tools.py\n"))


def test_a_date_in_yaml_stays_text(tmp_path: Path) -> None:
    write(tmp_path, "- {id: a, day: 2025-03-01, number: 3}\n", "rows.yaml")
    task = load_task(write(tmp_path, MINIMAL + "dataset_path: rows.yaml\nground_truth: 2025-03-01\n"))
    assert task.samples[0].row == {"id": "a", "day": "2025-03-01", "number": 3}
    assert task.samples[0].ground_truth == "2025-03-01"
