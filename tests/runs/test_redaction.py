"""Redaction of secrets in the files of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from reward_kit.display_text import SafeFormatter
from reward_kit.errors import ConfigError, StoreError
from reward_kit.providers.keys import ORIGINS_VARIABLE
from reward_kit.runs.redaction import (
    HIDDEN,
    Redaction,
    hidden_keys,
    known_secrets,
    load_hook,
    without_hidden,
    without_secrets,
)
from reward_kit.runs.run_folder import RunFolder, RunHeader, load_episode, read_episodes
from tests.runs.test_store import make_episode

SECRET = 'sk-"12\\34"-ünï'


class TestValues:
    def test_secret_is_hidden_in_lines_files_and_texts(self) -> None:
        redaction = Redaction([SECRET])
        line = json.dumps({"said": f"my key is {SECRET}."}).encode("ascii")
        assert json.loads(redaction.redact_line(line)) == {"said": f"my key is {HIDDEN}."}
        assert redaction.redact_text(f"a{SECRET}b") == f"a{HIDDEN}b"
        assert redaction.redact_bytes(SECRET.encode() + line) == HIDDEN.encode() + redaction.redact_line(line)

    def test_wrapped_stored_text_is_redacted(self, tmp_path: Path) -> None:
        redaction = Redaction([SECRET], hook=lambda text: text.replace("Ada", "[name]"))
        with RunFolder.create(tmp_path / "run", RunHeader(task_name="t"), redaction) as store:
            store.append_episode(make_episode(text=f"\ud800 Ada has {SECRET}"))
        (record,) = read_episodes(store.path)
        assert load_episode(store.path, record).messages[0].text == f"\ud800 [name] has {HIDDEN}"

    def test_overlapping_secrets_are_fully_hidden(self) -> None:
        assert Redaction(["abcdefgh", "abcdefgh-ijkl"]).redact_text("abcdefgh-ijkl abcdefgh") == f"{HIDDEN} {HIDDEN}"

    def test_short_value_is_not_a_secret(self) -> None:
        assert Redaction(["true", "1234567"]).redact_text("true 1234567") == "true 1234567"

    def test_a_traceback_in_the_log_is_redacted(self) -> None:
        try:
            raise ValueError(f"refused {SECRET}")
        except ValueError as error:
            record = logging.LogRecord("x", 40, "f", 1, "failed %s", (SECRET,), (type(error), error, None))
        shown = SafeFormatter("%(message)s", Redaction([SECRET]).redact_text).format(record)
        assert SECRET not in shown and shown.count(HIDDEN) == 2


class TestKnownSecrets:
    def test_secrets_come_from_environment_dotenv_and_secret_keys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / ".env").write_text("OPENAI_API_KEY=from-dotenv\n")
        monkeypatch.setenv("MY_TOKEN", "from-environment")
        monkeypatch.setenv("MY_NAME", "no-secret-at-all")
        monkeypatch.setenv("PASSWORD_STORE_DIR", str(tmp_path))
        found = set(known_secrets({"policy": {"api_key": "from-the-task", "model": "m"}, "list": [{"token": ["x1"]}]}))
        assert {"from-dotenv", "from-environment", "from-the-task", "x1"} <= found
        assert not found & {"no-secret-at-all", str(tmp_path), "m"}

    def test_variables_that_a_task_names_are_secrets_under_any_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        values = {name: f"value-{name.lower()}" for name in ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "NOT_NAMED")}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HEADER", "Bearer of-a-header\n")
        monkeypatch.setenv("FOLDER", str(tmp_path))
        monkeypatch.setenv(ORIGINS_VARIABLE, "SIX=https://x.example broken")
        task = {
            "policy": {"type": "openai", "api_key_env": "ONE"},
            "reward_options": {"client": {"api_key_env": "TWO"}},
            "resources": [{"type": "http", "config": {"headers_env": {"X-Key": "THREE", "Authorization": "HEADER"}}}],
            "resource_server": {"start_command": "x", "pass_env": ["FOUR", "FOLDER", "NOT_SET"]},
        }
        found = {*known_secrets(task, {"user.api_key_env": "FIVE", "base_resource_config.headers_env.X": "ONE"})}
        assert {values[name] for name in values if name != "NOT_NAMED"} | {"of-a-header"} <= found
        assert not {values["NOT_NAMED"], str(tmp_path), "https://x.example"} & found
        assert Redaction(found).redact_text("Bearer of-a-header and of-a-header") == f"{HIDDEN} and {HIDDEN}"

    def test_password_in_a_url_variable_is_a_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DATABASE_URL", "postgres://me:pass%2Fword@db.example:5432/shop?at=a:b@c")
        monkeypatch.setenv("PROXY", "http://me:p@ssw0rd@proxy.example")
        monkeypatch.setenv("PLAIN_URL", "http://example.org:8080/a:b@c")
        found = set(known_secrets({"url": "redis://:in-the-task@host"}))
        assert {"pass%2Fword", "pass/word", "p@ssw0rd", "in-the-task"} <= found
        assert not found & {"8080/a:b", "me", "b"}

    def test_value_of_any_type_under_a_secret_like_key_is_hidden(self) -> None:
        given = {"api_key": 12, "tokens": 5, "inner": [{"password": ["a"]}], "secret": None}
        hidden = {"api_key": HIDDEN, "tokens": 5, "inner": [{"password": HIDDEN}], "secret": None}
        assert without_secrets(given) == hidden
        assert without_hidden(hidden) == {"tokens": 5, "inner": [{}], "secret": None}

    def test_partly_hidden_text_is_a_hidden_key(self) -> None:
        url = "http://me:p4ssword-1@models.example/v1"
        given = {"user.base_url": url, "policy": {"arguments": ["-v", url], "seed": 1}}
        stored = json.loads(Redaction(known_secrets(given)).redact_line(json.dumps(given).encode("ascii")))
        assert stored["user.base_url"] == f"http://me:{HIDDEN}@models.example/v1"
        assert without_hidden(stored) == {"policy": {"seed": 1}}
        assert list(hidden_keys(stored)) == ["user.base_url", "policy.arguments"]


class TestHook:
    def test_hook_is_applied_to_every_text_of_a_record(self, tmp_path: Path) -> None:
        redaction = Redaction(hook=lambda text: text.replace("Ada", "[name]").replace("a-0", "[id]"))
        with RunFolder.create(tmp_path / "run", RunHeader(task_name="t"), redaction) as store:
            store.append_episode(make_episode(text="I am Ada"))
            store.append_score({"rollout_id": "a-0", "result": {"reason": "Ada was right in a-0"}})
        written = b"".join(file.read_bytes() for file in store.path.rglob("*") if file.is_file())
        assert b"Ada" not in written
        (record,) = read_episodes(store.path)
        assert record["messages"][0]["content"] == "I am [name]" and record["rollout_id"] == "a-0"

    @pytest.mark.parametrize("hook", [lambda text: 1 / 0, lambda text: None], ids=["raises", "returns nothing"])
    def test_failed_hook_prevents_writing(self, tmp_path: Path, hook: object) -> None:
        with (
            RunFolder.create(tmp_path / "run", RunHeader(task_name="t"), Redaction(hook=hook)) as store,  # type: ignore[arg-type]
            pytest.raises(StoreError, match="redact function"),
        ):
            store.append_episode(make_episode())
        assert not (store.path / "episodes.jsonl").read_bytes()

    def test_hook_is_loaded_by_name_and_must_be_a_function(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("blot = str.upper\nnumber = 3\n")
        hook = load_hook("mine.py:blot", tmp_path)
        assert hook is not None and hook("a") == "A"
        with pytest.raises(ConfigError, match=r"^mine\.py:number is an int, not a function"):
            load_hook("mine.py:number", tmp_path)
        assert load_hook(None, tmp_path) is None
