"""Test `reward-kit completion`: its candidates, the scripts of the shells, and its imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reward_kit.cli.main import HIDDEN, VERBS
from tests import command_line

REWARD = """
from reward_kit import reward_function

@reward_function
def exact(messages):
    return {"score": 1.0}
"""
BASH = """
eval "$(cat completion.bash)"
compopt() {{ :; }}
COMP_WORDS=({line}) COMP_CWORD={place}
_reward_kit_completion reward-kit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two runs, another folder, a reward and bash's completion script."""
    folder = tmp_path_factory.mktemp("project")
    for age, name in enumerate(("new", "old")):
        (folder / "runs" / name).mkdir(parents=True)
        header = folder / "runs" / name / "run.json"
        header.write_text("{}")
        os.utime(header, (1_000_000 - age, 1_000_000 - age))
    (folder / "runs" / "nothing").mkdir()
    (folder / "mine.py").write_text(REWARD)
    (folder / "broken.py").write_text("def (")
    (folder / "completion.bash").write_text(command_line.call("completion", "bash", cwd=folder).stdout)
    return folder


def offered(folder: Path, line: str, **more: str) -> list[str]:
    """Return bash's completions at the end of a line, prefixed by their kind: "plain,run"."""
    environment = {
        "_REWARD_KIT_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        **more,
    }
    done = command_line.call(cwd=folder, env={**os.environ, **environment})
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()  # no value here has a space, and nothing is an empty line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("reward-kit sc", ["plain,score"]),
        ("reward-kit nosuch", []),
        ("reward-kit run --sandb", ["plain,--sandbox"]),
        ("reward-kit run --sandbox ", ["plain,in_process", "plain,warm", "plain,isolated"]),
        ("reward-kit train --dry", ["plain,--dry-run"]),
        ("reward-kit runs pr", ["plain,prune"]),
        ("reward-kit credit ", ["dir,", "plain,runs/new", "plain,runs/old"]),
        ("reward-kit credit runs/o", ["dir,runs/o", "plain,runs/old"]),
        ("reward-kit compare runs/old runs/n", ["dir,runs/n", "plain,runs/new"]),
        ("reward-kit run --resume ru", ["dir,ru", "plain,runs/new", "plain,runs/old"]),
        ("reward-kit run t.yaml --policy ex", ["file,ex", "plain,expert"]),
        ("reward-kit credit runs/new --estimator grpo_", ["plain,grpo_passk"]),
        (
            "reward-kit score x --reward reward_kit.rewards:number",
            ["file,reward_kit.rewards:number", "plain,reward_kit.rewards:number_answer"],
        ),
        ("reward-kit score x --reward mine.py:", ["plain,mine.py:exact"]),
        ("reward-kit score x --reward broken.py:", []),
        ("reward-kit check sok", ["file,sok", "plain,sokoban"]),
        ("reward-kit completion z", ["plain,zsh"]),
    ],
)
def test_candidates_match_the_line(folder: Path, line: str, expected: list[str]) -> None:
    assert offered(folder, line) == expected


def test_every_command_is_offered_on_an_empty_line(folder: Path) -> None:
    assert offered(folder, "reward-kit ") == [f"plain,{verb}" for verb in VERBS if verb not in HIDDEN]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_show_the_summary_of_each_command(folder: Path, shell: str) -> None:
    words = {"COMP_WORDS": "reward-kit exp", "COMP_CWORD": "1" if shell == "zsh" else "exp"}
    environment = {**os.environ, "_REWARD_KIT_COMPLETE": f"{shell}_complete", **words}
    output = command_line.call(cwd=folder, env=environment).stdout
    assert "export" in output and VERBS["export"].split(":")[0] in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_calls_the_completion_of_the_program(folder: Path, shell: str) -> None:
    done = command_line.call("completion", shell, cwd=folder)
    assert done.returncode == 0
    assert f"_REWARD_KIT_COMPLETE={shell}_complete" in done.stdout and "reward-kit" in done.stdout
    if path := shutil.which(shell):
        assert subprocess.run([path, "-n"], input=done.stdout, text=True, check=False).returncode == 0


def test_unknown_shell_is_rejected(folder: Path) -> None:
    done = command_line.call("completion", "csh", cwd=folder)
    assert done.returncode == 2 and "'csh' is not one of" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_the_script(folder: Path) -> None:
    assert completed_by_bash(folder, "reward-kit credit runs/n") == "runs/new\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_names_with_shell_syntax_are_not_offered(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "completion.bash", tmp_path)
    for name in ("$(touch acted)", "a b;touch acted", "two\nlines", "plain"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    said = completed_by_bash(tmp_path, "reward-kit credit runs/").splitlines()
    assert said == ["runs/plain"] and not (tmp_path / "acted").exists()


def completed_by_bash(folder: Path, line: str) -> str:
    script = BASH.format(line=line, place=line.count(" "))
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "reward-kit").write_text(f'#!/bin/sh\nexec {sys.executable} -m reward_kit.cli.main "$@"\n')
    (folder / "bin" / "reward-kit").chmod(0o755)
    path = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    words = ["bash", "--norc", "-c", script]
    done = subprocess.run(words, cwd=folder, env=path, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("line", "unloaded"),
    [
        ("reward-kit ", {"numpy", "pydantic", "torch", "rich", "yaml"}),
        ("reward-kit train --", {"numpy", "pydantic", "torch", "transformers"}),
        ("reward-kit run --", {"torch", "transformers", "aiohttp", "jinja2"}),
    ],
)
def test_completion_imports_no_heavy_modules(line: str, unloaded: set[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr))\n"
        "from reward_kit.cli.main import main; sys.argv = ['reward-kit']; main()"
    )
    environment = {
        **os.environ,
        "_REWARD_KIT_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("plain,")
    assert not set(done.stderr.split()) & unloaded
