"""What an update made of the episodes that a training run keeps: scores, credit, and how it changed each token."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import episode_to_record
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.rl_processing import CreditBatch
from reward_kit.runs.files import TRAINING
from reward_kit.runs.redaction import Redaction
from reward_kit.runs.run_folder import redacted_state
from reward_kit.tokens import TokenBatch
from reward_kit.tokens.columns import Array


@runtime_checkable
class TellsLogprobs(Protocol):
    """A learner that says how likely its weights make tokens; `PPOLearner` does."""

    def logprobs(self, rows: TokenBatch) -> Array:
        """(B,T) log-probabilities on the axis of `input_ids`, 0 off the actions."""


class KeptUpdate:
    """Takes what is known of the episodes of one update on its way, for the lines in which they are kept."""

    def __init__(self) -> None:
        self._made: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        self._advantages: defaultdict[str, list[float]] = defaultdict(list)
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def add_credit(self, credited: CreditBatch) -> None:
        """The scores and the credit of episodes that are trained on."""
        for rollout_id, score in zip(credited.rollout_ids, credited.scores, strict=True):
            self._made[rollout_id] |= {"score": score, "credit": []}
        for row in credited.rows() if credited.credit is not None else ():
            self._made[row["rollout_id"]]["credit"].append(row)

    def add_update(self, rows: TokenBatch, learner: object) -> None:
        """The rows of an update that was made, and the learner as it is after it.

        The ratio of a token is exp(its log-probability now - the one that was recorded as it was sampled).
        """
        if not isinstance(learner, TellsLogprobs):
            return
        new_BT, old_BT, advantages_BT = learner.logprobs(rows), rows.batch["logprobs"], rows.batch["advantages"]
        # Rows come by episode, its segments in order; so do the actions of an episode in its spans.
        for row, rollout_id in enumerate(rows.non_tensor_batch["rollout_id"]):
            sampled = rows.batch["action_mask"][row] != 0
            with np.errstate(over="ignore"):
                ratios = np.exp(new_BT[row, sampled].astype(np.float64) - old_BT[row, sampled])
            advantages = np.where(rows.batch["loss_mask"][row] != 0, advantages_BT[row], np.nan)[sampled]
            self._ratios[rollout_id] += ratios.tolist()
            self._advantages[rollout_id] += advantages.tolist()

    def line(self, episode: SingleAgentEpisode, redaction: Redaction) -> bytes:
        """What is written of an episode: its `record` without secrets, and with the task's hook on its texts."""
        record = self.record(episode)
        if state := episode.custom_data.get("final_state"):
            # The record has it in Base64, in which nothing is found.
            clean = redacted_state(state, redaction)
            record["final_state"] = to_json_value({"kind": clean.kind, "payload": clean.payload})
        hooked = dict(redaction.of_record({key: value for key, value in record.items() if key != TRAINING}))
        if made := record.get(TRAINING):
            credit = {"credit": [redaction.of_record(row) for row in made["credit"]]} if "credit" in made else {}
            hooked[TRAINING] = made | credit
        return redaction.of_line(json.dumps(hooked).encode("ascii")) + b"\n"

    def record(self, episode: SingleAgentEpisode) -> dict[str, Any]:
        """The line of an episode: that of `episodes.jsonl`, and under `training` what the update made of it.

        That is its `score`, its `credit` as the lines of `credit.jsonl`, and, for each action with recorded tokens in
        order, its `advantages` (one number, null where it does not take part) and `ratios` (one for each token, null
        where one of the two log-probabilities is unknown). What is not known is left out.
        """
        record, made = episode_to_record(episode), self._made[episode.id_]
        lengths = [span.stop - span.start for span in episode.tokens.spans]
        if sum(lengths) and sum(lengths) == len(self._ratios[episode.id_]):
            cuts = np.cumsum(lengths)[:-1].tolist()
            ratios = [_known(part) for part in _parts(self._ratios[episode.id_], cuts)]
            firsts = [_known(part[:1]) for part in _parts(self._advantages[episode.id_], cuts)]
            made |= {"advantages": [first[0] if first else None for first in firsts], "ratios": ratios}
        return record | ({TRAINING: made} if made else {})


def _parts(values: Sequence[float], cuts: Sequence[int]) -> list[Sequence[float]]:
    begins, ends = [0, *cuts], [*cuts, len(values)]
    return [values[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _known(values: Sequence[float]) -> list[float | None]:
    """None for what is not finite, which no JSON holds."""
    return [float(value) if np.isfinite(value) else None for value in values]
