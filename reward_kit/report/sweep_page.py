"""The page of a sweep: its tables, and the learning curves of its arms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SweepTable(NamedTuple):
    """A table of a sweep. The first column contains names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
