"""Languages besides Python that `program_code` runs: how each is compiled and started, and where its tools are."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace

from reward_kit.errors import ConfigError
from reward_kit.sandbox.program import Limits, Program

_INSIDE = "reward_kit.rewards.programs.inside"
_WHERE = "/usr/local/bin:/usr/bin:/bin"
_HEADERS = ("/usr/include", "/usr/local/include", "/usr/libexec/gcc", "/etc/alternatives")
_PROCESSES = 40

ALIASES: dict[str, frozenset[str]] = {
    "c": frozenset({"c", "c99", "c11", "c17"}),
    "cpp": frozenset({"cpp", "c++", "cc", "cxx", "c++11", "c++14", "c++17", "c++20", "cpp17", "cpp20"}),
    "javascript": frozenset({"javascript", "js", "node", "nodejs", "mjs"}),
    "bash": frozenset({"bash", "sh", "shell"}),
}
"""Tags of fenced blocks, by language."""


@dataclass(frozen=True, slots=True)
class Language:
    """How programs of a language are run.

    Attributes:
        tool: the compiler or interpreter, looked for in the folders that the sandbox shows.
        filename: what the program is called.
        compile_command: [] where there is nothing to compile.
        run_command: for each run.
        install: how Debian installs the tool.
    """

    tool: str
    filename: str
    compile_command: tuple[str, ...]
    run_command: tuple[str, ...]
    install: str

    def limits(self, limits: Limits, compile_s: float, runs: int) -> Limits:
        """The limits of compiling and of all runs, from those of one run."""
        if not 0 < compile_s <= 600:
            raise ConfigError(f"option 'compile_s': it is more than 0 and at most 600, not {compile_s}")
        return replace(
            limits,
            wall_s=min(86_400.0, compile_s + limits.wall_s * runs + 1),
            cpu_s=max(limits.cpu_s, compile_s),
            processes=_PROCESSES,
            disk_mb=max(64, 4 * limits.disk_mb),
            result_kb=2 * limits.result_kb,
        )

    def program(self, text: str, limits: Limits, time_s: float, compile_s: float) -> Program:
        """What the sandbox runs: it compiles the text once and runs it for each input."""
        told = {"compile_s": compile_s, "run_s": 3 * time_s + 1, "cpu_s": time_s, "output": limits.output_bytes}
        given = (text, self.filename, [*self.compile_command], [*self.run_command], told)
        source = f"from {_INSIDE} import compiled\nask = compiled(*{given!r})\n"
        paths = tuple(path for path in _HEADERS if os.path.isdir(path))  # noqa: PTH112
        imports = (_INSIDE, "subprocess", "tempfile")
        return Program(source, "ask", "<harness>", form="plain", imports=imports, read_paths=paths)


LANGUAGES = {
    "c": Language(
        "gcc", "main.c", ("gcc", "-O2", "-std=gnu17", "-o", "main", "main.c", "-lm"), ("./main",), "gcc libc6-dev"
    ),
    "cpp": Language("g++", "main.cpp", ("g++", "-O2", "-std=gnu++17", "-o", "main", "main.cpp"), ("./main",), "g++"),
    "javascript": Language("node", "main.js", (), ("node", "main.js"), "nodejs"),
    "bash": Language("bash", "main.sh", (), ("bash", "main.sh"), "bash"),
}


def missing_tool(language: str) -> str:
    """Why programs of a language cannot be run on this machine; "" where they can."""
    found = LANGUAGES[language]
    if shutil.which(found.tool, path=_WHERE):
        return ""
    return f"{found.tool} is not in {_WHERE}, where the sandbox looks; on Debian: apt-get install {found.install}"


def language_of(name: str) -> Language:
    """How programs of a language are run.

    Raises:
        ConfigError: its tool is to be on this machine and is not.
    """
    if problem := missing_tool(name):
        raise ConfigError(f"program_code, language {name!r}: {problem}")
    return LANGUAGES[name]
