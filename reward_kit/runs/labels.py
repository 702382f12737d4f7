"""A CSV of human labels as rows that a reward can score: what was asked and answered, and what a person said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from reward_kit.agent.actions import episode_of
from reward_kit.agent.models import StopReason
from reward_kit.episodes.record import EpisodeFacts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.models import Message
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.scoring import read_transcripts
from reward_kit.validation import describe_validation_error

Pairs = Literal["scores", "judge"]
_WORDS: dict[str, float] = {
    **dict.fromkeys(("yes", "true", "pass", "passed", "good", "correct", "right"), 1.0),
    **dict.fromkeys(("no", "false", "fail", "failed", "bad", "incorrect", "wrong"), 0.0),
}
_WINNERS: dict[str, float] = {
    **dict.fromkeys(("a", "model_a", "response_a"), 1.0),
    **dict.fromkeys(("b", "model_b", "response_b"), 0.0),
    **dict.fromkeys(("tie", "tie (bothbad)", "both", "neither", "equal"), 0.5),
}


@dataclass(frozen=True, slots=True)
class LabelColumns:
    """The names of the columns of the file."""

    id: str = "id"
    label: str = "label"
    winner: str = "winner"
    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"
    rollout: str = "rollout_id"


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One row of the file."""

    where: str
    id: str
    label: float
    requests: tuple[ScoringRequest, ...]

    @property
    def is_pair(self) -> bool:
        """True if two answers are compared."""
        return len(self.requests) == 2


def read_labels(
    path: Path, columns: LabelColumns | None = None, *, data: Path | None = None, pairs: Pairs = "scores"
) -> list[LabelledRow]:
    """The rows of a CSV (or JSONL, YAML) of labels.

    Each has a label, and what was labelled: `prompt` and `response`, or `messages` as JSON, or a `rollout_id` that
    `data` has; for a pair a winner (A, B, tie), and `response_a`, `response_b` or `messages_a`, `messages_b`. Neither
    the label nor the winner is shown to the reward; the other columns are, as `sample`, and `ground_truth` as that.
    """
    episodes = {} if data is None else {episode.id_: episode for episode in read_transcripts(data)}
    reader = _LabelReader(columns or LabelColumns(), episodes, pairs)
    rows = [reader.row(where, index, row) for index, (where, row) in enumerate(read_rows(path))]
    if not rows:
        raise ConfigError(f"{path} has no rows")
    if pairs == "judge" and not rows[0].is_pair:
        raise ConfigError(f"{rows[0].where}: --pairs judge compares two answers, and this row is one; leave it out")
    if odd := next((row for row in rows if row.is_pair != rows[0].is_pair), None):
        kinds = "a pair" if odd.is_pair else "a single answer"
        raise ConfigError(
            f"{odd.where}: this row is {kinds}, and the rows before are not; keep them in files of their own"
        )
    return rows


