"""Harbor task folders, read without running any of their code.

The format is described at https://www.harborframework.com/docs/tasks: `task.toml` (schema 1.4), `instruction.md`,
`environment/` (usually a Dockerfile), `tests/test.sh`, which writes `/logs/verifier/reward.txt` or `reward.json`, and
`solution/solve.sh`. As in Harbor, unknown keys of `task.toml` are ignored, unless they look like a known key.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, Field

from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.validation import describe_validation_error

TASK_FILE = "task.toml"
_MOST_BYTES = 64 << 20
_MOST_SANDBOX_BYTES = 4 << 20
_USUAL_SECONDS = 600.0
_SIZES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_DOWNLOAD = re.compile(rb"^(?!\s*#).*?\b(apt-get|apt|pip3?|uvx?|curl|wget|npm|conda|git clone)\b", re.MULTILINE)
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
_UNUSED = {
    "": {"schema_version", "version", "task", "metadata", "source", "artifacts", "multi_step_reward_strategy"},
    "environment": {"gpu_types", "skills_dir", "allowed_hosts"},
    "agent": {"allowed_hosts"},
    "verifier": {"allowed_hosts"},
}
"""The keys of Harbor's schema that have no effect here, by table."""


Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str]
"""Environment variables. In a value, `${NAME}` or `${NAME:-default}` stands for a variable of the host."""
Network = Literal["public", "no-network", "allowlist"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    """A table of `task.toml`."""

    network_mode: Network | None = None
    env: Variables = Field(default_factory=dict)


class EnvironmentSection(_Section):
    """The table `environment`. Sizes are in MiB; `memory`, `storage` and `allow_internet` are from older schemas."""

    build_timeout_sec: Seconds = _USUAL_SECONDS
    docker_image: Annotated[str, Field(pattern=rf"^{_IMAGE.pattern}$")] | None = None
    os: str = "linux"
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    memory_mb: Annotated[int, Field(ge=16)] | None = None
    storage_mb: Annotated[int, Field(ge=16)] | None = None
    memory: Any = None
    storage: Any = None
    gpus: int | None = None
    tpu: Any = None
    mcp_servers: list[Any] = Field(default_factory=list)
    healthcheck: Any = None
    workdir: Annotated[str, Field(pattern="^/")] | None = None
    allow_internet: bool | None = None

    @pydantic.model_validator(mode="after")
    def _read_old_keys(self) -> EnvironmentSection:
        self.memory_mb = self.memory_mb or _mebibytes(self.memory)
        self.storage_mb = self.storage_mb or _mebibytes(self.storage)
        if self.network_mode is None and self.allow_internet is not None:
            self.network_mode = "public" if self.allow_internet else "no-network"
        return self


class AgentSection(_Section):
    """The table `agent`."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class VerifierSection(_Section):
    """The table `verifier`."""

    timeout_sec: Seconds = _USUAL_SECONDS
    user: str | int | None = None
    environment_mode: str | None = None
    environment: Any = None
    collect: list[Any] = Field(default_factory=list)


class HarborConfig(BaseModel):
    """The content of `task.toml`."""

    agent: AgentSection = Field(default_factory=AgentSection)
    verifier: VerifierSection = Field(default_factory=VerifierSection)
    environment: EnvironmentSection = Field(default_factory=EnvironmentSection)
    solution: _Section = Field(default_factory=_Section)
    steps: list[Any] = Field(default_factory=list)

    @property
    def agent_s(self) -> float:
        """The time limit of the agent in seconds, 600 by default."""
        return self.agent.timeout_sec or _USUAL_SECONDS


def _mebibytes(size: Any) -> int | None:
    if size is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*([KMG])", str(size).strip().upper())
    if match is None:
        raise ValueError(f"expected a size such as '2G' or '512M', got {size!r:.40}")
    return max(16, int(float(match[1]) * _SIZES[match[2]]))


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A Harbor task folder.

    Attributes:
        folder: the folder.
        config: the content of `task.toml`.
        instruction: the text of `instruction.md`.
        workdir: the working directory in the container, as far as it is known without the image.
        environment: the files that the Dockerfile copies, by their path in the container.
        setup: the commands of the Dockerfile that only create or change files.
        tests: the files of `tests`, by their path in the container.
        solution: the files of `solution`, by their path in the container.
        unsupported: the parts of the task that this package cannot run, even with a container.
        needs_container: the reasons why the task cannot run without a container.
    """

    folder: Path
    config: HarborConfig
    instruction: str
    workdir: str
    environment: dict[str, bytes]
    setup: str
    tests: dict[str, bytes]
    solution: dict[str, bytes]
    unsupported: tuple[str, ...]
    needs_container: tuple[str, ...]

    def download(self) -> str:
        """Return the first command in the tests that downloads something, with its file, or ""."""
        for path, data in self.tests.items():
            if path.endswith(".sh") and (match := _DOWNLOAD.search(data)):
                return f"{path[1:]} runs {match[1].decode()}"
        return ""


def is_task_folder(target: str | Path) -> bool:
    """Return True if the target is a folder with a `task.toml`."""
    return (Path(target) / TASK_FILE).is_file()


def find_task_folders(folder: Path) -> list[Path]:
    """Return the task folders in a folder by name, or the folder itself if it is a task."""
    if is_task_folder(folder):
        return [folder]
    return sorted(path for path in folder.iterdir() if is_task_folder(path)) if folder.is_dir() else []


def read_harbor_config(folder: Path) -> HarborConfig:
    """Read the `task.toml` of a task folder.

    Raises:
        ConfigError: If the file is invalid.
    """
    try:
        document = tomllib.loads((folder / TASK_FILE).read_text(encoding="utf-8"))
        config = HarborConfig.model_validate(document)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{folder / TASK_FILE}: {'; '.join(describe_validation_error(error))}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder / TASK_FILE}: {error}") from error
    tables: dict[str, tuple[dict[str, Any], BaseModel]] = {"": (document, config)}
    for name in ("agent", "verifier", "environment", "solution"):
        tables[name] = document.get(name, {}), getattr(config, name)
    for table, (keys, model) in tables.items():
        known = type(model).model_fields.keys() | _UNUSED.get(table, set())
        for key in sorted(keys.keys() - known):
            if (advice := did_you_mean(key, known)).endswith("?"):
                where = f"{table}.{key}" if table else key
                raise ConfigError(f"{folder / TASK_FILE}: {where}: unknown key{advice}")
    return config


