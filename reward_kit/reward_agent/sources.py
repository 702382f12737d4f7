"""Functions and classes in the text of a reward, found by reading it and never by running it."""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reward_kit import rewards
from reward_kit.errors import ConfigError
from reward_kit.loading import MODULE_PREFIX, is_built_in, module_name_of
from reward_kit.reward_calls import REFERENCE
from reward_kit.sandbox.program import SOURCE_LIMIT, library_path, standard_library

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


_CLIENTS = frozenset(
    {
        *("openai", "anthropic", "litellm", "cohere", "mistralai", "groq", "together", "ollama", "instructor"),
        *("httpx", "requests", "aiohttp", "urllib3", "grpc", "websockets", "boto3", "socket"),
        *("urllib.request", "http.client", "google.genai", "google.generativeai", "huggingface_hub"),
    }
)

_ASKS = (
    "reward {0!r}: {1} imports {2}, which asks the network, and there is none at the level {3}: run it with "
    "--sandbox in_process"
)


def refuse_network(text: str, name: str, file: str, level: str) -> None:
    """Refuse a `compute_score` that cannot work behind walls.

    Args:
        text: of its file.
        name: of the function or class.
        file, level: for the message.

    Raises:
        ConfigError: it imports a client of the network; the key that lets it run is told.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # told with its line where it is run
        return
    found = definition_of(name, tree.body)
    if found is None or not _has_form(found):
        return
    if (client := next((one for one in _imported_names(tree) if one in _CLIENTS), None)) is not None:
        raise ConfigError(_ASKS.format(name, file, client, level))


def _has_form(definition: Definition) -> bool:
    if isinstance(definition, ast.ClassDef):
        return any(one.name == "compute_score" for one in definitions(definition.body))
    names = {one.arg for one in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs)}
    return bool(names & {"solution_str", "solution_strs"})


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, with the packages around it, also inside functions."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in named:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


_BUILT_IN = "reward_kit.rewards"

_HEAVY = frozenset(
    {
        *("numpy", "scipy", "pandas", "sympy", "mpmath", "math_verify", "latex2sympy2_extended", "networkx"),
        *("pydantic", "yaml", "jsonschema", "regex", "rapidfuzz", "Levenshtein", "nltk", "sqlglot", "bs4", "lxml"),
    }
)

"""Installed packages that are slow to import and do nothing but define things when they are."""

_NOT_PRELOADED = frozenset(
    {
        *("antigravity", "this", "idlelib", "tkinter", "turtle", "turtledemo", "test", "lib2to3", "ensurepip", "venv"),
        *("site", "sitecustomize", "usercustomize", "curses", "readline", "rlcompleter", "pty", "tty", "webbrowser"),
        *("__main__", "builtins", "__future__"),
    }
)

"""Modules of the standard library that do something when they are imported, or are of no use to a reward."""


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the user's own. `text` is None for a folder without `__init__.py`."""

    filename: str
    text: str | None
    is_package: bool


@dataclass(slots=True)
class Sources:
    """What a reward needs.

    Attributes:
        modules: the user's own, by the names they are imported with.
        imports: installed ones to import before any call, sorted.
    """

    modules: dict[str, Module] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)


def sources_of(file: Path, name: str, roots: Sequence[Path], library: Sequence[str] = ()) -> Sources:
    """Read a reward's file and what it imports.

    Args:
        file: the file.
        name: the name of its module.
        roots: folders that it may import the user's own modules from, besides what is installed.
        library: folders of installed packages that it sees in the place of the running interpreter's.

    Raises:
        ConfigError: a file cannot be read.
    """
    found, installed = Sources(), _Installed([*standard_library(), *library] if library else library_path())
    pending = [(name, file, False)]
    if not name.startswith(MODULE_PREFIX):
        pending = [] if is_built_in(name) or installed.has(name.partition(".")[0]) else list(_parts(name, roots))
    while pending:
        current, path, is_package = pending.pop()
        if current in found.modules:
            continue
        text = read_source(path) if path.is_file() else None
        found.modules[current] = Module(str(path), text, is_package)
        for wanted in _imports(text or "", current, is_package):
            top = wanted.partition(".")[0]
            if top == "reward_kit":
                found.imports |= _built_in(wanted, installed)
            elif installed.has(top):
                found.imports |= {top} if installed.may_be_preloaded(top) else set()
            else:
                pending += _parts(wanted, roots)
        pending += _factories(text or "", file.parent)
    return found


