"""Endpoint errors. Their types indicate whether a retry may help, and their messages suggest a fix.

These types are used between a transport and a `ChatEndpoint`. When the `ChatEndpoint` gives up, it raises an ordinary
`ProviderError` or `DeadlineError`. Secrets are masked before a message is shortened, so no part of a secret remains in
the message.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, NamedTuple

from reward_kit.errors import DeadlineError, LimitError, ProviderError, RewardKitError, safe_str
from reward_kit.safe_input import TooLargeError

RETRIED_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""HTTP statuses that are retried: timeouts, conflicts, rate limits and server errors. 520 and above are used by
Cloudflare and Anthropic.
"""
EndpointError = ProviderError | DeadlineError | LimitError
"""The errors that a request to an endpoint raises."""
ENDPOINT_ERRORS = (ProviderError, DeadlineError, LimitError)
_CONTEXT_CODES = ("context_length_exceeded", "string_above_max_length")
# Messages from OpenAI and vLLM, Anthropic, llama.cpp, and Gemini. They have no error code in common.
_CONTEXT_TEXT = re.compile(
    r"maximum context length|prompt is too long|exceeds? the available context size|"
    r"exceeds the (maximum number of tokens|context window)",
    re.IGNORECASE,
)
# Codes of OpenAI and litellm, and types of Anthropic. They are sent in a stream instead of a status.
_TRANSIENT_CODES = {
    **{str(status): status for status in RETRIED_STATUSES},
    **{"rate_limit_exceeded": 429, "server_error": 500},
    **{"rate_limit_error": 429, "api_error": 500, "timeout_error": 504, "overloaded_error": 529},
}
_OVERLOADED = (429, 503, 529)
_NO_ACCESS = (401, 402, 403)
EXCERPT_CHARS = 200
_PROVIDER_TEXT_CHARS = 1_000


class TransientError(ProviderError):
    """Raised for a failure that a retry may avoid.

    Attributes:
        retry_after_s: the endpoint's Retry-After in seconds, or None if the endpoint sent none.
        status: the HTTP status, or None for other failures.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """True if the endpoint rejected the request because of a rate limit."""
        return self.status == 429

    @property
    def is_overloaded(self) -> bool:
        """True if fewer concurrent requests may help."""
        return self.status in _OVERLOADED


class UnreachableError(TransientError):
    """Raised if the connection cannot be established."""


class UnknownHostError(ProviderError):
    """Raised if the host name cannot be resolved, or if the host's certificate is rejected.

    Either the URL is wrong or the network is down.
    """


class WrongEndpointError(ProviderError):
    """Raised if the URL does not belong to a model endpoint, or if the endpoint does not have the model.

    The HTTP status is 404 or 405.
    """


class HtmlError(TransientError):
    """Raised if the response is an HTML page.

    The page may come from a proxy that will recover, or the URL may be wrong.
    """


class AccessError(ProviderError):
    """Raised if the key or the account was rejected.

    Attributes:
        is_certain: True if all requests with this key will fail. Status 403 may concern only a single request.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self._status = status
        self.is_certain = status != 403

    def explained(self, no_key: str) -> AccessError:
        """Return this error with the reason why no key was sent.

        If a key was sent, or if the account has no credit left, the error is returned unchanged.
        """
        is_about_key = no_key and self._status in (401, 403)
        return AccessError(f"{self}; no key was sent: {no_key}", self._status) if is_about_key else self


class IdleTimeoutError(DeadlineError):
    """Raised if the endpoint sent nothing for too long. A retry may help."""


def too_large_error(where: str, limit: TooLargeError) -> ProviderError:
    """Return the error for a response that exceeds a limit of `safe_input`. A retry would not help."""
    return ProviderError(
        f"{where} sent a response that exceeds the limit of {limit}; the rest was not read. Lower max_tokens "
        "or top_logprobs, or check that base_url is a model endpoint"
    )


