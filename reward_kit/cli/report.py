"""`reward-kit report`: one page on what a run came to."""

from __future__ import annotations

from pathlib import Path

import click

from reward_kit.cli import completing
from reward_kit.cli.echo import echo
from reward_kit.cli.newest import run_or_newest, where_runs_are
from reward_kit.report.run_page import write_report


@click.command(name="report")
@click.argument("run", required=False, type=click.Path(path_type=Path), shell_complete=completing.runs)
@where_runs_are()
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: report.html in RUN.")
def command(run: Path | None, log_dir: Path, output: Path | None) -> None:
    """Write the page of RUN, the folder of a run, and print where it is. Without RUN, the newest is taken.

    The page is one file, with the episodes of a large run in a folder beside it. It loads nothing else.

    \b
    Examples:
      reward-kit report
      reward-kit report runs/clock-20260101T120000Z-ab12cd
      reward-kit report runs/clock-20260101T120000Z-ab12cd -o clock.html
    """
    echo(str(write_report(run_or_newest(run, log_dir, with_training=True), output)))
