"""A task's resources: what they get besides their configuration, and whether a world can be made of them.

They get the task's folder, and one of them the server that the task names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reward_kit.agent.samples import Sample
from reward_kit.agent.starts import GroupStart
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.composite import CompositeConfig, part_for_tool, read_parts
from reward_kit.environments.config import check_row_config, read_config, resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.environments.tools import ToolRegistry
from reward_kit.errors import ConfigError, EnvironmentFailure, boundary, did_you_mean
from reward_kit.models import TaskDefinitionModel
from reward_kit.runs.yaml_lines import LocatedYaml, about

_COMPOSITE = "composite"


@dataclass(slots=True)
class _Resource:
    """One resource of a task: what names its class, its own name, its class and its configuration."""

    location: str
    name: str
    kind: type[ForkableResource]
    config: dict[str, Any]


def with_surroundings(located: LocatedYaml, definition: TaskDefinitionModel, folder: Path) -> TaskDefinitionModel:
    """The definition with what its resources need of the task file: its folder, and the server it names.

    Args:
        located: the task file, for messages.
        definition: what it says.
        folder: where it lies.

    Raises:
        ConfigError: a resource does not exist, or the server belongs to none of them, or to several.
    """
    resources = _resources(located, definition, folder)
    _refuse_task_folder(located, definition, resources)
    for resource in resources:
        if resource.kind.takes_task_folder:
            resource.config["task_folder"] = str(folder)
    if definition.resource_server is not None:
        _give_server(located, definition, resources)
    if not resources:
        return definition
    only, config = resources[0], dict(definition.base_resource_config)
    if definition.resource_type != _COMPOSITE:
        return definition.model_copy(update={"resource_type": only.location, "base_resource_config": only.config})
    parts = [{"type": part.location, "name": part.name, "config": part.config} for part in resources]
    return definition.model_copy(update={"base_resource_config": {**config, "resources": parts}})


def _resources(located: LocatedYaml, definition: TaskDefinitionModel, folder: Path) -> list[_Resource]:
    name, config = definition.resource_type, definition.base_resource_config
    if name is None:
        return []
    if name != _COMPOSITE:
        with about(located, "resource_type"):
            return [_resource(name, name, config, folder)]
    found = []
    with about(located, "base_resource_config"):
        parts = read_config(CompositeConfig, config, "composite").resources
    for index, part in enumerate(parts):
        with about(located, "resources", index):
            found.append(_resource(part.type, part.name, part.config, folder))
    return found


def _resource(location: str, name: str, config: dict[str, Any], folder: Path) -> _Resource:
    if location.partition(":")[0].endswith(".py"):
        location = str(folder / location)
    return _Resource(location, name, resource_class(location), dict(config))


def _refuse_task_folder(located: LocatedYaml, definition: TaskDefinitionModel, resources: Sequence[_Resource]) -> None:
    """Reject a task file that sets `task_folder`, which would move the folder that its paths must stay in."""
    configs: list[Mapping[str, Any]] = [definition.base_resource_config, *(resource.config for resource in resources)]
    if definition.resource_type == _COMPOSITE:  # also what is laid over a part, below the part's name
        configs += [config for config in definition.base_resource_config.values() if isinstance(config, Mapping)]
    if any("task_folder" in config for config in configs):
        block = next((name for name in ("base_resource_config", "resources") if name in located.data), "")
        raise ConfigError(
            f"{located.where((block, 'task_folder'))}: task_folder: always the task file's own folder; remove this key"
        )


def _give_server(located: LocatedYaml, definition: TaskDefinitionModel, resources: Sequence[_Resource]) -> None:
    """Put the task's server into the configuration of the resource that starts it."""
    assert definition.resource_server is not None
    takers = [resource for resource in resources if resource.kind.takes_resource_server]
    if not resources:
        why = "the task has no resource_type"
    elif not takers:
        why = f"resource {', '.join(repr(resource.name) for resource in resources)} starts no server"
    elif len(takers) > 1:
        why = f"{' and '.join(repr(taker.name) for taker in takers)} could both start it; put it into one's config"
    elif "resource_server" in takers[0].config:
        why = "base_resource_config has one of its own"
    else:
        takers[0].config["resource_server"] = definition.resource_server.model_dump(exclude_defaults=True)
        return
    raise ConfigError(f"{located.where(('resource_server',))}: resource_server has no effect: {why}")


