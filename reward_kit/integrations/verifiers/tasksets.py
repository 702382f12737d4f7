"""A task file as a taskset of verifiers (v1): a task for each sample, scored by the task's own reward.

    from reward_kit.integrations.verifiers.tasksets import TaskFileTaskset

    class Arithmetic(TaskFileTaskset):
        task_file = Path(__file__).with_name("task.yaml")

    __all__ = ["Arithmetic"]

The rollout is that of verifiers: its harness, its limits, its retries. Keys of the file that would change the rollout
here and cannot there are refused; `worlds.WorldTaskset` serves a task's world and tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import verifiers.v1 as vf
from pydantic import Field

from reward_kit.agent.samples import Prompt, Sample
from reward_kit.errors import ConfigError
from reward_kit.integrations.verifiers.messages import is_same, to_verifiers
from reward_kit.integrations.verifiers.scoring import kept_open, record_metrics, score_or_raise
from reward_kit.integrations.verifiers.traces import episode_of_trace
from reward_kit.models import Message
from reward_kit.reward_agent.agent import KeptOpenAgent
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.runs.tasks import LoadedTask, load_task

_OF_WORLDS = ("resource_type", "base_resource_config", "tools_module_path", "resource_server", "noise")
_OF_OUR_ROLLOUTS = {
    "user": "who answers the agent is up to an Env",
    "terminate_tool": "the harness decides when the agent is done",
    "termination_regex": "write a @vf.stop",
    "stop_phrases": "write a @vf.stop",
    "on_text": "the harness decides when the agent is done",
    "nudge": "the harness decides when the agent is done",
    "redact": "verifiers stores the conversation as it is",
}


class TaskFileConfig(vf.TasksetConfig):
    """The configuration of a taskset: another task file than its own, and keys laid over it."""

    task_file: Path | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)


class SampleData(vf.TaskData):
    """One sample of the task file, and where it came from, so that a trace can be scored again from its record."""

    ground_truth: Any = None
    sample: dict[str, Any] = Field(default_factory=dict)
    task_file: str = ""
    overrides: dict[str, Any] = Field(default_factory=dict)


@cache
def _loaded(task_file: str, overrides: str) -> tuple[LoadedTask, KeptOpenAgent | None]:
    task = load_task(Path(task_file), json.loads(overrides))
    reward = task.reward
    return task, kept_open(reward, task.definition.limits.reward_time_s) if reward is not None else None


def loaded(task_file: str, overrides: dict[str, Any]) -> tuple[LoadedTask, KeptOpenAgent]:
    """The task of a file and its scorer, once a process.

    Raises:
        ConfigError: the file is wrong, or names no reward.
    """
    task, scorer = _loaded(task_file, json.dumps(overrides, sort_keys=True))
    if scorer is None:
        raise ConfigError(f"{task_file}: reward_function_path: missing; a taskset of verifiers needs a reward")
    return task, scorer


class SampleTask(vf.Task[SampleData]):
    """One sample: its messages as the prompt, its score as the one reward."""

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        """The score of the task's reward function; what is unscored raises."""
        task, scorer = loaded(self.data.task_file, self.data.overrides)
        request = await self.request(ScoringRequest.of(episode_of_trace(trace), task.definition), trace)
        return record_metrics(trace, score_or_raise(await scorer.score(request)))

    async def request(self, request: ScoringRequest, trace: vf.Trace) -> ScoringRequest:
        """What the reward function is given."""
        return replace(request, ground_truth=self.data.ground_truth, sample=self.data.sample)

    @vf.stop
    async def step_limit(self, trace: vf.Trace) -> bool:
        """The task's `max_episode_steps`, where its file sets it."""
        definition = loaded(self.data.task_file, self.data.overrides)[0].definition
        if "max_episode_steps" not in definition.model_fields_set:
            return False
        return bool(trace.num_turns >= definition.max_episode_steps)


class TaskFileTaskset(vf.Taskset[SampleTask, TaskFileConfig]):
    """The samples of a task file that needs no world. Subclass it and name the file.

    Attributes:
        task_file: the file, unless the configuration names one.
    """

    task_file: ClassVar[Path | None] = None

    def load(self) -> Iterator[SampleTask]:
        """A task for each sample, in the order of the dataset.

        Raises:
            ConfigError: the file is wrong, or a key of it would have no effect here.
        """
        task = self._task()
        self._check(task)
        for sample in task.samples:
            yield SampleTask(self._data(task, sample), self.config.task)

    def _task(self) -> LoadedTask:
        path = self.config.task_file or self.task_file
        if path is None:
            raise ConfigError(f"{type(self).__name__}.task_file: missing; name a task file, or give taskset.task_file")
        return loaded(str(path.resolve()), self.config.overrides)[0]

    def _check(self, task: LoadedTask) -> None:
        refuse_unused(task, dict.fromkeys(_OF_WORLDS, "use worlds.WorldTaskset, which serves its tools"))

    def _data(self, task: LoadedTask, sample: Sample, observation: str = "") -> SampleData:
        messages = Prompt(task.definition).render(sample, observation)
        return SampleData(
            id=sample.id,
            name=sample.id,
            description=task.definition.description or None,
            prompt=[_told(message, task, sample) for message in messages],
            ground_truth=sample.ground_truth,
            sample=dict(sample.row),
            task_file=str(task.path.resolve()),
            overrides=self.config.overrides,
        )


def refuse_unused(task: LoadedTask, more: dict[str, str]) -> None:
    """Refuse keys of a task file that change its rollouts here and would have no effect in verifiers.

    Raises:
        ConfigError: the first of them, with its line.
    """
    for key, why in {**more, **_OF_OUR_ROLLOUTS}.items():
        if key in task.definition.model_fields_set and getattr(task.definition, key):
            raise ConfigError(f"{task.located.where((key,))}: {key} has no effect in verifiers: {why}")


def _told(message: Message, task: LoadedTask, sample: Sample) -> dict[str, Any]:
    if not is_same(message.model_copy(update={"role": "system"} if message.role == "developer" else {})):
        raise ConfigError(f"{task.path}: sample {sample.id!r}: verifiers cannot hold the message {message!r:.200}")
    return to_verifiers(message)
