"""A reward function as a reward of verifiers: called where the command line would call it, and raising where it fails.

verifiers has no word for "no score". A `@vf.reward` that returns None breaks, and one that returns an empty mapping
leaves a good trace whose `reward` is 0.0. What raises leaves the reward None and the trace not `ok`, so that no trainer
takes it; so an unscored rollout raises here, with the class of its failure in the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from reward_kit.errors import ConfigError, RewardError, did_you_mean
from reward_kit.integrations.verifiers.traces import episode_of_trace
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.in_process import warn_unconfined
from reward_kit.reward_agent.levels import SandboxChoice, load_reward, scorer_of
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest, check_parameters
from reward_kit.typed_interface import Function, reward_spec

RewardOfTrace = Callable[[Any, Any], Awaitable[float]]


class KeptOpenScorer:
    """One reward, opened once in each event loop that scores with it, and closed when that loop ends.

    verifiers has no hook at the end of a taskset, and opening a confined reward for each trace would cost a third of a
    second each time.

    Args:
        reward: of mode "pointwise".
        deadline_s: for one call.
        max_concurrency: calls in flight at a time.

    Raises:
        ConfigError: it scores groups.
    """

    def __init__(self, reward: Reward, deadline_s: float | None = None, max_concurrency: int = 16) -> None:
        if reward.mode != "pointwise":
            raise ConfigError(
                f"reward {reward.id!r} scores groups; a @vf.reward sees one trace, so score them in an Env's finalize"
            )
        check_parameters(reward)
        self._reward, self._deadline_s, self._max_concurrency = reward, deadline_s, max_concurrency
        self._agents: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[AsyncRewardAgent]]
        self._agents = WeakKeyDictionary()
        self._holders: set[asyncio.Task[None]] = set()

    async def score(self, request: ScoringRequest) -> Scored:
        """The score of one rollout; what goes wrong with it is in the result."""
        agent = await asyncio.shield(self._opened())
        ticket = await agent.submit([request])
        scored: Scored = (await agent.get(1, ticket=ticket)).extra_infos[0]
        return scored

    def _opened(self) -> asyncio.Future[AsyncRewardAgent]:
        loop = asyncio.get_running_loop()
        known = self._agents.get(loop)
        if known is None or (known.done() and known.exception() is not None):
            known = self._agents[loop] = loop.create_future()
            holder = loop.create_task(self._hold(known))
            self._holders.add(holder)
            holder.add_done_callback(self._holders.discard)
        return known

    async def _hold(self, opened: asyncio.Future[AsyncRewardAgent]) -> None:
        """Hold it open until the loop cancels what is left."""
        scorer = scorer_of(self._reward, self._deadline_s)
        try:
            async with AsyncRewardAgent(scorer, max_concurrency=self._max_concurrency) as agent:
                opened.set_result(agent)
                await asyncio.Event().wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)


def score_or_raise(scored: Scored) -> EvaluateResult:
    """The result of a rollout that was scored.

    Raises:
        RewardError: it was not; the class of the failure comes first.
    """
    if scored.result is None or scored.failure is not None:
        failure = scored.failure
        told = "no result" if failure is None else f"{failure.failure_class}: {failure.message}"
        raise RewardError(told)
    return scored.result


def as_verifiers_reward(
    reward: str | Function,
    *,
    ground_truth: str = "answer",
    folder: Path | None = None,
    choice: SandboxChoice | None = None,
    options: Mapping[str, Any] | None = None,
) -> RewardOfTrace:
    """An `async (task, trace) -> float` for a `@vf.reward` method, or for `rewards:` in a task's configuration.

    Args:
        reward: a reward function, called in this process, or a reference, `file.py:function` or `module:function`,
            which runs at the level that the command line would choose.
        ground_truth: the field of the task's data that is handed to it under that name; all fields are its `sample`.
        folder: what a file path is relative to.
        choice: what the user says of its sandbox.
        options: keyword parameters to fix.

    Raises:
        ConfigError: it cannot be loaded, scores groups, or asks for what nobody gives.
    """
    if isinstance(reward, str):
        loaded: Reward = load_reward(reward, folder, choice, options).reward
    elif choice is not None or options or folder is not None:
        raise ConfigError("folder, choice and options are for a reward that is named by a text; leave them out")
    else:
        loaded = reward_spec(reward)
        warn_unconfined(loaded)
    scorer = KeptOpenScorer(loaded, (choice or SandboxChoice()).reward_time_s)

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