@dataclass(frozen=True, slots=True)
class _LabelReader:
    columns: LabelColumns
    episodes: Mapping[str, SingleAgentEpisode]
    pairs: Pairs

    def row(self, where: str, index: int, row: Mapping[str, Any]) -> LabelledRow:
        """One row."""
        names = self.columns
        row_id = str(row.get(names.id) or row.get(names.rollout) or f"row-{index}")
        if names.winner in row:
            return LabelledRow(where, row_id, _winner(row, names.winner, where), self._pair(row, row_id, where))
        if names.label not in row:
            raise ConfigError(_missing(where, row, names.label, f"(or {names.winner!r}, for pairs)"))
        return LabelledRow(where, row_id, _label(row, names.label, where), (self._single(row, row_id, index, where),))

    def _single(self, row: Mapping[str, Any], row_id: str, index: int, where: str) -> ScoringRequest:
        names = self.columns
        if names.rollout in row and self.episodes:
            found = self.episodes.get(str(row[names.rollout]))
            if found is None:
                raise ConfigError(
                    f"{where}: {names.rollout}: the data has no rollout {row[names.rollout]!r}"
                    f"{did_you_mean(str(row[names.rollout]), self.episodes) if len(self.episodes) < 1_000 else ''}"
                )
            return ScoringRequest.of(found)
        if names.rollout in row and not {names.messages, names.response} & row.keys():
            raise ConfigError(f"{where}: {names.rollout}: name the transcripts it stands in with --data")
        messages = self._messages(row, names.messages, names.response, where)
        return self._request(row, f"{row_id}-{index}", row_id, messages, row.get("ground_truth"))

    def _pair(self, row: Mapping[str, Any], row_id: str, where: str) -> tuple[ScoringRequest, ScoringRequest]:
        names = self.columns
        both = [self._messages(row, f"{names.messages}_{x}", f"{names.response}_{x}", where) for x in "ab"]
        truths = [row.get("ground_truth")] * 2
        if self.pairs == "judge":
            answers = ([m.text for m in messages if m.role == "assistant"] for messages in reversed(both))
            truths = [texts[-1] if texts else "" for texts in answers]
        made = [
            self._request(row, f"{row_id}-{where.rpartition(':')[2]}-{x}", row_id, messages, truth)
            for x, messages, truth in zip("ab", both, truths, strict=True)
        ]
        return made[0], made[1]

    def _messages(self, row: Mapping[str, Any], column: str, response: str, where: str) -> list[Message]:
        """The conversation in one column, or made of a prompt and a response."""
        if row.get(column) not in (None, ""):
            return _conversation(row[column], f"{where}: {column}")
        for name in (self.columns.prompt, response):
            if name not in row:
                raise ConfigError(_missing(where, row, name, f"(or {column!r}, with a conversation as JSON)"))
            if not isinstance(row[name], str):
                raise ConfigError(f"{where}: {name}: expected a text, got {row[name]!r:.80}")
        prompt = Message(role="user", content=row[self.columns.prompt])
        return [prompt, Message(role="assistant", content=row[response])]

    def _request(
        self, row: Mapping[str, Any], rollout_id: str, sample_id: str, messages: Sequence[Message], truth: Any
    ) -> ScoringRequest:
        names = self.columns
        taken = {names.label, names.winner, *(f"{names.messages}{x}" for x in ("", "_a", "_b")), "ground_truth"}
        episode = episode_of(rollout_id, list(messages))
        facts = EpisodeFacts(
            sample_id=sample_id,
            group_id=sample_id,
            rollout_index=0,
            attempt=0,
            policy="labelled",
            stop_reason=StopReason.RECORDED.value,
            failure=None,
            sample={name: value for name, value in row.items() if name not in taken},
            ground_truth=truth,
        )
        episode.custom_data.update(facts)
        return ScoringRequest.of(episode)


def _label(row: Mapping[str, Any], column: str, where: str) -> float:
    """A label as a number; words for yes and no are 1 and 0."""
    given = row[column]
    text = str(given).strip().lower()
    try:
        number = _WORDS[text] if text in _WORDS else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {column}: expected a number, or a word such as yes or no, got {given!r:.80}")
    return number


def _winner(row: Mapping[str, Any], column: str, where: str) -> float:
    given = row[column]
    if str(given).strip().lower() not in _WINNERS:
        raise ConfigError(f"{where}: {column}: expected A, B or tie, got {given!r:.80}")
    return _WINNERS[str(given).strip().lower()]


def _conversation(given: Any, where: str) -> list[Message]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{where}: expected a list of messages, got {given!r:.80}")
    try:
        return [Message.model_validate(message) for message in given]
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(describe_validation_error(error, Message))}") from None


def _missing(where: str, row: Mapping[str, Any], column: str, otherwise: str) -> str:
    near = did_you_mean(column, row)
    near = near if near.endswith("?") else f"; it has {', '.join(row)}"
    return f"{where}: there is no column {column!r} {otherwise}{near}"
