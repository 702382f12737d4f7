"""The flags by which a command that scores says where the reward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def where_it_runs(default: str | None = None) -> Callable[[Any], Any]:
    """`--sandbox`.

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
    )

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def keys_of_walls(sandbox: str | None) -> dict[str, Any]:
    """Return the dotted key of a task file that `--sandbox` sets; none unless it is given."""
    return {"sandbox.level": sandbox} if sandbox else {}
