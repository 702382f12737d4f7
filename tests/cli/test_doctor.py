"""Test `reward-kit doctor`: sandbox, packages, keys and endpoints.

Endpoints are real servers on this machine.
"""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import re
import socket
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from reward_kit.cli import doctor
from reward_kit.cli.doctor import command
from reward_kit.errors import ConfigError
from reward_kit.providers.keys import ORIGINS_VARIABLE, PROVIDERS
from tests.sandbox.sandbox_calls import AVAILABLE, missing

DENY = """
import errno, sys
from reward_kit.sandbox import linux, seccomp
denied = {"x86_64": {"unshare": 272, "landlock": 444}, "aarch64": {"unshare": 97, "landlock": 444}}[linux.machine()]
deny = seccomp.answer(seccomp.errno_action(errno.EPERM))
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1, "")
rules = {denied[name]: deny for name in sys.argv[1].split(",")}
seccomp.load(seccomp.assemble(linux.audit_arch(linux.machine()), rules, seccomp.answer(seccomp.ALLOW)))
sys.argv[1:] = sys.argv[2:]
from reward_kit.cli.main import main
main()
"""


def doctor_without(names: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor as in a container whose filter denies these calls."""
    line = [sys.executable, "-c", DENY, names, "doctor", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_doctor_shows_the_sandbox_of_a_run():
    done = CliRunner().invoke(command, ["--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    strengths = found["sandbox"]["strengths"]
    assert {name: one["available"] for name, one in strengths.items()} == {
        name: one.is_available for name, one in AVAILABLE.items()
    }
    assert done.return_value == (0 if found["sandbox"]["confines_model_code"] else 1)
    assert found["python"]["path"] == sys.executable
    assert found["limits"]["open_files"] > 0
    assert {"games", "mcp", "train", "dev"} <= found["extras"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="the mechanisms are Linux's")
def test_missing_sandbox_mechanism_is_named_with_its_reason():
    if missing("landlock"):
        pytest.skip(missing("landlock"))
    done = doctor_without("unshare")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert "no" in lines["namespaces"].split() and "Operation not permitted" in lines["namespaces"]
    assert done.stdout.endswith("Model-written code is confined with landlock.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the mechanisms are Linux's")
def test_exit_code_is_one_without_a_sandbox():
    done = doctor_without("unshare,landlock")
    assert done.returncode == 1, done.stderr
    assert "Model-written code cannot be run on this machine: " in done.stdout
    assert "this machine cannot confine code (namespaces: " in done.stdout
    found = json.loads(doctor_without("unshare,landlock", "--json").stdout)
    assert found["sandbox"]["strength"] is None
    assert "Landlock" in found["sandbox"]["strengths"]["landlock"]["reason"]


def test_missing_package_is_named(monkeypatch):
    wants = ["nothing-like-it>=1,<2; extra == 'games'", "click>=8; extra == 'mcp'", "click>=8"]
    wants += ["nothing-either; (python_version < '3.9') and extra == 'mcp'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wants)
    assert doctor._extras() == {"games": ["nothing-like-it"], "mcp": []}
    done = CliRunner().invoke(command, standalone_mode=False)
    assert "  games        missing: nothing-like-it\n" in done.stdout
    assert f"  mcp          click {importlib.metadata.version('click')}\n" in done.stdout
    assert "To add one, install the extra 'NAME': pip install" in done.stdout


def test_development_packages_are_not_reported_missing(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["nothing-like-it; extra == 'dev'"])
    shown = CliRunner().invoke(command, standalone_mode=False).stdout
    assert "missing" not in shown[shown.index("Extras") :]


class Endpoint:
    """A local server of `/v1/models`, which records its requests."""

    def __init__(self, status: int = 200, body: str = '{"data": [{"id": "a"}]}', **headers: str) -> None:
        self.keys: list[str | None] = []
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.keys.append(self.headers["Authorization"])
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class TestEndpoints:
    @pytest.fixture(autouse=True)
    def _nothing_is_named(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        for name in ("OPENAI_BASE_URL", ORIGINS_VARIABLE, *PROVIDERS):
            monkeypatch.delenv(name, raising=False)

    def told(self, *arguments: str) -> tuple[int, list[dict[str, object]]]:
        done = CliRunner().invoke(command, ["--json", *arguments], standalone_mode=False)
        assert "SECRET" not in done.output
        return done.return_value, json.loads(done.stdout)["endpoints"]

    def test_report_without_an_endpoint_explains_how_to_configure_one(self):
        assert self.told()[1] == []
        shown = CliRunner().invoke(command, standalone_mode=False).stdout
        assert "none configured; set OPENAI_API_KEY" in shown and "--base-url URL" in shown

    def test_answering_endpoint_is_timed_and_its_models_counted(self, monkeypatch):
        with Endpoint() as endpoint:
            monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
            monkeypatch.setenv("OPENAI_API_KEY", "SECRET")
            (one,) = self.told()[1]
            shown = CliRunner().invoke(command, standalone_mode=False).stdout
        assert (one["base_url"], one["outcome"], one["models"]) == (endpoint.url, "ok", 1)
        assert one["seconds"] > 0
        assert re.search(rf"{endpoint.url}  after \d+ ms: available, 1 model\n", shown) and "SECRET" not in shown
        assert set(endpoint.keys) == {"Bearer SECRET"}

    def test_key_is_sent_only_to_its_own_endpoint(self, monkeypatch):
        with Endpoint() as own, Endpoint() as other, Endpoint(401) as locked:
            monkeypatch.setenv("OPENAI_BASE_URL", own.url)
            monkeypatch.setenv("OPENAI_API_KEY", "SECRET")
            again = f"{own.url}/"
            code, told = self.told("--base-url", other.url, "--base-url", locked.url, "--base-url", again)
        assert [one["outcome"] for one in told] == ["ok", "ok", "unauthorized"]
        assert "requires a key, but none was sent: OPENAI_API_KEY was not sent, because it is not" in told[2]["message"]
        assert f'export {ORIGINS_VARIABLE}="OPENAI_API_KEY={locked.url.removesuffix("/v1")}"' in told[2]["message"]
        assert (own.keys, other.keys, locked.keys) == (["Bearer SECRET"], [None], [None])
        assert code == 1

    def test_keys_are_listed_with_their_origins_and_without_values(self, monkeypatch, tmp_path):
        assert "Keys\n  none set\n" in CliRunner().invoke(command, standalone_mode=False).stdout
        monkeypatch.setenv("MY_KEY", "SECRET")
        monkeypatch.setenv("MISTRAL_API_KEY", "SECRET")
        monkeypatch.setenv(ORIGINS_VARIABLE, "MY_KEY=http://127.0.0.1:9 UNSET_KEY=https://x.example")
        (tmp_path / ".env").write_text("GROQ_API_KEY=SECRET\n")
        shown = CliRunner().invoke(command, standalone_mode=False).stdout
        assert "SECRET" not in shown and shown[shown.index("Keys\n") :].startswith(
            "Keys\n  GROQ_API_KEY, from .env  may be sent to https://api.groq.com\n"
            "  MISTRAL_API_KEY  may be sent to https://api.mistral.ai\n  MY_KEY  may be sent to http://127.0.0.1:9\n\n"
        )

    def test_redirect_is_reported_and_not_followed(self, monkeypatch):
        with Endpoint() as far, Endpoint(302, Location=f"{far.url}/models?secret=SECRET") as near:
            monkeypatch.setenv("OPENAI_BASE_URL", near.url)
            monkeypatch.setenv("OPENAI_API_KEY", "SECRET")
            (one,) = self.told()[1]
        assert one["outcome"] == "redirected" and "redirects to 127.0.0.1 (HTTP 302)" in one["message"]
        assert far.keys == []

    @pytest.mark.parametrize(
        ("status", "body", "outcome", "words"),
        [
            (401, "", "unauthorized", "unauthorized (HTTP 401): the endpoint rejects the key in OPENAI_API_KEY"),
            (403, "", "unauthorized", "unauthorized (HTTP 403)"),
            (404, "", "not_found", "not found (HTTP 404): /models does not exist; does the URL end in /v1?"),
            (503, "", "failing", "server error: HTTP 503"),
            (200, "<html>", "foreign", "the response is not from an OpenAI-compatible API"),
            (200, "[]", "foreign", "the response is not from an OpenAI-compatible API"),
            (200, "[" * 200_000, "foreign", "the response is not from an OpenAI-compatible API"),
            (200, '{"data": []}', "ok", "available, 0 models"),
        ],
    )
    def test_endpoint_fault_has_an_outcome(self, monkeypatch, status, body, outcome, words):
        with Endpoint(status, body) as endpoint:
            monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
            monkeypatch.setenv("OPENAI_API_KEY", "SECRET")
            (one,) = self.told()[1]
        assert one["outcome"] == outcome and one["message"].startswith(words)

    def test_refused_connection_and_unknown_host_are_reported(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            refused = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        code, told = self.told("--base-url", refused, "--base-url", "http://nosuch.invalid/v1")
        assert [one["outcome"] for one in told] == ["refused", "unknown_host"]
        assert code == 1 and all(one["seconds"] is None for one in told)

    @pytest.mark.parametrize(
        ("head", "words"),
        [
            ("HTTP/1.1 500 \x1b[31mred", r"HTTP 500 \x1b[31mred"),
            ("HTTP/1.1 302 Found\r\nLocation: http://e\u202evil/", r"redirects to e\u202evil (HTTP 302)"),
        ],
    )
    def test_server_text_is_escaped_on_the_terminal(self, head, words):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer() -> None:
                with server.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(f"{head}\r\nContent-Length: 0\r\n\r\n".encode())

            threading.Thread(target=answer, daemon=True).start()
            _, (one,) = self.told("--base-url", f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        assert words in one["message"] and one["message"].isprintable()

    def test_server_without_http_is_reported(self):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def greet() -> None:
                with server.accept()[0] as connection:
                    connection.sendall(b"SSH-2.0\r\n")

            threading.Thread(target=greet, daemon=True).start()
            _, (one,) = self.told("--base-url", f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        assert one["outcome"] == "broken"

    def test_url_with_credentials_is_rejected(self):
        with pytest.raises(ConfigError, match="contains a user name or password"):
            CliRunner().invoke(
                command, ["--base-url", "http://u:SECRET@h/v1"], standalone_mode=False, catch_exceptions=False
            )

    def test_invalid_url_variable_affects_only_its_own_line(self, monkeypatch):
        monkeypatch.setenv("OPENAI_BASE_URL", "localhost:8000")
        _, (one,) = self.told()
        assert one["outcome"] == "misconfigured" and "is not a URL" in one["message"]

    def test_dotenv_variables_are_used(self, tmp_path):
        with Endpoint() as endpoint:
            (tmp_path / ".env").write_text(f"OPENAI_BASE_URL={endpoint.url}\nOPENAI_API_KEY=SECRET\n")
            (one,) = self.told()[1]
        assert one["outcome"] == "ok" and endpoint.keys == ["Bearer SECRET"]
