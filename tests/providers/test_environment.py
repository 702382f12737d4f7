"""Precedence of explicit values, environment and `.env`, and handling of API keys."""

from __future__ import annotations

import re

import pytest

from reward_kit.errors import ConfigError
from reward_kit.providers.keys import OPENAI_BASE_URL, read_dotenv, resolve_endpoint

LOCAL = "http://127.0.0.1:8000/v1"


def resolve(folder, *args, environ=None, **named):
    return resolve_endpoint(*args, environ=environ or {}, folder=folder, **named)


def test_explicit_value_overrides_environment_which_overrides_dotenv(tmp_path):
    (tmp_path / ".env").write_text("OPENAI_API_KEY=from-file\nOPENAI_BASE_URL=http://file/v1\n")
    environ = {"OPENAI_API_KEY": "from-environment", "OPENAI_BASE_URL": "http://environment/v1"}
    explicit = resolve(tmp_path, LOCAL, "explicit", environ=environ)
    assert (explicit.base_url, explicit.api_key) == (LOCAL, "explicit")
    environment = resolve(tmp_path, environ=environ)
    assert (environment.base_url, environment.api_key) == ("http://environment/v1", "from-environment")
    file = resolve(tmp_path)
    assert (file.base_url, file.api_key) == ("http://file/v1", "from-file")


def test_empty_variable_counts_as_unset(tmp_path):
    (tmp_path / ".env").write_text("OPENAI_API_KEY=from-file\n")
    assert resolve(tmp_path, environ={"OPENAI_API_KEY": ""}).api_key == "from-file"


def test_nearest_dotenv_in_parent_folders_is_read(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".env").write_text("OPENAI_API_KEY=outer\nOTHER=1\n")
    assert resolve(inner).api_key == "outer"
    (tmp_path / "a" / ".env").write_text("OPENAI_API_KEY=inner\n")
    assert resolve(inner).api_key == "inner"
    assert "OTHER" not in read_dotenv(inner)


def test_dotenv_line_syntax(tmp_path):
    (tmp_path / ".env").write_text(
        "\ufeff# a comment\n\nA=plain\nexport B = spaced \nC='single # kept'\nD=\"double\" # dropped\n"
        "E=value # comment\nF=a=b\nG=\nH='open\nno line\n1X=bad name\n"
    )
    assert read_dotenv(tmp_path) == {
        "A": "plain",
        "B": "spaced",
        "C": "single # kept",
        "D": "double",
        "E": "value",
        "F": "a=b",
        "G": "",
        "H": "'open",
    }


def test_only_the_openai_endpoint_requires_a_key(tmp_path):
    with pytest.raises(ConfigError, match=r"no API key for https://api\.openai\.com/v1: set OPENAI_API_KEY"):
        resolve(tmp_path)
    assert resolve(tmp_path, LOCAL).api_key is None
    assert resolve(tmp_path, environ={"OPENAI_API_KEY": "k"}).base_url == OPENAI_BASE_URL


def test_variable_named_by_api_key_env_is_required(tmp_path):
    assert resolve(tmp_path, LOCAL, api_key_env="MINE", environ={"MINE": "k"}).api_key == "k"
    with pytest.raises(ConfigError, match="set MINE in the environment"):
        resolve(tmp_path, LOCAL, api_key_env="MINE", environ={"OPENAI_API_KEY": "k"})


def test_trailing_slash_of_url_and_whitespace_of_key_are_stripped(tmp_path):
    settings = resolve(tmp_path, f"{LOCAL}/", " k\n")
    assert (settings.base_url, settings.api_key) == (LOCAL, "k")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http:/x"])
def test_invalid_url_is_shown_in_the_error(tmp_path, url):
    with pytest.raises(ConfigError, match=f"base_url '{url}' is not a URL"):
        resolve(tmp_path, url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "http://h:x/v1", "http://[::1"])
def test_url_with_invalid_host_or_port_is_rejected(tmp_path, url):
    with pytest.raises(ConfigError, match=re.escape(f"base_url '{url}' is not a URL: ")):
        resolve(tmp_path, url)


@pytest.mark.parametrize("url", ["https://me:hush@host/v1", "https://host/v1?key=hush", "https://host/v1#hush"])
def test_url_with_credentials_is_rejected_and_not_shown(tmp_path, url):
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path, url)
    assert "hush" not in str(caught.value)


def test_a_key_is_never_shown(tmp_path):
    assert "hush" not in repr(resolve(tmp_path, LOCAL, "hush"))
    for key in ("hush\r\nX-Evil: 1", "hush-ключ"):
        with pytest.raises(ConfigError, match="invalid in an HTTP header") as caught:
            resolve(tmp_path, LOCAL, key)
        assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="api_key: expected a string, got a value of type int") as caught:
        resolve(tmp_path, LOCAL, 1234567)
    assert "1234567" not in str(caught.value)
