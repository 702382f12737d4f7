"""The packages of one set of requirements in a folder of their own: made once, kept in the user's cache.

Such an environment is a folder of unpacked wheels and nothing else. It has no interpreter and is never on the path of
this process; the one that runs this reads it behind walls, without `site`, so no start-up file in it (`.pth`) is run.
Source packages are refused, because making them runs their code here, before any wall stands.

What reward-kit's own worker imports is resolved together with the requirements, so that a conflict is pip's to tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from reward_kit.errors import ConfigError
from reward_kit.processes import child_environment, lock_for_this_process, remove_folder
from reward_kit.reward_agent.requirements import parsed

_FORM = 1
"""Raised when what an environment is changes, so that those of before are not taken for one."""
_MARKER, _PACKAGES, _BORROWED = "environment.json", "packages", "pip"
_WORKERS_OWN = {
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_extensions.py": "typing-extensions",
    "typing_inspection": "typing-inspection",
    "numpy": "numpy",
}
"""What a worker imports before a reward is there, and the packages that it comes with."""
_NOT_FOR_PIP = {f"PIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER", "PYTHON", "DRY_RUN", "NO_DEPS")}
_PROGRESS = ("Looking", "Collecting", "Downloading", "Using", "Processing", "Installing", "INFO:", "[notice]")
"""With which lines of pip begin that say nothing about a failure."""
_LINES = 12

logger = logging.getLogger("reward_kit.reward_agent")


@dataclass(frozen=True, slots=True)
class PackageEnvironment:
    """A folder of packages that is complete.

    Attributes:
        id: names it in files: the same requirements on the same Python and machine have the same.
        folder: the packages.
        requirements: what was asked for, the worker's own needs included.
        packages: what that came to, as "name==version", sorted.
    """

    id: str
    folder: Path
    requirements: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def library_path(self) -> tuple[str, ...]:
        """Where its packages are imported from."""
        return (str(self.folder),)

    def to_json(self) -> dict[str, Any]:
        """As a run records it."""
        return {"id": self.id, "requirements": list(self.requirements), "packages": list(self.packages)}


def environment_for(requirements: Sequence[str], what: str, *, with_steps: bool) -> PackageEnvironment:
    """The environment of a set of requirements; made where it is not there yet, by the user's own pip and index.

    Args:
        requirements: as in a requirements file, one each.
        what: whose they are, for messages.
        with_steps: NumPy is in it, which the steps of an episode are made with.

    Raises:
        ConfigError: a requirement is malformed or names an address, the packages cannot be had, or they conflict with
            one another or with what a worker needs.
    """
    wanted = _wanted(requirements, what, with_steps)
    root = environments_folder()
    folder = root / _id_of(wanted)
    if (found := _made(folder)) is not None:
        return found
    try:
        # Whoever runs as root gives it up before the packages are read.
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _alone(root / f"{folder.name}.lock") as lock:
            return _made(folder) or _make(folder, wanted, what, lock)
    except OSError as error:
        raise ConfigError(
            f"{what}: no environment can be made in {root}: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def environments_folder() -> Path:
    """Where environments are kept: `reward-kit/environments` in the user's cache folder. It can be removed any time."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(told) if os.path.isabs(told) else Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111, PTH117
    return cache / "reward-kit" / "environments"


def _wanted(requirements: Sequence[str], what: str, with_steps: bool) -> tuple[str, ...]:
    """The requirements in their one normal form, with what the worker needs."""
    found = parsed(requirements, what)
    for one in found:
        if one.url is not None:
            raise ConfigError(
                f"{what}: requirements: {str(one)!r} names an address, from which nothing is installed; name the "
                "package and its version, of an index that your pip knows"
            )
        one.marker = None  # it holds here, and what is here is part of the id
        one.name = canonicalize_name(one.name)
    needs = ("numpy", "pydantic") if with_steps else ("pydantic",)
    own = [Requirement(text) for text in metadata.requires("reward-kit") or ()]
    found += [one for one in own if one.marker is None and one.name in needs]
    return tuple(sorted({str(one) for one in found}))


