"""Check a reward: load it as it is to run, put every question to it, and compare it with a second one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reward_kit.agreement import cohens_kappa, pearson, spearman
from reward_kit.checks import reward_cheats, reward_conduct
from reward_kit.checks.findings import Finding
from reward_kit.checks.reward_bench import (
    Bench,
    Checkup,
    Given,
    Probe,
    RewardReport,
    grounds_of,
    learned,
    quoted,
    takes_truth,
    told,
)
from reward_kit.checks.reward_cases import FORMS, clearly_different, text_of
from reward_kit.checks.source_facts import SourceFacts, facts_of, kind_in
from reward_kit.errors import ConfigError
from reward_kit.loading import split_reference
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.remote import is_address
from reward_kit.reward_agent.scoring import Reward, ScoringRequest, check_parameters
from reward_kit.reward_agent.sources import find_module, read_source
from reward_kit.typed_interface import RewardSpec

PROBES: tuple[tuple[str, Probe], ...] = (
    ("the same score every time", reward_conduct.steady),
    ("right and wrong answers", reward_cheats.right_and_wrong),
    ("odd rollouts", reward_conduct.odd),
    ("missing ground truths", reward_conduct.missing_truth),
    ("other ways to write an answer", reward_cheats.equal_answers),
    ("text around an answer", reward_cheats.text_around),
    ("cheats that know nothing", reward_cheats.without_truth),
    ("cheats with the ground truth", reward_cheats.with_truth),
    ("code in answers", reward_conduct.runs_answers),
    ("time and memory", reward_conduct.cost),
    ("growth of time", reward_conduct.growth),
    ("regular expressions", reward_conduct.patterns),
    ("the same score in the end", reward_conduct.still),
    ("the range of scores", reward_cheats.scores),
    ("what it reads", reward_conduct.reads),
    ("changed inputs", reward_conduct.changes_inputs),
)
_NOISE = ("nondeterministic", "hidden-state")
_NOT_COMPARED = "scores of the same rollout differ, so nothing can be compared"
_COMPARING = {
    reward_cheats.right_and_wrong,
    reward_conduct.missing_truth,
    reward_cheats.equal_answers,
    reward_cheats.text_around,
    reward_cheats.without_truth,
    reward_cheats.with_truth,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The reward to check, and what is known of it.

    Attributes:
        reference: `file.py:function` or `package.module:function`.
        choice: what the user says of the reward's sandbox; its `reward_time_s` is the time of one call.
        folder: what a file path is relative to.
        given: ground truths, right answers and transcripts.
        options: of the reward itself, which are fixed.
        against: a second reward to compare with.
        pass_threshold: from which score on a rollout passes, for the comparison.
        seed: of everything random.
    """

    reference: str
    choice: SandboxChoice = field(default_factory=lambda: SandboxChoice(reward_time_s=10.0))
    folder: Path | None = None
    given: Given = field(default_factory=Given)
    options: Mapping[str, Any] = field(default_factory=dict)
    against: str | None = None
    pass_threshold: float = 1.0
    seed: int = 0


def load(plan: Plan) -> tuple[LoadedReward, LoadedReward | None]:
    """Load the reward and the one that it is compared with. Call it outside of an event loop.

    Raises:
        ConfigError: one of them cannot be loaded, or asks for what only an episode has and none is given.
    """
    loaded = load_reward(plan.reference, plan.folder, plan.choice, plan.options)
    reward, given = loaded.reward, plan.given
    check_parameters(reward)
    has_ends = bool(given.ends) or any(rollout.final_state is not None for rollout in given.rollouts)
    if "state" in (reward.parameters or ()) and not has_ends:
        raise ConfigError(
            f"reward {reward.id!r} judges the final state of a resource, which only an episode has: check the task "
            "file (reward-kit check task.yaml), or give the episodes of a run (--data runs/…/episodes.jsonl)"
        )
    if given.golds and not given.truths and reward.parameters is not None and takes_truth(reward.parameters):
        raise ConfigError(
            f"reward {reward.id!r} takes a ground_truth: give one --ground-truth JSON for each --gold TEXT"
        )
    other = load_reward(plan.against, plan.folder, plan.choice) if plan.against else None
    for one in (loaded, other):
        if one is not None and asks_models(one.reward):
            raise ConfigError(
                f"reward {one.reward.id!r} asks a model, which costs money, and a check asks a few hundred questions: "
                "measure how it agrees with people instead (reward-kit calibrate)"
            )
    return loaded, other


def asks_models(reward: Reward) -> bool:
    """Return whether a reward asks models; in a sandbox it cannot."""
    resources = reward.resources.values() if isinstance(reward, RewardSpec) else ()
    return any(getattr(resource, "asks_models", False) for resource in resources)


def is_reward(target: str) -> bool:
    """Return whether a target names a reward, a function or a class with `score`; by reading it, not by running it."""
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


