"""The flags by which a command that scores says where the reward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def where_it_runs(default: str | None = None) -> Callable[[Any], Any]:
    """`--sandbox` and `--install-requirements`.

    Args:
        default: whose walls hold where none are named, as in "the task's"; None where nobody's do.
    """
    first = f"{default}, else " if default else ""
    options = (
        click.option(
            "--sandbox",
            type=click.Choice(["in_process", "warm", "isolated"]),
            help=f"Behind which walls the reward runs; default: {first}warm for a file of one's own.",
        ),
        click.option(
            "--install-requirements",
            is_flag=True,
            help="Install what the reward requires, by pip, in an environment of its own; else it is only checked.",
        ),
    )

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def keys_of_walls(sandbox: str | None, install_requirements: bool) -> dict[str, Any]:
    """The dotted keys of a task file that these flags set; a flag that is not given sets none."""
    given = {"level": sandbox, "install_requirements": install_requirements}
    return {f"sandbox.{key}": value for key, value in given.items() if value}
