"""What an agent acts in: the contract, tools, the built-in worlds, and the checker. Loaded only as it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reward_kit.lazy import lazy_names

if TYPE_CHECKING:
    from reward_kit.environments.base import (
        ForkableResource,
        ForkKind,
        StateSnapshot,
        StepOutcome,
        ToolSpec,
        canonical_json,
        hash_key,
        tool_spec,
    )
    from reward_kit.environments.checker import Finding, check_resource
    from reward_kit.environments.composite import CompositeResource
    from reward_kit.environments.config import resource_class
    from reward_kit.environments.filesystem import FilesystemResource
    from reward_kit.environments.gymnasium import GymnasiumResource
    from reward_kit.environments.http import HttpResource
    from reward_kit.environments.python_state import PythonStateResource
    from reward_kit.environments.replay import ReplayForkResource
    from reward_kit.environments.sampling import sample_arguments
    from reward_kit.environments.snapshots import CompositeState, FilesState, SqliteState, open_snapshot
    from reward_kit.environments.sokoban import SokobanResource
    from reward_kit.environments.sqlite import SqliteResource
    from reward_kit.environments.tools import Tool, ToolRegistry
    from reward_kit.environments.webshop import WebshopResource

__all__ = [
    "CompositeResource",
    "CompositeState",
    "FilesState",
    "FilesystemResource",
    "Finding",
    "ForkKind",
    "ForkableResource",
    "GymnasiumResource",
    "HttpResource",
    "PythonStateResource",
    "ReplayForkResource",
    "SokobanResource",
    "SqliteResource",
    "SqliteState",
    "StateSnapshot",
    "StepOutcome",
    "Tool",
    "ToolRegistry",
    "ToolSpec",
    "WebshopResource",
    "canonical_json",
    "check_resource",
    "hash_key",
    "open_snapshot",
    "resource_class",
    "sample_arguments",
    "tool_spec",
]

_HOMES = dict.fromkeys(__all__, "base") | {
    "CompositeResource": "composite",
    "CompositeState": "snapshots",
    "FilesState": "snapshots",
    "FilesystemResource": "filesystem",
    "Finding": "checker",
    "GymnasiumResource": "gymnasium",
    "HttpResource": "http",
    "PythonStateResource": "python_state",
    "ReplayForkResource": "replay",
    "SokobanResource": "sokoban",
    "SqliteResource": "sqlite",
    "SqliteState": "snapshots",
    "Tool": "tools",
    "ToolRegistry": "tools",
    "WebshopResource": "webshop",
    "check_resource": "checker",
    "open_snapshot": "snapshots",
    "resource_class": "config",
    "sample_arguments": "sampling",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
