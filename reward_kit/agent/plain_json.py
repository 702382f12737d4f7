"""What tools and policies hand over, as the text that an agent reads and the JSON that a record keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel

from reward_kit.errors import kind_of


def as_text(value: Any) -> str:
    """What a tool returned, as the agent reads it: text as it is, None as "", everything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json_text(value)


def json_text(value: Any) -> str:
    """`value` as JSON, NumPy values, pydantic models and dataclasses included.

    Raises:
        TypeError: it has no JSON form.
    """
    return _AS_TEXT.encode(value)


def plain(value: Any) -> Any:
    """`value` as the JSON it will be stored as.

    Raises:
        TypeError: it has no JSON form.
    """
    return json.loads(_AS_STORED.encode(value))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{kind_of(value)} has no JSON form; return text or plain data")


# Made once: `json.dumps` makes one at every call that has options.
_AS_TEXT, _AS_STORED = json.JSONEncoder(ensure_ascii=False, default=_plain), json.JSONEncoder(default=_plain)
