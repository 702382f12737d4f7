"""The entry point: which exit code an end has, and that an error is one line. In a process of its own, as it exits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from reward_kit.cli import main as entry
from reward_kit.errors import ConfigError, RewardKitError, StoreError

PROGRAM = """
import sys, types, threading, time
import click
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
    """The exit code of a verb with this body, and all it says."""
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
def test_an_end_has_its_code_and_at_most_one_line(body: str, code: int, said: str) -> None:
    found_code, found = ended(body)
    assert found_code == code
    assert (found.splitlines() or [""])[-1] == said
    assert "Traceback" not in found


@pytest.mark.parametrize(
    "body", ["raise ZeroDivisionError('a bug')", "raise ExceptionGroup('g', [ValueError('a bug')])"]
)
def test_a_bug_of_ours_is_shown_whole(body: str) -> None:
    code, said = ended(body)
    assert code == 1 and "Traceback" in said and "a bug" in said


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ConfigError('x')", 2), ("raise KeyboardInterrupt", 130)]
)
def test_a_thread_that_never_ends_does_not_keep_the_program_and_nothing_said_is_lost(end: str, code: int) -> None:
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
    def test_the_first_of_ours_is_found_wherever_it_is(self, place) -> None:
        ours = ConfigError("first")
        assert entry._first_of_ours(place(self.group, ours)) is ours

    def test_a_group_without_one_is_raised_whole(self) -> None:
        whole = self.group(self.group(ValueError("a")), KeyError("b"))
        with pytest.raises(ExceptionGroup) as caught:
            entry._first_of_ours(whole)
        assert caught.value is whole


def test_every_verb_loads_and_has_help() -> None:
    for verb in entry.VERBS:
        command = entry.program.get_command(None, verb)
        assert command is not None and command.help
    assert entry.program.get_command(None, "nosuch") is None


def test_every_error_of_ours_has_a_code_of_the_documented_ones() -> None:
    kinds = [RewardKitError, *RewardKitError.__subclasses__()]
    assert {kind.exit_code for kind in kinds} == {2, 3}
    assert [kind for kind in kinds if kind.exit_code == 2] == [ConfigError]
