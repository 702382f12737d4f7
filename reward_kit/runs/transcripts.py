"""Transcripts one already has, as episodes: each assistant message is a step, and the end is `recorded`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from reward_kit.agent.actions import episode_of
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id, make_rollout_id
from reward_kit.episodes.record import EpisodeFacts, LatestAttempts, attempt_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.models import Message
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.store import load_episode
from reward_kit.validation import describe_validation_error

_NOT_SAMPLE = ("messages", "ground_truth")


def read_transcripts(path: Path) -> list[SingleAgentEpisode]:
    """The episodes of a dataset with a `messages` field, or of a run's `episodes.jsonl` or a kept update.

    A row may have `id` (rows of one id are rollouts of one sample), `ground_truth` and `policy`; everything in it is
    handed to the reward function as `sample`. Of a run's episodes only the latest attempt counts, and none that the
    run's limit cut off.

    Raises:
        ConfigError: a row has no messages, or a message is none, or a rollout stands there twice; the line is named.
        StoreError: a line of a run is damaged, or its final state is; the message says which.
    """
    rollouts: Counter[str] = Counter()
    places: dict[tuple[str, int], str] = {}
    latest = LatestAttempts[SingleAgentEpisode | None]()
    for index, (where, row) in enumerate(read_rows(path)):
        if _is_episode(row):
            found = _stored(path.parent, row, where)
        else:
            sample_id = str(row.get("id", f"sample-{index}"))
            found = _given(row, sample_id, rollouts[sample_id], where)
            rollouts[sample_id] += 1
        if (known := places.setdefault((found.rollout_id, found.number), where)) != where:
            raise ConfigError(f"{where}: rollout {found.rollout_id!r} is used already at {known}")
        latest.put(found.rollout_id, found.number, found.episode)
    return [episode for episode in latest.values() if episode is not None]


class _Attempt(NamedTuple):
    """One line; its episode is None where the run's limit cut it off, so that it is no result."""

    rollout_id: str
    number: int
    episode: SingleAgentEpisode | None


def _is_episode(row: Mapping[str, Any]) -> bool:
    return "rollout_id" in row and "steps" in row


def _stored(run: Path, row: Mapping[str, Any], where: str) -> _Attempt:
    with boundary(StoreError, f"{where}: it cannot be read as an episode"):
        is_result = row["stop_reason"] != StopReason.RUN_LIMIT
        return _Attempt(row["rollout_id"], attempt_of(row), load_episode(run, row) if is_result else None)


def _given(row: Mapping[str, Any], sample_id: str, rollout_index: int, where: str) -> _Attempt:
    episode = _episode(row, sample_id, rollout_index, where)
    return _Attempt(episode.id_, 0, episode)


def _episode(row: Mapping[str, Any], sample_id: str, rollout_index: int, where: str) -> SingleAgentEpisode:
    group_id = make_group_id(0, sample_id)
    episode = episode_of(make_rollout_id(group_id, rollout_index), _messages(row, where))
    facts = EpisodeFacts(
        sample_id=sample_id,
        group_id=group_id,
        rollout_index=rollout_index,
        attempt=0,
        policy=str(row.get("policy") or row.get("model") or "transcript"),
        stop_reason=StopReason.RECORDED.value,
        failure=None,
        sample={key: value for key, value in row.items() if key not in _NOT_SAMPLE},
        ground_truth=row.get("ground_truth"),
    )
    episode.custom_data.update(facts)
    return episode


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    given = row.get("messages")
    if isinstance(given, str):
        # A CSV cell holds the list as JSON text.
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: messages is not JSON: {error}") from None
    if given == []:
        raise ConfigError(f"{where}: messages is empty")
    if not isinstance(given, list):
        raise ConfigError(f"{where}: a transcript needs a list called 'messages'; this row has {', '.join(row)}")
    try:
        return [Message.model_validate(message) for message in given]
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: messages: {'; '.join(describe_validation_error(error, Message))}") from None
