"""Containers of Docker or Podman: build an image, run commands in a container, and remove it.

The engine is the first of `docker` and `podman` that is on the PATH and answers. A container has no mounts, no
privileges beyond the engine's defaults, and limits on processors, memory and processes. It is removed when it is
closed. If this process is killed, the guardian removes it; if the guardian is killed too, it ends after a day.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import tarfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process

from reward_kit.errors import ConfigError, DeadlineError, EnvironmentFailure
from reward_kit.processes import child_environment, run_when_killed, shared_folder
from reward_kit.run_warnings import warn_once

_logger = logging.getLogger(__name__)
_ENGINES = ("docker", "podman")
_LABEL = f"reward-kit={secrets.token_hex(8)}"
_SWEEP = 'ids=$("$0" ps -aq --filter "label=$1") && [ -z "$ids" ] || "$0" rm -f $ids'
_CONFIGURATION = re.compile(r"(DOCKER|CONTAINERS?|PODMAN|BUILDAH)_\w+|DBUS_SESSION_BUS_ADDRESS")
_GONE = re.compile(r"(?i)no such container|no container with")
_MARKER_BYTES = 32
_ANSWER_S, _START_S, _GRACE_S, _KILL_S = 20.0, 120.0, 20.0, 5
_LIFETIME_S = 86_400
_PROCESSES = 2_048
_USUAL_MEMORY_MB = 4_096
_OUTPUT_BYTES = 16_000
_ERROR_CHARS = 1_000
# The command is read from the input, so its length is not limited. The last line reports its exit status, because the
# pipe stays open while a background process has it.
_WRAPPER = (
    'timeout -k {kill} {seconds} bash -c \'eval "$(cat)"\' 2>&1; status=$?; printf "\\n%s %d\\n" {marker} "$status"'
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command in a container.

    Attributes:
        output: the standard output and error, of which the middle is omitted if they are long.
        status: the exit status, or None if the command exceeded its time limit.
    """

    output: str
    status: int | None


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """The limits of a container. `storage_mb` is enforced only if the engine's storage driver can do so."""

    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    has_network: bool = False

    def options(self) -> list[str]:
        """Return the options of `run`, except for the storage."""
        memory = f"{self.memory_mb or _USUAL_MEMORY_MB}m"
        return [
            *([] if self.has_network else ["--network=none"]),
            *([f"--cpus={self.cpus:g}"] if self.cpus else []),
            *(f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={_PROCESSES}"),
        ]


class ContainerEngine:
    """An engine that answers; see `find_engine`."""

    def __init__(self, program: str) -> None:
        self.program = program
        self._building: dict[str, anyio.Lock] = defaultdict(anyio.Lock)
        run_when_killed(["/bin/sh", "-c", _SWEEP, program, _LABEL])

    async def call(self, *arguments: str, seconds: float = _ANSWER_S, data: bytes = b"") -> bytes:
        """Run a command of the engine and return its output.

        Raises:
            EnvironmentFailure: the command failed. The message contains the end of its error output.
            DeadlineError: the command did not end in time.
        """
        what = f"{Path(self.program).name} {arguments[0]}"
        status, output, errors = await _run([self.program, *arguments], seconds, data)
        if status is None:
            raise DeadlineError(f"{what}: no end within {seconds:g} s")
        if status != 0:
            text = (errors or output).decode("utf-8", "replace").strip()
            raise EnvironmentFailure(f"{what}: exit code {status}: {text[-_ERROR_CHARS:]}")
        return output

    async def build(
        self,
        folder: Path,
        seconds: float,
        *,
        dockerfile: Path | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> str:
        """Build the image of a folder with a Dockerfile, unless the same content was built before. Return its tag."""
        tag = f"reward-kit-task:{_hash_folder(folder)}"
        options = _build_options(folder, tag, dockerfile, arguments or {})
        async with self._building[tag]:
            if not await self._has_image(tag):
                await self.call("build", *options, seconds=seconds)
        return tag

    async def pull(self, image: str, seconds: float) -> str:
        """Pull an image, unless it is there."""
        async with self._building[image]:
            if not await self._has_image(image):
                await self.call("pull", image, seconds=seconds)
        return image

    async def _has_image(self, image: str) -> bool:
        try:
            await self.call("image", "inspect", "--format", "{{.Id}}", image)
        except EnvironmentFailure:
            return False
        return True


_engines: list[ContainerEngine] = []


async def find_engine() -> ContainerEngine:
    """Return the first engine that is on the PATH and answers.

    Raises:
        ConfigError: no engine is on the PATH, or no engine answers.
    """
    if not _engines:
        problems = []
        for name in _ENGINES:
            program = shutil.which(name)
            if program is None:
                problems.append(f"{name} is not on the PATH")
                continue
            status, _, errors = await _run([program, "ps", "--quiet"], _ANSWER_S)
            if status == 0:
                _engines.append(ContainerEngine(program))
                break
            line = errors.decode("utf-8", "replace").strip().partition("\n")[0]
            problems.append(f"{name}: {line[:200] or 'no answer'}")
        else:
            raise ConfigError(f"no container engine: {'; '.join(problems)}; start Docker or install Podman")
    return _engines[0]


@dataclass(slots=True)
class Container:
    """A running container, made by `start_container`. The caller must close it."""

    engine: ContainerEngine
    name: str

    async def run(
        self,
        script: str,
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        most_bytes: int = _OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a Bash script in the working directory of the container.

        Processes that it leaves in the background keep running.

        Raises:
            EnvironmentFailure: the container does not run any more, or lacks `bash` or `timeout`.
        """
        marker = secrets.token_hex(8)
        wrapper = _WRAPPER.format(kill=_KILL_S, seconds=f"{max(seconds, 0.1):.1f}", marker=marker)
        as_user = [f"--user={user}"] if user is not None else []
        command = [self.engine.program, "exec", "-i", *as_user, self.name, "bash", "-c", wrapper]
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        data = (exports + script).encode("utf-8", "surrogateescape")
        end = re.compile(rb"\n%s (\d+)\n" % marker.encode())
        begin = time.monotonic()
        status, output, errors = await _run(command, seconds + _KILL_S + _GRACE_S, data, most_bytes, end)
        match = end.search(output)
        if match is None:
            problem = "did not end" if status is None else f"exit code {status}: {errors.decode('utf-8', 'replace')}"
            raise EnvironmentFailure(f"a command in the container failed: {problem.strip()[-_ERROR_CHARS:]}")
        # `timeout` exits with 124, or dies together with a command that ignores the first signal.
        is_late = int(match[1]) in (124, 137) and time.monotonic() - begin >= seconds
        return CommandResult(output[: match.start()].decode("utf-8", "replace"), None if is_late else int(match[1]))

    async def copy(self, files: Mapping[str, bytes]) -> None:
        """Write files, by their absolute path. They belong to root and are readable and executable for everybody."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, content in files.items():
                facts = tarfile.TarInfo(path.lstrip("/"))
                facts.size, facts.mode = len(content), 0o755
                archive.addfile(facts, io.BytesIO(content))
        if files:
            await self.engine.call("cp", "-", f"{self.name}:/", seconds=_START_S, data=packed.getvalue())

    async def changed_files(self, folder: str, most: int = 200) -> dict[str, bytes]:
        """Return the regular files of at most 64 KiB below a folder that differ from the image, by their path."""
        changes = (await self.engine.call("diff", self.name)).decode("utf-8", "replace").splitlines()
        paths = [line[2:] for line in changes if line[:2] in ("A ", "C ") and line[2:].startswith(f"{folder}/")]
        script = (
            f'for f in {shlex.join(paths[:most])}; do if [ -f "$f" ] && [ ! -L "$f" ] && '
            '[ "$(wc -c < "$f")" -le 65536 ]; then echo "$f"; base64 -w0 "$f"; echo; fi; done'
        )
        result = await self.run(script, seconds=_ANSWER_S, user="root", most_bytes=most * 200_000)
        lines = result.output.splitlines()
        return {path: base64.b64decode(content) for path, content in zip(lines[::2], lines[1::2], strict=False)}

    async def close(self) -> None:
        """Kill and remove the container, if it still exists."""
        with anyio.CancelScope(shield=True):
            try:
                await self.engine.call("rm", "-f", self.name, seconds=_START_S)
            except EnvironmentFailure as error:
                if not _GONE.search(str(error)):
                    raise


async def start_container(
    engine: ContainerEngine, image: str, limits: ContainerLimits, workdir: str | None = None, publish: str = ""
) -> Container:
    """Start a container that waits for commands or, if `publish` maps a port, one that runs the image's own command."""
    container = Container(engine, f"reward-kit-{secrets.token_hex(8)}")
    places = [*([f"--workdir={workdir}"] if workdir else []), *([f"--publish={publish}"] if publish else [])]
    options = ["--detach", "--rm", "--pull=never", "--stop-timeout=0", f"--label={_LABEL}", f"--name={container.name}"]
    command = [image] if publish else [image, "sh", "-c", f"sleep {_LIFETIME_S} & wait"]
    storage = [f"--storage-opt=size={limits.storage_mb}m"] if limits.storage_mb else []
    try:
        try:
            await engine.call("run", *options, *limits.options(), *places, *storage, *command, seconds=_START_S)
        except EnvironmentFailure as error:
            if not storage or not re.search(r"(?i)storage.opt|quota", str(error)):
                raise
            warn_once(
                _logger, "the container engine cannot limit storage here, so environment.storage_mb has no effect"
            )
            await container.close()
            await engine.call("run", *options, *limits.options(), *places, *command, seconds=_START_S)
    except BaseException:
        with contextlib.suppress(EnvironmentFailure, DeadlineError):
            await container.close()
        raise
    return container


def _build_options(folder: Path, tag: str, dockerfile: Path | None, arguments: Mapping[str, str]) -> list[str]:
    return [
        *("--label=reward-kit-task", f"--tag={tag}"),
        *([f"--file={dockerfile.absolute()}"] if dockerfile else []),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        str(folder.absolute()),
    ]


def _hash_folder(folder: Path) -> str:
    """Return a hash of the names, modes and contents of the files in a folder, except `__pycache__`.

    Links are not followed.
    """
    total = hashlib.sha256()
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted([*names, *(one for one in folders if Path(parent, one).is_symlink())]):
            path = Path(parent, name)
            if path.is_symlink():
                content = f"link {path.readlink()}"
            elif path.is_file():
                with path.open("rb") as file:
                    content = f"{path.stat().st_mode & 0o111} {hashlib.file_digest(file, 'sha256').hexdigest()}"
            else:
                raise ConfigError(f"{path} is not a file; remove it")
            total.update(json.dumps([os.fsencode(path.relative_to(folder)).hex(), content]).encode())
    return total.hexdigest()[:32]


async def _run(
    command: Sequence[str],
    seconds: float,
    data: bytes = b"",
    most_bytes: int = 1 << 20,
    end: re.Pattern[bytes] | None = None,
) -> tuple[int | None, bytes, bytes]:
    """Run a program of the host. Return its exit status, or None if it was killed, its output and its errors.

    The working directory is a temporary one, because Podman writes a file there if a container runs out of memory.

    Stop reading as soon as `end` matches the output. Of longer outputs, only the beginning and the end are kept.
    """
    names = [name for name in os.environ if _CONFIGURATION.fullmatch(name)]
    output, errors = _Output(most_bytes), _Output(8_192)
    try:
        process = await anyio.open_process(
            list(command), env=child_environment(pass_names=names), cwd=shared_folder("engine"), start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from error
    status: int | None = None
    try:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_write, process, data)
                tasks.start_soon(_read, process.stderr, errors)
                status = 0 if await _read(process.stdout, output, end) else await process.wait()
                tasks.cancel_scope.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()
    return status, output.content(), errors.content()


async def _write(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.send(data)
        await process.stdin.aclose()


async def _read(stream: ByteReceiveStream | None, output: _Output, end: re.Pattern[bytes] | None = None) -> bool:
    """Read until the stream ends or `end` matches. Return True if it matched."""
    assert stream is not None
    recent = b""
    async for chunk in stream:
        output.add(chunk)
        recent = recent[-_MARKER_BYTES:] + chunk
        if end is not None and end.search(recent):
            return True
    return False


class _Output:
    """The beginning and the end of an output."""

    def __init__(self, most: int) -> None:
        self._half, self._first, self._last, self._omitted = most // 2, bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        room = self._half - len(self._first)
        self._first += chunk[:room]
        self._last += chunk[room:]
        if (surplus := len(self._last) - self._half) > 0:
            self._omitted += surplus
            del self._last[:surplus]

    def content(self) -> bytes:
        middle = f"\n[… {self._omitted:,} bytes omitted …]\n".encode() if self._omitted else b""
        return bytes(self._first) + middle + bytes(self._last)
