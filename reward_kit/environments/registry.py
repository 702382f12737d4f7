"""The built-in resources by name, loaded only when one is asked for."""

from __future__ import annotations

from importlib import import_module

from reward_kit.environments.base import ForkableResource
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.loading import load_object

BUILT_IN: dict[str, str] = {
    "alfworld": "reward_kit.environments.alfworld:AlfworldResource",
    "alfworld_real": "reward_kit.environments.alfworld:RealAlfworldResource",
    "composite": "reward_kit.environments.composite:CompositeResource",
    "filesystem": "reward_kit.environments.filesystem:FilesystemResource",
    "gymnasium": "reward_kit.environments.gymnasium:GymnasiumResource",
    "http": "reward_kit.environments.http:HttpResource",
    "mcp": "reward_kit.environments.mcp.resource:McpResource",
    "openenv": "reward_kit.environments.openenv:OpenEnvResource",
    "python_state": "reward_kit.environments.python_state:PythonStateResource",
    "sokoban": "reward_kit.environments.sokoban.resource:SokobanResource",
    "sqlite": "reward_kit.environments.sqlite:SqliteResource",
    "textworld": "reward_kit.environments.textworld.resource:TextworldResource",
    "webshop": "reward_kit.environments.webshop.resource:WebshopResource",
}


def resource_class(name: str) -> type[ForkableResource]:
    """The resource class for a built-in name or a `module:Class` (or `file.py:Class`).

    Raises:
        ConfigError: there is none, it is no `ForkableResource`, or it needs a package that is not installed.
    """
    if ":" not in name and name not in BUILT_IN:
        raise ConfigError(f"unknown resource {name!r}{did_you_mean(name, BUILT_IN)} (your own is file.py:Class)")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        found = load_object(name)
    if not (isinstance(found, type) and issubclass(found, ForkableResource)):
        raise ConfigError(f"{name!r} is not a subclass of ForkableResource")
    if found.__abstractmethods__:
        raise ConfigError(f"{name!r} cannot be made: it does not define {', '.join(sorted(found.__abstractmethods__))}")
    return found
