"""How many requests an endpoint takes at a time, found out by its refusals.

The rule is TCP's (RFC 5681): a cut when there is too much, doubling per round trip up to the size that was last too
much, and one more per round trip from there. The cut is to 70 % as in CUBIC (RFC 9438), or to as many as the endpoint
did not refuse, whichever is less.
"""

from __future__ import annotations

import math

_CUT = 0.7
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Concurrency:
    """The limit on requests in flight.

    Attributes:
        limit: the limit; infinite until a first refusal, where `most` is.
    """

    __slots__ = ("_cut_at", "_cuts_in_a_row", "_most", "_threshold", "_unrefused", "limit")

    def __init__(self, most: int | None = None) -> None:
        self._most = math.inf if most is None else float(most)
        self.limit = self._most
        self._threshold = math.inf
        self._cut_at = -1
        self._cuts_in_a_row = 0
        self._unrefused = 0

    def answered(self, is_scarce: bool) -> None:
        """An answer came; the limit grows where requests wait for it (`is_scarce`)."""
        self._cuts_in_a_row = 0
        if is_scarce and self.limit < self._most:
            step = 1.0 if self.limit < self._threshold else 1.0 / self.limit
            self.limit = min(self.limit + step, self._most)

    def refused(self, number: int, latest: int, in_flight: int) -> bool:
        """The endpoint had too much; True where this is news.

        Args:
            number: of the refused attempt; they are counted as they are sent.
            latest: the number of the attempt sent last.
            in_flight: attempts in flight, the refused one included.

        A whole burst of refusals is one cut: those sent before the cut say nothing of the limit after it.
        """
        is_news = number > self._cut_at
        if is_news:
            self._cut_at, self._unrefused = latest, in_flight
            self._cuts_in_a_row += 1
            self._threshold = max(1.0, _CUT * in_flight)
            self.limit = min(self.limit, self._threshold)
        self._unrefused -= 1
        self.limit = max(1.0, min(self.limit, float(self._unrefused)))
        return is_news

    def pause_s(self) -> float:
        """Seconds to send nothing after a refusal that names no time; more with each cut without an answer between.

        None after the first cut where others are in flight: they will show how many are too many.
        """
        doublings = self._cuts_in_a_row - (2 if self._unrefused > 0 else 1)
        return 0.0 if doublings < 0 else min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(doublings, 64))
