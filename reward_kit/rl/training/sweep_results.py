"""The evaluations of a sweep, and their summary: means over seeds, and differences from the baseline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pydantic

from reward_kit.display_text import escape_text, pluralize
from reward_kit.errors import ConfigError, StoreError
from reward_kit.private_files import private_opener
from reward_kit.report.sweep_page import SweepTable
from reward_kit.rl.training.sweep_file import START
from reward_kit.runs.comparison_table import p_text
from reward_kit.runs.display import difference_text, figure, interval_text
from reward_kit.runs.files import SUMMARY_FILE, append_line, cut_torn_line, read_json, wrap_os_errors
from reward_kit.runs.run_folder import RunHeader, current_status
from reward_kit.runs.statistics import (
    Interval,
    difference_interval,
    holm,
    mean_interval,
    paired_t_test,
    safe_mean,
    sign_flip_test,
)
from reward_kit.validation import describe_validation_error

EVALUATIONS = "evaluations.jsonl"
"""The evaluations of a sweep: one line for each arm, seed and temperature."""
SIGNIFICANT = 0.05
"""A difference is shown if its corrected p-value is below this level."""
ONE_SEED = "One seed does not show the spread between seeds, so there are no intervals or tests."
_NAME_LENGTH = 60
_MOST_NAMES = 5


class ScoreSummary(pydantic.BaseModel):
    """The mean score of some episodes; None if all are unscored."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    episodes: int
    scored: int
    score: float | None = pydantic.Field(allow_inf_nan=False)


class SweepEvaluation(ScoreSummary):
    """An evaluation, which is a line of `evaluations.jsonl`.

    `temperature` is None for the temperature of the policy. `categories` are the scores for each value of the sweep's
    `by`.
    """

    arm: str
    seed: int
    temperature: float | None
    categories: Mapping[str, ScoreSummary] = {}


Evaluations = Mapping[tuple[str, int, float | None], SweepEvaluation]
"""The evaluations, keyed by arm, seed and temperature."""


def append_evaluation(folder: Path, record: Mapping[str, Any]) -> None:
    """Append a line to the evaluations of a sweep."""
    path = folder / EVALUATIONS
    with wrap_os_errors("write", path):
        cut_torn_line(path)
        descriptor = private_opener(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            append_line(descriptor, path, json.dumps(record, allow_nan=False).encode("ascii") + b"\n")
        finally:
            os.close(descriptor)


def read_evaluations(folder: Path) -> Evaluations:
    """Read the evaluations of a sweep; an incomplete last line is ignored."""
    path = folder / EVALUATIONS
    found: dict[tuple[str, int, float | None], SweepEvaluation] = {}
    if path.is_file():
        with wrap_os_errors("read", path):
            lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                one = SweepEvaluation.model_validate_json(line)
            except pydantic.ValidationError as error:
                problems = "; ".join(describe_validation_error(error))
                raise StoreError(f"{path}:{number}: {problems}; was the file edited by hand?") from None
            found[one.arm, one.seed, one.temperature] = one
    return found


@dataclass(frozen=True, slots=True)
class SweepFacts:
    """The results of a sweep: the facts of its runs, keyed by arm and seed, and its evaluations."""

    name: str
    status: str
    baseline: str
    seeds: Sequence[int]
    temperatures: Sequence[float | None]
    by: str | None
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]]
    evaluations: Evaluations

    def scores(self, arm: str, temperature: float | None, category: str | None = None) -> dict[int, float]:
        """Return the scores of an arm by seed. A seed without a score is missing."""
        found = {}
        for (of_arm, seed, at), record in sorted(self.evaluations.items(), key=lambda item: item[0][1]):
            one = record if category is None else record.categories.get(category)
            if (of_arm, at) == (arm, temperature) and one is not None and one.score is not None:
                found[seed] = one.score
        return found


def run_facts(run: Path, error: str | None) -> dict[str, Any]:
    """Return the status of a run, its updates, environment steps and CPU seconds, and the error that ended it."""
    try:
        header = RunHeader.read(run)
        training = header.require_training(run)
    except (StoreError, ConfigError):
        return {"status": "failed" if error else "missing", "error": error}
    cpu_s = None
    with suppress(StoreError):
        cpu_s = read_json(run / SUMMARY_FILE).get("cpu_s")
    status = "failed" if error else current_status(run, header)
    facts = {"status": status, "updates": training.updates, "env_steps": training.env_steps, "cpu_s": cpu_s}
    return facts | ({"error": error} if error else {})


