"""Functions that analyze a reward's file by parsing it. The file is not executed.

The file, and the user's modules that it imports directly or indirectly, are sent to the sandbox as text. Their
directory does not have to be readable there. Installed packages can be read. The usual heavy packages are imported
once, before the first call.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reward_kit import rewards
from reward_kit.errors import ConfigError
from reward_kit.loading import MODULE_PREFIX, is_built_in, user_module_name
from reward_kit.reward_calls import REFERENCE
from reward_kit.sandbox.program import SOURCE_LIMIT, library_path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BUILT_IN = "reward_kit.rewards"
_NETWORK_CLIENTS = frozenset(
    {
        *("openai", "anthropic", "litellm", "cohere", "mistralai", "groq", "together", "ollama", "instructor"),
        *("httpx", "requests", "aiohttp", "urllib3", "grpc", "websockets", "boto3", "socket"),
        *("urllib.request", "http.client", "google.genai", "google.generativeai", "huggingface_hub"),
    }
)
_HEAVY = frozenset(
    {
        *(
            "numpy",
            "scipy",
            "pandas",
            "sympy",
            "mpmath",
            "math_verify",
            "latex2sympy2_extended",
            "networkx",
            "py3langid",
        ),
        *("pydantic", "yaml", "jsonschema", "regex", "rapidfuzz", "Levenshtein", "nltk", "sqlglot", "bs4", "lxml"),
        "py3langid",
    }
)
"""Packages that are slow to import and have no import side effects."""
_NOT_PRELOADED = frozenset(
    {
        *("antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test", "lib2to3", "ensurepip", "venv"),
        *("site", "sitecustomize", "usercustomize", "curses", "readline", "rlcompleter", "pty", "tty", "webbrowser"),
        *("__main__", "builtins", "__future__"),
    }
)
"""Standard library modules that have import side effects or are not useful for rewards."""


def definitions(scope: Sequence[ast.stmt]) -> Iterator[Definition]:
    """Yield the functions and classes of a scope, including those under `if`, `try` and `with`."""
    for node in scope:
        if isinstance(node, Definition):
            yield node
            continue
        for inner in ("body", "orelse", "handlers", "finalbody"):
            yield from definitions(getattr(node, inner, ()))


def find_definition(name: str, scope: Sequence[ast.stmt]) -> Definition | None:
    """Return the last definition of a name in a scope, or None if there is none.

    The name may be dotted if the definition is inside a class.
    """
    definition: Definition | None = None
    for part in name.split("."):
        named = [node for node in definitions(scope) if node.name == part]
        if not named:
            return None
        definition = named[-1]
        scope = definition.body
    return definition


def declared_requirements(text: str, name: str) -> tuple[str, ...]:
    """Return the `requirements=` in the decorator of a reward, if they are literals.

    The decorator can have any name.
    """
    definition = find_definition(name, _tree(text).body)
    for decorator in definition.decorator_list if definition is not None else ():
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg != "requirements":
                continue
            try:
                value = ast.literal_eval(keyword.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return ()
            is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            return tuple(value) if is_list else ()
    return ()


def refuse_network(text: str, name: str, file: str, level: str) -> None:
    """Raise an error if the file of a `compute_score` imports a network client. The sandbox has no network."""
    tree = _tree(text)
    definition = find_definition(name, tree.body)
    if isinstance(definition, ast.ClassDef):
        has_form = any(one.name == "compute_score" for one in definitions(definition.body))
    elif definition is not None:
        taken = definition.args
        names = {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
        has_form = bool(names & {"solution_str", "solution_strs"})
    else:
        has_form = False
    for wanted in _imports(tree, "", is_package=False) if has_form else ():
        for client in _NETWORK_CLIENTS:
            if f"{wanted}.".startswith(f"{client}."):
                raise ConfigError(
                    f"reward {name!r}: {file} imports {client}, which needs the network, but the level "
                    f"{level} has no network; run it with --sandbox in_process"
                )


@dataclass(frozen=True, slots=True)
class Module:
    """A user module. `text` is `None` for a directory without `__init__.py`."""

    filename: str
    text: str | None
    is_package: bool


@dataclass(slots=True)
class Sources:
    """The code that a reward needs. It consists of the user's modules, keyed by name, and of installed modules.

    The installed modules are imported before a call.
    """

    modules: dict[str, Module] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)


def collect_sources(file: Path, name: str, roots: Sequence[Path]) -> Sources:
    """Collect the file of a reward and the modules that it imports.

    Args:
        file: the file of the reward.
        name: the name of its module.
        roots: the directories from which it can import user modules.
    """
    sources, library = Sources(), library_path()
    pending = [(name, file, False)]
    if not name.startswith(MODULE_PREFIX):
        pending = [] if is_built_in(name) or _is_installed(name.partition(".")[0], library) else _parts(name, roots)
    while pending:
        current, path, is_package = pending.pop()
        if current in sources.modules:
            continue
        text = read_source(path) if path.is_file() else None
        sources.modules[current] = Module(str(path), text, is_package)
        tree = _tree(text or "")
        for wanted in _imports(tree, current, is_package):
            top = wanted.partition(".")[0]
            if top == "reward_kit":
                sources.imports |= built_in_imports(wanted)
            elif _is_installed(top, library):
                sources.imports |= {top} if _may_be_preloaded(top, library) else set()
            else:
                pending += _parts(wanted, roots)
        for node in ast.walk(tree):  # strings of the form "file.py:factory" refer to files
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and REFERENCE.match(node.value):
                factory = (file.parent / node.value.partition(":")[0]).resolve()
                if _is_within(factory, file.parent):
                    pending.append((user_module_name(factory), factory, False))
    return sources


def built_in_imports(name: str) -> set[str]:
    """Return the modules to import before the first call of a built-in reward: its module and heavy packages."""
    if not name.startswith(f"{_BUILT_IN}."):
        return set()
    library = library_path()
    exported = name.removeprefix(f"{_BUILT_IN}.")
    pending, seen, modules = [f"{_BUILT_IN}.{rewards.HOMES.get(exported, exported)}"], set[str](), set[str]()
    while pending:
        module = pending.pop()
        file = find_module(module) if module not in seen else None
        seen.add(module)
        if file is None:  # a name in a module
            continue
        modules.add(module)
        for wanted in _imports(_tree(read_source(file)), module, file.name == "__init__.py"):
            top = wanted.partition(".")[0]
            if wanted.startswith(f"{_BUILT_IN}."):
                pending.append(wanted)
            elif top != "reward_kit" and _may_be_preloaded(top, library):
                modules.add(top)
    return modules


def find_module(name: str) -> Path | None:
    """Return the file of a module, given its dotted name, or None if it is not found. Nothing is imported."""
    if "/" in name or "\0" in name or not all(name.split(".")):
        return None
    parts = _parts(name, [*user_roots(), *(Path(entry).resolve() for entry in library_path())])
    return parts[-1][1] if parts and parts[-1][0] == name and parts[-1][1].is_file() else None


def user_roots() -> list[Path]:
    """Return the directories in `sys.path` except those of the standard library and of installed packages."""
    libraries = set(library_path())
    return [Path(entry).resolve() for entry in sys.path if entry not in libraries and Path(entry).is_dir()]


def read_source(path: Path) -> str:
    """Return the text of a user's file.

    Raises:
        ConfigError: If the file is too large or cannot be read.
    """
    try:
        if path.stat().st_size > SOURCE_LIMIT:
            raise ConfigError(f"{path} exceeds the limit of {SOURCE_LIMIT:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # running the file reports the line
        return ast.Module([], [])


def _imports(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Yield all dotted names that a module may import, including imports inside functions."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _parts(name: str, roots: Sequence[Path]) -> list[tuple[str, Path, bool]]:
    """Return the parent packages and the module for a dotted name.

    They are taken from the first directory of `roots` that contains at least one of them.
    """
    for root in roots:
        folder, done = root, ""
        parts: list[tuple[str, Path, bool]] = []
        for part in name.split("."):
            done = f"{done}.{part}" if done else part
            folder = folder / part
            if _is_within(folder / "__init__.py", root):
                parts.append((done, folder / "__init__.py", True))
            elif _is_within(file := folder.with_name(f"{part}.py"), root):
                parts.append((done, file, False))
                break
            elif folder.is_dir() and any(folder.glob("*.py")):
                parts.append((done, folder, True))
            else:
                break
        if parts:
            return parts
    return []


def _is_within(file: Path, root: Path) -> bool:
    """Return True if `file` is a file inside `root` and not a link to a file outside `root`.

    The code of the reward receives the text of such a file.
    """
    return file.is_file() and file.resolve().is_relative_to(root)


def _is_installed(top: str, library: Sequence[str]) -> bool:
    """Return True if the interpreter in the sandbox can import a package without receiving its source."""
    return top in sys.stdlib_module_names or importlib.machinery.PathFinder.find_spec(top, library) is not None


def _may_be_preloaded(top: str, library: Sequence[str]) -> bool:
    if top not in sys.stdlib_module_names:
        return top in _HEAVY and _is_installed(top, library)
    is_there = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top, library) is not None
    return top not in _NOT_PRELOADED and is_there
