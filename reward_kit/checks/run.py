"""Checks for a run's episodes, scores and credit, and for the rollout files of other trainers."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reward_kit.checks.episode import BatchChecks, check_episode
from reward_kit.checks.findings import Finding, Findings, Report
from reward_kit.checks.rows import FORMATS, check_foreign_file
from reward_kit.episodes.record import environment_return, episode_from_record, get_attempt
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, RewardKitError, StoreError, boundary, did_you_mean
from reward_kit.runs.credit import credit_settings, scores_digest
from reward_kit.runs.files import (
    CREDIT_FILE,
    EPISODES_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    read_json,
    state_file,
    wrap_os_errors,
)
from reward_kit.runs.run_folder import RunHeader, placed_lines, read_scores

_SAME = 1e-9


def is_run(target: str) -> bool:
    """Return True if a target is a directory, or if it does not exist but looks like the path of a directory."""
    path = Path(target)
    if path.exists() or ":" in target or path.suffix:
        return path.is_dir()
    return len(path.parts) > 1 or (Path("runs") / path / EPISODES_FILE).is_file()


def is_foreign_file(target: str) -> bool:
    """Return True if a target is the path of a file of records. The file does not have to exist."""
    return target.endswith((".json", ".jsonl"))


def check_file(path: Path, form: str | None) -> Report:
    """Check a file of TRL rollouts or verifiers traces."""
    if form is None:
        of_run = f"; to check a run, pass the directory {path.parent}" if path.name == EPISODES_FILE else ""
        raise ConfigError(f"{path}: unknown format; pass --format {' or --format '.join(FORMATS)}{of_run}")
    report = Report(str(path), "record")
    for findings in check_foreign_file(path, form):
        report.checked += 1
        report.add(findings)
    return report


def check_run(run: Path, progress: Callable[[int, float], None] = lambda number, share: None) -> Report:
    """Check all episodes of a run, including their scores and credit.

    Args:
        run: the run directory.
        progress: a function that is called for each line of `episodes.jsonl` with the line number and the fraction of
            the file that has been read.

    Raises:
        ConfigError: If the run does not exist.
        StoreError: If a file of the run cannot be read.
    """
    _require_run(run)
    report, credit, groups = Report(str(run)), _CreditLines(run), BatchChecks()
    # Only one bit per score and the offsets of the credit lines are kept in memory.
    is_scored = {(one["rollout_id"], get_attempt(one)): one.get("score") is not None for one in read_scores(run)}
    size, read, seen = (run / EPISODES_FILE).stat().st_size, 0, set()
    for number, (_, line) in enumerate(placed_lines(run / EPISODES_FILE), 1):
        read += len(line)
        progress(number, read / size)
        try:
            with boundary(EpisodeError, "cannot be read as an episode"):
                record = json.loads(line)
                episode = episode_from_record(record)
                findings, attempt = Findings.about_episode(episode.id_), operator.index(get_attempt(record))
                seen.add(episode.id_)
                _check_record(findings, run, record, episode)
                if not findings:
                    steps = credit.read(episode.id_, attempt)
                    scored = is_scored.get((episode.id_, attempt), False) if steps else None
                    findings += check_episode(episode, steps, scored=scored)
                    if steps and not findings:
                        credit.check_combination(findings, steps)
                    findings += groups.add(episode)
        except RewardKitError as error:
            findings = Findings(f"{EPISODES_FILE}:{number}")
            findings.error("unreadable", f"{error}; the file was edited, or written by a different version")
        report.checked += 1
        report.add(findings)
    report.add(credit.strays())
    is_readable = not report.has("unreadable")
    report.add(_check_header(run, len(seen) if is_readable else None))
    report.add(_check_summary(run) if is_readable else ())
    return report


def _require_run(run: Path) -> None:
    if (run / EPISODES_FILE).is_file():
        return
    if (run / RUN_FILE).is_file() and RunHeader.read(run).training is not None:
        raise ConfigError(
            f"{run} is a run of `reward-kit train`, and has no {EPISODES_FILE} to check; evaluate the model with "
            f"`reward-kit run TASK -T policy.model={run / 'model'}`, and check that run"
        )
    if run.is_dir():
        inside = [entry.name for entry in sorted(run.iterdir()) if (entry / EPISODES_FILE).is_file()]
        newest = f"; pass one of the runs in this directory, such as {run / inside[-1]}" if inside else ""
        raise ConfigError(f"{run} is not a run, because it has no {EPISODES_FILE}{newest}")
    if (Path("runs") / run / EPISODES_FILE).is_file():  # the default directory of runs
        raise ConfigError(f"no run {run}; did you mean {str(Path('runs') / run)!r}?")
    near = did_you_mean(run.name, (entry.name for entry in run.parent.iterdir())) if run.parent.is_dir() else ""
    raise ConfigError(f"no run {run}{near if near.endswith('?') else ''}")


def _check_record(findings: Findings, run: Path, record: Mapping[str, Any], episode: SingleAgentEpisode) -> None:
    """Check that the fields of a line agree with its episode."""
    if record.get("num_steps", len(episode)) != len(episode) or len(record["steps"]) != len(episode):
        findings.error(
            "track-lengths",
            f"num_steps is {record.get('num_steps')} and the line contains {len(record['steps'])} steps, but "
            f"{len(episode)} steps can be read; the final observation or a step is missing",
        )
        return
    recorded, summed = record.get("environment_return"), environment_return(episode)
    is_same = recorded is summed is None
    if recorded is not None and summed is not None:
        is_same = math.isclose(recorded, summed, rel_tol=_SAME, abs_tol=_SAME)
    if not is_same:
        text = f"the recorded return is {recorded}, but the sum of the step rewards is {summed}"
        findings.error("environment-reward", text)
    state = record.get("final_state")
    try:
        is_there = not state or state_file(run, "", state).is_file()
    except StoreError:
        is_there = False
    if not is_there:
        findings.error("final-state", "the final state is missing from states/; copy states/ with the run")


def _check_header(run: Path, rollouts: int | None) -> Findings:
    """Check `run.json` if it exists.

    `rollouts` is the number of episodes, or None if some episodes cannot be read.
    """
    findings = Findings(RUN_FILE)
    if not (run / RUN_FILE).is_file():
        return findings
    try:
        header = RunHeader.read(run)
    except StoreError as error:
        findings.error("unreadable", f"{error}; the file was edited, or written by a different version")
        return findings
    if header.status == "complete" and rollouts is not None and rollouts < header.total:
        text = f"the run is marked complete with {header.total} episodes, but only {rollouts} are recorded"
        findings.error("lost-episodes", text)
    return findings


def _check_summary(run: Path) -> Findings:
    """Check that a run's credit, if any, was computed from its current scores."""
    findings, has_lines = Findings(SUMMARY_FILE), (run / CREDIT_FILE).is_file()
    if not (run / SUMMARY_FILE).is_file():
        return findings
    again = f"assign credit again with `reward-kit credit {run}`"
    try:
        section = read_json(run / SUMMARY_FILE).get("credit")
    except StoreError as error:
        findings.error("unreadable", f"{error}; the file was edited")
        return findings
    if section is None and has_lines:
        text = f"there is no 'credit' section, so the scores from which {CREDIT_FILE} was computed are unknown; {again}"
        findings.error("credit-scores", text, level="warning")
    elif section is not None and not has_lines:
        findings.error("credit-steps", f"there is a 'credit' section, but {CREDIT_FILE} is missing; {again}")
    if section is None or not has_lines:
        return findings
    try:
        settings = credit_settings(run)
        digest = scores_digest(run, settings) if settings is not None else None
    except RewardKitError as error:
        findings.error("credit-scores", f"the scores of the credit cannot be read: {error}")
        return findings
    if digest is None:
        findings.error("unreadable", "the 'credit' section cannot be read; the file was edited")
    elif digest != section.get("scores_sha256"):
        findings.error("credit-scores", f"the credit was not computed from the run's current scores; {again}")
    return findings


