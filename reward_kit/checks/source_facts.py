"""Facts of a reward's source text, which is read and never run: annotations, words, patterns, swallowed exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from reward_kit.reward_agent.sources import definition_of, definitions

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_RE_CALLS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn"}
_CHANCE = {"random", "secrets", "uuid", "time", "datetime"}
_BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The facts of the text of a reward.

    Attributes:
        ground_truth: the annotation of `ground_truth`, "" if it is missing.
        words: the texts that stand in the file, docstrings left out.
        patterns: the texts among them that are used as regular expressions.
        zeros: lines of the reward, and of what it calls in its file, at which a broad `except` makes a score.
        chance: modules it imports whose values differ from call to call.
        has_sets: it builds sets or asks for hashes, whose order and value differ between interpreters.
    """

    ground_truth: str = ""
    words: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    zeros: tuple[int, ...] = ()
    chance: tuple[str, ...] = ()
    has_sets: bool = False


def facts_of(text: str, name: str) -> SourceFacts:
    """Read the text of a reward's file.

    Args:
        text: of the file; a text that is not Python has no facts.
        name: of the reward in it, dotted for one in a class.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # reported where it is loaded
        return SourceFacts()
    docstrings = set(_docstrings(tree))
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return SourceFacts(
        ground_truth=_truth_annotation(tree, name),
        words=tuple(dict.fromkeys(str(node.value) for node in texts if id(node) not in docstrings)),
        patterns=tuple(dict.fromkeys(_patterns(tree))),
        zeros=tuple(sorted({line for part in _reached(tree, name) for line in _zeros(part)})),
        chance=tuple(sorted(_CHANCE & set(_imports(tree)))),
        has_sets=any(_is_set(node) for node in ast.walk(tree)),
    )


def kind_in(text: str, name: str) -> str:
    """Return what a text defines under a name: "reward", "class" for a class without `score`, or "" if unknown."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    found = definition_of(name, tree.body)
    if isinstance(found, ast.ClassDef):
        methods = {node.name for node in found.body if isinstance(node, _Function)}
        return "reward" if "score" in methods or found.decorator_list else "class"
    return "reward" if found is not None else ""


def rewards_in(text: str) -> list[str]:
    """The names of the rewards that a text defines: what is decorated as one, else what takes `messages`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known = [node for node in definitions(tree.body) if not node.name.startswith("_")]
    decorated = [node.name for node in known if any("reward_function" in ast.unparse(d) for d in node.decorator_list)]
    plain = [
        node.name
        for node in known
        if isinstance(node, _Function) and any(one.arg == "messages" for one in node.args.args)
    ]
    return decorated or plain


def _truth_annotation(tree: ast.Module, name: str) -> str:
    found = definition_of(name, tree.body)
    if isinstance(found, ast.ClassDef):
        found = definition_of(f"{name}.score", tree.body)
    if not isinstance(found, _Function):
        return ""
    for argument in (*found.args.args, *found.args.kwonlyargs):
        if argument.arg in ("ground_truth", "ground_truths") and argument.annotation is not None:
            return ast.unparse(argument.annotation).strip("'\"")
    return ""


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _patterns(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        first = node.args[0]
        if called in _RE_CALLS and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _reached(tree: ast.Module, name: str) -> list[ast.AST]:
    """The reward, and what it names of the functions and classes of its file, and what those name."""
    first = definition_of(name, tree.body)
    if first is None:
        return [tree]
    there = {node.name: node for node in definitions(tree.body)}
    found: dict[int, ast.AST] = {}
    waiting: list[ast.AST] = [first]
    while waiting:
        part = waiting.pop()
        if id(part) in found:
            continue
        found[id(part)] = part
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        waiting += [there[one] for one in names if one in there]
    return list(found.values())


def _zeros(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
            yield from (inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Return) and _is_score(inner))


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in _BROAD)


def _is_score(node: ast.Return) -> bool:
    """It returns a number, or a result that has one and is not declared invalid."""
    value = node.value
    if isinstance(value, ast.Dict):
        return any(isinstance(key, ast.Constant) and key.value == "score" for key in value.keys)
    if isinstance(value, ast.Call):
        given = {keyword.arg for keyword in value.keywords}
        return "score" in given and not given & {"error", "is_score_valid"}
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def _is_set(node: ast.AST) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset", "hash")
    )
