"""Records in `episodes.jsonl`: conversion of an episode to a line and back.

The format is simple enough for `jq`: the conversation is stored once, and the steps refer to it. An observation that
repeats a message of the conversation is omitted. Times are stored only under `timing`, so the records of two runs with
the same seed differ only in that field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NotRequired, TypedDict, TypeVar, cast

from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

SCHEMA_VERSION = 1
STATE_KEYS = ("state_key", "state_and_results")
"""The keys of a step's info that identify the state before its action."""


class Identity(TypedDict):
    """The identity and outcome of an episode: the first keys of its line, in this order."""

    sample_id: str
    group_id: str
    rollout_index: int
    attempt: int
    policy: str
    stop_reason: str
    failure: dict[str, Any] | None


class StartAndEnd(TypedDict, total=False):
    """Additional data of collected episodes. Transcripts do not have this data."""

    seeds: dict[str, int]
    start: dict[str, Any]
    final_state: dict[str, Any] | None
    usage: dict[str, float]


class SampleFacts(TypedDict):
    sample: dict[str, Any]
    ground_truth: Any


class EpisodeFacts(Identity, StartAndEnd, SampleFacts):
    """The `SingleAgentEpisode.custom_data` of an episode from a worker or a transcript."""

    user_usage: NotRequired[dict[str, float]]
    state_changes: NotRequired[dict[str, Any]]
    timing: NotRequired[dict[str, Any]]


IDENTITY, START_AND_END, SAMPLE = (tuple(kind.__annotations__) for kind in (Identity, StartAndEnd, SampleFacts))


def get_facts(episode: SingleAgentEpisode) -> EpisodeFacts:
    """Return the episode's `custom_data`.

    An episode that was built manually may lack keys, so use `get` to read them.
    """
    return cast("EpisodeFacts", episode.custom_data)


def continued_from(episode: SingleAgentEpisode) -> Mapping[str, Any]:
    """Return the origin of a continuation: `rollout_id`, `step` and `noise_seeds`. It is empty for other episodes."""
    return (get_facts(episode).get("start") or {}).get("continues") or {}


