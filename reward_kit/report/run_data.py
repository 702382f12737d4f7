"""The data for a run's page: the run's header, and the main facts about each episode and score."""

from __future__ import annotations

import datetime
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from reward_kit.episodes.json_codec import from_json_value
from reward_kit.episodes.record import LatestAttempts, get_attempt
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.reward_agent.stats import usage_cost
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.runs.counterfactual_file import RunCurves, SuccessCurve, read_curves
from reward_kit.runs.files import EPISODES_FILE, SCORES_FILE, read_line
from reward_kit.runs.label_file import EpisodeLabels, read_run_labels
from reward_kit.runs.results import LineRange
from reward_kit.runs.run_folder import RunHeader, check_score, line_record, placed_lines
from reward_kit.runs.summary import EpisodeRow, JudgeCall, metric_scores, repeated_cost

_KEPT_TEXT = 2_000
_NOT_COLUMNS = ("id", "tags", "ground_truth")
_LONGEST_VALUE = 40
K = TypeVar("K", bound=Hashable)
# In a line of `episodes.jsonl`, the conversation, the steps and the tokens are between the first two of these keys. The
# figures of the page need only the tool errors and the usage of the simulated user from this part.
_MIDDLE, _SAMPLE, _AFTER = b',"messages":[', b',"sample":', b',"timing":'
_TELLING = (b'"error":', b'"user_usage":')


class TextExcerpt(NamedTuple):
    """The beginning of a text, and the length of the full text."""

    text: str = ""
    length: int = 0


@dataclass(frozen=True, slots=True)
class ScoreFacts:
    """The data in a line of `scores.jsonl`. Times are in seconds since the start of the run."""

    unit: str  # the id of its reward call; for a batch reward, the id of the group
    duration_s: float | None = None  # the duration of the last call
    submitted_s: float | None = None  # None in lines written by older releases
    attempts: tuple[tuple[float, float], ...] = ()  # the start and end of each call
    done_s: float | None = None  # the time at which the score was received
    usage: str = ""  # the usage reported by a judge
    cost_usd: float | None = None  # None if the price is unknown
    place: LineRange | None = None  # the position of its line


@dataclass(frozen=True, slots=True)
class EpisodeOutline:
    """The main data of an episode's latest attempt."""

    row: EpisodeRow
    group_id: str
    begin_s: float | None  # seconds since the run began; None if not collected by this run
    duration_s: float | None
    policy_s: float | None
    environment_s: float | None
    said: TextExcerpt  # the error, or the reason for the score
    score: ScoreFacts | None  # None until the episode is scored
    rollout_index: int = 0  # the index within its group
    columns: Mapping[str, str] = field(default_factory=dict)  # the short scalar fields of its sample
    place: LineRange | None = None  # the position of its line

    @property
    def end_s(self) -> float | None:
        """The time at which the episode stopped."""
        return None if self.begin_s is None or self.duration_s is None else self.begin_s + self.duration_s


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The data that a page shows about a run."""

    path: Path
    header: RunHeader
    episodes: Sequence[EpisodeOutline]
    earlier_attempts: int  # the number of attempts replaced by a later attempt
    unfinished: int  # the number of episodes cut off by a limit of the run, which are not results
    labels: Mapping[str, EpisodeLabels] = field(default_factory=dict)  # keyed by rollout id
    spent: float = 0.0  # the known cost of all attempts and their judges, in US dollars
    curves: RunCurves = field(default_factory=lambda: RunCurves({}))

    @property
    def repeated_cost(self) -> float:
        """The known cost, in US dollars, of the attempts that were replaced or are unfinished."""
        return repeated_cost(self.spent, [facts.row for facts in self.episodes])

    @property
    def pass_threshold(self) -> float:
        """The lowest score that passes."""
        return self.header.pass_threshold


class RunSpending:
    """The known cost of all attempts of a run and their judges.

    Attempts that were replaced by a later attempt are included.
    """

    def __init__(self) -> None:
        self.dollars = 0.0
        self._calls: set[JudgeCall] = set()

    def add_attempt(self, row: EpisodeRow) -> None:
        """Add the cost of an attempt, excluding the cost of its judge."""
        self.dollars += row.usage.get("cost", 0.0)

    def add_score(self, record: Mapping[str, Any]) -> None:
        """Add the judge's cost for a score. Episodes that were judged in one call share its cost."""
        call = JudgeCall.of(record)
        if call is not None and call not in self._calls:
            self._calls.add(call)
            self.dollars += call.cost or 0.0


