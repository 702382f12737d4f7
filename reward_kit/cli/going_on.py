"""The options of the verbs that make runs: where these lie, and which of them to go on with."""

from __future__ import annotations

from typing import Any

import click

from reward_kit.cli import completing
from reward_kit.cli.log_dir import log_dir_option

LATEST = "latest"
"""What `--resume` is where no run is named behind it."""


def goes_on(command: Any) -> Any:
    """Add `--log-dir` and `--resume` to a command."""
    resume = click.option(
        "--resume",
        is_flag=False,
        flag_value=LATEST,
        metavar="[RUN]",
        shell_complete=completing.runs,
        help="Go on; default: the latest run.",
    )
    folder = log_dir_option("Where the new run's folder is made; with --resume, where the latest is looked for.")
    return folder(resume(command))
