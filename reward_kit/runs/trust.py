"""Find the code that a task file would run, and record the user's consent.

A task file can run code, since it refers to tools, rewards, policies, resources and commands. Before a command loads
any of them, it therefore asks once per directory, as direnv and VS Code do. This module does not import or execute the
code that it reads.

Consent is stored outside the directory, in `$XDG_STATE_HOME/reward-kit/trust` (default `~/.local/state`), together with
the SHA-256 of every file that would run. If a file is new or has changed, the user is asked again unless they answered
"always".
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reward_kit.display_text import pluralize
from reward_kit.environments.harbor_task import find_task_folders
from reward_kit.errors import StoreError
from reward_kit.loading import is_built_in, user_module_name
from reward_kit.reward_agent.sources import find_module
from reward_kit.runs.files import write_atomically
from reward_kit.runs.inputs import hash_path, own_modules
from reward_kit.runs.task_file import LocatedYaml, apply_overrides
from reward_kit.sandbox.program import library_path

_COMMANDS = ("command", "start_command")
_ENVIRONMENT = ("env", "pass_env", "headers_env", "api_key_env")
_ADDRESSES = ("base_url", "url", "--base-url")
_LONGEST_REFERENCE = 1024
_TEXTS = (
    *("name", "description", "messages", "initial_user_prompt", "goal_description", "evaluation_criteria"),
    *("ground_truth", "user.instructions", "nudge", "dataset_path", "evaluation.dataset_path"),
)
"""Keys whose values are never loaded or executed."""
_MODULE_KEYS = ("tools_module_path", "custom_reward_function.path")
"""Keys whose value may be a module name."""


@dataclass(frozen=True, slots=True)
class PlannedCode:
    """The code that a command would run: files and their SHA-256, and the settings that refer to them.

    `typed` settings come from the command line. `stored` settings come from a `run.json`, which may be untrusted.
    """

    folder: Path
    files: Mapping[Path, str] = field(default_factory=dict)
    settings: Sequence[str] = ()
    typed: Sequence[str] = ()
    stored: Sequence[str] = ()


def plan_file_code(
    path: Path, typed: Mapping[str, Any] | None = None, stored: Mapping[str, Any] | None = None
) -> PlannedCode:
    """Find the code that a task or train file would run, without running it."""
    typed, stored = typed or {}, stored or {}
    located = LocatedYaml(path)
    searches = []
    for overrides in ({}, typed, {**stored, **typed}):
        search = _Search()
        search.visit_file(located, overrides)
        searches.append(search)
    in_file, with_typed, with_stored = ([*search.settings] for search in searches)
    from_line = [setting for setting in with_typed if setting not in in_file]
    from_run = [setting for setting in with_stored if setting not in with_typed]
    runs_code = searches[-1].runs_code
    return PlannedCode(
        located.path.resolve().parent, searches[-1].digests() if runs_code else {}, with_stored, from_line, from_run
    )


def plan_reference_code(references: Sequence[str], folder: Path) -> PlannedCode:
    """Find the code to which `file.py:name` or `package.module:name` refers, without running it."""
    search, folder = _Search(), folder.resolve()
    for reference in references:
        search.visit_text("code", reference, folder)
    if not search.runs_code:
        return PlannedCode(folder)
    folder = min(search.code).parent if search.code else folder
    return PlannedCode(folder, search.digests(), [*search.settings], [*search.settings])


class _Search:
    """A collector of the executable settings in documents, in reading order, and of the files they refer to."""

    def __init__(self) -> None:
        self.settings: dict[str, None] = {}
        self.documents: set[Path] = set()
        self.code: dict[Path, str] = {}  # each code file with its module name
        self.runs_code = False

    def visit_file(self, located: LocatedYaml, overrides: Mapping[str, Any]) -> None:
        """Visit a task or train file, or the document derived from a task folder, all files of which may run."""
        path = located.path.resolve()
        if located.is_derived:
            self.documents.update(file for file in path.parent.rglob("*") if file.is_file() and file != path)
        self._visit_document(path, located.data, overrides)

    def _visit_document(self, path: Path, document: Any, overrides: Mapping[str, Any]) -> None:
        """Visit a task or train file. For a train file, also visit the task file to which it refers."""
        if path in self.documents or not isinstance(document, Mapping):
            return
        self.documents.add(path)
        for_task = {key: value for key, value in overrides.items() if key.startswith("task.")}
        is_inline = isinstance(document.get("task"), Mapping)
        own = overrides if is_inline else {key: value for key, value in overrides.items() if key not in for_task}
        inner = {} if is_inline else {key.removeprefix("task."): value for key, value in for_task.items()}
        for key, value in apply_overrides(document, own).items():
            self._visit_value(str(key), value, path.parent, inner)

    def _visit_value(self, key: str, value: Any, folder: Path, for_task: Mapping[str, Any]) -> None:
        last = key.rpartition(".")[2].partition("[")[0]
        if key.removeprefix("task.") in _TEXTS:
            return
        if last in _COMMANDS and value:
            self._visit_command(key, value, folder)
        elif (last in (*_ENVIRONMENT, *_ADDRESSES) and value) or f".{key}".startswith((".sandbox.", ".task.sandbox.")):
            self._add(key, value)
        elif isinstance(value, Mapping):
            for inner, item in value.items():
                self._visit_value(f"{key}.{inner}", item, folder, for_task)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                self._visit_value(f"{key}[{index}]", item, folder, for_task)
        elif isinstance(value, str) and last == "folder" and (tasks := find_task_folders(folder / value)):
            self._visit_containers(key, folder / value, tasks)
        elif isinstance(value, str) and last == "task" and (file := folder / value).exists():
            self.visit_file(LocatedYaml(file), for_task)
        elif isinstance(value, str):
            self.visit_text(key, value, folder, is_module=key.removeprefix("task.") in _MODULE_KEYS)

    def _visit_command(self, key: str, value: Any, folder: Path) -> None:
        words = [str(word) for word in value] if isinstance(value, list | tuple) else _words(str(value))
        self._add(key, shlex.join(words))
        self.runs_code = True
        for word in words:
            if len(word) < 256 and "\0" not in word and (file := folder / word).is_file():
                self.code.setdefault(file.resolve(), user_module_name(file.resolve()))

    def _visit_containers(self, key: str, folder: Path, tasks: Sequence[Path]) -> None:
        """Add the files of Harbor tasks, from which images are built and run."""
        self._add(
            key, f"builds and runs the containers of {pluralize(len(tasks), 'Harbor task')} in {folder.resolve()}"
        )
        self.runs_code = True
        self.documents.update(file for task in tasks for file in task.resolve().rglob("*") if file.is_file())

    def visit_text(self, key: str, text: str, folder: Path, *, is_module: bool = False) -> None:
        """Add the code to which a string refers, if the string has a form that `load_object` accepts."""
        if "\0" in text or len(text) > _LONGEST_REFERENCE:
            return
        locations = [text.rpartition(":")[0], "" if ":" in text else text.rpartition(".")[0]]
        if is_module or text.endswith(".py"):
            locations.append(text)
        for location in filter(None, locations):
            if is_built_in(location):
                return
            if location.endswith(".py") and (file := folder / location).is_file():
                file = file.resolve()
                self.code.setdefault(file, user_module_name(file))
            elif (match := _find_module(location, folder)) is not None:
                module, file = match
                if _is_local(file, folder):
                    self.code.setdefault(file, module)
            else:
                continue
            self._add(key, text)
            self.runs_code = True

    def _add(self, key: str, value: Any) -> None:
        is_plain = isinstance(value, str) and value.isprintable()
        self.settings[f"{key}: {value if is_plain else json.dumps(value, default=str)}"] = None

    def digests(self) -> dict[Path, str]:
        """Return the SHA-256 of the documents, of the code, and of the local modules that the code imports."""
        files = {*self.documents, *self.code}
        for file, module in self.code.items():
            imported = own_modules(file, module) if file.suffix == ".py" else ()
            files.update(path.resolve() for path in imported if _is_local(path.resolve(), file.parent))
        return {file: hash_path(file) for file in sorted(files) if file.is_file()}


def _is_local(file: Path, folder: Path) -> bool:
    """Return True if a resolved file belongs to the directory or the working directory.

    Files of installed packages are not local.
    """
    is_within = file.is_relative_to(folder) or file.is_relative_to(Path.cwd())
    return is_within and not any(file.is_relative_to(Path(entry).resolve()) for entry in library_path())


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # A later check rejects the reference and names its line
        return [command]


def _find_module(location: str, folder: Path) -> tuple[str, Path] | None:
    """Return the module in a dotted name and the module's file, without importing the module."""
    parts = location.split(".")
    if "/" in location or not all(parts):
        return None
    for end in range(len(parts), 0, -1):
        beside = folder.joinpath(*parts[:end])
        for file in (find_module(".".join(parts[:end])), beside.with_suffix(".py"), beside / "__init__.py"):
            if file is not None and file.is_file():
                return ".".join(parts[:end]), file.resolve()
    with suppress(ImportError, ValueError):
        if (spec := find_spec(parts[0])) is not None:  # compiled, built in, or an editable install
            return parts[0], Path(spec.origin if spec.has_location and spec.origin else parts[0])
    return None


