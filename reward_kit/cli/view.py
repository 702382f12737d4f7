"""`reward-kit view`: the pages of all runs of a folder in the browser, live; or the page of one run as a file."""

from __future__ import annotations

import signal
import webbrowser
from pathlib import Path

import anyio
import anyio.to_thread
import click

from reward_kit.cli.echo import echo
from reward_kit.cli.options import complete_runs, run_or_newest
from reward_kit.errors import ConfigError
from reward_kit.report.run_page import write_report
from reward_kit.report.viewer_runs import RunCatalogue
from reward_kit.runs.run_folder import FILE


@click.command(name="view")
@click.argument(
    "folder",
    required=False,
    type=click.Path(path_type=Path),
    default=Path("runs"),
    metavar="[DIR|RUN]",
    shell_complete=complete_runs,
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free one.")
@click.option("--open/--no-open", "opens", default=False, help="Open the address in the browser of this machine.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page of one run to FILE, such as report.html, and serve nothing.",
)
def command(folder: Path, port: int, opens: bool, output: Path | None) -> None:
    """Serve the pages of the runs in DIR ("runs" by default), or of one run, to a browser on this machine alone.

    The address contains a required token. Episodes of a live run appear as they finish. Nothing in DIR is changed.
    Ctrl-C stops the server.

    With -o, the page of one run is written to a file: of the run DIR, else of the newest in DIR. The episodes of a
    large run are in a folder beside it; nothing else is loaded.

    \b
    Examples:
      reward-kit view
      reward-kit view runs/clock-20260101T120000Z-ab12cd --open
      reward-kit view runs/clock-20260101T120000Z-ab12cd -o clock.html
    """
    if output is None:
        anyio.run(_serve, _open_catalogue(folder), port, opens)
        return
    is_of_runs = not (folder / FILE).is_file() and any(folder.glob(f"*/{FILE}"))
    run = run_or_newest(None, folder, training=True) if is_of_runs else folder
    echo(str(write_report(run, None if output == run / "report.html" else output)))


def _open_catalogue(folder: Path) -> RunCatalogue:
    if not folder.is_dir():
        raise ConfigError(f"folder {folder} does not exist; name the folder of the runs, or of one run")
    if (folder / FILE).is_file():
        whole = folder.resolve()
        return RunCatalogue(whole.parent, only=whole.name)
    return RunCatalogue(folder)


async def _serve(catalogue: RunCatalogue, port: int, opens: bool) -> None:
    from reward_kit.report.viewer_access import CODE, Access
    from reward_kit.report.viewer_server import serving

    access = Access()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with serving(catalogue, port, access) as address:
            echo(address)
            echo("Ctrl-C stops the server. Anyone on this machine with this address can read these runs.", err=True)
            if opens:  # not this address, since other users can read the arguments of the browser's process
                once = f"{address.partition('?')[0]}?{CODE}={access.one_time_code()}"
                await anyio.to_thread.run_sync(webbrowser.open, once)
            await anext(signals)