def _id_of(wanted: Sequence[str]) -> str:
    here = (platform.python_version(), sysconfig.get_config_var("SOABI"), sysconfig.get_platform(), platform.libc_ver())
    return hashlib.sha256(json.dumps([_FORM, wanted, here]).encode()).hexdigest()[:16]


def _made(folder: Path) -> PackageEnvironment | None:
    """The environment in this folder, where it is one and its packages are those it was made of."""
    try:
        told = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        found = PackageEnvironment(told["id"], folder / _PACKAGES, tuple(told["requirements"]), tuple(told["packages"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if _packages_in(found.folder) == found.packages else None


def _packages_in(folder: Path) -> tuple[str, ...]:
    """The packages in a folder, read and not run."""
    found = metadata.distributions(path=[str(folder)])
    return tuple(sorted(f"{canonicalize_name(one.metadata['Name'] or '')}=={one.version}" for one in found))


def _make(folder: Path, wanted: tuple[str, ...], what: str, lock: int) -> PackageEnvironment:
    """Make it beside its place and move it there whole; a build that fails or is killed leaves nothing in its place."""
    logger.warning("making an environment for %s: %s", what, ", ".join(wanted))
    partial = folder.with_name(f"{folder.name}.partial")
    for left in (partial, folder):
        remove_folder(left)
    packages = partial / _PACKAGES
    try:
        packages.mkdir(parents=True)
        for path in (partial, packages):
            path.chmod(0o755)
        _install(wanted, packages, what, lock)
        _check_workers_own(packages, what)
        made = PackageEnvironment(folder.name, folder / _PACKAGES, wanted, _packages_in(packages))
        (partial / _MARKER).write_text(json.dumps(made.to_json(), indent=1), encoding="utf-8")
        partial.rename(folder)
    finally:
        remove_folder(partial)
    return made


def _install(wanted: Sequence[str], packages: Path, what: str, lock: int) -> None:
    options = ["--only-binary", ":all:", "--no-user", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [*_pip(packages.parent), "install", *options, "--target", str(packages), "--", *wanted]
    status, output = _run(command, lock)
    remove_folder(packages.parent / _BORROWED)
    if status:
        raise ConfigError(
            f"{what}: its requirements cannot be installed, and nothing was: {', '.join(wanted)} "
            f"(pydantic, and numpy for steps, are for reward-kit's own worker)\n{output}"
        )


def _pip(folder: Path) -> list[str]:
    """The pip of the running interpreter, or one that is made for this where it has none."""
    if util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    status, output = _run([sys.executable, "-m", "venv", str(folder / _BORROWED)])
    if status:
        raise ConfigError(f"{sys.executable} has no pip, with which requirements are installed; install one\n{output}")
    return [str(folder / _BORROWED / "bin" / "python"), "-P", "-m", "pip"]


def _run(command: Sequence[str], lock: int | None = None) -> tuple[int, str]:
    """Run a command with pip's own configuration and without secrets; its status, and the end of what it said."""
    done = subprocess.run(
        command,
        env={name: value for name, value in child_environment(also="PIP_.*").items() if name not in _NOT_FOR_PIP},
        # It holds the lock too: where this process is killed, nobody builds beside one that still writes.
        pass_fds=() if lock is None else (lock,),
        umask=0o022,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    telling = [line for line in lines if not line.strip().startswith(_PROGRESS)]
    shown = ["".join(letter if letter.isprintable() else " " for letter in line) for line in telling[-_LINES:]]
    return done.returncode, "\n".join(shown)


def _check_workers_own(packages: Path, what: str) -> None:
    """Refuse a package that brings its own version of what a worker is made of and imports before any limit stands."""
    for one in metadata.distributions(path=[str(packages)]):
        name = canonicalize_name(one.metadata["Name"] or "")
        for file in one.files or ():
            owner = _WORKERS_OWN.get(file.parts[0], name)
            if owner != name:
                raise ConfigError(f"{what}: the package {name} brings {file}, which belongs to {owner}; leave it out")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    """Wait until nobody else makes this environment; the lock ends with the processes that hold it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        while not _is_locked_by_us(descriptor):
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        lock_for_this_process(descriptor)
    except BlockingIOError:
        return False
    return True
