"""Check a reward with all probes, and validate a task's samples with reference solutions.

A sample is valid if its reference solution scores 1 and an agent that does nothing scores 0. The second condition does
not apply if doing nothing is correct, that is, if `gold_actions` is an empty list. The reference solution is the first
of the following that is available: `gold_actions` (a list of actions) or `gold_answer` (a string) in the sample's row,
the policy that the user specified, or the resource's expert.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

from reward_kit.agent.policies.simple_policies import ExpertPolicy, ScriptedPolicy
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.agent.rl_rollout_worker import RLRolloutWorker
from reward_kit.agent.samples import Sample
from reward_kit.agent.simulated_user import SimulatedUser
from reward_kit.agreement import cohens_kappa, pearson, spearman
from reward_kit.blocking import run_blocking
from reward_kit.checks import code_exploits, reward_behavior, reward_exploits
from reward_kit.checks.findings import Finding
from reward_kit.checks.reward_bench import (
    LITTLE,
    Bench,
    CheckContext,
    Given,
    Probe,
    RewardReport,
    bench_for,
    build_questions,
    evidence,
    learned,
    quoted,
    takes_truth,
)
from reward_kit.checks.reward_cases import FORMS, clearly_different, truth_text
from reward_kit.checks.source_facts import SourceFacts, kind_in, read_facts, starts_programs
from reward_kit.display_text import pluralize
from reward_kit.environments.base import ForkableResource
from reward_kit.environments.config import resource_class
from reward_kit.environments.servers import ServerPool
from reward_kit.errors import ConfigError, PolicyError, RewardKitError, boundary
from reward_kit.loading import split_reference
from reward_kit.reward_agent.loading import LoadedReward, SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.named_rewards import NamedRewards, each_call, each_reward
from reward_kit.reward_agent.remote import is_address
from reward_kit.reward_agent.scoring import Reward, Scored, ScoringRequest, check_parameters
from reward_kit.reward_agent.sources import find_module, read_source
from reward_kit.runs.tasks import LoadedTask
from reward_kit.sandbox.host import best_strength
from reward_kit.typed_interface import RewardSpec

PROBES: tuple[tuple[str, Probe, bool], ...] = (
    ("reproducible scores", reward_behavior.steady, False),
    ("correct and wrong answers", reward_exploits.right_and_wrong, True),
    ("odd rollouts", reward_behavior.odd, False),
    ("missing ground truths", reward_behavior.missing_truth, True),
    ("other ways to write an answer", reward_exploits.equal_answers, True),
    ("text around an answer", reward_exploits.text_around, True),
    ("exploits without the ground truth", reward_exploits.without_truth, True),
    ("exploits with the ground truth", reward_exploits.with_truth, True),
    ("code in answers", reward_behavior.runs_answers, False),
    ("programs that do not solve the task", code_exploits.code_answers, False),
    ("time and memory", reward_behavior.cost, False),
    ("growth of time with length", reward_behavior.growth, False),
    ("regular expressions", reward_behavior.patterns, False),
    ("the same score after all other calls", reward_behavior.still, False),
    ("the range of scores", reward_exploits.scores, False),
    ("files, network and programs", reward_behavior.reads, False),
    ("changed inputs", reward_behavior.changes_inputs, False),
)
"""The name and the function of each probe, and True if the probe requires reproducible scores."""
_NOISE = ("nondeterministic", "hidden-state")
_NOT_COMPARED = "repeated scores of the same rollout differ, so scores cannot be compared"
_WORST = 5
_MOST_PROGRAMS = 8
_CHECKED_SAMPLES = 4
"""The maximum number of samples of a task that are used to check its reward."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The reward to check, with the options and examples that the user provided."""

    reference: str  # `file.py:function` or `package.module:function`
    choice: SandboxChoice = field(default_factory=lambda: SandboxChoice(reward_time_s=10.0))
    folder: Path | None = None  # Base of relative file paths
    given: Given = field(default_factory=Given)  # Ground truths, correct answers and transcripts
    options: Mapping[str, Any] = field(default_factory=dict)  # Fixed options of the reward
    against: str | None = None  # A second reward for comparison
    pass_threshold: float = 1.0
    seed: int = 0