async def check_reward(
    plan: Plan, loaded: LoadedReward, other: LoadedReward | None = None, tell: Callable[[str], None] = lambda _: None
) -> RewardReport:
    """Put every question to a reward.

    Args:
        plan: what to check.
        loaded, other: as `load` gives them.
        tell: called with each question, for a display of progress.
    """
    source, origin = SourceFacts(), loaded.reward.origin
    if origin is not None:
        source = facts_of(read_source(origin.file), origin.qualname or plan.reference.rpartition(":")[2])
    async with Bench(loaded.reward, plan.choice.reward_time_s) as bench:
        report = RewardReport(plan.reference, level=bench.level, seed=plan.seed)
        chance = random.Random(plan.seed)
        tell("how it wants an answer")
        needs_truth = takes_truth(loaded.reward.parameters)
        grounds = await learned(plan.given, source.ground_truth, bench, chance, takes_truth=needs_truth)
        if not grounds:
            await _tell_unknown_truths(report, bench, source)
            return report
        checkup = Checkup(bench, report, source, chance, grounds, plan.given.rollouts)
        await _ask(checkup, tell)
        if other is not None and plan.against is not None:
            tell("the other reward")
            async with Bench(other.reward, plan.choice.reward_time_s) as beside:
                await agreement(checkup, beside, plan.against, plan.pass_threshold)
    return report


async def _tell_unknown_truths(report: RewardReport, bench: Bench, source: SourceFacts) -> None:
    """Report that nothing can be asked, which is not a pass: the ground truths are unknown, or it never scores."""
    (first, *_) = grounds_of(Given(), source.ground_truth, takes_truth=True)
    seen = await bench.see(first.answered("The answer is 42."))
    text = (
        "not one rollout could be scored with a ground truth made up for it: ground truths of this form are not known; "
        "give --ground-truth JSON"
    )
    report.note("never-scores", "error", text, [told(f"ground truth {text_of(first.truth)!r}", seen)])
    report.cannot("everything else", "it needs a ground truth that the reward can read; --ground-truth JSON")


async def _ask(checkup: Checkup, tell: Callable[[str], None]) -> None:
    report = checkup.report
    compared: dict[str, list[Finding]] = {}
    for name, probe in PROBES:
        if probe in _COMPARING and _is_noisy(report):
            report.cannot(name, _NOT_COMPARED)
            continue
        tell(name)
        before = len(report.findings)
        await probe(checkup)
        if probe in _COMPARING:
            compared[name] = report.findings[before:]
    if _is_noisy(report):  # what was kept from call to call may have shown late
        for name, findings in compared.items():
            report.drop(findings)
            report.cannot(name, _NOT_COMPARED)


def _is_noisy(report: RewardReport) -> bool:
    return any(report.has(code) for code in _NOISE)


_SHOWN = 5


async def agreement(checkup: Checkup, other: Bench, name: str, threshold: float = 1.0) -> None:
    """Score the same rollouts with a second reward.

    Args:
        checkup: it has the user's rollouts; made ones are added if they are few.
        other: the second reward, open.
        name: of it, for the report.
        threshold: a score of this or more passes.
    """
    pairs, unscored = [], 0
    for request in _compared_rollouts(checkup):
        left, right = (await checkup.bench.see(request)).score, (await other.see(request)).score
        if left is None or right is None:
            unscored += 1
        else:
            pairs.append((left, right, request))
    if len(pairs) < 2:
        checkup.report.cannot(f"agreement with {name}", f"{len(pairs)} rollouts were scored by both")
        return
    lefts, rights = np.array([left for left, _, _ in pairs]), np.array([right for _, right, _ in pairs])
    checkup.report.facts[f"agreement with {name}"] = {
        "rollouts": len(pairs),
        "unscored by one of them": unscored,
        "pearson": _rounded(pearson(lefts, rights)),
        "spearman": _rounded(spearman(lefts, rights)),
        "kappa": _rounded(cohens_kappa((lefts >= threshold).astype(int), (rights >= threshold).astype(int), 2)),
        "mean difference": _rounded(float(lefts.mean() - rights.mean())),
    }
    worst = sorted(pairs, key=lambda pair: -abs(pair[0] - pair[1]))[:_SHOWN]
    lines = [f"{left:.4g} against {right:.4g}: {_text(request)}" for left, right, request in worst if left != right]
    if lines:
        checkup.report.note("disagrees", "info", f"differs from {name}; the worst of {len(pairs)} rollouts", lines)


def _compared_rollouts(checkup: Checkup) -> list[ScoringRequest]:
    found = [*checkup.rollouts, *(ground.gold for ground in checkup.grounds if ground.gold is not None)]
    if len(checkup.rollouts) < 20:
        for ground in checkup.grounds:
            found += [ground.answered(text) for text in clearly_different()]
            found += [ground.answered(ground.written(value)) for value in ground.wrong]
            if ground.truth is not None:
                text = text_of(ground.truth)
                found += [ground.answered(form.write(one)) for form in FORMS for one in (text, text.lower())]
    return found


def _text(request: ScoringRequest) -> str:
    return f'"{quoted(request.messages[-1].text, 70)}"' if request.messages else "no messages"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
