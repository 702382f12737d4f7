"""`reward-kit view`: serve live pages of the runs in a directory, or write the page of a run to a file."""

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
from reward_kit.report.viewer_runs import RunCatalog
from reward_kit.runs.files import REPORT_FILE, RUN_FILE


@click.command(name="view")
@click.argument(
    "folder",
    required=False,
    type=click.Path(path_type=Path),
    default=Path("runs"),
    metavar="[DIR|RUN]",
    shell_complete=complete_runs,
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on; default: a free port.")
@click.option("--open/--no-open", "opens", default=False, help="Open the address in the browser of this machine.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Instead of serving pages, write the page of one run to FILE, such as report.html.",
)
def command(folder: Path, port: int, opens: bool, output: Path | None) -> None:
    """Serve the pages of the runs in DIR (default: "runs"), or of a single run, only to browsers on this machine.

    The address contains a token that every request needs. Episodes of a live run appear as they finish. DIR is not
    modified. Ctrl-C stops the server.

    With -o, the page of RUN or, by default, of the newest run in DIR is written to a file instead. If the run is large,
    its episodes are written to a directory next to the file.

    \b
    Examples:
      reward-kit view
      reward-kit view runs/clock-20260101T120000Z-ab12cd --open
      reward-kit view runs/clock-20260101T120000Z-ab12cd -o clock.html
    """
    if output is None:
        anyio.run(_serve, _open_catalog(folder), port, opens)
        return
    is_of_runs = not (folder / RUN_FILE).is_file() and any(folder.glob(f"*/{RUN_FILE}"))
    run = run_or_newest(None, folder, training=True) if is_of_runs else folder
    echo(str(write_report(run, None if output == run / REPORT_FILE else output)))


def _open_catalog(folder: Path) -> RunCatalog:
    if not folder.is_dir():
        raise ConfigError(f"directory {folder} does not exist; pass the directory of the runs or of one run")
    if (folder / RUN_FILE).is_file():
        whole = folder.resolve()
        return RunCatalog(whole.parent, only=whole.name)
    return RunCatalog(folder)


async def _serve(catalog: RunCatalog, port: int, opens: bool) -> None:
    from reward_kit.report.viewer_access import CODE, Access
    from reward_kit.report.viewer_server import serving

    access = Access()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with serving(catalog, port, access) as address:
            echo(address)
            echo("Ctrl-C stops the server. Anyone on this machine who has this address can read these runs.", err=True)
            if opens:  # do not pass this address, because other users can read the arguments of the browser's process
                once = f"{address.partition('?')[0]}?{CODE}={access.one_time_code()}"
                await anyio.to_thread.run_sync(webbrowser.open, once)
            await anext(signals)
