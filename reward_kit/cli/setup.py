"""`reward-kit init`, `schema` and `completion`: write files for a new project, an editor, or a shell."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from reward_kit.cli.echo import echo
from reward_kit.cli.trust import trust_new_folder
from reward_kit.errors import ConfigError, requires_extra

if TYPE_CHECKING:
    from pydantic import BaseModel

_PROGRAM = "reward-kit"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECTION = re.compile(r"^(?:Attributes|Raises):\n", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_FILES = {
    "task.yaml": "task.yaml",
    "orders.jsonl": "orders.jsonl",
    "tools.py.txt": "tools.py",
    "reward.py.txt": "reward.py",
    "agent.py.txt": "agent.py",
    "test_agent.py.txt": "test_agent.py",
    "workflow.yml": ".github/workflows/evaluate.yml",
    "gitignore": ".gitignore",
    "README.md": "README.md",
}
"""The files in `starter/`, with their names in the project; Python files end in .txt, since they are only copied."""
_SCHEMA = "task.schema.json"


@click.command(name="init")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Create a small working project in DIR: a task, samples, a tool, a reward, an agent, tests and a CI workflow.

    Existing files are never overwritten.

    \b
    Example: reward-kit init my_evaluation
    """
    from reward_kit.runs.files import wrap_os_errors, write_atomically

    starter = files("reward_kit.cli") / "starter"
    texts = {to: (starter / name).read_text(encoding="utf-8") for name, to in _FILES.items()}
    texts[_SCHEMA] = task_schema()
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file; pass a directory")
    if existing := [name for name in texts if (directory / name).exists()]:
        raise ConfigError(f"{directory} already contains {', '.join(existing)}; pass an empty or a new directory")
    for name, text in texts.items():
        path = directory / name
        with wrap_os_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode("utf-8"), is_private=False)
    trust_new_folder(directory)
    is_here = directory.resolve() == Path.cwd()
    echo(f"Wrote {len(texts)} files to {'this directory' if is_here else directory}. Next:")
    there = [] if is_here else [f"cd {shlex.quote(str(directory))}"]
    for line in (*there, "reward-kit run task.yaml", "pytest", "reward-kit view --open"):
        echo(f"  {line}")


@click.command(name="schema")
@click.argument("kind", type=click.Choice(["task", "train", "sweep"]), default="task")
def schema(kind: str) -> None:
    """Print the JSON schema of task files, train files or sweep files.

    To let your editor complete and check the keys, save the schema next to your task file, and begin the task file with
    `# yaml-language-server: $schema=task.schema.json`.

    \b
    Examples:
      reward-kit schema > task.schema.json
      reward-kit schema train > train.schema.json
    """
    echo({"task": task_schema, "train": train_schema, "sweep": sweep_schema}[kind](), nl=False)


def task_schema() -> str:
    """Return the JSON schema of task files."""
    from reward_kit.models import TaskDefinitionModel

    return schema_of(TaskDefinitionModel)


def train_schema() -> str:
    """Return the JSON schema of train files."""

    with requires_extra("train", "the schema of train files"):
        from reward_kit.rl.training.config import TrainModel
    return schema_of(TrainModel)


def sweep_schema() -> str:
    """Return the JSON schema of sweep files."""

    with requires_extra("train", "the schema of sweep files"):
        from reward_kit.rl.training.sweep_file import SweepModel
    return schema_of(SweepModel)


def attributes_of(documented: type[Any]) -> dict[str, str]:
    """Return the description of each attribute in the `Attributes:` section of a class docstring."""
    texts = _SECTION.split(inspect.getdoc(documented) or "")
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(texts[1] if len(texts) > 1 else "")}


def schema_of(model: type[BaseModel]) -> str:
    """Return the JSON schema of a model. The schema contains the descriptions of all keys, but no titles."""
    from pydantic.json_schema import GenerateJsonSchema

    class Described(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False  # a title would repeat the name

        def dataclass_schema(self, schema: Any) -> Any:
            found = super().dataclass_schema(schema)
            for name, text in attributes_of(schema["cls"]).items():
                found["properties"][name].setdefault("description", text)
            return {**found, "additionalProperties": False}

    document: Mapping[str, Any] = model.model_json_schema(by_alias=False, schema_generator=Described)
    for one in (document, *document.get("$defs", {}).values()):
        if text := one.get("description"):
            one["description"] = " ".join(_SECTION.split(text)[0].split())
    return json.dumps({"$schema": _DIALECT, **document}, indent=2, ensure_ascii=False) + "\n"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that enables TAB completion of commands, options and their values in SHELL.

    \b
    To install it permanently:
      echo 'eval "$(reward-kit completion bash)"' >> ~/.bashrc
      echo 'eval "$(reward-kit completion zsh)"' >> ~/.zshrc
      reward-kit completion fish > ~/.config/fish/completions/reward-kit.fish

    \b
    Example, for the current shell only:
      eval "$(reward-kit completion bash)"
    """
    from reward_kit.cli.main import COMPLETE_VARIABLE

    kind = get_completion_class(shell)
    assert kind is not None  # the three are click's own
    program = click.get_current_context().find_root().command
    script = kind(program, {}, _PROGRAM, COMPLETE_VARIABLE)
    echo(script.source_template % script.source_vars(), nl=False)  # without checking the version of bash
