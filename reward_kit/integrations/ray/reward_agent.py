"""`RayAsyncRewardAgent`: the reward agent as an actor, for trainers that call it from multiple processes.

Its two main methods have the same names as in verl. `compute_reward_pipeline` submits a batch and returns its size.
`get` waits for part of a batch and returns whole groups. The actor uses an `AsyncRewardAgent`: batches are scored
concurrently and never mixed, an exception affects only the rollout that caused it, and a request that cannot be
fulfilled raises an error immediately.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import ray

from reward_kit.errors import ConfigError
from reward_kit.integrations.ray.actors import Process
from reward_kit.integrations.ray.rewards import RayScorer
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.call_scheduler import CallTurn
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import Scored
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.reward_agent.tickets import Order, ScoredChunk


class _RequestColumns(NamedTuple):
    data_idxs: list[int]
    rewards: list[float | None]
    extra_infos: list[Scored]


class RewardChunk(_RequestColumns):
    """Part of a batch, in the order of the batch. It unpacks as (data_idxs, rewards, extra_infos).

    Attributes:
        data_idxs: the indices in the batch, in ascending order.
        rewards: the rewards. The reward of an unscored rollout is None, not zero.
        extra_infos: the full results, including failures.
        batch: the number of the batch, counted from 1.
        lengths: the number of tokens in each response, as in `ScoredChunk.lengths`.
        incomplete_groups: the numbers of the groups in which a score is missing.
    """

    batch: int
    lengths: list[int | None]
    incomplete_groups: list[int]

    @classmethod
    def of(cls, scored: ScoredChunk) -> RewardChunk:
        """Return the picklable parts of a chunk."""
        chunk = cls(*scored)
        chunk.batch, chunk.lengths = scored.ticket.number, scored.lengths
        chunk.incomplete_groups = scored.incomplete_groups
        return chunk

    def placed(self, width: int) -> npt.NDArray[np.float32]:
        """Return a (B, width) array that contains each reward at the last token of its response and is 0 elsewhere.

        The reward of an unscored response is NaN.

        Args:
            width: the number of columns of the batch's responses.

        Raises:
            ConfigError: If the length of a response is unknown, or if it is not between 1 and `width`.
        """
        placed = np.zeros((len(self.rewards), width), dtype=np.float32)
        for row, (length, reward) in enumerate(zip(self.lengths, self.rewards, strict=True)):
            if length is None or not 1 <= length <= width:
                raise ConfigError(
                    f"item {self.data_idxs[row]}: the response must have 1 to {width} tokens, got {length}"
                )
            placed[row, length - 1] = np.nan if reward is None else reward
        return placed


class RewardAgentProcess(Process):
    """The actor that `RayAsyncRewardAgent.remote(…)` starts. Its methods are also called with `.remote(…)`.

    Args:
        reference: the reward, as `file.py:function` or `package.module:function`.
        folder: the directory for relative file paths. The default is the working directory of the program that starts
            the actor.
        choice: the sandbox settings. The level is chosen as on the command line.
        options: keyword arguments that are always passed to the reward.
        reward_workers: the number of processes that call the reward. If 0, the process of the actor calls the reward.
        agent_options: the options of `AsyncRewardAgent`: max_concurrency, deadline_s, max_pending, rates, retries,
            cache, batch_format.
    """

    def __init__(
        self,
        reference: str,
        folder: str | Path | None = None,
        *,
        choice: SandboxChoice | None = None,
        options: Mapping[str, Any] | None = None,
        reward_workers: int = 0,
        **agent_options: Any,
    ) -> None:
        super().__init__()
        known = set(inspect.signature(AsyncRewardAgent).parameters) - {"scorer"}
        if unknown := sorted(agent_options.keys() - known):
            raise ConfigError(f"RayAsyncRewardAgent has no option {unknown[0]!r}; known: {', '.join(sorted(known))}")
        self._reference, self._folder = reference, Path(folder or Path.cwd())
        self._choice, self._options, self._workers = choice, options, reward_workers
        self._agent_options = agent_options
        self._environment: dict[str, str] = {}
        self._agent: AsyncRewardAgent | None = None
        self._opening = anyio.Lock()

    async def set_environment(self, variables: Mapping[str, str]) -> None:
        """Set environment variables, such as the key of a judge, in this process and in the reward workers.

        This must be the first call. Ray sends the arguments of a call directly to the process, but would store the
        arguments of the constructor.

        Raises:
            ConfigError: If the reward is already loaded.
        """
        if self._agent is not None:
            raise ConfigError("call set_environment before the first batch")
        self._environment = dict(variables)
        os.environ.update(variables)

    async def compute_reward_pipeline(self, data: Any, group_size: int = 1) -> int:
        """Start scoring a batch. The call returns immediately unless `max_pending` is reached.

        Args:
            data: requests, episodes, or a batch in the `batch_format`, such as a `DataProto`.
            group_size: the number of requests in a group, as in `AsyncRewardAgent.submit`.

        Returns:
            The number of requests.

        Raises:
            ConfigError: If the reward cannot be loaded, or if the batch cannot be divided into groups.
        """
        agent = await self._opened()
        return await CallTurn(agent.compute_reward_pipeline(data, group_size), self.context)

    async def get(
        self,
        chunk_size: int,
        hook_func: Callable[..., Any] | None = None,
        *,
        order: Order = "completion",
        cut_groups: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Wait for `chunk_size` results of the oldest batch that has results left.

        Args:
            chunk_size: the number of results. It must be a multiple of the group size unless `cut_groups` is true.
            hook_func: a function that is called in this process with the three columns. Its result is returned instead.
                If the function raises an error, the results remain available.
            order, cut_groups: see `AsyncRewardAgent.get`.
            **kwargs: keyword arguments for `hook_func`.

        Returns:
            A `RewardChunk`, or its three columns if the batch is in the `batch_format`. For a `DataProto`, the columns
            are the indices of the rows, the reward tensor, and a dict of lists. See `ScoredRows` in
            `integrations.verl`.

        Raises:
            ConfigError: If the request cannot be fulfilled. The error is raised immediately, and no results are lost.
        """
        agent = await self._opened()
        options: dict[str, Any] = {"order": order, "cut_groups": cut_groups, **kwargs}
        result = await CallTurn(agent.get(chunk_size, hook_func, **options), self.context)
        if hook_func is not None:
            return result
        return RewardChunk.of(result) if isinstance(result, ScoredChunk) else tuple(result)

    async def stats(self) -> AgentStats | None:
        """Return the statistics of the agent, or None before the first batch."""
        return self._agent.stats if self._agent is not None else None

    async def shutdown(self) -> None:
        """Score the submitted batches, and then close the reward."""
        await self.close()

    async def _opened(self) -> AsyncRewardAgent:
        async with self._opening:
            if self._agent is None:
                scorer = await anyio.to_thread.run_sync(self._scorer)
                agent = AsyncRewardAgent(scorer, **self._agent_options)
                self.context.run(CURRENT_PROVIDER_SESSION.set, ProviderSession())
                await self.open(agent)
                self._agent = agent
            return self._agent

    def _scorer(self) -> Any:
        reward = load_reward(self._reference, self._folder, self._choice, self._options).reward
        deadline_s = self._agent_options.get("deadline_s")
        if not self._workers:
            return make_scorer(reward, deadline_s)
        options: dict[str, Any] = {"deadline_s": deadline_s, "env": self._environment}
        return RayScorer(reward, self._reference, self._folder, workers=self._workers, **options)


RayAsyncRewardAgent = ray.remote(max_concurrency=1_000)(RewardAgentProcess)
"""The reward agent as an actor: `RayAsyncRewardAgent.remote(…)` takes the arguments of `RewardAgentProcess`."""
