"""`reward-kit check` on a run, or on a file of another trainer's rollouts: the contract of episodes, proved on all."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from reward_kit.episodes.record import attempt_of, environment_return, episode_from_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, RewardKitError, boundary, did_you_mean
from reward_kit.reward_checks.report import counted, shown
from reward_kit.runs.files import told_of
from reward_kit.runs.store import read_scores
from reward_kit.tokens.checking.episodes import EpisodeFinding, check_episode
from reward_kit.tokens.checking.findings import Found
from reward_kit.tokens.checking.foreign import FORMATS, check_foreign_file
from reward_kit.tokens.checking.groups import BatchChecks

_EPISODES, _CREDIT = "episodes.jsonl", "credit.jsonl"
_EXAMPLES = 3
_LINE_CHARS = 400
_SECONDS_BETWEEN = 5.0


def is_run(target: str) -> bool:
    """Whether a target is a run's folder, or a path that was to be one: it has a separator and names nothing else."""
    path = Path(target)
    return path.is_dir() or (not path.exists() and ":" not in target and len(path.parts) > 1 and not path.suffix)


def is_foreign_file(target: str) -> bool:
    """Whether a target is a file of records; a missing one is said to be missing."""
    return target.endswith((".json", ".jsonl"))


@dataclass(slots=True)
class Tally:
    """What was found, by kind: counts, and the first few of each.

    Attributes:
        checked: how many episodes, or records, were looked at.
        counts: by kind and level.
        examples: the first messages of each kind.
    """

    checked: int = 0
    counts: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    examples: dict[tuple[str, str], list[EpisodeFinding]] = field(default_factory=lambda: defaultdict(list))

    def add(self, findings: Iterable[EpisodeFinding]) -> None:
        """Count the findings about one more episode."""
        self.checked += 1
        for finding in findings:
            key = (finding.level, finding.kind)
            self.counts[key] += 1
            if len(self.examples[key]) < _EXAMPLES:
                self.examples[key].append(finding)

    def count(self, level: str) -> int:
        """How many findings have this level."""
        return sum(count for (known, _), count in self.counts.items() if known == level)

    def to_json(self, target: str, what: str) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "target": target,
            "checked": {what: self.checked},
            "counts": {level: self.count(level) for level in ("error", "warning")},
            "findings": [
                {
                    "kind": kind,
                    "level": level,
                    "count": count,
                    "examples": [_as_json(one) for one in self.examples[key]],
                }
                for key, count in self._sorted()
                for level, kind in [key]
            ],
        }

    def lines(self, target: str, what: str) -> Iterator[str]:
        """The report for a terminal: errors first, the most frequent kind first."""
        for key, count in self._sorted():
            level, kind = key
            yield f"{level + ':':9}{kind}: {counted(count, 'finding')}"
            yield from (f"           {shown(one.message, _LINE_CHARS)}" for one in self.examples[key])
            if count > _EXAMPLES:
                yield f"           … and {count - _EXAMPLES} more"
        counts = ", ".join(counted(self.count(level), level) for level in ("error", "warning"))
        yield f"{target}: {counts} in {counted(self.checked, what)}"

    def _sorted(self) -> list[tuple[tuple[str, str], int]]:
        return sorted(self.counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))


def _as_json(finding: EpisodeFinding) -> dict[str, Any]:
    places = {"rollout_id": finding.rollout_id, "step": finding.step, "token": finding.token}
    return {"message": finding.message, **{key: value for key, value in places.items() if value is not None}}


def check_run(target: str, *, fail_on: str, as_json: bool) -> None:
    """Check every episode of a run with its score and its credit, one at a time, and leave with 1 on findings.

    Raises:
        ConfigError: there is no run of this name.
        StoreError: a file of it cannot be read.
    """
    run = Path(target)
    _refuse_no_run(run)
    tally = Tally()
    for findings in _findings_of(run):
        tally.add(findings)
    _report(tally, target, "episode", fail_on, as_json)


def check_file(target: str, form: str | None, *, fail_on: str, as_json: bool) -> None:
    """Check a file of TRL's rollouts or of verifiers' traces.

    Raises:
        ConfigError: it cannot be read, or its form was not said.
    """
    if form is None:
        raise ConfigError(f"{target}: say whose rollouts these are: --format {' or --format '.join(FORMATS)}")
    tally = Tally()
    for findings in check_foreign_file(Path(target), form):
        tally.add(findings)
    _report(tally, target, "record", fail_on, as_json)


def _report(tally: Tally, target: str, what: str, fail_on: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(tally.to_json(target, f"{what}s"), indent=2))
    else:
        for line in tally.lines(target, what):
            click.echo(line)
    fails = {"error": ("error",), "warning": ("error", "warning"), "info": ("error", "warning"), "never": ()}[fail_on]
    if any(tally.count(level) for level in fails):
        sys.exit(1)


