"""Test that the code blocks of the page on verl run, including those for verl's own Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.campaign

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "verl.md"


def test_page_runs_with_the_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```(?:python|\{ \.python \.learners \})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 4
    space: dict[str, object] = {"__name__": "page"}
    for code in found:
        exec(compile(code, str(PAGE), "exec"), space)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "[0, 1] [1.0, 1.0]"
    assert all(f"\n{line}\n" in text for line in printed)
