"""How fast an endpoint may be asked: what the user allows, and the bucket that spreads it evenly over the minute."""

from __future__ import annotations

from dataclasses import dataclass

from reward_kit.providers.options import check_number

_EPSILON = 1e-9
_MEMORY = 0.1  # the share of the latest answer in a running average


@dataclass(frozen=True, slots=True)
class Rates:
    """What the user allows one model of one endpoint; None is no limit.

    Attributes:
        requests_per_minute: attempts that may begin in a minute.
        tokens_per_minute: tokens of prompts and answers together; see `TokenEstimate` for how they are known before.
        max_connections: requests in flight.

    Raises:
        ConfigError: a value is no positive number.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_connections: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute", "max_connections"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, whole=name == "max_connections")

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing is limited."""
        return self == _UNLIMITED


_UNLIMITED = Rates()


class Bucket:
    """A token bucket that holds what one second brings, at least 1.

    Whatever is taken in any window of w minutes is at most `per_minute` * w, plus one bucket, plus the one amount that
    was larger than the bucket: that is let through when the bucket is full, and what it overdraws is waited for by
    those behind it.
    """

    __slots__ = ("_at", "_capacity", "_level", "_rate")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        self._capacity = self._level = max(1.0, self._rate)
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken."""
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        lacking = min(amount, self._capacity) - self._level
        return lacking / self._rate if lacking > _EPSILON else 0.0

    def take(self, amount: float) -> None:
        """Take `amount`; a negative one is given back."""
        self._level = min(self._capacity, self._level - amount)


class TokenEstimate:
    """How many tokens a request will use, learned from what earlier ones used.

    Before the first answer a token is 4 bytes of the request, and the answer has as many as it may have.
    """

    __slots__ = ("_completion", "_tokens_per_byte")

    def __init__(self) -> None:
        self._tokens_per_byte = 0.25
        self._completion: float | None = None

    def tokens(self, size: int, max_completion: float) -> float:
        """The tokens of a request of `size` bytes whose answer has at most `max_completion`."""
        return size * self._tokens_per_byte + (max_completion if self._completion is None else self._completion)

    def learn(self, size: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Take note of what a request of `size` bytes used."""
        self._tokens_per_byte += _MEMORY * (prompt_tokens / max(size, 1) - self._tokens_per_byte)
        before = float(completion_tokens) if self._completion is None else self._completion
        self._completion = before + _MEMORY * (completion_tokens - before)
