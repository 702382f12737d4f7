"""The files that decide what a run's episodes and scores are: kept with the run, and compared before it goes on.

Episodes and scores of one run belong together only while what they come from is the same. A run therefore keeps a copy
of its task file, dataset, tools and reward in `inputs/`, and a resume is refused where one of them differs now.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from reward_kit.runs.store import RunStore, write_atomically

FOLDER = "inputs"
_LARGEST_COPY = 4 * 1024 * 1024
_LINES_SHOWN = 20
_LINE_CHARS = 160


def keep_inputs(store: RunStore, inputs: Mapping[str, Path]) -> None:
    """Copy a run's input files into it, redacted like everything else; one of over 4 MiB is known by its digest only.

    Args:
        store: the run.
        inputs: what each file is, such as "task file", and where it lies.
    """
    folder = store.path / FOLDER
    folder.mkdir(exist_ok=True)
    for name, file in inputs.items():
        if file.stat().st_size <= _LARGEST_COPY:
            write_atomically(folder / _copy_name(name, file), store.redaction.of_bytes(file.read_bytes()))


def differences(run: Path, before: Mapping[str, str], now: Mapping[str, str], inputs: Mapping[str, Path]) -> list[str]:
    """How a run's inputs differ from what they were: a line for each, followed by the lines that changed.

    Args:
        run: the run's folder.
        before: SHA-256 of each input when the run began.
        now: the same of the present files.
        inputs: where they lie now.
    """
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [_difference(name, run / FOLDER, inputs.get(name)) for name in changed]


def _difference(name: str, copies: Path, file: Path | None) -> str:
    if file is None:
        return f"the {name} is not there any more"
    copy = copies / _copy_name(name, file)
    if not copy.is_file():
        return f"the {name} {file} changed"
    old, new = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (copy, file))
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    shown = [f"    {line[:_LINE_CHARS]}" for line in lines[:_LINES_SHOWN]]
    more = [f"    … and {len(lines) - _LINES_SHOWN} more lines"] if len(lines) > _LINES_SHOWN else []
    return "\n".join([f"the {name} {file} changed:", *shown, *more])


def _copy_name(name: str, file: Path) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}{'' if name.endswith(file.suffix) else file.suffix}"