def load(plan: Plan) -> tuple[LoadedReward, LoadedReward | None]:
    """Load the reward and, if there is one, the reward to compare it with. Do not call this in an event loop."""
    loaded = load_reward(plan.reference, plan.folder, _with_processes(plan), plan.options)
    reward, given = loaded.reward, plan.given
    check_parameters(reward)
    has_ends = bool(given.ends) or any(rollout.final_state is not None for rollout in given.rollouts)
    if "state" in (reward.parameters or ()) and not has_ends:
        raise ConfigError(
            f"reward {reward.id!r} scores the final state of a resource, and only episodes have a final state; "
            "check the task "
            "file (reward-kit check task.yaml), or pass the episodes of a run (--data runs/…/episodes.jsonl)"
        )
    if given.golds and not given.truths and reward.parameters is not None and takes_truth(reward.parameters):
        raise ConfigError(
            f"reward {reward.id!r} requires a ground_truth; pass one --ground-truth JSON for each --gold TEXT"
        )
    other = load_reward(plan.against, plan.folder, plan.choice) if plan.against else None
    for one in (loaded, other):
        if one is not None and asks_models(one.reward):
            raise ConfigError(
                f"reward {one.reward.id!r} calls a model, which costs money, and a check makes a few hundred calls; "
                "measure its agreement with human labels instead (reward-kit calibrate)"
            )
    return loaded, other


def _with_processes(plan: Plan) -> SandboxChoice:
    """Return the sandbox settings of a reward. If its file starts programs, allow that where the sandbox can."""
    location, _ = split_reference(plan.reference)
    file = (plan.folder or Path.cwd()) / location if location.endswith(".py") else find_module(location)
    if plan.choice.limits or plan.choice.level == "in_process" or file is None or not file.is_file():
        return plan.choice
    if location.startswith("reward_kit.") or not starts_programs(read_source(file)):
        return plan.choice
    try:
        is_able = run_blocking(best_strength("auto")) == "namespaces"
    except ConfigError:
        is_able = False
    limits = {"processes": _MOST_PROGRAMS, "open_files": 128}
    return replace(plan.choice, limits=limits) if is_able else plan.choice


def asks_models(reward: Reward) -> bool:
    """Return True if a reward calls models. Sandboxed rewards cannot call models."""
    specs = (one for one in each_call(reward) if isinstance(one, RewardSpec))
    return any(getattr(resource, "asks_models", False) for spec in specs for resource in spec.resources.values())


def is_reward(target: str) -> bool:
    """Return True if a target refers to a reward. The file of the target is parsed but not executed."""
    if ":" not in target:
        return False
    if is_address(target):
        raise ConfigError(f"{target} is served over HTTP; check FILE.py:FUNCTION on its server")
    location, name = split_reference(target)
    if location.startswith("reward_kit.rewards"):
        return True
    file = Path(location) if location.endswith(".py") else find_module(location)
    if file is None or not file.is_file():
        return False
    kind = kind_in(read_source(file), name)
    return kind == "reward" or (kind == "" and location.endswith(".py"))


