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
"""What lies about in a clone where somebody works, and is nobody's to ship."""


@dataclass(frozen=True, slots=True)
class Built:
    """A wheel, the archive of the sources that it was built from, and the clone that those are of."""

    clone: Path
    wheel: Path
    sources: Path


def run(*command: str | Path, cwd: Path | None = None, timeout_s: float = 600) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked_files(under: str = ".") -> list[str]:
    """The files of the repository, as git has them; one that is new and not ignored is about to be."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", under, cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def copy_repository(folder: Path) -> Path:
    """The tracked files alone, in a new folder, with clutter among them."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for name in CLUTTER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("clutter")
    return folder


def build(clone: Path, into: Path) -> Built:
    """The sources of a clone, and the wheel that is built from their archive, not from the clone."""
    run(sys.executable, "-m", "build", "--outdir", into, clone)
    (wheel,), (sources,) = into.glob("*.whl"), into.glob("*.tar.gz")
    return Built(clone, wheel, sources)


def names_in_wheel(wheel: Path) -> set[str]:
    """Every file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def names_in_sources(sources: Path) -> set[str]:
    """Every file of an archive of sources, without the folder that they all are in."""
    with tarfile.open(sources) as archive:
        return {member.name.partition("/")[2] for member in archive if not member.isdir()}


def pythons() -> dict[str, Path]:
    """The interpreters of this machine that the package is for, by version: of PATH, else those that pyenv made."""
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
    """An environment with pip and nothing else, as a newcomer makes one; its bin folder."""
    run(python, "-m", "venv", folder)
    return folder / "bin"


def size_of(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def resolved(folder: Path, *wanted: str, resolution: str, more: Sequence[str | Path] = ()) -> Path:
    """An environment with what uv makes of `wanted`, "highest" or "lowest-direct"; its bin folder."""
    run(UV, "venv", "--quiet", "--seed", "--python", sys.executable, folder)
    line = [UV, "pip", "install", "--quiet", "--python", folder / "bin/python", "--resolution", resolution]
    run(*line, *more, *wanted, timeout_s=1800)
    return folder / "bin"