def temperature_text(temperature: float | None) -> str:
    """Return the label of a temperature."""
    return "score" if temperature is None else "greedy" if temperature == 0 else f"T={temperature:g}"


def summarize_sweep(facts: SweepFacts) -> dict[str, Any]:
    """Return the content of `summary.json`, except for the Markdown text."""
    labels = {temperature_text(one): one for one in facts.temperatures}
    start = {label: facts.scores(START, one) for label, one in labels.items()}
    known = {label: safe_mean([*scores.values()]) for label, scores in start.items() if scores}
    best = max(known, key=known.__getitem__) if known else None
    arms: dict[str, Any] = {}
    for arm, runs in facts.runs.items():
        done = [run for run in runs.values() if run["status"] == "complete"]
        arms[arm] = {
            "runs": {str(seed): dict(run) for seed, run in runs.items()},
            **{key: _mean([run[key] for run in done]) for key in ("updates", "env_steps", "cpu_s")},
            "scores": {label: _figures(facts.scores(arm, one)) for label, one in labels.items()},
            "differences": {},
        }
    for label, one in labels.items():
        for arm, difference in _differences(facts, one).items():
            arms[arm]["differences"][label] = difference
    summary: dict[str, Any] = {
        "name": facts.name,
        "status": facts.status,
        "baseline": facts.baseline,
        "seeds": list(facts.seeds),
        "temperatures": [*labels],
        "start": {"scores": {label: _figures(scores) for label, scores in start.items()}, "best": best},
        "arms": arms,
    }
    if facts.by is not None:
        summary["by"] = facts.by
        shown = [label for label in labels if label == next(iter(labels)) or labels[label] == 0]
        summary["categories"] = {label: _by_category(facts, labels[label]) for label in shown}
        at_best = _by_category(facts, labels[best]) if best is not None else {}
        summary["start"]["categories"] = {name: arms[START] for name, arms in at_best.items() if START in arms}
    summary["notes"] = _notes(facts, summary)
    return summary


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return safe_mean(known) if known else None


def _seed_interval(scores: Mapping[int, float]) -> Interval:
    """Return the mean over seeds and its 95% t interval, without bounds if all scores are equal."""
    values = [*scores.values()]
    interval = mean_interval(values, range(len(values)))
    if interval.standard_error == 0.0 and interval.method == "t":
        return replace(interval, low=None, high=None)
    return interval.clipped(0.0, 1.0) if all(0.0 <= value <= 1.0 for value in values) else interval


def _figures(scores: Mapping[int, float]) -> dict[str, Any] | None:
    if not scores:
        return None
    interval = _seed_interval(scores)
    by_seed = {str(seed): score for seed, score in scores.items()}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "by_seed": by_seed}


def _differences(facts: SweepFacts, temperature: float | None) -> dict[str, dict[str, Any]]:
    """Return the difference of each arm from the baseline, paired by seed. The p-values are corrected (Holm)."""
    base, found, p_values = facts.scores(facts.baseline, temperature), {}, {}
    for arm in facts.runs:
        scores = facts.scores(arm, temperature)
        pairs = [(scores[seed], base[seed]) for seed in facts.seeds if seed in scores and seed in base]
        if arm == facts.baseline or not pairs:
            continue
        values = [score - before for score, before in pairs]
        is_unit = all(0.0 <= score <= 1.0 for pair in pairs for score in pair)
        interval = difference_interval(values, reach=1.0 if is_unit else None)
        found[arm] = {"mean": interval.mean, "low": interval.low, "high": interval.high, "seeds": len(values)}
        if len(values) > 1:
            p = paired_t_test(values)  # None if all differences are equal, so that their spread is unknown
            p_values[arm] = sign_flip_test(values).p if p is None else p
    for (arm, p), corrected in zip(p_values.items(), holm([*p_values.values()]), strict=True):
        found[arm] |= {"p": p, "p_corrected": corrected, "shown": corrected < SIGNIFICANT}
    return found


def _by_category(facts: SweepFacts, temperature: float | None) -> dict[str, dict[str, Any]]:
    """Return the figures of each arm and of the untrained policy, keyed by category and arm."""
    names = {name for record in facts.evaluations.values() for name in record.categories}
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        of_arms = {arm: _figures(facts.scores(arm, temperature, name)) for arm in [*facts.runs, START]}
        found[name] = {arm: figures for arm, figures in of_arms.items() if figures is not None}
    return found


