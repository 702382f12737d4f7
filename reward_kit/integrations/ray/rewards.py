"""Rewards in processes of a cluster: `RayScorer` is a `Scorer` whose calls go to actors, each with its own sandbox.

The walls are those that the reward has in this process: the level is decided here, once, as for any other reward. A
confined reward is sent as the text that it is, so its files need not be on the nodes; one that runs `in_process` is
loaded there again, from the same path.
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
from reward_kit.integrations.ray.actor_pool import ActorPool, actor_started, answer_of, is_loss
from reward_kit.integrations.ray.actors import Process, unpacked
from reward_kit.integrations.ray.cluster import ClusterError, ray_module
from reward_kit.integrations.ray.task_workers import RATES
from reward_kit.providers.session import CURRENT_PROVIDER_SESSION, ProviderSession
from reward_kit.reward_agent.calling import Turn
from reward_kit.reward_agent.confined import ConfinedReward
from reward_kit.reward_agent.levels import SandboxChoice, load_reward, scorer_of
from reward_kit.reward_agent.scoring import Reward, Scored, Scorer, ScoringRequest
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import Mode, RewardSpec

_MOST_LOSSES = 3  # a call that takes its process with it would do so for ever
_CALLS_AT_A_TIME = 1_000
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class RewardSetup:
    """What a process is told before its first call.

    Attributes:
        confined: the reward, where it runs behind walls.
        reference, folder, options: where it is else, and how it is called.
        weakened_from: the level that it was to have, where the driver's machine has no walls.
        deadline_s: for one call of one without walls.
        env: environment variables, secrets among them.
    """

    confined: ConfinedReward | None
    reference: str = ""
    folder: Path = Path()
    options: Mapping[str, Any] = field(default_factory=dict)
    weakened_from: SandboxLevel | None = None
    deadline_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def scorer(self) -> Scorer:
        """Where the reward is called in this process.

        Raises:
            ConfigError: it is not here, or cannot be loaded.
        """
        if self.confined is not None:
            return scorer_of(self.confined)
        choice = SandboxChoice(level="in_process")
        loaded = load_reward(self.reference, self.folder, choice, self.options).reward
        assert isinstance(loaded, RewardSpec), "nothing else runs in_process"
        return scorer_of(replace(loaded, weakened_from=self.weakened_from), self.deadline_s)


class RewardActor(Process):
    """The process. Calls come many at a time; a sandbox has a bound of its own."""

    async def prepare(self, driver: str, packed: bytes) -> str:
        """Open the reward; the name of the machine.

        Args:
            driver: the version of this package where the agent is.
            packed: a `RewardSetup`, pickled.

        Raises:
            ConfigError: the reward cannot be loaded, or not be confined here.
        """
        setup: RewardSetup = unpacked(driver, packed)
        os.environ.update(setup.env)
        self.context.run(CURRENT_PROVIDER_SESSION.set, ProviderSession())
        self._scorer: Any = setup.scorer()
        await self.open(self._scorer)
        return os.uname().nodename

    async def score(self, requests: Sequence[ScoringRequest], in_group: bool) -> list[Scored]:
        """The scores of one call: of one rollout, or of the rollouts of a group."""
        if in_group:
            return await Turn(self._scorer.score_group(requests), self.context)
        return [await Turn(self._scorer.score(requests[0]), self.context)]

    async def finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        """As the scorer's."""
        return await Turn(self._scorer.finish_group(requests, scored), self.context)


class RayScorer:
    """A `Scorer` whose calls are made in processes of the cluster that this program is connected to.

    A process that is lost costs its calls, which are made again in another one. What is `finish_group` of a class with
    `post_process_scores` is asked of any of them: each has an object of its own.

    Args:
        reward: as `load_reward` gave it.
        reference: what it was loaded from.
        folder: to which that is relative.
        workers: processes.
        cpus: CPUs that each of them reserves.
        deadline_s: for one call of a reward without walls; a confined one has its own.
        env: environment variables that they get, such as the key of a judge.
        wait_s: seconds without any process after which calls fail.
        connection: to the cluster, opened before anything else; by default the program is connected already.

    Attributes:
        rates, retries: as the class of a custom reward says; the reward agent keeps to them.

    Raises:
        ConfigError: the reward limits its rates, which several processes cannot share.
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
        wait_s: float = _WAIT_S,
        connection: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers is at least 1, got {workers}")
        if workers > 1 and (limits := sorted(set(RATES) & reward.options.keys())):
            raise ConfigError(f"reward {reward.id!r}: {limits[0]} cannot be shared by {workers} processes; give it one")
        self._reward, self._resources = reward, {"num_cpus": cpus, "max_concurrency": _CALLS_AT_A_TIME}
        self._setup = _setup_of(reward, reference, folder or Path.cwd(), deadline_s, env or {})
        here = scorer_of(reward, deadline_s)  # never opened: what it says of itself holds for all of them
        self.rates, self.retries = getattr(here, "rates", None), getattr(here, "retries", None)
        if hasattr(here, "finish_group"):
            self.finish_group = self._finish_group
        self._pool = ActorPool("reward worker", self._start, workers, wait_s)
        self._connection, self._opened = connection or nullcontext(), AsyncExitStack()

    @property
    def mode(self) -> Mode:
        """As `Scorer`."""
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
        """As `Scorer`."""
        return (await self._called([request], lambda handle, sent: handle.score.remote(sent, False)))[0]

    async def score_group(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """As `Scorer`."""
        return await self._called(requests, lambda handle, sent: handle.score.remote(sent, True))

    async def _finish_group(self, requests: Sequence[ScoringRequest], scored: Sequence[Scored]) -> list[Scored]:
        return await self._called(requests, lambda handle, sent: handle.finish_group.remote(sent, list(scored)))

    async def _start(self) -> Any:
        return await actor_started(RewardActor, self._setup, self._resources)

    async def _called(
        self, requests: Sequence[ScoringRequest], call: Callable[[Any, list[ScoringRequest]], Any]
    ) -> list[Scored]:
        """What one call gives, made again where its process is lost."""
        sent = [self._as_sent(request) for request in requests]
        for _ in range(_MOST_LOSSES):
            member = await self._pool.place()
            member.load += 1
            try:
                answer: list[Scored] = await answer_of(member, call(member.handle, sent))
                return answer
            except ray_module().exceptions.RayError as error:
                if not is_loss(error):
                    raise ClusterError(f"reward {self._reward.id!r}: {error}") from error
                member.lose()
            finally:
                member.load -= 1
        lost = ClusterError(f"its process was lost {_MOST_LOSSES} times, of which it may be the cause")
        return [Scored(one.rollout_id, None, one.failure or Failure.from_exception(lost)) for one in requests]

    def _as_sent(self, request: ScoringRequest) -> ScoringRequest:
        """Without the episode where no parameter of the reward shows anything of it."""
        wanted = self._reward.parameters
        return request if wanted is None or "step_data" in wanted else replace(request, episode=None)


def _setup_of(
    reward: Reward, reference: str, folder: Path, deadline_s: float | None, env: Mapping[str, str]
) -> RewardSetup:
    if isinstance(reward, ConfinedReward):
        return RewardSetup(reward, env=env)
    assert isinstance(reward, RewardSpec), "there are these two kinds"
    options = dict(reward.options)
    return RewardSetup(None, reference, folder.resolve(), options, reward.weakened_from, deadline_s, env)
