"""JSON requests to a server that is not ours: what it does wrong is one `EnvironmentFailure` that names the address."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import anyio.to_thread

from reward_kit.errors import EnvironmentFailure
from reward_kit.safe_input import (
    ENVIRONMENT_ANSWER_BYTES,
    ENVIRONMENT_ANSWER_VALUES,
    TooLargeError,
    check_values,
    read_body,
    read_strictly,
)

_PARSED_IN_A_THREAD = 2**20
_EXCERPT = 200
# Shorter than any server's own: a connection that a server closes right now must not be used again.
_KEEP_ALIVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered.

    Attributes:
        source: method and address, for messages.
        value: the JSON value.
        refusal: why the request was refused (status 4xx with `{"error": …}`), None where it was not.
    """

    source: str
    value: Any
    refusal: str | None = None

    def fields(self) -> Mapping[str, Any]:
        """The value as an object.

        Raises:
            EnvironmentFailure: it is none, or the request was refused.
        """
        if self.refusal is not None:
            raise EnvironmentFailure(f"{self.source}: refused: {self.refusal}")
        if not isinstance(self.value, Mapping):
            raise self.wrong(f"expected a JSON object, got {json.dumps(self.value)[:_EXCERPT]}")
        return self.value

    def wrong(self, problem: str) -> EnvironmentFailure:
        """The failure of an answer that has another shape than it should."""
        return EnvironmentFailure(f"{self.source}: {problem}")


class JsonClient:
    """One world's connection to its server, made in the running loop.

    Args:
        base_url: what the endpoints' paths are appended to.
        headers: sent with every request.
        timeout: seconds for one answer.
        obituary: how a server of ours ended, "" where it runs; added to the message of a broken connection.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        timeout: float,
        obituary: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        import aiohttp

        self._base, self._timeout, self._obituary = base_url.rstrip("/"), timeout, obituary
        self._session = aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **headers},
            timeout=aiohttp.ClientTimeout(total=timeout),
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE_S),
        )

    async def get(self, endpoint: str) -> Answer:
        """GET an endpoint.

        Raises:
            EnvironmentFailure: no connection, no answer in time, status 3xx or 5xx, or an answer that is not JSON.
        """
        return await self._request("GET", endpoint, None)

    async def post(self, endpoint: str, body: Mapping[str, Any]) -> Answer:
        """POST a JSON object; raises as `get`."""
        return await self._request("POST", endpoint, json.dumps(body, allow_nan=False).encode())

    async def check_health(self, endpoint: str) -> None:
        """GET an endpoint whose status must be 2xx, whatever it says; raises as `get`."""
        source = f"GET {self._base}{endpoint}"
        status, body = await self._exchange(source, "GET", endpoint, None)
        if not 200 <= status < 300:
            raise EnvironmentFailure(f"{source}: status {status}: {_excerpt(body)}")

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _request(self, method: str, endpoint: str, data: bytes | None) -> Answer:
        source = f"{method} {self._base}{endpoint}"
        status, body = await self._exchange(source, method, endpoint, data)
        is_large = len(body) > _PARSED_IN_A_THREAD
        value, problem = await anyio.to_thread.run_sync(_parse, body) if is_large else _parse(body)
        if 200 <= status < 300:
            if problem:
                raise EnvironmentFailure(f"{source}: the answer is not JSON ({problem}): {_excerpt(body)}")
            return Answer(source, value)
        refusal = value.get("error") if isinstance(value, Mapping) else None
        if 400 <= status < 500 and isinstance(refusal, str):
            return Answer(source, value, refusal)
        raise EnvironmentFailure(f"{source}: status {status}: {_excerpt(body)}")

    async def _exchange(self, source: str, method: str, endpoint: str, data: bytes | None) -> tuple[int, bytes]:
        import aiohttp

        try:
            url = f"{self._base}{endpoint}"
            async with self._session.request(method, url, data=data, allow_redirects=False) as response:
                return response.status, await read_body(response, ENVIRONMENT_ANSWER_BYTES)
        except TooLargeError as error:
            raise EnvironmentFailure(f"{source}: the answer has more than {error}, which is the limit") from None
        except TimeoutError as error:
            await self._fail(f"{source}: no answer within {self._timeout:g} s", error)
        except (aiohttp.ClientError, OSError) as error:
            await self._fail(f"{source}: {type(error).__name__}: {error}".removesuffix(": "), error)

    async def _fail(self, problem: str, error: Exception) -> NoReturn:
        said = await self._obituary() if self._obituary is not None else ""
        raise EnvironmentFailure(f"{problem}{said}") from error


def _parse(body: bytes) -> tuple[Any, str]:
    """The JSON value, and why there is none."""
    try:
        check_values(body, ENVIRONMENT_ANSWER_VALUES)
        return read_strictly(body), ""
    except TooLargeError as error:
        return None, f"more than {error}, which is the limit"
    except (ValueError, RecursionError) as error:
        return None, str(error)


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * _EXCERPT].decode("utf-8", "replace").split())
    return text[:_EXCERPT] + ("…" if len(text) > _EXCERPT or len(body) > 4 * _EXCERPT else "") or "(empty)"
