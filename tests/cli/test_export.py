"""Test `reward-kit export`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reward_kit.cli.export import command
from reward_kit.errors import ConfigError
from tests.cli.project import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("ran"))
    assert made.call("run", "task.yaml").returncode == 0
    return made


def test_tables_are_written_into_the_run_by_default(project: Project) -> None:
    for form in ("parquet", "csv"):
        done = project.call("export", str(project.run_path()), "--format", form)
        assert done.returncode == 0, done.stderr
        assert "steps: 12 rows of 6 episodes" in done.stderr
    names = {f"{table}.{form}" for table in ("episodes", "scores", "steps") for form in ("parquet", "csv")}
    assert {file.name for file in (project.run_path() / "export").iterdir()} == names


def test_table_can_be_written_to_standard_output(project: Project) -> None:
    asked = ["--format", "csv", "--table", "episodes", "--only-passed", "-o", "-"]
    done = project.call("export", str(project.run_path()), *asked)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
    assert "left out: 4 below the pass threshold 1" in done.stderr


def test_chats_include_the_tools_of_the_task(project: Project) -> None:
    done = project.call("export", str(project.run_path()), "--format", "openai-jsonl", "-o", "chats.jsonl")
    assert done.returncode == 0 and "6 chats: chats.jsonl" in done.stderr, done.stderr
    chats = [json.loads(line) for line in (project.folder / "chats.jsonl").read_text().splitlines()]
    assert [message["role"] for message in chats[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert {tool["function"]["name"] for chat in chats for tool in chat["tools"]} == {"wait"}


def test_tools_can_be_given_if_the_task_is_missing(project: Project, tmp_path: Path) -> None:
    moved, chats = tmp_path / "run", str(tmp_path / "chats.jsonl")
    project.run_path().rename(moved)
    (project.folder / "task.yaml").rename(project.folder / "gone.yaml")
    try:
        done = project.call("export", str(moved), "--format", "openai-jsonl", "-o", chats)
        assert done.returncode == 2 and "pass --tools FILE.json" in done.stderr
        for names, code, told in [
            (["wait"], 0, "6 chats"),
            (["other"], 2, "6 calls 'wait', which is not one of the tools"),
        ]:
            tools = [{"type": "function", "function": {"name": name}} for name in names]
            (tmp_path / "tools.json").write_text(json.dumps(tools))
            asked = ["--format", "openai-jsonl", "--tools", str(tmp_path / "tools.json"), "-o", chats]
            done = project.call("export", str(moved), *asked)
            assert done.returncode == code and told in done.stderr, done.stderr
        assert len(Path(chats).read_text().splitlines()) == 6, "what is refused leaves the earlier file"
    finally:
        (project.folder / "gone.yaml").rename(project.folder / "task.yaml")
        moved.rename(project.folder / "runs/run")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--format", "csv", "--policy", "scriptd"],
            "--policy scriptd: no episode has this policy; did you mean 'scripted'?",
        ),
        (["--format", "csv", "--min-score", "2"], "no episodes to export: 6 below 2"),
        (["--format", "csv", "-o", "-"], "-o - writes only one table; select it with --table"),
        (["--format", "csv", "-o", "all.csv"], "3 tables require a directory"),
        (["--format", "csv", "-o", "no/such/place"], "directory no/such does not exist; create it first"),
        (["--format", "parquet", "--table", "steps", "-o", "-"], "Parquet is a binary format; pass a file"),
        (["--format", "parquet", "--raw"], "--raw has no effect with --format parquet, only with csv"),
        (["--format", "openai-jsonl", "--table", "steps"], "--table has no effect with --format openai-jsonl"),
        (["--format", "openai-jsonl", "--tools", "task.yaml"], "--tools task.yaml"),
    ],
)
def test_export_rejects_invalid_options(
    project: Project, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(project.folder)
    with pytest.raises(ConfigError) as caught:
        command.main([str(project.run_path()), *arguments], standalone_mode=False)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "asked", [["--format", "csv", "--table", "steps"], ["--format", "openai-jsonl", "--tools", "tools.json"]]
)
def test_edited_line_is_named(project: Project, tmp_path: Path, asked: list[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(project.run_path(), run)
    (project.folder / "tools.json").write_text('[{"type": "function", "function": {"name": "wait"}}]')
    first, *others = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    first |= {"messages": [1], "steps": [2]}
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*others, first]))
    done = project.call("export", str(run), *asked, "-o", str(tmp_path / "out"))
    assert done.returncode == 3, done.stderr
    assert f"episodes.jsonl: {first['rollout_id']} cannot be read as an episode" in done.stderr
    assert not (tmp_path / "out").exists()


def test_score_of_wrong_type_is_named(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(project.run_path(), run)
    text = (run / "scores.jsonl").read_text()
    (run / "scores.jsonl").write_text(text.replace('"score":1.0', '"score":"1.0"', 1))
    done = project.call("export", str(run), "--format", "csv", "--only-passed", "-o", str(tmp_path / "out"))
    assert done.returncode == 3 and "must be a finite number or null, got '1.0'" in done.stderr, done.stderr


def test_export_rejects_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        command.main([str(tmp_path), "--format", "csv"], standalone_mode=False)
