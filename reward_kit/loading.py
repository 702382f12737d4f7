"""Load a user's object from `file.py:name` or `package.module:name`, with an error that says what to mend."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_kit.errors import ConfigError, did_you_mean, safe_str, user_traceback


def load_object(reference: str, folder: Path | None = None) -> Any:
    """The object that `reference` names.

    Args:
        reference: `file.py:name`, `package.module:name` or `package.module.name`.
        folder: what a file path is relative to, by default the working directory.

    Raises:
        ConfigError: the file or module does not exist or does not import, or has no such name.
    """
    location, name = _split(reference)
    module = load_module(location, folder)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key in vars(found) if not key.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError(f"{reference!r}: {location} has no {part!r}{did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def load_module(location: str, folder: Path | None = None) -> ModuleType:
    """The module at a path that ends in .py, or of a dotted name. A file is loaded once per process.

    Raises:
        ConfigError: it does not exist or does not import; the user's own frame is in the message.
    """
    if not location.endswith(".py"):
        return _import(lambda: importlib.import_module(location), location)
    path = ((folder or Path.cwd()) / location).resolve()
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return _import(lambda: _load_file(path), str(path))


def _split(reference: str) -> tuple[str, str]:
    location, separator, name = reference.rpartition(":")
    if not separator:
        location, separator, name = reference.rpartition(".")
    if not location or not name or reference.endswith(".py"):
        raise ConfigError(f"{reference!r} names no object; write file.py:name or package.module:name")
    return location, name


def _load_file(path: Path) -> ModuleType:
    # The name carries the whole path, so that two files called reward.py do not meet in sys.modules.
    name = f"_reward_kit_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
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
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(load: Any, what: str) -> ModuleType:
    try:
        module: ModuleType = load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = user_traceback(error)
        raise ConfigError(
            f"{what} cannot be imported: {type(error).__name__}: {safe_str(error)}" + (f"\n{frames}" if frames else "")
        ) from error
    return module