def built_in_imports(name: str) -> set[str]:
    """What to import once, before any call, for a built-in reward: its module, and the heavy packages it needs.

    Args:
        name: "reward_kit.rewards.math_answer", as it is exported there, or a module's.
    """
    return _built_in(name, _Installed(library_path()))


def _built_in(name: str, installed: _Installed) -> set[str]:
    if not name.startswith(f"{_BUILT_IN}."):
        return set()
    exported = name.removeprefix(f"{_BUILT_IN}.")
    pending, seen, found = [f"{_BUILT_IN}.{rewards.HOMES.get(exported, exported)}"], set[str](), set[str]()
    while pending:
        module = pending.pop()
        file = find_module(module) if module not in seen else None
        seen.add(module)
        if file is None:  # a name in a module
            continue
        found.add(module)
        for wanted in _imports(read_source(file), module, file.name == "__init__.py"):
            top = wanted.partition(".")[0]
            if wanted.startswith(f"{_BUILT_IN}."):
                pending.append(wanted)
            elif top != "reward_kit" and installed.has(top) and installed.may_be_preloaded(top):
                found.add(top)
    return found


def find_module(name: str) -> Path | None:
    """The file of a dotted name, found without importing anything; None where there is none."""
    if "/" in name or "\0" in name or not all(name.split(".")):
        return None
    found = list(_parts(name, [*user_roots(), *map(Path, library_path())]))
    return found[-1][1] if found and found[-1][0] == name and found[-1][1].is_file() else None


def user_roots() -> list[Path]:
    """The entries of `sys.path` that are neither the standard library nor installed packages."""
    libraries = set(library_path())
    return [Path(entry).resolve() for entry in sys.path if entry not in libraries and Path(entry).is_dir()]


def read_source(path: Path) -> str:
    """The text of a user's file.

    Raises:
        ConfigError: it cannot be read, is no UTF-8, or is too long.
    """
    try:
        if path.stat().st_size > SOURCE_LIMIT:
            raise ConfigError(f"{path} is longer than {SOURCE_LIMIT:,} bytes, which is the most that is run")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _tree(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # told with its line where it is run
        return ast.Module([], [])


def _imports(text: str, name: str, is_package: bool) -> Iterator[str]:
    """Every dotted name that a text may import, also inside functions."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _factories(text: str, folder: Path) -> Iterator[tuple[str, Path, bool]]:
    """Files that texts of the form "file.py:factory" name."""
    for node in ast.walk(_tree(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REFERENCE.match(node.value):
            path = (folder / node.value.partition(":")[0]).resolve()
            if _is_within(path, folder):
                yield module_name_of(path), path, False


def _parts(name: str, roots: Sequence[Path]) -> Iterator[tuple[str, Path, bool]]:
    """The module of a dotted name and the packages around it, as far as they are in one of `roots`."""
    for root in roots:
        if found := list(_parts_in(name, root)):
            yield from found
            return


def _parts_in(name: str, root: Path) -> Iterator[tuple[str, Path, bool]]:
    folder, done = root, ""
    for part in name.split("."):
        done = f"{done}.{part}" if done else part
        folder = folder / part
        if _is_within(folder / "__init__.py", root):
            yield done, folder / "__init__.py", True
        elif _is_within(file := folder.with_name(f"{part}.py"), root):
            yield done, file, False
            return
        elif folder.is_dir() and any(folder.glob("*.py")):
            yield done, folder, True
        else:
            return


def _is_within(file: Path, root: Path) -> bool:
    """A file, and no link that leads out of `root`: what is found here is handed to the reward's code as text."""
    return file.is_file() and file.resolve().is_relative_to(root)


@dataclass(frozen=True, slots=True)
class _Installed:
    """What the interpreter behind the walls finds without us."""

    path: Sequence[str]

    def has(self, top: str) -> bool:
        return top in sys.stdlib_module_names or self._is_found(top)

    def may_be_preloaded(self, top: str) -> bool:
        if top in sys.stdlib_module_names:
            return top not in _NOT_PRELOADED and (top in sys.builtin_module_names or self._is_found(top))
        return top in _HEAVY

    def _is_found(self, top: str) -> bool:
        return importlib.machinery.PathFinder.find_spec(top, self.path) is not None