async def check_reward(
    plan: Plan, loaded: LoadedReward, other: LoadedReward | None = None, tell: Callable[[str], None] = lambda _: None
) -> RewardReport:
    """Run all probes on a reward.

    Args:
        plan: the reward to check, and the options and examples that the user provided.
        loaded: the reward, as returned by `load`.
        other: the reward to compare it with, as returned by `load`, or None.
        tell: a function that is called with the name of each probe before the probe runs.
    """
    source, origin, limit_s = SourceFacts(), loaded.reward.origin, plan.choice.reward_time_s
    if origin is not None:
        source = read_facts(read_source(origin.file), origin.qualname or plan.reference.rpartition(":")[2])
    async with bench_for(loaded.reward, limit_s) as bench:
        report = RewardReport(plan.reference, level=bench.level, seed=plan.seed)
        chance = random.Random(plan.seed)
        tell("expected answer form")
        needs_truth = takes_truth(loaded.reward.parameters)
        questions = await learned(plan.given, source.ground_truth, bench, chance, takes_truth=needs_truth)
        if not questions:
            # The check must not pass if nothing was checked. The form of ground truths is unknown, or nothing is
            # scored.
            (first, *_) = build_questions(Given(), source.ground_truth, takes_truth=True)
            seen = await bench.see(first.answered("The answer is 42."))
            text = (
                "the reward scored no rollout that has a generated ground truth, because the expected format of ground "
                "truths is unknown; pass --ground-truth JSON"
            )
            report.note("never-scores", "error", text, [evidence(f"ground truth {truth_text(first.truth)!r}", seen)])
            report.cannot(
                "everything else", "a ground truth in the expected format is required; pass --ground-truth JSON"
            )
            return report
        context = CheckContext(bench, report, source, chance, questions, plan.given.rollouts)
        compared: dict[str, list[Finding]] = {}
        for name, probe, is_comparing in PROBES:
            if is_comparing and any(map(report.has, _NOISE)):
                report.cannot(name, _NOT_COMPARED)
                continue
            tell(name)
            before = len(report.findings)
            await probe(context)
            if is_comparing:
                compared[name] = report.findings[before:]
        if any(map(report.has, _NOISE)):  # State that is kept between calls may have a late effect
            for name, findings in compared.items():
                report.drop(findings)
                report.cannot(name, _NOT_COMPARED)
        if other is not None and plan.against is not None:
            tell("the other reward")
            async with bench_for(other.reward, limit_s) as beside:
                await _compare(context, beside, plan.against, plan.pass_threshold)
    return report


async def _compare(context: CheckContext, other: Bench, name: str, threshold: float) -> None:
    """Compare the scores of two rewards on the user's rollouts.

    If there are only a few of them, generated rollouts are used as well.
    """
    pairs, unscored = [], 0
    requests = [*context.rollouts, *(question.gold for question in context.questions if question.gold is not None)]
    for question in context.questions if len(context.rollouts) < 20 else ():
        requests += [question.answered(text) for text in clearly_different()]
        requests += [question.answered(question.written(value)) for value in question.wrong]
        if question.truth is not None:
            text = truth_text(question.truth)
            requests += [question.answered(form.write(one)) for form in FORMS for one in (text, text.lower())]
    for request in requests:
        left, right = (await context.bench.see(request)).score, (await other.see(request)).score
        if left is None or right is None:
            unscored += 1
        else:
            pairs.append((left, right, request))
    if len(pairs) < 2:
        context.report.cannot(f"agreement with {name}", f"only {len(pairs)} rollouts were scored by both rewards")
        return
    lefts, rights = np.array([left for left, _, _ in pairs]), np.array([right for _, right, _ in pairs])
    figures = {
        "pearson": pearson(lefts, rights),
        "spearman": spearman(lefts, rights),
        "kappa": cohens_kappa((lefts >= threshold).astype(int), (rights >= threshold).astype(int), 2),
        "mean difference": float(lefts.mean() - rights.mean()),
    }
    context.report.facts[f"agreement with {name}"] = {
        "rollouts": len(pairs),
        "unscored by one of them": unscored,
        **{key: None if math.isnan(value) else round(value, 4) for key, value in figures.items()},
    }
    lines = []
    for left, right, request in sorted(pairs, key=lambda pair: -abs(pair[0] - pair[1]))[:_WORST]:
        if left != right:
            text = f'"{quoted(request.messages[-1].text, 70)}"' if request.messages else "no messages"
            lines.append(f"{left:.4g} vs. {right:.4g}: {text}")
    text = f"some scores differ from the scores of {name}; the largest differences in {len(pairs)} rollouts are:"
    context.report.note("disagrees", "info", text, lines, most=_WORST)