# Records of consent


def untrusted(code: PlannedCode) -> tuple[list[Path], list[str]]:
    """Return the files and settings that the user has not trusted yet."""
    record = _read_record(code.folder)
    is_always = any(_read_record(folder)["always"] for folder in (code.folder, *code.folder.parents))
    files = [file for file, digest in code.files.items() if not is_always and record["files"].get(str(file)) != digest]
    return files, [setting for setting in code.stored if setting not in record["settings"]]


def trust(code: PlannedCode, *, always: bool = False) -> None:
    """Record the user's consent to run this code."""
    before = _read_record(code.folder)
    files = {str(file): digest for file, digest in code.files.items()}
    record = {
        "folder": str(code.folder),
        "always": before["always"] or always,
        "files": {**before["files"], **files},
        "settings": sorted({*before["settings"], *code.typed, *code.stored}),
    }
    if record != before:
        _write_record(code.folder, record)


def record_folder() -> Path:
    """Return the directory of the consent records. Consent is revoked by removing a file."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "reward-kit" / "trust"


def _record_path(folder: Path) -> Path:
    return record_folder() / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json"


def _read_record(folder: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"folder": str(folder), "always": False, "files": {}, "settings": []}
    try:
        record = json.loads(_record_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    kinds = {key: type(value) for key, value in empty.items()}
    is_valid = isinstance(record, dict) and all(isinstance(record.get(key), kind) for key, kind in kinds.items())
    return record if is_valid and record["folder"] == str(folder) else empty


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    path = _record_path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"cannot create {path.parent}: {error.strerror}") from error
    write_atomically(path, json.dumps(record, indent=1).encode() + b"\n")
