"""A `rich` console for untrusted text: brackets are not interpreted as markup, and control characters are escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from reward_kit.display_text import printable


class SafeConsole(Console):
    """A console that prints text and tables without interpreting markup, links, emoji or control characters.

    Args:
        options: keyword arguments for `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Return the segments of a renderable; untrusted text is escaped.

        Control segments come from `rich` itself and are passed through unchanged.
        """
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
