"""Records of model calls. They contain the time, the outcome and the usage of each request to an endpoint.

`ChatEndpoint` adds a record to the list in `MODEL_CALLS`. Each episode and each reward call has a separate list, which
is stored in its `timing`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class ModelCall:
    """One request for a completion, including its retries.

    Attributes:
        model: the requested model.
        provider: the provider, as in OpenTelemetry's attribute `gen_ai.provider.name`.
        server: the host and port of the endpoint.
        began: the start time in seconds, from `time.monotonic`.
        ended: the end time in seconds, from `time.monotonic`.
        caller: "user" for the simulated user, and None otherwise.
        finish_reason: the reason why the response ended, if it is known.
        usage: the tokens and the cost, if they are known.
        retries: the number of attempts that failed before the response arrived.
        error: the type of the error that ended the call, if there was one.
        reported_model: the model that answered, as the server reports it, if it does.
        prompt_hash: the beginning of the SHA-256 of the system message of a judge's request.
        is_cached: whether the caller had the response already, so that there was no request.
    """

    model: str
    provider: str
    server: str
    began: float
    ended: float = 0.0
    caller: str | None = None
    finish_reason: str | None = None
    usage: dict[str, float] | None = None
    retries: int = 0
    error: str | None = None
    reported_model: str | None = None
    prompt_hash: str | None = None
    is_cached: bool = False

    def to_json(self, zero: float) -> dict[str, Any]:
        """Return the call as a JSON object. Times are in seconds since `zero`, and unknown values are omitted."""
        known = {name: value for name, value in asdict(self).items() if value}
        return known | {"began": round(self.began - zero, 6), "ended": round(self.ended - zero, 6)}


MODEL_CALLS: ContextVar[list[ModelCall] | None] = ContextVar("MODEL_CALLS", default=None)
"""The list that receives the model calls of the current episode or reward call. None outside of both."""


@contextmanager
def recorded_call(calls: list[ModelCall], model: str, provider: str, server: str) -> Iterator[ModelCall]:
    """Add a model call to `calls`, and record the times and the error of the block in that call."""
    call = ModelCall(model, provider, server, time.monotonic())
    try:
        yield call
    except BaseException as error:
        call.error = type(error).__name__
        raise
    finally:
        call.ended = time.monotonic()
        calls.append(call)


@contextmanager
def calls_of(caller: str, calls: list[ModelCall]) -> Iterator[None]:
    """Mark the calls that are added to `calls` during the block as calls of `caller`."""
    known = len(calls)
    try:
        yield
    finally:
        for call in calls[known:]:
            call.caller = caller
