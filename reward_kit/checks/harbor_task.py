"""Harbor task folders, read without a container engine.

The format is described at https://www.harborframework.com/docs/tasks: `task.toml`, `instruction.md`, `environment/`
(usually a Dockerfile), `tests/test.sh`, which writes `/logs/verifier/reward.txt` or `reward.json`, and
`solution/solve.sh`.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from reward_kit.errors import ConfigError

_MOST_BYTES = 4 << 20
_BASES = re.compile(r"(.*/)?(python|ubuntu|debian|buildpack-deps)[\w-]*(:[\w.-]+)?(@sha256:\w+)?\Z")
_INSTALLERS = {"apt-get", "apt", "pip", "pip3", "uv", "curl"}
_SIMPLE = {"mkdir", "touch", "echo", "printf", "cp", "mv", "chmod", "chown", "ln", "rm", "cat", "sed", "true", ":"}
_AVAILABLE = {"curl", "ca-certificates", "wget", "tmux", "asciinema", "procps", "uv", "python3-pip", "python3-venv"}
_IGNORED = {
    "ENV",
    "USER",
    "EXPOSE",
    "CMD",
    "ENTRYPOINT",
    "LABEL",
    "ARG",
    "SHELL",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "VOLUME",
}
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A Harbor task folder.

    Attributes:
        folder: the folder.
        instruction: the text of `instruction.md`.
        workdir: the working directory in the container.
        environment: the files that the Dockerfile copies, by their path in the container.
        setup: the commands of the Dockerfile that only create or change files.
        tests: the files of `tests`, by their path in the container.
        solution: the files of `solution`, by their path in the container.
        agent_s: the time limit of the agent in seconds.
        test_s: the time limit of the tests in seconds.
        env: the environment variables of the tests.
        needs_container: the reasons why the task cannot run without a container.
    """

    folder: Path
    instruction: str
    workdir: str
    environment: dict[str, bytes]
    setup: str
    tests: dict[str, bytes]
    solution: dict[str, bytes]
    agent_s: float
    test_s: float
    env: dict[str, str]
    needs_container: tuple[str, ...]


def is_task_folder(target: str) -> bool:
    """Return True if the target is a folder with a `task.toml`."""
    return (Path(target) / "task.toml").is_file()


def read_harbor_task(folder: Path) -> HarborTask:
    """Read a task folder without running any of its code.

    Raises:
        ConfigError: If `task.toml` is invalid, or if `tests/test.sh` is missing.
    """
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder / 'task.toml'}: {error}") from error
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: tests/test.sh is missing, so there is no verifier to check")
    verifier, environment = _table(config, "verifier"), _table(config, "environment")
    reasons = _config_reasons(config, verifier, environment)
    image = _read_dockerfile(folder / "environment")
    env = {str(name): str(value) for name, value in _table(verifier, "env").items()}
    if any("$" in value for value in env.values()):
        reasons.append("task.toml: verifier.env refers to variables of the host")
    instruction = folder / "instruction.md"
    return HarborTask(
        folder=folder,
        instruction=instruction.read_text(encoding="utf-8", errors="replace") if instruction.is_file() else "",
        workdir=str(environment.get("workdir") or image.workdir),
        environment=image.files,
        setup="\n".join(image.setup),
        tests=_files_in(folder / "tests", "/tests"),
        solution=_files_in(folder / "solution", "/solution"),
        agent_s=_seconds(_table(config, "agent")),
        test_s=_seconds(verifier),
        env=env,
        needs_container=(*reasons, *image.reasons),
    )


def _config_reasons(config: dict[str, Any], verifier: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    reasons = [
        f"task.toml: {name}"
        for name, is_set in {
            "several steps": bool(config.get("steps")),
            "environment.os is windows": environment.get("os") == "windows",
            "environment.mcp_servers": bool(environment.get("mcp_servers")),
            "environment.gpus": bool(environment.get("gpus")),
            "a separate container for the tests": verifier.get("environment_mode") == "separate",
            "verifier.collect": bool(verifier.get("collect")),
        }.items()
        if is_set
    ]
    image = environment.get("docker_image")
    return [*reasons, f"task.toml: image {image}"] if image and not _BASES.match(str(image)) else reasons


def _table(parent: dict[str, Any], name: str) -> dict[str, Any]:
    table = parent.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"task.toml: {name} must be a table, got {table!r:.60}")
    return table


