"""Programs that run in the sandbox, the limits of their calls, and the files that they can import and read."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from reward_kit.errors import PACKAGE_DIRECTORIES, ConfigError

CallForm = Literal["reward", "plain"]
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_TIME_ZONES = ("/etc/localtime", "/usr/share/zoneinfo")
_PROGRAMS = ("/bin", "/usr/bin", "/usr/local/bin")
_NEVER_READ = ("/", "/proc", "/sys", "/dev", "/tmp")
SOURCE_LIMIT = 4 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """Code that is called in the sandbox.

    Attributes:
        source: the source text.
        function: the name of the function to call.
        filename: the file name in tracebacks.
        form: "reward" calls `function(messages=…, ground_truth=…, …)` and converts a result model to JSON. "plain"
            passes the argument and the result unchanged.
        imports: the modules to import once, before the first call. They are imported without secrets. If there are
            namespaces, they are also imported without network access and without the host's files. The limits and the
            filter for calls do not apply yet, so list only trusted modules.
        read_paths: additional readable files and directories. The paths are absolute, on the machine where the program
            runs.
        search_paths: directories from which the program may import and read.
        last_call: for the form "plain", the JSON argument of a final call that a warm child receives before it ends
            normally. The answer to this call is ignored. "" means that there is no final call.
    """

    source: str
    function: str = "evaluate"
    filename: str = "<program>"
    form: CallForm = "reward"
    imports: tuple[str, ...] = ()
    read_paths: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()
    last_call: str = ""

    def __post_init__(self) -> None:
        if len(self.source) > SOURCE_LIMIT:
            raise ConfigError(f"{self.filename} has {len(self.source):,} characters; the maximum is {SOURCE_LIMIT:,}")
        if not self.function.isidentifier():
            raise ConfigError(f"{self.function!r} is not a function name")
        for name in self.imports:
            if not _MODULE_NAME.match(name):
                raise ConfigError(f"imports: {name!r} is not a module name")
        for path in (*self.read_paths, *self.search_paths):
            if not os.path.isabs(path) or os.path.normpath(path) != path:  # noqa: PTH117
                raise ConfigError(f"read paths must be absolute and normalized, got {path!r}")
            if path in _NEVER_READ or path.startswith(("/proc/", "/sys/", "/dev/")):
                raise ConfigError(f"{path} is never readable in the sandbox; specify the directory that is needed")

    def payload(self) -> bytes:
        """Return the JSON to send to a child in a frame."""
        fields = {
            "source": self.source,
            "filename": self.filename,
            "function": self.function,
            "module": "reward_program",
            "form": self.form,
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """The configuration of a zygote. Programs with the same configuration share zygotes."""

    imports: tuple[str, ...]
    sys_path: tuple[str, ...]
    read_paths: tuple[tuple[str, str], ...]  # each path with its resolved path
    may_start_processes: bool  # True if `fork` and `execve` are allowed


def zygote_spec_for(program: Program, *, may_start_processes: bool) -> ZygoteSpec:
    """Return the configuration of the zygotes for a program on this machine."""
    for path in (*program.read_paths, *program.search_paths):
        if not os.path.exists(path):  # noqa: PTH110
            raise ConfigError(f"read path {path} does not exist")
        if os.geteuid() == 0:
            wanted = 0o005 if os.path.isdir(path) else 0o004  # noqa: PTH112
            if os.stat(path).st_mode & wanted != wanted:  # noqa: PTH116
                raise ConfigError(f"{path} is not readable by the sandbox user; run chmod o+rX {path}")
    library = library_path()
    paths = [*library, str(_PACKAGE), f"{sys.base_prefix}/lib", *_LIBRARIES, *_TIME_ZONES]
    if may_start_processes:
        paths += [*_PROGRAMS, f"{sys.base_prefix}/bin", f"{sys.prefix}/bin", f"{sys.prefix}/pyvenv.cfg"]
    paths += [*program.read_paths, *program.search_paths]
    real = {path: os.path.realpath(path) for path in paths if os.path.exists(path)}  # noqa: PTH110
    # The package itself is loaded before the zygote is confined. The rest of its directory is not importable.
    sys_path = (*library, str(_PACKAGE.parent), *program.search_paths)
    return ZygoteSpec(program.imports, sys_path, tuple(sorted(real.items())), may_start_processes)


def library_path() -> list[str]:
    """Return the entries of `sys.path` for the standard library and installed packages, without project directories.

    Links are resolved on both sides. An entry is also kept if it has the name of a package directory. Such a directory
    may belong to a different virtual environment on `PYTHONPATH`.
    """
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots = {os.path.realpath(root) for root in (*standard, sysconfig.get_config_var("DESTSHARED")) if root}
    real = {entry: os.path.realpath(entry) for entry in sys.path if os.path.isdir(entry)}  # noqa: PTH112
    return [entry for entry, path in real.items() if path in roots or Path(path).name in PACKAGE_DIRECTORIES]


MOST_RESULT_KB = 1 << 20
_INTEGERS = ("memory_mb", "processes", "open_files", "disk_mb", "output_kb", "result_kb")
_AT_LEAST = {"memory_mb": 16, "processes": 0, "open_files": 8, "disk_mb": 1, "output_kb": 0, "result_kb": 1}
_AT_MOST = {"memory_mb": 1 << 20, "processes": 4096, "open_files": 4096, "disk_mb": 1 << 20}
_AT_MOST |= {"output_kb": 1 << 20, "result_kb": MOST_RESULT_KB}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call. Each limit has its own failure class.

    Attributes:
        wall_s: the wall time in seconds.
        cpu_s: the CPU time of each process in seconds, rounded up to a whole number.
        memory_mb: the address space of each process in MiB, in addition to the memory of the preloaded interpreter. If
            `processes` is above 0, all processes of the call together may use `memory_mb` times (1 + `processes`), plus
            `disk_mb` for files.
        processes: the number of processes that the code may start. 0 means that it must not start any. Threads count as
            processes.
        open_files: the number of open file descriptors, including the four that are open at the start.
        disk_mb: the size of the files in the temporary directory in MiB.
        output_kb: the maximum size of stdout and of stderr that is stored, in KiB each. The rest is dropped, and the
            outcome reports that output was dropped.
        result_kb: the size of the result in KiB.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    processes: int = 0
    open_files: int = 64
    disk_mb: int = 16
    output_kb: int = 64
    result_kb: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_count = field.name in _INTEGERS
            if isinstance(value, bool) or not isinstance(value, int if is_count else int | float):
                wanted = "a whole number" if is_count else "a number of seconds"
                raise ConfigError(f"limits.{field.name} must be {wanted}, got {value!r}")
            if is_count and not _AT_LEAST[field.name] <= value <= _AT_MOST[field.name]:
                raise ConfigError(
                    f"limits.{field.name} must be between {_AT_LEAST[field.name]} and "
                    f"{_AT_MOST[field.name]:,}, got {value:,}"
                )
            if not is_count and not (math.isfinite(value) and 0 < value <= 86_400):
                raise ConfigError(f"limits.{field.name} must be a positive number of seconds up to a day, got {value}")

    @property
    def output_bytes(self) -> int:
        """`output_kb` in bytes."""
        return self.output_kb * 1024

    @property
    def result_bytes(self) -> int:
        """`result_kb` in bytes."""
        return self.result_kb * 1024
