"""Random arguments that are valid for a JSON schema. The checker and random policies use them.

The keyword `pattern` is ignored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

_WORDS = ("a", "b", "alpha", "beta", "name", "value", "one two", "x.y", "0", "é", "")
_MAX_DEPTH = 6


def sample_arguments(schema: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return random arguments for a tool whose `parameters` schema is `schema`."""
    value = sample_value({"type": "object", **schema}, rng)
    return value if isinstance(value, dict) else {}


def sample_value(schema: Any, rng: random.Random, root: Mapping[str, Any] | None = None, depth: int = 0) -> Any:
    """Return a random value that is valid for `schema`. References are resolved against `root`."""
    if not isinstance(schema, Mapping):
        schema = {}
    root = schema if root is None else root
    schema = _resolved(schema, rng, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return rng.choice(list(schema["enum"]))
    kind = schema.get("type")
    if not kind:
        keys = {"properties": "object", "items": "array", "prefixItems": "array", "minLength": "string"}
        keys |= {"minimum": "integer", "maximum": "integer"}
        kind = next((implied for key, implied in keys.items() if key in schema), "any")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    if kind == "any":
        kind = rng.choice(("string", "integer", "boolean", "null"))
    match kind:
        case "object":
            return _object(schema, rng, root, depth)
        case "array":
            return _array(schema, rng, root, depth)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "integer":
            multiple = int(schema.get("multipleOf", 1)) or 1
            low, high = _bounds(schema, whole=True)
            first, last = math.ceil(low / multiple), math.floor(high / multiple)
            return multiple * rng.randint(min(first, last), last)
        case "number":
            low, high = _bounds(schema, whole=False)
            if step := schema.get("multipleOf"):
                first, last = math.ceil(low / step), math.floor(high / step)
                return float(step * rng.randint(min(first, last), last))
            # Stay strictly inside, since the bounds may be exclusive.
            return low + (high - low) * rng.uniform(0.01, 0.99)
    return _text(schema, rng)


def _resolved(schema: Mapping[str, Any], rng: random.Random, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve references in `schema`, merge `allOf`, and choose a random branch of `anyOf` or `oneOf`."""
    for _ in range(32):
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            target: Any = root
            for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                name = part.replace("~1", "/").replace("~0", "~")
                target = target.get(name, {}) if isinstance(target, Mapping) else {}
            schema = {**(target if isinstance(target, Mapping) else {}), **rest}
        elif schema.get("allOf"):
            merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
            for part in schema["allOf"]:
                merged = _merged(merged, _resolved(part, rng, root))
            schema = merged
        elif branches := schema.get("anyOf") or schema.get("oneOf"):
            rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
            schema = _merged(rest, rng.choice(list(branches)))
        else:
            return schema
    return {}


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {**first, **second}
    if "properties" in first and "properties" in second:
        both["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        both["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    return both


def _object(schema: Mapping[str, Any], rng: random.Random, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    value = {
        name: sample_value(inner, rng, root, depth + 1)
        for name, inner in properties.items()
        if name in required or (depth < _MAX_DEPTH and rng.random() < 0.5)
    }
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        wanted = max(int(schema.get("minProperties", 0)), 0 if depth >= _MAX_DEPTH else rng.randrange(3))
        for number in range(max(0, wanted - len(value))):
            value[f"key{number}"] = sample_value(extra, rng, root, depth + 1)
    return value


def _array(schema: Mapping[str, Any], rng: random.Random, root: Mapping[str, Any], depth: int) -> list[Any]:
    prefix = [sample_value(inner, rng, root, depth + 1) for inner in schema.get("prefixItems") or ()]
    low = int(schema.get("minItems", 0))
    longest = low if depth >= _MAX_DEPTH else max(low, 3)
    high = min(int(schema.get("maxItems", longest)), longest)
    if schema.get("items") is False or (prefix and "items" not in schema):
        return prefix
    items, unique = prefix, bool(schema.get("uniqueItems"))
    length = rng.randint(min(low, high), high)
    for _ in range(20 * length):
        if len(items) >= length:
            break
        item = sample_value(schema.get("items", {}), rng, root, depth + 1)
        if not (unique and item in items):
            items.append(item)
    return items


def _text(schema: Mapping[str, Any], rng: random.Random) -> str:
    low = int(schema.get("minLength", 0))
    high = schema.get("maxLength")
    examples = [example for example in schema.get("examples") or () if isinstance(example, str)]
    if isinstance(schema.get("default"), str):
        examples.append(schema["default"])
    text = rng.choice(examples) if examples and rng.random() < 0.5 else rng.choice(_WORDS)
    while len(text) < low:
        text += rng.choice("abcdefgh")
    return text if high is None else text[: int(high)]


def _bounds(schema: Mapping[str, Any], whole: bool) -> tuple[float, float]:
    low, high = float(schema.get("minimum", -math.inf)), float(schema.get("maximum", math.inf))
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # In draft 4, the exclusive bound is a boolean next to `minimum`; in later drafts, it is a number.
    if above is not None and above is not False:  # Not `in (None, False)`, since 0 == False.
        bound = low if above is True else float(above)
        low = max(low, math.floor(bound) + 1.0 if whole else bound)
    if below is not None and below is not False:
        bound = high if below is True else float(below)
        high = min(high, math.ceil(bound) - 1.0 if whole else bound)
    if math.isinf(low):
        low = -10.0 if math.isinf(high) else min(-10.0, high - 20)
    return low, (low + 20 if math.isinf(high) else high)
