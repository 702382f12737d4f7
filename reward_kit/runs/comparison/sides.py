"""What is compared: one policy of one run, with the scores of its samples. Unscored is never zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from reward_kit.errors import ConfigError, StoreError, boundary, did_you_mean
from reward_kit.runs.results import Result, read_results
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.statistics import mean_of
from reward_kit.runs.summary import EpisodeRow, PolicySummary, summarise

_LARGEST = 1e99  # of which differences, and squares of sums of them, are finite


class SampleScores(NamedTuple):
    """One sample's scored episodes: their mean, how many there are, and how many of them passed."""

    mean: float
    scored: int
    passed: int

    @property
    def passes(self) -> bool:
        """Whether more than half of the scored episodes passed."""
        return 2 * self.passed > self.scored


@dataclass(frozen=True, slots=True)
class Side:
    """One policy of one run.

    Attributes:
        path: the folder of the run.
        header: its `run.json`.
        policy: the name of the policy.
        label: by which tables name it, unlike that of any other side.
        pass_threshold: a score of at least this passes.
        summary: its row of the run's own closing table.
        samples: of each sample that has a score, by its id.
        unscored: the samples none of whose episodes has a score.
        rollouts: of each sample the score of each rollout, by its id; None where it has none.
        starts: of each sample the states that its episodes began in, where an environment told them.
        is_unit: whether every score is between 0 and 1.
        scorers: what scored, each as its id and the beginning of its hash.
        unfinished: how many episodes of the run are missing.
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
    is_unit: bool
    scorers: frozenset[str]
    unfinished: int

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.header.run_id or self.path.resolve().name


def read_sides(runs: Sequence[Path], policies: Sequence[str] = ()) -> list[Side]:
    """What is compared, the baseline first.

    Of several runs each is one side, or one for each of `policies` that it has. Of one run alone each policy is one.

    Args:
        runs: their folders.
        policies: the ones to compare, in this order; all, where each run has one or there is one run alone.

    Raises:
        ConfigError: a folder is not that of a run with episodes, a policy is not known, a run has several and none is
            chosen, or there are fewer than two sides.
        StoreError: a file of a run is damaged; the message names it.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is named twice; a comparison of a run with itself says nothing")
    found = [_Run.read(run) for run in runs]
    known = {name for run in found for name in run.rows}
    if unknown := [name for name in policies if name not in known]:
        raise ConfigError(f"--policy {unknown[0]}: no run has it{did_you_mean(unknown[0], known)}")
    asked = list(dict.fromkeys(policies))
    sides = [run.side(name) for run in found for name in run.chosen(asked, is_alone=len(runs) == 1)]
    if len(sides) < 2:
        raise ConfigError(f"{runs[0]} is one run of one policy; name another run to compare it with")
    return _labelled(sides)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that was read: by policy its rows, its scorers, and the states in which each sample began."""

    path: Path
    header: RunHeader
    rows: Mapping[str, Sequence[EpisodeRow]]
    scorers: Mapping[str, frozenset[str]]
    starts: Mapping[str, Mapping[str, frozenset[str]]]

    @classmethod
    def read(cls, path: Path) -> _Run:
        header = _header(path)
        rows: dict[str, list[EpisodeRow]] = defaultdict(list)
        scorers: dict[str, set[str]] = defaultdict(set)
        starts: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
        for result in read_results(path):
            with boundary(StoreError, f"{path}: episode {result.episode['rollout_id']} cannot be read"):
                row = _checked(result.row(), path)
            row.error_traceback = None
            rows[row.policy].append(row)
            scorers[row.policy] |= _scorer(result)
            if began := _start(result):
                of_policy = starts[row.policy]
                of_policy[row.sample_id] = of_policy.get(row.sample_id, frozenset()) | began
        if not rows:
            raise ConfigError(f"{path} has no episodes yet, so there is nothing to compare")
        return cls(path, header, rows, {policy: frozenset(names) for policy, names in scorers.items()}, starts)

    def chosen(self, policies: Sequence[str], *, is_alone: bool) -> Sequence[str]:
        """The policies that are compared."""
        names = sorted(self.rows)
        if taken := [name for name in policies if name in self.rows]:
            return taken
        if len(names) == 1 or (is_alone and not policies):
            return names
        raise ConfigError(f"{self.path} has several policies: {', '.join(names)}; choose one with --policy")

    def side(self, policy: str) -> Side:
        """One of its policies."""
        rows, threshold = self.rows[policy], self.header.pass_threshold
        (summary,) = summarise(rows, threshold)
        rollouts = _by_sample(rows)
        samples = {name: scores_of_sample(found, threshold) for name, of in rollouts.items() if (found := _scores(of))}
        return Side(
            path=self.path,
            header=self.header,
            policy=policy,
            label=policy,
            pass_threshold=threshold,
            summary=summary,
            samples=samples,
            unscored=frozenset(rollouts.keys() - samples.keys()),
            rollouts=rollouts,
            starts=self.starts.get(policy, {}),
            is_unit=all(0.0 <= row.score <= 1.0 for row in rows if row.score is not None),
            scorers=self.scorers[policy],
            unfinished=max(0, self.header.total - sum(map(len, self.rows.values()))),
        )


def _header(path: Path) -> RunHeader:
    header = RunHeader.of_folder(path)
    if header.training is not None:
        raise ConfigError(
            f"{path} is a training run, whose metrics.jsonl has means and no scores of single samples: nothing can be "
            "paired; run the trained model with `reward-kit run`, and compare those runs"
        )
    return header


def _checked(row: EpisodeRow, path: Path) -> EpisodeRow:
    """The row, if its score is one that differences can be made of."""
    if row.score is not None and abs(row.score) > _LARGEST:
        raise ConfigError(f"{path}: the score of {row.rollout_id} is beyond 1e99, and its differences say nothing")
    return row


def _scorer(result: Result) -> set[str]:
    scorer = (result.score or {}).get("scorer") or {}
    return {f"{scorer['id']} {str(scorer.get('hash'))[:12]}…"} if scorer.get("id") else set()


def _start(result: Result) -> frozenset[str]:
    """The state in which an episode began, where its environment told one."""
    start = result.episode.get("start")
    key = start.get("state_key") if isinstance(start, Mapping) else None
    return frozenset() if key is None else frozenset({str(key)})


def _by_sample(rows: Iterable[EpisodeRow]) -> dict[str, dict[str, float | None]]:
    rollouts: dict[str, dict[str, float | None]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.rollout_id):
        rollouts[row.sample_id][row.rollout_id] = row.score
    return dict(rollouts)


def _scores(rollouts: Mapping[str, float | None]) -> list[float]:
    return [score for score in rollouts.values() if score is not None]


def scores_of_sample(scores: Sequence[float], threshold: float) -> SampleScores:
    """What the scored rollouts of one sample come to; there is at least one."""
    return SampleScores(mean_of(scores), len(scores), sum(score >= threshold for score in scores))


def _labelled(sides: Sequence[Side]) -> list[Side]:
    """The sides with the shortest names that tell them apart."""
    runs = _without_common_start([side.path.resolve().name for side in sides])
    names = (
        [side.policy for side in sides],
        runs,
        [f"{side.policy} of {run}" for side, run in zip(sides, runs, strict=True)],
        [f"{side.policy} of {side.path}" for side in sides],
    )
    chosen = next(labels for labels in names if len(set(labels)) == len(sides))
    return [replace(side, label=label) for side, label in zip(sides, chosen, strict=True)]


def _without_common_start(names: Sequence[str]) -> list[str]:
    """Names of folders without the words, such as the task's, that all of them begin with."""
    words = [name.split("-") for name in names]
    common = 0
    while all(len(parts) > common + 1 and parts[common] == words[0][common] for parts in words):
        common += 1
    return ["-".join(parts[common:]) for parts in words] if len(set(names)) > 1 else list(names)
