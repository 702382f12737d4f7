"""Where confined code can run besides on this machine: in a container here, or on another machine by SSH.

A back end is a command whose standard input and output lead to `reward-kit sandbox-serve`. So it opens no port, and who
may use it is decided by the container engine or by SSH.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reward_kit.errors import ConfigError
from reward_kit.sandbox.kernel.rlimits import THREADS
from reward_kit.sandbox.limits import Limits

FORMS: Final = "docker:IMAGE, or ssh:HOST, where reward-kit can stand with its path: ssh:HOST:/path/to/reward-kit"

CLIENT_VARIABLES: Final = r"(DOCKER|CONTAINER|CONTAINERS|PODMAN|BUILDKIT)_.*|SSH_AUTH_SOCK|SSH_AGENT_PID"
"""What Docker, Podman and SSH read besides: which engine, which configuration, which agent holds the user's keys."""

_ENGINE: Final = "REWARD_KIT_CONTAINER_ENGINE"
_SSH: Final = "REWARD_KIT_SSH"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*\Z")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.@-]*)(:(?P<program>/[A-Za-z0-9_./+-]+))?\Z")
_NOBODY = 65534
_MOST_TASKS = 4096
_SPARE_MB = 512
_CONNECT_S = 20


@dataclass(frozen=True, slots=True)
class Launch:
    """How one connection is made.

    Attributes:
        command: its standard input and output lead to the server.
        end: a command that removes what the first one may leave when it is killed; empty for none.
    """

    command: tuple[str, ...]
    end: tuple[str, ...] = ()


class BackEnd(ABC):
    """A place to run code in.

    Attributes:
        name: as the user writes it, and as results record it.
        can_contain: the place itself is a wall around what runs in it, so that one call can have one to itself.
        shows_paths: paths of this machine are shown in it, each where it is here.
    """

    name: str
    can_contain = False
    shows_paths = False

    @abstractmethod
    def launch(self, paths: Sequence[str] = (), limits: Limits | None = None) -> Launch:
        """The command that reaches it.

        Args:
            paths: what is shown in it.
            limits: of the only call that it is for; None where it is for many.

        Raises:
            ConfigError: a program that is needed, or a path, is not there.
        """

    def hint(self, output: str, status: int | None) -> str:
        """What the user may do about a connection that was not made.

        Args:
            output: what the command wrote to its errors.
            status: its exit status; None where it ran on.
        """
        return ""


