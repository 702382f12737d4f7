"""`reward-kit init`: a small project that works, to be changed into one's own."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

import click

from reward_kit.cli.echo import echo
from reward_kit.cli.schema import task_schema
from reward_kit.cli.trust import trust_new_folder
from reward_kit.errors import ConfigError
from reward_kit.runs.files import told_of, write_atomically

_FILES = {
    "task.yaml": "task.yaml",
    "orders.jsonl": "orders.jsonl",
    "tools.py.txt": "tools.py",
    "reward.py.txt": "reward.py",
    "agent.py.txt": "agent.py",
    "test_agent.py.txt": "test_agent.py",
    "conftest.py.txt": "conftest.py",
    "workflow.yml": ".github/workflows/evaluate.yml",
    "gitignore": ".gitignore",
    "README.md": "README.md",
}
"""What each file of `starter/` is called in the project. Its Python is no code of this package, and is not named so."""
_SCHEMA = "task.schema.json"


@click.command(name="init")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(directory: Path) -> None:
    """Write a small working project into DIR: a task, its samples, a tool, a reward, an agent, tests, a CI workflow.

    Nothing that is there is overwritten.

    \b
    Example: reward-kit init my_evaluation
    """
    texts = {to: _text(name) for name, to in _FILES.items()} | {_SCHEMA: task_schema()}
    _refuse_what_is_there(directory, list(texts))
    for name, text in texts.items():
        path = directory / name
        with told_of("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8"), is_private=False)
    trust_new_folder(directory)
    echo(f"Wrote {len(texts)} files to {directory}. Next:")
    is_here = directory.resolve() == Path.cwd()
    there = [] if is_here else [f"cd {shlex.quote(str(directory))}"]
    for line in (*there, "reward-kit run task.yaml", "pytest", "reward-kit view --open"):
        echo(f"  {line}")


def _text(name: str) -> str:
    return (files("reward_kit.cli") / "starter" / name).read_text(encoding="utf-8")


def _refuse_what_is_there(directory: Path, names: list[str]) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; name a folder, which may be a new one")
    if there := [name for name in names if (directory / name).exists()]:
        raise ConfigError(f"{directory} has {', '.join(there)} already; name an empty or a new folder")
