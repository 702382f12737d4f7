"""`reward-kit schema`: the JSON schemas of task files and of train files."""

from __future__ import annotations

import click

from reward_kit.cli.echo import echo


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
    echo(task_schema() if kind == "task" else train_schema(), nl=False)


def task_schema() -> str:
    """The JSON schema of task files."""
    from reward_kit.cli.json_schemas import schema_of
    from reward_kit.models import TaskDefinitionModel

    return schema_of(TaskDefinitionModel)


def train_schema() -> str:
    """The JSON schema of train files.

    Raises:
        ConfigError: the extra `train` is not installed, which knows the keys of `ppo`.
    """
    from reward_kit.cli.json_schemas import schema_of
    from reward_kit.cli.train import needs_to_learn

    with needs_to_learn("the schema of train files"):
        from reward_kit.rl.training.config import TrainModel
    return schema_of(TrainModel)
