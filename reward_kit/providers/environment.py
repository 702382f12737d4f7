"""Where the endpoint is and which key opens it: what was said explicitly, then the environment, then `.env`.

The key is kept out of every repr and message. `.env` is the nearest one in the working directory or above it; it never
overrides a variable that is already set, and it is read, not exported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from reward_kit.errors import ConfigError

OPENAI_BASE_URL = "https://api.openai.com/v1"


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """A base URL such as "http://127.0.0.1:8000/v1", and the key for it, None where it needs none."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)


def resolve_endpoint(
    base_url: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    *,
    needs_key: bool = True,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> EndpointSettings:
    """The endpoint to talk to.

    Args:
        base_url: by default OPENAI_BASE_URL, else OpenAI's own.
        api_key: by default the value of `api_key_env`, else of OPENAI_API_KEY.
        api_key_env: name of the variable that holds the key; naming it makes the key required.
        needs_key: a replay needs none.
        environ: by default the process's environment.
        folder: where the search for `.env` begins, by default the working directory.

    Raises:
        ConfigError: a key is required and there is none, or a value cannot be used.
    """
    for name, value in (("base_url", base_url), ("api_key", api_key), ("api_key_env", api_key_env)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name}: expected text, got a value of type {type(value).__name__}")
    variables = {**read_dotenv(folder or Path.cwd()), **_set_ones(os.environ if environ is None else environ)}
    url = base_url or variables.get("OPENAI_BASE_URL") or OPENAI_BASE_URL
    key_name = api_key_env or "OPENAI_API_KEY"
    key = (api_key or variables.get(key_name, "")).strip()
    if needs_key and not key and (api_key_env or url.rstrip("/") == OPENAI_BASE_URL):
        raise ConfigError(
            f"no API key for {url}: set {key_name} in the environment or in a .env file, or point base_url "
            "(OPENAI_BASE_URL) at an endpoint that needs none"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key for {url} ({key_name}) holds characters that no HTTP header can carry")
    return EndpointSettings(_checked_url(url), key or None)


def _set_ones(variables: Mapping[str, str]) -> dict[str, str]:
    """Without the empty ones: `OPENAI_API_KEY= command` means unset."""
    return {name: value for name, value in variables.items() if value}


def _checked_url(url: str) -> str:
    """`url`, without a slash at its end. A URL that may hold a credential is refused without being shown."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise ConfigError(f"base_url {url!r} is no URL; it looks like http://127.0.0.1:8000/v1")
    if "@" in rest.partition("/")[0]:
        raise ConfigError("base_url holds a user name or password; give the credential as api_key instead")
    if "?" in rest or "#" in rest:
        raise ConfigError("base_url holds a query or fragment; nothing may follow its path, such as /v1")
    try:
        _ = urlsplit(url).port  # both refuse what nobody can connect to, such as port 99999
    except ValueError as error:
        raise ConfigError(f"base_url {url!r} is no URL: {error}") from None
    return url.rstrip("/")


def read_dotenv(folder: Path) -> dict[str, str]:
    """The variables of the nearest `.env` in `folder` or above it; {} where there is none or it cannot be read."""
    for place in (folder, *folder.parents):
        try:
            text = (place / ".env").read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            continue
        return dict(pair for line in text.splitlines() if (pair := _dotenv_pair(line)))
    return {}


def _dotenv_pair(line: str) -> tuple[str, str] | None:
    name, separator, value = line.strip().removeprefix("export ").partition("=")
    name, value = name.strip(), value.strip()
    if not separator or not name.isidentifier():
        return None
    quote = value[:1]
    if quote in ("'", '"') and quote in value[1:]:
        return name, value[1 : value.index(quote, 1)]
    return name, value.partition(" #")[0].rstrip()
