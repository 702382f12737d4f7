"""JSON schemas made for editors: every key has its sentence, also where it stands in the docstring of a dataclass."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECTION = re.compile(r"^(?:Attributes|Raises):\n", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


class _Described(GenerateJsonSchema):
    """As pydantic makes them, with what docstrings say of attributes, and without titles, which repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """No."""
        return False

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        """Of a dataclass, whose unknown keys are refused where it is read."""
        found = super().dataclass_schema(schema)
        for name, text in attributes_of(schema["cls"]).items():
            found["properties"][name].setdefault("description", text)
        return {**found, "additionalProperties": False}


def attributes_of(documented: type[Any]) -> dict[str, str]:
    """What the section `Attributes:` of a class's docstring says of each, on one line."""
    texts = _SECTION.split(inspect.getdoc(documented) or "")
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(texts[1] if len(texts) > 1 else "")}


def schema_of(model: type[BaseModel]) -> str:
    """The JSON schema of files that this model reads, as it is printed.

    Args:
        model: of the file.
    """
    schema = model.model_json_schema(by_alias=False, schema_generator=_Described)
    for one in (schema, *schema.get("$defs", {}).values()):
        if text := one.get("description"):
            one["description"] = " ".join(_SECTION.split(text)[0].split())
    return json.dumps({"$schema": _DIALECT, **schema}, indent=2, ensure_ascii=False) + "\n"
