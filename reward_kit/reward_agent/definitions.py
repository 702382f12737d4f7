"""Functions and classes in the text of a reward, found by reading it and never by running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(scope: Sequence[ast.stmt]) -> Iterator[Definition]:
    """Those of one scope, also under `if`, `try` and `with`."""
    for node in scope:
        if isinstance(node, Definition):
            yield node
            continue
        for inner in ("body", "orelse", "handlers", "finalbody"):
            yield from definitions(getattr(node, inner, ()))


def definition_of(name: str, scope: Sequence[ast.stmt]) -> Definition | None:
    """The one that a name, dotted for what stands in a class, means in the end; None where the scope has it not."""
    found: Definition | None = None
    for part in name.split("."):
        named = [node for node in definitions(scope) if node.name == part]
        if not named:
            return None
        found = named[-1]
        scope = found.body
    return found
