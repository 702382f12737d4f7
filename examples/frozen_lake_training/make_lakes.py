"""Generate `lakes.jsonl` for training and `held_out.jsonl` for evaluation, without common maps.

python make_lakes.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

HERE = Path(__file__).parent
TRAINED, HELD_OUT = 1500, 256


def maps() -> list[tuple[str, ...]]:
    """Return different solvable maps of 4 by 4 cells, the held-out ones first."""
    result: dict[tuple[str, ...], None] = {}
    seed = 0
    while len(result) < TRAINED + HELD_OUT:
        result[tuple(generate_random_map(size=4, p=0.8, seed=seed))] = None
        seed += 1
    return list(result)


def rows(lakes: Iterable[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Return the maps as samples; the id of a sample is its map."""
    return [
        {"id": "-".join(desc), "resource_config": {"env_kwargs": {"desc": list(desc), "is_slippery": False}}}
        for desc in lakes
    ]


def main() -> None:
    drawn = maps()
    held_out, trained = drawn[:HELD_OUT], drawn[HELD_OUT:]
    if set(held_out) & set(trained):
        raise AssertionError("training and held-out maps overlap")
    for name, part in (("held_out.jsonl", held_out), ("lakes.jsonl", trained)):
        lines = "".join(json.dumps(row) + "\n" for row in rows(part))
        (HERE / name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
