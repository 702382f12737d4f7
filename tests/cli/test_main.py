"""Test the entry point: exit codes and one-line errors, in a separate process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import reward_kit
from reward_kit.cli import main as entry
from reward_kit.errors import ConfigError, RewardKitError, StoreError
from tests import command_line
from tests.cli.project import Project

PROGRAM = """
import sys, types, threading, time
import click
import reward_kit
from reward_kit.cli import main as entry
from reward_kit.errors import *

@click.command()
def command():
    {body}

entry.VERBS["verb"] = ""
sys.modules["reward_kit.cli.verb"] = types.SimpleNamespace(command=command)
sys.argv = ["reward-kit", "verb"]
entry.main()
"""


def ended(body: str) -> tuple[int, str]:
    """Return the exit code and the output of a command with this body."""
    arguments = [sys.executable, "-c", PROGRAM.format(body=body)]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(arguments, env=buffered, text=True, timeout=60, **both)
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return None", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(1)", 1, ""),
        ("raise ConfigError('a key is wrong')", 2, "error: a key is wrong"),
        ("raise StoreError('no space')", 3, "error: no space"),
        ("raise PolicyError('no action')", 3, "error: no action"),
        ("raise click.UsageError('no such option')", 2, "Error: no such option"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise click.Abort", 130, ""),
        ("raise ExceptionGroup('', [ExceptionGroup('', [StoreError('no space')])])", 3, "error: no space"),
        ("raise ExceptionGroup('', [ValueError('x'), ConfigError('a key')])", 2, "error: a key"),
    ],
)
def test_exception_sets_the_exit_code_and_prints_at_most_one_line(body: str, code: int, said: str) -> None:
    found_code, found = ended(body)
    assert found_code == code
    assert (found.splitlines() or [""])[-1] == said
    assert "Traceback" not in found


@pytest.mark.parametrize(
    "body", ["raise ZeroDivisionError('a bug')", "raise ExceptionGroup('g', [ValueError('a bug')])"]
)
def test_internal_error_prints_the_traceback(body: str) -> None:
    code, said = ended(body)
    assert code == 1 and "Traceback" in said and "a bug" in said


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ConfigError('x')", 2), ("raise KeyboardInterrupt", 130)]
)
def test_endless_thread_does_not_keep_the_program_and_output_is_flushed(end: str, code: int) -> None:
    say = "print('out', end=''); print('err', end='', file=sys.stderr)"
    found, said = ended(f"threading.Thread(target=time.sleep, args=(600,)).start(); {say}; {end}")
    assert found == code and "out" in said and "err" in said


class TestErrorsInGroups:
    def group(self, *errors: Exception) -> ExceptionGroup[Exception]:
        return ExceptionGroup("tasks", list(errors))

    @pytest.mark.parametrize(
        "place",
        [
            lambda group, ours: group(ours),
            lambda group, ours: group(group(group(ours))),
            lambda group, ours: group(ValueError(), ours),
            lambda group, ours: group(group(ValueError()), ours),
            lambda group, ours: group(group(ValueError()), group(ours)),
            lambda group, ours: group(ours, StoreError("second")),
        ],
    )
    def test_first_own_error_in_nested_groups_is_found(self, place) -> None:
        ours = ConfigError("first")
        assert entry._find_own_error(place(self.group, ours)) is ours

    def test_group_without_an_own_error_is_raised_whole(self) -> None:
        whole = self.group(self.group(ValueError("a")), KeyError("b"))
        with pytest.raises(ExceptionGroup) as caught:
            entry._find_own_error(whole)
        assert caught.value is whole


def test_every_command_loads_and_has_help() -> None:
    for verb in entry.VERBS:
        command = entry.program.get_command(None, verb)
        assert command is not None and command.help
    assert entry.program.get_command(None, "nosuch") is None


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Return each command and subcommand as words."""
    waiting = [(verb, entry.program.get_command(click.Context(entry.program), verb)) for verb in entry.VERBS]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        waiting += [(f"{words} {name}", inner) for name, inner in getattr(command, "commands", {}).items()]


@pytest.mark.parametrize(("words", "command"), list(every_command()))
class TestHelp:
    def test_help_has_an_example_of_the_command(self, words: str, command: click.Command) -> None:
        _, found, examples = (command.help or "").partition("Example")
        assert found and f"reward-kit {words}" in examples

    def test_help_names_a_working_environment_variable(
        self, words: str, command: click.Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = [one for one in command.params if isinstance(one, click.Option) and "--verbose" not in one.opts]
        scheme = re.findall(r"(--[a-z-]+) as (REWARD_KIT_\w+)", command.epilog or "")
        assert len(scheme) == bool(options)
        for flag, variable in scheme:
            (option,) = (one for one in options if flag in one.opts)
            monkeypatch.setenv(variable, "1")
            context = click.Context(command, auto_envvar_prefix=f"REWARD_KIT_{words}".upper().replace(" ", "_"))
            assert option.value_from_envvar(context)

    def test_every_option_has_a_description(self, words: str, command: click.Command) -> None:
        silent = [one.opts for one in command.params if isinstance(one, click.Option) and not one.help]
        assert silent == []


def test_help_shows_three_groups_of_commands() -> None:
    assert [len(group) for group in entry.GROUPS.values()] == [10, 3, 3]
    shown = CliRunner().invoke(entry.program, ["--help"]).output
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", *entry.GROUPS]
    assert not [name for name in entry.HIDDEN if f"  {name} " in shown]


def test_options_of_run_are_grouped() -> None:
    shown = CliRunner().invoke(entry.program, ["run", "--help"]).output
    titles = re.findall(r"^([A-Z][\w, ]+):$", shown, re.MULTILINE)
    assert titles[0] == "Models and policies" and titles[-1] == "Engine" and "Samples" in titles
    options = entry.program.get_command(None, "run").params
    assert sum(shown.count(f"{max(one.opts, key=len)} ") > 0 for one in options if isinstance(one, click.Option)) > 25


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("eval", "run"),
        ("test", "check"),
        ("rnu", "run"),
        ("rescore", "score RUN"),
        ("report", "view RUN -o report.html"),
    ],
)
def test_unknown_command_suggests_the_nearest(typed: str, meant: str) -> None:
    done = CliRunner().invoke(entry.program, [typed])
    assert done.exit_code == 2 and f"unknown command {typed!r}; did you mean {meant!r}?" in done.output


