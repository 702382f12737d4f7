"""`reward-kit check` on a run, or on a file of another trainer's rollouts: the contract of episodes, proved on all."""

from __future__ import annotations

import json
import operator
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_kit.cli.check_run_files import check_header, check_summary, combination_rule
from reward_kit.cli.echo import echo, echo_json
from reward_kit.display_text import counted
from reward_kit.episodes.record import attempt_of, environment_return, episode_from_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, RewardKitError, StoreError, boundary, did_you_mean
from reward_kit.reward_checks.report import shown
from reward_kit.runs.files import state_file, told_of
from reward_kit.runs.run_folder import FILE, RunHeader, placed_lines, read_scores
from reward_kit.tokens.checking.episodes import EpisodeFinding, check_episode
from reward_kit.tokens.checking.findings import Found
from reward_kit.tokens.checking.foreign import FORMATS, check_foreign_file
from reward_kit.tokens.checking.groups import BatchChecks

_EPISODES, _CREDIT = "episodes.jsonl", "credit.jsonl"
_EXAMPLES = 3
_LINE_CHARS = 400
_SECONDS_BETWEEN = 5.0


def is_run(target: str) -> bool:
    """Whether a target is a run's folder, or was to be one: it is nothing else, and has a separator or is in `runs`."""
    path = Path(target)
    if path.exists() or ":" in target or path.suffix:
        return path.is_dir()
    return len(path.parts) > 1 or _in_runs(path).is_file()


def _in_runs(run: Path) -> Path:
    """Where the episodes of a run of this name are, in the folder in which runs are by default."""
    return Path("runs") / run / _EPISODES


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

    def add(self, findings: Iterable[EpisodeFinding], checked: int = 1) -> None:
        """Count the findings about one more episode, or about none."""
        self.checked += checked
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
    tally, credit = Tally(), _CreditLines(run)
    for findings in _findings_of(run, credit):
        tally.add(findings)
    tally.add(credit.strays(), checked=0)
    is_readable = ("error", "unreadable") not in tally.counts
    tally.add(check_header(run, len(credit.seen) if is_readable else None), checked=0)
    tally.add(check_summary(run) if is_readable else (), checked=0)
    _report(tally, target, "episode", fail_on, as_json)


def check_file(target: str, form: str | None, *, fail_on: str, as_json: bool) -> None:
    """Check a file of TRL's rollouts or of verifiers' traces.

    Raises:
        ConfigError: it cannot be read, or its form was not said.
    """
    if form is None:
        folder = Path(target).parent
        of_run = f"; a run is checked by its folder, {folder}" if Path(target).name == _EPISODES else ""
        raise ConfigError(f"{target}: say whose rollouts these are: --format {' or --format '.join(FORMATS)}{of_run}")
    tally = Tally()
    for findings in check_foreign_file(Path(target), form):
        tally.add(findings)
    _report(tally, target, "record", fail_on, as_json)


def _report(tally: Tally, target: str, what: str, fail_on: str, as_json: bool) -> None:
    if as_json:
        echo_json(tally.to_json(target, f"{what}s"), indent=2)
    else:
        for line in tally.lines(target, what):
            echo(line)
    fails = {"error": ("error",), "warning": ("error", "warning"), "info": ("error", "warning"), "never": ()}[fail_on]
    if any(tally.count(level) for level in fails):
        sys.exit(1)


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
    if _in_runs(run).is_file():
        raise ConfigError(f"no run {run}; did you mean {str(_in_runs(run).parent)!r}?")
    near = did_you_mean(run.name, (entry.name for entry in run.parent.iterdir())) if run.parent.is_dir() else ""
    raise ConfigError(f"no run {run}{near if near.endswith('?') else ''}")


def _findings_of(run: Path, credit: _CreditLines) -> Iterator[list[EpisodeFinding]]:
    """The findings about each line of `episodes.jsonl`. Of scores one bit is kept, of credit where its lines are."""
    is_scored = _scores_of(run)
    groups, progress = BatchChecks(), _Progress(run / _EPISODES)
    for number, (_, line) in enumerate(placed_lines(run / _EPISODES), 1):
        progress.tell(number, len(line))
        try:
            with boundary(EpisodeError, "it cannot be read as an episode"):
                found = _check_line(json.loads(line), run, is_scored, credit, groups)
        except RewardKitError as error:
            found = Found(f"{_EPISODES}:{number}")
            found.error("unreadable", f"{error}; the file was edited, or written by another version")
        yield found.findings
    progress.done()


def _scores_of(run: Path) -> dict[tuple[str, int], bool]:
    """Whether each attempt of each episode has a score."""
    return {(line["rollout_id"], attempt_of(line)): line.get("score") is not None for line in read_scores(run)}


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
    if state and not _has_state(run, state):
        found.error("final-state", "its final state is not in states/; the run was copied without it")


def _has_state(run: Path, state: Mapping[str, Any]) -> bool:
    try:
        return state_file(run, "", state).is_file()
    except StoreError:
        return False


def _are_close(one: float, two: float) -> bool:
    return abs(one - two) <= 1e-9 * max(1.0, abs(one), abs(two))


class _CreditLines:
    """Where in a run's `credit.jsonl` the lines of each episode are; they stand together, of its last attempt.

    Attributes:
        rule: how A was made of its parts; None where that is not known.
        seen: the episodes of which a line was read.
    """

    def __init__(self, run: Path) -> None:
        self.rule = combination_rule(run)
        self.seen: set[str] = set()
        self._path = path = run / _CREDIT
        self._places: dict[str, list[int]] = {}
        self._attempts: dict[str, int] = {}
        self._is_damaged = False
        if not path.is_file():
            return
        for known in _attempts(run / _EPISODES):
            if known is None:
                self._is_damaged = True
            else:
                rollout_id, attempt = known
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

    def strays(self) -> list[EpisodeFinding]:
        """Credit of episodes that the run does not have; where a line cannot be read, whose it is stays unknown."""
        found = Found(_CREDIT)
        for rollout_id in () if self._is_damaged else sorted(self._places.keys() - self._attempts.keys()):
            found.error("credit-steps", f"it credits {rollout_id}, of which {_EPISODES} has no line: it was lost")
        return found.findings


def _attempts(path: Path) -> Iterator[tuple[str, int] | None]:
    """Each line's episode and which attempt of it that is; None for a damaged line, which others report."""
    for _, line in placed_lines(path):
        try:
            record = json.loads(line)
            known = str(record["rollout_id"]), operator.index(attempt_of(record))
        except (ValueError, KeyError, TypeError, AttributeError):
            known = None
        yield known


def _line(line: bytes, place: str) -> dict[str, Any]:
    with boundary(ConfigError, f"{place}: the line is no credit of a step"):
        row: dict[str, Any] = json.loads(line.rstrip())
        for name in ("A", "A_E", "A_S", "return_to_go"):
            if not isinstance(row.get(name), int | float | None):
                raise ConfigError(f"{place}: {name} is a number, or null where unscored; got {row[name]!r}")
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
        echo(f"{counted(number, 'episode')}, {self._read / self._size:.0%}", err=True)

    def done(self) -> None:
        """The last line of one that was told of."""
        if self._said:
            echo("100%", err=True)
