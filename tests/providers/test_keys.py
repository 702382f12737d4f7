"""Which API key may be sent to which origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_kit.errors import ConfigError
from reward_kit.providers.keys import (
    NO_KEY,
    ORIGINS_VARIABLE,
    PROVIDERS,
    allowed_origins,
    configured_origins,
    key_variable,
    resolve_endpoint,
    url_origin,
)

LOCAL = "http://127.0.0.1:8000/v1"


def variable(folder: Path, *args: Any, environ: dict[str, str] | None = None, **named: Any) -> str | None:
    return key_variable(*args, environ=environ or {}, folder=folder, **named)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://API.OpenAI.com:443/v1/", "https://api.openai.com"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://[::1]:80", "http://[::1]"),
        ("wss://x.example/ws", "https://x.example"),
        ("https://api.openai.com@evil.example/v1", "https://evil.example"),
        ("https://api.openai.com.evil.example", "https://api.openai.com.evil.example"),
        ("http://api.openai.com", "http://api.openai.com"),
    ],
)
def test_url_origin_is_scheme_host_and_port(url: str, origin: str) -> None:
    assert url_origin(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "llm.example",
        "ftp://x",
        "https://",
        "https://x:99999",
        "",
        "file:///etc/passwd",
        "http://x y/",
        "https://api.openai.com\\.evil.example",
        "https://öpenai.example",
    ],
)
def test_non_http_url_has_no_origin(url: str) -> None:
    with pytest.raises(ValueError):
        url_origin(url)


def test_provider_table_holds_https_origins() -> None:
    assert all(url_origin(origin) == origin and origin.startswith("https://") for origin in PROVIDERS.values())


def test_origins_variable_is_split_at_whitespace_and_commas() -> None:
    listed = {ORIGINS_VARIABLE: " A=https://a.example/v1,B=http://b:1\n A=https://c.example, "}
    assert configured_origins(listed) == {
        "A": frozenset({"https://a.example", "https://c.example"}),
        "B": frozenset({"http://b:1"}),
    }
    assert configured_origins({}) == {}


@pytest.mark.parametrize(
    "entry", ["sk-a-key", "MY_KEY=sk-a-key", "MY KEY=https://x", "=https://x", "*=https://sk-a-key"]
)
def test_invalid_origins_entry_is_reported_without_its_value(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"{ORIGINS_VARIABLE}: .* is not a variable with an origin") as caught:
        configured_origins({ORIGINS_VARIABLE: entry})
    assert "sk-a-key" not in str(caught.value)


def test_openai_base_url_replaces_the_openai_origin_and_the_list_extends_it() -> None:
    proxy = {"OPENAI_BASE_URL": "http://proxy:1/v1"}
    assert allowed_origins("OPENAI_API_KEY", {}) == {"https://api.openai.com"}
    assert allowed_origins("OPENAI_API_KEY", proxy) == {"http://proxy:1"}
    listed = {**proxy, ORIGINS_VARIABLE: "OPENAI_API_KEY=https://api.openai.com"}
    assert allowed_origins("OPENAI_API_KEY", listed) == {"http://proxy:1", "https://api.openai.com"}
    assert allowed_origins("MISTRAL_API_KEY", proxy) == {"https://api.mistral.ai"}
    assert allowed_origins("MY_KEY", proxy) == frozenset()


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://api.openai.com/v1", True),
        ("https://api.openai.com:443", True),
        ("http://api.openai.com/v1", False),
        ("https://api.openai.com:8443/v1", False),
        ("https://api.openai.com.evil.example/v1", False),
        (LOCAL, False),
    ],
)
def test_url_from_a_file_gets_the_default_key_only_if_it_is_openai(tmp_path: Path, url: str, sent: bool) -> None:
    assert variable(tmp_path, url, environ={"OPENAI_API_KEY": "k"}) == (None if sent else NO_KEY)
    assert variable(tmp_path, url, of_user={"base_url"}) is None


@pytest.mark.parametrize("url", ["https://ａpi.openai.com/v1", "https://api.openai.com\\/v1", "nonsense"])
def test_a_url_without_an_origin_gets_no_key(tmp_path: Path, url: str) -> None:
    environ = {"OPENAI_API_KEY": "k", "MY_KEY": "k"}
    assert variable(tmp_path, url, environ=environ) == NO_KEY
    with pytest.raises(ConfigError, match="has no origin"):
        variable(tmp_path, url, "MY_KEY", environ=environ)
    (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={url}\n")
    try:
        assert resolve_endpoint(environ=environ, folder=tmp_path).api_key is None
    except ConfigError as error:
        assert "is not a URL" in str(error)


def test_file_without_a_url_cannot_send_another_variable_to_openai(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MISTRAL_API_KEY is not configured for https://api\.openai\.com"):
        variable(tmp_path, None, "MISTRAL_API_KEY", environ={"MISTRAL_API_KEY": "k"})
    assert variable(tmp_path, None, "OPENAI_API_KEY") == "OPENAI_API_KEY"
    assert variable(tmp_path, "https://api.mistral.ai/v1", "MISTRAL_API_KEY") == "MISTRAL_API_KEY"
    shell = {"OPENAI_BASE_URL": LOCAL}
    assert variable(tmp_path, None, "MISTRAL_API_KEY", environ=shell) == "MISTRAL_API_KEY"
    with pytest.raises(ConfigError, match=r"MY_KEY is not configured for http://127\.0\.0\.1:8000"):
        variable(tmp_path, None, "MY_KEY", environ=shell)


def test_api_key_env_from_the_command_line_is_not_sent_to_a_url_from_a_file(tmp_path: Path) -> None:
    assert variable(tmp_path, None, "MY_KEY", of_user={"api_key_env"}) == "MY_KEY"
    with pytest.raises(ConfigError, match=r"MY_KEY is not configured for http://127\.0\.0\.1:8000"):
        variable(tmp_path, LOCAL, "MY_KEY", of_user={"api_key_env"})
    (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={LOCAL}\n")
    with pytest.raises(ConfigError, match=r"MY_KEY is not configured for http://127\.0\.0\.1:8000"):
        variable(tmp_path, None, "MY_KEY", of_user={"api_key_env"})


class TestDotenv:
    """A `.env` file may come with the task."""

    def test_dotenv_url_gets_no_key_from_the_shell(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={LOCAL}\n")
        settings = resolve_endpoint(environ={"OPENAI_API_KEY": "k"}, folder=tmp_path)
        assert (settings.base_url, settings.api_key) == (LOCAL, None)
        assert f'export {ORIGINS_VARIABLE}="OPENAI_API_KEY=http://127.0.0.1:8000"' in settings.no_key

    def test_dotenv_url_gets_the_key_configured_for_its_origin(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={LOCAL}\n")
        listed = {"OPENAI_API_KEY": "k", ORIGINS_VARIABLE: f"OPENAI_API_KEY={LOCAL}"}
        assert resolve_endpoint(environ=listed, folder=tmp_path).api_key == "k"

    def test_dotenv_url_gets_the_dotenv_key_and_not_the_shell_key(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={LOCAL}\nOPENAI_API_KEY=its-own\n")
        assert resolve_endpoint(environ={"OPENAI_API_KEY": "k"}, folder=tmp_path).api_key == "its-own"

    def test_dotenv_url_of_openai_gets_the_shell_key(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("OPENAI_BASE_URL=https://api.openai.com/v1\n")
        assert resolve_endpoint(environ={"OPENAI_API_KEY": "k"}, folder=tmp_path).api_key == "k"

    def test_shell_url_gets_the_dotenv_key(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text("OPENAI_API_KEY=its-own\n")
        assert resolve_endpoint(environ={"OPENAI_BASE_URL": LOCAL}, folder=tmp_path).api_key == "its-own"


def test_no_key_option_sends_no_key(tmp_path: Path) -> None:
    settings = resolve_endpoint(LOCAL, None, NO_KEY, environ={"OPENAI_API_KEY": "k"}, folder=tmp_path)
    assert settings.api_key is None
    assert resolve_endpoint(LOCAL, environ={"OPENAI_API_KEY": "k"}, folder=tmp_path).api_key == "k"


def test_missing_key_reason_names_the_variable_of_the_provider(tmp_path: Path) -> None:
    url = "https://openrouter.ai/api/v1"
    settings = resolve_endpoint(url, None, NO_KEY, environ={"OPENAI_API_KEY": "k"}, folder=tmp_path)
    assert "write api_key_env: OPENROUTER_API_KEY, or export" in settings.no_key
