"""Judged text as data: one JSON object on one line, in a block whose tags the text cannot form.

1. The text is a JSON string, so that it has no line of its own, and no role marker at the start of one.
2. In it `<` and `>` are written as escapes, as are `[INST]` and its kin, characters that nobody sees, and surrogates.
   No tag, no chat template's special token and no hidden text is left as such; a JSON reader gets the exact text back.
3. The tags carry a code made of a hash of all that is asked. It is the same in every run, and a text that is to contain
   its own code would have to be found by trying 2**64 of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# Control and format characters (bidirectional marks, zero widths, tags, variation selectors but the one of emoji), line
# separators, surrogates, private use and what is no character.
_UNSEEN = (
    "\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\uf8ff\ufe00-\ufe0e\ufeff\uffa0\ufff0-\uffff"
    "\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U0010ffff"
)
_MARKER = re.compile(rf"[<>＜＞{_UNSEEN}]|\[(?=/?[A-Z_]{{1,40}}\])")
_CODE_LENGTH = 16


class Fenced(NamedTuple):
    """A block, and the code in its tags."""

    text: str
    code: str


def as_data(value: Any) -> str:
    """`value` as JSON on one line, in which no text forms a tag or a special token."""
    return _MARKER.sub(_escape, json.dumps(value, ensure_ascii=False))


def fenced(data: Mapping[str, Any], instructions: str) -> Fenced:
    """`data` in a block of its own.

    Args:
        data: what is judged.
        instructions: what is done with it; the code depends on it too.
    """
    body = as_data(data)
    code = hashlib.sha256(json.dumps([instructions, body]).encode()).hexdigest()[:_CODE_LENGTH]
    return Fenced(f"<data-{code}>\n{body}\n</data-{code}>", code)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
