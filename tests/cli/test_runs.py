"""Test `reward-kit runs`: list and prune."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from reward_kit.cli.runs import command, stored_runs
from reward_kit.errors import ConfigError, StoreError
from reward_kit.runs.run_folder import RunFolder, RunHeader, RunTiming


def make_run(folder: Path, name: str, days: float, task: str = "t", status: str = "complete") -> Path:
    store = RunFolder.create(folder / name, RunHeader(task_name=task, total=2))
    started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    store.write_header(store.header.replace(status=status, timing=RunTiming(started_at=started)))
    store.write_summary({"policies": [{"policy": "p", "score": {"mean": 0.5}}, {"policy": "q", "score": None}]})
    return store.path


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    for name, days, task in (("a", 40, "t"), ("b", 20, "t"), ("c", 1, "t"), ("d", 50, "u")):
        make_run(tmp_path, name, days, task)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "precious.txt").write_text("keep me")
    return tmp_path


def call(shelf: Path, *arguments: str, **options: object):
    options.setdefault("catch_exceptions", False)
    return CliRunner().invoke(command, [arguments[0], "--log-dir", str(shelf), *arguments[1:]], **options)


def names(shelf: Path) -> set[str]:
    return {path.name for path in shelf.iterdir()}


def test_list_is_newest_first_with_scores(shelf: Path) -> None:
    lines = call(shelf, "list").stdout.splitlines()
    assert [Path(line.split()[0]).name for line in lines] == ["c", "b", "a", "d"]
    assert "complete" in lines[0] and "p 0.500, q unscored" in lines[0]
    found = json.loads(call(shelf, "list", "--json").stdout)
    assert [(run["task"], run["total"]) for run in found] == [("t", 2)] * 3 + [("u", 2)]


@pytest.mark.parametrize(
    "document",
    [
        '{"policies": [{"score": {"mean": 0.5}}]}',
        '{"policies": [{"policy": "p", "score": {"mean": "high"}}]}',
        *('{"policies": 3}', '{"policies": ["p"]}', "[]", "{"),
    ],
)
def test_damaged_summary_affects_only_its_own_scores(shelf: Path, document: str) -> None:
    (shelf / "b" / "summary.json").write_text(document)
    listed = json.loads(call(shelf, "list", "--json").stdout)
    assert [run["scores"] for run in listed] == [{"p": 0.5, "q": None}, {}] + [{"p": 0.5, "q": None}] * 2
    assert {run["status"] for run in listed} == {"complete"}


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (["--keep", "1"], {"c", "d"}),
        (["--older-than", "30d"], {"b", "c"}),
        (["--older-than", "30d", "--keep", "1"], {"b", "c", "d"}),
        (["--keep", "0"], set()),
        (["--older-than", "36h"], {"c"}),
    ],
)
def test_prune_removes_exactly_the_unkept_runs(shelf: Path, rule: list[str], left: set[str]) -> None:
    done = call(shelf, "prune", *rule, "--yes")
    assert done.exit_code == 0 and names(shelf) == left | {"no-run"}


def test_prune_asks_first_and_a_dry_run_removes_nothing(shelf: Path) -> None:
    before = names(shelf)
    assert call(shelf, "prune", "--keep", "0", "--dry-run").exit_code == 0
    declined = call(shelf, "prune", "--keep", "0", input="n\n")
    assert declined.exit_code == 0 and declined.stderr.endswith("Nothing was removed.\n")
    assert names(shelf) == before
    call(shelf, "prune", "--keep", "0", input="y\n")
    assert names(shelf) == {"no-run"}


def test_open_run_is_kept_and_other_runs_removed(shelf: Path) -> None:
    with RunFolder(shelf / "b"):
        with pytest.raises(StoreError, match="b is open in another process"):
            call(shelf, "prune", "--keep", "0", "--yes")
        assert names(shelf) == {"b", "no-run"}
        assert [run.status for run in stored_runs(shelf)] == ["running"]
        assert call(shelf, "list").stderr == ""
    assert [run.status for run in stored_runs(shelf)] == ["killed"], "no process has it open any more"
    assert f"Resume the newest stopped run with:  reward-kit run --resume {shelf / 'b'}" in call(shelf, "list").stderr


def test_damaged_run_hides_no_other_run(shelf: Path) -> None:
    (shelf / "b" / "run.json").write_text("{")
    lines = call(shelf, "list").stdout.splitlines()
    assert len(lines) == 4 and "unreadable" in lines[-1]
    assert call(shelf, "prune", "--older-than", "100d", "--yes").exit_code == 0
    assert names(shelf) == {"a", "c", "d", "no-run"}


@pytest.mark.parametrize(
    ("rule", "said"), [([], "specify the runs to remove"), (["--older-than", "soon"], "--older-than 'soon'")]
)
def test_prune_without_a_valid_rule_is_rejected(shelf: Path, rule: list[str], said: str) -> None:
    done = call(shelf, "prune", *rule, catch_exceptions=True)
    assert done.exit_code != 0 and said in done.output + str(done.exception)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; pass"):
        call(tmp_path / "nosuch", "list")
