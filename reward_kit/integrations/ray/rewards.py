"""Rewards in processes on a cluster. `RayScorer` is a `Scorer` that calls actors, each of which has its own sandbox.

The sandbox level is chosen once, in the driver. A sandboxed reward is sent as a program, so its files do not have to
exist on the nodes. A reward that runs `in_process` is loaded again on each node from the same path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from reward_kit.errors import ConfigError, Failure
from reward_kit.integrations.ray.actors import (
    ActorPool,
    Process,
    await_result,
    is_actor_lost,
    start_actor,
    unpickle_setup,
)
from reward_kit.integrations.ray.cluster import ClusterError, ray_module
from reward_kit.integrations.ray.options import RATES
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.call_scheduler import CallTurn
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.sandboxed import SandboxedReward
from reward_kit.reward_agent.scoring import Reward, Scored, Scorer, ScoringRequest
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import EvaluationMode, RewardSpec

_MOST_LOSSES = 3  # A call that kills its process would also kill every new process.
_CALLS_AT_A_TIME = 1_000


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """The settings of a process: a sandboxed reward, or a reference to a reward without a sandbox."""

    confined: SandboxedReward | None
    reference: str = ""
    folder: Path = Path()
    options: Mapping[str, Any] = field(default_factory=dict)
    weakened_from: SandboxLevel | None = None
    deadline_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def scorer(self) -> Scorer:
        """Create the scorer for this process, or raise a `ConfigError` if the reward cannot be loaded here."""
        if self.confined is not None:
            return make_scorer(self.confined)
        choice = SandboxChoice(level="in_process")
        loaded = load_reward(self.reference, self.folder, choice, self.options).reward
        assert isinstance(loaded, RewardSpec), "only a RewardSpec runs in_process"
        return make_scorer(replace(loaded, weakened_from=self.weakened_from), self.deadline_s)


class RewardActor(Process):
    """The actor of a process that calls the reward. It accepts many concurrent calls.

    The sandbox limits how many of them run.
    """

    async def prepare(self, driver: str, packed: bytes) -> str:
        """Open the reward of a pickled `RewardSetup`, and return the name of the machine."""
        setup: RewardSetup = unpickle_setup(driver, packed)
        os.environ.update(setup.env)
        self.context.run(CURRENT_PROVIDER_SESSION.set, ProviderSession())
        self._scorer: Any = setup.scorer()
        await self.open(self._scorer)
        return os.uname().nodename

    async def score(self, requests: Sequence[ScoringRequest], in_group: bool) -> list[Scored]:
        """Return the scores of one call, for a rollout or a group."""
        if in_group:
            return await CallTurn(self._scorer.score_group(requests), self.context)
        return [await CallTurn(self._scorer.score(requests[0]), self.context)]

    async def finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        return await CallTurn(self._scorer.finish_group(requests, scored), self.context)


class RayScorer:
    """A `Scorer` that calls the reward in processes on the cluster to which this program is connected.

    If a process is lost, its calls are repeated in a different process. A class with `post_process_scores` has an
    instance in each process, and any of these instances may run `finish_group`.

    Args:
        reward: the reward that `load_reward` returned.
        reference: the reward's reference.
        folder: the directory for a relative path in the reference.
        workers: the number of processes.
        cpus: the number of CPUs that each process reserves.
        deadline_s: the time limit in seconds of a call that does not run in a sandbox. A sandboxed reward has its own
            limits.
        env: environment variables for the processes, such as the key of a judge.
        wait_s: the time in seconds after which calls fail if there is no process.
        connection: the connection to the cluster. It is opened before the processes are started. If None, the program
            must already be connected.

    Attributes:
        rates, retries: the values from a custom reward's class, for the reward agent.

    Raises:
        ConfigError: If the reward limits its rates. Multiple processes cannot share such limits.
    """

    def __init__(
        self,
        reward: Reward,
        reference: str,
        folder: Path | None = None,
        *,
        workers: int = 2,
        cpus: float = 1.0,
        deadline_s: float | None = None,
        env: Mapping[str, str] | None = None,
        wait_s: float = 300.0,
        connection: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        if workers > 1 and (limits := sorted(set(RATES) & reward.options.keys())):
            raise ConfigError(
                f"reward {reward.id!r}: {limits[0]} cannot be shared by {workers} processes; use one process"
            )
        self._reward, folder, env = reward, (folder or Path.cwd()).resolve(), env or {}
        if isinstance(reward, SandboxedReward):
            setup = RewardSetup(reward, env=env)
        else:
            assert isinstance(reward, RewardSpec), "a reward is either sandboxed or a RewardSpec"
            options = dict(reward.options)
            setup = RewardSetup(None, reference, folder, options, reward.weakened_from, deadline_s, env)
        here = make_scorer(
            reward, deadline_s
        )  # This scorer is never opened, but its attributes apply to all processes.
        self.rates, self.retries = getattr(here, "rates", None), getattr(here, "retries", None)
        if hasattr(here, "finish_group"):
            self.finish_group = self._finish_group
        resources = {"num_cpus": cpus, "max_concurrency": _CALLS_AT_A_TIME}
        self._pool = ActorPool("reward worker", lambda: start_actor(RewardActor, setup, resources), workers, wait_s)
        self._connection, self._opened = connection or nullcontext(), AsyncExitStack()

    @property
    def mode(self) -> EvaluationMode:
        return self._reward.mode

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._connection)
            await opened.enter_async_context(self._pool.open())
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    async def score(self, request: ScoringRequest) -> Scored:
        return (await self._call([request], lambda handle, sent: handle.score.remote(sent, False)))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        return await self._call(requests, lambda handle, sent: handle.score.remote(sent, True))

    async def _finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        return await self._call(requests, lambda handle, sent: handle.finish_group.remote(sent, list(scored)))

    async def _call(
        self, requests: Sequence[ScoringRequest], call: Callable[[Any, list[ScoringRequest]], Any]
    ) -> list[Scored]:
        """Return the result of a call. If its process is lost, the call is repeated."""
        wanted, sent = self._reward.parameters, list(requests)
        if wanted is not None and "step_data" not in wanted:  # omit the episode unless a parameter uses it
            sent = [replace(request, episode=None) for request in requests]
        for _ in range(_MOST_LOSSES):
            member = await self._pool.place()
            member.load += 1
            try:
                answer: list[Scored] = await await_result(member, call(member.handle, sent))
                return answer
            except ray_module().exceptions.RayError as error:
                if not is_actor_lost(error):
                    raise ClusterError(f"reward {self._reward.id!r}: {error}") from error
                member.lose()
            finally:
                member.load -= 1
        lost = ClusterError(f"its process was lost {_MOST_LOSSES} times; the call may be the cause")
        return [Scored(one.rollout_id, None, one.failure or Failure.from_exception(lost)) for one in requests]
