"""Check a run, or a file of another trainer's rollouts: every episode with its score and its credit, one at a time."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reward_kit.checks.episode import BatchChecks, check_episode
from reward_kit.checks.findings import Finding, Found, Report
from reward_kit.checks.rows import FORMATS, check_foreign_file
from reward_kit.episodes.record import attempt_of, environment_return, episode_from_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, RewardKitError, StoreError, boundary, did_you_mean
from reward_kit.runs.credit import FILE as CREDIT
from reward_kit.runs.credit import scores_digest, settings_of
from reward_kit.runs.files import read_json, state_file, told_of
from reward_kit.runs.run_folder import FILE, RunHeader, placed_lines, read_scores

SUMMARY = "summary.json"
_SAME = 1e-9


class CombinationRule(NamedTuple):
    """A = episode_weight · A_E + step_weight · A_S, as the options of an estimator say."""

    episode_weight: float
    step_weight: float

    def check(self, found: Found, rows: Sequence[Mapping[str, Any]]) -> None:
        """Find the first step whose A is not what its A_E and A_S come to."""
        for row in rows:
            parts = [row.get(name) for name in ("A_E", "A_S", "A")]
            if None in parts:
                continue
            episode, step, told = map(float, parts)  # type: ignore[arg-type]
            expected = self.episode_weight * episode + self.step_weight * step
            if not math.isclose(expected, told, rel_tol=_SAME, abs_tol=_SAME):
                found.error(
                    "credit-combination",
                    f"A is {told:.6g}, and {self.episode_weight:g} A_E + {self.step_weight:g} A_S is {expected:.6g}; "
                    f"a line was changed by hand, or {SUMMARY} has the options of other credit",
                    step=row["step"],
                )
                return


def combination_rule(run: Path) -> CombinationRule | None:
    """Return how the credit of a run combines its parts; None if it has no credit, or this is unknown."""
    settings = settings_of(run)
    if settings is None:
        return None
    options = settings.options()
    if settings.estimator != "gigpo":
        return CombinationRule(1.0, 1.0)
    is_additive = options.get("combination") == "additive"
    weight = options.get("step_weight" if is_additive else "omega")
    if not isinstance(weight, int | float):
        return None
    return CombinationRule(1.0, weight) if is_additive else CombinationRule(weight, 1.0 - weight)


def check_header(run: Path, rollouts: int | None) -> list[Finding]:
    """Check `run.json`, if it exists.

    Args:
        run: its folder.
        rollouts: how many episodes it has, one of several attempts counted once; None where some cannot be read.
    """
    found = Found(FILE)
    if not (run / FILE).is_file():
        return []
    try:
        header = RunHeader.read(run)
    except StoreError as error:
        found.error("unreadable", f"{error}; the file was edited, or written by another version")
        return found.findings
    if header.status == "complete" and rollouts is not None and rollouts < header.total:
        found.error(
            "lost-episodes",
            f"it says that the run is complete with {header.total} episodes, and there are {rollouts}; lines of "
            "episodes.jsonl were lost",
        )
    return found.findings


def check_summary(run: Path) -> list[Finding]:
    """Check that the credit of a run, where it has some, is that of the scores which it has now."""
    found = Found(SUMMARY)
    if not (run / SUMMARY).is_file():
        return []
    try:
        section = read_json(run / SUMMARY).get("credit")
    except StoreError as error:
        found.error("unreadable", f"{error}; the file was edited")
        return found.findings
    has_lines = (run / CREDIT).is_file()
    if section is None:
        if has_lines:
            found.warn(
                "credit-scores",
                f"it says nothing of credit, and there is a {CREDIT}; of which scores that is is unknown: assign "
                f"it again with `reward-kit credit {run}`",
            )
    elif not has_lines:
        found.error("credit-steps", f"it tells of credit, and there is no {CREDIT}: it was lost")
    else:
        try:
            settings = settings_of(run)
            digest = scores_digest(run, settings) if settings is not None else None
        except RewardKitError as error:
            found.error("credit-scores", f"the scores that were credited cannot be read: {error}")
            return found.findings
        if digest is None:
            found.error("unreadable", "the section `credit` cannot be read; the file was edited")
        elif digest != section.get("scores_sha256"):
            found.error(
                "credit-scores",
                f"the credit is of other scores than the run has now; assign it again with `reward-kit credit {run}`",
            )
    return found.findings


_EPISODES = "episodes.jsonl"


def is_run(target: str) -> bool:
    """Return whether a target is, or was meant as, a run's folder: it has a separator or is in `runs`."""
    path = Path(target)
    if path.exists() or ":" in target or path.suffix:
        return path.is_dir()
    return len(path.parts) > 1 or (Path("runs") / path / _EPISODES).is_file()