def test_quick_start_of_the_program_help_works(tmp_path: Path) -> None:
    lines = entry.program.help.partition("Start with:")[2].split("\n")
    words = [line.split() for line in lines if line.strip()]
    assert [line[0] for line in words] == ["reward-kit", "cd", "reward-kit"]
    place = tmp_path
    for program, *arguments in words:
        if program == "cd":
            place = place / arguments[0]
            continue
        done = command_line.call(*arguments, cwd=place)
        assert done.returncode == 0, done.stderr


def test_every_error_class_has_a_documented_exit_code() -> None:
    kinds = [RewardKitError, *RewardKitError.__subclasses__()]
    assert {kind.exit_code for kind in kinds} == {2, 3}
    assert [kind for kind in kinds if kind.exit_code == 2] == [ConfigError]


class TestForkedCalls:
    """Most tests call the program in a fork of a started process, which must behave like a new process."""

    @pytest.fixture(scope="class")
    @staticmethod
    def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
        project = Project(tmp_path_factory.mktemp("project"))
        rows = [{"id": "a", "ground_truth": "x", "messages": [{"role": "assistant", "content": "x"}]}]
        (project.folder / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return project

    @pytest.mark.parametrize(
        ("line", "code"),
        [
            ("run task.yaml --json --log-dir {place}", 0),
            ("run --nosuch", 2),
            ("run nosuch.yaml", 2),
            ("score said.jsonl --reward reward.py:right --json --log-dir {place}", 0),
            ("check reward.py:broken --sandbox in_process", 1),
            ("runs list --log-dir {place}", 0),
            ("credit nosuch", 2),
            ("calibrate", 2),
            ("schema", 0),
            ("doctor --json", 0),
            ("nosuch", 2),
        ],
    )
    def test_forked_call_has_the_output_of_a_new_process(
        self, project: Project, tmp_path: Path, line: str, code: int
    ) -> None:
        arguments, environment = line.format(place=tmp_path).split(), project.environment()
        forked = command_line.call(*arguments, cwd=project.folder, env=environment)
        anew = command_line.call_new_process(*arguments, cwd=project.folder, env=environment)
        assert (forked.returncode, anew.returncode) == (code, code), anew.stderr
        assert without_varying_parts(forked.stdout) == without_varying_parts(anew.stdout)
        assert without_varying_parts(forked.stderr) == without_varying_parts(anew.stderr)

    def test_options_are_read_from_the_environment(self, project: Project) -> None:
        done = command_line.call("run", "task.yaml", cwd=project.folder, env={"REWARD_KIT_RUN_SEED": "x"})
        assert done.returncode == 2 and "'--seed': 'x'" in done.stderr

    def test_call_is_killed_after_its_timeout(self, tmp_path: Path) -> None:
        project = Project(tmp_path)
        (tmp_path / "reward.py").write_text("import time\ntime.sleep(600)\n")
        with pytest.raises(subprocess.TimeoutExpired):
            command_line.call("run", "task.yaml", "--sandbox", "in_process", cwd=project.folder, timeout_s=2)
        assert command_line.call("schema", cwd=project.folder).returncode == 0


def without_varying_parts(text: str) -> str:
    """Return the output without run ids, times and speeds."""
    text = re.sub(r"[\w-]+-\d{8}T\d{6}Z-[0-9a-f]{6}", "RUN", text)
    return re.sub(r"\b\d+\.\d+(/s|s| s)?\b|\b[0-9.]+e-\d+", "N", text)


def test_train_without_its_extra_explains_how_to_install() -> None:
    missing = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['train', 'train.yaml']"
    code = f"{missing}; from reward_kit.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: train needs torch; install the extra 'train'")
    helped = subprocess.run(
        [sys.executable, "-c", code.replace("train.yaml", "--help")], capture_output=True, text=True
    )
    assert helped.returncode == 0 and "reward-kit train train.yaml" in helped.stdout


def test_source_tree_without_metadata_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert reward_kit.__version__[0].isdigit() and "not.installed" not in reward_kit.__version__
    monkeypatch.setattr(importlib.metadata, "version", missing)
    shown = CliRunner().invoke(entry.program, ["--version"])
    assert (shown.exit_code, shown.output) == (0, "reward-kit, version 0+not.installed\n")
