"""A task file as a verifiers (v1) taskset. Each sample becomes a task, and the file's reward scores the tasks.

    from reward_kit.integrations.verifiers.tasksets import TaskFileTaskset

    class Arithmetic(TaskFileTaskset):
        task_file = Path(__file__).with_name("task.yaml")

    __all__ = ["Arithmetic"]

Rollouts use verifiers' harness, limits and retries. Keys of the file that would have no effect in verifiers are
rejected. `ResourceTaskset` provides the resource and the tools of a task.

`as_verifiers_reward` converts a reward function to a verifiers reward. verifiers has no unscored rollouts and cannot
handle None, so a failed reward raises an error.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import Field

from reward_kit.agent.actions import as_text
from reward_kit.agent.samples import Prompt, Sample
from reward_kit.agent.starts import GroupStart, close_quietly, environment_call
from reward_kit.agent.tool_execution import Execution, Toolbox
from reward_kit.blocking import run_blocking
from reward_kit.environments.base import ForkableResource, StateSnapshot
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, EnvironmentFailure, Failure, RewardError, RewardKitError, did_you_mean
from reward_kit.reward_agent.agent import AsyncRewardAgent, PersistentAgent
from reward_kit.reward_agent.loading import SandboxChoice, make_scorer, resolve_reward
from reward_kit.reward_agent.scoring import Reward, ScoringRequest, check_parameters
from reward_kit.runs.logs.verifiers_traces import is_same, to_verifiers, trace_to_episode
from reward_kit.runs.tasks import LoadedTask, load_task

RewardOfTrace = Callable[[Any, Any], Awaitable[float]]
_RESOURCE_KEYS = ("resource_type", "base_resource_config", "tools_module_path", "tools", "resource_server", "noise")
_ROLLOUT_KEYS = {
    "user": "in verifiers, an Env responds to the agent",
    "terminate_tool": "the harness decides when the agent is done",
    "termination_regex": "write a @vf.stop",
    "stop_phrases": "write a @vf.stop",
    "on_text": "the harness decides when the agent is done",
    "nudge": "the harness decides when the agent is done",
    "redact": "verifiers stores the conversation unredacted",
}


def _kept_open(reward: Reward, deadline_s: float | None) -> PersistentAgent:
    """Return an agent that is opened once in each event loop.

    It is not closed, because verifiers has no hook for the end of a taskset.
    """
    if reward.mode != "pointwise":
        raise ConfigError(
            f"reward {reward.id!r} scores groups, but a @vf.reward receives one trace; "
            "score groups in the finalize method of an Env"
        )
    check_parameters(reward)
    return PersistentAgent(lambda: AsyncRewardAgent(make_scorer(reward, deadline_s), max_concurrency=16))


async def _score(scorer: PersistentAgent, request: ScoringRequest, trace: Any) -> float:
    """Return the score, and add the valid metrics to the trace. Raise an error if the trace is unscored."""
    scored = await scorer.score(request)
    if scored.result is None or scored.failure is not None:
        raise RewardError("no result" if scored.failure is None else scored.failure.to_line())
    metrics = scored.result.metrics.items()
    trace.record_metrics({name: metric.score for name, metric in metrics if metric.is_score_valid})
    return scored.result.score


def as_verifiers_reward(
    reward: str | Callable[..., Any],
    *,
    ground_truth: str = "answer",
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
) -> RewardOfTrace:
    """Return an `async (task, trace) -> float` for a `@vf.reward` method, or for `rewards:` in a configuration.

    Args:
        reward: a reward function or `compute_score`, which runs in this process. Alternatively, a reference
            (`file.py:function` or `module:function`), which runs at the sandbox level that the command line would
            choose.
        ground_truth: the field of the task's data that is passed as `ground_truth`. All fields are passed as `sample`.
        folder: the directory for a relative path in a reference.
        choice: the sandbox settings of a reference. For a function, only the time limit of a call applies.
        options: keyword arguments that are always passed to the reward.

    Raises:
        ConfigError: If the reward cannot be loaded, scores groups, or has an unknown parameter.
    """
    loaded_reward = resolve_reward(reward, folder, choice, options)
    scorer = _kept_open(loaded_reward, (choice or SandboxChoice()).reward_time_s)

    async def score(task: Any, trace: Any) -> float:
        data = task.model_dump()
        if ground_truth not in data and "ground_truth" in loaded_reward.required:
            raise ConfigError(f"the data of the task has no field {ground_truth!r}{did_you_mean(ground_truth, data)}")
        request = ScoringRequest.from_episode(trace_to_episode(trace))
        return await _score(scorer, replace(request, ground_truth=data.get(ground_truth), sample=data), trace)

    return score


class TaskFileConfig(vf.TasksetConfig):
    """The configuration of a taskset. It can select a different task file and override keys."""

    task_file: Path | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


class SampleData(vf.TaskData):
    """A sample and the path of its task file. The path allows a trace to be scored again from its record."""

    ground_truth: Any = None
    sample: dict[str, Any] = Field(default_factory=dict)
    task_file: str = ""
    overrides: dict[str, Any] = Field(default_factory=dict)


@cache
def _loaded(task_file: str, overrides: str) -> tuple[LoadedTask, PersistentAgent | None]:
    task = load_task(Path(task_file), json.loads(overrides))
    reward = task.reward
    return task, _kept_open(reward, task.definition.limits.reward_time_s) if reward is not None else None


def loaded(task_file: str, overrides: dict[str, Any]) -> tuple[LoadedTask, PersistentAgent]:
    """Return the task of a file and its scorer. They are loaded once per process."""
    task, scorer = _loaded(task_file, json.dumps(overrides, sort_keys=True))
    if scorer is None:
        raise ConfigError(f"{task_file}: reward_function_path: missing; a taskset of verifiers needs a reward")
    return task, scorer


class SampleTask(vf.Task[SampleData]):
    """A verifiers task for a sample. Its messages are the prompt, and its score is the only reward."""

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """Return the score of the task's reward function. Raise an error if the trace is unscored."""
        task, scorer = loaded(self.data.task_file, self.data.overrides)
        request = ScoringRequest.from_episode(trace_to_episode(trace), task.definition)
        return await _score(scorer, await self.request(request, trace), trace)

    async def request(self, request: ScoringRequest, trace: vf.Trace) -> ScoringRequest:
        """Return the scoring request with the sample's fields."""
        return replace(request, ground_truth=self.data.ground_truth, sample=self.data.sample)

    @vf.stop
    async def step_limit(self, trace: vf.Trace) -> bool:
        """Stop after the task's `max_episode_steps`, if set."""
        definition = loaded(self.data.task_file, self.data.overrides)[0].definition
        if "max_episode_steps" not in definition.model_fields_set:
            return False
        return bool(trace.num_turns >= definition.max_episode_steps)