_Right = tuple[str, AgentPolicy]
"""A reference solution, as the name of a policy and the policy."""


class End(NamedTuple):
    """The scoring request at the end of an episode, its score and the stop reason."""

    request: ScoringRequest
    scored: Scored
    stop_reason: str

    @property
    def text(self) -> str:
        """The score and its reason, or the reason why the episode is unscored."""
        if self.scored.score is None:
            return f"unscored ({self.scored.failure.message if self.scored.failure else 'no reason'})"
        reason = self.scored.result.reason if self.scored.result is not None else None
        return f"{self.scored.score:.4g}" + (f" ({reason})" if reason else "")


@dataclass(slots=True)
class SampleProof:
    """The validation of one sample, and the ends of its two episodes."""

    sample: Sample
    by: str = ""  # "gold_actions", "gold_answer", the name of a policy, "expert"; "" without a reference solution
    gold: End | None = None  # The end of the reference solution's episode, if there is one
    nothing: End | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """True if the reference solution is to do nothing."""
        return self.by == "gold_actions" and not self.sample.row["gold_actions"]

    def judge(self, pass_threshold: float) -> None:
        if self.gold is not None:
            score = self.gold.scored.score
            if score is None or score < min(1.0, pass_threshold) - LITTLE:
                steps = len(self.gold.request.assistant_turns)
                end = f"; the episode ended with {self.gold.stop_reason} after {steps} steps"
                self.problems.append(f"the reference solution ({self.by}) does not score 1: {self.gold.text}{end}")
        if self.nothing is None or self.is_idle:
            return
        score = self.nothing.scored.score
        if score is None or score > LITTLE:
            hint = "" if score is None else "; if it is right to do nothing, set gold_actions: [] in the row"
            self.problems.append(f"doing nothing does not score 0: {self.nothing.text}{hint}")


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The validation of a task's samples, and the report on its reward."""

    task: LoadedTask
    proofs: Sequence[SampleProof]
    rewards: Mapping[str, RewardReport]  # by name; a single reward has the name ""
    skipped: Sequence[str] = ()  # names of rewards that call a model

    def exit_code(self, fail_on: str) -> int:
        """Return 1 if a sample has a problem or a reward has a finding at or above the level `fail_on`, otherwise 0."""
        has_problems = any(proof.problems for proof in self.proofs)
        codes = (report.exit_code(fail_on) for report in self.rewards.values())
        return 1 if has_problems and fail_on != "never" else max(codes, default=0)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable data."""
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
        reports = {name: report.to_json() for name, report in self.rewards.items()}
        reward = reports.pop("", None)  # None if the task has named rewards
        skipped = {"skipped": list(self.skipped)} if self.skipped else {}
        return {"task": str(self.task.path), "samples": samples, "reward": reward, "rewards": reports, **skipped}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for a terminal: first the rewards, then the samples."""
        for name, report in self.rewards.items():
            yield from (f"{name}: {line}" if name else line for line in report.lines())
        alike: dict[str, list[tuple[Sample, str]]] = {}  # problems that differ only in their numbers
        for proof in self.proofs:
            for problem in proof.problems:
                alike.setdefault(re.sub(r"\d+", "#", problem), []).append((proof.sample, problem))
        for found in alike.values():
            sample, problem = found[0]
            others = f" (and {pluralize(len(found) - 1, 'other sample')})" if len(found) > 1 else ""
            yield f"error:   {sample.where or sample.id}: sample {sample.id!r}: {quoted(problem, 300)}{others}"
        for name in self.skipped:
            yield f"not checked: reward {name!r}, which calls a model and costs money; the scores do not include it"
        count = len(self.proofs)
        if unknown := sum(proof.gold is None for proof in self.proofs):
            yield (
                f"not checked: whether the reference solution scores 1, because {unknown} of {count} samples "
                "have none; "
                "add gold_answer or gold_actions to the rows, define expert_action in the resource, or pass "
                "--gold-policy"
            )
        wrong = sum(len(proof.problems) for proof in self.proofs)
        acting = [proof for proof in self.proofs if not proof.is_idle]
        solved = sum(
            proof.gold is not None and not any("reference" in problem for problem in proof.problems) for proof in acting
        )
        nothing = sum(not any("nothing" in problem for problem in proof.problems) for proof in acting)
        idle = sum(proof.is_idle and not proof.problems for proof in self.proofs)
        is_right = f"; doing nothing is right and scores 1 on {idle}" if len(acting) < count else ""
        by = ", ".join(sorted({proof.by for proof in self.proofs if proof.by}))
        errors = f"{pluralize(wrong, 'error')}; " if wrong else ""
        total = len(self.task.samples)
        checked = pluralize(count, "sample") if count == total else f"{count} of {total} samples (--limit)"
        reference = f"the reference solution ({by}) scores 1 on {solved}" if by else "no reference solution"
        yield (f"{self.task.path}: {errors}{checked}; {reference}; doing nothing scores 0 on {nothing}{is_right}")


