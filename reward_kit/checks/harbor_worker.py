"""Code that runs inside the sandbox to run one attempt at a Harbor task.

The paths of a container, such as `/app` and `/tests`, do not exist in the sandbox. The work directory contains them,
and the paths in text files are rewritten to it. Nothing here is trusted: the process of an attempt can change it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
from typing import Any

_ROOTS = ("app", "tests", "logs", "solution", "oracle", "workspace", "root", "data", "output", "input", "results")
"""Directories of a container whose paths are rewritten, in addition to the first part of the working directory."""
_MOST_FILES = 200
_MOST_BYTES = 1 << 20
_LOG_CHARS = 4_000
_TOOLS = {
    "python": 'exec {python} "$@"',
    "python3": 'exec {python} "$@"',
    "pytest": 'exec {python} -P -m pytest "$@"',
    "apt-get": "exit 0",
    "apt": "exit 0",
    "pip": "exit 0",
    "pip3": "exit 0",
    "curl": "exit 0",
    "sudo": 'exec "$@"',
    # uvx runs a tool: skip the options and their values, and drop the report that only a plugin can write.
    "uvx": (
        "while [ $# -gt 0 ]; do\n"
        'case "$1" in -p|-w|--python|--with|--from) shift 2;; -*) shift;; *) break;; esac; done\n'
        "tool=$1; shift; rest=()\n"
        'while [ $# -gt 0 ]; do if [ "$1" = --ctrf ]; then shift 2; else rest+=("$1"); shift; fi; done\n'
        'exec "$tool" "${{rest[@]}}"'
    ),
    "uv": 'case "$1" in tool) shift 2; exec uvx "$@";; run) shift; exec uvx "$@";; *) exit 0;; esac',
}
"""Replacements for commands that install packages, and for the interpreter, as Bash scripts by name."""


def run_attempt(request: dict[str, Any]) -> dict[str, Any]:
    """Run the agent's script and then the tests, and return the reward and the files that the agent changed.

    Args:
        request: `workdir` is the working directory in the container. `environment`, `solution`, `agent` and `tests`
            map container paths to base64. `setup`, `script` and `test` are Bash commands. `agent_s` and `test_s` are
            time limits in seconds, and `env` contains environment variables of the tests.
    """
    root = os.getcwd()  # noqa: PTH109
    paths = _PathRewriter(root, request["workdir"])
    workdir = root + request["workdir"]
    for folder in (workdir, f"{root}/logs/verifier", f"{root}/logs/agent", f"{root}/root", f"{root}/.bin"):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    for name, text in _TOOLS.items():
        _write(f"{root}/.bin/{name}", f"#!/bin/bash\n{text.format(python=sys.executable)}\n".encode())
    variables = {"PATH": f"{root}/.bin:/usr/local/bin:/usr/bin:/bin", "HOME": f"{root}/root", "LANG": "C.UTF-8"}
    variables |= {"TMPDIR": root, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    paths.write(request["environment"])
    log = ""
    if request["setup"]:
        _, log = _run(paths.rewrite(request["setup"]), workdir, variables, request["agent_s"])
    before = _files(workdir)
    paths.write(request["solution"])
    paths.write(request["agent"])
    if request["script"]:
        _, text = _run(paths.rewrite(request["script"]), workdir, variables, request["agent_s"])
        log += text
    changed = {name: data for name, data in _files(workdir).items() if before.get(name) != data}
    paths.write(request["tests"])
    rewards = [f"{root}/logs/verifier/{name}" for name in ("reward.txt", "reward.json")]
    earlier = {path: _stamp(path) for path in rewards}
    status, text = _run(paths.rewrite(request["test"]), workdir, variables | request["env"], request["test_s"])
    # A reward file that the agent wrote counts only if the tests write none.
    written = [path for path in rewards if _stamp(path) not in (None, earlier[path])] or rewards
    return {
        **{name: _read(path) if path in written else "" for name, path in zip(("text", "json"), rewards, strict=True)},
        "status": status,
        "log": (log + text)[-_LOG_CHARS:].replace(root, ""),
        "changed": {
            request["workdir"] + name: base64.b64encode(data.replace(root.encode(), b"")).decode()
            for name, data in changed.items()
        },
    }


class _PathRewriter:
    """Writes files below the work directory, and rewrites the container's paths in texts."""

    def __init__(self, root: str, workdir: str) -> None:
        names = {*_ROOTS, workdir.strip("/").partition("/")[0]} - {""}
        self._root = root
        self._pattern = re.compile(rf"(?<![\w./$~}}*-])/(?=(?:{'|'.join(sorted(map(re.escape, names)))})(?![\w-]))")

    def rewrite(self, text: str) -> str:
        return self._pattern.sub(f"{self._root}/", text)

    def write(self, files: dict[str, str]) -> None:
        for path, encoded in files.items():
            data = base64.b64decode(encoded)
            with contextlib.suppress(UnicodeDecodeError):
                data = self.rewrite(data.decode()).encode()
            _write(self._root + path, data)


def _write(path: str, data: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if os.path.islink(path):  # noqa: PTH114
        os.unlink(path)  # noqa: PTH108
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(data)
    os.chmod(path, 0o755)  # noqa: PTH101


def _run(command: str, folder: str, variables: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Return the exit status of a Bash command, or None if it exceeded its time limit, and its output."""
    with open(f"{variables['TMPDIR']}/.log", "w+b") as log:  # noqa: PTH123
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - 4 * _LOG_CHARS))
        return status, log.read().decode("utf-8", "replace")


def _files(folder: str) -> dict[str, bytes]:
    """Return the regular files below a folder, by their path in it."""
    found: dict[str, bytes] = {}
    size = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__", ".pytest_cache"))
        for name in sorted(names):
            path = f"{parent}/{name}"
            details = os.lstat(path)
            size += details.st_size
            if stat.S_ISREG(details.st_mode) and len(found) < _MOST_FILES and size <= _MOST_BYTES:
                with open(path, "rb") as file:  # noqa: PTH123
                    found[path[len(folder) :]] = file.read()
    return found


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return a value that changes whenever a file is written, or None if it is missing."""
    try:
        facts = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(_LOG_CHARS)
    except OSError:
        return ""
