"""Fuzz test of trust: task files loaded without a question execute no code and send no variable."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_kit.errors import RewardKitError
from reward_kit.runs.plan import RunArgs, plan_run
from reward_kit.runs.tasks import check_resource_starts, load_task, read_task
from reward_kit.runs.trust import plan_file_code, untrusted

VARIABLE, VALUE = "CANARY_TOKEN", "canary-value-0123456789"
CANARY = """
from pathlib import Path
Path(__file__).with_name("touched").touch()
from reward_kit import ToolRegistry
thing = registry = ToolRegistry("canary")
"""
CODE = st.sampled_from(
    [
        *("canary.py:thing", "canary.py", "./canary.py:thing", "canary.py.thing", "canary:thing", "canary.thing"),
        *("canary", "in side/canary.py:thing", "in side/canary.py", "link.py:thing", "a:b.py:thing"),
    ]
)
COMMAND = st.sampled_from(["touch touched", ["touch", "touched"], ["sh", "-c", "touch touched"], ["sh", "run.sh"]])
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 99),
    st.sampled_from(
        ["", "random", "expert", "warm", "in_process", "isolated", "hello", "{{ question }}", "rows.jsonl"]
    ),
    st.sampled_from(["../secret.txt", "/etc/passwd", "link.py", "."]),
)
VALUES = st.one_of(PLAIN, CODE, COMMAND)
RESOURCES = ("mcp", "http", "openenv", "filesystem", "sqlite", "python_state", "gymnasium", "sokoban", "webshop")
RESOURCE_KEYS = (
    *("command", "env", "pass_env", "cwd", "url", "headers", "headers_env", "base_url", "resource_server", "tools"),
    *("env_id", "env_kwargs", "files", "source_dir", "working_copy", "initial_state", "seed_sql", "seed_sql_file"),
    *("task_folder", "start_command", "health_check_url", "config", "type", "name", "task", "messages"),
)


def mappings(keys: tuple[str, ...], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(keys), values, max_size=3)


def tasks(address: str) -> st.SearchStrategy[dict[str, Any]]:
    """Return task files of real keys, with canaries in valid and invalid positions."""
    server = st.fixed_dictionaries(
        {"start_command": st.just("touch touched"), "health_check_url": st.just(f"{address}/health")}
    )
    headers = st.just({"X-Token": VARIABLE})
    addresses = st.just(address)
    config = st.one_of(
        mappings(RESOURCE_KEYS, st.one_of(VALUES, mappings(RESOURCE_KEYS, VALUES))),
        st.fixed_dictionaries({"command": COMMAND}, optional={"env": mappings(("A",), CODE)}),
        st.fixed_dictionaries({"base_url": addresses, "headers_env": headers}),
        st.fixed_dictionaries({"url": addresses, "headers_env": headers}),
        st.fixed_dictionaries({"resource_server": server}),
        st.fixed_dictionaries({"env_id": st.one_of(CODE, st.just("FrozenLake-v1"))}),
        st.fixed_dictionaries(
            {
                "resources": st.lists(
                    st.fixed_dictionaries({"type": st.one_of(CODE, st.sampled_from(RESOURCES))}), max_size=2
                )
            }
        ),
    )
    policy = st.one_of(
        VALUES,
        st.fixed_dictionaries(
            {"type": st.one_of(CODE, st.sampled_from(["openai", "own_agent", "hf", "scripted", "human", "replay"]))},
            optional={
                "agent": CODE,
                "model": VALUES,
                "base_url": addresses,
                "api_key_env": st.just(VARIABLE),
                "run": VALUES,
                "replies": CODE,
                "actions": VALUES,
            },
        ),
    )
    sandbox = st.fixed_dictionaries({}, optional={"level": PLAIN, "preload": st.lists(CODE, max_size=1)})
    required = {"name": st.just("t"), "messages": st.just([{"role": "user", "content": "hello"}])}
    return st.fixed_dictionaries(
        required,
        optional={
            "resource_type": st.one_of(st.sampled_from((*RESOURCES, "composite")), CODE),
            "base_resource_config": config,
            "resource_server": server,
            "tools_module_path": VALUES,
            "reward_function_path": VALUES,
            "custom_reward_function": mappings(("path", "name", "reward_kwargs"), VALUES),
            "reward_options": mappings(("base_url", "resources", "n"), st.one_of(VALUES, addresses)),
            "redact": VALUES,
            "policy": policy,
            "user": policy,
            "sandbox": sandbox,
            "dataset_path": PLAIN,
            "description": VALUES,
        },
    )


class Listener:
    """A server that records its requests and returns nothing useful."""

    def __init__(self) -> None:
        self.received = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                self.received += connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    server = Listener()
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "task"
    (folder / "in side").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text(VALUE)
    for name in ("canary.py", "in side/canary.py", "a:b.py"):
        (folder / name).write_text(CANARY)
    (folder / "link.py").symlink_to("canary.py")
    (folder / "run.sh").write_text("touch touched\n")
    (folder / "rows.jsonl").write_text('{"id": "a", "question": "?"}\n')
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(VARIABLE, VALUE)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


def load_if_not_asked(path: Path) -> bool:
    """Load a task file that requires no trust, as `check` does; return whether it was loaded."""
    code = plan_file_code(path)
    if any(untrusted(code)):
        return False
    task = load_task(path)
    plan_run(task, RunArgs(task_path=path), needs_policy=False)
    anyio.run(check_resource_starts, task)
    return True


def explore(folder: Path, listener: Listener, examples: int) -> None:
    outcomes = dict.fromkeys(("loaded", "asked", "refused"), 0)

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(tasks(listener.address))
    def run(task: dict[str, Any]) -> None:
        path = folder / "task.yaml"
        path.write_text(yaml.safe_dump(task))
        with suppress(RewardKitError):
            read_task(path)
        try:
            outcomes["loaded" if load_if_not_asked(path) else "asked"] += 1
        except RewardKitError:
            outcomes["refused"] += 1
        assert not any(folder.rglob("touched")), task
        assert VALUE.encode() not in listener.received, task

    run()
    assert all(outcomes.values()), f"an outcome never came about: {outcomes}"


def test_task_files_loaded_without_a_question_execute_nothing(folder: Path, listener: Listener) -> None:
    explore(folder, listener, examples=150)


@pytest.mark.campaign
def test_twenty_thousand_task_files_loaded_without_a_question_execute_nothing(folder: Path, listener: Listener) -> None:
    explore(folder, listener, examples=20_000)


def test_canaries_detect_execution(folder: Path) -> None:
    (folder / "task.yaml").write_text("name: t\nmessages: [{role: user, content: x}]\ntools_module_path: canary.py\n")
    load_task(folder / "task.yaml")
    assert (folder / "touched").exists()
