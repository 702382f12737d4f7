"""Requests to a reward server: each a few attempts, every way of failing told apart, nothing believed of an answer."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from reward_kit.errors import ConfigError, DeadlineError, ProviderError
from reward_kit.providers.faults import TransientError, UnreachableError, excerpt, status_error
from reward_kit.providers.keys import check_allowed, read_dotenv
from reward_kit.providers.request_queue import RetryPolicy, with_retries
from reward_kit.safe_input import REWARD_ANSWER_BYTES, TooLargeError, read_body, read_strictly
from reward_kit.validation import check_number

if TYPE_CHECKING:
    import aiohttp

KEY_VARIABLE = "REWARD_KIT_REWARD_API_KEY"
"""The environment variable that holds the key for rewards behind HTTP."""

_ADDRESS = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?/v1/rewards/[A-Za-z0-9._-]+\Z")
_EXAMPLE = "http://127.0.0.1:8700/v1/rewards/exact"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REFUSED = frozenset({400, 404, 405, 406, 411, 413, 414, 415, 422, 431})


def is_address(reference: str) -> bool:
    """Whether a reference to a reward is a URL."""
    return reference.startswith(("http://", "https://"))


def checked_address(url: str) -> str:
    """The URL of a reward, without a slash at its end.

    Raises:
        ConfigError: it is none; a URL that may hold a credential is not shown.
    """
    if "@" in url:
        raise ConfigError(f"the URL of a reward holds no user name and no password; set {KEY_VARIABLE} instead")
    found = url.rstrip("/")
    try:
        is_right = bool(_ADDRESS.match(found)) and urlsplit(found).port != 0
    except ValueError:
        is_right = False
    if not is_right:
        if found != (shown := re.split("[?#]", found)[0]):  # what follows may be a key too
            raise ConfigError(f"{shown + '…'!r} is no reward's address; nothing follows its path")
        near = found.removesuffix("/score").removesuffix("/score_batch")
        told = f"name {near}" if near != found and _ADDRESS.match(near) else "it looks like " + _EXAMPLE
        raise ConfigError(f"{url!r} is no reward's address; {told}")
    return found


def goes_unencrypted(url: str) -> bool:
    """Whether what is sent there can be read on the way."""
    return urlsplit(url).scheme == "http" and not _is_here(url)


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def check_named_by_file(url: str) -> None:
    """Refuse to send the key where a file alone says so: the file may be somebody else's (`providers/keys.py`).

    Raises:
        ConfigError: the key is not configured for that server.
    """
    url = checked_address(url)
    if _key():
        check_allowed(KEY_VARIABLE, url, os.environ)


def _key() -> str:
    """The key: of the environment, else of the nearest `.env`."""
    return (os.environ.get(KEY_VARIABLE) or read_dotenv(Path.cwd()).get(KEY_VARIABLE, "")).strip()


def key_for(url: str, api_key: str | None = None) -> str:
    """The key for a server: as given, else of the environment, else of the nearest `.env`.

    Raises:
        ConfigError: there is none, or no HTTP header can carry it.
    """
    key = (api_key or _key()).strip()
    if not key:
        raise ConfigError(f"no key for {url}: set {KEY_VARIABLE} in the environment or in a .env file")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"the key for {url} ({KEY_VARIABLE}) holds characters that no HTTP header can carry")
    return key


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a reward server, and how often to ask it.

    Attributes:
        timeout_s: for one attempt, from its begin to the last byte of the answer.
        connect_timeout_s: for a connection.
        policy: attempts, where the server could not be reached or wants less or failed (408, 409, 429, 500, 502 to
            504), and the waits between them: on top of what it asks for with Retry-After. An attempt that took
            `timeout_s` is not made again.

    Raises:
        ConfigError: a time is no positive number.
    """

    timeout_s: float = 660.0
    connect_timeout_s: float = 10.0
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s)
        check_number("connect_timeout_s", self.connect_timeout_s)
        check_number("max_attempts", self.policy.max_attempts, whole=True)
        check_number("budget_s", self.policy.budget_s)


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class RewardEndpoint:
    """One reward's address, asked over kept-alive connections. Use it as an async context manager.

    Args:
        url: as `checked_address` gives it.
        key: sent with each request, and shown in no message.
        patience: timeouts and attempts.
    """

    def __init__(self, url: str, key: str, patience: Patience) -> None:
        self.url = url
        self._key, self._patience = key, patience
        self._jitter = random.Random()
        self._session: aiohttp.ClientSession | None = None

    def another(self) -> RewardEndpoint:
        """One with connections of its own."""
        return RewardEndpoint(self.url, self._key, self._patience)

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # How many are in flight is up to the reward agent.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=self._patience.timeout_s, sock_connect=self._patience.connect_timeout_s
            ),
            # Compressed, a small answer could be of any size.
            headers={"Authorization": f"Bearer {self._key}", "Accept-Encoding": "identity", "User-Agent": "reward-kit"},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self) -> Any:
        """What the server says of the reward. Raises as `post`."""
        return await self._asked("GET", self.url, None)

    async def post(self, action: str, body: bytes) -> Any:
        """What it answers to a JSON body.

        Args:
            action: "score" or "score_batch".
            body: JSON.

        Raises:
            ConfigError: it refuses the request, or the key.
            ProviderError: it cannot be reached, is overloaded or answers something else, also when asked again.
            DeadlineError: it did not answer in time.
        """
        return await self._asked("POST", f"{self.url}/{action}", body)

    async def _asked(self, method: str, url: str, body: bytes | None) -> Any:
        async def attempt() -> Any:
            return self._value_of(await self._exchange(method, url, body), url)

        value, _ = await with_retries(attempt, self._patience.policy, self._jitter)
        return value

    async def _exchange(self, method: str, url: str, body: bytes | None) -> _Answer:
        import aiohttp

        assert self._session is not None, "it is used inside of its block"
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                return _Answer(response.status, response.headers, await read_body(response, REWARD_ANSWER_BYTES))
        except TooLargeError as error:
            raise ProviderError(f"{url}: the answer has more than {error}, which is the limit") from None
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachableError(f"{url}: no connection within {self._patience.connect_timeout_s:g} s") from error
        except TimeoutError as error:
            raise DeadlineError(f"{url} did not answer within timeout_s={self._patience.timeout_s:g}") from error
        except (aiohttp.InvalidURL, aiohttp.ClientSSLError) as error:
            raise ProviderError(f"{url} cannot be talked to: {self._told(error)}") from error
        except aiohttp.ClientConnectorError as error:
            raise UnreachableError(
                f"{url} refused the connection; is the server running? {error.os_error.strerror or error.os_error}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{url} dropped the connection: {self._told(error)}") from error

    def _told(self, error: Exception) -> str:
        return excerpt(str(error) or type(error).__name__, [self._key])

    def _value_of(self, answer: _Answer, url: str) -> Any:
        status, headers, body = answer
        if status == 200:
            try:
                return read_strictly(body)
            except (ValueError, RecursionError) as error:
                raise TransientError(f"{url} answered something that is not JSON: {self._told(error)}") from None
        if 300 <= status < 400:
            raise ConfigError(f"{url} redirects (HTTP {status}); name the address that it leads to")
        problem = status_error(status, headers, body, url, [self._key])
        if status in (401, 403):
            raise ConfigError(f"{problem}; is {KEY_VARIABLE} the server's key?")
        if status in _REFUSED:
            raise ConfigError(str(problem))
        raise problem
