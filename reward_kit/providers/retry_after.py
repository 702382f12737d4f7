"""How long an endpoint asks to be left alone: Retry-After in every form that is met in the wild.

RFC 9110 section 10.2.3 allows whole seconds or an HTTP date. Providers also send decimal seconds, and milliseconds in
`retry-after-ms`, which is the more exact one and wins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC
from email.message import Message
from email.utils import parsedate_to_datetime


def parse_retry_after(headers: Mapping[str, str] | Message, now: float | None = None) -> float | None:
    """Seconds to wait, never negative; None where the headers do not say or cannot be understood.

    Args:
        headers: of the answer, looked up without regard to case.
        now: the present as a POSIX timestamp, by default the clock's. A date is counted from the answer's own `Date`
            where it has one, so that a server whose clock is wrong still means the same delay.
    """
    milliseconds = _number(headers.get("Retry-After-Ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("Retry-After")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    until = _date(value)
    if until is None:
        return None
    sent = _date(headers.get("Date"))
    if sent is None:
        sent = time.time() if now is None else now
    return max(0.0, until - sent)


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return max(0.0, value) if math.isfinite(value) else None


def _date(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = parsedate_to_datetime(text)
        # The forms without a zone (asctime, "-0000") mean UTC in HTTP.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
