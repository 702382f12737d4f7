"""What a tool's JSON schema says of a call: whether its arguments fit, and which of them are the same."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from reward_kit.errors import RewardError
from reward_kit.rewards.comparing.json_values import array_key, in_short, is_number
from reward_kit.rewards.reading.texts import shown

Strings = Literal["exact", "casefold", "bfcl"]
"""How texts are compared: as they are; ignoring case; or as the Berkeley Function-Calling Leaderboard does, which also
drops blanks and the characters ,./-_*^ and takes both quotes for one."""


class Same(NamedTuple):
    """What counts as the same argument.

    Attributes:
        strings: how texts are compared.
        coerce: a text that spells a number or truth value is one where the schema wants one.
        any_order: no array's order counts; else only that of arrays whose schema says `uniqueItems` does not.
    """

    strings: Strings = "exact"
    coerce: bool = False
    any_order: bool = False


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "dict": (dict,),  # this one and the next are what the leaderboard's schemas write
    "tuple": (list,),
}
_NUMBERS: Final = frozenset({"number", "integer", "float"})
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL: Final = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?")
_BFCL_DROPS: Final = str.maketrans("'", '"', " ,./-_*^")
_ABSENT: Final = object()


class ToolSchema:
    """The schema of one tool's arguments.

    Of JSON Schema it reads types, required, properties, additionalProperties, items, enum, const, default, uniqueItems,
    `$ref` inside of the schema, allOf, anyOf and oneOf. Patterns, formats and bounds are not checked.
    """

    def __init__(self, schema: Any, same: Same, tool: str = "") -> None:
        self._root, self._same, self._tool = schema, same, tool
        # By the identity of value and schema, which outlive the comparison.
        self._known: dict[tuple[int, int], str] = {}
        self._keys: dict[tuple[int, int], dict[str, Hashable]] = {}

    @property
    def root(self) -> Any:
        """The schema itself."""
        return self._root

    def problem(self, value: Any) -> str:
        """Why a value does not fit, in a few words; "" where it does."""
        self._known.clear()
        return self._problem(value, self._root, "")

    def missing_or_unknown(self, arguments: Mapping[str, Any]) -> str:
        """As `problem`, for the names of a call's arguments alone."""
        for schema in self._facets(self._root, arguments):
            if found := self._required(arguments, schema, "") or self._additional(arguments, schema, ""):
                return found
        return ""

    def key(self, value: Any, schema: Any) -> Hashable:
        """A value as a key that is equal for values that are the same under a schema."""
        types = self._types(schema)
        if isinstance(value, str):
            value = self._coerced(value, types)
        if is_number(value):
            is_free = not types.isdisjoint(_NUMBERS)
            return ("number" if is_free else type(value).__name__), value
        if isinstance(value, str):
            return "str", self._text(value)
        if isinstance(value, Mapping):
            return "object", frozenset(self.field_keys(value, schema).items())
        if isinstance(value, list | tuple):
            facets = list(self._facets(schema, value))
            items: Any = next((facet["items"] for facet in facets if "items" in facet), True)
            is_set = self._same.any_order or any(facet.get("uniqueItems") is True for facet in facets)
            return array_key([self.key(item, items) for item in value], is_set)
        return type(value).__name__, value

    def field_keys(self, fields: Mapping[str, Any], schema: Any) -> dict[str, Hashable]:
        """The keys of an object's fields; those that it leaves out have their default where there is one."""
        pair = (id(fields), id(schema))
        if pair in self._keys:
            return self._keys[pair]
        properties = self.properties(fields, schema)
        keys = {name: self.key(item, properties.get(name, True)) for name, item in fields.items()}
        for name, of_field in properties.items():
            default = self.default(of_field)
            if name not in keys and default is not _ABSENT:
                keys[name] = self.key(default, of_field)
        self._keys[pair] = keys
        return keys

    def properties(self, fields: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        """The schemas of an object's fields, by name."""
        found: dict[str, Any] = {}
        for facet in self._facets(schema, fields):
            inner = facet.get("properties")
            found.update(inner if isinstance(inner, Mapping) else {})
        return found

    def items(self, value: list[Any], schema: Any) -> Any:
        """The schema of an array's items."""
        return next((facet["items"] for facet in self._facets(schema, value) if "items" in facet), True)

    def default(self, schema: Any) -> Any:
        """The default of a field; a value of its own where it has none."""
        return schema.get("default", _ABSENT) if isinstance(schema, Mapping) else _ABSENT

    def has_default(self, schema: Any) -> bool:
        """Whether a field has a default."""
        return self.default(schema) is not _ABSENT

    def _problem(self, value: Any, schema: Any, path: str) -> str:
        """Each value is held against each schema once, so that unions of unions take no longer than their parts."""
        if not isinstance(schema, Mapping):
            return f"{path or 'it'} is not allowed" if schema is False else ""
        pair = (id(value), id(schema))
        if pair not in self._known:
            self._known[pair] = ""  # what it is while it refers to itself
            self._known[pair] = self._found(value, schema, path)
        return self._known[pair]

    def _found(self, value: Any, schema: Mapping[str, Any], path: str) -> str:
        if not self._has_type(value, schema.get("type")):
            return f"{_named(path)} is {in_short(value)} and no {_listed(schema['type'])}"
        if "enum" in schema and not any(self._is_choice(value, choice, schema) for choice in schema["enum"]):
            return f"{_named(path)} is {in_short(value)}, which is none of its values"
        if "const" in schema and not self._is_choice(value, schema["const"], schema):
            return f"{_named(path)} is {in_short(value)} and not {in_short(schema['const'])}"
        parts = [self._at(schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf") or []
        for found in (self._problem(value, part, path) for part in parts):
            if found:
                return found
        for union in (schema[word] for word in ("anyOf", "oneOf") if schema.get(word)):
            if all(problems := [self._problem(value, branch, path) for branch in union]):
                return problems[0]
        if isinstance(value, Mapping):
            return self._field_problem(value, schema, path)
        return self._item_problem(value, schema, path) if isinstance(value, list | tuple) else ""

    def _field_problem(self, fields: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
        if found := self._required(fields, schema, path) or self._additional(fields, schema, path):
            return found
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
        for name, item in fields.items():
            if found := self._problem(item, properties.get(name, others), f"{path}.{name}" if path else name):
                return found
        return ""

    def _item_problem(self, items: Any, schema: Mapping[str, Any], path: str) -> str:
        inner = schema.get("items", True)
        found = (self._problem(item, inner, f"{path}[{index}]") for index, item in enumerate(items))
        return next((problem for problem in found if problem), "")

    def _required(self, fields: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
        missing = [name for name in schema.get("required") or [] if name not in fields]
        return f"{_named(f'{path}.{missing[0]}' if path else missing[0])} is missing" if missing else ""

    def _additional(self, fields: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> str:
        if schema.get("additionalProperties") is not False or "patternProperties" in schema:
            return ""
        unknown = [name for name in fields if name not in (schema.get("properties") or {})]
        return f"{_named(f'{path}.{unknown[0]}' if path else unknown[0])} is none that it takes" if unknown else ""

    def _is_choice(self, value: Any, choice: Any, schema: Mapping[str, Any]) -> bool:
        of_choice = {"type": schema.get("type", ["number", "string"])}
        return self.key(value, of_choice) == self.key(choice, of_choice)

    def _has_type(self, value: Any, wanted: Any) -> bool:
        names = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(names, list | tuple) or not names:
            return True
        if isinstance(value, str):
            value = self._coerced(value, frozenset(filter(_is_text, names)))
        return any(_is_of(value, name) for name in names)

    def _facets(self, schema: Any, value: Any, seen: tuple[int, ...] = ()) -> Iterator[Mapping[str, Any]]:
        """The schemas that speak of a value together: the schema, what it refers to, and the branch that fits."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        seen = (*seen, id(schema))
        yield schema
        parts = [self._at(schema["$ref"])] if "$ref" in schema else []
        parts += schema.get("allOf") or []
        for word in ("anyOf", "oneOf"):
            parts += [branch for branch in schema.get(word) or [] if not self._problem(value, branch, "")][:1]
        for part in parts:
            yield from self._facets(part, value, seen)

    def _types(self, schema: Any, seen: tuple[int, ...] = ()) -> frozenset[str]:
        """The names of all types that a schema allows anywhere, as far as it says."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return frozenset()
        wanted = schema.get("type")
        names = {wanted} if isinstance(wanted, str) else set(filter(_is_text, wanted or []))
        parts = [self._at(schema["$ref"])] if "$ref" in schema else []
        for word in ("allOf", "anyOf", "oneOf"):
            parts += schema.get(word) or []
        return frozenset(names).union(*(self._types(part, (*seen, id(schema))) for part in parts))

    def _at(self, reference: Any) -> Any:
        """The part of the schema that `#/a/b` names."""
        found = self._root
        path = str(reference)
        try:
            if path != "#" and not path.startswith("#/"):
                raise KeyError(path)
            for part in path.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise RewardError(
                f"the schema of tool {self._tool!r} refers to {path!r}, which is not in it; write that part into the "
                "schema itself, since nothing is fetched"
            ) from None
        return found

    def _coerced(self, text: str, types: frozenset[str]) -> Any:
        """A text as the number or truth value that it spells, where that is asked for and texts are not wanted."""
        if not self._same.coerce or "string" in types:
            return text
        plain = text.strip()
        if "boolean" in types and plain.lower() in ("true", "false"):
            return plain.lower() == "true"
        if not types.isdisjoint(_NUMBERS) and _INTEGER.fullmatch(plain):
            return int(plain)
        is_number_wanted = not types.isdisjoint(_NUMBERS - {"integer"})
        return float(plain) if is_number_wanted and _DECIMAL.fullmatch(plain) else text

    def _text(self, text: str) -> str:
        if self._same.strings == "casefold":
            return text.casefold()
        return text.translate(_BFCL_DROPS).lower() if self._same.strings == "bfcl" else text


def _is_of(value: Any, name: Any) -> bool:
    if name in ("number", "float"):
        return is_number(value)
    if name == "integer":
        return is_number(value) and (isinstance(value, int) or value.is_integer())
    return not isinstance(name, str) or name not in _TYPES or isinstance(value, _TYPES[name])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _listed(wanted: Any) -> str:
    return str(wanted) if isinstance(wanted, str) else " or ".join(map(str, wanted))


def _named(path: str) -> str:
    return f"argument {shown(path)}" if path else "the call"