def status_error(
    status: int, headers: Mapping[str, str], body: bytes, where: str, secrets: Iterable[str] = (), advice: str = ""
) -> ProviderError | LimitError:
    """Return the error for an HTTP status. The error contains the provider's message and the given advice."""
    if 300 <= status < 400:
        return ProviderError(
            f"{where} redirects (HTTP {status}) to {headers.get('Location')!r}; set base_url to that URL"
        )
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        text, code = body.decode("utf-8", "replace")[: 4 * _PROVIDER_TEXT_CHARS], None
    else:
        error = data.get("error", data) if isinstance(data, Mapping) else data
        text, code = _text_of(error), error.get("code") if isinstance(error, Mapping) else None
    message = f"{where} returned HTTP {status}: {excerpt(text, secrets, _PROVIDER_TEXT_CHARS) or '(no text)'}{advice}"
    if 400 <= status < 500 and (code in _CONTEXT_CODES or _CONTEXT_TEXT.search(text)):
        return LimitError(message)
    # An account without credit also gets status 429, but waiting does not help.
    if status in _NO_ACCESS or code == "insufficient_quota":
        return AccessError(message, status)
    if status in RETRIED_STATUSES:
        return TransientError(message, parse_retry_after(headers), status)
    is_unknown = status in (404, 405) or code == "model_not_found"
    return WrongEndpointError(message) if is_unknown else ProviderError(message)


def error_in_body(error: Any, where: str, secrets: Iterable[str] = ()) -> ProviderError | LimitError:
    """Return the error for a body `{"error": …}` that was sent with a successful status, or for an error event.

    Servers and routers send such a body if an error occurs after they have begun to respond.
    """
    code, kind = (error.get(key) for key in ("code", "type")) if isinstance(error, Mapping) else (None, None)
    text = excerpt(_text_of(error), secrets, _PROVIDER_TEXT_CHARS)
    message = f"{where} returned an error instead of a completion: {text}"
    if code in _CONTEXT_CODES or _CONTEXT_TEXT.search(text):
        return LimitError(message)
    named = (_TRANSIENT_CODES.get(one) for one in (code, kind) if isinstance(one, str))
    code = next(filter(None, named), code)
    is_transient = isinstance(code, int) and code in RETRIED_STATUSES
    return TransientError(message, status=code) if is_transient else ProviderError(message)


def excerpt(text: bytes | str, secrets: Iterable[str] = (), limit: int = EXCERPT_CHARS) -> str:
    """Return at most `limit` characters of a string, on one line and without secrets."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    for secret in secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _text_of(error: Any) -> str:
    if isinstance(error, Mapping):
        for key in ("message", "detail", "error"):
            if isinstance(error.get(key), str):
                return str(error[key])
    return error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)


_LIMITS = ("requests", "tokens", "input-tokens", "output-tokens")


def parse_retry_after(headers: Mapping[str, str] | Message, now: float | None = None) -> float | None:
    """Return the non-negative number of seconds to wait, or None if the headers contain no valid value."""
    milliseconds = _number(headers.get("Retry-After-Ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("Retry-After")
    seconds = _number(value)
    until = _date(value) or _limit_reset(headers)
    if seconds is not None or until is None:
        return seconds
    # A date is relative to the `Date` of the response, so the delay is correct even if the server's clock is wrong.
    sent = _date(headers.get("Date"))
    if sent is None:
        sent = time.time() if now is None else now
    return max(0.0, until - sent)


def _limit_reset(headers: Mapping[str, str] | Message) -> float | None:
    """Return the time at which all exhausted rate limits in Anthropic's headers are reset.

    If no limit is exhausted, return None.
    """
    resets: list[float] = []
    for name in (f"anthropic-ratelimit-{kind}" for kind in _LIMITS):
        if _number(headers.get(f"{name}-remaining")) == 0:
            with suppress(ValueError, OverflowError, OSError):
                resets.append(datetime.fromisoformat(headers.get(f"{name}-reset", "")).timestamp())
    return max(resets, default=None)


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


_PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that a further attempt may avoid (RFC 9110 section 15.5, RFC 6585, RFC 8470)."""
_NO_ANSWER = frozenset(
    {
        *("ConnectionError", "TimeoutError", "Timeout", "TransportError"),  # Python, requests, httpx
        *("APIConnectionError", "ClientConnectionError", "ClientPayloadError"),  # openai and similar packages, aiohttp
    }
)
_NO_CONNECTION = frozenset({"ConnectionRefusedError", "ConnectError", "ClientConnectorError"})
_ADVICE = {
    (400, 422): "; fix the request that the client sends",
    (401, 402, 403): "; check the key that the client sends, and the key's account",
    (404, 405): "; check the client's base URL and the model name",
}
_LONGEST_CHAIN = 10