def read_run(path: Path) -> RunFacts:
    """Read the run in a directory, which may still be running."""
    header = RunHeader.read(path)
    if header.training is not None:
        raise ConfigError(f"{path} is a training run, which has metrics.jsonl instead of episodes.jsonl")
    scores: dict[tuple[str, int], dict[str, Any]] = {}
    spent = RunSpending()
    file = path / SCORES_FILE
    for number, (offset, line) in enumerate(placed_lines(file), 1):
        score = score_facts(line_record(file, number, line, check_score), LineRange(offset, len(line)))
        scores[score["rollout_id"], get_attempt(score)] = score
        spent.add_score(score)
    latest, file = LatestAttempts[EpisodeOutline](), path / EPISODES_FILE
    for number, (offset, line) in enumerate(placed_lines(file), 1):
        record = outline_line(file, number, line)
        scored = scores.get((record["rollout_id"], get_attempt(record)))
        facts = episode_outline(record, header, scored, LineRange(offset, len(line)))
        latest.put(facts.row.rollout_id, facts.row.attempt, facts)
        spent.add_attempt(facts.row)
    episodes = latest.values()
    finished = [facts for facts in episodes if not facts.row.is_unfinished]
    unfinished, labels = len(episodes) - len(finished), read_run_labels(path)
    return RunFacts(path, header, finished, latest.earlier, unfinished, labels, spent.dollars, read_curves(path))


def curves_of(facts: EpisodeOutline, curves: RunCurves) -> list[SuccessCurve]:
    """Return the curves of an episode's latest attempt and score, starting with the curve of its own policy."""
    known = facts.row.num_steps, facts.row.score
    own = [curve for curve in curves.curves.get(facts.row.rollout_id, ()) if (curve.steps, curve.score) == known]
    return sorted(own, key=lambda curve: curve.continued_by != facts.row.policy)


