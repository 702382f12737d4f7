"""The Python reference: an index by need, and a page for each group of names, whose docstrings mkdocstrings shows.

Names are found in the sources and not by import, since some modules need a peer that is not installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_texts import table
from python_groups import GROUPS, Group

import reward_kit

DOCS = Path(__file__).parents[1]
PACKAGE = Path(reward_kit.__file__).parent
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_INTRO = """# Python

The public names by topic. Names in **bold** are in `reward_kit.__all__` and importable from `reward_kit`; the others
from
the module shown.
"""


class Name(NamedTuple):
    """A public name: its module, its name, and the first line of its docstring."""

    module: str
    name: str
    summary: str

    @property
    def path(self) -> str:
        """The identifier for mkdocstrings."""
        return f"{self.module}.{self.name}"


def uri_of(group: Group) -> str:
    """Return the address of a group's page in the docs."""
    return f"reference/python/{group.slug}.md"


def index_page() -> str:
    """Return the index: the names of all groups with their first lines and links."""
    own = set(reward_kit.__all__)
    parts = [_INTRO]
    for group in GROUPS:
        parts.append(f"## {group.title} {{ #{group.slug} }}\n\nDetails are on [its page](python/{group.slug}.md).\n")
        rows = []
        for one in (name for names in names_of(group).values() for name in names):
            shown = f"**[`{one.name}`][{one.path}]**" if one.name in own else f"[`{one.name}`][{one.path}]"
            rows.append((shown, one.summary.replace("|", r"\|")))
        parts.append(table(["Name", "Meaning"], rows) + "\n")
    return "\n".join(parts)


def group_page(group: Group) -> str:
    """Return the page of a group. Names documented on other pages are linked, since each needs a single location."""
    elsewhere = shown_elsewhere()
    parts = [f"# {group.title}\n\n{group.intro}\n"]
    for heading, names in names_of(group).items():
        parts.append(f"## {heading}\n")
        linked = [one for one in names if one.path in elsewhere or one.module in elsewhere]
        if linked:
            parts.append("On pages of their own: " + ", ".join(f"[`{one.name}`][{one.path}]" for one in linked) + "\n")
        parts += [f"::: {one.path}\n" for one in names if one not in linked]
    return "\n".join(parts)


def shown_elsewhere() -> set[str]:
    """Return the names that pages of the docs document by directives."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    return {path for text in texts for path in _DIRECTIVE.findall(text)}


def names_of(group: Group) -> dict[str, list[Name]]:
    """Return the names of each heading of a group."""
    return _all_names()[group.slug]


@cache
def _all_names() -> dict[str, dict[str, list[Name]]]:
    """Return the names of each group by heading, each name only once."""
    seen: dict[str, Name] = {}
    found: dict[str, dict[str, list[Name]]] = {}
    for group in GROUPS:
        found[group.slug] = {}
        for heading, sources in group.parts.items():
            names = {name.path: name for source in sources for name in expanded(source) if name.path not in seen}
            seen |= names
            if names:
                found[group.slug][heading] = list(names.values())
    return found


def expanded(source: str) -> Iterator[Name]:
    """Yield the names of a group's source."""
    module, _, name = source.partition(":")
    tree = _tree(module)
    if name:
        yield _named(module, name)
    elif exported := _exported(tree):
        homes = _homes(module)
        yield from (_named(homes.get(one, module), one) for one in exported)
    else:
        public = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        yield from (_named(module, one) for one in public if not one.startswith("_"))


def _named(module: str, name: str) -> Name:
    """Return the name at its definition, following imports."""
    body = _tree(module).body
    # Backwards, as the overloads of a function come before it.
    for node, after in reversed(list(zip(body, [*body[1:], None], strict=True))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return Name(module, name, (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " "))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            has_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            return Name(module, name, str(after.value.value).split("\n")[0] if has_docstring else "")  # type: ignore[union-attr]
    home = _homes(module).get(name)
    assert home is not None, f"{module} has no {name}"
    return _named(home, name)


@cache
def _tree(module: str) -> ast.Module:
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _exported(tree: ast.Module) -> list[str]:
    """Return the names in `__all__`, also if built from the table of lazy names."""
    lists = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    value = lists.get("__all__")
    if value is None:
        return []
    if isinstance(value, ast.List):
        return list(ast.literal_eval(value))
    if (names := lists.get("_MODULES")) is not None:
        return sorted(" ".join(ast.literal_eval(names).values()).split())
    return list(ast.literal_eval(lists["_HOMES"]))


@cache
def _homes(module: str) -> dict[str, str]:
    """Return the module of each imported name, including imports for type checkers."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
