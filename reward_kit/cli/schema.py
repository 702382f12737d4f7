"""`reward-kit schema`: the JSON schemas of task files and of train files."""

from __future__ import annotations

import json
from typing import Any

import click

from reward_kit.errors import ConfigError, how_to_install

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@click.command(name="schema")
@click.argument("kind", type=click.Choice(["task", "train"]), default="task")
def command(kind: str) -> None:
    """Print the JSON schema of task files, or of train files.

    Save it beside your task and begin the file with `# yaml-language-server: $schema=task.schema.json`: your editor
    then completes and checks the keys.

    \b
    Examples:
      reward-kit schema > task.schema.json
      reward-kit schema train > train.schema.json
    """
    click.echo(task_schema() if kind == "task" else train_schema(), nl=False)


def task_schema() -> str:
    """The JSON schema of task files."""
    from reward_kit.models import TaskDefinitionModel

    return _written(TaskDefinitionModel.model_json_schema(by_alias=False))


def train_schema() -> str:
    """The JSON schema of train files.

    Raises:
        ConfigError: the extra `train` is not installed, which knows the keys of `ppo`.
    """
    try:
        from reward_kit.rl.training.config import TrainModel
    except ModuleNotFoundError as error:
        raise ConfigError(f"the schema of train files needs {error.name}; {how_to_install('train')}") from error
    return _written(TrainModel.model_json_schema(by_alias=False))


def _written(schema: dict[str, Any]) -> str:
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2) + "\n"