def outline_line(file: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse a line of `episodes.jsonl`, skipping its long middle part if possible."""
    return _outlined(line) or line_record(file, number, line)


def _outlined(line: bytes) -> dict[str, Any] | None:
    """Parse a line of `episodes.jsonl` without its long middle part, which takes most of the parsing time.

    Return None if the middle part is not where it is expected or contains data that the page needs. A mark inside a
    different value would leave brackets open, and strings cannot contain the marks, since their quotes would be
    escaped.
    """
    begin, end = line.find(_MIDDLE), line.rfind(_AFTER)
    if not 0 < begin < end or any(line.find(key, begin, end) >= 0 for key in _TELLING):
        return None
    sample = line.rfind(_SAMPLE, begin, end)
    try:
        record = read_line(line[:begin] + line[sample if sample >= 0 else end :])
    except ValueError:
        return None
    is_whole = isinstance(record.get("rollout_id"), str) and isinstance(record.get("attempt"), int | None)
    record["steps"] = []
    return record if is_whole else None


def grouped(episodes: Iterable[EpisodeOutline], key: Callable[[EpisodeOutline], K]) -> dict[K, list[EpisodeOutline]]:
    """Group episodes by a key, keeping their order."""
    groups: dict[K, list[EpisodeOutline]] = defaultdict(list)
    for facts in episodes:
        groups[key(facts)].append(facts)
    return groups


def episode_outline(
    record: Mapping[str, Any], header: RunHeader, score: Mapping[str, Any] | None, place: LineRange | None = None
) -> EpisodeOutline:
    """Return the outline of one episode."""
    with boundary(StoreError, f"episodes.jsonl: {record['rollout_id']} cannot be read as an episode"):
        row = EpisodeRow.from_record(record)
        if score is not None:
            row.add_score(score)
        said = _said(row.error_message) if row.error_message else score["said"] if score is not None else TextExcerpt()
        row.error_message = said.text if row.error_message else None
        timing = record.get("timing") or {}
        return EpisodeOutline(
            row=row,
            group_id=str(from_json_value(record.get("group_id"))),
            # Scored transcripts have the times of their original collection.
            begin_s=_since(header, timing.get("started_at")) if header.data is None else None,
            duration_s=_duration(timing.get("duration_s")),
            policy_s=_duration(timing.get("policy_s")),
            environment_s=_duration(timing.get("environment_s")),
            said=said,
            score=_score(score) if score is not None else None,
            rollout_index=int(_number(record.get("rollout_index")) or 0),
            columns=_columns(record.get("sample")),
            place=place,
        )


def _columns(sample: Any) -> dict[str, str]:
    """Return the fields of a sample that can form slices, as strings."""
    fields = sample.items() if isinstance(sample, Mapping) else ()
    return {
        sys.intern(name): sys.intern(str(value))
        for name, value in fields
        if name not in _NOT_COLUMNS and len(name) <= _LONGEST_VALUE and _is_short(value)
    }


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST_VALUE
    return isinstance(value, int | float) and -1e15 < value < 1e15  # a huge integer cannot be converted to a string


def score_facts(line: Mapping[str, Any], place: LineRange | None = None) -> dict[str, Any]:
    """Return the fields of a line of `scores.jsonl` that the page shows. The length of texts is bounded."""
    result, failure = line.get("result") or {}, line.get("failure")
    usage = (result.get("metrics") or {}).get(METRIC) or {}
    kept = {key: line.get(key) for key in ("rollout_id", "attempt", "score", "timing", "scored_group", "scorer")}
    kept["failure"] = failure
    metrics: dict[str, Any] = {name: {"score": score} for name, score in metric_scores(result).items()}
    if said := _said(usage.get("reason")).text:
        metrics[METRIC] = {"reason": said}
    kept["result"] = {"is_imputed": result.get("is_imputed"), "metrics": metrics}
    kept["place"] = place
    kept["said"], kept["usage"] = _said(result.get("reason")), said
    return kept


def _score(line: Mapping[str, Any]) -> ScoreFacts:
    timing = line.get("timing") or {}
    spans = [tuple(map(_number, span)) for span in timing.get("attempts") or () if len(span) == 2]
    return ScoreFacts(
        unit=line["scored_group"] or line["rollout_id"],
        duration_s=_duration(timing.get("duration_s")),
        submitted_s=_number(timing.get("submitted_s")),
        attempts=tuple((begin, max(begin, end)) for begin, end in spans if begin is not None and end is not None),
        done_s=_number(timing.get("done_s")),
        usage=line["usage"],
        cost_usd=usage_cost(line["usage"]) if line["usage"] else None,
        place=line["place"],
    )


def _said(text: str | None) -> TextExcerpt:
    """Return the beginning of a text, to limit the memory that untrusted text uses."""
    return TextExcerpt(text[:_KEPT_TEXT], len(text)) if text else TextExcerpt()


def _since(header: RunHeader, time: Any) -> float | None:
    try:
        began = datetime.datetime.fromisoformat(time)
        elapsed = (began - header.timing.started_at).total_seconds()
    except (TypeError, ValueError):  # not a time, or without a time zone
        return None
    return max(0.0, elapsed)


def _duration(value: Any) -> float | None:
    known = _number(value)
    return None if known is None else max(0.0, known)


def _number(value: Any) -> float | None:
    if type(value) is float:  # the usual case
        return value if math.isfinite(value) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer outside the range of floats
        return None
