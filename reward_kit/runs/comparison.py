"""Comparison of runs with a baseline, the first run, on the samples they share. Unscored episodes are excluded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from reward_kit.display_text import pluralize
from reward_kit.errors import ConfigError, StoreError, boundary, did_you_mean
from reward_kit.runs.card import CONFIDENCE as CONFIDENCE
from reward_kit.runs.card import rule_differences, run_card
from reward_kit.runs.display import figure, signed
from reward_kit.runs.results import read_results
from reward_kit.runs.run_folder import GENERATED_NAME, RunHeader
from reward_kit.runs.statistics import (
    Interval,
    PairedFigures,
    benjamini_hochberg,
    difference_interval,
    holm,
    mcnemar_test,
    paired_figures,
    safe_mean,
)
from reward_kit.runs.summary import EpisodeRow, PolicySummary, Threshold, summarize

_LARGEST = 1e99  # Keeps differences and the squares of their sums finite


class SampleScores(NamedTuple):
    """The scored episodes of a sample: their mean score, their number, and the number that passed."""

    mean: float
    scored: int
    passed: int

    @property
    def passes(self) -> bool:
        """True if more than half of the scored episodes passed."""
        return 2 * self.passed > self.scored


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a policy of a run.

    Attributes:
        path: the directory of the run.
        header: the content of the run's `run.json`.
        policy: the name of the policy.
        label: the unique name of this side in tables.
        pass_threshold: the lowest passing score.
        summary: the policy's row in the summary table of the run.
        samples: the scores of each scored sample, keyed by sample id.
        unscored: the samples without a scored episode.
        rollouts: the score of each rollout, keyed by sample id and rollout id; None if unscored.
        starts: the initial state keys of each sample, if the environment reports them.
        metrics: the values of each metric by sample and rollout; missing values are omitted.
        is_unit: True if every score is between 0 and 1.
        scorers: each reward's id, and the first characters of its hash.
        unfinished: the number of episodes that are missing from the run.
        card: the rollout card of the run, limited to the policy.
    """

    path: Path
    header: RunHeader
    policy: str
    label: str
    pass_threshold: float
    summary: PolicySummary
    samples: Mapping[str, SampleScores]
    unscored: frozenset[str]
    rollouts: Mapping[str, Mapping[str, float | None]]
    starts: Mapping[str, frozenset[str]]
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]]
    is_unit: bool
    scorers: frozenset[str]
    unfinished: int
    card: Mapping[str, Any]

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.header.run_id or self.path.resolve().name


