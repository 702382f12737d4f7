"""A container image built from this machine's interpreter and packages, so that tests need no registry.

It stands in for `FROM python:3.11-slim` with `pip install reward-kit`: an interpreter, the libraries it links to, what
reward-kit requires, and reward-kit itself, of which nothing writes anywhere.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import reward_kit

BASE = Path(sys.base_prefix)
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
STANDARD = Path(sysconfig.get_path("stdlib"))
PACKAGES = STANDARD / "site-packages"
LEFT_OUT = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
}
START = f"#!{BASE}/bin/{VERSION}\nfrom reward_kit.cli.main import main\nmain()\n"


def write_image(target: Path) -> None:
    """Write the file system of the image as a tar file, for `podman import` or `docker import`."""
    binary = BASE / "bin" / VERSION
    files = {binary: binary.resolve(), **dict(_tree(STANDARD, STANDARD)), **dict(_packages())}
    files |= dict(_libraries([path for path in files.values() if path == binary.resolve() or ".so" in path.name]))
    folders = {
        parent for path in (*files, Path("/usr/local/bin/reward-kit"), Path("/tmp/x")) for parent in path.parents
    }
    with tarfile.open(target, "w") as image:
        for folder in sorted(str(path) for path in folders - {Path("/")}):
            image.addfile(_entry(folder, 0o1777 if folder == "/tmp" else 0o755, is_folder=True))
        for name, source in sorted(files.items()):
            content = source.read_bytes()
            entry = _entry(str(name), 0o755 if source.stat().st_mode & 0o100 else 0o644)
            entry.size = len(content)
            image.addfile(entry, io.BytesIO(content))
        start = _entry("usr/local/bin/reward-kit", 0o755)
        start.size = len(START.encode())
        image.addfile(start, io.BytesIO(START.encode()))


def _entry(name: str, mode: int, *, is_folder: bool = False) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name.lstrip("/"))
    entry.mode = mode
    entry.type = tarfile.DIRTYPE if is_folder else tarfile.REGTYPE
    return entry


def _tree(folder: Path, placed: Path) -> Iterator[tuple[Path, Path]]:
    for path in folder.iterdir():
        if path.name in LEFT_OUT or path.name.startswith("config-"):
            continue
        if path.is_dir():
            yield from _tree(path, placed / path.name)
        elif path.is_file():
            yield placed / path.name, path.resolve()


def _packages() -> Iterator[tuple[Path, Path]]:
    """Return the files of reward-kit and its requirements, from their installation records."""
    yield from _tree(Path(reward_kit.__file__).parent, PACKAGES / "reward_kit")
    for name in _required({"reward-kit"}):
        found = importlib.metadata.distribution(name)
        for file in found.files or []:
            source = Path(str(found.locate_file(file)))
            is_inside = ".." not in file.parts and "__pycache__" not in file.parts and file.suffix != ".pth"
            if is_inside and source.is_file():
                yield PACKAGES / file, source.resolve()


def _required(names: set[str]) -> set[str]:
    found: set[str] = set()
    while names:
        name = names.pop()
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system or Python
        found.add(name)
        wanted = {re.split(r"[^\w.-]", line)[0] for line in requirements if "extra ==" not in line}
        names |= {re.sub(r"[-_.]+", "-", one).lower() for one in wanted} - found
    return found


def _libraries(binaries: list[Path]) -> Iterator[tuple[Path, Path]]:
    """Return the shared libraries that the loader would load for these files."""
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    for name in set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listed, re.MULTILINE)):
        path = Path(os.path.normpath(name))
        if "site-packages" not in path.parts:  # those are beside the package that brought them
            yield path, path.resolve()
