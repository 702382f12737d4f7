"""Prove a task before it costs anything: what is known to be right earns a pass, and doing nothing earns nothing.

What is right is, for each sample, its row's `gold_actions` (a list of actions), its `gold_answer` (a text), the policy
that the user names, or what the resource's own expert does; the first of them that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from reward_kit.agent.policies.simple_policies import ExpertPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.checks.reward import Plan, asks_models, check_reward
from reward_kit.checks.reward_bench import LITTLE, Given, RewardReport, quoted
from reward_kit.display_text import counted
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, PolicyError, boundary
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, scorer_of
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest
from reward_kit.runs.tasks import LoadedTask

_NOTHING = "nothing"
_CHECKED_SAMPLES = 4
"""On the ends of so many samples the reward is checked."""
_Right = tuple[str, AgentPolicy]


@dataclass(frozen=True, slots=True)
class End:
    """The end of one episode of a proof.

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
        """The score and its reason, or the reason why it is missing."""
        if self.scored.score is None:
            return f"unscored ({self.scored.failure.message if self.scored.failure else 'no reason'})"
        reason = self.scored.result.reason if self.scored.result is not None else None
        return f"{self.scored.score:.4g}" + (f" ({reason})" if reason else "")


@dataclass(slots=True)
class SampleProof:
    """The proof of one sample.

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
        """Collect the problems."""
        if self.gold is not None:
            score = self.gold.scored.score
            if score is None or score < min(1.0, pass_threshold) - LITTLE:
                steps = len(self.gold.request.assistant_turns)
                end = f"; the episode ended with {self.gold.stop_reason} after {steps} steps"
                self.problems.append(f"what is right ({self.by}) does not score 1: {self.gold.text}{end}")
        if self.nothing is not None and (self.nothing.scored.score is None or self.nothing.scored.score > LITTLE):
            self.problems.append(f"doing nothing does not score 0: {self.nothing.text}")


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The proof of a task's samples, and the check of its reward on their ends."""

    task: LoadedTask
    proofs: Sequence[SampleProof]
    reward: RewardReport

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if a sample has a problem, or the reward a finding of this level or a worse one."""
        has_problems = any(proof.problems for proof in self.proofs)
        return 1 if has_problems and fail_on != "never" else self.reward.exit_code(fail_on)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        samples = [
            {
                "id": proof.sample.id,
                "by": proof.by or None,
                "gold": proof.gold.scored.score if proof.gold else None,
                "nothing": proof.nothing.scored.score if proof.nothing else None,
                "problems": proof.problems,
            }
            for proof in self.proofs
        ]
        return {"task": str(self.task.path), "samples": samples, "reward": self.reward.to_json()}

    def lines(self) -> Iterator[str]:
        """Yield the report for a terminal: the reward first, whose verdict counts its own findings alone."""
        yield from self.reward.lines()
        for proof in self.proofs:
            where = proof.sample.where or proof.sample.id
            yield from (f"error:   {where}: sample {proof.sample.id!r}: {quoted(one, 300)}" for one in proof.problems)
        count = len(self.proofs)
        if unknown := sum(proof.gold is None for proof in self.proofs):
            yield (
                f"not checked: that what is right scores 1, for {unknown} of {count} samples: nobody says what is "
                "right; give rows a gold_answer or gold_actions, the resource an expert_action, or name --gold-policy"
            )
        wrong = sum(len(proof.problems) for proof in self.proofs)
        right = sum(proof.gold is not None and not proof.problems for proof in self.proofs)
        nothing = sum(not any("nothing" in problem for problem in proof.problems) for proof in self.proofs)
        by = ", ".join(sorted({proof.by for proof in self.proofs if proof.by})) or "nobody"
        errors = f"{counted(wrong, 'error')}; " if wrong else ""
        yield (
            f"{self.task.path}: {errors}of {counted(count, 'sample')}, what is right ({by}) scores 1 and nothing "
            f"scores 0 on {right}; nothing scores 0 on {nothing}"
        )


def why_not_free(task: LoadedTask, user: SimulatedUser | None) -> str:
    """Return why proving the task would cost money; "" if it does not."""
    if user is not None and not user.is_free:
        return "its user is a model, which costs money"
    return "its reward asks a model, which costs money" if task.reward and asks_models(task.reward) else ""


async def check_task(
    task: LoadedTask,
    samples: Sequence[Sample],
    user: SimulatedUser | None = None,
    policy: _Right | None = None,
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> TaskReport:
    """Prove a task's samples, and check its reward on the ends of those episodes; see `prove` for the arguments."""
    proofs = await prove(task, samples, user, policy, seed=seed, tell=lambda proof: tell(f"sample {proof.sample.id}"))
    assert task.reward is not None  # else nothing was proved
    definition, first = task.definition, proofs[:_CHECKED_SAMPLES]
    proved = [proof for proof in proofs if proof.gold and proof.nothing and not proof.problems]
    ends = [(one.gold.request, one.nothing.request) for one in proved[:_CHECKED_SAMPLES] if one.gold and one.nothing]
    rollouts = [end.request for one in first for end in (one.gold, one.nothing) if end and not end.request.failure]
    plan = Plan(
        str(definition.reward_function_path),
        SandboxChoice(reward_time_s=definition.limits.reward_time_s),
        task.path.resolve().parent,
        Given(rollouts=rollouts, ends=ends),
        pass_threshold=definition.pass_threshold,
        seed=seed,
    )
    return TaskReport(task, proofs, await check_reward(plan, LoadedReward(task.reward), None, tell))


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
        tell: called with each sample that is done.

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
    """Return a policy that is known to be right, with its name."""
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
    """Return the policy that plays the right actions of a row."""
    actions = given if key == "gold_actions" else [{"type": "text", "content": given}]
    form = "a text" if key == "gold_answer" else "a list of actions"
    if (key == "gold_answer") != isinstance(given, str) or not isinstance(actions, list):
        raise ConfigError(f"{sample.where}: {key} is {form}, not {given!r:.60}")
    try:
        with boundary(PolicyError, key):
            return ScriptedPolicy(actions)
    except PolicyError as error:
        raise ConfigError(f"{sample.where}: {key}: {error}") from error