def is_foreign_file(target: str) -> bool:
    """Return whether a target is a file of records, which need not exist."""
    return target.endswith((".json", ".jsonl"))


def check_run(run: Path, progress: Callable[[int, float], None] = lambda number, share: None) -> Report:
    """Check every episode of a run with its score and its credit, one at a time.

    Args:
        run: its folder.
        progress: called with the number of each line of `episodes.jsonl` and the share of the file that was read.

    Raises:
        ConfigError: there is no run of this name.
        StoreError: a file of it cannot be read.
    """
    _refuse_no_run(run)
    report, credit = Report(str(run)), _CreditLines(run)
    for findings in _findings_of(run, credit, progress):
        report.checked += 1
        report.add(findings)
    report.add(credit.strays())
    is_readable = not report.has("unreadable")
    report.add(check_header(run, len(credit.seen) if is_readable else None))
    report.add(check_summary(run) if is_readable else ())
    return report


def check_file(path: Path, form: str | None) -> Report:
    """Check a file of TRL's rollouts or of verifiers' traces.

    Raises:
        ConfigError: it cannot be read, or its form was not named.
    """
    if form is None:
        of_run = f"; a run is checked by its folder, {path.parent}" if path.name == _EPISODES else ""
        raise ConfigError(f"{path}: say whose rollouts these are: --format {' or --format '.join(FORMATS)}{of_run}")
    report = Report(str(path), "record")
    for findings in check_foreign_file(path, form):
        report.checked += 1
        report.add(findings)
    return report


def _refuse_no_run(run: Path) -> None:
    if (run / _EPISODES).is_file():
        return
    if (run / FILE).is_file() and RunHeader.read(run).training is not None:
        raise ConfigError(
            f"{run} is a run of `reward-kit train`: it keeps figures, checkpoints and a model, and no {_EPISODES} "
            f"to check. Let its model act, and check that run: reward-kit run TASK -T policy.model={run / 'model'}"
        )
    if run.is_dir():
        inside = [entry.name for entry in sorted(run.iterdir()) if (entry / _EPISODES).is_file()]
        newest = f"; name one of the runs in it, such as {run / inside[-1]}" if inside else ""
        raise ConfigError(f"{run} is no run: it has no {_EPISODES}{newest}")
    if (Path("runs") / run / _EPISODES).is_file():  # runs are in this folder by default
        raise ConfigError(f"no run {run}; did you mean {str(Path('runs') / run)!r}?")
    near = did_you_mean(run.name, (entry.name for entry in run.parent.iterdir())) if run.parent.is_dir() else ""
    raise ConfigError(f"no run {run}{near if near.endswith('?') else ''}")


def _findings_of(
    run: Path, credit: _CreditLines, progress: Callable[[int, float], None] = lambda number, share: None
) -> Iterator[list[Finding]]:
    """The findings about each line of `episodes.jsonl`. Of scores one bit is kept, of credit where its lines are."""
    is_scored = {(one["rollout_id"], attempt_of(one)): one.get("score") is not None for one in read_scores(run)}
    groups, size, read = BatchChecks(), (run / _EPISODES).stat().st_size, 0
    for number, (_, line) in enumerate(placed_lines(run / _EPISODES), 1):
        read += len(line)
        progress(number, read / size)
        try:
            with boundary(EpisodeError, "it cannot be read as an episode"):
                found = _check_line(json.loads(line), run, is_scored, credit, groups)
        except RewardKitError as error:
            found = Found(f"{_EPISODES}:{number}")
            found.error("unreadable", f"{error}; the file was edited, or written by another version")
        yield found.findings