def _notes(facts: SweepFacts, summary: Mapping[str, Any]) -> list[str]:
    notes = []
    if len(facts.seeds) == 1:
        notes.append(ONE_SEED)
    elif len(facts.runs) > 1:
        notes.append(
            "Differences are paired by seed, with 95% t intervals; p is corrected over the arms at each temperature "
            f"(Holm). A difference is shown if the corrected p is below {SIGNIFICANT:g}."
        )
    if episodes := [record.episodes for record in facts.evaluations.values()]:
        least, most = min(episodes), max(episodes)
        counts = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        covered = "The intervals cover the spread between seeds, but not the choice of the samples."
        notes.append(f"Each score is the mean of {counts} episodes. {covered if len(facts.seeds) > 1 else ''}".rstrip())
    if (best := summary["start"]["best"]) is not None and len(facts.temperatures) > 1:
        mean = summary["start"]["scores"][best]["mean"]
        notes.append(
            f"The untrained policy scores best at {best} ({figure(mean)}). A gain over its score at another "
            "temperature may only be the effect of less random sampling."
        )
    unfinished: dict[str, list[str]] = {}
    for arm, runs in facts.runs.items():
        for seed, run in runs.items():
            if run.get("error"):
                notes.append(f"{arm}-{seed} is {run['status']}: {escape_text(run['error'], 300)}")
            elif run["status"] != "complete":
                unfinished.setdefault(run["status"], []).append(f"{arm}-{seed}")
    for status, names in unfinished.items():
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        notes.append(f"{pluralize(len(names), 'run')} {status}: {', '.join(names[:_MOST_NAMES])}{more}")
    unscored = sum(record.episodes - record.scored for record in facts.evaluations.values())
    if unscored:
        notes.append(f"{pluralize(unscored, 'episode')} of the evaluations are unscored and are excluded.")
    return notes


# Tables


def sweep_tables(summary: Mapping[str, Any]) -> list[SweepTable]:
    """Return the tables of a summary: the arms, the differences, and the scores by category."""
    labels, arms, start, seeds = summary["temperatures"], summary["arms"], summary["start"], len(summary["seeds"])
    rows = [["start (untrained)", "", "", "", "", *(_best_text(start, label) for label in labels)]]
    for arm, of in arms.items():
        broken = sum(run["status"] == "failed" for run in of["runs"].values())
        done = sum(run["status"] == "complete" for run in of["runs"].values())
        count = str(seeds) if done == seeds else f"{done} of {seeds}" + (f", {broken} failed" if broken else "")
        means = [_count(of[key]) for key in ("updates", "env_steps", "cpu_s")]
        is_base = arm == summary["baseline"] and len(arms) > 1
        name = f"{arm} (baseline)" if is_base else arm
        rows.append([name, count, *means, *(_text(of["scores"][label]) for label in labels)])
    columns = ["arm", "seeds", "updates", "env steps", "CPU s", *labels]
    tables = [SweepTable("Arms", columns, rows)]
    rows = []
    for arm, of in arms.items():
        for label, one in of["differences"].items():
            tested = ["", "", "not tested"]
            if "p" in one:
                verdict = "shown" if one["shown"] else "not shown"
                tested = [p_text(one["p"]), p_text(one["p_corrected"]), verdict]
            name = arm if len(labels) == 1 else f"{arm}, {label}"
            rows.append([name, difference_text(_interval(one)), str(one["seeds"]), *tested])
    if rows:
        title = f"Differences from {summary['baseline']}"
        tables.append(SweepTable(title, ["arm", "difference", "seeds", "p", "p (Holm)", "verdict"], rows))
    for label, categories in summary.get("categories", {}).items():
        by = escape_text(summary["by"], _NAME_LENGTH)
        rows = [
            [
                escape_text(name, _NAME_LENGTH),
                *(_text(of.get(arm)) for arm in arms),
                _text(start["categories"].get(name)),
            ]
            for name, of in categories.items()
        ]
        tables.append(SweepTable(f"By {by}, {label}", ["category", *arms, f"start, {start['best']}"], rows))
    return tables


def _interval(figures: Mapping[str, Any]) -> Interval:
    return Interval(figures["mean"], figures["low"], figures["high"], None, 0, 0)


def _text(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "–"
    is_equal = figures["low"] is None and len(figures["by_seed"]) > 1
    return interval_text(_interval(figures)) + (" (all seeds)" if is_equal else "")


def _best_text(start: Mapping[str, Any], label: str) -> str:
    is_best = label == start["best"] and len(start["scores"]) > 1
    return _text(start["scores"][label]) + (" (best)" if is_best else "")


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