class TaskFileTaskset(vf.Taskset[SampleTask, TaskFileConfig]):
    """A taskset that contains the samples of a task file without a resource. Subclass it and set `task_file`.

    Attributes:
        task_file: the path of the task file, unless the configuration sets a different path.
    """

    task_file: ClassVar[Path | None] = None

    def load(self) -> Iterator[SampleTask]:
        """Yield a task for each sample, in the order of the dataset.

        Raises:
            ConfigError: If the file is invalid, or if a key would have no effect in verifiers.
        """
        task = self._task(dict.fromkeys(_RESOURCE_KEYS, "use ResourceTaskset, which serves its tools"))
        for sample in task.samples:
            yield SampleTask(self._data(task, sample), self.config.task)

    def _task(self, refused: dict[str, str]) -> LoadedTask:
        """Load the task, and reject keys that would have no effect in verifiers."""
        path = self.config.task_file or self.task_file
        if path is None:
            raise ConfigError(
                f"{type(self).__name__}.task_file: missing; set it to a task file, or set taskset.task_file"
            )
        task = loaded(str(path.resolve()), self.config.overrides)[0]
        for key, why in {**refused, **_ROLLOUT_KEYS}.items():
            if key in task.definition.model_fields_set and getattr(task.definition, key):
                raise ConfigError(f"{task.located.where((key,))}: {key} has no effect in verifiers: {why}")
        return task

    def _data(self, task: LoadedTask, sample: Sample, observation: str = "") -> SampleData:
        messages = Prompt(task.definition).render(sample, observation)
        for message in messages:
            if not is_same(message.model_copy(update={"role": "system"} if message.role == "developer" else {})):
                raise ConfigError(
                    f"{task.path}: sample {sample.id!r}: verifiers cannot represent the message {message!r:.200}"
                )
        return SampleData(
            id=sample.id,
            name=sample.id,
            description=task.definition.description or None,
            prompt=[to_verifiers(message) for message in messages],
            ground_truth=sample.ground_truth,
            sample=dict(sample.row),
            task_file=str(task.path.resolve()),
            overrides=self.config.overrides,
        )


