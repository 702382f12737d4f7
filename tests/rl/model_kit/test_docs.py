"""Test that the page on small models has correct token counts; tests/pages run its code."""

from __future__ import annotations

import re
from pathlib import Path

from reward_kit.rl import build_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "small_models.md").read_text(encoding="utf-8")


def test_documented_token_counts_are_correct() -> None:
    text = "take cup 3 from cabinet 12"
    for request, tokens in re.findall(r"^\| `(build_tokenizer\(texts.*?\))` \| (.*) \|$", PAGE, re.MULTILINE):
        tokenizer = eval(request, {"build_tokenizer": build_tokenizer, "texts": [text]})  # noqa: S307
        found = [tokenizer.decode([token]).replace(" ", "·", 1) for token in tokenizer.encode(text)]
        assert re.findall("`(.*?)`", tokens) == found
    assert len(build_tokenizer(level="byte").encode(text)) == 26