class TransientFailure(NamedTuple):
    """A temporary failure of an endpoint. It includes the Retry-After if the endpoint sent one."""

    retry_after_s: float | None


def find_transient_failure(error: BaseException) -> TransientFailure | None:
    """Return the temporary failure that caused an error from any client, or None if there was no such failure."""
    fault = client_error(error, "the endpoint")
    return TransientFailure(fault.retry_after_s) if isinstance(fault, TransientError) else None


def client_error(error: BaseException, where: str) -> EndpointError | None:
    """Return the endpoint error that corresponds to an error from a model client or HTTP client.

    For any other error, return None. The error or one of its causes is recognized by its HTTP status, by the HTTP
    status of its response, or by the name of its class. This covers openai, anthropic, httpx, aiohttp, requests and
    other packages.
    """
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if cause is None:
            break
        if isinstance(cause, TransientError):
            return cause
        answer = getattr(cause, "response", None)
        if (status := _status(cause)) or (status := _status(answer)):
            return _client_status_error(cause, answer, status, where)
        if any(kind.__name__ in _NO_ANSWER for kind in type(cause).__mro__):
            message = f"{where} did not answer: {excerpt(f'{type(cause).__name__}: {safe_str(cause)}')}"
            return UnreachableError(message) if _is_unreachable(cause) else TransientError(message)
        cause = _cause(cause)
    return None


def _client_status_error(error: BaseException, answer: Any, status: int, where: str) -> EndpointError:
    body = getattr(error, "body", None)  # openai and anthropic keep the JSON
    known = {"error": body.get("error", body)} if isinstance(body, Mapping) else None
    text = json.dumps(known, default=repr) if known else safe_str(error)
    advice = next((advice for statuses, advice in _ADVICE.items() if status in statuses), "")
    fault = status_error(status, {}, text.encode("utf-8", "replace"), where, advice=advice)
    passes = type(fault) in (ProviderError, TransientError) and (status in _PASSING or status >= 500)
    return TransientError(str(fault), _retry_after(error) or _retry_after(answer), status) if passes else fault


def _is_unreachable(error: BaseException) -> bool:
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if cause is None:
            break
        if any(kind.__name__ in _NO_CONNECTION for kind in type(cause).__mro__):
            return True
        cause = _cause(cause)
    return False


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class client_errors:
    """Convert errors that model clients and HTTP clients raise in the block to endpoint errors.

    Other errors stay unchanged.

    Args:
        where: the endpoint, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # A bare TimeoutError means that a limit of the caller was exceeded.
        if not isinstance(error, Exception) or isinstance(error, RewardKitError) or type(error) is TimeoutError:
            return
        if (fault := client_error(error, self._where)) is not None:
            raise fault from error


def _status(source: Any) -> int:
    """Return the HTTP status of an error or a response, or 0 if it has none."""
    values = (getattr(source, name, None) for name in ("status_code", "status", "code"))
    return next((value for value in values if type(value) is int and 400 <= value < 600), 0)


def _retry_after(source: Any) -> float | None:
    headers = getattr(source, "headers", None)
    return parse_retry_after(headers) if isinstance(headers, Mapping | Message) else None
