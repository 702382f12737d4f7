"""Test the code blocks of the guide that need verifiers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.integrations.verifiers.episodes import random_episode
from tests.integrations.verifiers.in_verifiers_tasksets import REWARDS, ROWS, TASK

GUIDE = Path(__file__).parents[3] / "docs/guides/verifiers.md"


def test_guide_code_blocks_run(tmp_path: Path) -> None:
    for name, text in (("rewards.py", REWARDS), ("task.yaml", TASK), ("sums.jsonl", ROWS)):
        (tmp_path / name).write_text(text)
    names: dict[str, Any] = {"episode": random_episode(1), "folder": tmp_path, "__name__": __name__}
    blocks = re.findall(r"```{ \.python \.verifiers }\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert len((tmp_path / "sums_of_verifiers.jsonl").read_text().splitlines()) == 2
