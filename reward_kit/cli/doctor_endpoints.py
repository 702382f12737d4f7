"""Which model endpoints answer, asked as cheaply as can be: one GET of `/models` each, which no endpoint charges for.

A key goes to the endpoint that the environment names it for, and nowhere else: not to another one that is tried, and
not after a redirect. No key is ever part of what is told.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reward_kit.errors import ConfigError
from reward_kit.input_limits import MODEL_LIST_BYTES, read_beginning
from reward_kit.providers.environment import EndpointSettings, read_dotenv, resolve_endpoint
from reward_kit.shown_text import counted, shown

if TYPE_CHECKING:
    import aiohttp

_PATIENCE_S = 10.0
_KEY, _URL = "OPENAI_API_KEY", "OPENAI_BASE_URL"
NONE_NAMED = f"none named: set {_KEY}, and {_URL} for a server of your own, or try one with --base-url URL"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of asking one endpoint.

    Attributes:
        base_url: of the endpoint.
        outcome: "ok", or the kind of trouble in one word.
        told: the same in words, with what to do about it.
        seconds: until all of the answer was there; None where none came.
        models: how many it offers; None where it does not say.
    """

    base_url: str
    outcome: str
    told: str
    seconds: float | None = None
    models: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


async def asked(base_urls: Sequence[str]) -> list[Answer]:
    """Ask the endpoint of the environment, where it names one, and those that are given, all at once.

    Args:
        base_urls: such as "http://127.0.0.1:8000/v1".

    Raises:
        ConfigError: one of them is no URL.
    """
    own = _of_the_environment()
    given = [resolve_endpoint(url, needs_key=False) for url in base_urls]
    keys = {_origin(own.base_url): own.api_key} if isinstance(own, EndpointSettings) else {}
    endpoints = {one.base_url: keys.get(_origin(one.base_url)) for one in given}
    if isinstance(own, EndpointSettings):
        endpoints = {own.base_url: own.api_key, **endpoints}
    answers = await asyncio.gather(*(_ask(url, key) for url, key in endpoints.items()))
    return [own, *answers] if isinstance(own, Answer) else answers


def _of_the_environment() -> EndpointSettings | Answer | None:
    """The endpoint and its key; None where none is named; what is wrong with it where it cannot be asked."""
    named_in_file = read_dotenv(Path.cwd())
    if not any(os.environ.get(name) or named_in_file.get(name) for name in (_KEY, _URL)):
        return None
    try:
        return resolve_endpoint(needs_key=False)
    except ConfigError as error:
        return Answer(f"${_URL}", "misconfigured", str(error))


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


async def _ask(url: str, key: str | None) -> Answer:
    import aiohttp

    headers = {"User-Agent": "reward-kit"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limit = aiohttp.ClientTimeout(total=_PATIENCE_S)
    started = time.perf_counter()
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar(), headers=headers) as session,
            session.get(f"{url}/models", allow_redirects=False) as response,
        ):
            body = await read_beginning(response, MODEL_LIST_BYTES) if response.status == 200 else b""
            seconds = time.perf_counter() - started
            return _of_status(url, response, body, seconds, has_key=key is not None)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(url, *_of_error(error))


def _of_status(url: str, response: aiohttp.ClientResponse, body: bytes, seconds: float, *, has_key: bool) -> Answer:
    status = response.status
    if status == 200:
        return _of_models(url, body, seconds)
    if status in (401, 403):
        what = f"does not accept the key of {_KEY}" if has_key else f"wants a key, and none was sent: {_no_key()}"
        return Answer(url, "unauthorised", f"unauthorised (HTTP {status}): it {what}", seconds)
    if status == 404:
        return Answer(url, "not_found", "not found (HTTP 404): nothing at /models; does the URL end in /v1?", seconds)
    if 300 <= status < 400:
        host = shown(urlsplit(response.headers.get("Location", "")).hostname or "elsewhere", 100)
        return Answer(url, "redirected", f"redirects to {host} (HTTP {status}): name that URL instead", seconds)
    reason = shown(response.reason or "", 60)
    return Answer(url, "failing", f"is there and fails: HTTP {status} {reason}".rstrip(), seconds)


def _no_key() -> str:
    return f"{_KEY} goes to {_URL} alone; name this one there to send it"


def _of_models(url: str, body: bytes, seconds: float) -> Answer:
    try:
        models = len(json.loads(body)["data"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Answer(url, "foreign", "answers, and not as OpenAI's API does: does the URL end in /v1?", seconds)
    return Answer(url, "ok", f"answers, {counted(models, 'model')}", seconds, models)


def _of_error(error: Exception) -> tuple[str, str]:
    """The word and the words for an error of aiohttp's; those have no secret in them, but none is shown either."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "unknown_host", "unknown host: its name has no address (DNS); is it misspelt, or the network away?"
    if isinstance(error, aiohttp.ClientSSLError):
        return "untrusted", "no secure connection comes about (TLS): is its certificate accepted, is it not http://?"
    if isinstance(error, TimeoutError):
        return "silent", f"silent: no answer within {_PATIENCE_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionRefusedError):
            return "refused", "refused: nothing listens there; is the server running?"
        return "unreachable", f"unreachable: {error.os_error.strerror or 'no connection comes about'}"
    return "broken", f"broken: it does not speak HTTP as expected ({type(error).__name__})"
