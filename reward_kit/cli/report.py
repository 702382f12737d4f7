"""`reward-kit report`: one page on what a run came to."""

from __future__ import annotations

from pathlib import Path

import click

from reward_kit.runs.report.page import write_report


@click.command(name="report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: report.html in RUN.")
def command(run: Path, output: Path | None) -> None:
    """Write the page of RUN, the folder of a run, and print where it is. The page is one file that loads nothing.

    \b
    Examples:
      reward-kit report runs/clock-20260101T120000Z-ab12cd
      reward-kit report runs/clock-20260101T120000Z-ab12cd -o clock.html
    """
    click.echo(str(write_report(run, output)))
