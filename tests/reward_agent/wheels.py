"""A package index in a folder: small wheels of the tests' own, and what a worker needs, packed as it is installed."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

WORKERS_OWN = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")
_LEFT_OUT = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "WHEEL")


def write_wheel(index: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()) -> None:
    """Pack a package of pure Python. `files` are its modules by path."""
    told = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    packed = {path: text.encode() for path, text in files.items()}
    _pack(index, name, version, packed | {_inner(name, version, "METADATA"): "\n".join([*told, ""]).encode()})


def pack_installed(index: Path, folder: Path, names: Sequence[str] = WORKERS_OWN) -> None:
    """Pack installed packages again, compiled beforehand, so that each environment of a test does not compile them."""
    for name in names:
        installed = metadata.distribution(name)
        place = folder / name
        for file in installed.files or ():
            if "__pycache__" not in file.parts and file.parts[0] != ".." and file.name not in _LEFT_OUT:
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(str(installed.locate_file(file))), place / file)
        compileall.compile_dir(place, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        found = [path for path in place.rglob("*") if path.is_file()]
        _pack(index, name, installed.version, {str(path.relative_to(place)): path.read_bytes() for path in found})


def pip_settings(index: Path) -> dict[str, str]:
    """Environment variables with which pip knows this index and nothing else; "" for those to be taken away."""
    others = {name: "" for name in os.environ if name.startswith("PIP_")}
    # pip reads a switch that begins with "no" the other way round.
    chosen = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(index), "NO_COMPILE": "0", "RETRIES": "0"}
    return others | {f"PIP_{name}": value for name, value in chosen.items()}


def _pack(index: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    kind = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = {**files, _inner(name, version, "WHEEL"): kind}
    record = "".join(f"{path},,\n" for path in [*whole, _inner(name, version, "RECORD")])
    with zipfile.ZipFile(index / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in {**whole, _inner(name, version, "RECORD"): record.encode()}.items():
            wheel.writestr(path, content)


def _inner(name: str, version: str, file: str) -> str:
    return f"{name.replace('-', '_')}-{version}.dist-info/{file}"
