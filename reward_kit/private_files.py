"""Create files and folders that their owner alone may read, whatever the umask is.

The umask of the process is not changed, since children inherit it. What exists keeps its permissions, and a file that
a user names with `-o` is created as the umask allows.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_opener(path: str | Path, flags: int) -> int:
    """Open a file, as the `opener` of `open`; one that is created is private."""
    return os.open(path, flags, FILE_MODE)


def make_private_folder(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Make a private folder; folders above it are made with the usual permissions."""
    path.mkdir(FOLDER_MODE, parents=parents, exist_ok=exist_ok)


def make_private(folder: Path) -> None:
    """Remove the permissions of others from everything in a folder that other libraries wrote."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
