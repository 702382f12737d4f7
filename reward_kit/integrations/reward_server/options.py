"""What a reward server allows, and what it says where that is exceeded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from aiohttp import web

from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.validation import check_number

MIB = 2**20
AT_LEAST = (("max_pending", "max_batch"), ("max_held_mb", "max_body_mb"))
"""Options of `ServerOptions`, each with the one that it is at least."""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "reward-kit"}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a reward server listens, and its limits.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        max_concurrency: calls of each reward at a time; behind walls there is one for each CPU at the most.
        max_pending: rollouts of each reward that are accepted and not yet answered; beyond it requests are refused.
        max_batch: rollouts in a request.
        max_messages: messages in a rollout.
        max_body_mb: MiB of a request's body.
        max_held_mb: MiB of all bodies that are held at a time, as they are sent; as values they take more.
        max_connections: open at a time.
        deadline_s: for one call of a reward.
        head_timeout_s: until a new connection has sent the head of its first request.
        body_timeout_s: until a body is there.
        shutdown_timeout_s: for what is in flight when the server is to end.

    Raises:
        ConfigError: a number is out of its range, or a batch can never be accepted.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_concurrency: int = 64
    max_pending: int = 4096
    max_batch: int = 1024
    max_messages: int = 10_000
    max_body_mb: float = 16.0
    max_held_mb: float = 512.0
    max_connections: int = 8192
    deadline_s: float = 600.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("host", "port"):
                check_number(field.name, getattr(self, field.name), whole=field.type == "int")
        for larger, smaller in AT_LEAST:
            if getattr(self, smaller) > getattr(self, larger):
                raise ConfigError(f"{smaller} is at most {larger}, {getattr(self, larger):g}; raise that too")

    @property
    def body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * MIB)

    @property
    def held_bytes(self) -> int:
        """`max_held_mb` in bytes."""
        return int(self.max_held_mb * MIB)


class RefusedError(RewardKitError):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        code: what programs go by.
        message: what people read.
        headers: to send.
        closes: the connection is closed afterwards, such as where the body was not read.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers, self.closes = status, code, headers or {}, closes

    def response(self) -> web.Response:
        """The answer."""
        told = json_response({"error": {"code": self.code, "message": str(self)}}, self.status, self.headers)
        if self.closes:
            told.force_close()
        return told


def busy(message: str, wait_s: float) -> RefusedError:
    """Too much is asked for at the moment; another attempt after some whole seconds may fare better."""
    return RefusedError(429, "too_many", message, {"Retry-After": str(math.ceil(max(1.0, wait_s)))}, closes=True)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer in JSON; texts with lone surrogates, which are no UTF-8, have question marks in their place."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return plain_response(text.encode("utf-8", "replace"), "application/json", status, headers)


def plain_response(
    body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """An answer that is kept nowhere."""
    return web.Response(body=body, status=status, headers={**_HEADERS, "Content-Type": content_type, **(headers or {})})