class _CreditLines:
    """An index of the lines in `credit.jsonl`. The lines for the last attempt of an episode are consecutive."""

    def __init__(self, run: Path) -> None:
        self._weights = _combination_weights(run)
        self._path = run / CREDIT_FILE
        self._offsets: dict[str, list[int]] = {}
        self._attempts: dict[str, int] = {}
        self._is_damaged = False
        if not self._path.is_file():
            return
        for _, line in placed_lines(run / EPISODES_FILE):
            try:
                record = json.loads(line)
                rollout_id, attempt = str(record["rollout_id"]), operator.index(get_attempt(record))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._is_damaged = True  # a different finding reports the line
            else:
                self._attempts[rollout_id] = max(attempt, self._attempts.get(rollout_id, 0))
        last, offset = None, 0
        with wrap_os_errors("read", self._path), self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                rollout_id = _credit_line(line, f"{self._path}:{number}")["rollout_id"]
                if rollout_id != last:
                    self._offsets.setdefault(rollout_id, []).append(offset)
                last, offset = rollout_id, offset + len(line)

    def read(self, rollout_id: str, attempt: int) -> list[dict[str, Any]] | None:
        """Return the lines of an episode.

        If the episode has no lines, or if this is not its last attempt, return None.
        """
        if rollout_id not in self._offsets or self._attempts.get(rollout_id) != attempt:
            return None
        rows: list[dict[str, Any]] = []
        with wrap_os_errors("read", self._path), self._path.open("rb") as lines:
            for offset in self._offsets[rollout_id]:
                lines.seek(offset)
                for line in lines:
                    if (row := _credit_line(line, str(self._path)))["rollout_id"] != rollout_id:
                        break
                    rows.append(row)
        return rows

    def check_combination(self, findings: Findings, rows: Sequence[Mapping[str, Any]]) -> None:
        """Report the first step whose A is not the weighted sum of A_E and A_S."""
        if self._weights is None:
            return
        on_episode, on_step = self._weights
        for row in rows:
            episode, step, recorded = (row.get(name) for name in ("A_E", "A_S", "A"))
            if episode is None or step is None or recorded is None:
                continue
            expected = on_episode * episode + on_step * step
            if not math.isclose(expected, recorded, rel_tol=_SAME, abs_tol=_SAME):
                findings.error(
                    "credit-combination",
                    f"A is {recorded:.6g}, but {on_episode:g} A_E + {on_step:g} A_S is "
                    f"{expected:.6g}; the line was edited, or {SUMMARY_FILE} has the options of a different credit "
                    "assignment",
                    step=row["step"],
                )
                return

    def strays(self) -> list[Finding]:
        """Report credit that belongs to no episode of the run.

        If a line of `episodes.jsonl` cannot be read, nothing is reported.
        """
        findings = Findings(CREDIT_FILE)
        for rollout_id in () if self._is_damaged else sorted(self._offsets.keys() - self._attempts.keys()):
            text = f"there is credit for episode {rollout_id}, but {EPISODES_FILE} does not contain this episode"
            findings.error("credit-steps", text)
        return findings


def _combination_weights(run: Path) -> tuple[float, float] | None:
    """Return the weights of A_E and A_S in A, or None if the run has no credit or the weights are unknown."""
    if (settings := credit_settings(run)) is None:
        return None
    options = settings.options()
    is_convex = settings.estimator == "gigpo" and options.get("combination") != "additive"
    default = None if settings.estimator == "gigpo" else 1.0
    weight = options.get("omega" if is_convex else "step_weight", default)
    if not isinstance(weight, int | float):
        return None
    return (weight, 1.0 - weight) if is_convex else (1.0, weight)


def _credit_line(line: bytes, location: str) -> dict[str, Any]:
    with boundary(ConfigError, f"{location}: not the credit of a step"):
        row: dict[str, Any] = json.loads(line.rstrip())
        for name in ("A", "A_E", "A_S", "return_to_go"):
            if not isinstance(row.get(name), int | float | None):
                raise ConfigError(f"{location}: {name} must be a number, or null if unscored; got {row[name]!r}")
        return {"rollout_id": row["rollout_id"], **row}
