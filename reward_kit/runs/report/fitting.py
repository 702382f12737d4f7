"""A stored line made fit for a page: as it is where that is harmless, else with its long texts cut."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from reward_kit.episodes.json_codec import TAG, from_json_value
from reward_kit.runs.report.token_rows import TokenTexts, token_rows, token_texts
from reward_kit.runs.run_folder import RunHeader

CUT = "__cut__"
"""The key of what stands in the place of a long text: `{"__cut__": its beginning, "length": of the whole}`."""
_LONG_LINE = 100_000
_LONGEST_TEXTS = (20_000, 2_000, 200)  # the next one where a line is still too long for a page
_MOST_BYTES = 2_000_000
_TOKENS = b'"tokens":{'


class LineFitter:
    """Makes the lines of one run fit.

    Args:
        header: the run, which says by which model its tokens are known.
    """

    def __init__(self, header: RunHeader) -> None:
        self._header = header

    @functools.cached_property
    def _texts(self) -> TokenTexts | None:
        """Of the tokens; read when the first line needs them."""
        return token_texts(self._header)

    def fitted(self, line: bytes) -> bytes:
        """A line as the page has it: ASCII alone, and of a bounded length.

        A text of more than 20,000 characters becomes `{"__cut__": …, "length": …}`, and recorded tokens become what
        `token_rows` makes of them. A damaged line is null, or stays as it is; the page says that it cannot be read.
        """
        line = line.strip()
        if len(line) > _LONG_LINE or _TOKENS in line or not line.isascii():
            return self._rewritten(line)
        return line

    def _rewritten(self, line: bytes) -> bytes:
        try:
            record = json.loads(line)
            if isinstance(record, dict) and "tokens" in record:
                record["tokens"] = token_rows(record, self._texts)
            return _bounded(record)
        except (ValueError, RecursionError):  # damaged, or deeper than anybody reads
            return b"null"


def _bounded(record: Any) -> bytes:
    for longest in _LONGEST_TEXTS:
        text = json.dumps(_cut(record, longest), separators=(",", ":"), allow_nan=False).encode("ascii")
        if len(text) <= _MOST_BYTES:
            break
    return text


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= longest else {CUT: value[:longest], "length": len(value)}
    if isinstance(value, list):
        return [_cut(item, longest) for item in value]
    if isinstance(value, Mapping):
        if value.get(TAG) == "text":
            return _cut(from_json_value(value), longest)
        return {key[:longest]: _cut(item, longest) for key, item in value.items()}
    return value