class ResourceState(vf.State):
    """The results of the tool calls so far, and the final state after the last call, encoded in base64."""

    rewards: list[float | None] = Field(default_factory=list)
    stop_reason: str | None = None
    failure: str | None = None
    final_kind: str | None = None
    final_payload: str = ""


class ResourceToolsConfig(vf.ToolsetConfig):
    """The configuration of the tool server. It is empty, because the rollout provides the task."""


class ResourceTools(vf.Toolset[ResourceToolsConfig, ResourceState]):
    """A server that provides the tools of one rollout's resource."""

    TOOL_PREFIX = None

    async def setup_task(self, task: SampleData) -> None:
        """Create the resource for a sample."""
        loaded_task = loaded(task.task_file, task.overrides)[0]
        self._limit_s = loaded_task.definition.limits.environment_time_s
        sample = _sample(loaded_task, task.id or "")
        start = GroupStart(loaded_task.definition, sample, run_seed=0)
        self._exit_stack.push_async_callback(start.close)
        # Random numbers differ between rollouts unless the task sets shared noise.
        self._world = (await start.episode(secrets.randbits(31))).resource
        if self._world is not None:
            self._exit_stack.push_async_callback(close_quietly, self._world)
        self._toolbox = Toolbox(loaded_task.definition, self._world, loaded_task.tools)
        self._specs = await self._toolbox.specs() or []
        self._lock = asyncio.Lock()

    def register(self, mcp: Any) -> None:
        """Register each tool with its own schema. Otherwise, the SDK would derive a schema from a signature."""
        from mcp.server.mcpserver.tools.base import Tool
        from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata

        class AnyArguments(ArgModelBase, extra="allow"):
            def model_dump_one_level(self) -> dict[str, Any]:
                return dict(self.model_extra or {})

        for spec in self._specs:
            function = spec["function"]
            mcp._tool_manager._tools[function["name"]] = Tool(
                fn=self._with_state(self._calling(function["name"])),
                name=function["name"],
                title=None,
                description=function.get("description") or "",
                parameters=function.get("parameters") or {"type": "object", "properties": {}},
                fn_metadata=FuncMetadata(arg_model=AnyArguments),
                is_async=True,
                context_kwarg=None,
            )

    def _calling(self, name: str) -> Any:
        async def call(**arguments: Any) -> str:
            async with self._lock:  # A resource accepts only one action at a time
                state: ResourceState = self.state
                if state.stop_reason or state.failure:
                    return "Not executed: the episode is over."
                action = {"type": "tool_call", "name": name, "arguments": arguments}
                done = await self._toolbox.execute(action, len(state.rewards), None)
                await _record(state, done, self._world, self._limit_s)
                return done.messages[0].text

        return call


