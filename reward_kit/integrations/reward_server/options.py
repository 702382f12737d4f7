"""The options and the keys of a reward server, and its error responses."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from aiohttp import web

from reward_kit.errors import ConfigError, RewardKitError, describe_read_error
from reward_kit.providers.keys import read_dotenv
from reward_kit.validation import check_positive

VARIABLE = "REWARD_KIT_SERVE_API_KEY"
"""The environment variable that contains the key of a server."""
_SHORTEST_KEY = 16
MIB = 2**20
AT_LEAST = (("max_pending", "max_batch"), ("max_held_mb", "max_body_mb"))
"""Pairs of fields of `ServerOptions`. The second field of a pair must not exceed the first."""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "reward-kit"}


class Keys:
    """A server's keys. Each request needs one of them.

    Raises:
        ConfigError: If there are no keys, or if a key is too short or cannot be sent in a header.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        texts = list(dict.fromkeys(keys))
        if not texts:
            raise ConfigError("a reward server needs a key, such as the output of secrets.token_urlsafe(32)")
        for number, text in enumerate(texts, 1):
            check_key(text, f"key {number}")
        self._digests = [_digest(text) for text in texts]

    def number_of(self, authorization: Sequence[str]) -> int:
        """Return the number of the key in the `Authorization` headers, counted from 1. If no key is valid, return 0.

        The comparison takes constant time, so its duration reveals nothing about the keys.
        """
        scheme, _, token = (authorization[0] if len(authorization) == 1 else "").partition(" ")
        digest = _digest(token.strip() if scheme.lower() == "bearer" else "")
        match = 0
        for number, known in enumerate(self._digests, 1):
            match = number if hmac.compare_digest(digest, known) else match
        return match


def _digest(text: str) -> bytes:
    """Hash a key, so that all compared values have the same length."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def check_key(key: str, where: str) -> None:
    """Raise an error if a key is too short or cannot be sent in a header. The message does not contain the key."""
    if len(key) < _SHORTEST_KEY:
        raise ConfigError(
            f"{where} has {len(key)} characters; a key must have at least {_SHORTEST_KEY} characters, "
            "preferably 43 random characters"
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} contains a space or a character that is invalid in HTTP headers")


def read_keys(file: Path | None) -> tuple[list[str], str]:
    """Return the configured keys (possibly none), and a warning about the key file or "".

    The file contains one key per line. Lines that start with # are ignored. Without a file, the key is read from
    the environment or, if it is not set there, from `.env`.

    Raises:
        ConfigError: If the file cannot be read or contains no key.
    """
    if file is None:
        key = (os.environ.get(VARIABLE) or read_dotenv(Path.cwd()).get(VARIABLE, "")).strip()
        if key:
            check_key(key, VARIABLE)
        return [key] if key else [], ""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {describe_read_error(file, error)}") from error
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    for number, key in keys.items():
        check_key(key, f"--api-key-file {file}:{number}: the key")
    if not keys:
        raise ConfigError(f"--api-key-file {file} contains no key; write one key per line")
    is_open = bool(mode & (stat.S_IRGRP | stat.S_IROTH))
    return list(
        keys.values()
    ), f"{file} can be read by other users of this machine; run chmod 600 {file}" if is_open else ""


def new_key() -> str:
    """Return a random key of 256 bits."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The address and the limits of a reward server.

    Attributes:
        host: the address to listen on.
        port: the port to listen on. If 0, a free port is selected.
        max_concurrency: the maximum number of concurrent calls to each reward. For a sandboxed reward, there is at most
            one call per CPU.
        max_pending: for each reward, the maximum number of rollouts that are accepted but not answered. Further
            requests are rejected.
        max_batch: the maximum number of rollouts in a request.
        max_messages: the maximum number of messages in a rollout.
        max_body_mb: the maximum size of a request body in MiB.
        max_held_mb: the maximum total size of all request bodies in memory in MiB. Parsed values take more memory.
        max_connections: the maximum number of open connections.
        deadline_s: the time limit of a reward call in seconds.
        head_timeout_s: the time limit in seconds for the head of the first request on a connection.
        body_timeout_s: the time limit in seconds for a request body.
        shutdown_timeout_s: the time limit in seconds for pending requests at shutdown.

    Raises:
        ConfigError: If a number is out of range, or if the limits would never allow a batch.
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
                check_positive(field.name, getattr(self, field.name), is_integer=field.type == "int")
        for larger, smaller in AT_LEAST:
            if getattr(self, smaller) > getattr(self, larger):
                raise ConfigError(
                    f"{smaller} must be at most {larger}, which is {getattr(self, larger):g}; raise {larger} too"
                )


class RefusedError(RewardKitError):
    """Raised if a request is rejected. It has a code for programs and a message for people.

    If `closes` is true, the connection is closed afterwards, for example because the body was not read.
    """

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers, self.closes = status, code, headers or {}, closes

    def response(self) -> web.Response:
        response = json_response({"error": {"code": self.code, "message": str(self)}}, self.status, self.headers)
        if self.closes:
            response.force_close()
        return response


def busy(message: str, wait_s: float) -> RefusedError:
    """Return the error for an overloaded server. The client may retry after `wait_s` seconds, rounded up."""
    return RefusedError(429, "too_many", message, {"Retry-After": str(math.ceil(max(1.0, wait_s)))}, closes=True)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON response. Lone surrogates, which UTF-8 cannot encode, become question marks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return plain_response(text.encode("utf-8", "replace"), "application/json", status, headers)


def plain_response(
    body: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a response that must not be cached."""
    return web.Response(body=body, status=status, headers={**_HEADERS, "Content-Type": content_type, **(headers or {})})
