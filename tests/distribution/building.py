"""A distribution built from a clone of the repository, and empty environments to install it into."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = Path(sys.executable).with_name("uv")
CLUTTER = (
    "reward_kit/__pycache__/errors.cpython-311.pyc",
    "reward_kit/cli/.mypy_cache/3.11/cache.json",
    "build/lib/reward_kit/errors.py",
    "runs/lake/run.json",
    ".venv/pyvenv.cfg",
)
"""Files of a working clone that must not be distributed."""


@dataclass(frozen=True, slots=True)
class Built:
    """A wheel, the source archive that it was built from, and their clone."""

    clone: Path
    wheel: Path
    sources: Path


def run(*command: str | Path, cwd: Path | None = None, timeout_s: float = 600) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files(under: str = ".") -> list[str]:
    """Return the files of the repository known to git, including new files that are not ignored."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", under, cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_repository(folder: Path) -> Path:
    """Copy only the tracked files to a new folder, and add clutter."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for name in CLUTTER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("clutter")
    return folder


def build(clone: Path, into: Path) -> Built:
    """Build the source archive of a clone, and the wheel from that archive."""
    run(sys.executable, "-m", "build", "--outdir", into, clone)
    (wheel,), (sources,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return Built(clone, wheel, sources)


def names_in_wheel(wheel: Path) -> set[str]:
    """Return the names of all files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def names_in_sources(sources: Path) -> set[str]:
    """Return the names of all files of a source archive, without their common folder."""
    with tarfile.open(sources) as archive:
        return {member.name.partition("/")[2] for member in archive if not member.isdir()}


def pythons() -> dict[str, Path]:
    """Return the supported interpreters of this machine by version, from PATH or pyenv."""
    versions = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    found = {}
    for version in versions:
        made = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        on_path = shutil.which(f"python{version}")
        candidates = [sys.executable, *([on_path] if on_path else []), *map(str, made)]
        if python := next((name for name in candidates if _version_of(name) == version), None):
            found[version] = Path(python)
    return found


def _version_of(python: str) -> str:
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def new_environment(folder: Path, python: Path) -> Path:
    """Create an environment with only pip, and return its bin folder."""
    run(python, "-m", "venv", folder)
    return folder / "bin"


def size_of(folder: Path) -> int:
    """Return the bytes that a folder takes on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def resolved(folder: Path, *wanted: str, resolution: str, more: Sequence[str | Path] = ()) -> Path:
    """Create an environment with uv's resolution "highest" or "lowest-direct"; return its bin folder."""
    run(UV, "venv", "--quiet", "--seed", "--python", sys.executable, folder)
    line = [UV, "pip", "install", "--quiet", "--python", folder / "bin/python", "--resolution", resolution]
    run(*line, *more, *wanted, timeout_s=1800)
    return folder / "bin"
