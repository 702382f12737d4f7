"""A reward function as a reward of verifiers: called where the command line would call it, and raising where it fails.

verifiers has no word for "no score". A `@vf.reward` that returns None breaks, and one that returns an empty mapping
leaves a good trace whose `reward` is 0.0. What raises leaves the reward None and the trace not `ok`, so that no trainer
takes it; so an unscored rollout raises here, with the class of its failure in the message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError, RewardError, did_you_mean
from reward_kit.integrations.verifiers.traces import episode_of_trace
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.agent import AsyncRewardAgent, KeptOpenAgent
from reward_kit.reward_agent.levels import SandboxChoice, reward_given, scorer_of
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest, check_parameters

RewardOfTrace = Callable[[Any, Any], Awaitable[float]]


def kept_open(reward: Reward, deadline_s: float | None = None, max_concurrency: int = 16) -> KeptOpenAgent:
    """A reward, opened once in each event loop that scores with it: verifiers has no hook at the end of a taskset.

    Args:
        reward: of mode "pointwise".
        deadline_s: for one call.
        max_concurrency: calls in flight at a time.

    Raises:
        ConfigError: it scores groups, or asks for what nobody gives.
    """
    if reward.mode != "pointwise":
        raise ConfigError(
            f"reward {reward.id!r} scores groups; a @vf.reward sees one trace, so score them in an Env's finalize"
        )
    check_parameters(reward)
    return KeptOpenAgent(lambda: AsyncRewardAgent(scorer_of(reward, deadline_s), max_concurrency=max_concurrency))


def score_or_raise(scored: Scored) -> EvaluateResult:
    """The result of a rollout that was scored.

    Raises:
        RewardError: it was not; the class of the failure comes first.
    """
    if scored.result is None or scored.failure is not None:
        raise RewardError("no result" if scored.failure is None else scored.failure.told())
    return scored.result


def as_verifiers_reward(
    reward: str | Callable[..., Any],
    *,
    ground_truth: str = "answer",
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
) -> RewardOfTrace:
    """An `async (task, trace) -> float` for a `@vf.reward` method, or for `rewards:` in a task's configuration.

    Args:
        reward: a reward function or `compute_score`, called in this process, or a reference, `file.py:function` or
            `module:function`, which runs at the level that the command line would choose.
        ground_truth: the field of the task's data that is handed to it under that name; all fields are its `sample`.
        folder: what the file of a reference is relative to.
        choice: what the user says of the sandbox of a reference; of a function it is the time for one call alone.
        options: keyword parameters to fix.

    Raises:
        ConfigError: it cannot be loaded, scores groups, or asks for what nobody gives.
    """
    loaded = reward_given(reward, folder, choice, options)
    scorer = kept_open(loaded, (choice or SandboxChoice()).reward_time_s)

    async def score(task: Any, trace: Any) -> float:
        data = task.model_dump()
        if ground_truth not in data and "ground_truth" in loaded.required:
            raise ConfigError(f"the task's data have no {ground_truth!r}{did_you_mean(ground_truth, data)}")
        request = ScoringRequest.of(episode_of_trace(trace))
        scored = await scorer.score(replace(request, ground_truth=data.get(ground_truth), sample=data))
        return record_metrics(trace, score_or_raise(scored))

    return score


def record_metrics(trace: Any, result: EvaluateResult) -> float:
    """Put a result's valid metrics on the trace; its score."""
    trace.record_metrics({name: metric.score for name, metric in result.metrics.items() if metric.is_score_valid})
    return result.score
