"""Writes the lakes: `lakes.jsonl` to train on and `held_out.jsonl` to be measured on. No map is in both.

python make_lakes.py
"""

from __future__ import annotations

import json
from pathlib import Path

from gymnasium.envs.toy_text.frozen_lake import generate_random_map

TRAINED, HELD_OUT = 600, 100


def main() -> None:
    maps: dict[tuple[str, ...], None] = {}
    seed = 0
    while len(maps) < TRAINED + HELD_OUT:
        maps[tuple(generate_random_map(size=4, p=0.8, seed=seed))] = None
        seed += 1
    rows = [
        {"id": f"lake-{number:03}", "resource_config": {"env_kwargs": {"desc": list(desc), "is_slippery": False}}}
        for number, desc in enumerate(maps)
    ]
    for name, part in (("held_out.jsonl", rows[:HELD_OUT]), ("lakes.jsonl", rows[HELD_OUT:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        Path(__file__).with_name(name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
