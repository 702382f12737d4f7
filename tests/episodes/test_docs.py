"""Every block of the tutorial runs, one after the other."""

import re
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "episodes.md"


def test_every_block_of_the_tutorial_runs(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    assert "takes no further step; it has 5 steps, terminated" in capsys.readouterr().out
