"""What a page computes, for the pictures on it: a figure shows the numbers of the program that stands beside it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

CONCEPTS = Path(__file__).parents[1] / "concepts"


def names_until(page: str, wanted: str) -> dict[str, Any]:
    """The names of the Python blocks of a page of concepts, up to the block that makes the one that is wanted.

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
    raise KeyError(f"no block of {page} makes {wanted!r}")
