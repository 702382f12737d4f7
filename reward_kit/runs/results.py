"""What a run came to, an episode after the other: the latest attempt of each, with the score that counts.

The files are read twice, first to learn which lines count and then those lines alone, so that memory does not grow with
what episodes and scores hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reward_kit.agent.models import StopReason
from reward_kit.episodes.record import LatestAttempts, attempt_of, episode_from_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import EvaluateResult
from reward_kit.notebook_html import Html, line, strong, whole
from reward_kit.runs.files import told_of
from reward_kit.runs.store import placed_episodes, placed_scores
from reward_kit.runs.summary import EpisodeRow


class Result(NamedTuple):
    """One episode and its score.

    Attributes:
        line: of `episodes.jsonl`, as bytes, with its line break.
        episode: the same, read.
        score: its line of `scores.jsonl`; None where it waits for one.
    """

    line: bytes
    episode: Mapping[str, Any]
    score: Mapping[str, Any] | None

    def row(self) -> EpisodeRow:
        """What a summary needs of it."""
        row = EpisodeRow.of(self.episode)
        if self.score is not None:
            row.add_score(self.score)
        return row

    def to_episode(self) -> SingleAgentEpisode:
        """The episode itself, as it was collected but for its final state.

        Raises:
            EpisodeError: the line lacks a field.
        """
        return episode_from_record(self.episode)

    def to_result(self) -> EvaluateResult | None:
        """What the reward returned; None where it waits for a score, or has none because something broke."""
        told = (self.score or {}).get("result")
        return EvaluateResult.model_validate(told) if told is not None else None

    def __repr__(self) -> str:
        told = "waits for its score" if self.score is None else self.score["score"]
        return f"Result({self.episode['rollout_id']!r}, {'unscored' if told is None else told})"

    def _repr_html_(self) -> str:
        result, failure = self.to_result(), (self.score or {}).get("failure")
        parts = [Html(result._repr_html_())] if result is not None else []
        if failure:
            parts.append(line(strong("unscored: "), f"{failure['class']}: {failure['message']}"))
        return whole(*parts, Html(self.to_episode()._repr_html_()))


class Places(NamedTuple):
    """Where the lines of a run begin that count; what a limit of the run cut off is no result, and has no place.

    Attributes:
        episodes: of each episode by its `rollout_id`, in the order of the file.
        scores: of its score, where it has one.
    """

    episodes: Mapping[str, int]
    scores: Mapping[str, int]


def places_of(run: Path) -> Places:
    """The lines of a run that count.

    Args:
        run: its folder; a process may still be writing the last lines.

    Raises:
        StoreError: a line is damaged; the message says which.
    """
    latest = LatestAttempts[tuple[int, bool]]()
    for offset, record in placed_episodes(run):
        is_result = record.get("stop_reason") != StopReason.RUN_LIMIT
        latest.put(record["rollout_id"], attempt_of(record), (offset, is_result))
    episodes = {rollout_id: offset for rollout_id, (offset, is_result) in latest.items().items() if is_result}
    scores = {
        line["rollout_id"]: offset
        for offset, line in placed_scores(run)
        if line["rollout_id"] in episodes and attempt_of(line) == latest.attempt(line["rollout_id"])
    }
    return Places(episodes, scores)


def read_results(run: Path, places: Places | None = None) -> Iterator[Result]:
    """The episodes of a run with their scores.

    Args:
        run: its folder.
        places: as `places_of` gives them, where they are known already.

    Raises:
        StoreError: a line is damaged, or a file cannot be read.
    """
    places = places or places_of(run)
    if not places.episodes:
        return
    with told_of("read", run / "episodes.jsonl"), (run / "episodes.jsonl").open("rb") as episodes:
        if not places.scores:
            for offset in places.episodes.values():
                line = _line_at(episodes, offset)
                yield Result(line, json.loads(line), None)
            return
        with (run / "scores.jsonl").open("rb") as scores:
            for rollout_id, offset in places.episodes.items():
                line = _line_at(episodes, offset)
                at = places.scores.get(rollout_id)
                yield Result(line, json.loads(line), None if at is None else json.loads(_line_at(scores, at)))


def _line_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()
