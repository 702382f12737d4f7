"""What `reward-kit check` does with a reward, and with the reward and the samples of a task."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from reward_kit.agent.policies import make_policy
from reward_kit.checks.proof import SampleProof, prove
from reward_kit.checks.reward import Plan, check_reward, load
from reward_kit.checks.reward_bench import Given, RewardReport, quoted
from reward_kit.checks.source_facts import kind_in
from reward_kit.cli.echo import echo, echo_json
from reward_kit.display_text import counted
from reward_kit.errors import ConfigError
from reward_kit.loading import split_reference
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice
from reward_kit.reward_agent.remote import is_address
from reward_kit.reward_agent.scoring import Reward, ScoringRequest
from reward_kit.reward_agent.sources import find_module, read_source
from reward_kit.runs.plan import RunPlan
from reward_kit.runs.scoring import read_transcripts
from reward_kit.runs.tasks import LoadedTask, selected
from reward_kit.task_parts import SandboxLevel
from reward_kit.typed_interface import RewardSpec

_LINTED = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of a check of a reward or a task.

    Attributes:
        data: transcripts.
        truths: ground truths, as JSON.
        golds: right answers.
        against: a second reward.
        sandbox: the reward's level; None for its default.
        read_paths: files and folders that it may read.
        time_s: of one call.
        options: of the reward itself.
        limit: how many samples of a task are proved.
        gold_policy: what solves a task's samples.
        fail_on: from which severity on the check fails.
        seed: of everything random.
        as_json: print JSON.
    """

    data: Path | None = None
    truths: Sequence[str] = ()
    golds: Sequence[str] = ()
    against: str | None = None
    sandbox: SandboxLevel | None = None
    read_paths: Sequence[str] = ()
    time_s: float = 10.0
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 10
    gold_policy: str | None = None
    fail_on: str = "error"
    seed: int = 0
    as_json: bool = False


def is_reward(target: str) -> bool:
    """Whether a target names a reward: a function, or a class with `score`; found by reading, not by running it."""
    if ":" not in target:
        return False
    if is_address(target):
        raise ConfigError(f"{target} runs behind HTTP, and cannot be watched here: check FILE.py:FUNCTION there")
    location, name = split_reference(target)
    if location.startswith("reward_kit.rewards"):
        return True
    file = Path(location) if location.endswith(".py") else find_module(location)
    if file is None or not file.is_file():
        return False
    kind = kind_in(read_source(file), name)
    return kind == "reward" or (kind == "" and location.endswith(".py"))


def check_rewards(target: str, asked: Asked) -> None:
    """Check a reward, print what was found, and leave with the exit code."""
    rollouts = [ScoringRequest.of(episode) for episode in read_transcripts(asked.data)] if asked.data else []
    if asked.data and not rollouts:
        raise ConfigError(f"{asked.data} has no rows")
    given = Given([_truth(text) for text in asked.truths], asked.golds, rollouts)
    choice = SandboxChoice(
        asked.sandbox,
        read_paths=tuple(asked.read_paths),
        reward_time_s=asked.time_s,
    )
    plan = Plan(target, choice, Path.cwd(), given, asked.options, asked.against, seed=asked.seed)
    loaded, other = load(plan)
    for one in (loaded, other):
        if one is not None and _asks_models(one.reward):
            raise ConfigError(
                f"reward {one.reward.id!r} asks a model, which costs money, and a check asks a few hundred questions: "
                "measure how it agrees with people instead (reward-kit calibrate)"
            )
    with _Progress() as progress:
        report = anyio.run(check_reward, plan, loaded, other, progress.tell)
    for note in loaded.notes:
        echo(note, err=True)
    if asked.as_json:
        echo_json(report.to_json(), indent=2)
    else:
        echo("\n".join(report.lines()))
    sys.exit(report.exit_code(asked.fail_on))


def why_not_free(task: LoadedTask, planned: RunPlan) -> str:
    """Why proving the task would cost money; "" where it would not."""
    if planned.user is not None and not planned.user.is_free:
        return "its user is a model, which costs money"
    asks = task.reward is not None and _asks_models(task.reward)
    return "its reward asks a model, which costs money" if asks else ""


def _asks_models(reward: Reward) -> bool:
    """Whether it asks models; behind walls it can ask nobody."""
    resources = reward.resources.values() if isinstance(reward, RewardSpec) else ()
    return any(getattr(resource, "asks_models", False) for resource in resources)


