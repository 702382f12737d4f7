"""Load a user's object from `file.py:name` or `package.module:name`. Errors suggest a fix."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_kit.errors import ConfigError, boundary, did_you_mean, safe_str, type_name, user_traceback

MODULE_PREFIX = "_reward_kit_user_"


def load_object(reference: str, folder: Path | None = None) -> Any:
    """Return the object to which `file.py:name`, `package.module:name` or `package.module.name` refers."""
    location, name = split_reference(reference)
    return get_attribute(load_module(location, folder), name, reference, location)


def load_function(reference: str, what: str, folder: Path | None = None) -> Callable[..., Any]:
    """Return the function to which a reference refers; `what` describes its purpose in messages."""
    try:
        function = load_object(reference, folder)
    except ConfigError as error:
        raise ConfigError(f"{what} {reference!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{what} {reference!r} is {type_name(function)}, not a function")
    return function  # type: ignore[no-any-return]


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Convert an exception from a user's function to a ConfigError that names the function and the line."""
    try:
        with boundary(ConfigError, what):
            yield
    except ConfigError as error:
        frames = user_traceback(error.__cause__, 2).splitlines() if error.__cause__ is not None else []
        if len(frames) < 2 or not str(error).startswith(what):
            raise
        raise ConfigError(f"{error} ({frames[1].strip()})") from error.__cause__


def reject_coroutine(value: Any, what: str) -> None:
    """Raise a ConfigError if a function that must be synchronous returned a coroutine."""
    if inspect.iscoroutine(value):
        value.close()
        raise ConfigError(f"{what} returned a coroutine; define it with `def`, not `async def`")


def get_attribute(module: ModuleType, name: str, reference: str, location: str) -> Any:
    """Look up a dotted name in a module; `reference` and `location` are used in messages."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            names = getattr(value, "__all__", None)
            if not isinstance(names, list | tuple):
                members = getattr(value, "__dict__", {}).items()
                names = [key for key, item in members if _is_candidate(key, item, module.__name__)]
            raise ConfigError(f"{reference!r}: {location} has no {part!r}{did_you_mean(part, names)}")
        value = getattr(value, part)
    return value


def _is_candidate(name: str, item: Any, module: str) -> bool:
    """Return False for private names, modules, and functions and classes imported from a different package."""
    if name.startswith("_") or isinstance(item, ModuleType) or type(item).__module__ in ("__future__", "typing"):
        return False
    is_code = isinstance(item, type) or inspect.isroutine(item)
    return not is_code or str(getattr(item, "__module__", "")).partition(".")[0] == module.partition(".")[0]


def load_module(location: str, folder: Path | None = None) -> ModuleType:
    """Import a module by the path of a .py file or by its dotted name. Each file is loaded once per process."""
    if not location.endswith(".py"):
        return import_user_code(lambda: importlib.import_module(location), location)
    path = ((folder or Path.cwd()) / location).resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return import_user_code(lambda: _load_file(path), str(path))


def split_reference(reference: str) -> tuple[str, str]:
    """Split a reference into its file or module and the dotted name within it."""
    location, separator, name = reference.rpartition(":")
    if not separator:
        location, separator, name = reference.rpartition(".")
    if reference.endswith(".py"):
        raise ConfigError(f"{reference!r} does not name an object; write {reference}:NAME")
    if not location or not name:
        raise ConfigError(f"{reference!r} does not name an object; write file.py:name or package.module:name")
    return location, name


def is_built_in(location: str) -> bool:
    """Return True for a module of this package, which needs no sandbox."""
    return location == "reward_kit" or location.startswith("reward_kit.")


def user_module_name(path: Path) -> str:
    """Return a module name that contains a hash of the file's path.

    The hash prevents two files called reward.py from having the same module name.
    """
    return f"{MODULE_PREFIX}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"


def _load_file(path: Path) -> ModuleType:
    name = user_module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    with ExitStack() as undo:
        undo.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module


def import_user_code(load: Callable[[], ModuleType], location: str) -> ModuleType:
    """Return the module that `load` imports; raise a ConfigError with the user's frames if the import fails."""
    try:
        module: ModuleType = load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{type(error).__name__}: {safe_str(error)}"
        frames = user_traceback(error).removeprefix(message.splitlines()[0])  # the message contains it already
        raise ConfigError(f"{location} cannot be imported: {message}{frames}") from error
    return module
