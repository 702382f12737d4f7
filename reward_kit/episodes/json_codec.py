"""JSON forms of the values in episodes: plain values are unchanged, and all others become `{"__type__": …}`.

Plain dicts that have a `__type__` key are also wrapped, and so are strings with lone surrogates, which UTF-8 cannot
represent. Decoding is therefore the exact inverse of encoding.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np

from reward_kit.errors import EpisodeError, type_name
from reward_kit.models import Message

TAG = "__type__"
# Only booleans and numbers are allowed: for bytes, text and void, NumPy would create scalars as large as the dtype
# specifies.
_SCALAR_KINDS = "biuf"


compact_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""An encoder that writes a JSON value as one line of ASCII and escapes lone surrogates."""


def to_json_value(value: Any) -> Any:
    """Return `value` converted to JSON types, without NaN or infinity.

    Raises:
        EpisodeError: a value cannot be converted to JSON; the message names the type of the value.
    """
    kind = type(value)
    if kind is str and value.isascii():  # the common case
        return value
    if kind is dict:
        return _encode_dict(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        # msgpack stores at most 64 bits.
        return value if -(2**63) <= value < 2**64 else {TAG: "int", "value": str(value)}
    if isinstance(value, str):
        return value if _is_unicode(value) else {TAG: "text", "value": _base64(value.encode("utf-8", "surrogatepass"))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
    if isinstance(value, list):
        return [to_json_value(item) for item in value]
    if isinstance(value, dict):
        return _encode_dict(value)
    if isinstance(value, tuple):
        return {TAG: "tuple", "value": [to_json_value(item) for item in value]}
    if isinstance(value, Message):
        return {TAG: "message", "value": to_json_value(value.to_chat())}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.fields:
            raise EpisodeError(f"an array of {value.dtype} cannot be converted to JSON; use a list")
        data = _base64(value.tobytes())
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": data}
    if isinstance(value, np.bool_ | np.integer | np.float16 | np.float32) and value.dtype.kind in _SCALAR_KINDS:
        return {TAG: "scalar", "dtype": value.dtype.str, "value": to_json_value(value.item())}
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "value": _base64(value)}
    raise EpisodeError(f"{type_name(value)} cannot be converted to JSON; use plain values, NumPy arrays or bytes")


def _encode_dict(value: dict[Any, Any]) -> dict[str, Any]:
    encoded = {}
    for key, item in value.items():
        if not isinstance(key, str) or key == TAG or not (key.isascii() or _is_unicode(key)):
            return {TAG: "dict", "value": [[to_json_value(key), to_json_value(item)] for key, item in value.items()]}
        encoded[key] = to_json_value(item)
    return encoded


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def from_json_value(value: Any) -> Any:
    """Decode a value that was encoded by `to_json_value`.

    Raises:
        EpisodeError: a type is unknown, or a scalar is not a number.
    """
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: from_json_value(item) for key, item in value.items()}
    kind, inner = value[TAG], value["value"]
    match kind:
        case "float":
            return float(inner)
        case "int":
            return int(inner)
        case "tuple":
            return tuple(from_json_value(item) for item in inner)
        case "message":
            return Message.model_validate(from_json_value(inner))
        case "dict":
            return {from_json_value(key): from_json_value(item) for key, item in inner}
        case "array":
            flat = np.frombuffer(base64.b64decode(inner), dtype=np.dtype(value["dtype"]))
            return flat.reshape(value["shape"]).copy()
        case "scalar":
            dtype, number = np.dtype(value["dtype"]), from_json_value(inner)
            if dtype.kind not in _SCALAR_KINDS or not isinstance(number, bool | int | float):
                name = value["dtype"]
                raise EpisodeError(f"a scalar of type {name!r:.60} must be a number, got {number!r:.60}")
            return dtype.type(number)
        case "text":
            return base64.b64decode(inner).decode("utf-8", "surrogatepass")
        case "bytes":
            return base64.b64decode(inner)
        case _:
            raise EpisodeError(f"unknown value type {kind!r} in an episode's state")
