"""Numbers on the command line, with messages that say "number" where click says "float range"."""

from __future__ import annotations

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number within bounds: NaN is below nothing, so that it would open every gate."""

    name = "number"

    def _describe_range(self) -> str:
        return super()._describe_range() if self.min is not None or self.max is not None else ""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number.

        Raises:
            click.BadParameter: it is none, not finite or out of bounds.
        """
        found: float = super().convert(value, param, ctx)
        return found if math.isfinite(found) else self.fail(f"{value!r} is not a finite number.", param, ctx)


class WholeNumber(click.IntRange):
    """A whole number within bounds."""

    name = "integer"
