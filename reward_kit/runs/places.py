"""Where lines lie in the files of a run, so that those of one episode are read without the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from reward_kit.runs.store import line_record, placed_lines

STEP = b'"step":'
"""What follows, in a line of `credit.jsonl`, on all that the lines of one episode begin with."""


class Place(NamedTuple):
    """Where a line, or several that follow one another, lie in a file: from which byte on, and how many."""

    offset: int
    length: int


def credit_places(run: Path) -> Mapping[str, Place]:
    """Where the lines of each episode's steps are in the `credit.jsonl` of a run; they follow one another.

    Raises:
        StoreError: the file is damaged.
    """
    path, places = run / "credit.jsonl", {}
    name, start, prefix = "", 0, b"\n"
    for number, (offset, line) in enumerate(placed_lines(path), 1):
        if not line.startswith(prefix):
            name, start = line_record(path, number, line)["rollout_id"], offset
            # Up to the number of the step, all lines of an episode are alike.
            prefix = line[: line.find(STEP)] if STEP in line else line
        places[name] = Place(start, offset + len(line) - start)
    return places
