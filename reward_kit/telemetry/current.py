"""The telemetry of the current run. `opentelemetry` is not imported if telemetry is off."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

_NOTHING: AbstractContextManager[None] = nullcontext()


class EpisodeSpans:
    """The spans of a running episode. This base class is used if telemetry is off.

    Attributes:
        traceparent: the W3C context of the episode, or "" if telemetry is off.
    """

    traceparent = ""

    def step(self, t: int) -> AbstractContextManager[None]:
        """Start the span of a step, which is the current span within the `with` block."""
        return _NOTHING

    def tool(self, t: int, index: int) -> AbstractContextManager[None]:
        """Start the span of a tool call, which is the current span within the `with` block."""
        return _NOTHING


class TelemetryLike(Protocol):
    """The methods of `Telemetry`, which documents their arguments."""

    def episode(self, rollout_id: str, started_at: datetime.datetime) -> AbstractContextManager[EpisodeSpans]: ...
    def end_episode(self, record: Mapping[str, Any]) -> None: ...
    def begin_reward(self, rollout_id: str, episode_timing: Mapping[str, Any] | None) -> None: ...
    def end_reward(
        self, score: Mapping[str, Any], zero: datetime.datetime, episode_timing: Mapping[str, Any] | None
    ) -> None: ...


CURRENT_TELEMETRY: ContextVar[TelemetryLike | None] = ContextVar("CURRENT_TELEMETRY", default=None)
"""The telemetry of the current run or `with` block, or None if it is off."""


def continue_trace(headers: Mapping[str, str]) -> None:
    """Use the W3C context in the headers of a request as the current context.

    If the headers contain no context, there is no current context.
    """
    if CURRENT_TELEMETRY.get() is not None:
        from opentelemetry import context, propagate

        context.attach(propagate.extract(headers, context.Context()))


def trace_headers() -> dict[str, str]:
    """Return the W3C headers of the current span. If telemetry is off, return no headers."""
    headers: dict[str, str] = {}
    if CURRENT_TELEMETRY.get() is not None:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers
