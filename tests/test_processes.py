"""Child processes and temporary folders do not outlive the process that made them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reward_kit import process_guardian
from reward_kit.errors import ConfigError
from reward_kit.process_guardian import MARK, find_processes, kill_all
from reward_kit.processes import (
    LOG_FOLDER,
    ChildProcess,
    child_environment,
    remove_folder,
    start_process,
    temporary_folder,
    temporary_root,
)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignoring = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
for own_session in (False, True):
    subprocess.Popen([sys.executable, "-S", "-c", ignoring], start_new_session=own_session)
time.sleep(100)
"""

# Starts a child with two grandchildren, fills a folder, says what it guards, and goes on to its end.
PARENT = f"""
import asyncio, os, sys
from reward_kit import processes
from reward_kit.process_guardian import MARK

async def main():
    environment = processes.child_environment()
    folder = processes.temporary_folder("some-")
    (folder / "file").write_text("kept")
    (folder / "locked").mkdir()
    (folder / "locked" / "file").write_text("kept")
    (folder / "locked").chmod(0o500)
    child = await processes.start_process([sys.executable, "-S", "-c", {STUBBORN!r}], cwd=None, env=environment,
                                          log_name="stubborn")
    while child.log_tail().count("up") < 2:
        await asyncio.sleep(0.005)
    print(environment[MARK], processes.temporary_root(), flush=True)
    END

asyncio.run(main())
"""


