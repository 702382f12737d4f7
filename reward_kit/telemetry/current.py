"""The telemetry of the current run, without which `opentelemetry` is not imported."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reward_kit.telemetry.traces import Telemetry

_NOTHING: AbstractContextManager[None] = nullcontext()
CURRENT_TELEMETRY: ContextVar[Telemetry | None] = ContextVar("CURRENT_TELEMETRY", default=None)
"""The telemetry of the current run or block; None if it is off."""


class EpisodeSpans:
    """The spans of a running episode; this base class is for an episode without telemetry.

    Attributes:
        traceparent: the W3C context of the episode, or "" without telemetry.
    """

    traceparent = ""

    def step(self, t: int) -> AbstractContextManager[None]:
        """Start the span of a step; it is the current span during the block."""
        return _NOTHING

    def tool(self, t: int, index: int) -> AbstractContextManager[None]:
        """Start the span of a tool call; it is the current span during the block."""
        return _NOTHING


def trace_headers() -> dict[str, str]:
    """Return the W3C headers of the current span, or no headers without telemetry."""
    headers: dict[str, str] = {}
    if CURRENT_TELEMETRY.get() is not None:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers
