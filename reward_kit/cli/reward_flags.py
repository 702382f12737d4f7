"""The option of commands that score which says where the reward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def where_it_runs(default: str | None = None) -> Callable[[Any], Any]:
    """`--sandbox`.

    Args:
        default: whose level applies unless the option is given, such as "the task's"; None for nobody's.
    """
    first = f"{default}, else " if default else ""
    return click.option(
        "--sandbox",
        type=click.Choice(["in_process", "warm", "isolated"]),
        help=f"The sandbox level of the reward; default: {first}warm for a file of your own.",
    )


def keys_of_walls(sandbox: str | None) -> dict[str, Any]:
    """Return the dotted keys of a task file that the option sets; none unless it is given."""
    return {"sandbox.level": sandbox} if sandbox else {}
