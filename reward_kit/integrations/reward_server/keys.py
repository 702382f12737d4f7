"""The keys of a reward server: where they come from, and whether a request has one of them."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from reward_kit.errors import ConfigError, why_unreadable
from reward_kit.providers.keys import read_dotenv

VARIABLE = "REWARD_KIT_SERVE_API_KEY"
"""The environment variable that holds a server's key."""
_SHORTEST = 16


class Keys:
    """Tells whether a request has a key.

    Args:
        keys: any of which lets a request in.

    Raises:
        ConfigError: there is none, or one of them is too short or cannot stand in a header.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        texts = list(dict.fromkeys(keys))
        if not texts:
            raise ConfigError("a reward server needs a key, such as secrets.token_urlsafe(32) makes")
        for number, text in enumerate(texts, 1):
            check_key(text, f"key {number}")
        self._digests = [_digest(text) for text in texts]

    def number_of(self, authorization: Sequence[str]) -> int:
        """Which key the `Authorization` headers of a request hold, from 1; 0 where they hold none.

        It takes as long for a key that is nearly right as for any other.
        """
        given = authorization[0] if len(authorization) == 1 else ""
        scheme, _, token = given.partition(" ")
        digest = _digest(token.strip() if scheme.lower() == "bearer" else "")
        found = 0
        for number, known in enumerate(self._digests, 1):
            found = number if hmac.compare_digest(digest, known) else found
        return found


def _digest(text: str) -> bytes:
    """Of one length, whatever the length of the text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def check_key(key: str, where: str) -> None:
    """Refuse what could be guessed or sent by nobody. No message shows it.

    Raises:
        ConfigError: it is too short, or holds a character that no header can carry.
    """
    if len(key) < _SHORTEST:
        raise ConfigError(f"{where} has {len(key)} characters; a key has at least {_SHORTEST}, better 43 random ones")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} holds a blank or a character that no HTTP header can carry")


def found_keys(file: Path | None) -> tuple[list[str], str]:
    """The keys that were given, and what is worth saying of their file; [] where none were.

    Args:
        file: has one on each line; lines that begin with # are not read. None for that of the environment or `.env`.

    Raises:
        ConfigError: the file cannot be read or has no key.
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
        raise ConfigError(f"--api-key-file {file}: {why_unreadable(file, error)}") from error
    keys = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    keys = {number: key for number, key in keys.items() if not key.startswith("#")}
    for number, key in keys.items():
        check_key(key, f"--api-key-file {file}:{number}: the key")
    if not keys:
        raise ConfigError(f"--api-key-file {file} has no key; write one on each line")
    is_open = bool(mode & (stat.S_IRGRP | stat.S_IROTH))
    return list(keys.values()), f"{file} can be read by others on this machine: chmod 600 {file}" if is_open else ""


def new_key() -> str:
    """256 bits that nobody guesses."""
    return secrets.token_urlsafe(32)