class Docker(BackEnd):
    """A container of an image that has reward-kit, made by Docker or Podman: no network, nothing writable but memory.

    Where its engine lets the server put up walls inside, all calls share a container. Where it does not, the container
    is the wall, and each call gets one.

    Args:
        image: its name; it is never fetched.
    """

    can_contain = True
    shows_paths = True

    def __init__(self, image: str) -> None:
        if not _IMAGE.match(image):
            raise ConfigError(f"docker: {image!r} is no name of an image; write docker:IMAGE")
        self.image, self.name = image, f"docker:{image}"

    def launch(self, paths: Sequence[str] = (), limits: Limits | None = None) -> Launch:
        """`docker run`, with everything taken away that a sandbox does not need."""
        engine = container_engine()
        name = f"reward-kit-{secrets.token_hex(8)}"
        command = [*engine, "run", "--rm", "--interactive", "--pull=never", "--log-driver=none", f"--name={name}"]
        command += ["--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        command += [f"--user={_NOBODY}:{_NOBODY}", "--workdir=/tmp", "--env=HOME=/tmp", *_bounds(limits)]
        command += [f"--mount=type=bind,source={path},target={path},readonly" for path in map(_shown, paths)]
        command += ["--entrypoint=reward-kit", self.image, "sandbox-serve"]
        return Launch(tuple(command), (*engine, "rm", "--force", name))

    def hint(self, output: str, status: int | None) -> str:
        """For an image that is not there, an engine that does not run, and an image without reward-kit."""
        text = output.lower()
        if "no such image" in text or "image not known" in text:
            return f"build it as docs/concepts/sandbox.md shows, or fetch it: {container_engine()[0]} pull {self.image}"
        if "cannot connect" in text or "permission denied while trying to connect" in text:
            return f"start the engine, or name another one: {_ENGINE}=podman"
        if status in (126, 127) or "executable file" in text:
            return f"{self.image} needs reward-kit on its path; docs/concepts/sandbox.md shows how to build one"
        return ""


class Ssh(BackEnd):
    """Another machine that has reward-kit, reached by SSH without asking anyone; it has to confine code by itself.

    Args:
        place: `HOST` or `user@HOST` as `ssh` takes it, and after a colon the path of reward-kit there.
    """

    def __init__(self, place: str) -> None:
        match = _HOST.match(place)
        if match is None:
            raise ConfigError(f"ssh:{place}: {place!r} is no host; a back end is {FORMS}")
        self.host, self.name = match["host"], f"ssh:{place}"
        self._program = match["program"] or "reward-kit"

    def launch(self, paths: Sequence[str] = (), limits: Limits | None = None) -> Launch:
        """`ssh`, handing nothing over: no agent, no display, no port, no terminal."""
        ssh = shlex.split(os.environ.get(_SSH, "ssh"))
        command = [*ssh, "-T", "-a", "-x", "-oBatchMode=yes", "-oClearAllForwardings=yes", "-oPermitLocalCommand=no"]
        command += [f"-oConnectTimeout={_CONNECT_S}", "-oServerAliveInterval=15", "-oServerAliveCountMax=3"]
        return Launch((*command, "--", self.host, f"{self._program} sandbox-serve"))

    def hint(self, output: str, status: int | None) -> str:
        """For a host that cannot be reached, and one without reward-kit."""
        if status == 255:
            return f"`ssh -o BatchMode=yes {self.host} true` has to work by itself"
        if status in (126, 127):
            return f"{self.host} needs reward-kit on its path, or its path here: ssh:{self.host}:/path/to/reward-kit"
        return ""


def back_end_of(text: str) -> BackEnd:
    """The back end that a user names.

    Raises:
        ConfigError: it is none.
    """
    kind, _, place = text.partition(":")
    if kind == "docker":
        return Docker(place)
    if kind == "ssh":
        return Ssh(place)
    raise ConfigError(f"{text!r} is no back end; one is {FORMS}")


def container_engine() -> tuple[str, ...]:
    """The command of the container engine: what the environment names, else Docker, else Podman.

    Raises:
        ConfigError: there is none.
    """
    named = shlex.split(os.environ.get(_ENGINE, ""))
    for engine in (named,) if named else (["docker"], ["podman"]):
        if shutil.which(engine[0]) is not None:
            return tuple(engine)
    missing = f"{named[0]}, which {_ENGINE} names, is not" if named else "neither docker nor podman is"
    raise ConfigError(f"a docker back end needs a container engine, and {missing} found")


def _bounds(limits: Limits | None) -> list[str]:
    """The bounds of a whole container. Those of a call hold inside; these hold all of it, where it has one call."""
    if limits is None:
        return [f"--pids-limit={_MOST_TASKS}", "--tmpfs=/tmp:rw,nosuid,nodev,mode=1777"]
    memory_mb = limits.memory_mb * (1 + limits.processes) + limits.disk_mb + _SPARE_MB
    tasks = f"--pids-limit={limits.processes + 2 * THREADS}"
    return [tasks, f"--memory={memory_mb}m", f"--tmpfs=/tmp:rw,nosuid,nodev,mode=1777,size={limits.disk_mb + 64}m"]


def _shown(path: str) -> str:
    if not Path(path).exists():
        raise ConfigError(f"{path}, which the program is to read, is not there")
    if "," in path:
        raise ConfigError(f"{path} cannot be shown in a container: its name has a comma")
    wanted = 0o005 if Path(path).is_dir() else 0o004
    if Path(path).stat().st_mode & wanted != wanted:
        raise ConfigError(f"{path} is closed to other users, and a container runs as one: chmod o+rX {path}")
    return path
