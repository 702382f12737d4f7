"""What the page on tokens draws is what its first block makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "tokens.md"


def test_the_drawn_example_is_the_one_that_runs() -> None:
    drawn = PAGE.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]

    def line(key: str) -> list[float]:
        (found,) = (text.removeprefix(key) for text in drawn.splitlines() if text.startswith(key))
        return [float(number) for number in re.findall(r"-?\d*\.?\d+", found)[:7]]

    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0], names)
    keys = ("input_ids", "attention_mask", "completion_mask", "action_mask", "loss_mask", "logprobs", "advantages")
    for key in (*keys, "step_rewards"):
        assert names["rows"].batch[key][0].tolist() == line(key), key
