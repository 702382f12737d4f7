"""Transcripts one already has, as episodes: each assistant message is a step, and the end is `recorded`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from reward_kit.agent.models import StopReason
from reward_kit.agent.policy_interface import Action
from reward_kit.agent.samples import make_group_id, make_rollout_id
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.models import Message, ToolCall, describe_validation_error
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.store import load_episode

_NOT_SAMPLE = ("messages", "ground_truth")


def read_transcripts(path: Path) -> Iterator[SingleAgentEpisode]:
    """The episodes of a dataset with a `messages` field, or of a run's `episodes.jsonl`.

    A row may have `id` (rows of one id are rollouts of one sample), `ground_truth` and `policy`; everything in it is
    handed to the reward function as `sample`. Of a run's episodes only the latest attempt counts, and none that the
    run's limit cut off.

    Raises:
        ConfigError: a row has no messages, or a message is none; the line is named.
    """
    rollouts: Counter[str] = Counter()
    latest = _latest_attempts(path)
    for index, (where, row) in enumerate(read_rows(path)):
        if _is_episode(row):
            is_result = row["stop_reason"] != StopReason.RUN_LIMIT
            if is_result and (row.get("attempt") or 0) == latest[row["rollout_id"]]:
                yield load_episode(path.parent, row)
            continue
        sample_id = str(row.get("id", f"sample-{index}"))
        yield _episode(row, sample_id, rollouts[sample_id], where)
        rollouts[sample_id] += 1


def _is_episode(row: Mapping[str, Any]) -> bool:
    return "rollout_id" in row and "steps" in row


def _latest_attempts(path: Path) -> dict[str, int]:
    """The latest attempt of each episode in a file; an attempt that stands there twice is refused."""
    seen: dict[tuple[str, int], str] = {}
    latest: dict[str, int] = {}
    for where, row in read_rows(path):
        if _is_episode(row):
            key = (row["rollout_id"], row.get("attempt") or 0)
            if key in seen:
                raise ConfigError(f"{where}: rollout {key[0]!r} stands already at {seen[key]}")
            seen[key] = where
            latest[key[0]] = max(latest.get(key[0], 0), key[1])
    return latest


def _episode(row: Mapping[str, Any], sample_id: str, rollout_index: int, where: str) -> SingleAgentEpisode:
    messages = _messages(row, where)
    group_id = make_group_id(0, sample_id)
    episode = SingleAgentEpisode(make_rollout_id(group_id, rollout_index))
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    episode.messages = messages
    episode.assistant_turns.extend(turns)
    ends = [*turns, len(messages)]
    episode.add_env_reset(_texts(messages[: ends[0]]))
    for turn, end in zip(turns, ends[1:], strict=True):
        action, shown = action_of(messages[turn]), _texts(messages[turn + 1 : end])
        episode.add_env_step(shown, action, 0.0, {"environment_reward": None}, terminated=end == len(messages))
    episode.is_terminated = True
    episode.custom_data = {
        "sample_id": sample_id,
        "group_id": group_id,
        "rollout_index": rollout_index,
        "attempt": 0,
        "policy": str(row.get("policy") or row.get("model") or "transcript"),
        "stop_reason": StopReason.RECORDED.value,
        "failure": None,
        "sample": {key: value for key, value in row.items() if key not in _NOT_SAMPLE},
        "ground_truth": row.get("ground_truth"),
    }
    return episode


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    given = row.get("messages")
    if isinstance(given, str):
        # A CSV cell holds the list as JSON text.
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{where}: messages is not JSON: {error}") from None
    if given == []:
        raise ConfigError(f"{where}: messages is empty")
    if not isinstance(given, list):
        raise ConfigError(f"{where}: a transcript needs a list called 'messages'; this row has {', '.join(row)}")
    try:
        return [Message.model_validate(message) for message in given]
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: messages: {'; '.join(describe_validation_error(error, Message))}") from None


def action_of(message: Message) -> Action:
    """The action that an assistant message stands for."""
    if not message.tool_calls:
        return {"type": "text", "content": message.text}
    calls = [_call(call) for call in message.tool_calls]
    return {"type": "tool_calls", "calls": calls, "content": message.content}


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = None
    known = {"arguments": arguments} if isinstance(arguments, dict) else {"arguments_text": call.function.arguments}
    return {"name": call.function.name, "id": call.id, **known}


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages)