def read_sides(runs: Sequence[Path], policies: Sequence[str] = ()) -> list[Side]:
    """Read the sides of a comparison; the baseline comes first.

    If multiple runs are passed, each run is one side, or one side per policy in `policies`. If a single run is passed,
    each of its policies is a side.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is passed twice; pass two different runs")
    found = [_sides_of(run) for run in runs]
    known = {name for of_run in found for name in of_run}
    if unknown := [name for name in policies if name not in known]:
        raise ConfigError(f"--policy {unknown[0]}: no run has this policy{did_you_mean(unknown[0], known)}")
    sides: list[Side] = []
    for run, of_run in zip(runs, found, strict=True):
        chosen = [name for name in dict.fromkeys(policies) if name in of_run] or sorted(of_run)
        if len(of_run) > 1 and len(runs) > 1 and not of_run.keys() & set(policies):
            raise ConfigError(f"{run} has multiple policies: {', '.join(chosen)}; choose one with --policy")
        sides += [of_run[name] for name in chosen]
    if len(sides) < 2:
        raise ConfigError(f"{runs[0]} is a run with only one policy; pass another run to compare it with")
    # Use the shortest unique names.
    folders = [side.path.resolve().name for side in sides]
    words, common = [name.split("-") for name in folders], 0
    # Drop the words that all directory names begin with, such as the name of the task.
    while all(len(parts) > common + 1 and parts[common] == words[0][common] for parts in words):
        common += 1
    short = ["-".join(parts[common:]) for parts in words] if len(set(folders)) > 1 else folders
    parents = [side.path.resolve().parent.name for side in sides]  # Such as runs/base and runs/head
    if len(set(parents)) == len(sides) and all(map(GENERATED_NAME.search, folders)):
        short = parents
    names = (
        [side.policy for side in sides],
        short,
        [f"{side.policy} of {run}" for side, run in zip(sides, short, strict=True)],
        [f"{side.policy} of {side.path}" for side in sides],
    )
    chosen = next(labels for labels in names if len(set(labels)) == len(sides))
    return [replace(side, label=label) for side, label in zip(sides, chosen, strict=True)]


def _sides_of(path: Path) -> dict[str, Side]:
    """Return a side for each policy of a run; the label of each side is the name of its policy."""
    header = RunHeader.read_folder(path)
    if header.training is not None:
        raise ConfigError(
            f"{path} is a training run, which can be compared only with other training runs; run the trained model "
            "with `reward-kit run`, and compare that run"
        )
    rows: dict[str, list[EpisodeRow]] = defaultdict(list)
    starts: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for result in read_results(path):
        with boundary(StoreError, f"{path}: episode {result.episode['rollout_id']} cannot be read"):
            row = result.row()
        if row.score is not None and abs(row.score) > _LARGEST:
            raise ConfigError(f"{path}: the score of {row.rollout_id} is beyond 1e99 and cannot be compared")
        if large := next((name for name, value in row.metrics.items() if abs(value or 0.0) > _LARGEST), None):
            raise ConfigError(f"{path}: metric {large!r} of {row.rollout_id} is beyond 1e99 and cannot be compared")
        row.error_traceback = None
        rows[row.policy].append(row)
        start = result.episode.get("start")
        key = start.get("state_key") if isinstance(start, Mapping) else None
        if key is not None:
            of_policy = starts[row.policy]
            of_policy[row.sample_id] = of_policy.get(row.sample_id, frozenset()) | {str(key)}
    if not rows:
        raise ConfigError(f"{path} has no episodes yet, so there is nothing to compare")
    threshold, unfinished = header.pass_threshold, max(0, header.total - sum(map(len, rows.values())))
    sides = {}
    for policy, own in rows.items():
        (summary,) = summarize(own, threshold)
        rollouts: dict[str, dict[str, float | None]] = defaultdict(dict)
        metrics: dict[str, dict[str, dict[str, float]]] = {name: {} for name in summary.metrics}
        for row in sorted(own, key=lambda row: row.rollout_id):
            rollouts[row.sample_id][row.rollout_id] = row.score
            for name, value in row.metrics.items():
                if value is not None:
                    metrics[name].setdefault(row.sample_id, {})[row.rollout_id] = value
        samples = {name: scores for name, of in rollouts.items() if (scores := _sample_scores(of, threshold))}
        sides[policy] = Side(
            path=path,
            header=header,
            policy=policy,
            label=policy,
            pass_threshold=threshold,
            summary=summary,
            samples=samples,
            unscored=frozenset(rollouts.keys() - samples.keys()),
            rollouts=dict(rollouts),
            starts=starts[policy],
            metrics=metrics,
            is_unit=all(0.0 <= row.score <= 1.0 for row in own if row.score is not None),
            scorers=frozenset(row.scorer for row in own if row.scorer),
            unfinished=unfinished,
            card=run_card(header, own, [summary]),
        )
    return sides


def _sample_scores(rollouts: Mapping[str, float | None], threshold: float) -> SampleScores | None:
    """Return the scores of one sample's rollouts; None if all are unscored."""
    scores = [score for score in rollouts.values() if score is not None]
    return SampleScores(safe_mean(scores), len(scores), sum(score >= threshold for score in scores)) if scores else None


class SamplePair(NamedTuple):
    """A sample that is scored in both runs."""

    sample_id: str
    baseline: SampleScores
    run: SampleScores

    @property
    def difference(self) -> float:
        """The run's mean score minus the baseline's mean score."""
        return self.run.mean - self.baseline.mean

    @property
    def flip(self) -> Literal["won", "lost"] | None:
        """The change of the sample: "won" or "lost"; None if the sample passes in both runs or fails in both."""
        if self.run.passes == self.baseline.passes:
            return None
        return "won" if self.run.passes else "lost"