def check_tools(tools: ToolRegistry | None, definition: TaskDefinitionModel) -> None:
    """Refuse a tool that asks for a resource which the task does not have.

    Raises:
        ConfigError: the tool is named, and what its parameter asks for.
    """
    asking = {name: tool for name, tool in (tools.get_tools() if tools else {}).items() if tool.resource_parameters}
    if asking and definition.resource_type is None:
        name = next(iter(asking))
        raise ConfigError(f"tool {name!r} asks for the episode's resource, and the task has no resource_type")
    if definition.resource_type != _COMPOSITE:
        return
    kinds = {name: kind for name, (kind, _) in read_parts(definition.base_resource_config).items()}
    for name, tool in asking.items():
        for parameter, wanted in tool.resource_parameters.items():
            try:
                part_for_tool(kinds, wanted, parameter)
            except ConfigError as error:
                raise ConfigError(f"tool {name!r}: {error}") from None


def check_samples(definition: TaskDefinitionModel, samples: Sequence[Sample]) -> None:
    """Reject a sample whose row sets more than per-sample data, or a resource that the task does not have.

    Raises:
        ConfigError: the message has the row's line, the key, and the keys that a row may set.
    """
    if definition.resource_type is None:
        if unused := next((sample for sample in samples if sample.resource_config), None):
            raise ConfigError(f"{unused.where}: resource_config has no effect: the task has no resource_type")
        return
    kind, base = resource_class(definition.resource_type), definition.base_resource_config
    is_composite = definition.resource_type == _COMPOSITE
    names = read_parts(base) if is_composite else {}
    for sample in samples:
        for key in sample.resource_config if is_composite else ():
            if key not in names and key != "resources":
                near = did_you_mean(str(key), names)
                raise ConfigError(f"{sample.where}: resource_config: no resource is called {key!r}{near}")
        check_row_config(kind, base, sample.resource_config, sample.where)


async def check_world(definition: TaskDefinitionModel, samples: Sequence[Sample], located: LocatedYaml) -> bool:
    """Make a world for one sample of each kind of configuration, so that a wrong resource is found before the run.

    Args:
        definition: of the task.
        samples: its initial conditions.
        located: its file, for messages.

    Returns:
        Whether every world offers tools; True where the task has no resource.

    Raises:
        ConfigError: the resource does not exist, refuses its configuration, or cannot be reset.
    """
    has_tools = True
    if definition.resource_type is None:
        return has_tools
    resource_class(definition.resource_type)
    kinds = {frozenset(_keys(sample.resource_config)): sample for sample in reversed(samples)}
    async with ServerPool():
        for sample in kinds.values():
            try:
                async with GroupStart(definition, sample, 0) as group:
                    start = await group.episode(0)
                    if start.resource is not None:
                        try:
                            with boundary(EnvironmentFailure, "get_tools_spec"):
                                has_tools = bool(await start.resource.get_tools_spec()) and has_tools
                        finally:
                            await start.resource.close()
            except (ConfigError, EnvironmentFailure) as error:
                told = str(error).removeprefix(f"{definition.resource_type} resource: ")
                where = sample.where if sample.resource_config else _where(located, told.partition(":")[0])
                raise ConfigError(f"{where}: {_named(definition)}: {told}") from error
    return has_tools


def _where(located: LocatedYaml, key: str) -> str:
    """The line of a key of the resource's configuration, or of what names the resource where there is none."""
    blocks = ("base_resource_config", "resources", "resource_type")
    block = next((name for name in blocks if name in located.data), "")
    return located.where((block, key))


def _named(definition: TaskDefinitionModel) -> str:
    kind = definition.resource_type
    return "resources" if kind == "composite" else f"resource {kind!r}"


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a configuration, dotted."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