def read_harbor_task(folder: Path) -> HarborTask:
    """Read a task folder without running any of its code.

    Raises:
        ConfigError: If `task.toml` is invalid, or if the instruction or `tests/test.sh` is missing.
    """
    config = read_harbor_config(folder)
    instruction = folder / "instruction.md"
    text = instruction.read_text(encoding="utf-8", errors="replace") if instruction.is_file() else ""
    if not text.strip() and not config.steps:
        raise ConfigError(f"{folder}: instruction.md is missing or empty, so the agent would have no task")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: tests/test.sh is missing, so nothing can score the task")
    unsupported = _unsupported(folder, config)
    reasons = list(unsupported)
    if (image := config.environment.docker_image) and not _BASES.match(image):
        reasons.append(f"task.toml: image {image}")
    if any("$" in value for value in config.verifier.env.values()):
        reasons.append("task.toml: verifier.env refers to variables of the host")
    built = _read_dockerfile(folder / "environment")
    return HarborTask(
        folder=folder,
        config=config,
        instruction=text,
        workdir=config.environment.workdir or built.workdir,
        environment=built.files,
        setup="\n".join(built.setup),
        tests=_files_in(folder / "tests", "/tests"),
        solution=_files_in(folder / "solution", "/solution"),
        unsupported=unsupported,
        needs_container=(*reasons, *built.reasons),
    )


def _unsupported(folder: Path, config: HarborConfig) -> tuple[str, ...]:
    environment, verifier = config.environment, config.verifier
    phases = {config.agent.network_mode, verifier.network_mode} - {None, environment.network_mode}
    parts = {
        "several steps": bool(config.steps),
        f"environment.os is {environment.os}": environment.os.lower() != "linux",
        "environment.mcp_servers": bool(environment.mcp_servers),
        "environment.gpus": bool(environment.gpus),
        "environment.tpu": environment.tpu is not None,
        "environment.healthcheck": environment.healthcheck is not None,
        "network_mode is allowlist": environment.network_mode == "allowlist",
        "a network_mode that differs between agent, verifier and environment": bool(phases),
        "a separate container for the tests": verifier.environment_mode == "separate" or bool(verifier.environment),
        "verifier.collect": bool(verifier.collect),
    }
    found = [f"task.toml: {name}" for name, is_set in parts.items() if is_set]
    if next((folder / "environment").glob("docker-compose.y*ml"), None):
        found.append("environment/docker-compose.yaml: several containers")
    return tuple(found)


