"""What the error of somebody else's client of an endpoint says: that another attempt may help, and when to make it.

Clients agree on little. Most put the answer's status and headers on the error or on its `response`; where no answer
came they have a type of their own, which is known by its name, so that none of them is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from email.message import Message
from typing import Any, NamedTuple

from reward_kit.providers.faults import TransientError
from reward_kit.providers.retry_after import parse_retry_after

_PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another attempt may not meet (RFC 9110 section 15.5, RFC 6585, RFC 8470)."""
_NO_ANSWER = frozenset(
    {
        *("ConnectionError", "TimeoutError", "Timeout", "TransportError"),  # Python, requests, httpx
        *("APIConnectionError", "ClientConnectionError", "ClientPayloadError"),  # openai and its likes, aiohttp
    }
)
_LONGEST_CHAIN = 10


class Trouble(NamedTuple):
    """Trouble of an endpoint that may pass.

    Attributes:
        retry_after_s: how many seconds it asked to be left alone; None where it did not say.
    """

    retry_after_s: float | None


def trouble_of(error: BaseException) -> Trouble | None:
    """The trouble that an error, or what caused it, tells of; None where it tells of none that may pass."""
    for each in _chain(error):
        if isinstance(each, TransientError):
            return Trouble(each.retry_after_s)
        answer = getattr(each, "response", None)
        if (status := _status(each)) or (status := _status(answer)):
            passes = status in _PASSING or status >= 500
            return Trouble(_retry_after(each) or _retry_after(answer)) if passes else None
        if any(kind.__name__ in _NO_ANSWER for kind in type(each).__mro__):
            return Trouble(None)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _status(told: Any) -> int:
    """The HTTP status that an error or an answer has; 0 where it has none."""
    found = (getattr(told, name, None) for name in ("status_code", "status", "code"))
    return next((value for value in found if type(value) is int and 400 <= value < 600), 0)


def _retry_after(told: Any) -> float | None:
    headers = getattr(told, "headers", None)
    return parse_retry_after(headers) if isinstance(headers, Mapping | Message) else None
