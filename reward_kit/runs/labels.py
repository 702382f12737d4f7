"""Read human labels from a table or from the `labels.jsonl` of a run, as rows that a reward can score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, did_you_mean
from reward_kit.models import Message
from reward_kit.reward_agent.scoring import ScoringRequest
from reward_kit.runs.datasets import read_rows
from reward_kit.runs.files import EPISODES_FILE, LABELS_FILE
from reward_kit.runs.label_file import LABELED_AT
from reward_kit.runs.scoring import parse_messages, read_transcripts, recorded_episode

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
    """The column names of a label file."""

    id: str = "id"
    label: str = "label"
    winner: str = "winner"
    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"
    rollout: str = "rollout_id"


@dataclass(frozen=True, slots=True)
class LabeledRow:
    """A row of a label file."""

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
) -> list[LabeledRow]:
    """Read the rows of a CSV, JSONL or YAML file of labels.

    Each row has a label and the labeled answer: `prompt` and `response`, `messages` as JSON, or a `rollout_id` of
    `data`. A pair has a winner (A, B, tie) and either `response_a` and `response_b` or `messages_a` and `messages_b`.
    The reward receives `ground_truth` and, as `sample`, all columns except the label or winner.

    The `labels.jsonl` of a run, which the viewer writes, refers to the episodes of that run unless `data` is given. The
    last label of each episode counts. Lines about steps and lines without a label are skipped.
    """
    if data is None and path.name == LABELS_FILE and (path.parent / EPISODES_FILE).exists():
        data = path.parent / EPISODES_FILE
    episodes = {} if data is None else {episode.id_: episode for episode in read_transcripts(data)}
    reader = _LabelReader(columns or LabelColumns(), episodes, pairs)
    rows = [reader.row(where, index, row) for index, (where, row) in enumerate(_last_labels(read_rows(path)))]
    if not rows:
        raise ConfigError(f"{path} has no rows with a label")
    if pairs == "judge" and not rows[0].is_pair:
        raise ConfigError(
            f"{rows[0].where}: --pairs judge compares two answers, but this row has only one; remove the option"
        )
    if odd := next((row for row in rows if row.is_pair != rows[0].is_pair), None):
        kinds = "a pair" if odd.is_pair else "a single answer"
        raise ConfigError(
            f"{odd.where}: this row is {kinds}, unlike the earlier rows; put pairs and single answers in separate files"
        )
    return rows


def _last_labels(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Reduce the lines written by the viewer to the last label of each episode."""
    kept: dict[object, tuple[str, dict[str, Any]]] = {}
    for where, row in rows:
        if LABELED_AT not in row:
            kept[where] = where, row
        elif row.get("step") is None:
            kept[str(row.get("rollout_id")), LABELED_AT] = where, row
    return [(where, row) for where, row in kept.values() if LABELED_AT not in row or row.get("label") is not None]


@dataclass(frozen=True, slots=True)
class _LabelReader:
    columns: LabelColumns
    episodes: Mapping[str, SingleAgentEpisode]
    pairs: Pairs

    def row(self, where: str, index: int, row: Mapping[str, Any]) -> LabeledRow:
        """Parse a row, which contains a label and one or two answers."""
        names, truth = self.columns, row.get("ground_truth")
        row_id = str(row.get(names.id) or row.get(names.rollout) or f"row-{index}")
        if names.winner in row:
            given = row[names.winner]
            if (winner := _WINNERS.get(str(given).strip().lower())) is None:
                raise ConfigError(f"{where}: {names.winner}: expected A, B or tie, got {given!r:.80}")
            both = [self._messages(row, f"{names.messages}_{x}", f"{names.response}_{x}", where) for x in "ab"]
            truths = [truth] * 2
            if self.pairs == "judge":  # the two last answers are compared
                answers = ([m.text for m in messages if m.role == "assistant"] for messages in reversed(both))
                truths = [texts[-1] if texts else "" for texts in answers]
            line = where.rpartition(":")[2]
            one, other = (
                self._request(row, f"{row_id}-{line}-{x}", row_id, messages, own)
                for x, messages, own in zip("ab", both, truths, strict=True)
            )
            return LabeledRow(where, row_id, winner, (one, other))
        if names.label not in row:
            raise ConfigError(_missing(where, row, names.label, f"(or {names.winner!r}, for pairs)"))
        given = row[names.label]
        text = str(given).strip().lower()
        try:
            label = _WORDS[text] if text in _WORDS else float(text)
        except ValueError:
            label = math.nan
        if not math.isfinite(label):
            raise ConfigError(
                f"{where}: {names.label}: expected a number, or a word such as yes or no, got {given!r:.80}"
            )
        rollout = str(row.get(names.rollout))
        if names.rollout in row and self.episodes:
            if rollout not in self.episodes:
                near = did_you_mean(rollout, self.episodes) if len(self.episodes) < 1_000 else ""
                raise ConfigError(f"{where}: {names.rollout}: the data has no rollout {row[names.rollout]!r}{near}")
            return LabeledRow(where, row_id, label, (ScoringRequest.from_episode(self.episodes[rollout]),))
        if names.rollout in row and not {names.messages, names.response} & row.keys():
            raise ConfigError(f"{where}: {names.rollout}: use --data to pass the transcripts that contain the rollout")
        messages = self._messages(row, names.messages, names.response, where)
        return LabeledRow(where, row_id, label, (self._request(row, f"{row_id}-{index}", row_id, messages, truth),))

    def _messages(self, row: Mapping[str, Any], column: str, response: str, where: str) -> list[Message]:
        """Return the conversation from the column of messages, or from the columns of the prompt and response."""
        if row.get(column) not in (None, ""):
            return parse_messages(row[column], f"{where}: {column}")
        for name in (self.columns.prompt, response):
            if name not in row:
                raise ConfigError(_missing(where, row, name, f"(or {column!r}, with a conversation as JSON)"))
            if not isinstance(row[name], str):
                raise ConfigError(f"{where}: {name}: expected a string, got {row[name]!r:.80}")
        prompt = Message(role="user", content=row[self.columns.prompt])
        return [prompt, Message(role="assistant", content=row[response])]

    def _request(
        self, row: Mapping[str, Any], rollout_id: str, sample_id: str, messages: Sequence[Message], truth: Any
    ) -> ScoringRequest:
        names = self.columns
        hidden = {names.label, names.winner, *(f"{names.messages}{x}" for x in ("", "_a", "_b")), "ground_truth"}
        sample = {name: value for name, value in row.items() if name not in hidden}
        return ScoringRequest.from_episode(
            recorded_episode(rollout_id, list(messages), sample_id, "labeled", sample, truth)
        )


def _missing(where: str, row: Mapping[str, Any], column: str, otherwise: str) -> str:
    near = did_you_mean(column, row)
    near = near if near.endswith("?") else f"; it has {', '.join(row)}"
    return f"{where}: missing column {column!r} {otherwise}{near}"
