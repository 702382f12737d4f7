"""Tests of OpenEnv folders as tasks, without a container engine and without the `openenv` package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reward_kit.errors import ConfigError
from reward_kit.runs.tasks import load_task
from reward_kit.runs.trust import plan_file_code
from tests.command_line import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "counter"
    (made / "server").mkdir(parents=True)
    (made / "openenv.yaml").write_text("spec_version: 1\nname: counter\napp: server.app:app\nport: 8000\nextra: [1]\n")
    (made / "server" / "app.py").write_text("app = None\n")
    (made / "server" / "Dockerfile").write_text("FROM scratch\n")
    return made


def test_folder_is_loaded_like_a_task_file(folder: Path) -> None:
    task = load_task(folder)
    assert (task.definition.name, task.definition.resource_type) == ("counter", "openenv")
    assert task.path == folder / "openenv.yaml"
    assert load_task(folder / "openenv.yaml").definition == task.definition


def test_all_files_of_the_folder_need_consent(folder: Path) -> None:
    code = plan_file_code(folder)
    assert code.files.keys() == {file.resolve() for file in folder.rglob("*") if file.is_file()}
    assert "openenv_server" in code.settings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("app: server.app:app", "name: missing"),
        ("name: a\nport: 0", r"port: must be 1 or more"),
        ("name: a\napp: '--reload'", "app"),
        ("name: a\nvalidation: {resources: {cpu: many}}", r"validation\.resources\.cpu: expected a number"),
        ("name: [", r"openenv\.yaml: "),
        ("- a", "expected a mapping"),
        ("&a [*a, *a]", r"openenv\.yaml: "),
    ],
)
def test_invalid_file_is_reported_on_one_line(folder: Path, text: str, message: str) -> None:
    (folder / "openenv.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_task(folder)
    assert "\n" not in str(caught.value) and str(folder / "openenv.yaml") in str(caught.value)


def test_run_without_an_engine_and_without_openenv_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PATH": str(tmp_path / "bin"), "REWARD_KIT_TRUST": "1"}
    done = call("run", str(folder), "--policy", "random", cwd=tmp_path, env=env)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("no container engine: docker is not on the PATH") and "No module named 'openenv'" in last
