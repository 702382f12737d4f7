"""JSON as RFC 8259 has it: what Python's own reader takes besides raises a ValueError.

That is NaN and Infinity, and a number beyond every float, which it takes for infinite. None of these could be stored
again, and others would read them differently. (What confined code answers is read by `sandbox/frames.py`, which tells
faults apart.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

Pairs = list[tuple[str, Any]]


def strict_decoder(object_pairs_hook: Callable[[Pairs], Any] | None = None) -> json.JSONDecoder:
    """A decoder that reads strictly; of each object `object_pairs_hook` makes what it is read as."""
    return json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=object_pairs_hook)


def read_strictly(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8, or one of the others that JSON may be written in.

    Raises:
        ValueError: it is none; the message says why.
        RecursionError: it nests deeper than Python can go.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return _decode(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is beyond every float")
    return number


_decode = strict_decoder().decode
