"""A task file with a world as a taskset of verifiers (v1): the world's tools and the task's own, served over MCP.

verifiers starts this module as a program for each rollout. It makes the world that the sample starts from, seeded by
the sample alone, so that all rollouts of a task begin in one state, and leaves in the rollout's shared state what a
reward asks for: the environment's rewards, its end, and the final state after each call. The conversation ends when the
world does. Tools that a world offers only later are not offered: MCP lists them once.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from reward_kit.agent.actions import as_text
from reward_kit.agent.samples import Sample
from reward_kit.agent.starts import GroupStart, close_quietly, environment_call
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.blocking import run_blocking
from reward_kit.environments.base import ForkableResource, StateSnapshot, ToolSpec
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure, Failure, RewardKitError, did_you_mean
from reward_kit.integrations.verifiers.tasksets import (
    SampleData,
    SampleTask,
    TaskFileConfig,
    TaskFileTaskset,
    loaded,
    refuse_unused,
)
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.runs.tasks import LoadedTask


class WorldState(vf.State):
    """What came of the calls so far.

    Attributes:
        rewards: of each call, None where the environment gave none.
        stop_reason: why the world ended; None while it goes on.
        failure: what broke in it.
        final_kind, final_payload: its final state after the last call, the payload in base64.
    """

    rewards: list[float | None] = Field(default_factory=list)
    stop_reason: str | None = None
    failure: str | None = None
    final_kind: str | None = None
    final_payload: str = ""


class WorldToolsConfig(vf.ToolsetConfig):
    """Nothing to configure: the server asks the rollout for its task."""


class WorldTools(vf.Toolset[WorldToolsConfig, WorldState]):
    """The tools of one rollout's world."""

    TOOL_PREFIX = None

    async def setup_task(self, task: SampleData) -> None:
        """Make the world of a sample."""
        found = loaded(task.task_file, task.overrides)[0]
        self._limit_s = found.definition.limits.environment_time_s
        sample = _sample(found, task.id or "")
        start = GroupStart(found.definition, sample, run_seed=0)
        self._exit_stack.push_async_callback(start.close)
        # Noise is a rollout's own, unless the task shares it.
        self._world = (await start.episode(secrets.randbits(31))).resource
        if self._world is not None:
            self._exit_stack.push_async_callback(close_quietly, self._world)
        self._toolbox = Toolbox(found.definition, self._world, found.tools)
        self._specs = await self._toolbox.specs() or []
        self._lock = asyncio.Lock()

    def register(self, mcp: Any) -> None:
        """Offer each tool under its own schema."""
        for spec in self._specs:
            _add_tool(mcp, spec, self._with_state(self._calling(spec["function"]["name"])))

    def _calling(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            async with self._lock:  # a world takes one action after another
                return await self._call(name, arguments)

        return call

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        state: WorldState = self.state
        if state.stop_reason or state.failure:
            return "Not carried out: the episode is over."
        action = {"type": "tool_call", "name": name, "arguments": arguments}
        done = await self._toolbox.execute(action, len(state.rewards), None)
        await _record(state, done, self._world, self._limit_s)
        return done.messages[0].text


async def _record(state: WorldState, done: Execution, world: ForkableResource | None, limit_s: float | None) -> None:
    state.rewards.append(done.reward)
    if done.failure is not None:
        state.failure = done.failure.told()
        return
    if done.terminated or done.truncated:
        state.stop_reason = "environment_terminated" if done.terminated else "environment_truncated"
    try:
        final = await _final_state(world, limit_s)
    except RewardKitError as error:
        state.failure = Failure.from_exception(error).told()
    else:
        if final is not None:
            state.final_kind, state.final_payload = final.kind, base64.b64encode(final.payload).decode()


async def _final_state(world: ForkableResource | None, limit_s: float | None) -> StateSnapshot | None:
    if world is None:
        return None
    with environment_call(f"final_state of {type(world).__name__}", limit_s, world):
        return await world.final_state()


def _add_tool(mcp: Any, spec: ToolSpec, function: Any) -> None:
    """Register a tool with a schema of its own; the SDK would derive one from a signature."""
    from mcp.server.mcpserver.tools.base import Tool
    from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata

    class AnyArguments(ArgModelBase, extra="allow"):
        def model_dump_one_level(self) -> dict[str, Any]:
            return dict(self.model_extra or {})

    named = spec["function"]
    mcp._tool_manager._tools[named["name"]] = Tool(
        fn=function,
        name=named["name"],
        title=None,
        description=named.get("description") or "",
        parameters=named.get("parameters") or {"type": "object", "properties": {}},
        fn_metadata=FuncMetadata(arg_model=AnyArguments),
        is_async=True,
        context_kwarg=None,
    )


class WorldTask(SampleTask, vf.Task[SampleData, WorldState]):
    """One sample in a world of its own."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """The server of the world's tools."""
        return [WorldTools(WorldToolsConfig())]

    async def request(self, request: ScoringRequest, trace: vf.Trace) -> ScoringRequest:
        """What the reward function is given, with what came of the world.

        Where nothing was called, the final state is the one that the sample starts from. A trace that was read from a
        record knows nothing of its world any more: it has none, unless its messages show that nothing was called.

        Raises:
            EnvironmentFailure: the world broke, so that there is nothing to score.
        """
        state: WorldState = trace.state
        if state.failure is not None:
            raise EnvironmentFailure(f"the world broke: {state.failure}")
        given = [reward for reward in state.rewards if reward is not None]
        if state.rewards or any(message.role == "tool" for message in request.messages):
            final = StateSnapshot(state.final_kind, base64.b64decode(state.final_payload)) if state.final_kind else None
        else:
            final = await self._first_state()
        return replace(
            await super().request(request, trace),
            environment_return=sum(given) if given else None,
            final_state=final,
            stop_reason=state.stop_reason or request.stop_reason,
        )

    async def _first_state(self) -> StateSnapshot | None:
        task = loaded(self.data.task_file, self.data.overrides)[0]
        async with ServerPool(), _world_of(task, _sample(task, self.data.id or "")) as world:
            return await _final_state(world, task.definition.limits.environment_time_s)

    @vf.stop
    async def world_is_over(self, trace: vf.Trace) -> bool:
        """The world has ended, or is broken."""
        return bool(trace.state.stop_reason or trace.state.failure)


class WorldTaskset(TaskFileTaskset, vf.Taskset[WorldTask, TaskFileConfig]):
    """The samples of a task file with a world or tools. Subclass it and name the file, as `TaskFileTaskset`."""

    def load(self) -> Iterator[WorldTask]:
        """A task for each sample, whose prompt has the world's first observation.

        Raises:
            ConfigError: the file is wrong, has neither world nor tools, or a key of it would have no effect here.
        """
        task = self._task()
        if task.definition.resource_type is None and task.tools is None:
            raise ConfigError(f"{task.path}: resource_type: missing; without a world or tools, use TaskFileTaskset")
        refuse_unused(task, {})
        for sample, observation in zip(task.samples, run_blocking(_first_observations(task)), strict=True):
            yield WorldTask(self._data(task, sample, observation), self.config.task)


async def _first_observations(task: LoadedTask) -> list[str]:
    async with ServerPool():  # one server for all samples, where the task names one
        return [await _first_observation(task, sample) for sample in task.samples]


async def _first_observation(task: LoadedTask, sample: Sample) -> str:
    async with _world_of(task, sample) as world:
        return "" if world is None else as_text(await world.get_observation())


@asynccontextmanager
async def _world_of(task: LoadedTask, sample: Sample) -> AsyncIterator[ForkableResource | None]:
    """The world that a sample starts from, as long as the block lasts; None where its task has none."""
    async with GroupStart(task.definition, sample, run_seed=0) as start:
        world = (await start.episode(0)).resource
        try:
            yield world
        finally:
            if world is not None:
                await close_quietly(world)


def _sample(task: LoadedTask, id: str) -> Sample:
    by_id = {sample.id: sample for sample in task.samples}
    if id not in by_id:
        raise ConfigError(f"{task.path}: no sample {id!r}{did_you_mean(id, by_id)}")
    return by_id[id]


if __name__ == "__main__":
    WorldTools.run()
