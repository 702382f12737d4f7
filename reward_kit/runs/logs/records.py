"""`LogEpisode`, the form that all formats are converted to, and the restoration of fields when a log is exported."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic

from reward_kit.agent.actions import episode_from_messages
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id, make_rollout_id
from reward_kit.episodes.record import EpisodeFacts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, Failure
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.safe_input import NESTING, is_nested_too_deeply
from reward_kit.validation import describe_validation_error

LOG = "log"
"""The key in an episode's `custom_data` for the origin of an imported episode, and for its additional fields."""
_MISSING = object()
_PLACED = frozenset(
    {
        *("schema_version", "rollout_id", "sample_id", "group_id", "rollout_index", "attempt", "policy", "stop_reason"),
        *("failure", "terminated", "truncated", "num_steps", "usage", "messages", "steps", "final", "sample", "timing"),
        *("ground_truth", "custom_data"),
    }
)


@dataclass(slots=True)
class LogEpisode:
    """An episode of a log.

    Attributes:
        sample_id: the id of the sample.
        policy: the name of the model or agent.
        messages: the conversation in chat format.
        sample: the fields of the sample.
        ground_truth: the target of the sample.
        stop_reason: the reason why the episode ended.
        failure: the error that ended the episode, if any.
        usage: the tokens and the cost, with the keys of an episode's `usage`.
        timing: the start time and the duration.
        scores: the scores, in order. All of them are metrics of the episode's score.
        metrics: values that are not scores, so one is the score of the episode only if it is selected.
        tool_errors: the errors of tool calls, keyed by the index of the tool message.
        extra: fields without another place in an episode, which are stored with it.
        episode: the whole episode, if the format stores more than messages, such as tokens. `messages` is then empty.
    """

    sample_id: str
    policy: str
    messages: list[dict[str, Any]]
    sample: dict[str, Any] = field(default_factory=dict)
    ground_truth: Any = None
    stop_reason: StopReason = StopReason.RECORDED
    failure: Failure | None = None
    usage: dict[str, float] = field(default_factory=dict)
    timing: dict[str, Any] | None = None
    scores: list[LogScore] = field(default_factory=list)
    metrics: list[LogScore] = field(default_factory=list)
    tool_errors: dict[int, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    episode: SingleAgentEpisode | None = None


class LogScore(NamedTuple):
    """A score in a log; `value` is `None` if the log marks the episode as unscored by this scorer."""

    name: str
    value: float | None
    reason: str


class FieldReport(NamedTuple):
    """The fields of a log without a place of their own in an episode, each with the number of its occurrences.

    Attributes:
        extra: the fields that are stored in the episode's `custom_data["log"]`.
        log_only: the fields that are only in the run's copy of the log.
    """

    extra: Counter[str]
    log_only: Counter[str]

    def add_unknown(self, prefix: str, value: Mapping[str, Any], known: Collection[str]) -> None:
        """Count the fields of a mapping that are not known and not empty as `log_only`."""
        for key, item in value.items():
            if key not in known and not is_empty(item):
                self.log_only[f"{prefix}.{key}"] += 1


def is_empty(value: Any) -> bool:
    """Return True for null and for empty strings, lists and objects."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def finite(value: Any) -> float | None:
    """Return a number as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def tokens(value: Any) -> int:
    """Return a token count, or 0 if it is not a usable number."""
    number = finite(value)
    return int(number) if number is not None and 0 <= number < 2**53 else 0


def encodable(value: Any) -> Any:
    """Return a JSON value in which lone surrogates are replaced, for names and for files that cannot contain them."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a tool call as text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_object(text: str) -> Any:
    """Return the arguments of a tool call as an object. Text that is not an object becomes `{"arguments": text}`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def make_timing(started_at: Any, seconds: Any) -> dict[str, Any] | None:
    """Return an episode's timing, or None if the log has no valid start time."""
    try:
        began = datetime.datetime.fromisoformat(str(started_at).replace("Z", "+00:00"))
    except ValueError:
        return None
    began = began if began.tzinfo else began.replace(tzinfo=datetime.UTC)
    return {"started_at": began.isoformat(timespec="microseconds"), "duration_s": finite(seconds) or 0.0}


def timing_between(times: Sequence[Any]) -> dict[str, Any] | None:
    """Return the timing of an episode from the times of its messages."""
    began, ended = (make_timing(times[0], 0), make_timing(times[-1], 0)) if times else (None, None)
    if began is None or ended is None:
        return None
    first, last = (datetime.datetime.fromisoformat(timing["started_at"]) for timing in (began, ended))
    return {**began, "duration_s": max((last - first).total_seconds(), 0.0)}


def to_chat_messages(given: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Validate messages.

    Raises:
        ConfigError: a message is invalid; the error names the message and the field.
    """
    try:
        return [Message.model_validate(message) for message in given]
    except pydantic.ValidationError as error:
        problems = "; ".join(describe_validation_error(error, Message))
        raise ConfigError(f"{where}: messages: {problems}; fix the log, or pass its --format") from None


def to_episode(log: LogEpisode, index: int, origin: Mapping[str, Any], where: str) -> SingleAgentEpisode:
    """Return the episode for the `index`-th attempt of its policy at its sample.

    Raises:
        ConfigError: a message is invalid, or a value is nested too deeply to be stored.
    """
    group_id = make_group_id(0, log.sample_id, log.policy)
    if is_nested_too_deeply([log.messages, log.sample, log.ground_truth, log.extra]):
        raise ConfigError(f"{where}: a value is nested more than {NESTING} levels deep; simplify it in the log")
    stop = StopReason.ERROR if log.failure else log.stop_reason
    if log.episode is not None:
        episode, episode.id_ = log.episode, make_rollout_id(group_id, index)
    else:
        episode = episode_from_messages(make_rollout_id(group_id, index), to_chat_messages(log.messages, where))
        episode.is_terminated, episode.is_truncated = stop.is_terminal, not stop.is_terminal
    turns = episode.assistant_turns.tolist()
    for position, message in log.tool_errors.items():
        step = sum(turn < position for turn in turns)
        if 0 < step <= len(episode):
            call = {"name": log.messages[position].get("name"), "error": message}
            episode.infos[step].setdefault("tools", []).append(call)
    facts = EpisodeFacts(
        sample_id=log.sample_id,
        group_id=group_id,
        rollout_index=index,
        attempt=0,
        policy=log.policy,
        stop_reason=stop.value,
        failure=log.failure.to_json() if log.failure else None,
        sample=log.sample,
        ground_truth=log.ground_truth,
    )
    if log.usage:
        facts["usage"] = log.usage
    if log.timing:
        facts["timing"] = log.timing
    episode.custom_data.update(facts)
    episode.custom_data[LOG] = {**origin, **({"fields": log.extra} if log.extra else {})}
    return episode


def stored_fields(record: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Return the additional fields of an episode that was imported in a format; {} for other episodes."""
    origin = (record.get("custom_data") or {}).get(LOG)
    fields = origin.get("fields") if isinstance(origin, Mapping) and origin.get("format") == form else None
    return fields if isinstance(fields, dict) else {}


def score_line(log: LogEpisode, rollout_id: str, form: str, scorer: str | None) -> dict[str, Any] | None:
    """Return the line of `scores.jsonl`, or None if the episode was not scored.

    Args:
        log: the episode.
        rollout_id: the id of the episode.
        form: the name of the format.
        scorer: the name of the score or metric to use. By default, the first score with a number is used.
    """
    if not (log.scores or log.metrics) or log.failure is not None:
        return None
    scores, others = ([LogScore(*encodable(score)) for score in group] for group in (log.scores, log.metrics))
    values = [*scores, *others]
    named = scores if scorer is None else [score for score in values if score.name == scorer]
    chosen = next((score for score in named if score.value is not None), named[0] if named else None)
    metrics = {
        score.name: MetricResult(
            score=0.0 if score.value is None else score.value, is_score_valid=score.value is not None,
            reason=score.reason,
        )
        for score in values
    }  # fmt: skip
    value = chosen.value if chosen is not None else None
    result = EvaluateResult(
        score=value or 0.0,
        is_score_valid=value is not None,
        reason=chosen.reason if chosen is not None else None,
        metrics=metrics,
    )
    name = chosen.name if chosen is not None else scorer
    problem = f"the log has no number for the score {name!r}"
    problem += f": {chosen.reason}" if chosen is not None and chosen.reason else ""
    return {
        "rollout_id": rollout_id,
        "attempt": 0,
        "scorer": {"id": f"{form}:{name}", "hash": None},
        "score": value,
        "result": result.model_dump(mode="json", exclude_none=True),
        "failure": Failure("invalid_result", "InvalidResultError", problem).to_json() if value is None else None,
        "sandbox": None,
        "timing": {"duration_s": 0.0},
    }


# Export


def lost_fields(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the fields of an episode, and of its steps, for which a log of messages has no place."""
    yield from (key for key, value in record.items() if key not in _PLACED and not is_empty(value))
    custom = record.get("custom_data") or {}
    yield from (f"custom_data.{key}" for key, value in custom.items() if key != LOG and not is_empty(value))
    is_rewarded = record.get("environment_return") is not None
    for step in record["steps"]:
        info = {key: value for key, value in (step.get("info") or {}).items() if not is_empty(value)}
        is_lost = {
            "reward": is_rewarded and step.get("reward") is not None,
            "observation": not isinstance(step.get("observation"), str | None),
            "state_key": step.get("state_key") is not None,
            "info": bool(info),
            "outputs": bool(step.get("outputs")),
        }
        yield from (f"steps.{key}" for key, lost in is_lost.items() if lost)


def restore(original: Any, base: Any, current: Any) -> Any:
    """Return `current` with the fields of `original` that the conversion to an episode and back loses.

    Args:
        original: a value of the imported log.
        base: the value after it was converted to an episode and back.
        current: the value of the stored episode, which may have changed since the import.
    """
    if is_same(base, current):
        return original
    if isinstance(original, dict) and isinstance(base, dict) and isinstance(current, dict):
        keys = [*original, *(key for key in current if key not in original)]
        restored = {
            key: restore(original.get(key, _MISSING), base.get(key, _MISSING), current.get(key, _MISSING))
            for key in keys
        }
        return {key: value for key, value in restored.items() if value is not _MISSING}
    is_list = all(isinstance(value, list) for value in (original, base, current))
    if is_list and len(original) == len(base) == len(current):
        return [restore(*items) for items in zip(original, base, current, strict=True)]
    return current


def is_same(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal and have equal types. NaN is equal to NaN."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def require_string(value: Mapping[str, Any], key: str, where: str) -> None:
    """Raise a ConfigError unless a field is a string."""
    if not isinstance(value.get(key), str):
        raise ConfigError(f"{where}.{key}: expected a string, got {value.get(key)!r:.60}; fix the log")


def as_mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return an object; null is an empty one.

    Raises:
        ConfigError: the value is not an object.
    """
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, got {value!r:.60}; fix the log")
    return value or {}


def as_mappings(value: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the items of a list of objects; null is an empty list.

    Raises:
        ConfigError: the value is not a list of objects.
    """
    items = [] if value is None else value
    if not isinstance(items, list):
        raise ConfigError(f"{where}: expected a list of objects, got {value!r:.60}; fix the log")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ConfigError(f"{where}[{index}]: expected an object, got {item!r:.60}; fix the log")
        yield item
