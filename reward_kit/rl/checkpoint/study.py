"""Batches on which training stopped, kept for study."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.rl.checkpoint.atomic_folders import atomic_folder
from reward_kit.rl.checkpoint.state_tree import read_tree, write_tree
from reward_kit.tokens import TokenBatch

_NAME = re.compile(r"study-(\d{3,})")


class StudyBatch(NamedTuple):
    """Rows on which training stopped, and what was known then."""

    rows: TokenBatch
    facts: dict[str, Any]


def save_batch_for_study(folder: Path, rows: TokenBatch, facts: Mapping[str, Any]) -> Path:
    """Keep the rows on which a loss or a gradient was not finite.

    Args:
        folder: where studies are kept; each is a folder of its own in it.
        rows: the rows. What belongs to them and is neither a number, a text nor an array is kept as a text.
        facts: what is known: step, loss, the names of parameters without finite gradients, …. Numbers need not be
            finite.

    Returns:
        The new folder, `study-000`, `study-001`, ….

    Raises:
        StoreError: it cannot be written.
    """
    numbers = [int(found[1]) for path in folder.glob("study-*") if (found := _NAME.fullmatch(path.name))]
    place = folder / f"study-{max(numbers, default=-1) + 1:03d}"
    tree = {"batch": rows.batch, "others": rows.non_tensor_batch, "meta_info": rows.meta_info, "facts": dict(facts)}
    with atomic_folder(place, is_private=True) as part:
        write_tree(part, "batch", tree, as_text=True)
    return place


def load_batch_for_study(path: Path) -> StudyBatch:
    """The rows that `save_batch_for_study` kept.

    Raises:
        StoreError: they cannot be read.
    """
    tree = read_tree(path, "batch")
    return StudyBatch(TokenBatch(tree["batch"], tree["others"], tree["meta_info"]), tree["facts"])
