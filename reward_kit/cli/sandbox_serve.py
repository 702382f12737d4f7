"""`reward-kit sandbox-serve`: the side of a back end that runs the code, in a container or on another machine."""

from __future__ import annotations

import click

from reward_kit.sandbox.serving import serve_here


@click.command(name="sandbox-serve")
def command() -> int:
    """Run calls of confined code for the host that started this, over standard input and output.

    Nobody types this: `--sandbox-back-end ssh:HOST` starts it on HOST, and `docker:IMAGE` in a
    container. It ends with its input, and everything it started ends with it.

    \b
    Example, as it is started on HOST:
      ssh HOST reward-kit sandbox-serve
    """
    serve_here()
    return 0
