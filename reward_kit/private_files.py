"""Creation of files and directories that only their owner may read, regardless of the umask.

The umask of the process is not changed, because child processes inherit it. Existing files keep their permissions, and
output files named by the user with `-o` follow the umask.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_opener(path: str | Path, flags: int) -> int:
    """Open a file; a new file gets private permissions. Use this function as the `opener` of `open`."""
    return os.open(path, flags, FILE_MODE)


def make_private_folder(path: Path, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Create a private directory. Its parents get the usual permissions."""
    path.mkdir(FOLDER_MODE, parents=parents, exist_ok=exist_ok)


def make_private(folder: Path) -> None:
    """Make a directory and its content private, including files that were written by other libraries."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