@dataclass(frozen=True, slots=True)
class Pairing:
    """The samples of two sides that are compared with each other."""

    samples: Sequence[SamplePair]
    by: Literal["rollout", "sample"] = "sample"
    is_rescoring: bool = False
    rollouts: int = 0
    single_rollouts: int = 0
    without_rollout: int = 0


def paired(baseline: Side, side: Side) -> Pairing:
    """Pair the samples that two sides share.

    Rollouts are paired if one side is a rescoring of the other or both have the same rollout ids; otherwise, a rollout
    that is scored on only one side would affect the mean of that side only.
    """
    common = sorted(baseline.samples.keys() & side.samples.keys())
    sources = [(each.header.rescored_from or {}).get("run_id") for each in (baseline, side)]
    is_rescoring = baseline.policy == side.policy and (
        sources[1] == baseline.run_id
        or sources[0] == side.run_id
        or (sources[0] is not None and sources[0] == sources[1])
    )
    # Rollout ids come from the seed, the sample and the policy.
    shared = baseline.rollouts.keys() & side.rollouts.keys()
    is_paired = all(baseline.rollouts[name].keys() == side.rollouts[name].keys() for name in shared)
    if not is_rescoring and not is_paired:
        return Pairing([SamplePair(name, baseline.samples[name], side.samples[name]) for name in common])
    pairs, rollouts, single = [], 0, 0
    for name in common:
        before, after = (
            {key: score for key, score in each.rollouts[name].items() if score is not None} for each in (baseline, side)
        )
        both = before.keys() & after.keys()
        rollouts += len(both)
        single += len(before.keys() ^ after.keys())
        one = _sample_scores({key: before[key] for key in sorted(both)}, baseline.pass_threshold)
        other = _sample_scores({key: after[key] for key in sorted(both)}, side.pass_threshold)
        if one is not None and other is not None:
            pairs.append(SamplePair(name, one, other))
    return Pairing(pairs, "rollout", is_rescoring, rollouts, single, len(common) - len(pairs))


class MetricDifference(NamedTuple):
    """The paired difference of a metric that both runs have.

    `missing` is the number of samples that both runs have but that lack a value to pair. The means exclude
    these samples, and are `None` if no sample is left.
    """

    name: str
    samples: int
    missing: int
    baseline_mean: float | None = None
    run_mean: float | None = None
    interval: Interval | None = None


def metric_differences(baseline: Side, side: Side, by: Literal["rollout", "sample"]) -> list[MetricDifference]:
    """Compare each metric that both sides have. The values are paired in the same way as the scores."""
    shared, found = sorted(baseline.rollouts.keys() & side.rollouts.keys()), []
    for name in (name for name in baseline.metrics if name in side.metrics):
        pairs = []
        for sample in shared:
            before, after = (each.metrics[name].get(sample, {}) for each in (baseline, side))
            if by == "rollout":
                both = before.keys() & after.keys()
                before, after = ({key: of[key] for key in sorted(both)} for of in (before, after))
            if before and after:
                pairs.append((safe_mean([*before.values()]), safe_mean([*after.values()])))
        missing = len(shared) - len(pairs)
        if not pairs:
            found.append(MetricDifference(name, 0, missing))
            continue
        means = [safe_mean(values) for values in zip(*pairs, strict=True)]
        is_unit = all(
            0.0 <= value <= 1.0
            for each in (baseline, side)
            for values in each.metrics[name].values()
            for value in values.values()
        )
        interval = difference_interval([after - before for before, after in pairs], reach=1.0 if is_unit else None)
        found.append(MetricDifference(name, len(pairs), missing, means[0], means[1], interval))
    return found


_COMPARED = {"name", "policy", "reward_function_path", "reward_options", "rewards", "dataset_path", "pass_threshold"}
_HARMLESS = {"description", "run_limits", "sandbox", "credit", "redact"}  # These keys do not change scores
_OWN_LINES = {"task file", "dataset", "reward", "policy"}
_SHORT = 12
_LONGEST_VALUE = 40
_SEED_EFFECT = (
    "models sampled differently, and where environments are generated from it, samples with the same id are different "
    "problems, which weakens the pairing"
)


