"""Where a reward is tried: through the real scorer at its own level, watched, in a warm worker or a fresh one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from reward_kit.errors import ConfigError, Failure
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent.confined import ConfinedReward, ConfinedScorer
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest
from reward_kit.reward_checks.inside import Watch
from reward_kit.sandbox.outcome import Outcome
from reward_kit.typed_interface import RewardSpec

_PLAIN_CALLS = "from reward_kit.reward_agent.inside import ConfinedCalls\n"
_WATCHED_CALLS = "from reward_kit.reward_checks.inside import WatchedCalls as ConfinedCalls\n"
ATTACK_CPU_S = 1.0
"""After so much work a call that is to show no end is ended."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one call.

    Attributes:
        score: None where the rollout is unscored.
        failure: why it is.
        result: what the reward returned.
        wall_s, cpu_s: of the call alone, as the worker counted; 0 where it did not come back.
        peak_mb: MiB that the call held at most, where that was asked for.
        changed: the inputs that it changed, and how.
        events: what it opened, asked for and started, as (kind, what).
    """

    score: float | None
    failure: Failure | None = None
    result: EvaluateResult | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    changed: Mapping[str, str] = field(default_factory=dict)
    events: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The score for people, or why there is none."""
        if self.score is not None:
            return f"{self.score:.4g}"
        return f"unscored ({self.failure.message if self.failure else 'no reason'})"


class Bench:
    """Calls one reward and tells what it was seen to do. Use it as an async context manager; one call at a time.

    Args:
        reward: as `levels.load_reward` gives it.
        deadline_s: of one call, where the reward runs in this process; a confined one has its own.
    """

    def __init__(self, reward: Reward, deadline_s: float | None = None) -> None:
        self.reward = reward
        self._here: _WatchedHere | None = None
        self._apart: _WatchedApart | None = None
        if isinstance(reward, RewardSpec):
            self._here = _WatchedHere(reward, deadline_s)
        elif not isinstance(reward, ConfinedReward):
            raise ConfigError(f"reward {reward.id!r} runs behind HTTP, and cannot be watched here: check it there")
        else:
            self._apart = _WatchedApart(reward)

    async def __aenter__(self) -> Self:
        await (self._here or self._scorer_apart).__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self._here or self._scorer_apart).__aexit__(kind, error, trace)

    @property
    def level(self) -> str:
        """Where the reward runs."""
        return self.reward.level if isinstance(self.reward, ConfinedReward) else "in_process"

    @property
    def is_confined(self) -> bool:
        """It runs in a worker, of which there can be a fresh one, and which can be ended."""
        return self._apart is not None

    @property
    def parameters(self) -> frozenset[str] | None:
        """The names that the reward takes; None where it takes any."""
        return self.reward.parameters

    def takes(self, name: str) -> bool:
        """Whether the reward asks for a value of the rollout by name."""
        return self.parameters is not None and name in self.parameters

    async def see(self, request: ScoringRequest, *, worker: int = 0, memory: bool = False) -> Seen:
        """One call in the worker that goes on.

        Args:
            request: the rollout.
            worker: which of several, each with an interpreter of its own; in this process there is only one.
            memory: count its memory, which makes the call slower.
        """
        if self._here is not None:
            return await self._here.see(request, memory=memory)
        return await self._scorer_apart.see(request, worker=worker, memory=memory)

    async def see_fresh(self, request: ScoringRequest) -> Seen:
        """One call in a worker that nothing was called in before; only where `is_confined`."""
        return await self._scorer_apart.see(request, is_fresh=True)

    async def attack(self, request: ScoringRequest) -> Seen:
        """One call in a fresh worker that is ended after a second of work; only where `is_confined`."""
        return await self._scorer_apart.see(request, is_fresh=True, cpu_s=ATTACK_CPU_S)

    @property
    def _scorer_apart(self) -> _WatchedApart:
        if self._apart is None:
            raise ConfigError("a reward that runs in this process has no worker of its own")
        return self._apart


class _WatchedHere(InProcessScorer):
    """Scores in this process."""

    def __init__(self, spec: RewardSpec, deadline_s: float | None) -> None:
        self._watch = Watch()
        super().__init__(self._watch.of(spec), deadline_s)

    async def see(self, request: ScoringRequest, *, memory: bool) -> Seen:
        self._watch.told, self._watch.wants_memory = None, memory
        scored = await self.score(request)
        return _seen(scored, self._watch.told)


class _WatchedApart(ConfinedScorer):
    """Scores behind the reward's walls, in the worker that is asked for."""

    def __init__(self, reward: ConfinedReward) -> None:
        source = reward.program.source
        if _PLAIN_CALLS not in source:
            raise ConfigError(f"reward {reward.id!r}: its program cannot be watched")
        watched = replace(reward.program, source=source.replace(_PLAIN_CALLS, _WATCHED_CALLS, 1))
        watched = replace(watched, imports=(*watched.imports, "reward_kit.reward_checks.inside"))
        super().__init__(replace(reward, program=watched), slots=2)
        self._base = self._reward
        self._look: dict[str, bool] = {}
        self._seen_there: Any = None

    async def see(
        self,
        request: ScoringRequest,
        *,
        worker: int = 0,
        is_fresh: bool = False,
        memory: bool = False,
        cpu_s: float | None = None,
    ) -> Seen:
        limits = self._base.limits
        if cpu_s is not None:
            limits = replace(limits, cpu_s=min(cpu_s, limits.cpu_s))
        # A worker is found by its limits too, so that a slightly longer one has a worker of its own.
        limits = replace(limits, wall_s=limits.wall_s + worker / 1024)
        self._reward = replace(self._base, limits=limits, level="isolated" if is_fresh else self._base.level)
        self._look, self._seen_there = {"memory": memory, "inputs": not memory and cpu_s is None}, None
        return _seen(await self.score(request), self._seen_there)

    def _request(self, requests: Sequence[ScoringRequest]) -> dict[str, Any]:
        return {**super()._request(requests), "watch": self._look}

    async def _call(self, request: Mapping[str, Any]) -> Outcome:
        outcome = await super()._call(request)
        if not isinstance(outcome.value, dict):
            return outcome
        self._seen_there = outcome.value.get("watched")
        return replace(outcome, value={name: item for name, item in outcome.value.items() if name != "watched"})


def _seen(scored: Scored, told: Any) -> Seen:
    """What is known of a call; what the worker told is taken for what it is, a stranger's word."""
    told = told if isinstance(told, dict) else {}
    numbers = {name: _number(told.get(name)) for name in ("wall_s", "cpu_s", "peak_mb")}
    changed = told.get("changed")
    events = told.get("events")
    return Seen(
        scored.score,
        scored.failure,
        scored.result,
        **numbers,
        changed={str(k): str(v)[:300] for k, v in changed.items()} if isinstance(changed, dict) else {},
        events=tuple((str(e[0]), str(e[1])[:300]) for e in events if isinstance(e, list | tuple) and len(e) == 2)
        if isinstance(events, list)
        else (),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
