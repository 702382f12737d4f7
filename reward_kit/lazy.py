"""Lazy loading of a package's public names (PEP 562), so that importing the package stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`. `homes` contains the module that defines each public name."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


def lazy_modules(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Do the same as `lazy_names`, but accept the public names of each module, separated by spaces."""
    return lazy_names(package, {name: module for module, names in modules.items() for name in names.split()})


def package_version() -> str:
    """Return the installed version, or "0+not.installed" for a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("reward-kit")
    except PackageNotFoundError:
        return "0+not.installed"