def episode_to_record(episode: SingleAgentEpisode, *, final_state: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the episode as a JSON object, which `episode_from_record` converts back.

    Args:
        episode: the episode.
        final_state: a value that replaces the episode's final state, if the state's payload is stored elsewhere.
    """
    custom_data = {**episode.custom_data, **({"final_state": dict(final_state)} if final_state else {})}
    facts = {key: to_json_value(value) for key, value in custom_data.items()}
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "rollout_id": episode.id_}
    record |= {key: facts.pop(key, None) for key in IDENTITY}
    record |= {"terminated": episode.is_terminated, "truncated": episode.is_truncated}
    record |= {"environment_return": environment_return(episode), "num_steps": len(episode)}
    record |= {key: facts.pop(key, None) for key in START_AND_END}
    record["messages"] = [to_json_value(message.to_chat()) for message in episode.messages]
    record["steps"] = [_step(episode, t) for t in range(len(episode))]
    if episode.is_reset:
        record["final"] = _observation(episode, len(episode)) | {"info": to_json_value(episode.get_infos(len(episode)))}
    if episode.tokens:
        record["tokens"] = episode.tokens.get_state()
    timing = facts.pop("timing", None)
    record |= {key: facts.pop(key, None) for key in SAMPLE}
    return record | ({"custom_data": facts} if facts else {}) | {"timing": timing}


def get_attempt(record: Mapping[str, Any]) -> int:
    """Return the attempt number in an episode or score line. Only the latest attempt counts."""
    return record.get("attempt") or 0


def environment_return(episode: SingleAgentEpisode) -> float | None:
    """Return the sum of the environment's rewards; None if no step has a reward."""
    rewards = episode.environment_rewards()
    return episode.get_return() if rewards.count(None) < len(rewards) else None


def _step(episode: SingleAgentEpisode, t: int) -> dict[str, Any]:
    """Return one step: observation, action, reward, `info` about the outcome, and the keys of the state before it."""
    before = dict(episode.get_infos(t))
    outputs = {key: column.get(t) for key, column in episode.extra_model_outputs.items()}
    keys = {key: before.pop(key, None) for key in STATE_KEYS}
    step = {key: value for key, value in keys.items() if value is not None or key == "state_key"}
    if t < len(episode.assistant_turns):
        step["assistant_turn"] = episode.assistant_turns[t]
    step |= _observation(episode, t)
    step["action"] = to_json_value(episode.get_actions(t))
    step["reward"] = to_json_value(episode.get_rewards(t))
    if before:
        step["info"] = to_json_value(before)
    if outputs := {key: value for key, value in outputs.items() if value is not None}:
        step["outputs"] = to_json_value(outputs)
    return step


def _observation(episode: SingleAgentEpisode, t: int) -> dict[str, Any]:
    """Return a dict with the observation, or {} if the observation repeats the message before the t-th action."""
    observation = episode.get_observations(t)
    if isinstance(observation, str) and observation == preceding_text(episode.messages, episode.assistant_turns, t):
        return {}
    return {"observation": to_json_value(observation)}


def preceding_text(messages: list[Message], turns: Any, t: int) -> str | None:
    """Return the text of the message before the t-th action, or of the last message if the episode has no t-th action.

    Return None if that message has no text.
    """
    position = (turns[t] if t < len(turns) else len(messages)) - 1
    content = messages[position].content if 0 <= position < len(messages) else None
    return content if isinstance(content, str) else None


def episode_from_record(record: Mapping[str, Any]) -> SingleAgentEpisode:
    """Restore an episode from the result of `episode_to_record`.

    Raises:
        EpisodeError: the version of the record is unknown, or a field is missing.
    """
    if record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version")
        raise EpisodeError(
            f"the episode record has version {version!r}, but this release reads only version {SCHEMA_VERSION}"
        )
    try:
        return _read(record)
    except KeyError as error:
        raise EpisodeError(f"episode record {record.get('rollout_id')!r} is missing {error}") from None


def _read(record: Mapping[str, Any]) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(record["rollout_id"])
    messages = [Message.model_validate(from_json_value(message)) for message in record["messages"]]
    turns = [step["assistant_turn"] for step in record["steps"] if "assistant_turn" in step]
    parts = [*record["steps"], record["final"]] if "final" in record else []
    for t, part in enumerate(parts):
        info = from_json_value(part.get("info") or {})
        info |= {key: part[key] for key in STATE_KEYS if part.get(key) is not None}
        known = "observation" in part
        observation = from_json_value(part["observation"]) if known else preceding_text(messages, turns, t)
        if t == 0:
            episode.add_env_reset(observation, info)
        else:
            before = parts[t - 1]
            action, reward = from_json_value(before["action"]), from_json_value(before["reward"])
            outputs = from_json_value(before.get("outputs") or {})
            episode.add_env_step(observation, action, reward, info, extra_model_outputs=outputs)
    episode.is_terminated, episode.is_truncated = record["terminated"], record["truncated"]
    episode.messages = messages
    episode.assistant_turns.extend(turns)
    if "tokens" in record:
        episode.tokens = EpisodeTokens.from_state(record["tokens"])
    facts = {key: from_json_value(record.get(key)) for key in (*IDENTITY, *START_AND_END, *SAMPLE, "timing")}
    episode.custom_data = {**facts, **from_json_value(record.get("custom_data") or {})}
    return episode


T = TypeVar("T")


class LatestAttempts(Generic[T]):
    """The value of each episode's latest attempt among the lines read so far.

    Attributes:
        earlier: the number of lines that were replaced by a different line for the same episode.
    """

    def __init__(self) -> None:
        self.earlier = 0
        self._known: dict[str, tuple[int, T]] = {}

    def is_outdated(self, rollout_id: str, attempt: int) -> bool:
        """Return True if a later attempt is known. A line of this attempt then does not count."""
        return rollout_id in self._known and self._known[rollout_id][0] > attempt

    def put(self, rollout_id: str, attempt: int, value: T) -> None:
        """Store the value of a line unless a later attempt is known.

        If two lines are from the same attempt, the second counts.
        """
        if self.is_outdated(rollout_id, attempt):
            self.earlier += 1
            return
        self.earlier += self._known.pop(rollout_id, None) is not None
        self._known[rollout_id] = attempt, value

    def attempt(self, rollout_id: str) -> int | None:
        """Return the number of an episode's latest attempt, or None if no line for the episode was added."""
        return self._known[rollout_id][0] if rollout_id in self._known else None

    def items(self) -> dict[str, T]:
        """Return the value of each episode, keyed by `rollout_id`, in the order of the lines that count."""
        return {rollout_id: value for rollout_id, (_, value) in self._known.items()}

    def values(self) -> list[T]:
        """Return the value of each episode, in the order of the lines that count."""
        return [value for _, value in self._known.values()]