class Mismatch(NamedTuple):
    """A difference between two runs; `message` describes the difference for users.

    `what` is dataset, reward, pass_threshold, rollouts, sampling, reported_model, imputed, judge, task, task_keys,
    files, seed, starts or version.
    """

    what: str
    baseline: Any
    run: Any
    message: str


def mismatches(baseline: Side, side: Side) -> list[Mismatch]:
    """Return the differences between two runs other than their policies; the most serious come first.

    The result is empty if both sides are policies of the same run.
    """
    found: list[Mismatch] = []
    if baseline.path == side.path:
        return found
    one, other = baseline.header, side.header

    def add(what: str, before: Any, now: Any, text: str) -> None:
        found.append(Mismatch(what, before, now, text))

    datasets = (one.digests.get("dataset"), other.digests.get("dataset"))
    if datasets[0] is not None and datasets[1] is not None and datasets[0] != datasets[1]:
        text = f"the dataset differs (SHA-256 {datasets[0][:_SHORT]}… and {datasets[1][:_SHORT]}…)"
        add("dataset", *datasets, f"{text}: samples with the same id may be different questions")
    scorers = (sorted(baseline.scorers), sorted(side.scorers))
    if scorers[0] != scorers[1] and all(scorers):
        text = f"the reward differs ({', '.join(scorers[0])} and {', '.join(scorers[1])})"
        add("reward", *scorers, f"{text}: scores may not be comparable")
    if baseline.pass_threshold != side.pass_threshold:
        thresholds = f"{baseline.pass_threshold:g} and {side.pass_threshold:g}"
        text = f"the pass_threshold differs ({thresholds}): each run uses its own threshold"
        add("pass_threshold", baseline.pass_threshold, side.pass_threshold, text)
    found += [Mismatch(*difference) for difference in rule_differences(baseline.card, side.card)]
    if one.task_name != other.task_name:
        add("task", one.task_name, other.task_name, f"the task differs ({one.task_name} and {other.task_name})")
    # Scored transcripts do not record the details of their collection.
    if one.task_path is not None and other.task_path is not None:
        if keys := _differing(one.task, other.task, _COMPARED | _HARMLESS):
            before, now = ({key: each.task.get(key) for key in keys} for each in (one, other))
            add("task_keys", before, now, f"the task files differ in {', '.join(_named_values(before, now))}")
        of_rewards = {name for name in {**one.digests, **other.digests} if name.startswith("reward ")}
        if names := _differing(one.digests, other.digests, _OWN_LINES | of_rewards):
            before, now = ({name: each.digests.get(name) for name in names} for each in (one, other))
            add("files", before, now, f"files of the tasks differ: {', '.join(names)}")
        if one.seed != other.seed:
            add("seed", one.seed, other.seed, f"the seed differs ({one.seed} and {other.seed}): {_SEED_EFFECT}")
    known = baseline.starts.keys() & side.starts.keys()  # Only samples whose environment reports its initial state
    if others := sorted(name for name in known if not baseline.starts[name] & side.starts[name]):
        share = f"{len(others):,} of {len(known):,} samples started in a different state than in the baseline"
        text = f"{share}, such as {others[0]}: these are different problems with the same id, which weakens the pairing"
        first, second = ({name: sorted(each.starts[name]) for name in others} for each in (baseline, side))
        add("starts", first, second, text)
    versions = (one.versions.get("reward_kit"), other.versions.get("reward_kit"))
    if versions[0] != versions[1]:
        add("version", *versions, f"the version of reward-kit differs ({versions[0]} and {versions[1]})")
    return found


