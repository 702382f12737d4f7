"""Numbers on the command line, with messages that say "number" where click says "float range"."""

from __future__ import annotations

import click


class Number(click.FloatRange):
    """A number within bounds."""

    name = "number"


class WholeNumber(click.IntRange):
    """A whole number within bounds."""

    name = "integer"
