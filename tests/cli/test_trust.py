"""Test folder trust: a command that would run code of a folder asks once before running it."""

from __future__ import annotations

import json
import os
import pty
import select
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import command_line
from tests.cli.project import TASK, Project

CANARY = """
import contextlib
from pathlib import Path

with contextlib.suppress(OSError):  # in the sandbox
    Path(__file__).with_name("canary").touch()
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for recorded trust, without trust in the environment."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.delenv("REWARD_KIT_TRUST")
    return folder


def received(tmp_path: Path, **task: Any) -> Project:
    """A project whose tools and reward leave a canary when they are imported or run."""
    (tmp_path / "received").mkdir()
    project = Project(tmp_path / "received", **task)
    for name in ("tools.py", "reward.py"):
        file = project.folder / name
        file.write_text(CANARY + file.read_text())
    return project


def call(project: Project, *arguments: str, **variables: str) -> command_line.Done:
    environment = {**project.environment(**variables), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    environment.pop("REWARD_KIT_TRUST")
    return command_line.call(*arguments, cwd=project.folder, env={**environment, **variables})


def has_run(project: Project) -> bool:
    return any(project.folder.rglob("canary"))


def answered(project: Project, answer: str, *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal, answer its question; return its exit code and its whole output."""
    environment = {key: value for key, value in project.environment().items() if key != "REWARD_KIT_TRUST"}
    environment["XDG_STATE_HOME"] = os.environ["XDG_STATE_HOME"]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(project.folder)
        words = command_line.command(*arguments)
        os.execve(words[0], words, environment)
    printed, deadline, is_answered = b"", time.monotonic() + 60, False
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            printed += os.read(terminal, 65_536)
        except OSError:  # the process has closed its side
            break
        if b"n: no" in printed and not is_answered:
            is_answered = True
            os.write(terminal, answer.encode() + b"\n")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return code, printed.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "task.yaml"),
        ("run", "task.yaml", "--dry-run"),
        ("check", "task.yaml"),
        ("check", "reward.py:right"),
        ("check", "tools.py:registry"),
        ("score", "rows.jsonl", "--reward", "reward.py:right"),
        ("calibrate", "labels.csv", "--reward", "reward.py:right"),
        ("serve", "reward.py:right"),
        ("train", "train.yaml"),
        ("train", "train.yaml", "--dry-run"),
    ],
)
def test_code_of_an_untrusted_folder_does_not_run(tmp_path: Path, state: Path, arguments: tuple[str, ...]) -> None:
    project = received(tmp_path)
    (project.folder / "train.yaml").write_text("task: task.yaml\nupdates: 1\n")
    (project.folder / "labels.csv").write_text("id,label,prompt,response\n1,1,q,a\n")
    done = call(project, *arguments)
    assert done.returncode == 2 and "not trusted yet" in done.stderr, done.stderr
    assert " --trust\n" in done.stderr and "REWARD_KIT_TRUST=1" in done.stderr
    assert "file: reward.py" in done.stderr or "file: tools.py" in done.stderr
    assert not has_run(project) and not (project.folder / "runs").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resource_type", "world.py:World"),
        ("policy", "world.py:World"),
        ("user", {"type": "world.py:World"}),
        ("redact", "world.py:hide"),
        ("tools_module_path", "world.py"),
        ("custom_reward_function", {"path": "world.py"}),
        ("policy", {"type": "own_agent", "agent": "world.py:agent"}),
        ("redact", "world.py.hide"),
        ("resource_type", "./world.py:World"),
        ("reward_options", {"resources": ["world.py:judge"]}),
        ("credit", {"state_hash": "world.py:key"}),
        ("credit", {"state_hash": ["state_key", "world.py:key"]}),
        ("credit", {"estimator": "world.py:estimate"}),
        ("credit", "world.py:estimate"),
    ],
)
def test_every_key_that_names_code_requires_trust(tmp_path: Path, state: Path, key: str, value: Any) -> None:
    (tmp_path / "received").mkdir()
    task = {"name": "t", "messages": [{"role": "user", "content": "hello"}], key: value}
    (tmp_path / "received" / "task.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "received" / "world.py").write_text("import helper\n")
    (tmp_path / "received" / "helper.py").write_text(CANARY)
    for verb in ("run", "check"):
        done = command_line.call(verb, "received/task.yaml", cwd=tmp_path)
        assert done.returncode == 2 and "file: world.py" in done.stderr and "file: helper.py" in done.stderr
    assert not any(tmp_path.rglob("canary"))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mcp", {"command": ["touch", "canary"]}),
        ("http", {"resource_server": {"start_command": "touch canary", "health_check_url": "http://127.0.0.1:9/"}}),
    ],
)
def test_resource_command_requires_trust(tmp_path: Path, state: Path, kind: str, config: dict[str, Any]) -> None:
    task = {"name": "t", "resource_type": kind, "base_resource_config": config, "policy": "random"}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    for verb in ("run", "check"):
        done = command_line.call(verb, "task.yaml", cwd=tmp_path)
        assert done.returncode == 2 and "command: touch canary" in done.stderr
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["a b.py:World", "a:b.py:World", "world-1.py:World", "in/world.py:World", "world:World"]
)
def test_unusual_code_paths_require_trust(tmp_path: Path, state: Path, name: str) -> None:
    file = tmp_path / (name.rpartition(":")[0].removesuffix(".py") + ".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(CANARY)
    task = {"name": "t", "messages": [{"role": "user", "content": "hello"}], "policy": name}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    done = command_line.call("run", "task.yaml", cwd=tmp_path)
    assert done.returncode == 2 and f"file: {file.relative_to(tmp_path)}" in done.stderr, done.stderr
    assert not any(tmp_path.rglob("canary"))


@pytest.mark.parametrize("name", ["os:remove", "subprocess.getoutput", "json.tool:main", "builtins:exec"])
def test_installed_function_requires_trust(tmp_path: Path, state: Path, name: str) -> None:
    task = {"name": "t", "messages": [{"role": "user", "content": "hello"}], "policy": "random", "redact": name}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    done = command_line.call("run", "task.yaml", cwd=tmp_path)
    assert done.returncode == 2 and f"redact: {name}" in done.stderr, done.stderr


def test_task_without_code_requires_no_trust(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    project.write_task(
        tools_module_path=None,
        reward_function_path="reward_kit.rewards:exact_answer",
        policy={"type": "scripted", "actions": [{"type": "text", "content": "done"}]},
    )
    done = call(project, "run", "task.yaml")
    assert done.returncode == 0, done.stderr
    assert not state.exists()


@pytest.mark.parametrize("given", ["option", "variable"])
def test_trust_can_be_given_by_option_or_environment(tmp_path: Path, state: Path, given: str) -> None:
    project = received(tmp_path)
    option, variables = (["--trust"], {}) if given == "option" else ([], {"REWARD_KIT_TRUST": "1"})
    done = call(project, "run", "task.yaml", *option, **variables)
    assert done.returncode == 0 and has_run(project), done.stderr
    again = call(project, "run", "task.yaml")
    assert again.returncode == (0 if given == "option" else 2)  # what was typed is remembered


def test_trust_holds_until_a_file_changes(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    code, printed = answered(project, "n", "run", "task.yaml")
    assert code == 2 and "tools_module_path: tools.py" in printed and "file: reward.py" in printed
    assert not has_run(project) and not state.exists()
    code, printed = answered(project, "y", "run", "task.yaml")
    assert code == 0 and has_run(project), printed
    assert call(project, "run", "task.yaml").returncode == 0
    (project.folder / "rows.jsonl").write_text('{"id": "new", "number": 1, "ground_truth": "done"}\n')
    assert call(project, "run", "task.yaml").returncode == 0  # data is data
    (project.folder / "helper.py").write_text("")
    (project.folder / "reward.py").write_text("import helper\n" + (project.folder / "reward.py").read_text())
    changed = call(project, "run", "task.yaml")
    assert changed.returncode == 2 and "file: reward.py" in changed.stderr and "file: helper.py" in changed.stderr
    assert "file: tools.py" not in changed.stderr


def test_always_trust_holds_after_edits(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    assert answered(project, "a", "run", "task.yaml")[0] == 0
    (project.folder / "reward.py").write_text((project.folder / "reward.py").read_text() + "\n# edited\n")
    assert call(project, "run", "task.yaml").returncode == 0
    (record,) = (state / "reward-kit" / "trust").iterdir()
    assert project.folder not in record.parents and json.loads(record.read_text())["folder"] == str(project.folder)


def test_folder_made_by_init_is_trusted(tmp_path: Path, state: Path) -> None:
    assert command_line.call("init", "mine", cwd=tmp_path).returncode == 0
    done = command_line.call("run", "task.yaml", cwd=tmp_path / "mine")
    assert done.returncode == 0, done.stderr


def test_copied_trust_record_is_ignored_in_another_folder(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    assert call(project, "run", "task.yaml", "--trust").returncode == 0
    other = tmp_path / "other"
    project.folder.rename(other)
    done = command_line.call("run", "task.yaml", cwd=other)
    assert done.returncode == 2


def test_check_no_run_executes_nothing(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    done = call(project, "check", "task.yaml", "--no-run")
    assert done.returncode == 0 and "reward_function_path: reward.py:right" in done.stdout, done.stderr
    assert "file: tools.py" in done.stdout and not has_run(project)
    project.write_task(messages=[{"role": "user", "content": "{{ missing }}"}])
    wrong = call(project, "check", "task.yaml", "--no-run")
    assert wrong.returncode == 2 and "missing" in wrong.stderr and not has_run(project)


def test_unreadable_trust_record_grants_nothing(tmp_path: Path, state: Path) -> None:
    project = received(tmp_path)
    assert call(project, "run", "task.yaml", "--trust").returncode == 0
    (record,) = (state / "reward-kit" / "trust").iterdir()
    for text in ("", "[]", '{"folder": 1}', '{"always": true, "folder": "/", "files": {}, "settings": []}'):
        record.write_text(text)
        assert call(project, "run", "task.yaml").returncode == 2


class TestRunFolders:
    """The `run.json` of an untrusted run folder names files and settings."""

    def test_resume_rejects_settings_of_an_untrusted_run(self, tmp_path: Path, state: Path) -> None:
        (tmp_path / "own").mkdir()
        project = Project(tmp_path / "own")
        assert call(project, "run", "task.yaml", "--trust").returncode == 0
        (run,) = (project.folder / "runs").iterdir()
        header = json.loads((run / "run.json").read_text())
        changes = {"resource_type": "mcp", "base_resource_config": {"command": ["touch", "canary"]}}
        for stored in (changes, {"sandbox.level": "in_process"}):
            (run / "run.json").write_text(json.dumps({**header, "overrides": stored, "status": "running"}))
            done = call(project, "run", "--resume", str(run), "--force")
            assert done.returncode == 2 and "not trusted yet" in done.stderr, done.stderr
        (run / "run.json").write_text(json.dumps({**header, "base_url": "http://127.0.0.1:9/v1"}))
        assert "--base-url: http://127.0.0.1:9/v1" in call(project, "run", "--resume", str(run)).stderr
        assert not (project.folder / "canary").exists()

    def test_resume_keeps_typed_settings(self, tmp_path: Path, state: Path) -> None:
        (tmp_path / "own").mkdir()
        project = Project(tmp_path / "own")
        assert call(project, "run", "task.yaml", "--trust").returncode == 0
        (project.folder / "runs").rename(tmp_path / "earlier")
        done = call(project, "run", "task.yaml", "--sandbox", "in_process", "-T", "run_limits.steps=1")
        assert (project.folder / "runs").exists(), done.stderr
        resumed = call(project, "run", "--resume", "-T", "run_limits.steps=100")
        assert resumed.returncode == 0, resumed.stderr

    @pytest.mark.parametrize("what", ["episodes", "run"])
    def test_score_runs_no_code_named_by_an_untrusted_run(self, tmp_path: Path, state: Path, what: str) -> None:
        (tmp_path / "own").mkdir()
        project = Project(tmp_path / "own", redact="redact.py:hide")
        (project.folder / "redact.py").write_text("def hide(text):\n    return text.replace('waited', 'idled')\n")
        assert call(project, "run", "task.yaml", "--trust").returncode == 0
        (run,) = (project.folder / "runs").iterdir()
        (project.folder / "redact.py").write_text(CANARY + (project.folder / "redact.py").read_text())
        (project.folder / "other.py").write_text(
            "from reward_kit import reward_function\n\n"
            "@reward_function\ndef other(messages):\n    return {'score': 0.5}\n"
        )
        target = str(run / "episodes.jsonl") if what == "episodes" else str(run)
        arguments = ("score", target, "--reward", "other.py:other", "--trust")
        refused = call(project, *arguments)
        assert refused.returncode == 2 and "-T redact=redact.py:hide" in refused.stderr, refused.stderr
        assert not has_run(project)
        assert call(project, *arguments, "-T", "redact=null").returncode == 0 and not has_run(project)
        assert call(project, *arguments, "-T", "redact=redact.py:hide").returncode == 0 and has_run(project)

    def test_credit_runs_no_state_hash_named_by_an_untrusted_run(self, tmp_path: Path, state: Path) -> None:
        (tmp_path / "own").mkdir()
        project = Project(tmp_path / "own", credit={"state_hash": "hash.py:key"})
        (project.folder / "hash.py").write_text("def key(history):\n    return len(history)\n")
        (project.folder / "evil.py").write_text(CANARY + "def key(history):\n    return 0\n")
        assert call(project, "run", "task.yaml", "--trust").returncode == 0
        (run,) = (project.folder / "runs").iterdir()
        assert call(project, "credit", str(run)).returncode == 0, "the user has agreed to the task file's own function"
        evil = {"state_hash": f"{project.folder}/evil.py:key"}
        header, summary = (json.loads((run / name).read_text()) for name in ("run.json", "summary.json"))
        header["task"]["credit"] = evil
        summary["credit"]["options"] |= evil
        (run / "run.json").write_text(json.dumps(header))
        (run / "summary.json").write_text(json.dumps(summary))
        refused = call(project, "credit", str(run), "--trust")
        assert refused.returncode == 2 and "is not executed. To use it, run: reward-kit credit" in refused.stderr
        assert "not trusted yet" in call(project, "credit", str(run), "-O", "state_hash=evil.py:key").stderr
        other = ("score", str(run), "--reward", "reward.py:right", "--trust", "-o", "again")
        assert (
            "no credit is assigned, because a function named in run.json is not executed"
            in call(project, *other).stderr
        )
        assert call(project, "check", str(run)).returncode in (0, 1)
        project.write_task(credit=None)
        call(project, "run", "--resume", str(run), "--trust", "--force")
        assert not has_run(project)
        assert call(project, "credit", str(run), "-O", "state_hash=evil.py:key", "--trust").returncode == 0
        assert has_run(project)

    def test_credit_runs_no_estimator_named_by_an_untrusted_run(self, tmp_path: Path, state: Path) -> None:
        (tmp_path / "own").mkdir()
        project = Project(tmp_path / "own", credit={"estimator": "own.py:flat"})
        flat = "def flat(batch):\n    return [0.0] * len(batch.steps)\n"
        (project.folder / "own.py").write_text(flat)
        (project.folder / "evil.py").write_text(CANARY + flat + "def key(history):\n    return 0\n")
        assert call(project, "run", "task.yaml", "--trust").returncode == 0
        (run,) = (project.folder / "runs").iterdir()
        assert call(project, "credit", str(run)).returncode == 0, "the user has agreed to the task file's own function"
        header, summary = (json.loads((run / name).read_text()) for name in ("run.json", "summary.json"))
        own = header["task"]["credit"]["estimator"]
        evil = f"{project.folder}/evil.py:flat"
        header["task"]["credit"]["estimator"] = summary["credit"]["estimator"] = evil
        (run / "run.json").write_text(json.dumps(header))
        (run / "summary.json").write_text(json.dumps(summary))
        refused = call(project, "credit", str(run), "--trust")
        assert refused.returncode == 2 and f"reward-kit credit {run} --estimator {evil}" in refused.stderr
        other = ("score", str(run), "--reward", "reward.py:right", "--trust", "-o", "again")
        assert f"use `reward-kit credit RUN --estimator {evil}`" in call(project, *other).stderr
        assert call(project, "check", str(run)).returncode in (0, 1)
        header["task"]["credit"] = {"estimator": own, "state_hash": f"{project.folder}/evil.py:key"}
        (run / "run.json").write_text(json.dumps(header))
        typed = call(project, "credit", str(run), "--estimator", own, "--trust")
        assert typed.returncode == 2 and f"-O state_hash={project.folder}/evil.py:key" in typed.stderr
        assert not has_run(project)
        assert "not trusted yet" in call(project, "credit", str(run), "--estimator", "evil.py:flat").stderr
        assert call(project, "credit", str(run), "--estimator", "evil.py:flat", "--trust").returncode == 0
        assert has_run(project)


class TestSandboxKeys:
    """A task file can tighten the sandbox, not loosen it."""

    @pytest.mark.parametrize(
        ("sandbox", "key"),
        [
            ({"level": "in_process"}, "sandbox.level"),
            ({"read_paths": ["/etc"]}, "sandbox.read_paths"),
            ({"read_paths": ["../secret"]}, "sandbox.read_paths"),
            ({"read_paths": ["link"]}, "sandbox.read_paths"),
            ({"limits": {"memory_mb": 4096}}, "sandbox.limits.memory_mb"),
            ({"limits": {"processes": 1}}, "sandbox.limits.processes"),
        ],
    )
    def test_task_file_cannot_loosen_the_sandbox(self, tmp_path: Path, sandbox: dict[str, Any], key: str) -> None:
        project = Project(tmp_path, sandbox=sandbox)
        (tmp_path / "link").symlink_to("/etc")
        done = project.call("run", "task.yaml", "--dry-run")
        assert done.returncode == 2 and f"{key}: " in done.stderr and "loosens the sandbox" in done.stderr
        assert "task.yaml:" in done.stderr and f"-T {key}=" in done.stderr

    @pytest.mark.parametrize(
        "sandbox", [{"level": "isolated"}, {"limits": {"memory_mb": 256, "disk_mb": 1}}, {"read_paths": ["rows.jsonl"]}]
    )
    def test_task_file_can_tighten_the_sandbox(self, tmp_path: Path, sandbox: dict[str, Any]) -> None:
        done = Project(tmp_path, sandbox=sandbox).call("run", "task.yaml")
        assert done.returncode == 0, done.stderr

    def test_command_line_can_loosen_the_sandbox(self, tmp_path: Path) -> None:
        project = Project(tmp_path, sandbox={"level": "in_process", "limits": {"memory_mb": 1024}})
        done = project.call("run", "task.yaml", "--sandbox", "warm", "-T", "sandbox.limits.memory_mb=1024")
        assert done.returncode == 0, done.stderr
        assert TASK["name"] in done.stdout