def _named_values(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the name of each key that differs, with both values if they are short."""
    for key in _differing(before, now, set()):
        one, other = before.get(key), now.get(key)
        if all(isinstance(value, Mapping | None) for value in (one, other)):
            yield from _named_values(one or {}, other or {}, f"{prefix}{key}.")
        elif any(isinstance(value, Mapping | list) or len(str(value)) > _LONGEST_VALUE for value in (one, other)):
            yield f"{prefix}{key}"
        else:
            values = ("not set" if value is None else str(value) for value in (one, other))
            yield f"{prefix}{key} ({' and '.join(values)})"


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], without: set[str]) -> list[str]:
    return sorted(key for key in (one.keys() | other.keys()) - without if one.get(key) != other.get(key))


ALPHA = 0.05
Verdict = Literal["better", "worse", "doubtful", "not shown"]


class LeftOut(NamedTuple):
    """The number of omitted samples by reason: unscored in, or missing from, the baseline or the run.

    `no_rollout_in_both` counts samples that were scored in both runs but have no single rollout scored in both.
    """

    unscored_in_baseline: int
    unscored_in_run: int
    only_in_baseline: int
    only_in_run: int
    no_rollout_in_both: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A run compared with the baseline on the samples that are scored in both.

    Attributes:
        side: the run.
        pairing: the common samples, and how they are paired.
        left_out: the omitted samples.
        baseline_mean: the baseline's mean over the common samples, each counted once.
        run_mean: the run's mean over the common samples.
        figures: the statistics of the differences (run minus baseline).
        p_mcnemar: the p-value of McNemar's test on the samples that flipped.
        p_holm: the p-value of the permutation test, corrected for all comparisons (Holm).
        p_bh: the p-value of the permutation test, corrected by the method of Benjamini and Hochberg.
        mismatches: the other differences between the runs.
        metrics: the differences of the metrics that both runs have.
    """

    side: Side
    pairing: Pairing
    left_out: LeftOut
    baseline_mean: float
    run_mean: float
    figures: PairedFigures
    p_mcnemar: float
    p_holm: float
    p_bh: float
    mismatches: Sequence[Mismatch]
    metrics: Sequence[MetricDifference] = ()

    @property
    def pairs(self) -> Sequence[SamplePair]:
        """The common samples, sorted by name."""
        return self.pairing.samples

    def flipped(self, direction: Literal["won", "lost"]) -> list[SamplePair]:
        """Return the samples that were won or lost, sorted by the size of the difference."""
        found = [pair for pair in self.pairs if pair.flip == direction]
        return sorted(found, key=lambda pair: (-abs(pair.difference), pair.sample_id))

    @property
    def verdict(self) -> Verdict:
        """The conclusion: "better" or "worse" if the interval excludes 0 and the corrected p-value is small enough.

        The conclusion is "doubtful" if only one of the two conditions holds, and "not shown" if neither does.
        """
        low, high = self.figures.interval.low, self.figures.interval.high
        leaves_out = low is not None and high is not None and not low <= 0.0 <= high
        is_small = self.p_holm <= ALPHA
        if leaves_out and is_small:
            return "better" if self.figures.interval.mean > 0 else "worse"
        return "doubtful" if leaves_out or is_small else "not shown"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The baseline, and the comparison of every other run with the baseline."""

    baseline: Side
    differences: Sequence[Difference]
    seed: int

    @property
    def sides(self) -> list[Side]:
        """All sides; the baseline comes first."""
        return [self.baseline, *(difference.side for difference in self.differences)]


def compare(sides: Sequence[Side], seed: int = 0) -> Comparison:
    """Compare every side with the first one."""
    baseline, *others = sides
    found = [_difference(baseline, side, seed) for side in others]
    p_values = [difference.figures.permutation.p for difference in found]
    corrected = zip(found, holm(p_values), benjamini_hochberg(p_values), strict=True)
    return Comparison(baseline, [replace(one, p_holm=p_holm, p_bh=p_bh) for one, p_holm, p_bh in corrected], seed)


def _difference(baseline: Side, side: Side, seed: int) -> Difference:
    pairing = paired(baseline, side)
    pairs = pairing.samples
    if not pairs:
        one, other = ({*each.samples, *each.unscored} for each in (baseline, side))
        text = f"{side.label} and the baseline {baseline.label} have no sample scored in both"
        if shared := baseline.samples.keys() & side.samples.keys():
            text += f": each rollout of the {len(shared)} common samples is unscored in one of them"
        elif shared := one & other:
            text += f": each of the {len(shared)} common samples is unscored in one of them"
        else:
            first, second = (
                ", ".join(map(repr, sorted(each)[:3])) + (f" and {len(each) - 3} more" if len(each) > 3 else "")
                for each in (other, one)
            )
            text += f": the first has {first}, the second {second}; compare runs of the same dataset"
        raise ConfigError(text)
    figures = paired_figures(
        [pair.difference for pair in pairs], reach=1.0 if baseline.is_unit and side.is_unit else None, seed=seed
    )
    flips = [pair.flip for pair in pairs]
    ours, theirs = ({*each.samples, *each.unscored} for each in (baseline, side))
    return Difference(
        side=side,
        pairing=pairing,
        left_out=LeftOut(
            unscored_in_baseline=len(baseline.unscored & theirs),
            unscored_in_run=len(side.unscored & ours),
            only_in_baseline=len(ours - theirs),
            only_in_run=len(theirs - ours),
            no_rollout_in_both=pairing.without_rollout,
        ),
        baseline_mean=safe_mean([pair.baseline.mean for pair in pairs]),
        run_mean=safe_mean([pair.run.mean for pair in pairs]),
        figures=figures,
        p_mcnemar=mcnemar_test(flips.count("won"), flips.count("lost")),
        p_holm=figures.permutation.p,
        p_bh=figures.permutation.p,
        mismatches=mismatches(baseline, side),
        metrics=metric_differences(baseline, side, pairing.by),
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison, including all flipped samples, as JSON-serializable data."""
    return {
        "schema_version": 1,
        "confidence": CONFIDENCE,
        "seed": comparison.seed,
        "runs": [_side_to_json(side) for side in comparison.sides],
        "comparisons": [_difference_to_json(difference) for difference in comparison.differences],
    }


def _side_to_json(side: Side) -> dict[str, Any]:
    summary = side.summary
    interval = summary.score
    return {
        "label": side.label,
        "run": str(side.path),
        "run_id": side.run_id,
        "policy": side.policy,
        "status": side.header.status,
        "missing_episodes": side.unfinished,
        "mean": interval.mean if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "standard_error": interval.standard_error if interval else None,
        "samples": len(side.samples) + len(side.unscored),
        "unscored_samples": len(side.unscored),
        "episodes": summary.episodes,
        "scored": summary.scored,
        "pass_threshold": side.pass_threshold,
        "pass_at_1": summary.pass_at_1,
        "k": summary.k,
        "pass_at_k": summary.pass_at_k,
        "pass_hat_k": summary.pass_hat_k,
        "errors": dict(summary.errors),
        "tokens": summary.tokens,
        "cost": summary.cost,
        "judge_cost": summary.judge_cost,
    }


def _difference_to_json(difference: Difference) -> dict[str, Any]:
    figures = difference.figures
    return {
        "run": difference.side.label,
        "verdict": difference.verdict,
        "common_samples": len(difference.pairs),
        "paired_by": difference.pairing.by,
        "paired_rollouts": difference.pairing.rollouts,
        "single_rollouts": difference.pairing.single_rollouts,
        "left_out": difference.left_out._asdict(),
        "baseline_mean": difference.baseline_mean,
        "run_mean": difference.run_mean,
        "difference": figures.interval.mean,
        "low": figures.interval.low,
        "high": figures.interval.high,
        "standard_error": figures.interval.standard_error,
        "bootstrap_low": figures.bootstrap.low,
        "bootstrap_high": figures.bootstrap.high,
        "p": figures.permutation.p,
        "p_is_exact": figures.permutation.is_exact,
        "p_holm": difference.p_holm,
        "p_bh": difference.p_bh,
        "p_t": figures.p_t,
        "p_mcnemar": difference.p_mcnemar,
        "cohens_dz": figures.cohens_dz,
        "cliffs_delta": figures.cliffs_delta,
        "won": [_pair_to_json(pair) for pair in difference.flipped("won")],
        "lost": [_pair_to_json(pair) for pair in difference.flipped("lost")],
        "mismatches": [mismatch._asdict() for mismatch in difference.mismatches],
        "metrics": {metric.name: _metric_to_json(metric) for metric in difference.metrics},
    }


def _metric_to_json(metric: MetricDifference) -> dict[str, Any]:
    interval = metric.interval
    return {
        "samples": metric.samples,
        "missing": metric.missing,
        "baseline_mean": metric.baseline_mean,
        "run_mean": metric.run_mean,
        "difference": interval.mean if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "standard_error": interval.standard_error if interval else None,
    }


def _pair_to_json(pair: SamplePair) -> dict[str, Any]:
    return {
        "sample": pair.sample_id,
        "difference": pair.difference,
        "baseline": pair.baseline._asdict(),
        "run": pair.run._asdict(),
    }


class Gate(NamedTuple):
    """The result of a gate on a run; `message` explains the result."""

    gate: str
    run: str
    failed: bool
    message: str


def regression_gates(
    comparison: Comparison, margin: float, metric: str | None = None, *, error_limit: float = 0
) -> list[Gate]:
    """Return a gate for each run except the baseline. A gate fails if its run is worse by more than `margin`.

    The gate checks the score or a metric. The gate fails if the upper bound of the difference (run minus baseline, 95%
    interval) is below -`margin`, an event that happens by chance in 2.5% of cases. It also fails if there is no
    interval, because the difference is then unknown, and if the number of episodes that ended with an error exceeds
    both the number in the baseline and `error_limit`.

    Raises:
        ConfigError: the baseline or a run does not have the metric.
    """
    gates = []
    base, beyond = comparison.baseline.label, f" by more than {margin:g}" if margin else ""
    for difference in comparison.differences:
        label, interval = difference.side.label, _difference_of(comparison.baseline, difference, metric)
        what = f" in {metric!r}" if metric is not None else ""
        if interval is None or interval.high is None:
            text = f"there is only one common sample, so it is unknown whether {label} is worse than {base}{what}"
            if interval is None:
                text = f"no common sample has a value of {metric!r} in both {label} and {base}"
            gates.append(Gate("fail-on-regression", label, True, text))
            continue
        is_worse = interval.high < -margin
        allowed = max(error_limit, sum(comparison.baseline.summary.errors.values()))
        if not is_worse and (errors := _too_many_errors(difference.side, allowed)):
            gates.append(Gate("fail-on-regression", label, True, errors))
            continue
        text = f"{label} is {'' if is_worse else 'not shown to be '}worse than {base}{what}{beyond}: the difference is "
        text += f"{signed(interval.mean)}, and at most {signed(interval.high)}"
        gates.append(Gate("fail-on-regression", label, is_worse, text))
    return gates


def _difference_of(baseline: Side, difference: Difference, metric: str | None) -> Interval | None:
    """Return the interval of the difference in the score or in a metric.

    Return None if no sample has a value of the metric in both runs.
    """
    if metric is None:
        return difference.figures.interval
    for side in (baseline, difference.side):
        _require_metric("--fail-on-regression", side, Threshold(0.0, metric))
    return next(found.interval for found in difference.metrics if found.name == metric)


def _too_many_errors(side: Side, allowed: float) -> str | None:
    """Return the message of a gate if more episodes than allowed ended with an error; otherwise None."""
    errors = sum(side.summary.errors.values())
    if errors <= allowed:
        return None
    return (
        f"{pluralize(errors, 'episode')} of {side.label} ended with an error and have no score; rerun them with "
        f"`reward-kit run --resume {side.path} --only-failed`, or allow them with --fail-on-error {errors}"
    )


def under_gate(side: Side, threshold: Threshold, *, error_limit: float = 0) -> Gate:
    """Return a gate that fails if the mean of a score or metric, or its lower bound, is below the threshold.

    The gate also fails if more than `error_limit` episodes ended with an error.

    Raises:
        ConfigError: the run does not have the metric.
    """
    _require_metric("--fail-under", side, threshold)
    what, value, least = threshold.what, threshold.value(side.summary), threshold.least
    if value is None:
        return Gate("fail-under", side.label, True, f"the {what} of {side.label} is unknown")
    if value >= least and (errors := _too_many_errors(side, error_limit)):
        return Gate("fail-under", side.label, True, errors)
    text = f"the {what} of {side.label} is {figure(value)}, {'below' if value < least else 'not below'} {least:g}"
    return Gate("fail-under", side.label, value < least, text)


def _require_metric(option: str, side: Side, threshold: Threshold) -> None:
    if unknown := threshold.unknown_metric([side.summary]):
        raise ConfigError(f"{option}: {side.label}: {unknown}")
