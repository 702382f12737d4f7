"""The flags by which a command that scores says where the reward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def where_it_runs(default: str | None = None) -> Callable[[Any], Any]:
    """`--sandbox`, `--sandbox-back-end` and `--install-requirements`.

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
            "--sandbox-back-end",
            metavar="docker:IMAGE|ssh:HOST",
            help=f"Run the reward in a container or on another machine; default: {first}here.",
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


def keys_of_walls(sandbox: str | None, sandbox_back_end: str | None, install_requirements: bool) -> dict[str, Any]:
    """The dotted keys of a task file that these flags set; a flag that is not given sets none."""
    given = {"level": sandbox, "back_end": sandbox_back_end, "install_requirements": install_requirements}
    return {f"sandbox.{key}": value for key, value in given.items() if value}
