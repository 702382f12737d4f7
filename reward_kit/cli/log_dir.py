"""`--log-dir`, the option of every verb that makes runs or looks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def log_dir_option(what: str) -> Callable[[Any], Any]:
    """The option, whose default is `runs`.

    Args:
        what: the help: what is made or looked for there.
    """
    return click.option(
        "--log-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help=what
    )
