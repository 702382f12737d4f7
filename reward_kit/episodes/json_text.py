"""Compact JSON text of what episodes hold: that of `to_json_value`, in one pass and without the values in between.

A run writes some hundred values for each episode, nearly all of them plain. Python's own encoder takes as long for
those as this does, and knows nothing of the rest: it stores a tuple as a list and a number as the text of a key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

from reward_kit.episodes.json_codec import TAG, to_json_value

compact_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""A value of JSON types as one line of ASCII, whose escapes keep lone surrogates writable."""
quoted: Callable[[str], str] = encode_basestring_ascii
"""A text as JSON has it; lone surrogates stay in it."""
_MOST_KEYS = 10_000
# What an escaped backslash and a pair of surrogates leave over is a lone one.
_SURROGATES = re.compile(r"\\\\|\\ud[89ab]..\\ud[c-f]..|(\\ud[89a-f]..)")


def json_text(value: Any) -> str:
    """The same as `compact_json(to_json_value(value))`, but for lone surrogates: ask `has_lone_surrogates` afterwards.

    To ask each text for them would take as long as to write it.

    Raises:
        EpisodeError: a value has no JSON form; the message names its type.
    """
    return WRITERS[type(value)](value)


def has_lone_surrogates(text: str) -> bool:
    """Whether a text in what `json_text` made holds half of a surrogate pair, for which `to_json_value` has a form."""
    return "\\ud" in text and any(found[1] for found in _SURROGATES.finditer(text))


def _any(value: Any) -> str:
    return compact_json(to_json_value(value))


def _dict(value: dict[Any, Any]) -> str:
    try:
        return "{" + ",".join([_KEYS[key] + WRITERS[type(item)](item) for key, item in value.items()]) + "}"
    except _UnusualKeyError:
        return _any(value)


def _list(value: list[Any]) -> str:
    return "[" + ",".join([WRITERS[type(item)](item) for item in value]) + "]"


def _int(value: int) -> str:
    return str(value) if -(2**63) <= value < 2**63 else _any(value)


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else _any(value)


class _UnusualKeyError(Exception):
    """A dict has a key that no JSON object can have as it is."""


class _Keys(dict[Any, str]):
    """Keys as they begin an item. Few occur, and each of them in every step."""

    def __missing__(self, key: Any) -> str:
        if type(key) is not str or key == TAG:
            raise _UnusualKeyError
        text = quoted(key) + ":"
        if len(self) < _MOST_KEYS:
            self[key] = text
        return text


class _Writers(dict[type, Callable[[Any], str]]):
    """What writes a value of exactly this type; where a call more counts, `WRITERS[type(value)](value)`."""

    def __missing__(self, kind: type) -> Callable[[Any], str]:
        return _any


_KEYS = _Keys()
WRITERS = _Writers(
    {
        str: quoted,
        dict: _dict,
        list: _list,
        int: _int,
        float: _float,
        bool: {True: "true", False: "false"}.__getitem__,
        type(None): {None: "null"}.__getitem__,
    }
)
