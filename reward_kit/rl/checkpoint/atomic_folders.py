"""Folders that are there as a whole or not at all: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reward_kit.private_files import make_private, make_private_folder
from reward_kit.runs.files import told_of

PART, OLD = ".part", ".old"
"""How the names of folders end that are being written, or being removed; both begin with a dot."""


@contextmanager
def atomic_folder(place: Path, *, is_private: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `place` at the end of the block; what was there is replaced.

    Where `place` is a symbolic link, it is what the link leads to.

    A kill at any moment leaves the old folder or the new one, and perhaps a hidden one beside it, which `sweep`
    removes. Where the block raises, what was there stays. Everything is on the disk before the folder has its name.

    Args:
        place: where the folder is to be; folders above it are made.
        is_private: it and everything in it is its owner's alone, whatever writes it.

    Raises:
        StoreError: it cannot be written.
    """
    place = Path(os.path.realpath(place))
    with told_of("write", place):
        (make_private_folder if is_private else Path.mkdir)(place.parent, parents=True, exist_ok=True)
        part = _hidden(place, PART)
        (make_private_folder if is_private else Path.mkdir)(part)
        try:
            yield part
            if is_private:
                make_private(part)
            _flush_tree(part)
            _move_into(part, place)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def remove_folder(place: Path) -> None:
    """Remove a folder so that a kill does not leave a part of it under its name; of a symbolic link the link alone.

    Raises:
        StoreError: it cannot be removed.
    """
    with told_of("remove", place):
        if place.is_symlink():
            place.unlink()
            return
        old = _hidden(place, OLD)
        place.rename(old)
        shutil.rmtree(old)


def sweep(folder: Path) -> list[Path]:
    """Remove what kills have left in a folder that nobody else writes to; returns what was there."""
    left = [path for end in (PART, OLD) for path in folder.glob(f".*{end}")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def _hidden(place: Path, end: str) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}{end}")


def _move_into(part: Path, place: Path) -> None:
    """A folder with files in it cannot be renamed over, so an old one steps aside first."""
    old = _hidden(place, OLD)
    if is_replaced := place.exists():
        place.rename(old)
    try:
        part.rename(place)
    except OSError:
        if is_replaced:
            old.rename(place)
        raise
    _flush(place.parent)
    if is_replaced:
        shutil.rmtree(old, ignore_errors=True)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder; some systems cannot open folders, and need not."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
