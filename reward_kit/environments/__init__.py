"""The public API of the environments: the base class, tools, built-in resources and final states.

Modules are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_modules

if TYPE_CHECKING:
    from reward_kit.environments.alfworld import AlfworldResource, RealAlfworldResource
    from reward_kit.environments.base import (
        ForkableResource,
        ForkKind,
        StateSnapshot,
        StepOutcome,
        ToolSpec,
        canonical_json,
        hash_key,
        strict_tool,
        tool_spec,
    )
    from reward_kit.environments.composite import CompositeResource
    from reward_kit.environments.config import merged_config, resource_class
    from reward_kit.environments.filesystem import FilesystemResource
    from reward_kit.environments.gymnasium import GymnasiumResource
    from reward_kit.environments.http import HttpResource
    from reward_kit.environments.mcp import McpResource
    from reward_kit.environments.openenv import OpenEnvResource
    from reward_kit.environments.python_state import PythonStateResource
    from reward_kit.environments.replay import ReplayForkResource
    from reward_kit.environments.sampling import sample_arguments
    from reward_kit.environments.servers import ServerPool
    from reward_kit.environments.snapshots import CompositeState, FilesState, SqliteState, open_snapshot
    from reward_kit.environments.sokoban import SokobanResource
    from reward_kit.environments.sqlite import SqliteResource
    from reward_kit.environments.textworld import TextworldResource
    from reward_kit.environments.tools import Tool, ToolRegistry, tool
    from reward_kit.environments.webshop import Purchase, ShoppingGoal, WebshopResource, match_purchase

__all__ = [
    "AlfworldResource",
    "CompositeResource",
    "CompositeState",
    "FilesState",
    "FilesystemResource",
    "ForkKind",
    "ForkableResource",
    "GymnasiumResource",
    "HttpResource",
    "McpResource",
    "OpenEnvResource",
    "Purchase",
    "PythonStateResource",
    "RealAlfworldResource",
    "ReplayForkResource",
    "ServerPool",
    "ShoppingGoal",
    "SokobanResource",
    "SqliteResource",
    "SqliteState",
    "StateSnapshot",
    "StepOutcome",
    "TextworldResource",
    "Tool",
    "ToolRegistry",
    "ToolSpec",
    "WebshopResource",
    "canonical_json",
    "hash_key",
    "match_purchase",
    "merged_config",
    "open_snapshot",
    "resource_class",
    "sample_arguments",
    "strict_tool",
    "tool",
    "tool_spec",
]
_MODULES = {
    "alfworld": "AlfworldResource RealAlfworldResource",
    "base": "ForkKind ForkableResource StateSnapshot StepOutcome ToolSpec canonical_json hash_key strict_tool "
    "tool_spec",
    "composite": "CompositeResource",
    "config": "merged_config resource_class",
    "filesystem": "FilesystemResource",
    "gymnasium": "GymnasiumResource",
    "harbor": "HarborResource",
    "http": "HttpResource",
    "mcp": "McpResource",
    "openenv": "OpenEnvResource",
    "python_state": "PythonStateResource",
    "replay": "ReplayForkResource",
    "sampling": "sample_arguments",
    "servers": "ServerPool",
    "snapshots": "CompositeState FilesState SqliteState open_snapshot",
    "sokoban": "SokobanResource",
    "sqlite": "SqliteResource",
    "textworld": "TextworldResource",
    "tools": "Tool ToolRegistry tool",
    "webshop": "Purchase ShoppingGoal WebshopResource match_purchase",
}
__getattr__, __dir__ = lazy_modules(__name__, _MODULES)
