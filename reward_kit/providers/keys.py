"""The choice of the endpoint, and the rules for which keys each server may receive.

A key is sent only to the origins (scheme, host and port) that are configured for it. A task file, a train file or
`.env` may name servers and variables. These files cannot configure origins, because they may be untrusted. The origins
of a variable are

1. the origin of the provider in `PROVIDERS`. For OPENAI_API_KEY, the origin of OPENAI_BASE_URL is used instead if that
   variable is set in the same place.
2. each origin that REWARD_KIT_KEY_ORIGINS lists for the variable. REWARD_KIT_KEY_ORIGINS is read only from the
   environment of the process.

Values that the user sets on the command line (`--base-url`, `-T policy.base_url=…`) or in Python are not checked. The
endpoint and its key are taken from the arguments, from the environment, or from the nearest `.env` in the working
directory or one of its parents, in this order. The values in `.env` are not exported. A key never appears in a repr or
a message.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from reward_kit.display_text import SECRET_NAME
from reward_kit.errors import ConfigError

OPENAI_KEY = "OPENAI_API_KEY"
OPENAI_URL = "OPENAI_BASE_URL"
ORIGINS_VARIABLE = "REWARD_KIT_KEY_ORIGINS"
"""The environment variable that allows additional variables and origins: `MY_KEY=https://llm.example OTHER_KEY=…`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The endpoint and the options for a provider named in `--model PROVIDER/NAME`.

    Attributes:
        base_url: the base URL. If it is None, OPENAI_BASE_URL is used, or OpenAI's URL if that variable is not set.
        api_key_env: the variable that contains the key. If it is "", no key is sent.
        options: other options of the policy.
    """

    base_url: str | None
    api_key_env: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a policy's options, completed with the options of the preset.

        If the policy sets a different base URL, the provider's key is optional.
        """
        completed = {**self.options, **options}
        if self.base_url is None:
            return completed
        is_optional = options.get("base_url") is not None
        completed.setdefault("base_url", self.base_url)
        if not options.get("api_key") and options.get("api_key_env") is None and self.api_key_env is not None:
            is_sent = not is_optional or bool(_Variables.read().get(self.api_key_env))
            completed["api_key_env"] = self.api_key_env if is_sent else NO_KEY
        return completed