def _check_line(
    record: Mapping[str, Any],
    run: Path,
    is_scored: Mapping[tuple[str, int], bool],
    credit: _CreditLines,
    groups: BatchChecks,
) -> Found:
    """The findings about one line, with its score and its credit."""
    episode = episode_from_record(record)
    found, attempt = Found.about_episode(episode.id_), operator.index(attempt_of(record))
    credit.seen.add(episode.id_)
    _check_record(found, run, record, episode)
    if not found.findings:
        steps = credit.of(episode.id_, attempt)
        scored = is_scored.get((episode.id_, attempt), False) if steps else None
        found.findings += check_episode(episode, steps, scored=scored)
        if steps and not found.findings and credit.rule is not None:
            credit.rule.check(found, steps)
        found.findings += groups.add(episode)
    return found


def _check_record(found: Found, run: Path, record: Mapping[str, Any], episode: SingleAgentEpisode) -> None:
    """Check the facts of a line beside the episode itself."""
    if record.get("num_steps", len(episode)) != len(episode) or len(record["steps"]) != len(episode):
        found.error(
            "track-lengths",
            f"the line says {record.get('num_steps')} steps, lists {len(record['steps'])}, and {len(episode)} can be "
            "read; the final observation or a step is missing",
        )
        return
    told, summed = record.get("environment_return"), environment_return(episode)
    is_same = told is summed is None
    if told is not None and summed is not None:
        is_same = math.isclose(told, summed, rel_tol=_SAME, abs_tol=_SAME)
    if not is_same:
        found.error(
            "environment-reward",
            f"the line says a return of {told} and its steps' rewards come to {summed}; a reward was "
            "changed afterwards",
        )
    state = record.get("final_state")
    try:
        is_there = not state or state_file(run, "", state).is_file()
    except StoreError:
        is_there = False
    if not is_there:
        found.error("final-state", "its final state is not in states/; the run was copied without it")


class _CreditLines:
    """Index of the lines of each episode in a run's `credit.jsonl`; they stand together, of its last attempt.

    Attributes:
        rule: how A was made of its parts; None where that is not known.
        seen: the episodes of which a line was read.
    """

    def __init__(self, run: Path) -> None:
        self.rule = combination_rule(run)
        self.seen: set[str] = set()
        self._path = path = run / CREDIT
        self._places: dict[str, list[int]] = {}
        self._attempts: dict[str, int] = {}
        self._is_damaged = False
        if not path.is_file():
            return
        for _, line in placed_lines(run / _EPISODES):
            try:
                record = json.loads(line)
                rollout_id, attempt = str(record["rollout_id"]), operator.index(attempt_of(record))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._is_damaged = True  # which is a finding about that line
            else:
                self._attempts[rollout_id] = max(attempt, self._attempts.get(rollout_id, 0))
        last, offset = None, 0
        with told_of("read", path), path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                rollout_id = _line(line, f"{path}:{number}")["rollout_id"]
                if rollout_id != last:
                    self._places.setdefault(rollout_id, []).append(offset)
                last, offset = rollout_id, offset + len(line)

    def of(self, rollout_id: str, attempt: int) -> list[dict[str, Any]] | None:
        """The lines of one episode; None where it has none, and where another attempt of it counts."""
        if rollout_id not in self._places or self._attempts.get(rollout_id) != attempt:
            return None
        found: list[dict[str, Any]] = []
        with told_of("read", self._path), self._path.open("rb") as lines:
            for place in self._places[rollout_id]:
                lines.seek(place)
                for line in lines:
                    if (row := _line(line, str(self._path)))["rollout_id"] != rollout_id:
                        break
                    found.append(row)
        return found

    def strays(self) -> list[Finding]:
        """Credit of episodes that the run does not have; where a line cannot be read, whose it is stays unknown."""
        found = Found(CREDIT)
        for rollout_id in () if self._is_damaged else sorted(self._places.keys() - self._attempts.keys()):
            found.error("credit-steps", f"it credits {rollout_id}, of which {_EPISODES} has no line: it was lost")
        return found.findings


def _line(line: bytes, place: str) -> dict[str, Any]:
    with boundary(ConfigError, f"{place}: the line is no credit of a step"):
        row: dict[str, Any] = json.loads(line.rstrip())
        for name in ("A", "A_E", "A_S", "return_to_go"):
            if not isinstance(row.get(name), int | float | None):
                raise ConfigError(f"{place}: {name} is a number, or null where unscored; got {row[name]!r}")
        return {"rollout_id": row["rollout_id"], **row}
