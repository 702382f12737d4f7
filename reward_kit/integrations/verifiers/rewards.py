"""Conversion of a verifiers (v1) taskset to a dataset and a reward function for `reward-kit run`.

The rows contain the data of the tasks. The reward function creates a trace from the conversation and scores the trace
with the `@vf.reward` methods and the judges of the task. Tasks that need a container (`runtime`), such as many coding
tasks, are rejected. Otherwise, verifiers would skip their rewards without an error.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.state import state_cls

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.runs.logs.verifiers_traces import from_verifiers, to_verifiers
from reward_kit.typed_interface import Function, reward_function

DATA = "verifiers"
"""The field of a row that contains the data of the task."""


def dataset_rows(taskset: vf.Taskset) -> Iterator[dict[str, Any]]:
    """Yield a row for each task. The row contains `id`, `messages` and the data of the task."""
    for task in taskset:
        data = task.data
        if data.prompt is None:
            raise ConfigError(
                f"task {data.idx} has no prompt, because its user starts the conversation; run it in a verifiers Env"
            )
        if task.NEEDS_CONTAINER or data.image is not None:
            raise ConfigError(f"task {data.idx} needs a container; run it with verifiers")
        prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt is not None else []
        messages = [from_verifiers(message.model_dump(mode="json")).to_chat() for message in (*system, *prompt)]
        record = data.model_dump(mode="json", exclude_none=True)
        yield {"id": data.id or data.name or f"task-{data.idx}", "messages": messages, DATA: record}


def write_samples(taskset: vf.Taskset, path: Path) -> int:
    """Write the rows to a JSONL file for the `dataset_path` of a task, and return the number of rows.

    Raises:
        ConfigError: As for `dataset_rows`, or if the taskset is infinite.
    """
    if not taskset.bounded:
        raise ConfigError(f"{type(taskset).__name__} is infinite; select a part of it with taskset.take(n)")
    rows = [json.dumps(row, ensure_ascii=False) for row in dataset_rows(taskset)]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return len(rows)


def as_reward_function(taskset: vf.Taskset) -> Function:
    """Return a reward function that computes the rewards of a taskset, for rows from `dataset_rows`.

    As in verifiers, the score is the weighted sum of the rewards. Each reward and each metric in [0, 1] is also a
    metric of the result.

    Raises:
        ConfigError: If a reward or a metric needs a runtime, or if the taskset has no reward.
    """
    kind, config = type(taskset).task_type(), taskset.config.task
    data_kind = kind.data_type()
    example = kind(data_kind.model_construct(), config)
    rewards = [*example.hooks("reward"), *(judge.score for judge in example.plugged_judges())]
    if not rewards:
        raise ConfigError(
            f"{kind.__name__} has no @vf.reward and no judge, because its Env scores it; run it with verifiers"
        )
    for hook in (*rewards, *example.hooks("metric")):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{hook.__qualname__} needs a runtime, but only verifiers rollouts have a runtime")

    @reward_function(id=type(taskset).__name__)
    async def rewards_of_verifiers(
        messages: list[Message], sample: dict[str, Any], assistant_turns: list[int], **_: Any
    ) -> EvaluateResult:
        task = kind(data_kind.model_validate(sample[DATA]), config)
        trace = vf.Trace(
            task=vf.TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=state_cls(kind)(),
            is_completed=True,
            ok=True,
        )
        trace.nodes = [
            vf.MessageNode.model_validate(
                {
                    "parent": index - 1 if index else None,
                    "message": to_verifiers(message),
                    "sampled": index in assistant_turns,
                }
            )
            for index, message in enumerate(messages)
        ]
        await task.score(trace)
        return _result(trace)

    return rewards_of_verifiers


def _result(trace: vf.Trace) -> EvaluateResult:
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise RewardError(f"verifiers did not compute the reward {missing[0]!r}")
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    shown: Mapping[str, float | None] = {**trace.metrics, **rewards}
    metrics = {
        name: MetricResult(score=value, reason="computed by verifiers")
        for name, value in shown.items()
        if value is not None and 0.0 <= value <= 1.0
    }
    return EvaluateResult(score=trace.reward, metrics=metrics)