def prove_task(task: LoadedTask, planned: RunPlan, asked: Asked) -> None:
    """Prove a task's samples, check its reward on their ends, and leave where something is wrong."""
    samples = selected(task, asked.limit)
    policy = None
    if asked.gold_policy is not None:
        policy = asked.gold_policy, make_policy(asked.gold_policy, {}, task.path.resolve().parent)
    with _Progress() as progress:

        def tell(proof: SampleProof) -> None:
            progress.tell(f"sample {proof.sample.id}")

        async def run() -> list[SampleProof]:
            return await prove(task, samples, planned.user, policy, seed=asked.seed, tell=tell)

        proofs = anyio.run(run)
        report = _reward_report(task, proofs, asked, progress)
    wrong = [proof for proof in proofs if proof.problems]
    if asked.as_json:
        echo_json(_to_json(task, proofs, report), indent=2)
    else:
        _print(task, proofs, report)
    sys.exit(1 if wrong and asked.fail_on != "never" else report.exit_code(asked.fail_on))


def _reward_report(task: LoadedTask, proofs: Sequence[SampleProof], asked: Asked, progress: _Progress) -> RewardReport:
    """The check of a task's reward, on the ends of its own samples."""
    definition = task.definition
    assert task.reward is not None  # else nothing was proved
    proved = [p for p in proofs if p.gold is not None and p.nothing is not None and not p.problems]
    ends = [(p.gold.request, p.nothing.request) for p in proved[:_LINTED] if p.gold and p.nothing]
    rollouts = [
        end.request for p in proofs[:_LINTED] for end in (p.gold, p.nothing) if end and end.request.failure is None
    ]
    plan = Plan(
        str(definition.reward_function_path),
        SandboxChoice(reward_time_s=definition.limits.reward_time_s),
        task.path.resolve().parent,
        Given(rollouts=rollouts, ends=ends),
        pass_threshold=definition.pass_threshold,
        seed=asked.seed,
    )
    return anyio.run(check_reward, plan, LoadedReward(task.reward), None, progress.tell)


def _print(task: LoadedTask, proofs: Sequence[SampleProof], report: RewardReport) -> None:
    unknown = [proof for proof in proofs if proof.gold is None]
    for line in report.lines():
        echo(line)
    # Behind the verdict on the reward, which counts its own findings and not these.
    for proof in proofs:
        where = proof.sample.where or proof.sample.id
        for problem in proof.problems:
            echo(f"error:   {where}: sample {proof.sample.id!r}: {quoted(problem, 300)}")
    if unknown:
        echo(
            f"not checked: that what is right scores 1, for {len(unknown)} of {len(proofs)} samples: nobody says what "
            "is right; give rows a gold_answer or gold_actions, the resource an expert_action, or name --gold-policy"
        )
    echo(f"{task.path}: {_verdict(proofs)}")


def _verdict(proofs: Sequence[SampleProof]) -> str:
    wrong = sum(len(proof.problems) for proof in proofs)
    right = sum(proof.gold is not None and not proof.problems for proof in proofs)
    nothing = sum(not any("nothing" in problem for problem in proof.problems) for proof in proofs)
    by = ", ".join(sorted({proof.by for proof in proofs if proof.by})) or "nobody"
    errors = f"{counted(wrong, 'error')}; " if wrong else ""
    return (
        f"{errors}of {counted(len(proofs), 'sample')}, what is right ({by}) scores 1 and "
        f"nothing scores 0 on {right}; nothing scores 0 on {nothing}"
    )


def _to_json(task: LoadedTask, proofs: Sequence[SampleProof], report: RewardReport) -> dict[str, Any]:
    samples = [
        {
            "id": proof.sample.id,
            "by": proof.by or None,
            "gold": proof.gold.scored.score if proof.gold else None,
            "nothing": proof.nothing.scored.score if proof.nothing else None,
            "problems": proof.problems,
        }
        for proof in proofs
    ]
    return {"task": str(task.path), "samples": samples, "reward": report.to_json()}


def _truth(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--ground-truth {text!r} is not JSON: {error}; a text stands in quotes: '\"Paris\"'"
        ) from None


class _Progress:
    """What is being asked, on one line of a terminal; nothing where there is none."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            echo(nl=False, err=True, redraw=True)

    def tell(self, what: str) -> None:
        """Show what is being asked now."""
        if self._is_shown:
            echo(f"checking {quoted(what, 60)} …", nl=False, err=True, redraw=True)
