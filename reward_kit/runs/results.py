"""Results of a run: the latest attempt of each episode, and its score.

The files are read twice: first to find the lines of the latest attempts, and then to read only these lines. Memory use
therefore does not depend on the size of episodes and scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from reward_kit.agent.models import StopReason
from reward_kit.episodes.record import LatestAttempts, episode_from_record, get_attempt
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import EvaluateResult
from reward_kit.notebook_html import Html, line, root, strong
from reward_kit.runs.files import CREDIT_FILE, EPISODES_FILE, SCORES_FILE, wrap_os_errors
from reward_kit.runs.run_folder import line_record, placed_episodes, placed_lines, placed_scores
from reward_kit.runs.summary import EpisodeRow

STEP = b'"step":'
"""The first key whose value differs between the lines of an episode in `credit.jsonl`."""


class LineRange(NamedTuple):
    """The byte offset and length of a range of consecutive lines in a file."""

    offset: int
    length: int


def index_credit(run: Path) -> Mapping[str, LineRange]:
    """Return the line range of each episode in the `credit.jsonl` of a run."""
    path, ranges = run / CREDIT_FILE, {}
    name, start, prefix = "", 0, b"\n"
    for number, (offset, text) in enumerate(placed_lines(path), 1):
        if not text.startswith(prefix):
            name, start = line_record(path, number, text)["rollout_id"], offset
            # All lines of an episode are equal up to the step number.
            prefix = text[: text.find(STEP)] if STEP in text else text
        ranges[name] = LineRange(start, offset + len(text) - start)
    return ranges


class Result(NamedTuple):
    """An episode and its score."""

    line: bytes
    episode: Mapping[str, Any]
    score: Mapping[str, Any] | None

    def row(self) -> EpisodeRow:
        """Return the row of the episode for a summary."""
        row = EpisodeRow.from_record(self.episode)
        if self.score is not None:
            row.add_score(self.score)
        return row

    def to_episode(self) -> SingleAgentEpisode:
        """Return the episode without its final state."""
        return episode_from_record(self.episode)

    def to_result(self) -> EvaluateResult | None:
        """Return the result of the reward, or None if the episode has not been scored or ended with an error."""
        result = (self.score or {}).get("result")
        return EvaluateResult.model_validate(result) if result is not None else None

    def __repr__(self) -> str:
        score = "not scored yet" if self.score is None else self.score["score"]
        return f"Result({self.episode['rollout_id']!r}, {'unscored' if score is None else score})"

    def _repr_html_(self) -> str:
        result, failure = self.to_result(), (self.score or {}).get("failure")
        parts = [Html(result._repr_html_())] if result is not None else []
        if failure:
            parts.append(line(strong("unscored: "), f"{failure['class']}: {failure['message']}"))
        return root(*parts, Html(self.to_episode()._repr_html_()))


class ResultIndex(NamedTuple):
    """Line offsets of the latest attempts of a run. Episodes that were cut off by a run limit are omitted."""

    episodes: Mapping[str, int]
    scores: Mapping[str, int]


def index_results(run: Path) -> ResultIndex:
    """Index the latest attempts of a run."""
    latest = LatestAttempts[tuple[int, bool]]()
    for offset, record in placed_episodes(run):
        is_result = record.get("stop_reason") != StopReason.RUN_LIMIT
        latest.put(record["rollout_id"], get_attempt(record), (offset, is_result))
    episodes = {rollout_id: offset for rollout_id, (offset, is_result) in latest.items().items() if is_result}
    scores = {
        line["rollout_id"]: offset
        for offset, line in placed_scores(run)
        if line["rollout_id"] in episodes and get_attempt(line) == latest.attempt(line["rollout_id"])
    }
    return ResultIndex(episodes, scores)


def read_results(run: Path, index: ResultIndex | None = None) -> Iterator[Result]:
    """Yield the episodes of a run and their scores."""
    index = index or index_results(run)
    if not index.episodes:
        return
    with wrap_os_errors("read", run / EPISODES_FILE), (run / EPISODES_FILE).open("rb") as episodes:
        if not index.scores:
            for offset in index.episodes.values():
                line = _line_at(episodes, offset)
                yield Result(line, json.loads(line), None)
            return
        with (run / SCORES_FILE).open("rb") as scores:
            for rollout_id, offset in index.episodes.items():
                line = _line_at(episodes, offset)
                at = index.scores.get(rollout_id)
                yield Result(line, json.loads(line), None if at is None else json.loads(_line_at(scores, at)))


def _line_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()