def _refuse_no_run(run: Path) -> None:
    if (run / _EPISODES).is_file():
        return
    if run.is_dir():
        inside = [entry.name for entry in sorted(run.iterdir()) if (entry / _EPISODES).is_file()]
        newest = f"; name one of the runs in it, such as {run / inside[-1]}" if inside else ""
        raise ConfigError(f"{run} is no run: it has no {_EPISODES}{newest}")
    near = did_you_mean(run.name, (entry.name for entry in run.parent.iterdir())) if run.parent.is_dir() else ""
    raise ConfigError(f"no run {run}{near if near.endswith('?') else ''}")


def _findings_of(run: Path) -> Iterator[list[EpisodeFinding]]:
    """The findings about each line of `episodes.jsonl`. Of scores one bit is kept, of credit where its lines are."""
    is_scored = {(line["rollout_id"], attempt_of(line)): line.get("score") is not None for line in read_scores(run)}
    credit, groups, progress = _CreditLines(run), BatchChecks(), _Progress(run / _EPISODES)
    with told_of("read", run / _EPISODES), (run / _EPISODES).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # a kill left a part of a line; a resume cuts it off
            progress.tell(number, len(line))
            found = Found(f"{_EPISODES}:{number}")
            try:
                with boundary(EpisodeError, "it cannot be read as an episode"):
                    record = json.loads(line)
                    episode = episode_from_record(record)
            except RewardKitError as error:
                found.error("unreadable", f"{error}; the file was edited, or written by another version")
                yield found.findings
                continue
            found = Found.about_episode(episode.id_)
            _check_record(found, run, record, episode)
            if not found.findings:
                steps = credit.of(episode.id_, attempt_of(record))
                scored = is_scored.get((episode.id_, attempt_of(record)), False) if steps else None
                found.findings += check_episode(episode, steps, scored=scored)
                found.findings += groups.add(episode)
            yield found.findings
    progress.done()


def _check_record(found: Found, run: Path, record: Mapping[str, Any], episode: SingleAgentEpisode) -> None:
    """What a line says of its episode beside the episode itself."""
    if record.get("num_steps", len(episode)) != len(episode) or len(record["steps"]) != len(episode):
        found.error(
            "track-lengths",
            f"the line says {record.get('num_steps')} steps, lists {len(record['steps'])}, and {len(episode)} can be "
            "read; the final observation or a step is missing",
        )
        return
    told, summed = record.get("environment_return"), environment_return(episode)
    if (told is None) != (summed is None) or (told is not None and summed is not None and not _are_close(told, summed)):
        found.error(
            "environment-reward",
            f"the line says a return of {told} and its steps' rewards come to {summed}; a reward was "
            "changed afterwards",
        )
    state = record.get("final_state")
    if state and not (run / "states" / f"{state.get('sha256')}.{state.get('kind')}").is_file():
        found.error("final-state", "its final state is not in states/; the run was copied without it")


def _are_close(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-9 * max(1.0, abs(one), abs(two))


class _CreditLines:
    """Where in a run's `credit.jsonl` the lines of each episode are; they stand together, of its last attempt."""

    def __init__(self, run: Path) -> None:
        self._path = path = run / _CREDIT
        self._places: dict[str, list[int]] = {}
        self._attempts: dict[str, int] = {}
        if not path.is_file():
            return
        for rollout_id, attempt in _attempts(run / _EPISODES):
            self._attempts[rollout_id] = max(attempt, self._attempts.get(rollout_id, 0))
        last, offset = None, 0
        with told_of("read", path), path.open("rb") as lines:
            for line in lines:
                rollout_id = _line(line, path)["rollout_id"]
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
                    if (row := _line(line, self._path))["rollout_id"] != rollout_id:
                        break
                    found.append(row)
        return found


def _attempts(path: Path) -> Iterator[tuple[str, int]]:
    """Each line's episode and which attempt of it that is; a damaged line is somebody else's to report."""
    with told_of("read", path), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                yield record["rollout_id"], attempt_of(record)


def _line(line: bytes, path: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"{path}: a line is no credit of a step"):
        row: dict[str, Any] = json.loads(line)
        return {"rollout_id": row["rollout_id"], **row}


class _Progress:
    """Tells on standard error how far a long check is."""

    def __init__(self, path: Path) -> None:
        self._size, self._read, self._said = path.stat().st_size, 0, False
        self._next = time.monotonic() + _SECONDS_BETWEEN

    def tell(self, number: int, read: int) -> None:
        """Count a line; every few seconds say so."""
        self._read += read
        if time.monotonic() < self._next:
            return
        self._next, self._said = time.monotonic() + _SECONDS_BETWEEN, True
        click.echo(f"{counted(number, 'episode')}, {self._read / self._size:.0%}", err=True)

    def done(self) -> None:
        """The last line of one that was told of."""
        if self._said:
            click.echo("100%", err=True)
