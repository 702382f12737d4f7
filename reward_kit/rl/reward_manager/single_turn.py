"""Single answers: each row is one, which a reward function scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from reward_kit.blocking import run_blocking
from reward_kit.credit.options import check_number
from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.custom_rewards import Answer, spec_of
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest, check_truth
from reward_kit.rl.reward_manager.base import RewardManager, Scores
from reward_kit.rl.reward_manager.batches import RewardBatch
from reward_kit.rl.reward_manager.reports import Echo, Tokenizer, check_tokenizer, check_whole, columns_of, texts_of
from reward_kit.typed_interface import Mode, RewardSpec

ComputeScore = Callable[..., Any]


class NaiveRewardManager(RewardManager):
    """Scores each row by its ground truth, one after the other.

    A reward that fails, or gives no valid score, leaves its own row unscored: no reward, `is_scored` false, and
    `failure_class` and `failure` say why. What else a reward tells of a row (the metrics of an `EvaluateResult`, the
    further keys of verl's dict) is in `reward_extra_info` under its own name.

    Args:
        tokenizer: decodes prompts and responses, without special tokens.
        num_examine: how many rows of each data source are shown of a batch, at most.
        compute_score: a reward function, a `Scorer` (behind walls), or a function of verl's form:
            `compute_score(data_source, solution_str, ground_truth, extra_info)`.
        seed: of the generator that chooses what is shown.
        echo: takes each line that is shown; by default the logger "reward_kit.rl", at the level INFO.

    Raises:
        ConfigError: an option is wrong, or it is no reward function.
    """

    mode: Mode = "pointwise"
    _max_concurrency = 1
    _deadline_s: float | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: ComputeScore | RewardSpec | Scorer,
        *,
        seed: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, seed=seed, echo=echo)
        check_tokenizer(tokenizer)
        self._compute_score = _reward_of(compute_score, self.mode)

    def _score(self, batch: RewardBatch) -> Scores:
        requests = self._requests(batch)
        reward = self._compute_score
        if isinstance(reward, RewardSpec) and requests:
            truths = [request.ground_truth for request in requests]
            check_truth(reward, truths, _fields_beside_truth(batch), "row of non_tensor_batch['reward_model']")
        scored = _run(requests, reward, self._max_concurrency, self._deadline_s) if requests else []
        scores = np.array([np.nan if one.score is None else one.score for one in scored], dtype=np.float64)
        return Scores(scores, columns_of([_facts(one) for one in scored]))

    def _requests(self, batch: RewardBatch) -> list[ScoringRequest]:
        sources, extra_infos = batch.column("data_source"), batch.column("extra_info")
        models, chats = batch.column("reward_model"), batch.column("raw_prompt")
        requests = []
        for row in range(len(batch)):
            prompt, response = texts_of(self.tokenizer, batch, row, self.skips_special_tokens)
            chat = [Message(role="user", content=prompt)] if chats is None else _chat(chats[row], row)
            extra_info = None if extra_infos is None else extra_infos[row]
            source = None if sources is None else sources[row]
            requests.append(
                ScoringRequest(
                    rollout_id=str(row),
                    messages=[*chat, Message(role="assistant", content=response)],
                    ground_truth=None if models is None else _ground_truth(models[row], row),
                    assistant_turns=[len(chat)],
                    sample=extra_info if isinstance(extra_info, Mapping) else {},
                    extra={"data_source": source, "solution_str": response, "extra_info": extra_info},
                )
            )
        return requests


class BatchRewardManager(NaiveRewardManager):
    """Scores all rows in one call: of a batch reward, or of verl's form for batches.

    That one is `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, which gives a list. For its
    arguments see `NaiveRewardManager`.
    """

    mode: Mode = "batch"


class PrimeRewardManager(NaiveRewardManager):
    """Scores rows in parallel, each within a deadline: what exceeds it is unscored with the class `timeout`.

    Plain functions are called in threads. A call that was given up goes on in its thread until it ends; a reward that
    may hang for good, or that computes much in Python, belongs behind walls: give a `Scorer` with its own deadline.

    Args:
        tokenizer: see `NaiveRewardManager`, also for the others that are not named here.
        num_examine: see there.
        compute_score: see there.
        max_concurrency: calls at a time.
        deadline_s: for one call; None with a `Scorer`.
        seed: see there.
        echo: see there.

    Raises:
        ConfigError: see there; or a number is not above 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: ComputeScore | RewardSpec | Scorer,
        *,
        max_concurrency: int = 64,
        deadline_s: float | None = 300.0,
        seed: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, seed=seed, echo=echo)
        check_whole("max_concurrency", max_concurrency, 1)
        if deadline_s is not None:
            check_number("deadline_s", deadline_s)
            if deadline_s <= 0:
                raise ConfigError(f"deadline_s is above 0; got {deadline_s!r}")
        self._max_concurrency, self._deadline_s = max_concurrency, deadline_s


class DAPORewardManager(NaiveRewardManager):
    """Scores as `NaiveRewardManager`, and takes something off for responses that nearly reach the longest allowed.

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): nothing up to
    max_response_length - overlong_buffer_len tokens, from there growing linearly to `overlong_penalty_factor` at
    max_response_length. `reward_extra_info` has it as `overlong_penalty`, which is 0 or below.

    Args:
        tokenizer: see `NaiveRewardManager`, also for the others that are not named here.
        num_examine: see there.
        compute_score: see there.
        max_response_length: in tokens.
        overlong_buffer_len: how many tokens below that the penalty begins.
        overlong_penalty_factor: what is taken off at most.
        seed: see there.
        echo: see there.

    Raises:
        ConfigError: see there; or a number is out of range.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: ComputeScore | RewardSpec | Scorer,
        *,
        max_response_length: int,
        overlong_buffer_len: int,
        overlong_penalty_factor: float = 1.0,
        seed: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, seed=seed, echo=echo)
        check_whole("max_response_length", max_response_length, 1)
        check_whole("overlong_buffer_len", overlong_buffer_len, 1)
        check_number("overlong_buffer_len", overlong_buffer_len, 1, max_response_length)
        check_number("overlong_penalty_factor", overlong_penalty_factor, 0.0)
        self._max_length, self._buffer = max_response_length, overlong_buffer_len
        self._factor = overlong_penalty_factor

    def _score(self, batch: RewardBatch) -> Scores:
        found = super()._score(batch)
        lengths = batch.valid_BT.sum(dim=1).cpu().numpy()
        over = np.clip((lengths - (self._max_length - self._buffer)) / self._buffer, 0.0, 1.0)
        penalty = 0.0 - self._factor * over
        return Scores(found.scores_B + penalty, {**found.info, "overlong_penalty": penalty})


def _reward_of(given: Any, mode: Mode) -> RewardSpec | Scorer:
    """A `Scorer` as it is, or the spec of a reward of this mode."""
    if hasattr(given, "score_group"):
        scorer: Scorer = given
        return scorer
    spec = given if isinstance(given, RewardSpec) else spec_of(given)
    if hasattr(spec.function, "each"):
        raise ConfigError(
            f"reward {spec.id!r} has post_process_scores, which is for groups, and a reward manager scores rows; "
            "leave it to an AsyncRewardAgent"
        )
    if spec.mode != mode:
        other = "BatchRewardManager" if mode == "pointwise" else "NaiveRewardManager"
        raise ConfigError(f"reward {spec.id!r} is a {spec.mode} reward; it is for the {other}")
    return spec


def _run(
    requests: Sequence[ScoringRequest], reward: RewardSpec | Scorer, max_concurrency: int, deadline_s: float | None
) -> list[Scored]:
    """The scores of all of them, in their order. A batch reward is called once."""

    async def run() -> list[Scored]:
        async with AsyncRewardAgent(reward, max_concurrency=max_concurrency, deadline_s=deadline_s) as agent:
            return await agent.score_all(requests, len(requests) if agent.scorer.mode == "batch" else 1)

    return run_blocking(run())


def _facts(scored: Scored) -> dict[str, Any]:
    """What a score tells of its row. Texts and plain numbers, since trainers write them to files."""
    failure, result = scored.failure, scored.result
    metrics = result.metrics if failure is None and result is not None else {}
    return {
        **(result.told if isinstance(result, Answer) else {}),
        **{name: metric.score for name, metric in metrics.items() if metric.is_score_valid},
        "is_scored": failure is None,
        "failure_class": failure.failure_class if failure else "",
        "failure": failure.message if failure else "",
    }


def _chat(given: Any, row: int) -> list[Message]:
    try:
        return [each if isinstance(each, Message) else Message.model_validate(each) for each in given]
    except (TypeError, ValidationError) as error:
        raise ConfigError(f"non_tensor_batch['raw_prompt'][{row}] is no list of messages: {error}") from error


def _fields_beside_truth(batch: RewardBatch) -> set[str]:
    """What rows have where a ground truth is looked for, and where the batch has no such place, what it has."""
    models = batch.column("reward_model")
    return set(map(str, batch.others)) if models is None else {str(key) for model in models for key in model or {}}


def _ground_truth(given: Any, row: int) -> Any:
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"non_tensor_batch['reward_model'][{row}] is a mapping with 'ground_truth', as verl has it; "
            f"got {given!r:.80}"
        )
    return (given or {}).get("ground_truth")
