"""Telling an endpoint that is down from a request that it cannot answer.

An outage begins with `STREAK` failures in a row without an answer between them, to at least two requests. One request
that keeps failing while it is alone in flight is taken for the cause itself, and its own retries end; unless no
connection comes about at all, which is never a request's fault.
"""

from __future__ import annotations

from enum import Enum

STREAK = 5
_FIRST_PROBE_S = 1.0
_LONGEST_PROBE_S = 30.0


class Fault(Enum):
    """What a failed attempt says of the endpoint."""

    REFUSED = "too much was asked of it"
    FAILED = "it could not answer, or not in time"
    UNREACHABLE = "no connection comes about"


class Outage:
    """The failures of one endpoint since its last answer, and whether they are an outage.

    Attributes:
        is_open: whether it is down as far as we know.
        since: when the first failure since the last answer came; None where there was none.
        count: failures since the last answer, refusals left out.
        is_shared: whether they came to more than one request.
    """

    __slots__ = ("_first", "_interval_s", "_next_probe", "count", "is_open", "is_shared", "since")

    def __init__(self) -> None:
        self.is_open = self.is_shared = False
        self.since: float | None = None
        self.count, self._first = 0, -1
        self._next_probe: float | None = 0.0
        self._interval_s = _FIRST_PROBE_S

    def answered(self) -> float | None:
        """An answer came. Returns the time since which the endpoint was down, None where it was not."""
        since = self.since if self.is_open else None
        self.is_open = self.is_shared = False
        self.since, self.count, self._first = None, 0, -1
        self._interval_s = _FIRST_PROBE_S
        return since

    def failed(self, request: int, fault: Fault, now: float, *, is_last: bool = False) -> bool:
        """An attempt failed; True where this begins an outage.

        Args:
            request: its request's number.
            fault: how.
            now: when.
            is_last: the request has no attempt left.
        """
        if self.since is None:
            self.since, self._first = now, request
        self.is_shared = self.is_shared or request != self._first
        if fault is Fault.REFUSED:
            return False
        self.count += 1
        is_unreachable = fault is Fault.UNREACHABLE
        enough = self.count >= STREAK and (self.is_shared or is_unreachable)
        if self.is_open or not (enough or (is_last and is_unreachable)):
            return False
        self.is_open = True
        self.probe_later(now)
        return True

    def probe_wait_s(self, now: float) -> float | None:
        """Seconds until one request may try whether the endpoint is back; None while one does."""
        return None if self._next_probe is None else max(0.0, self._next_probe - now)

    def probe(self) -> None:
        """One request tries."""
        self._next_probe = None

    def probe_later(self, now: float) -> None:
        """The probe failed: the next one after twice the time, at most 30 s."""
        self._next_probe = now + self._interval_s
        self._interval_s = min(_LONGEST_PROBE_S, 2 * self._interval_s)

    def probe_again(self, now: float) -> None:
        """The probe was called off and says nothing."""
        self._next_probe = now
