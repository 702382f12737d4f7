"""The tools of a run's task, in OpenAI's form: from a file, or from the task itself, whose first world is asked.

A run does not store the definitions of its tools, so they are those of the task as it is now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from reward_kit.agent.starts import GroupStart
from reward_kit.agent.tool_execution import Toolbox
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, RewardKitError
from reward_kit.runs.redaction import without_hidden
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.tasks import LoadedTask, load_task

Tools = Sequence[Mapping[str, Any]]


class FoundTools(NamedTuple):
    """Tools, and the files of the task that have changed since the run."""

    tools: Tools
    changed: Sequence[str]


def tools_of_file(path: Path) -> Tools:
    """The tools of a JSON file: a list of `{"type": "function", "function": {"name": …}}`.

    Raises:
        ConfigError: it cannot be read, or is no such list.
    """
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {path}: {error}") from None
    form = 'a list of {"type": "function", "function": {"name", "description", "parameters"}}'
    if not isinstance(tools, list):
        raise ConfigError(f"--tools {path} is no list; it is {form}")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"--tools {path}: entry {place} is no tool; the file is {form}")
    return tools


def tools_of_task(header: RunHeader) -> FoundTools:
    """The tools that the task of a run offers at the beginning of its first sample.

    Args:
        header: of the run.

    Raises:
        ConfigError: the run has no task, or it cannot be loaded any more.
    """
    task_path = header.task_path or (header.rescored_from or {}).get("task_path")
    if task_path is None:
        raise ConfigError("these episodes call tools, and the run has no task that says which; give --tools FILE.json")
    if "task" in (header.from_python or {}):
        raise ConfigError("this task was made in Python, where alone its tools are known; give --tools FILE.json")
    try:
        overrides = without_hidden(header.overrides)
        task = load_task(Path(task_path), overrides, stored=overrides)
        tools = anyio.run(_offered, task, header.seed)
    except RewardKitError as error:
        raise ConfigError(f"the tools of {task_path} cannot be asked for: {error}; give --tools FILE.json") from error
    changed = [name for name, digest in header.digests.items() if task.digests.get(name) != digest]
    return FoundTools(tools, sorted(changed))


async def _offered(task: LoadedTask, seed: int) -> Tools:
    async with ServerPool(), GroupStart(task.definition, task.samples[0], seed) as group:
        start = await group.episode(0)
        try:
            return await Toolbox(task.definition, start.resource, task.tools).specs() or []
        finally:
            if start.resource is not None:
                await start.resource.close()
