"""Which key may go to which server.

A key goes only to the origins (scheme, host, port) that it was configured for. A task file, a train file or a `.env`
names servers and variables, and configures nothing: both may have come from somebody else. An origin of a variable is

1. the provider's own, from `PROVIDERS`; for OPENAI_API_KEY that of OPENAI_BASE_URL, if it is set beside the key;
2. each one that REWARD_KIT_KEY_ORIGINS pairs with it, which is read from the process's environment alone.

What is typed (`--base-url`, `-T policy.base_url=…`) or written in Python is the user's own choice and is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from reward_kit.errors import ConfigError

OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "OPENAI_BASE_URL"
ORIGINS_VARIABLE = "REWARD_KIT_KEY_ORIGINS"
"""The environment variable that allows further variables and origins: `MY_KEY=https://llm.example OTHER_KEY=…`."""

PROVIDERS: Mapping[str, str] = {
    "ANTHROPIC_API_KEY": "https://api.anthropic.com",
    "CEREBRAS_API_KEY": "https://api.cerebras.ai",
    "DEEPSEEK_API_KEY": "https://api.deepseek.com",
    "FIREWORKS_API_KEY": "https://api.fireworks.ai",
    "GEMINI_API_KEY": "https://generativelanguage.googleapis.com",
    "GROQ_API_KEY": "https://api.groq.com",
    "HF_TOKEN": "https://router.huggingface.co",
    "MISTRAL_API_KEY": "https://api.mistral.ai",
    OPENAI_KEY: "https://api.openai.com",
    "OPENROUTER_API_KEY": "https://openrouter.ai",
    "TOGETHER_API_KEY": "https://api.together.xyz",
    "XAI_API_KEY": "https://api.x.ai",
}
"""The variable that each provider's documentation names for its key, and the origin of its OpenAI-compatible API."""

_USUAL_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # others may be read as another host by whoever connects
_SAME_AS = {"ws": "http", "wss": "https"}


def origin_of(url: str) -> str:
    """Return the scheme, host and port of a URL, without the usual port; `ws` counts as `http`, `wss` as `https`.

    Raises:
        ValueError: the URL has none.
    """
    parts = urlsplit(url)
    scheme = _SAME_AS.get(parts.scheme, parts.scheme)
    name = parts.hostname or ""
    if scheme not in _USUAL_PORTS or not _HOST.fullmatch(name):
        raise ValueError(f"{url!r} has no origin: it needs http or https, and a host in ASCII")
    host = f"[{name}]" if ":" in name else name
    is_usual = parts.port in (None, _USUAL_PORTS[scheme])
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}:{parts.port}"


def listed_origins(shell: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return the origins that REWARD_KIT_KEY_ORIGINS allows, by variable.

    Args:
        shell: the process's environment.

    Raises:
        ConfigError: an entry is not a variable and an origin.
    """
    found: dict[str, frozenset[str]] = {}
    for entry in re.split(r"[\s,]+", shell.get(ORIGINS_VARIABLE, "").strip()):
        name, separator, url = entry.partition("=")
        if not entry:
            continue
        try:
            if not separator or not name.isidentifier():
                raise ValueError
            found[name] = found.get(name, frozenset()) | {origin_of(url)}
        except ValueError:
            shown = f"{name}=…" if separator and name.isidentifier() else "an entry"  # the rest may be a key itself
            raise ConfigError(
                f"{ORIGINS_VARIABLE}: {shown} is not a variable and an origin, such as MY_KEY=https://llm.example"
            ) from None
    return found


def listed_variables(shell: Mapping[str, str]) -> set[str]:
    """Return the variables that REWARD_KIT_KEY_ORIGINS names, also if it is wrong elsewhere."""
    entries = re.split(r"[\s,]+", shell.get(ORIGINS_VARIABLE, ""))
    return {entry.partition("=")[0] for entry in entries if "=" in entry}


def is_allowed(name: str, shell: Mapping[str, str]) -> bool:
    """Return whether a file may name this variable at all: it is a provider's, or the user listed it."""
    return name in PROVIDERS or name in listed_origins(shell)


def origins_of(name: str, shell: Mapping[str, str], beside: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the origins that a variable is configured for.

    Args:
        name: of the variable that holds the key.
        shell: the process's environment.
        beside: the variables beside the key, by default `shell`: an OPENAI_BASE_URL among them replaces OpenAI's own
            origin, since the key is that server's.
    """
    own = PROVIDERS.get(name)
    if name == OPENAI_KEY and (url := (shell if beside is None else beside).get(OPENAI_URL)):
        try:
            own = origin_of(url)
        except ValueError:
            own = None  # told where the URL is used
    return listed_origins(shell).get(name, frozenset()) | ({own} if own else frozenset())


def is_configured(name: str, url: str, shell: Mapping[str, str], beside: Mapping[str, str] | None = None) -> bool:
    """Return whether a variable may go to a URL; not if that has no origin.

    Args:
        name: of the variable.
        url: where its value would go.
        shell: the process's environment.
        beside: as for `origins_of`.
    """
    try:
        return origin_of(url) in origins_of(name, shell, beside)
    except ValueError:
        return False


def how_to_allow(name: str, origin: str, shell: Mapping[str, str]) -> str:
    """Return the command that allows an origin for a variable, beside what is allowed already."""
    before = f"${ORIGINS_VARIABLE} " if shell.get(ORIGINS_VARIABLE, "").strip() else ""
    return f'export {ORIGINS_VARIABLE}="{before}{name}={origin}"'


def check_allowed(name: str, url: str, shell: Mapping[str, str], beside: Mapping[str, str] | None = None) -> None:
    """Refuse to send a variable to a URL that it is not configured for.

    Args:
        name: of the variable.
        url: where its value would go.
        shell: the process's environment.
        beside: as for `origins_of`.

    Raises:
        ConfigError: it is not; the message has the command that allows it.
    """
    try:
        origin = origin_of(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if origin not in origins_of(name, shell, beside):
        raise ConfigError(
            f"{name} is not configured for {origin}, and a file alone cannot send it there; if you trust that server "
            f"with it: {how_to_allow(name, origin, shell)}"
        )
