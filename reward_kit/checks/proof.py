"""A task proved before it costs anything: what is known to be right earns a pass, and doing nothing earns nothing.

What is right is, for each sample, its row's `gold_actions` (a list of actions), its `gold_answer` (a text), the policy
that the user names, or what the resource's own expert does; the first of them that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from reward_kit.agent.policies.simple_policies import ExpertPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, PolicyError, boundary
from reward_kit.reward_agent.levels import scorer_of
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.runs.tasks import LoadedTask

LITTLE = 1e-6
_NOTHING = "nothing"
_Right = tuple[str, AgentPolicy]


@dataclass(frozen=True, slots=True)
class End:
    """How one episode of a proof ended.

    Attributes:
        request: the episode as the reward saw it.
        scored: what it got.
        stop_reason: why it ended.
    """

    request: ScoringRequest
    scored: Scored
    stop_reason: str

    @property
    def text(self) -> str:
        """The score and its reason, or why there is none."""
        if self.scored.score is None:
            return f"unscored ({self.scored.failure.message if self.scored.failure else 'no reason'})"
        reason = self.scored.result.reason if self.scored.result is not None else None
        return f"{self.scored.score:.4g}" + (f" ({reason})" if reason else "")


@dataclass(slots=True)
class SampleProof:
    """What is proved of one sample.

    Attributes:
        sample: the sample.
        by: what was taken for right: "gold_actions", "gold_answer", a policy's name, "expert"; "" where nothing is.
        gold: how it ended; None where nothing is known to be right.
        nothing: how doing nothing ended.
        problems: what is not as it should be.
    """

    sample: Sample
    by: str = ""
    gold: End | None = None
    nothing: End | None = None
    problems: list[str] = field(default_factory=list)

    def judge(self, pass_threshold: float) -> None:
        """Note what is not as it should be."""
        if self.gold is not None:
            score = self.gold.scored.score
            if score is None or score < min(1.0, pass_threshold) - LITTLE:
                steps = len(self.gold.request.assistant_turns)
                end = f"; the episode ended with {self.gold.stop_reason} after {steps} steps"
                self.problems.append(f"what is right ({self.by}) does not score 1: {self.gold.text}{end}")
        if self.nothing is not None and (self.nothing.scored.score is None or self.nothing.scored.score > LITTLE):
            self.problems.append(f"doing nothing does not score 0: {self.nothing.text}")


async def prove(
    task: LoadedTask,
    samples: Sequence[Sample],
    user: SimulatedUser | None = None,
    policy: _Right | None = None,
    *,
    seed: int = 0,
    max_concurrency: int = 8,
    tell: Callable[[SampleProof], None] = lambda _: None,
) -> list[SampleProof]:
    """Run and score, for each sample, what is right and nothing.

    Args:
        task: with a reward.
        samples: those to prove.
        user: the task's simulated user; one that costs money is not asked.
        policy: what is right where a sample does not say, with its name; the expert of the resource by default.
        seed: of the episodes.
        max_concurrency: samples in flight.
        tell: told of each sample that is done.

    Raises:
        ConfigError: the task has no reward, or its user costs money.
    """
    if task.reward is None:
        raise ConfigError(f"{task.path}: the task names no reward, so there is nothing to prove")
    if user is not None and not user.is_free:
        raise ConfigError(f"{task.path}: its user is a model, which costs money")
    rights = [_right(task, sample, policy) for sample in samples]
    proofs = [SampleProof(sample, right[0] if right else "") for sample, right in zip(samples, rights, strict=True)]
    limiter = anyio.CapacityLimiter(max_concurrency)
    async with ServerPool(), scorer_of(task.reward, task.definition.limits.reward_time_s) as scorer:
        prover = _Prover(task, scorer, user, seed)

        async def prove_one(proof: SampleProof, right: _Right | None) -> None:
            async with limiter:
                proof.nothing = await prover.end(proof.sample, (_NOTHING, ScriptedPolicy([])))
                proof.gold = await prover.end(proof.sample, right) if right is not None else None
            proof.judge(task.definition.pass_threshold)
            tell(proof)

        async with anyio.create_task_group() as tasks:
            for proof, right in zip(proofs, rights, strict=True):
                tasks.start_soon(prove_one, proof, right)
    return proofs


@dataclass(frozen=True, slots=True)
class _Prover:
    task: LoadedTask
    scorer: Scorer
    user: SimulatedUser | None
    seed: int

    async def end(self, sample: Sample, right: _Right) -> End:
        label, policy = right
        definition = self.task.definition
        worker = RLRolloutWorker(definition, policy, tools=self.task.tools, user=self.user, policy_label=label)
        async with worker.group(sample, self.seed) as group:
            episode = await worker.collect_episode(group)
        request = ScoringRequest.of(episode, definition)
        return End(request, await self.scorer.score(request), str(episode.custom_data.get("stop_reason")))


def _right(task: LoadedTask, sample: Sample, policy: _Right | None) -> _Right | None:
    """What is known to be right, with its name."""
    for key in ("gold_actions", "gold_answer"):
        if (given := sample.row.get(key)) is not None:
            return key, _scripted(key, given, sample)
    if policy is not None:
        return policy
    kind = task.definition.resource_type
    if kind is None or resource_class(kind).expert_action is ForkableResource.expert_action:
        return None
    return "expert", ExpertPolicy()


def _scripted(key: str, given: Any, sample: Sample) -> AgentPolicy:
    """The policy that does what a row says is right."""
    actions = given if key == "gold_actions" else [{"type": "text", "content": given}]
    form = "a text" if key == "gold_answer" else "a list of actions"
    if (key == "gold_answer") != isinstance(given, str) or not isinstance(actions, list):
        raise ConfigError(f"{sample.where}: {key} is {form}, not {given!r:.60}")
    try:
        with boundary(PolicyError, key):
            return ScriptedPolicy(actions)
    except PolicyError as error:
        raise ConfigError(f"{sample.where}: {key}: {error}") from error