def why_not_free(task: LoadedTask, user: SimulatedUser | None) -> str:
    """Return the reason why validating the task would cost money, or "" if it would not."""
    if user is not None and not user.is_free:
        return "its simulated user is a model, and calls to it cost money"
    is_free = task.reward is None or _without_judges(task.reward) is not None
    return "" if is_free else "its reward calls a model, and these calls cost money"


def _without_judges(reward: Reward) -> Reward | None:
    """Return the reward without the named rewards that call models.

    If no reward with a weight is left, return None.
    """
    if not asks_models(reward):
        return reward
    if not isinstance(reward, NamedRewards):
        return None
    parts = {name: part for name, part in reward.parts.items() if not asks_models(part.reward)}
    return NamedRewards(parts) if any(part.weight for part in parts.values()) else None


async def check_task(
    task: LoadedTask,
    samples: Sequence[Sample],
    user: SimulatedUser | None = None,
    policy: _Right | None = None,
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> TaskReport:
    """Validate a task's samples, and check its reward on their episodes.

    The arguments are those of `prove`, except for `tell`, which is called with a description of each step. If the task
    has multiple rewards, the rewards that call a model are skipped.
    """
    skipped: list[str] = []
    if task.reward is not None and (free := _without_judges(task.reward)) is not None:
        skipped = [name for name in each_reward(task.reward) if name not in each_reward(free)]
        task = replace(task, reward=free)
    proofs = await prove(task, samples, user, policy, seed=seed, tell=lambda proof: tell(f"sample {proof.sample.id}"))
    assert task.reward is not None  # `prove` raises without a reward
    definition, first = task.definition, proofs[:_CHECKED_SAMPLES]
    proven = [one for one in proofs if not one.problems and not one.is_idle]
    ends = [(one.gold.request, one.nothing.request) for one in proven if one.gold and one.nothing]
    rollouts = [end.request for one in first for end in (one.gold, one.nothing) if end and not end.request.failure]
    paths = {entry.name: entry.reward_function_path for entry in definition.rewards or ()}
    reports = {}
    for name, reward in each_reward(task.reward).items():
        plan = Plan(
            paths.get(name, str(definition.reward_function_path)),
            SandboxChoice(reward_time_s=definition.limits.reward_time_s),
            task.path.resolve().parent,
            Given(rollouts=rollouts, ends=ends[:_CHECKED_SAMPLES]),
            pass_threshold=definition.pass_threshold,
            seed=seed,
        )
        reports[name] = await check_reward(plan, LoadedReward(reward), None, tell)
    return TaskReport(task, proofs, reports, skipped)


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
    """Run and score the reference solution and a do-nothing agent for each sample.

    Args:
        task: the task. It must have a reward.
        samples: the samples to validate.
        user: the task's simulated user. It must not be a model.
        policy: the reference solution for samples whose rows contain none. The default is the resource's expert.
        seed: the random seed for the episodes.
        max_concurrency: the maximum number of samples to run concurrently.
        tell: a function that is called with the proof of each finished sample.

    Returns:
        One proof per sample, in the order of `samples`.

    Raises:
        ConfigError: If the task has no reward, or if its user is a model.
    """
    if task.reward is None:
        raise ConfigError(f"{task.path}: the task has no reward to check; set 'reward'")
    if user is not None and not user.is_free:
        raise ConfigError(f"{task.path}: the simulated user is a model, and calls to it cost money")
    rights = [_right(task, sample, policy) for sample in samples]
    proofs = [SampleProof(sample, right[0] if right else "") for sample, right in zip(samples, rights, strict=True)]
    definition, limiter = task.definition, anyio.CapacityLimiter(max_concurrency)
    async with ServerPool(), make_scorer(task.reward, definition.limits.reward_time_s) as scorer:

        def worker_for(label: str, policy: AgentPolicy) -> RLRolloutWorker:
            return RLRolloutWorker(definition, policy, tools=task.tools, user=user, policy_label=label)

        async def end(sample: Sample, label: str, policy: AgentPolicy) -> End:
            worker = worker_for(label, policy)
            async with worker.group(sample, seed) as group:
                episode = await worker.collect_episode(group)
            request = ScoringRequest.from_episode(episode, definition)
            return End(request, await scorer.score(request), str(episode.custom_data.get("stop_reason")))

        async def has_expert(sample: Sample) -> bool:
            async with worker_for("expert", ExpertPolicy()).group(sample, seed) as group:
                try:
                    start = await group.episode(0)
                except RewardKitError:
                    return True  # the episode reports why the resource failed to start
                try:
                    return start.resource is not None and await start.resource.expert_action() is not None
                finally:
                    await group.finish(start)

        async def prove_one(proof: SampleProof, right: _Right | None) -> None:
            async with limiter:
                # A resource class may have an expert only in some configurations, for example if `expert_queries` is
                # set.
                if right is not None and right[0] == "expert" and not await has_expert(proof.sample):
                    proof.by, right = "", None
                proof.nothing = await end(proof.sample, "nothing", ScriptedPolicy([]))
                proof.gold = await end(proof.sample, *right) if right is not None else None
            proof.judge(definition.pass_threshold)
            tell(proof)

        async with anyio.create_task_group() as tasks:
            for proof, right in zip(proofs, rights, strict=True):
                tasks.start_soon(prove_one, proof, right)
    return proofs


def _right(task: LoadedTask, sample: Sample, policy: _Right | None) -> _Right | None:
    """Return the reference solution of a sample, or None if the sample has none."""
    for key, form in (("gold_actions", "a list of actions"), ("gold_answer", "a string")):
        if (given := sample.row.get(key)) is None:
            continue
        if not isinstance(given, list if key == "gold_actions" else str):
            raise ConfigError(f"{sample.where}: {key} must be {form}, got {given!r:.60}")
        try:
            with boundary(PolicyError, key):
                return key, ScriptedPolicy([{"type": "text", "content": given}] if isinstance(given, str) else given)
        except PolicyError as error:
            raise ConfigError(f"{sample.where}: {key}: {error}") from error
    if policy is not None:
        return policy
    kind = task.definition.resource_type
    if kind is None or resource_class(kind).expert_action is ForkableResource.expert_action:
        return None
    return "expert", ExpertPolicy()