async def _record(state: ResourceState, done: Execution, world: ForkableResource | None, limit_s: float | None) -> None:
    state.rewards.append(done.reward)
    if done.failure is not None:
        state.failure = done.failure.to_line()
        return
    if done.terminated or done.truncated:
        state.stop_reason = "environment_terminated" if done.terminated else "environment_truncated"
    try:
        final = await _final_state(world, limit_s)
    except RewardKitError as error:
        state.failure = Failure.from_exception(error).to_line()
    else:
        if final is not None:
            state.final_kind, state.final_payload = final.kind, base64.b64encode(final.payload).decode()


async def _final_state(world: ForkableResource | None, limit_s: float | None) -> StateSnapshot | None:
    if world is None:
        return None
    with environment_call(f"final_state of {type(world).__name__}", limit_s, world):
        return await world.final_state()


class ResourceTask(SampleTask, vf.Task[SampleData, ResourceState]):
    """A verifiers task for a sample that has its own resource."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the server that provides the tools of the resource."""
        return [ResourceTools(ResourceToolsConfig())]

    async def request(self, request: ScoringRequest, trace: vf.Trace) -> ScoringRequest:
        """Return the scoring request with the results of the resource.

        If there are no tool calls, the final state is the initial state of the sample. A trace that was read from a
        record has no resource. It therefore has no final state, unless its messages contain no tool call.
        """
        state: ResourceState = trace.state
        if state.failure is not None:
            raise EnvironmentFailure(f"the environment failed: {state.failure}")
        rewards = [reward for reward in state.rewards if reward is not None]
        if state.rewards or any(message.role == "tool" for message in request.messages):
            final = StateSnapshot(state.final_kind, base64.b64decode(state.final_payload)) if state.final_kind else None
        else:
            task = loaded(self.data.task_file, self.data.overrides)[0]
            async with ServerPool(), _open_resource(task, _sample(task, self.data.id or "")) as world:
                final = await _final_state(world, task.definition.limits.environment_time_s)
        return replace(
            await super().request(request, trace),
            environment_return=sum(rewards) if rewards else None,
            final_state=final,
            stop_reason=state.stop_reason or request.stop_reason,
        )

    @vf.stop
    async def resource_is_done(self, trace: vf.Trace) -> bool:
        """Stop after the resource has ended the episode or has failed."""
        return bool(trace.state.stop_reason or trace.state.failure)


class ResourceTaskset(TaskFileTaskset, vf.Taskset[ResourceTask, TaskFileConfig]):
    """A taskset that contains the samples of a task file with a resource or tools. Subclass it and set `task_file`."""

    def load(self) -> Iterator[ResourceTask]:
        """Yield a task for each sample. Its prompt includes the first observation of the resource.

        Raises:
            ConfigError: If the file is invalid, if it has neither a resource nor tools, or if a key would have no
                effect in verifiers.
        """
        task = self._task({})
        if task.definition.resource_type is None and task.tools is None:
            raise ConfigError(f"{task.path}: resource_type: missing; without a resource or tools, use TaskFileTaskset")

        async def first_observations() -> list[str]:
            observations = []
            async with ServerPool():  # All samples share one server, if the task has a server.
                for sample in task.samples:
                    async with _open_resource(task, sample) as world:
                        observations.append("" if world is None else as_text(await world.get_observation()))
            return observations

        for sample, observation in zip(task.samples, run_blocking(first_observations()), strict=True):
            yield ResourceTask(self._data(task, sample, observation), self.config.task)


@asynccontextmanager
async def _open_resource(task: LoadedTask, sample: Sample) -> AsyncIterator[ForkableResource | None]:
    """Open the resource in the initial state of a sample. If the task has no resource, yield None."""
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
        raise ConfigError(f"{task.path}: unknown sample {id!r}{did_you_mean(id, by_id)}")
    return by_id[id]


if __name__ == "__main__":
    ResourceTools.run()
