"""Generate the pages of task, train and sweep files from the JSON schemas that `reward-kit schema` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from markdown_texts import code, inline, sentence, table

from reward_kit.cli.setup import sweep_schema, task_schema, train_schema

Schema = dict[str, Any]
_TASK = """# Task file

Every key of a task file, generated from [its JSON schema](../schemas/task.json). See also [Write a task
file](../guides/tasks.md). An unknown key is an error with its line and the nearest key.
"""
_TRAIN = """# Train file

Every key of a train file, generated from [its JSON schema](../schemas/train.json). See also
[Train](../guides/training.md); `reward-kit train --dry-run` prints the plan of a file. An unknown key is an error with
its line and the nearest key; so is a key without effect.
"""
_SWEEP = """# Sweep file

Every key of a sweep file, generated from [its JSON schema](../schemas/sweep.json). See also
[Compare training settings](../guides/sweeps.md). An unknown key is an error with its line and the nearest key.
"""
_EDITOR = """
For completion in your editor, write the schema once and begin the file with its name:

```sh
reward-kit schema KIND > KIND.schema.json
```

```yaml
# yaml-language-server: $schema=KIND.schema.json
```
"""
_FURTHER = {
    "policy": "It also takes the keys of the named policy; see [policies](../guides/policies.md).",
    "user": "It also takes the keys of the named policy; see [a simulated user](../guides/tasks.md).",
    "credit": "It also takes the options of its estimator; see [credit](../concepts/credit.md).",
    "messages[]": "Other keys of a message are passed on unchanged.",
}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
_MANY = 4


def task_page() -> str:
    """Return the page of the task file."""
    return _page(_TASK + _EDITOR.replace("KIND", "task"), json.loads(task_schema()))


def train_page() -> str:
    """Return the page of the train file."""
    return _page(_TRAIN + _EDITOR.replace("KIND", "train"), json.loads(train_schema()))


def sweep_page() -> str:
    """Return the page of the sweep file."""
    return _page(_SWEEP + _EDITOR.replace("KIND", "sweep"), json.loads(sweep_schema()))


class _Block(NamedTuple):
    """A mapping in the file: its path and its schema."""

    path: str
    schema: Schema


def _page(intro: str, schema: Schema) -> str:
    parts = [intro]
    blocks = [_Block("", schema)]
    while blocks:
        block = blocks.pop(0)
        inner = list(_blocks_within(block, schema))
        parts += _section(block, schema)
        blocks = inner + blocks
    return "\n".join(parts) + "\n"


def _section(block: _Block, root: Schema) -> Iterator[str]:
    """Yield the heading, description and table of a block."""
    if block.path:
        yield f"## `{block.path}` {{ #{anchor(block.path)} }}\n"
        yield sentence(inline(block.schema.get("description", ""))) + "\n"
        if more := _FURTHER.get(block.path):
            yield more + "\n"
        if "string" in block.schema.get("type", ""):
            yield "It may be a plain name if no other key is set.\n"
    else:
        yield "## Top level { #top }\n"
    required = block.schema.get("required", [])
    rows = [_row(block.path, name, one, root, name in required) for name, one in block.schema["properties"].items()]
    yield table(["Key", "Type", "Default", "Meaning"], rows) + "\n"


def _row(path: str, name: str, key: Schema, root: Schema, is_required: bool) -> tuple[str, str, str, str]:
    full = f"{path}.{name}" if path else name
    found = next(_with_keys(full, key, root), None)
    shown = f"[`{name}`](#{anchor(found.path)})" if found else f"`{name}`"
    description = key.get("description") or (found.schema.get("description", "") if found else "")
    choices = [word for one in _ways(key, root) for word in one.get("enum", [])]
    if len(choices) > _MANY:
        description = f"{sentence(description)} One of {', '.join(f'`{word}`' for word in choices)}"
    default = "required" if is_required else _default(key, root)
    return shown, _type(key, root), default, sentence(inline(description))


def _default(key: Schema, root: Schema) -> str:
    if "default" not in key:
        return {"array": "`[]`", "object": "`{}`"}.get(str(_ways(key, root)[0].get("type")), "")
    value = key["default"]
    if value is None or value == "":
        return "none"
    return code(value if isinstance(value, str) else json.dumps(value))


def _type(key: Schema, root: Schema) -> str:
    """Return the accepted type in words."""
    words = [_type_of(one, root) for one in _ways(key, root)]
    return " or ".join(dict.fromkeys(word for word in words if word)) or "anything"


def _type_of(one: Schema, root: Schema) -> str:
    if choices := one.get("enum", [one["const"]] if "const" in one else []):
        return "word" if len(choices) > _MANY else ", ".join(code(str(word)) for word in choices)
    kind = one.get("type")
    if kind == "array":
        items = one.get("prefixItems") or [one.get("items", {})]
        inner = " and ".join(_type(item, root) for item in items)
        return f"{len(items)} numbers" if "prefixItems" in one else f"list of {_plural(inner)}"
    if isinstance(kind, list):
        return "block or name"
    words = {"object": "mapping" if not one.get("properties") else "block", "string": "text", "boolean": "true, false"}
    bounds = [text.format(f"{one[name]:g}") for name, text in _BOUNDS.items() if name in one]
    bounds += ["not empty"] if one.get("minLength") else []
    words |= {"integer": "integer"}
    return ", ".join([words.get(kind or "", kind or "anything"), *bounds])


def _plural(word: str) -> str:
    return {"text": "texts", "block": "blocks", "mapping": "mappings"}.get(word, word)


def _ways(key: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a key, without null, with references resolved."""
    found = []
    for one in key.get("anyOf", [key]):
        while "$ref" in one:
            one = root["$defs"][one["$ref"].rpartition("/")[2]]
        if one.get("type") != "null":
            found.append(one)
    return found


def _blocks_within(block: _Block, root: Schema) -> Iterator[_Block]:
    for name, key in block.schema["properties"].items():
        yield from _with_keys(f"{block.path}.{name}" if block.path else name, key, root)


def _with_keys(path: str, key: Schema, root: Schema) -> Iterator[_Block]:
    """Yield the blocks of a key: itself, or the items of a list or mapping."""
    for one in _ways(key, root):
        if one.get("properties"):
            yield _Block(path, one)
        elif isinstance(items := one.get("items"), dict):
            yield from _with_keys(f"{path}[]", items, root)
        elif isinstance(values := one.get("additionalProperties"), dict):
            yield from _with_keys(f"{path}.NAME", values, root)


def anchor(path: str) -> str:
    """Return the anchor of a block on its page."""
    return path.replace("[]", "").replace(".", "-").lower()
