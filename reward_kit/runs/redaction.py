"""Redaction of secrets, and of any text that the task's hook hides, in the files of a run.

The hook is a function that maps a string to a string and is set by `redact:` in the task file. It is applied to all
strings of a record before the record is written. A resumed run or a later rescoring therefore also uses the redacted
strings.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from reward_kit.display_text import SECRET_NAME
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.errors import ConfigError, RewardKitError, StoreError, boundary, type_name
from reward_kit.loading import load_object
from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import configured_variables, read_dotenv

HIDDEN = "(hidden)"
_JOINS = (
    *("rollout_id", "sample_id", "group_id", "policy", "stop_reason", "start", "final_state"),
    *("scorer", "scored_group"),
)
# The encoding of a string with lone surrogates; see `episodes/json_codec.py`.
_WRAPPED_MARK = b'"__type__":"text"'
_WRAPPED = re.compile(rb'("__type__":"text","value":")([A-Za-z0-9+/=]*)"')
# RFC 3986, 3.2.1; an unescaped "@" in a password, which many programs accept, is allowed.
_PASSWORD_IN_URL = re.compile(r"://[^\s/?#:@]*:([^\s/?#]+)@")
_SHORTEST_SECRET = 8  # shorter values would hide ordinary words


class Redaction:
    """The redaction of everything that a run writes.

    Args:
        secrets: strings to hide; those shorter than 8 characters are ignored.
        hook: a function from string to string that is applied to every string of a record.
    """

    def __init__(self, secrets: Iterable[str] = (), hook: Callable[[str], str] | None = None) -> None:
        found = {text.strip() for text in secrets}  # stripped as in HTTP headers
        self._secrets = sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)
        # The forms of a secret inside JSON text and, as bytes, in copied files.
        self._escaped = [(json.dumps(text)[1:-1]).encode("ascii") for text in self._secrets]
        self._encoded = [text.encode("utf-8", "surrogatepass") for text in self._secrets]
        self._hook = hook

    def redact_record(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply the hook to the strings of a record, except keys and the ids that are used to join records."""
        if self._hook is None:
            return record
        return {key: value if key in _JOINS else self._hooked(value) for key, value in record.items()}

    def redact_line(self, line: bytes) -> bytes:
        """Hide secrets in a line of ASCII JSON."""
        for secret in self._escaped:
            if secret in line:
                line = line.replace(secret, HIDDEN.encode())
        if self._secrets and _WRAPPED_MARK in line:

            def hidden(match: re.Match[bytes]) -> bytes:
                return match[1] + base64.b64encode(self.redact_bytes(base64.b64decode(match[2]))) + b'"'

            line = _WRAPPED.sub(hidden, line)
        return line

    def redact_bytes(self, data: bytes) -> bytes:
        """Hide secrets in the content of a file."""
        for secret in (*self._encoded, *self._escaped):
            data = data.replace(secret, HIDDEN.encode())
        return data

    def redact_text(self, text: str) -> str:
        """Hide secrets in a string."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def redact_all(self, text: str) -> str:
        """Apply the hook to a string, and hide secrets in the result."""
        return self.redact_text(self._hooked(text))

    def _hooked(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.get("__type__") == "text":
                return to_json_value(self._hooked(base64.b64decode(value["value"]).decode("utf-8", "surrogatepass")))
            return {key: self._hooked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hooked(item) for item in value]
        if not isinstance(value, str) or self._hook is None:
            return value
        try:
            with boundary(StoreError, "the task's redact function"):
                result = self._hook(value)
        except RewardKitError as error:
            raise StoreError(f"{error}; nothing was written, because the redaction failed") from error
        if not isinstance(result, str):
            raise StoreError(f"the task's redact function returned {type(result).__name__}, not a string")
        return result


def without_secrets(value: Any) -> Any:
    """Return `value` with the values of secret-looking keys hidden."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if SECRET_NAME.search(str(key)) and not isinstance(item, Mapping) and item is not None
            else without_secrets(item)
            for key, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def is_hidden(value: Any) -> bool:
    """Return True if a string, or a string in a list, contains a hidden secret."""
    return HIDDEN in value if isinstance(value, str) else isinstance(value, list) and any(map(is_hidden, value))


def without_hidden(value: Any) -> Any:
    """Return `value` without the entries, at any depth, that contain a hidden secret."""
    if isinstance(value, Mapping):
        return {key: without_hidden(item) for key, item in value.items() if not is_hidden(item)}
    return [without_hidden(item) for item in value] if isinstance(value, list) else value


def hidden_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of the entries that `without_hidden` drops; `key` is the prefix."""
    if is_hidden(value):
        yield key
    for name, item in value.items() if isinstance(value, Mapping) else ():
        yield from hidden_keys(item, f"{key}.{name}" if key else str(name))


def known_secrets(*configurations: Any) -> Iterator[str]:
    """Yield the secrets in the environment, in `.env`, and in configuration values whose keys look secret.

    Passwords in URLs (`scheme://user:password@host`) are included both as written and decoded. The values of variables
    that a configuration names in `api_key_env`, `headers_env` or `pass_env`, or that REWARD_KIT_KEY_ORIGINS lists, are
    also included.
    """
    dotenv = read_dotenv(Path.cwd())
    for variables in (dotenv, os.environ):
        yield from _secrets_in(variables)
    named = {*_variables_in(configurations), *configured_variables(os.environ)}
    for value in (variables[name] for variables in (dotenv, os.environ) for name in named & variables.keys()):
        if (
            not value.startswith(os.sep) or not Path(value).exists()
        ):  # `pass_env` may name a variable that is not secret
            yield value
            yield from value.split()[1:2]  # the key of "Bearer KEY"
    for configuration in configurations:
        yield from _secrets_in(configuration)


def _variables_in(value: Any) -> Iterator[str]:
    """Yield the environment variables that a configuration names for keys, headers or child processes."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            kind = str(key).rpartition(".")[2]  # the keys of overrides are dotted
            if kind == "api_key_env":
                yield from (item,) if isinstance(item, str) else ()
            elif kind == "pass_env":
                yield from (name for name in item if isinstance(name, str)) if isinstance(item, list | tuple) else ()
            elif kind == "headers_env" or ".headers_env." in f".{key}":
                names = item.values() if isinstance(item, Mapping) else (item,)
                yield from (name for name in names if isinstance(name, str))
            else:
                yield from _variables_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _variables_in(item)


def _secrets_in(value: Any, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, is_secret or bool(SECRET_NAME.search(str(key))))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets_in(item, is_secret)
    elif isinstance(value, str):
        for password in _PASSWORD_IN_URL.findall(value):
            yield from {password, unquote(password)}
        if is_secret and not Path(value).is_absolute():  # such as PASSWORD_STORE_DIR
            yield value


def load_redaction(definition: TaskDefinitionModel, folder: Path) -> Redaction:
    """Create a run's redaction from the secrets of this process and the task's hook."""
    return Redaction(known_secrets(definition.model_dump(mode="json")), load_hook(definition.redact, folder))


def load_hook(location: str | None, folder: Path) -> Callable[[str], str] | None:
    """Load the function that is set by `redact:` in a task."""
    if location is None:
        return None
    hook = load_object(location, folder)
    if not callable(hook):
        raise ConfigError(f"{location} is {type_name(hook)}, not a function from string to string")
    return hook  # type: ignore[no-any-return]
