"""The source text of a Python object, also of one that was written in a cell of a notebook, which is no file."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from typing import Any


def source_of(value: Any) -> str:
    """The source text of a function, a class or an instance's class; "" where Python does not know it."""
    if not isinstance(value, type):
        while isinstance(value, functools.partial):
            value = value.func
        value = value if inspect.isroutine(value) else type(value)
    try:
        return inspect.getsource(inspect.unwrap(value))
    except (OSError, TypeError):
        return _class_in_a_cell(value) if isinstance(value, type) else ""


def _class_in_a_cell(kind: type) -> str:
    """The text of a class of which only its methods know the cell that it was written in."""
    codes = (getattr(inspect.unwrap(one), "__code__", None) for one in vars(kind).values() if inspect.isfunction(one))
    for code in codes:
        text = "".join(linecache.getlines(code.co_filename)) if code is not None else ""
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # a cell may hold commands of the notebook
            continue
        found = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
        if (node := next(found, None)) is not None:
            return ast.get_source_segment(text, node) or ""
    return ""
