"""Execution of the code blocks of a page, for figures that show their results."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

CONCEPTS = Path(__file__).parents[1] / "concepts"


def names_until(page: str, wanted: str) -> dict[str, Any]:
    """Run the Python blocks of a concept page up to the one that defines `wanted`, and return their names.

    Raises:
        KeyError: no block makes it.
    """
    text = (CONCEPTS / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": page}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, page, "exec"), names)  # noqa: S102 - our own pages
        if wanted in names:
            return names
    raise KeyError(f"no block of {page} defines {wanted!r}")
