"""Functions that all commands use to print. They escape control characters in untrusted text."""

from __future__ import annotations

import json
import sys
import traceback
from types import TracebackType
from typing import Any

import click

from reward_kit.display_text import printable

_CLEAR_LINE = "\r\x1b[K"


def echo(message: object = "", *, err: bool = False, nl: bool = True, redraw: bool = False) -> None:
    """Print a string after escaping its control characters, except for line breaks and tabs."""
    click.echo(_CLEAR_LINE * redraw + printable(str(message)), err=err, nl=nl)


def echo_json(document: Any, *, indent: int | None = None, allow_nan: bool = True) -> None:
    """Print a value as ASCII JSON without control characters. The options are passed to `json.dumps`."""
    text = json.dumps(document, indent=indent, allow_nan=allow_nan)
    click.echo(text.replace("\x7f", "\\u007f"))  # the only control character that JSON leaves in a string


def show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected exception.

    The traceback is escaped, because the message may quote untrusted text.
    """
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
