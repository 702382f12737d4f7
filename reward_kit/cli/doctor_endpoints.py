"""Which model endpoints answer, asked as cheaply as can be: one GET of `/models` each, which no endpoint charges for.

A key goes to the origins that it is configured for (`providers/keys.py`), and nowhere else: not to another one that is
tried, and not after a redirect. No key is ever part of what is shown.
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

from reward_kit.display_text import counted, shown
from reward_kit.errors import ConfigError
from reward_kit.providers.keys import (
    PROVIDERS,
    EndpointSettings,
    key_variable,
    listed_origins,
    origins_of,
    read_dotenv,
    resolve_endpoint,
)
from reward_kit.safe_input import MODEL_LIST_BYTES, read_beginning

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
    given = [resolve_endpoint(url, None, key_variable(url), needs_key=False) for url in base_urls]
    named = [own, *given] if isinstance(own, EndpointSettings) else given
    once = [one for place, one in enumerate(named) if one.base_url not in {other.base_url for other in named[:place]}]
    answers = await asyncio.gather(*map(_ask, once))
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


def keys_set() -> list[dict[str, Any]]:
    """The variables that hold a key and are set, where they are, and which origins each may go to; no value.

    Raises:
        ConfigError: REWARD_KIT_KEY_ORIGINS is wrong.
    """
    dotenv = {name: value for name, value in read_dotenv(Path.cwd()).items() if value}
    shell = {name: value for name, value in os.environ.items() if value}
    found = []
    for name in sorted({*PROVIDERS, *listed_origins(shell)} & {*dotenv, *shell}):
        source, beside = ("environment", shell) if name in shell else (".env", {**dotenv, **shell})
        found.append({"variable": name, "source": source, "origins": sorted(origins_of(name, shell, beside))})
    return found


async def _ask(endpoint: EndpointSettings) -> Answer:
    import aiohttp

    url, key = endpoint.base_url, endpoint.api_key
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
            return _of_status(url, response, body, seconds, endpoint.no_key)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Answer(url, *_of_error(error))


def _of_status(url: str, response: aiohttp.ClientResponse, body: bytes, seconds: float, no_key: str) -> Answer:
    status = response.status
    if status == 200:
        return _of_models(url, body, seconds)
    if status in (401, 403):
        what = f"wants a key, and none was sent: {no_key}" if no_key else f"does not accept the key of {_KEY}"
        return Answer(url, "unauthorised", f"unauthorised (HTTP {status}): it {what}", seconds)
    if status == 404:
        return Answer(url, "not_found", "not found (HTTP 404): nothing at /models; does the URL end in /v1?", seconds)
    if 300 <= status < 400:
        host = shown(urlsplit(response.headers.get("Location", "")).hostname or "elsewhere", 100)
        return Answer(url, "redirected", f"redirects to {host} (HTTP {status}): name that URL instead", seconds)
    reason = shown(response.reason or "", 60)
    return Answer(url, "failing", f"is there and fails: HTTP {status} {reason}".rstrip(), seconds)


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
