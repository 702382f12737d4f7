"""Test an engine in a worker process: requests, isolation, timeouts and crashes."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path

import anyio
import pytest

from reward_kit.environments.engine_process import EngineProcess
from reward_kit.errors import ConfigError, EnvironmentFailure
from reward_kit.processes import temporary_root

PYTHON_FROM_HERE = os.path.relpath(sys.executable)
WORKER = """
    import os, subprocess, sys, tempfile
    from pathlib import Path
    from reward_kit.environments.engine_worker import run
    from reward_kit.errors import ConfigError

    def double(request):
        print("a library that prints")
        os.write(1, b"and C code that prints\\n")
        if not isinstance(request["value"], int):
            raise ConfigError(f"{request['value']!r} is no number")
        return request["value"] * 2

    def look(request):
        Path("left").write_text("x")
        child = subprocess.Popen(["sleep", "60"])
        names = sorted(os.environ)
        return {"child": child.pid, "here": str(Path.cwd()), "temporary": tempfile.gettempdir(), "names": names}

    run(lambda: {"double": double, "look": look, "text": lambda request: "x" * request["size"]})
"""


def command(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def broken(*lines: str) -> list[str]:
    """Return a worker that starts, and then misbehaves on request."""
    ready = """print('{"ok": "ready"}', flush=True)"""
    return [sys.executable, "-c", "\n".join(["import sys, time", ready, "sys.stdin.readline()", *lines])]


async def started(code: list[str], timeout: float = 20.0) -> EngineProcess:
    engine = EngineProcess("test engine", code, timeout=timeout)
    await engine.start()
    return engine


def engine_folders() -> set[Path]:
    return set(temporary_root().glob("engine-*"))


def runs(pid: int) -> bool:
    try:
        # A process that was killed and has no parent left to ask for it is a zombie.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def gone(pid: int) -> bool:
    for _ in range(100):
        if not runs(pid):
            return True
        await anyio.sleep(0.05)
    return False


async def test_worker_answers_despite_printed_output_and_rejected_requests() -> None:
    engine = EngineProcess("test engine", command(WORKER))
    assert await engine.start() == "ready"
    assert await engine.ask({"op": "double", "value": 21}) == 42
    with pytest.raises(ConfigError, match="'x' is no number"):
        await engine.ask({"op": "double", "value": "x"})
    assert await engine.ask({"op": "double", "value": -1}) == -2
    assert len(await engine.ask({"op": "text", "size": 3_000_000})) == 3_000_000
    with pytest.raises(EnvironmentFailure, match="limit of 16 MiB"):
        await engine.ask({"op": "text", "size": 17_000_000})
    with pytest.raises(EnvironmentFailure, match="test engine: not running"):
        await engine.ask({"op": "double", "value": 1})


async def test_worker_runs_in_its_own_folder_without_secrets_and_close_ends_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = {"SOME_API_KEY", "AN_INNOCENT_NAME"}
    for name in secret:
        monkeypatch.setenv(name, "sk-1")
    before = engine_folders()
    engine = await started(command(WORKER))
    seen = await engine.ask({"op": "look"})
    folder = Path(seen["here"])
    assert folder.is_relative_to(temporary_root()) and seen["temporary"] == str(folder)
    assert (folder / "left").exists() and not secret & {*seen["names"]} and "PATH" in seen["names"]
    assert runs(seen["child"])
    await engine.close()
    await engine.close()
    assert engine_folders() == before
    assert await gone(seen["child"])


async def test_dead_worker_is_reported_with_its_last_output() -> None:
    noise = "for number in range(5_000): print('line', number, file=sys.stderr)"
    engine = await started(broken(noise, "sys.exit('out of memory')"))
    with pytest.raises(EnvironmentFailure, match=r"the worker died \(exit code 1\)") as failure:
        await engine.ask({})
    said = str(failure.value).splitlines()
    assert said[-2:] == ["line 4999", "out of memory"] and len(said) == 10


async def test_request_to_a_dead_worker_fails() -> None:
    engine = await started([sys.executable, "-c", """print('{"ok": 1}', flush=True); raise SystemExit(3)"""])
    await anyio.sleep(0.3)
    with pytest.raises(EnvironmentFailure, match=r"exit code 3"):
        await engine.ask({"op": "x" * 200_000})


async def test_unresponsive_worker_is_killed() -> None:
    engine = await started(broken("print('thinking', file=sys.stderr, flush=True)", "time.sleep(60)"))
    start = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"test engine: no response within 0\.4 s: thinking"):
        await engine.ask({}, timeout=0.4)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("said", ["hello", "[1]", '{"what": 1}', "[" * 100_000])
async def test_worker_with_invalid_answer_is_killed(said: str) -> None:
    engine = await started(broken(f"print({said[:1]!r} * {len(said)} if {len(said) > 100} else {said[:100]!r})"))
    with pytest.raises(EnvironmentFailure, match="invalid response"):
        await engine.ask({})
    with pytest.raises(EnvironmentFailure, match="not running"):
        await engine.ask({})


async def test_answer_of_a_cancelled_request_is_not_used() -> None:
    engine = await started(broken("time.sleep(0.3)", """print('{"ok": 1}', flush=True)""", "time.sleep(60)"))
    with anyio.move_on_after(0.1):
        await engine.ask({})
    with pytest.raises(EnvironmentFailure, match="an earlier request was cancelled before it received a response"):
        await engine.ask({})


async def test_worker_start_failure_has_a_reason() -> None:
    before = engine_folders()
    with pytest.raises(EnvironmentFailure, match="No module named 'no_such_library'"):
        await started([sys.executable, "-c", "import no_such_library"])
    with pytest.raises(ConfigError, match="/no/such/program cannot be started: No such file"):
        await started(["/no/such/program"])
    refusing = """
        from reward_kit.environments.engine_worker import run
        from reward_kit.errors import ConfigError
        def start():
            raise ConfigError("install it first")
        run(start)
    """
    with pytest.raises(ConfigError, match="install it first"):
        await started(command(refusing))
    assert engine_folders() == before


async def test_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    note, before = tmp_path / "pid", engine_folders()
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(started, [sys.executable, "-c", code])
        while not (note.exists() and note.read_text()):  # noqa: ASYNC110
            await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()
    assert await gone(int(note.read_text()))
    assert engine_folders() == before


async def test_relative_program_path_is_resolved_in_the_current_folder() -> None:
    engine = await started([PYTHON_FROM_HERE, *command(WORKER)[1:]])
    assert await engine.ask({"op": "double", "value": 2}) == 4
    await engine.close()
