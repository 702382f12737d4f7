"""Test that untrusted text in names, files and errors is escaped on the terminal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.runs.run_folder import RunHeader
from tests.cli.project import Project
from tests.report.run_factory import episode, make_run, score

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def harmless(output: str) -> bool:
    return {char for char in output if not char.isprintable()} <= {"\n"}


def run_named(project: Project, name: str, policy: str = "made") -> Path:
    (project.folder / "runs").mkdir(exist_ok=True)
    run = make_run(project.folder / "runs", [episode("a")], [score("a", 1.0)])
    summary = {"policies": [{"policy": policy, "score": {"mean": 0.5}}]}
    (run / "summary.json").write_text(json.dumps(summary))
    return run.rename(run.with_name(name))


def test_names_in_the_list_of_runs_are_escaped(project: Project) -> None:
    run_named(project, f"run{HOSTILE}", policy=f"[red]policy{HOSTILE}")
    done = project.call("runs", "list")
    assert done.returncode == 0 and harmless(done.stdout)
    assert "run\\x1b]0;title\\x07" in done.stdout and "[red]policy\\x1b" in done.stdout


def test_name_with_invalid_bytes_is_printed(project: Project) -> None:
    run_named(project, os.fsdecode(b"run\xff"))
    done = project.call("runs", "list", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "") and "run\\udcff" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("view", f"runs/{HOSTILE}", "-o", "page.html"), ("view", f"no{HOSTILE}"), ("runs", f"--{HOSTILE}"), (HOSTILE,)],
)
def test_arguments_quoted_in_errors_are_escaped(project: Project, arguments: tuple[str, ...]) -> None:
    done = project.call(*arguments)
    assert done.returncode == 2 and harmless(done.stdout + done.stderr)
    assert "\\x1b]0;title" in done.stderr


def test_damaged_file_quoted_in_an_error_is_escaped(project: Project) -> None:
    run = run_named(project, "run")
    line = json.loads((run / "scores.jsonl").read_text())
    (run / "scores.jsonl").write_text(json.dumps({**line, "score": "high", "rollout_id": f"a{HOSTILE}"}) + "\n")
    done = project.call("view", "runs/run", "-o", "runs/run/report.html")
    assert done.returncode == 3 and harmless(done.stderr) and "\\x1b]0;title" in done.stderr


def test_names_in_a_table_are_escaped_and_not_markup(project: Project) -> None:
    project.write_task(name=f"[red]clock[/red]{HOSTILE}", reward_function_path="reward.py:hostile")
    reward = (project.folder / "reward.py").read_text()
    raises = f"@reward_function\ndef hostile(messages):\n    raise ValueError({HOSTILE!r})\n"
    (project.folder / "reward.py").write_text(f"{reward}\n{raises}")
    done = project.call("run", "task.yaml", "--limit", "1", "--display", "plain")
    assert harmless(done.stdout + done.stderr), done.stderr
    header = RunHeader.read(project.run_path())
    assert header.task_name == f"[red]clock[/red]{HOSTILE}" and "[red]clock[/red]\\x1b]0;title" in done.stdout
    assert "ValueError: \\x1b]0;title" in done.stdout


def test_unexpected_exception_is_printed_escaped() -> None:
    program = (
        "from reward_kit.cli import main as module\n"
        "def program(**options):\n"
        f"    raise RuntimeError({HOSTILE!r})\n"
        "module.program = program\n"
        "module.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RuntimeError: \\x1b]0;title" in done.stderr and harmless(done.stderr)


def test_warnings_of_loggers_without_a_handler_are_printed_escaped() -> None:
    program = (
        "import logging\n"
        "from reward_kit.cli import operator_log\n"
        "operator_log.begin(0)\n"
        f"logging.getLogger('another.package').warning('it sent %s', {HOSTILE!r} + '\\nforged')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["it sent \\x1b]0;title\\x07\\x1b[2J\\x9b31m\\u202e\\nforged"]
    assert logging.lastResort is not None


def test_export_is_escaped_on_a_terminal_and_verbatim_in_a_pipe(project: Project) -> None:
    run = run_named(project, "run")
    (run / "episodes.jsonl").write_text(json.dumps(episode("a", stop_reason=f"said{HOSTILE}")) + "\n")
    command = project.command("export", "runs/run", "--format", "csv", "--table", "episodes", "-o", "-")
    reader, terminal = os.openpty()
    options = {"cwd": project.folder, "env": project.environment(), "stderr": subprocess.PIPE}
    with subprocess.Popen(command, stdout=terminal, **options) as process:
        os.close(terminal)
        seen = b""
        with contextlib.suppress(OSError):  # the end of a terminal without writers
            while part := os.read(reader, 65_536):
                seen += part
    os.close(reader)
    assert process.returncode == 0
    assert harmless(seen.decode().replace("\r\n", "\n")) and "said\\x1b]0;title" in seen.decode()
    assert f"said{HOSTILE}" in project.call(*command[command.index("export") :]).stdout


def test_json_output_is_ascii(project: Project) -> None:
    run_named(project, f"run{HOSTILE}\x7f")
    done = project.call("runs", "list", "--json")
    assert done.stdout.isascii() and harmless(done.stdout)
    assert json.loads(done.stdout)[0]["path"] == f"runs/run{HOSTILE}\x7f"