class Parent:
    """A separate process that uses the module, with its guarded processes."""

    def __init__(self, end: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT.replace("END", end)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.token, root = self.process.stdout.readline().split()
        self.root = Path(root)

    def assert_nothing_is_left(self, within_s: float) -> None:
        self.process.wait(timeout=10)
        end = time.monotonic() + within_s
        while time.monotonic() < end and (find_processes(self.token) or self.root.exists()):
            time.sleep(0.01)
        assert not find_processes(self.token)
        assert not self.root.exists()


@pytest.fixture
def parents() -> Iterator[list[Parent]]:
    started: list[Parent] = []
    yield started
    for parent in started:
        with contextlib.suppress(ProcessLookupError):
            parent.process.kill()
        parent.process.wait()
        assert parent.process.stdout is not None
        parent.process.stdout.close()


def test_killed_process_leaves_no_children_or_folders(parents: list[Parent]) -> None:
    killed, other = Parent("await asyncio.sleep(100)"), Parent("await asyncio.sleep(100)")
    parents += [killed, other]
    assert len(find_processes(killed.token)) == 3
    killed.process.kill()
    killed.assert_nothing_is_left(within_s=2)
    assert len(find_processes(other.token)) == 3
    assert other.root.exists()


@pytest.mark.parametrize("end", ["return", "raise KeyError", "os._exit(1)"])
def test_exited_process_leaves_no_children_or_folders(parents: list[Parent], end: str) -> None:
    parents.append(Parent(end))
    # Where the interpreter still runs its own exit, everything is gone before the process is.
    parents[0].assert_nothing_is_left(within_s=2 if "_exit" in end else 0)


def test_interrupted_process_group_leaves_no_children_or_folders(parents: list[Parent]) -> None:
    parents.append(Parent("await asyncio.sleep(100)"))
    os.killpg(parents[0].process.pid, signal.SIGINT)
    parents[0].assert_nothing_is_left(within_s=0)


def test_exit_of_a_fork_does_not_trigger_cleanup_and_parent_exit_does(parents: list[Parent]) -> None:
    parents.append(Parent("pid = os.fork(); (pid or sys.exit(0)); os.waitpid(pid, 0); await asyncio.sleep(100)"))
    time.sleep(0.1)
    assert len(find_processes(parents[0].token)) == 3
    assert parents[0].root.exists()
    parents.append(Parent("import time; os.fork() or time.sleep(4); await asyncio.sleep(100)"))
    time.sleep(0.1)
    parents[1].process.kill()
    parents[1].assert_nothing_is_left(within_s=2)


def kill_while_it_starts_children(delay_s: float) -> None:
    """Kill a process that keeps starting children, and expect that none survives."""
    code = (
        "import subprocess, sys\nfrom reward_kit import processes\nfrom reward_kit.process_guardian import MARK\n"
        "environment = processes.child_environment()\nprint(environment[MARK], flush=True)\n"
        "while True: subprocess.Popen(['sleep', '100'], env=environment, start_new_session=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        token = process.stdout.readline().strip()
        time.sleep(delay_s)
        process.kill()
    time.sleep(0.3)
    end = time.monotonic() + 2
    while find_processes(token) and time.monotonic() < end:
        time.sleep(0.02)
    assert not find_processes(token)


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
def test_child_started_right_before_the_kill_is_killed(delay_s: float) -> None:
    kill_while_it_starts_children(delay_s)


def test_guardian_waits_for_starting_processes() -> None:
    # Between its fork and its exec a child does not carry the token yet.
    command = "sleep 0.05; exec env REWARD_KIT_GUARD=just-started sleep 100"
    with subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True) as late:
        try:
            kill_all("just-started", quiet_checks=process_guardian._QUIET_CHECKS)
            assert late.wait(timeout=2) == -signal.SIGKILL
        finally:
            late.kill()


@pytest.mark.campaign
@pytest.mark.parametrize("number", range(60))
def test_child_started_right_before_the_kill_is_always_killed(number: int) -> None:
    kill_while_it_starts_children(number / 1000)


def test_importing_the_module_starts_no_process() -> None:
    code = (
        "import os, subprocess, sys\nimport reward_kit.processes\nimport reward_kit.environments.filesystem\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read().split())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


KEPT = {
    **{"PATH": "/bin", "HOME": "/root", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "TMPDIR": "/tmp"},
    **{"VIRTUAL_ENV": "/venv", "XDG_CACHE_HOME": "/c", "SSL_CERT_FILE": "/ca.pem", "OMP_NUM_THREADS": "1"},
    **{"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "0", "https_proxy": "http://proxy:1"},
}
WITHHELD = {
    **{"OPENAI_API_KEY": "x", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ACCESS_KEY_ID": "x"},
    **{"DATABASE_URL": "postgres://me:x@db", "AN_INNOCENT_NAME": "x", "GITHUB_PAT": "x", "SSH_AUTH_SOCK": "/s"},
    **{"HTTPS_PROXY": "http://me:hunter2@proxy:1", "PATHS": "x", "XDG_": "x", "lc_all": "x"},
}


def test_children_inherit_listed_and_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - {MARK}:
        monkeypatch.delenv(name)
    for name, value in {**KEPT, **WITHHELD, "PIP_INDEX_URL": "https://index"}.items():
        monkeypatch.setenv(name, value)
    assert child_environment().keys() - {MARK} == KEPT.keys()
    environment = child_environment({"EXTRA": "1"}, pass_names=["HF_TOKEN"])
    assert environment.keys() - {MARK} == {*KEPT, "EXTRA", "HF_TOKEN"}
    with pytest.raises(ConfigError, match="NOT_THERE is not set"):
        child_environment(pass_names=["NOT_THERE"])


def test_outer_guardians_guard_grandchildren(monkeypatch: pytest.MonkeyPatch) -> None:
    own = child_environment()[MARK]
    monkeypatch.setenv(MARK, "outer")
    assert child_environment()[MARK] == f"outer:{own}"


def test_temporary_folders_are_private_and_share_a_root() -> None:
    one, two = temporary_folder("one-"), temporary_folder("one-")
    assert one != two
    assert one.parent == two.parent == temporary_root()
    assert one.stat().st_mode & 0o777 == 0o700
    # A sandbox that gives up root lets others through the root to its own folder, and lets them see nothing.
    assert temporary_root().stat().st_mode & 0o066 == 0
    (one / "locked").mkdir()
    (one / "locked" / "file").touch()
    (one / "locked").chmod(0o500)
    for folder in (one, two):
        remove_folder(folder)
        remove_folder(folder)
    assert not one.exists()
    assert not two.exists()


async def started(*command: str) -> ChildProcess:
    return await start_process(command, cwd=None, env=child_environment(), log_name="child")


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_child_that_ignores_sigterm_is_killed_with_its_children() -> None:
    child = await started(sys.executable, "-S", "-c", STUBBORN)
    token = child_environment()[MARK]
    await until(lambda: child.log_tail().count("up") == 2)
    assert len(find_processes(token)) == 3
    before = time.monotonic()
    await child.end(grace_s=0.2)
    assert time.monotonic() - before > 0.2
    assert find_processes(token) == []
    assert child.returncode == -signal.SIGKILL


async def test_child_that_obeys_sigterm_ends_within_the_grace_period() -> None:
    child = await started(*SLEEP)
    before = time.monotonic()
    await child.end(grace_s=60)
    await child.end()
    assert child.returncode == -signal.SIGTERM
    assert time.monotonic() - before < 30


async def test_descendants_of_a_dead_child_are_killed() -> None:
    child = await started("/bin/sh", "-c", "sleep 100 & exit 7")
    await until(lambda: child.returncode is not None)
    assert child.returncode == 7
    assert len(find_processes(child_environment()[MARK])) == 1
    await child.end(grace_s=1)
    assert find_processes(child_environment()[MARK]) == []
    assert child.returncode == 7


async def test_log_tail_is_bounded_and_readable_after_the_child_exits() -> None:
    code = "print('x' * 300_000); print('y' * 2000, 'end'); print('last')"
    child = await started(sys.executable, "-S", "-c", code)
    await until(lambda: child.returncode is not None)
    for _ in range(2):
        lines = child.log_tail().splitlines()
        assert lines[-1] == "last"
        assert max(len(line) for line in lines) == 501
        assert len(child.log_tail(1)) == 4
        await child.end()
    assert list(temporary_root().glob("log-*")) == []


async def test_child_logs_of_a_run_have_unique_names(tmp_path: Path) -> None:
    token = LOG_FOLDER.set(tmp_path / "logs")
    try:
        children = [await started("/bin/sh", "-c", f"echo {number}") for number in range(2)]
    finally:
        LOG_FOLDER.reset(token)
    for child in children:
        await until(lambda child=child: child.returncode is not None)
        await child.end()
    assert (tmp_path / "logs" / "child.log").read_text() == "0\n"
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "logs" / "child.log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "logs" / "child-2.log").read_text() == "1\n"


async def test_missing_program_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-program --port cannot be started: No such file"):
        await started("no-such-program", "--port")
    assert list(temporary_root().glob("log-*")) == []
