"""The second import name of reward-kit 0.4: every name and module here is that of `reward_kit`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import reward_kit
from reward_kit import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(reward_kit, name)


class _Alias(MetaPathFinder, Loader):
    """Import `reward_protocol.x` as `reward_kit.x`, so that there is one class of each name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"reward_kit{module.__name__.removeprefix(__name__)}")


sys.meta_path.insert(0, _Alias())
