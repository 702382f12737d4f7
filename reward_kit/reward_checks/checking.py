"""A check of a reward from its name to its report: load it as it is to run, ask every question, tell what was found."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.errors import ConfigError
from reward_kit.reward_agent.levels import LoadedReward, SandboxChoice, load_reward
from reward_kit.reward_agent.scoring import Reward, check_parameters
from reward_kit.reward_agent.sources import read_source
from reward_kit.reward_checks import (
    probes_cheats,
    probes_cost,
    probes_range,
    probes_reads,
    probes_steady,
    probes_sturdy,
)
from reward_kit.reward_checks.agreement import agreement
from reward_kit.reward_checks.answers import text_of
from reward_kit.reward_checks.bench import Bench
from reward_kit.reward_checks.checkup import Checkup, Probe, told
from reward_kit.reward_checks.grounds import Given, grounds_of, learned
from reward_kit.reward_checks.report import Finding, Report
from reward_kit.reward_checks.source_facts import SourceFacts, facts_of

PROBES: tuple[tuple[str, Probe], ...] = (
    ("the same score every time", probes_steady.steady),
    ("right and wrong answers", probes_range.right_and_wrong),
    ("odd rollouts", probes_sturdy.odd),
    ("missing ground truths", probes_sturdy.missing_truth),
    ("other ways to write an answer", probes_range.equal_answers),
    ("text around an answer", probes_range.text_around),
    ("cheats that know nothing", probes_cheats.without_truth),
    ("cheats with the ground truth", probes_cheats.with_truth),
    ("code in answers", probes_reads.runs_answers),
    ("time and memory", probes_cost.cost),
    ("growth of time", probes_cost.growth),
    ("regular expressions", probes_cost.patterns),
    ("the same score in the end", probes_steady.still),
    ("the range of scores", probes_range.scores),
    ("what it reads", probes_reads.reads),
    ("changed inputs", probes_sturdy.changes_inputs),
)
_NOISE = ("nondeterministic", "hidden-state")
_NOT_COMPARED = "scores of the same rollout differ, so nothing can be compared"
_COMPARING = {
    probes_range.right_and_wrong,
    probes_sturdy.missing_truth,
    probes_range.equal_answers,
    probes_range.text_around,
    probes_cheats.without_truth,
    probes_cheats.with_truth,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to check.

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
    check_parameters(loaded.reward)
    _check_given(loaded.reward, plan)
    _check_golds(loaded.reward, plan.given)
    return loaded, load_reward(plan.against, plan.folder, plan.choice) if plan.against else None


async def check_reward(
    plan: Plan, loaded: LoadedReward, other: LoadedReward | None = None, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """Ask a reward every question.

    Args:
        plan: what to check.
        loaded, other: as `load` gives them.
        tell: told what is being asked, for a display of progress.
    """
    source = _source(loaded.reward, plan.reference)
    async with Bench(loaded.reward, plan.choice.reward_time_s) as bench:
        report = Report(plan.reference, bench.level, plan.seed)
        chance = random.Random(plan.seed)
        tell("how it wants an answer")
        needs_truth = takes_truth(loaded.reward)
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


async def _tell_unknown_truths(report: Report, bench: Bench, source: SourceFacts) -> None:
    """Nothing can be asked, which is no pass: it was not told what the reward takes, or the reward never scores."""
    (first, *_) = grounds_of(Given(), source.ground_truth, takes_truth=True)
    seen = await bench.see(first.answered("The answer is 42."))
    text = (
        "not one rollout could be scored with a ground truth made up for it: ground truths of this form are not known; "
        "give --ground-truth JSON"
    )
    report.add("never-scores", "error", text, [told(f"ground truth {text_of(first.truth)!r}", seen)])
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
            report.findings = [finding for finding in report.findings if finding not in findings]
            report.cannot(name, _NOT_COMPARED)


def _is_noisy(report: Report) -> bool:
    return any(report.has(code) for code in _NOISE)


def takes_truth(reward: Reward) -> bool:
    return reward.parameters is None or bool(reward.parameters & {"ground_truth", "ground_truths"})


def _check_given(reward: Reward, plan: Plan) -> None:
    has_ends = bool(plan.given.ends) or any(rollout.final_state is not None for rollout in plan.given.rollouts)
    if "state" in (reward.parameters or ()) and not has_ends:
        raise ConfigError(
            f"reward {reward.id!r} judges the final state of a resource, which only an episode has: check the task "
            "file (reward-kit check task.yaml), or give the episodes of a run (--data runs/…/episodes.jsonl)"
        )


def _check_golds(reward: Reward, given: Given) -> None:
    if given.golds and not given.truths and takes_truth(reward) and reward.parameters is not None:
        raise ConfigError(
            f"reward {reward.id!r} takes a ground_truth: give one --ground-truth JSON for each --gold TEXT"
        )


def _source(reward: Reward, reference: str) -> SourceFacts:
    origin = reward.origin
    if origin is None:
        return SourceFacts()
    return facts_of(read_source(origin.file), origin.qualname or reference.rpartition(":")[2])


def exit_code(reports: Sequence[Report], fail_on: str) -> int:
    """1 where a report has a finding at or above a severity, else 0; "never" is never."""
    severities = {"error": "error", "warning": "warning", "info": "info"}
    wanted = severities.get(fail_on)
    return int(wanted is not None and any(report.fails(wanted) for report in reports))  # type: ignore[arg-type]
