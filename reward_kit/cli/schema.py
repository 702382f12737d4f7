"""`reward-kit schema`: the JSON schema of task files."""

from __future__ import annotations

import json

import click

from reward_kit.models import TaskDefinitionModel


@click.command(name="schema")
def command() -> None:
    """Print the JSON schema of task files.

    Save it beside your task and begin the file with `# yaml-language-server: $schema=task.schema.json`: your editor
    then completes and checks the keys.

    \b
    Example: reward-kit schema > task.schema.json
    """
    click.echo(task_schema(), nl=False)


def task_schema() -> str:
    """The JSON schema of task files."""
    schema = TaskDefinitionModel.model_json_schema(by_alias=False)
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"