def _seconds(table: dict[str, Any]) -> float:
    value = table.get("timeout_sec", 60.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return min(float(value), 60.0) if is_number else 60.0


def _files_in(folder: Path, prefix: str) -> dict[str, bytes]:
    """Return the regular files of a folder by their path in the container. Links that leave the folder are ignored."""
    found: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            continue
        size += path.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{folder} has more than {_MOST_BYTES >> 20} MiB of files; check it in a container")
        found[f"{prefix}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return found


@dataclass(slots=True)
class _Image:
    """The result of reading a Dockerfile."""

    workdir: str = "/app"
    files: dict[str, bytes] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def _read_dockerfile(folder: Path) -> _Image:
    image, file = _Image(), folder / "Dockerfile"
    if next(folder.glob("docker-compose.y*ml"), None):
        image.reasons.append("environment/docker-compose.yaml: several containers")
    if not file.is_file():
        image.files = _files_in(folder, image.workdir)
        return image
    text = re.sub(r"\\\s*\n(\s*#.*\n)*", " ", file.read_text(encoding="utf-8", errors="replace"))
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        name, rest, where = name.upper(), rest.strip(), f"environment/Dockerfile: {line.strip()[:80]}"
        if not name or name.startswith("#") or name in _IGNORED:
            continue
        if name == "FROM" and _BASES.match(rest.split()[0]) and not image.files:
            continue
        if name == "WORKDIR":
            image.workdir = str(PurePosixPath(image.workdir) / rest)
        elif name in ("COPY", "ADD") and "--from" not in rest and "://" not in rest:
            _copy(image, folder, rest)
        elif name != "RUN" or not _read_commands(image, rest):
            image.reasons.append(where)
    return image


def _copy(image: _Image, folder: Path, rest: str) -> None:
    *sources, target = [part for part in rest.split() if not part.startswith("--")] or [""]
    base = str(PurePosixPath(image.workdir) / target)
    for source in sources:
        path = (folder / source.lstrip("/")).resolve()
        if not path.is_relative_to(folder.resolve()):
            image.reasons.append(f"environment/Dockerfile: COPY {source}")
        elif path.is_dir():
            # As Docker does, copy the content of a directory. The Dockerfile itself is not interesting.
            copied = _files_in(path, base)
            image.files |= {name: data for name, data in copied.items() if name != f"{base}/Dockerfile"}
        elif path.is_file():
            is_folder = target.endswith(("/", ".")) or len(sources) > 1
            image.files[f"{base}/{path.name}" if is_folder else base] = path.read_bytes()
        else:
            image.reasons.append(f"environment/Dockerfile: COPY {source}")


def _read_commands(image: _Image, text: str) -> bool:
    """Add the simple commands of a `RUN` line to the setup. Return False if it does anything else."""
    for command in re.split(r"&&|;|\|\|", text):
        try:
            words = shlex.split(command)
        except ValueError:
            return False
        words = words[1:] if words[:1] == ["sudo"] else words
        if not words:
            continue
        if words[0] in _INSTALLERS:
            if not _is_installed(words):
                return False
        elif words[0] in _SIMPLE and not re.search(r"[`|]|\$\(", command):
            image.setup.append(command.strip())
        else:
            return False
    return True


def _is_installed(words: list[str]) -> bool:
    """Return True if this machine has everything that an installation command installs."""
    if words[0] == "curl":
        return any("astral.sh/uv" in word for word in words)
    if "install" not in words:
        return words[0] in ("apt-get", "apt")  # update and clean
    for word in words[words.index("install") + 1 :]:
        match = _PACKAGE.match(word)
        if word.startswith("-") or match is None:
            continue
        name = match[0]
        if words[0] in ("apt-get", "apt"):
            is_there = name in _AVAILABLE or shutil.which(name) is not None
        else:
            is_there = bool(list(importlib.metadata.distributions(name=name)))
        if not is_there:
            return False
    return True