def fill_variables(given: Mapping[str, str], host: Mapping[str, str], where: str) -> dict[str, str]:
    """Replace the references to variables of the host in environment variables.

    Args:
        given: the variables of a table.
        host: the variables of the host that the task may use.
        where: the name of the table, for error messages.
    """

    def replace(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in host or default is not None:
            return host.get(name, default or "")
        raise ConfigError(f"{where}: needs the variable {name}; add it to pass_env of the harbor resource")

    return {name: re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", replace, value) for name, value in given.items()}


def parse_rewards(as_json: str, as_text: str) -> dict[str, float]:
    """Return the rewards in `reward.json`, or else the reward in `reward.txt`. As in Harbor, true counts as 1.

    Raises:
        ValueError: If both are missing, or if the first one is not a finite number or a table of finite numbers.
    """
    if as_json.strip():
        try:
            found: Any = json.loads(as_json)
        except ValueError as error:
            raise ValueError(f"reward.json is not valid JSON: {error}") from error
        table = found if isinstance(found, dict) else {"reward": found}
    elif as_text.strip():
        try:
            table = {"reward": float(as_text)}
        except ValueError:
            raise ValueError(f"reward.txt is not a number: {as_text.strip()!r:.60}") from None
    else:
        raise ValueError("the tests wrote neither reward.json nor reward.txt")
    for name, value in table.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the reward {name} is not a finite number: {value!r:.60}")
    if not table:
        raise ValueError("reward.json has no rewards")
    return {str(name): float(value) for name, value in table.items()}


def main_reward(rewards: Mapping[str, float]) -> float:
    """Return the reward named `reward`, or the mean of all rewards."""
    return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)


def _files_in(folder: Path, prefix: str, most: int = _MOST_BYTES) -> dict[str, bytes]:
    """Return the regular files of a folder by their path in the container. Links that leave the folder are ignored."""
    found: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            continue
        size += path.stat().st_size
        if size > most:
            raise ConfigError(f"{folder} has more than {most >> 20} MiB of files")
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
    try:
        if file.is_file():
            _read_lines(image, folder, file)
        else:
            image.files = _files_in(folder, image.workdir, _MOST_SANDBOX_BYTES)
    except ConfigError as error:
        image.reasons.append(str(error))
    return image


def _read_lines(image: _Image, folder: Path, file: Path) -> None:
    text = re.sub(r"\\\s*\n(\s*#.*\n)*", " ", file.read_text(encoding="utf-8", errors="replace"))
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        name, rest, where = name.upper(), rest.strip(), f"environment/Dockerfile: {line.strip()[:80]}"
        if not name or name.startswith("#") or name in _IGNORED:
            continue
        if name == "FROM" and _BASES.match(rest.partition(" ")[0]) and not image.files:
            continue
        if name == "WORKDIR":
            image.workdir = str(PurePosixPath(image.workdir) / rest)
        elif name in ("COPY", "ADD") and "--from" not in rest and "://" not in rest:
            _copy(image, folder, rest)
        elif name != "RUN" or not _read_commands(image, rest):
            image.reasons.append(where)


def _copy(image: _Image, folder: Path, rest: str) -> None:
    *sources, target = [part for part in rest.split() if not part.startswith("--")] or [""]
    base = str(PurePosixPath(image.workdir) / target)
    for source in sources:
        path = (folder / source.lstrip("/")).resolve()
        if not path.is_relative_to(folder.resolve()):
            image.reasons.append(f"environment/Dockerfile: COPY {source}")
        elif path.is_dir():
            # As Docker does, copy the content of a directory. The Dockerfile itself is not interesting.
            copied = _files_in(path, base, _MOST_SANDBOX_BYTES)
            image.files |= {name: data for name, data in copied.items() if name != f"{base}/Dockerfile"}
        elif path.is_file() and path.stat().st_size <= _MOST_SANDBOX_BYTES:
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