PRESETS: Mapping[str, Preset] = {
    "openai": Preset(None, None),
    "responses": Preset(None, None, {"api": "responses"}),
    "anthropic": Preset("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", {"api": "messages"}),
    # Their OpenAI-compatible endpoints reject `seed`.
    "gemini": Preset("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY", {"send_seed": False}),
    "mistral": Preset("https://api.mistral.ai/v1", "MISTRAL_API_KEY", {"send_seed": False}),
    "openrouter": Preset("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "vllm": Preset("http://127.0.0.1:8000/v1", ""),
    "sglang": Preset("http://127.0.0.1:30000/v1", ""),
    "llama.cpp": Preset("http://127.0.0.1:8080/v1", ""),
    "ollama": Preset("http://127.0.0.1:11434/v1", ""),
}
"""The model providers, keyed by the name in `--model PROVIDER/NAME` and in `policy.type`."""
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
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")  # clients may interpret other characters as a different host
_SAME_AS = {"ws": "http", "wss": "https"}


def complete_model(model: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a model's name at its endpoint, and the options completed with its provider's options.

    `model` has the form `PROVIDER/NAME`. If the options contain a base URL, or the part before the slash is not a known
    provider, the whole string is the name.
    """
    given = {key: value for key, value in options.items() if value is not None}
    provider, _, name = model.partition("/")
    if not name or provider not in PRESETS or "base_url" in given:
        return model, given
    return name, PRESETS[provider].complete(given)


def intended_model(model: str) -> str:
    """Return `PROVIDER/NAME` with the misspelled provider corrected, or "" if no provider has a similar name."""
    provider, _, name = model.partition("/")
    nearest = difflib.get_close_matches(provider, PRESETS, n=1, cutoff=0.6) if name and provider not in PRESETS else []
    return f"{nearest[0]}/{name}" if nearest else ""


def url_origin(url: str) -> str:
    """Return the scheme, host and port of a URL. The port is omitted if it is the default port.

    `ws` counts as `http`, and `wss` as `https`.

    Raises:
        ValueError: If the URL has no valid origin.
    """
    parts = urlsplit(url)
    scheme, host = _SAME_AS.get(parts.scheme, parts.scheme), parts.hostname or ""
    if scheme not in _USUAL_PORTS or not _HOST.fullmatch(host):
        raise ValueError(f"{url!r} has no origin; use a URL with the scheme http or https and an ASCII host name")
    host = f"[{host}]" if ":" in host else host
    is_usual = parts.port in (None, _USUAL_PORTS[scheme])
    return f"{scheme}://{host}" if is_usual else f"{scheme}://{host}:{parts.port}"


def configured_origins(shell: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Return the origins that REWARD_KIT_KEY_ORIGINS allows for each variable.

    `shell` is the process environment.

    Raises:
        ConfigError: If an entry is invalid.
    """
    origins: dict[str, frozenset[str]] = {}
    for entry in re.split(r"[\s,]+", shell.get(ORIGINS_VARIABLE, "").strip()):
        name, separator, url = entry.partition("=")
        if not entry:
            continue
        try:
            if not separator or not name.isidentifier():
                raise ValueError
            origins[name] = origins.get(name, frozenset()) | {url_origin(url)}
        except ValueError:
            shown = f"{name}=…" if separator and name.isidentifier() else "an entry"  # the rest may itself be a key
            raise ConfigError(
                f"{ORIGINS_VARIABLE}: {shown} is not a variable with an origin, such as MY_KEY=https://llm.example"
            ) from None
    return origins


def configured_variables(shell: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in REWARD_KIT_KEY_ORIGINS, even if another entry is invalid."""
    entries = re.split(r"[\s,]+", shell.get(ORIGINS_VARIABLE, ""))
    return {entry.partition("=")[0] for entry in entries if "=" in entry}


def allowed_origins(name: str, shell: Mapping[str, str], beside: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the origins to which the value of a variable may be sent.

    If the variable is OPENAI_API_KEY, OPENAI_BASE_URL is read from `beside`. By default, `beside` is `shell`, the
    process environment.
    """
    own = PROVIDERS.get(name)
    if name == OPENAI_KEY and (url := (shell if beside is None else beside).get(OPENAI_URL)):
        try:
            own = url_origin(url)
        except ValueError:
            own = None  # reported where the URL is used
    return configured_origins(shell).get(name, frozenset()) | ({own} if own else frozenset())


def allow_command(name: str, origin: str, shell: Mapping[str, str]) -> str:
    """Return the shell command that allows an additional origin for a variable."""
    before = f"${ORIGINS_VARIABLE} " if shell.get(ORIGINS_VARIABLE, "").strip() else ""
    return f'export {ORIGINS_VARIABLE}="{before}{name}={origin}"'


def check_allowed(name: str, url: str, shell: Mapping[str, str], beside: Mapping[str, str] | None = None) -> None:
    """Check that the value of a variable may be sent to a URL. The arguments are those of `allowed_origins`.

    Raises:
        ConfigError: If the value must not be sent to the URL.
    """
    try:
        origin = url_origin(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if origin not in allowed_origins(name, shell, beside):
        raise ConfigError(
            f"{name} is not configured for {origin}, and a file cannot send it there; to allow that server, "
            f"run {allow_command(name, origin, shell)}"
        )


OPENAI_BASE_URL = "https://api.openai.com/v1"
NO_KEY = ""
"""The value of `api_key_env` for which no key is sent, regardless of the environment."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """An endpoint's base URL, such as "http://127.0.0.1:8000/v1", and its key.

    If the endpoint needs no key, the key is `None`.

    Attributes:
        no_key: the reason why no key is sent, and how to change that. If a key is sent, the value is "".
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    no_key: str = ""


class _Variables(NamedTuple):
    """The environment variables of the process and the variables in the nearest `.env`."""

    shell: Mapping[str, str]
    dotenv: Mapping[str, str]

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, folder: Path | None = None) -> _Variables:
        sources = os.environ if environ is None else environ, read_dotenv(folder or Path.cwd())
        # Empty variables count as unset, so `OPENAI_API_KEY= command` unsets the key.
        return cls(*({name: value for name, value in source.items() if value} for source in sources))

    def get(self, name: str) -> str:
        return self.shell.get(name) or self.dotenv.get(name, "")

    def beside(self, name: str) -> Mapping[str, str]:
        # A key set in the shell belongs to a URL set in the shell.
        return self.shell if name in self.shell else {**self.dotenv, **self.shell}

    def may_get(self, name: str, url: str) -> bool:
        """Return True if the value of a variable may be sent to a URL.

        If the URL has no origin, the result is False.
        """
        try:
            origin = url_origin(url)
        except ValueError:
            return False
        return origin in allowed_origins(name, self.shell, self.beside(name))


def resolve_endpoint(
    base_url: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    *,
    needs_key: bool = True,
    usual_key: str = OPENAI_KEY,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> EndpointSettings:
    """Return the endpoint to use for arguments that the user has set.

    If the arguments come from a file, call `key_variable` first.

    Args:
        base_url: the base URL. The default is OPENAI_BASE_URL or, if that variable is not set, OpenAI's URL.
        api_key: the key. The default is the value of `api_key_env` or, if that is not set, of OPENAI_API_KEY.
        api_key_env: the name of the variable that contains the key. If it is set, a key is required. If it is "", no
            key is sent.
        needs_key: False if a key is never required, for example in a replay.
        usual_key: the variable that messages name if `api_key_env` is "".
        environ: the environment variables. The default is the process environment.
        folder: the directory in which the search for `.env` begins. The default is the working directory.

    Raises:
        ConfigError: If a required key is missing, or a value is invalid.
    """
    for name, value in (("base_url", base_url), ("api_key", api_key), ("api_key_env", api_key_env)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name}: expected a string, got a value of type {type(value).__name__}")
    variables = _Variables.read(environ, folder)
    url = _checked_url(base_url or variables.get(OPENAI_URL) or OPENAI_BASE_URL)
    key_name = api_key_env or OPENAI_KEY
    if api_key:
        key = api_key.strip()
    elif api_key_env == NO_KEY:
        key = ""
    elif base_url or not _is_url_of_dotenv(variables) or variables.may_get(key_name, url):
        key = variables.get(key_name).strip()
    else:  # the key comes from the same place as the URL, never from the shell
        key = variables.dotenv.get(key_name, "").strip()
    no_key = "" if key else _why_no_key(usual_key if api_key_env == NO_KEY else key_name, url, variables)
    if needs_key and not key and (api_key_env or url == OPENAI_BASE_URL):
        raise ConfigError(f"no API key for {url}: {no_key}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the API key for {url} ({key_name}) contains characters that are invalid in an HTTP header")
    return EndpointSettings(url, key or None, no_key)


def key_variable(
    base_url: str | None = None,
    api_key_env: str | None = None,
    *,
    of_user: Collection[str] = (),
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str | None:
    """Return the `api_key_env` to use for an endpoint that a task file names.

    Only this function decides whether a key that a file names may be used. The value of the named variable is sent only
    to an origin that the user has configured for it. The default key is sent only if the URL in the file has such an
    origin. Otherwise, the function returns `NO_KEY`.

    `of_user` lists which of `base_url` and `api_key_env` the user has set on the command line or in Python rather than
    in the file.

    Raises:
        ConfigError: If the value of the variable must not be sent to the URL.
    """
    if api_key_env == NO_KEY:
        return NO_KEY
    variables = _Variables.read(environ, folder)
    is_url_of_user = "base_url" in of_user or (base_url is None and OPENAI_URL in variables.shell)
    if api_key_env is None and (is_url_of_user or base_url is None):
        return None
    if api_key_env is not None and "api_key_env" in of_user:
        if is_url_of_user or (base_url is None and not _is_url_of_dotenv(variables)):
            return api_key_env
    elif (
        api_key_env is not None
        and is_url_of_user
        and (api_key_env in PROVIDERS or api_key_env in configured_origins(variables.shell))
    ):
        return api_key_env
    url = base_url or variables.get(OPENAI_URL) or OPENAI_BASE_URL
    if api_key_env is None:
        return None if variables.may_get(OPENAI_KEY, url) else NO_KEY
    check_allowed(api_key_env, url, variables.shell, variables.beside(api_key_env))
    return api_key_env


def _is_url_of_dotenv(variables: _Variables) -> bool:
    return OPENAI_URL not in variables.shell and OPENAI_URL in variables.dotenv


def _why_no_key(name: str, url: str, variables: _Variables) -> str:
    """Return the reason why no key is sent to a URL, and how to change that."""
    if not variables.get(name):
        return f"set {name} in the environment or in a .env file, or set base_url to an endpoint that needs no key"
    try:
        origin = url_origin(url)
    except ValueError as error:
        return f"{name} was not sent: {error}"
    own = next((variable for variable, other in PROVIDERS.items() if other == origin), None)
    provider = f"write api_key_env: {own}, or " if own not in (None, name) else ""
    return (
        f"{name} was not sent, because it is not configured for {origin}; to allow it, "
        f"{provider}{allow_command(name, origin, variables.shell)}"
    )


def _checked_url(url: str) -> str:
    """Return a URL without its trailing slash.

    Raises:
        ConfigError: If the URL is invalid or may contain a credential. The message does not show the credential.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise ConfigError(f"base_url {url!r} is not a URL; use a URL such as http://127.0.0.1:8000/v1")
    if "@" in rest.partition("/")[0]:
        raise ConfigError("base_url contains a user name or password; pass the credential as api_key")
    if "#" in rest:
        raise ConfigError("base_url contains a fragment; remove the part after #")
    path, _, query = url.partition("?")
    if secret := next((name for name, _ in parse_qsl(query) if SECRET_NAME.search(name) or name == "key"), None):
        raise ConfigError(f"base_url contains a credential, {secret!r}; pass it as api_key or in default_headers")
    try:
        _ = urlsplit(url).port  # rejects URLs to which no connection is possible, for example because the port is 99999
    except ValueError as error:
        raise ConfigError(f"base_url {url!r} is not a URL: {error}") from None
    return f"{path.rstrip('/')}?{query}" if query else path.rstrip("/")


def read_dotenv(folder: Path) -> dict[str, str]:
    """Return the variables in the nearest `.env` in a directory or one of its parents.

    If no file can be read, return an empty dictionary.
    """
    for parent in (folder, *folder.parents):
        try:
            text = (parent / ".env").read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            continue
        variables: dict[str, str] = {}
        for line in text.splitlines():
            name, separator, value = line.strip().removeprefix("export ").partition("=")
            name, value = name.strip(), value.strip()
            if separator and name.isidentifier():
                quote = value[:1]
                is_quoted = quote in ("'", '"') and quote in value[1:]
                variables[name] = value[1 : value.index(quote, 1)] if is_quoted else value.partition(" #")[0].rstrip()
        return variables
    return {}
