"""Static analysis of a reward's source: annotations, regular expressions, swallowed exceptions and more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from reward_kit.reward_agent.foreign_rewards import TRUTH_NAMES
from reward_kit.reward_agent.sources import definitions, find_definition

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_RE_CALLS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "subn"}
_CHANCE = {"random", "secrets", "uuid", "time", "datetime"}
_BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The results of analyzing the source of a reward."""

    ground_truth: str = ""  # the annotation of the ground truth, "" if it is missing
    words: tuple[str, ...] = ()  # the string literals of the file, without docstrings
    patterns: tuple[str, ...] = ()  # the literals used as regular expressions
    zeros: tuple[int, ...] = ()  # lines at which a broad `except` in the reward or its helpers leads to a score
    chance: tuple[str, ...] = ()  # imported modules whose values differ between calls
    has_sets: bool = False  # True if the source uses the order of sets or hashes, which differs between interpreters


def read_facts(text: str, name: str) -> SourceFacts:
    """Analyze the source of a reward's file without executing it.

    Args:
        text: the source. If it is not valid Python, the result is empty, and the error is raised when the reward is
            loaded.
        name: the qualified name of the reward in the file.
    """
    if (tree := _parse(text)) is None:
        return SourceFacts()
    words, patterns, imports, has_sets, docstrings = [], [], set(), False, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.append(node)
        elif isinstance(node, ast.Import):
            imports |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Set | ast.SetComp):
            has_sets = True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            has_sets |= isinstance(node.func, ast.Name) and called in ("set", "frozenset", "hash")
            first = node.args[0] if node.args else None
            if called in _RE_CALLS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                patterns.append(first.value)
    return SourceFacts(
        ground_truth=_truth_annotation(tree, name),
        words=tuple(dict.fromkeys(str(node.value) for node in words if node not in docstrings)),
        patterns=tuple(dict.fromkeys(patterns)),
        zeros=tuple(sorted({line for part in _reached(tree, name) for line in _zeros(part)})),
        chance=tuple(sorted(_CHANCE & imports)),
        has_sets=has_sets,
    )


def kind_in(text: str, name: str) -> str:
    """Return the kind of the definition `name`.

    The kind is "reward", "class" for a class without a scoring method, or "" if the kind is unknown.
    """
    if (tree := _parse(text)) is None:
        return ""
    definition = find_definition(name, tree.body)
    if isinstance(definition, ast.ClassDef):
        methods = {node.name for node in definition.body if isinstance(node, _Function)}
        is_reward = methods & {"score", "compute_score", "forward"} or definition.decorator_list
        return "reward" if is_reward else "class"
    return "reward" if definition is not None else ""


def starts_programs(text: str) -> bool:
    """Return True if a file imports a module that starts processes."""
    tree = _parse(text)
    names = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return bool(names & {"subprocess", "multiprocessing", "concurrent", "pty"})


def rewards_in(text: str) -> list[str]:
    """Return the names of the decorated rewards. Otherwise, return the functions that take `messages`."""
    if (tree := _parse(text)) is None:
        return []
    known = [node for node in definitions(tree.body) if not node.name.startswith("_")]
    decorated = [node.name for node in known if any("reward_function" in ast.unparse(d) for d in node.decorator_list)]
    functions = [node for node in known if isinstance(node, _Function)]
    return decorated or [node.name for node in functions if any(one.arg == "messages" for one in node.args.args)]


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _truth_annotation(tree: ast.Module, name: str) -> str:
    definition = find_definition(name, tree.body)
    if isinstance(definition, ast.ClassDef):
        definition = find_definition(f"{name}.score", tree.body)
    if not isinstance(definition, _Function):
        return ""
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        if argument.arg in TRUTH_NAMES and argument.annotation is not None:
            return ast.unparse(argument.annotation).strip("'\"")
    return ""


def _reached(tree: ast.Module, name: str) -> list[ast.AST]:
    """Return the reward and the functions and classes in its file that it uses directly or indirectly."""
    if (first := find_definition(name, tree.body)) is None:
        return [tree]
    known = {node.name: node for node in definitions(tree.body)}
    reached: list[ast.AST] = [first]
    for part in reached:  # grows during the loop
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        reached += [known[one] for one in names if one in known and known[one] not in reached]
    return reached


def _zeros(tree: ast.AST) -> Iterator[int]:
    """Yield the line numbers at which a broad `except` hides an error.

    It hides the error by returning a number or a result that is not marked as invalid.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is not None and not (isinstance(node.type, ast.Name) and node.type.id in _BROAD):
            continue
        for inner in ast.walk(node):
            value = inner.value if isinstance(inner, ast.Return) else None
            if isinstance(value, ast.Dict):
                is_score = any(isinstance(key, ast.Constant) and key.value == "score" for key in value.keys)
            elif isinstance(value, ast.Call):
                given = {keyword.arg for keyword in value.keywords}
                is_score = "score" in given and not given & {"error", "is_score_valid"}
            else:
                is_score = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
            if is_score and isinstance(inner, ast.Return):
                yield inner.lineno
