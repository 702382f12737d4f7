"""Training figures: their names in logs, the figures for one update, and the records of kept episodes."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reward_kit.credit.diagnostics import credit_diagnostics
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import continued_from, environment_return, episode_to_record, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import Failure
from reward_kit.rl_processing import CreditBatch
from reward_kit.runs.files import TRAINING
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import redacted_state
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array

Figures = dict[str, float]
WAIT = "wait_for_scores"
"""The stage in which training waits for scores."""
SCORING = "scoring"
"""The stage from the first reward call of a batch to the last one."""
_UPDATE_SUMS = ("tokens", "optimizer_steps", "effective_sample_size")
_MINIMA, _MAXIMA = ("alarm/effective_share",), ("logprob_gap",)
"""Extremes whose names do not end with `_min` or `_max`."""
_CREDIT_SUMS = ("credit/trajectories", "credit/unscored", "credit/steps", "credit/groups", "credit/anchors")


def sampled_tokens(episode: SingleAgentEpisode) -> int:
    """Return the number of tokens that the policy sampled, or 0 if tokens were not recorded."""
    return sum(span.stop - span.start for span in episode.tokens.spans)


def score_figures(scores: Sequence[float | None], failures: Iterable[Failure], pass_threshold: float) -> Figures:
    """Return the mean, the extremes and the pass rate of scores, and the number of failures in each class."""
    known = [score for score in scores if score is not None]
    figures: Figures = {"unscored": float(len(scores) - len(known))}
    if known:
        figures["mean"] = sum(known) / len(known)
        figures |= {"min": min(known), "max": max(known)}
        figures["passed_share"] = sum(score >= pass_threshold for score in known) / len(known)
    for name, count in sorted(Counter(failure.failure_class for failure in failures).items()):
        figures[f"failed/{name}"] = float(count)
    return figures


def episode_figures(episodes: Sequence[SingleAgentEpisode]) -> Figures:
    """Return figures about episode lengths, environment returns, invalid actions and stop reasons."""
    count = len(episodes)
    figures: Figures = {"count": float(count)}
    if not count:
        return figures
    steps = sum(len(episode) for episode in episodes)
    figures |= {"steps_mean": steps / count, "tokens_mean": sum(map(sampled_tokens, episodes)) / count}
    returns = [value for episode in episodes if (value := environment_return(episode)) is not None]
    if returns:
        figures["return_mean"] = sum(returns) / len(returns)
    if steps:
        # The info after an action reports whether the action was valid.
        invalid = sum(
            episode.get_infos(t + 1).get("is_action_valid") is False
            for episode in episodes
            for t in range(len(episode))
        )
        figures["invalid_action_share"] = invalid / steps
    for reason, ended in sorted(Counter(str(get_facts(one).get("stop_reason")) for one in episodes).items()):
        figures[f"stop/{reason}_share"] = ended / count
    return figures


def prefixed(prefix: str, figures: Mapping[str, float]) -> Figures:
    """Return the figures with `prefix/` added to their names."""
    return {f"{prefix}/{name}": value for name, value in figures.items()}


def merge_updates(updates: Sequence[Figures]) -> Figures:
    """Merge the diagnostics of the updates into which a batch was divided, as if there had been a single update."""
    return _merged(updates, [one.get("tokens", 0.0) for one in updates], _UPDATE_SUMS)


def _merged(parts: Sequence[Figures], weights: Sequence[float], sums: Sequence[str]) -> Figures:
    """Add up counts, keep extremes, and average all other figures with weights."""
    if len(parts) == 1:
        return dict(parts[0])
    merged: Figures = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pairs = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        values = [value for value, _ in pairs]
        total = sum(weight for _, weight in pairs)
        if name in sums:
            merged[name] = sum(values)
        elif name.endswith("_min") or name in _MINIMA:
            merged[name] = min(values)
        elif name.endswith("_max") or name in _MAXIMA or name.startswith("alarm/"):
            merged[name] = max(values)
        else:
            merged[name] = sum(v * w for v, w in pairs) / total if total else sum(values) / len(values)
    return merged


class Meter:
    """Collects the figures for one update at a time.

    `totals` counts the `episodes`, `env_steps` and `sampled_tokens` since training began. `episodes` contains the
    episodes scored since the last call to `take`.
    """

    def __init__(self, pass_threshold: float = 1.0) -> None:
        self.pass_threshold, self.totals = pass_threshold, Counter[str]()
        self._reset()

    def _reset(self) -> None:
        self.episodes: list[SingleAgentEpisode] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._scores: list[float | None] = []
        self._branch_scores: list[float | None] = []  # of episodes that continue others
        self._failures: list[Failure] = []
        self._credit: list[Figures] = []
        self._hook: list[Figures] = []
        self._counts: Counter[str] = Counter()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Measure the duration of the block in seconds. Each of multiple overlapping blocks counts in full."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(stage, time.perf_counter() - began)

    def add_seconds(self, stage: str, seconds: float) -> None:
        self._seconds[stage] += seconds

    def count(self, name: str, number: int = 1) -> None:
        """Increase the number of events with this name."""
        self._counts[name] += number

    def add_collected(self, episodes: Sequence[SingleAgentEpisode]) -> None:
        """Count finished episodes."""
        self.totals["episodes"] += len(episodes)
        self.totals["env_steps"] += sum(map(len, episodes))
        self.totals["sampled_tokens"] += sum(map(sampled_tokens, episodes))

    def add_scored(self, episodes: Sequence[SingleAgentEpisode], aligned: CreditBatch) -> None:
        """Add scored episodes of the batch, including episodes in dropped groups.

        Episodes that continue others are counted separately, because they do not begin at the start of the task.
        """
        for episode, score in zip(episodes, aligned.scores, strict=True):
            if continued_from(episode):
                self._branch_scores.append(score)
            else:
                self.episodes.append(episode)
                self._scores.append(score)
        self._failures += aligned.failures.values()

    def add_credit(self, credited: CreditBatch) -> None:
        """Add the credit of the episodes used for training; see `credit.diagnostics`."""
        figures: Figures = {}
        if credited.credit is not None:
            lengths = [len(steps) for steps in credited.steps]
            figures = credit_diagnostics(credited.credit, lengths, credited.scores, credited.group_ids).summary()
        self._credit.append(figures)

    def add_hook(self, figures: Figures) -> None:
        """Add the figures that the `after_collect` hook returned for a group. `take` combines those of all groups."""
        self._hook.append(figures)

    def take(self) -> Figures:
        """Return the figures since the last call, and reset them."""
        figures = prefixed("score", score_figures(self._scores, self._failures, self.pass_threshold))
        figures |= prefixed("episode", episode_figures(self.episodes))
        if known := [score for score in self._branch_scores if score is not None]:
            figures |= {"branching/episodes": float(len(self._branch_scores)), "branching/score": float(np.mean(known))}
        if self._credit:
            # Counts are added; shares are weighted by steps.
            figures |= _merged(self._credit, [one.get("credit/steps", 0.0) for one in self._credit], _CREDIT_SUMS)
        if self._hook:
            figures |= prefixed("hook", _merged(self._hook, [1.0] * len(self._hook), ()))
        figures |= {name: float(count) for name, count in self._counts.items()}
        figures |= {f"time/{stage}_s": value for stage, value in self._seconds.items()}
        if scoring := self._seconds.get(SCORING):
            figures["overlap/hidden_share"] = max(0.0, 1.0 - self._seconds.get(WAIT, 0.0) / scoring)
        self._reset()
        return figures


@runtime_checkable
class SupportsLogprobs(Protocol):
    """A learner, such as `PPOLearner`, that computes log-probabilities under its weights."""

    def logprobs(self, rows: TokenBatch) -> Array:
        """Return log-probabilities as (B,T), aligned with `input_ids`. They are 0 outside of actions."""


class UpdateRecorder:
    """Collects an update's scores, credit and probability ratios for the records of kept episodes."""

    def __init__(self) -> None:
        self._made: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._advantages: defaultdict[str, list[float]] = defaultdict(list)
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def add_credit(self, credited: CreditBatch) -> None:
        """Add the scores and the credit of the episodes used for training."""
        for rollout_id, score in zip(credited.rollout_ids, credited.scores, strict=True):
            self._made[rollout_id] |= {"score": score, "credit": []}
        for row in credited.rows() if credited.credit is not None else ():
            self._made[row["rollout_id"]]["credit"].append(row)

    def add_update(self, rows: TokenBatch, learner: object) -> None:
        """Add the rows of a finished update and the learner in its state after the update.

        A token's ratio is the exponential of its current log-probability minus the log-probability that was recorded
        when the token was sampled.
        """
        if not isinstance(learner, SupportsLogprobs):
            return
        new_BT, old_BT, advantages_BT = learner.logprobs(rows), rows.batch["logprobs"], rows.batch["advantages"]
        # Rows are ordered by episode and segment, as actions are in an episode's spans.
        for row, rollout_id in enumerate(rows.non_tensor_batch["rollout_id"]):
            sampled = rows.batch["action_mask"][row] != 0
            with np.errstate(over="ignore"):
                ratios = np.exp(new_BT[row, sampled].astype(np.float64) - old_BT[row, sampled])
            advantages = np.where(rows.batch["loss_mask"][row] != 0, advantages_BT[row], np.nan)[sampled]
            self._ratios[rollout_id] += ratios.tolist()
            self._advantages[rollout_id] += advantages.tolist()

    def line(self, episode: SingleAgentEpisode, redaction: Redaction) -> bytes:
        """Return the `record` of an episode as a line, redacted by the task's hook and with secrets removed."""
        record = self.record(episode)
        if state := episode.custom_data.get("final_state"):
            # Redact the record before it is encoded as Base64.
            clean = redacted_state(state, redaction)
            record["final_state"] = to_json_value({"kind": clean.kind, "payload": clean.payload})
        hooked = dict(redaction.redact_record({key: value for key, value in record.items() if key != TRAINING}))
        if made := record.get(TRAINING):
            credit = {"credit": [redaction.redact_record(row) for row in made["credit"]]} if "credit" in made else {}
            hooked[TRAINING] = made | credit
        return redaction.redact_line(json.dumps(hooked).encode("ascii")) + b"\n"

    def record(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        """Return an episode's record in the format of `episodes.jsonl`. The key `training` contains the results.

        The results are the episode's `score`, its `credit` in the format of `credit.jsonl`, and the `advantages` and
        `ratios` of all actions with recorded tokens, in order. For each action, the advantage is a single number, or
        null if the action is not in the loss. There is one ratio for each token, or null instead of a ratio if a
        log-probability is unknown. Unknown parts are omitted.
        """
        record, made = episode_to_record(episode), self._made[episode.id_]
        ratios, advantages = self._ratios[episode.id_], self._advantages[episode.id_]
        lengths = [span.stop - span.start for span in episode.tokens.spans]
        if sum(lengths) and sum(lengths) == len(ratios):

            def known(value: float) -> float | None:
                return float(value) if np.isfinite(value) else None  # JSON has only finite numbers

            ends = np.cumsum(lengths).tolist()
            spans = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
            made |= {
                "advantages": [known(advantages[span.start]) if span.stop > span.start else None for span in spans],
                "ratios": [[known(value) for value in ratios[span]] for span in spans],
            }
        return record | ({TRAINING: made} if made else {})
