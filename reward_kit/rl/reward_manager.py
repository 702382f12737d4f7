"""Reward managers, which convert scores to rewards for tokens.

They have the same interface as the reward managers in verl.

`EpisodeRewardManager` uses existing episode scores. The other managers score single answers with a reward function.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args, overload

import anyio
import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from reward_kit.credit.options import RowsWithScore
from reward_kit.display_text import printable
from reward_kit.errors import (
    ConfigError,
    Failure,
    InvalidResultError,
    RewardError,
    RewardKitError,
    boundary,
    did_you_mean,
)
from reward_kit.models import Message
from reward_kit.reward_agent.agent import AsyncRewardAgent
from reward_kit.reward_agent.custom_rewards import CustomAnswer, build_spec
from reward_kit.reward_agent.scoring import Scored, Scorer, ScoringRequest, check_truth
from reward_kit.rl.reward_batches import (
    Bools,
    Column,
    Floats,
    Ints,
    RewardBatch,
    TokenRewards,
    as_numbers,
    read_non_tensors,
    read_tensors,
    stack_facts,
)
from reward_kit.typed_interface import EvaluationMode, RewardSpec
from reward_kit.validation import check_choice, check_number

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "EpisodeRewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardManager",
    "load_reward_manager",
]
NormalizationType = Literal["none", "length", "variance"]
VisualRule = Literal["multiply", "add"]
VisualScorer = Callable[[Mapping[str, Any]], float | None]
ComputeScore = Callable[..., Any]
Echo = Callable[[str], None]
SHOWN_SHARE = 0.1
"""The probability that a row is shown, until the maximum number for its data source is reached."""
EPSILON = 1e-8
"""A constant that is added to the standard deviation before scores are divided by it."""
logger = logging.getLogger("reward_kit.rl")


class Tokenizer(Protocol):
    """The methods of a tokenizer that reward managers use."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the decoded string."""


def check_tokenizer(tokenizer: object) -> None:
    """Raise a `ConfigError` if the tokenizer cannot decode."""
    if not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(f"the tokenizer must have a method `decode`, got {tokenizer!r:.80}")


def _check_whole(name: str, number: object, low: int) -> None:
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {number!r}")


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """The number and the mean of all scores so far, and `m2`, the sum of their squared distances from the mean."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    def including(self, numbers: Floats) -> RunningStatistics:
        """Return the statistics with `numbers` included. The order of the numbers affects only rounding.

        This is Welford's recurrence for a whole batch (Chan, Golub and LeVeque 1983, eq. 2.1).
        """
        if not len(numbers):
            return self
        # Compute relative to the first number so that the mean of equal numbers is exactly that number.
        mean = float(numbers[0] + np.mean(numbers - numbers[0]))
        m2 = float(np.sum((numbers - mean) ** 2))
        count = self.count + len(numbers)
        apart = mean - self.mean
        return RunningStatistics(
            count,
            self.mean + apart * len(numbers) / count,
            self.m2 + m2 + apart**2 * self.count * len(numbers) / count,
        )

    def normalized(self, numbers: Floats) -> Floats:
        """Return (x - mean) / (std + 1e-8), where std is the population standard deviation.

        The result is 0 if there is only one number or all numbers are equal.
        """
        return (numbers - self.mean) / ((math.sqrt(self.m2 / self.count) if self.count else 0.0) + EPSILON)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunningStatistics:
        """Parse statistics that were converted with `asdict`.

        Raises:
            ConfigError: If a number is missing or out of range.
        """
        try:
            read = cls(operator.index(data["count"]), float(data["mean"]), float(data["m2"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"invalid running statistics: {dict(data)!r:.200}; expected count, mean and m2"
            ) from error
        if read.count < 0 or not math.isfinite(read.mean) or not 0 <= read.m2 < math.inf:
            raise ConfigError(
                f"invalid running statistics: {read}; count and m2 must be at least 0, and all numbers must be finite"
            )
        if read.count == 0 and read != cls():
            raise ConfigError(f"invalid running statistics: {read}; if count is 0, mean and m2 must be 0")
        return read


class BatchScores(NamedTuple):
    """The scores that a reward manager has computed for a batch."""

    scores_B: Floats  # Added to each row's last valid token; NaN adds nothing.
    info: dict[str, Column]  # Data about the rows, (B,) each
    step_rewards: TokenRewards | None = None
    statistics: RunningStatistics | None = None  # The updated statistics, if the manager keeps any


class RewardManager(ABC):
    """The base class for reward managers. It converts scores to token rewards and can show examples.

    If a batch has `rm_scores`, they are returned unchanged, and the batch is not scored.

    Args:
        tokenizer: the tokenizer that decodes rows to show or score them.
        num_examine: the maximum number of rows to show for each data source in a batch. Each row is shown with
            probability 0.1.
        seed: the random seed for choosing these rows.
        echo: a function that shows a line. The default is `print`.

    Raises:
        ConfigError: If an option is invalid.
    """

    skips_special_tokens = True

    def __init__(self, tokenizer: Tokenizer, num_examine: int, *, seed: int = 0, echo: Echo | None = None) -> None:
        _check_whole("num_examine", num_examine, 0)
        _check_whole("seed", seed, 0)
        if echo is not None and not callable(echo):
            raise ConfigError(f"echo must be a function that takes one line, got {echo!r:.80}")
        if num_examine:
            check_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.statistics = RunningStatistics()
        self._num_examine, self._echo = num_examine, echo or _print
        self._generator = np.random.default_rng(seed)

    @overload
    def __call__(self, data: Any, return_dict: Literal[False] = False) -> Tensor: ...
    @overload
    def __call__(self, data: Any, return_dict: Literal[True]) -> dict[str, Any]: ...
    def __call__(self, data: Any, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Return the rewards for a batch as float32, with the shape and device of `responses` (or `action_mask`).

        Args:
            data: a batch; see `rl.reward_batches`. If it contains `rm_scores`, they are returned as the rewards.
            return_dict: whether to return a dict that contains `reward_tensor` and `reward_extra_info`. The latter
                contains arrays with one item for each row.

        Raises:
            ConfigError: If the batch is incomplete. The batch is not changed.
            RewardError: If the tokenizer cannot decode a row.
        """
        rewards, info = self._ready(data) or self._rewarded(data)
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards

    @staticmethod
    def _ready(data: Any) -> tuple[Tensor, dict[str, Column]] | None:
        """Return a batch's `rm_scores` and the columns named in its `reward_extra_keys`.

        If the batch has no `rm_scores`, return None.
        """
        tensors = read_tensors(data, ("rm_scores", "responses", "action_mask"))
        if (rewards := tensors.pop("rm_scores", None)) is None:
            return None
        shape = next((tuple(mask.shape) for mask in tensors.values()), tuple(rewards.shape))
        if rewards.dim() != 2 or tuple(rewards.shape) != shape:
            raise ConfigError(
                f"'rm_scores' must have one reward for each token, so its shape must be {shape}, got "
                f"{tuple(rewards.shape)}"
            )
        scores = rewards.detach().reshape(len(rewards), -1).sum(dim=1).cpu().double().numpy()
        keys = (getattr(data, "meta_info", None) or {}).get("reward_extra_keys", ())
        others = read_non_tensors(data)
        if missing := [key for key in keys if key not in others]:
            raise ConfigError(f"unknown name {missing[0]!r} in reward_extra_keys{did_you_mean(missing[0], others)}")
        return rewards, {"score": scores, "is_scored": ~np.isnan(scores), **{key: others[key] for key in keys}}

    def _rewarded(self, data: Any) -> tuple[Tensor, dict[str, Column]]:
        batch = RewardBatch.of(data)
        scored = self._score(batch)
        rewards = batch.placed(scored.scores_B, scored.step_rewards)
        if empty := int(batch.is_empty_B.sum()):
            logger.info("%d of %d rows have no valid token and get no reward", empty, len(batch))
        if self._num_examine:
            self._show(batch, scored.scores_B)
        # Update these last so that a failed call changes nothing and can be repeated.
        self.statistics = scored.statistics or self.statistics
        return rewards, {**scored.info, "score": scored.scores_B, "is_empty": batch.is_empty_B}

    def _show(self, batch: RewardBatch, scores_B: Floats) -> None:
        sources = batch.column("data_source")
        shown: Counter[str] = Counter()
        for row in np.flatnonzero(self._generator.random(len(batch)) < SHOWN_SHARE).tolist():
            source = "unknown" if sources is None or sources[row] is None else str(sources[row])
            if shown[source] >= self._num_examine:
                continue
            shown[source] += 1
            prompt, response = self._texts(batch, row)
            score = "none" if math.isnan(scores_B[row]) else f"{scores_B[row]:g}"
            for name, text in (("prompt", prompt), ("response", response), ("score", score)):
                self._echo(f"[{source}][{name}] {text}")

    def _texts(self, batch: RewardBatch, row: int) -> list[str]:
        """Decode the prompt and the response in a row."""
        parts, skip = batch.ids(row), self.skips_special_tokens
        with boundary(RewardError, f"tokenizer on row {row}"):
            return [self.tokenizer.decode(part, skip_special_tokens=skip) for part in parts]

    @abstractmethod
    def _score(self, batch: RewardBatch) -> BatchScores:
        """Score a batch without changing it or the manager."""


def _print(line: str) -> None:
    print(printable(line))  # noqa: T201


class EpisodeRewardManager(RewardManager):
    """A reward manager for episodes whose scores are in `non_tensor_batch["episode_rewards"]`.

    An episode's score is added to the last valid token of its final row, which the column `ends_episode` marks. Without
    that column, the final row is the last row that has the same `traj_uid` and a valid token. An episode is unscored if
    its score is `None` or NaN. The rows of an unscored episode get no reward, and their `is_scored` is false. The
    visual scorer is applied first, followed by the normalization. Step rewards are added unchanged.

    Args:
        rows: "last" to add the score to the final row only, or "each" to add it to the last valid token of every row.
            The trainer of verl-agent requires "each", because it expects the score of the whole episode in every row.
        normalize_by_length: a shorthand for normalization_type="length".
        normalization_type: "none"; "length", which divides by `episode_lengths`; or "variance", which computes (score -
            mean) / (std + 1e-8) over all episodes so far, including this batch. If you use "variance", save
            `state_dict()` in checkpoints.
        step_rewards: whether to add the `step_rewards` of the batch, each to the last token of its action. They are a
            (B,T) array, as returned by `build_rows`, or a column of `non_tensor_batch` that contains, for each row, a
            list with one reward for each action.
        visual_scorer: a function that scores the `multi_modal_inputs` (`pixel_values` and `image_grid_thw`) of each
            scored row that has them. If the function raises an error or returns None or NaN, the episode is unscored.
        visual_rule: "multiply" to multiply the score by the visual score, or "add" to add the two.

    See `RewardManager` for the other arguments.

    Raises:
        ConfigError: If an option is unknown or contradicts another option.
    """

    skips_special_tokens = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        normalize_by_length: bool = False,
        *,
        normalization_type: NormalizationType | None = None,
        rows: RowsWithScore = "last",
        step_rewards: bool = False,
        visual_scorer: VisualScorer | None = None,
        visual_rule: VisualRule = "multiply",
        seed: int = 0,
        echo: Echo | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, seed=seed, echo=echo)
        check_choice("visual_rule", visual_rule, get_args(VisualRule))
        check_choice("rows", rows, get_args(RowsWithScore))
        for name, flag in (("normalize_by_length", normalize_by_length), ("step_rewards", step_rewards)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, got {flag!r}")
        if visual_scorer is not None and (not callable(visual_scorer) or inspect.iscoroutinefunction(visual_scorer)):
            raise ConfigError(
                f"visual_scorer must be a synchronous function that takes one row's inputs, got {visual_scorer!r:.80}"
            )
        kind = normalization_type
        if kind is None:
            kind = "length" if normalize_by_length else "none"
        check_choice("normalization_type", kind, get_args(NormalizationType))
        if normalize_by_length and kind != "length":
            raise ConfigError(f"normalize_by_length=True contradicts normalization_type={kind!r}; remove one of them")
        self.normalization_type: NormalizationType = kind
        self._in_each_row = rows == "each"
        self._step_rewards, self._visual_scorer, self._visual_rule = step_rewards, visual_scorer, visual_rule

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON."""
        return {"normalization_type": self.normalization_type, **asdict(self.statistics)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint.

        Raises:
            ConfigError: If the state is invalid or belongs to a different normalization.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"the state must be a mapping that state_dict() returned, got {state!r:.80}")
        if (kind := state.get("normalization_type")) != self.normalization_type:
            raise ConfigError(
                f"the state has normalization_type {kind!r}, but the manager has {self.normalization_type!r}"
            )
        self.statistics = RunningStatistics.from_json(state)

    def _score(self, batch: RewardBatch) -> BatchScores:
        scores = batch.numbers("episode_rewards")
        first = np.unique(batch.episodes_B, return_index=True)[1]
        shared = scores[first][batch.episodes_B]
        if (wrong := np.flatnonzero((scores != shared) & ~(np.isnan(scores) & np.isnan(shared)))).size:
            row = int(wrong[0])
            raise ConfigError(
                f"episode_rewards[{row}] is {scores[row]:g}, but an earlier row of the same traj_uid has "
                f"{shared[row]:g}; pass the score of the whole episode here, and the rewards of steps as 'step_rewards'"
            )
        is_scored = ~np.isnan(scores)
        bears = ~batch.is_empty_B & is_scored
        if not self._in_each_row:
            bears &= batch.ends_B
        facts: dict[str, Column] = {}
        if self._visual_scorer is not None:
            facts = stack_facts(self._apply_visual(batch, self._visual_scorer, scores, np.flatnonzero(bears)))
            is_scored &= ~np.isin(batch.episodes_B, batch.episodes_B[bears & np.isnan(scores)])
            bears &= is_scored
        statistics = None
        if self.normalization_type == "variance":
            statistics = self.statistics.including(scores[bears & batch.ends_B])  # each episode once
            scores = statistics.normalized(scores)
        elif self.normalization_type == "length":
            lengths = batch.numbers("episode_lengths")
            if (wrong := np.flatnonzero(bears & ~(lengths >= 1))).size:
                row = int(wrong[0])
                raise ConfigError(
                    f"episode_lengths[{row}] is {lengths[row]:g}, but it must be the number of steps in the "
                    "episode, at least 1"
                )
            scores = np.divide(scores, lengths, where=bears, out=np.full_like(scores, np.nan))
        steps = _locate_step_rewards(batch, is_scored) if self._step_rewards else None
        return BatchScores(np.where(bears, scores, np.nan), {"is_scored": is_scored, **facts}, steps, statistics)

    def _apply_visual(
        self, batch: RewardBatch, scorer: VisualScorer, scores_B: Floats, rows: Ints
    ) -> list[dict[str, str]]:
        """Apply the visual scorer to the rows' scores in place, and return each row's failure."""
        failures = [{"failure_class": "", "failure": ""} for _ in scores_B]
        inputs = batch.column("multi_modal_inputs")
        for row in rows.tolist():
            if inputs is None or inputs[row] is None or (isinstance(inputs[row], Mapping) and not inputs[row]):
                continue
            try:
                with boundary(RewardError, f"visual scorer on row {row}"):
                    answer: Any = scorer(inputs[row])
                    seen = answer
                    if hasattr(answer, "item") and math.prod(answer.shape) == 1:  # a tensor's `size` is a method
                        seen = answer.item()
                if not isinstance(seen, int | float) or not math.isfinite(seen):
                    raise InvalidResultError(
                        f"visual scorer on row {row}: it returned {answer!r:.80}, which is not a finite number"
                    )
            except RewardKitError as error:
                failure = Failure.from_exception(error)
                failures[row] = {"failure_class": failure.failure_class, "failure": failure.message}
                seen = np.nan
            scores_B[row] = scores_B[row] * seen if self._visual_rule == "multiply" else scores_B[row] + seen
        return failures


def _locate_step_rewards(batch: RewardBatch, is_scored_B: Bools) -> TokenRewards:
    """Return the step rewards of scored episodes at the positions of their actions. None and NaN values are omitted."""
    if "step_rewards" in batch.arrays:
        given = batch.arrays["step_rewards"]
        if given.shape != batch.actions_BT.shape:
            raise ConfigError(
                f"step_rewards has shape {tuple(given.shape)}, but the action mask has shape "
                f"{tuple(batch.actions_BT.shape)}; pass one reward for each token, or put a list for each row "
                "with one reward for each action into non_tensor_batch"
            )
        at, on = torch.where((given != 0) & batch.valid_BT)
        rows, columns = at.cpu().numpy(), on.cpu().numpy()
        values = given[at, on].cpu().double().numpy()
    else:
        lists = batch.column("step_rewards")
        if lists is None:
            raise ConfigError(
                "step_rewards=True, but the batch has no 'step_rewards', neither in batch nor in non_tensor_batch"
            )
        rows, columns = batch.action_ends()
        flat: list[Any] = []
        counts = np.bincount(rows, minlength=len(batch)).tolist()
        for row, (rewards, actions) in enumerate(zip(lists, counts, strict=True)):
            known = [None] * actions if rewards is None else rewards
            if not hasattr(known, "__len__") or isinstance(known, str):
                raise ConfigError(
                    f"non_tensor_batch['step_rewards'][{row}] must be a list with one reward for each action, got "
                    f"{rewards!s:.80}; a single number for each row, as in verl-agent, is a discounted return"
                )
            if len(known) != actions:
                raise ConfigError(
                    f"non_tensor_batch['step_rewards'][{row}] has {len(known)} rewards, but the row has "
                    f"{actions} actions (`action_lengths`, or contiguous runs of its mask)"
                )
            flat.extend(known)
        values = as_numbers(flat, "non_tensor_batch['step_rewards']")
    kept = is_scored_B[rows] & ~np.isnan(values)
    return TokenRewards(rows[kept], columns[kept], values[kept])


class NaiveRewardManager(RewardManager):
    """A reward manager that scores each row separately against its ground truth.

    If a reward fails or returns an invalid score, its row is unscored. The row then gets no reward, its `is_scored` is
    false, and its `failure_class` and `failure` contain the reason. Further results, such as the metrics of an
    `EvaluateResult` or (as in verl) the other keys of a dict, are stored in `reward_extra_info` under their names.

    Args:
        compute_score: a reward function, a `Scorer` (which is sandboxed), or a function with verl's signature
            `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    See `RewardManager` for the other arguments.

    Raises:
        ConfigError: If `compute_score` has an unsupported type.
    """

    mode: EvaluationMode = "pointwise"
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
        self._compute_score = _as_reward(compute_score, self.mode)

    def _score(self, batch: RewardBatch) -> BatchScores:
        requests = self._requests(batch)
        reward = self._compute_score
        if isinstance(reward, RewardSpec) and requests:
            truths = [request.ground_truth for request in requests]
            models = batch.column("reward_model")
            # The fields next to a ground truth, or those of the batch if there is no `reward_model`.
            fields = {str(key) for model in models for key in model or {}} if models is not None else set()
            fields = set(map(str, batch.others)) if models is None else fields
            check_truth(reward, truths, fields, "row of non_tensor_batch['reward_model']")
        scored = self._run(requests) if requests else []
        facts = [result_facts(one) for one in scored]
        scores = np.array([np.nan if one.score is None else one.score for one in scored], dtype=np.float64)
        return BatchScores(scores, stack_facts(facts))

    def _requests(self, batch: RewardBatch) -> list[ScoringRequest]:
        names = ("data_source", "extra_info", "reward_model", "raw_prompt")
        columns = [batch.column(name) for name in names]
        requests = []
        for row in range(len(batch)):
            prompt, response = self._texts(batch, row)
            items: list[Any] = [None if values is None else values[row] for values in columns]
            source, extra_info, model, given = items
            chat = [Message(role="user", content=prompt)]
            if columns[-1] is not None:
                try:
                    chat = [each if isinstance(each, Message) else Message.model_validate(each) for each in given]
                except (TypeError, ValidationError) as error:
                    raise ConfigError(
                        f"non_tensor_batch['raw_prompt'][{row}] must be a list of messages: {error}"
                    ) from error
            if model is not None and not isinstance(model, Mapping):
                raise ConfigError(
                    f"non_tensor_batch['reward_model'][{row}] must be a mapping with 'ground_truth', as in verl, "
                    f"got {model!r:.80}"
                )
            requests.append(
                ScoringRequest(
                    rollout_id=str(row),
                    messages=[*chat, Message(role="assistant", content=response)],
                    ground_truth=(model or {}).get("ground_truth"),
                    assistant_turns=[len(chat)],
                    sample=extra_info if isinstance(extra_info, Mapping) else {},
                    extra={"data_source": source, "solution_str": response, "extra_info": extra_info},
                )
            )
        return requests

    def _run(self, requests: Sequence[ScoringRequest]) -> list[Scored]:
        """Score all requests in order. A batch reward is called only once."""

        async def run() -> list[Scored]:
            reward, limit, deadline = self._compute_score, self._max_concurrency, self._deadline_s
            async with AsyncRewardAgent(reward, max_concurrency=limit, deadline_s=deadline) as agent:
                return await agent.score_all(requests, len(requests) if agent.scorer.mode == "batch" else 1)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return anyio.run(run)
        # The caller is in an event loop, for example in a notebook.
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(anyio.run, run).result()


def result_facts(scored: Scored) -> dict[str, Any]:
    """Return a result's metrics and other values, `is_scored`, and the failure.

    The values are strings and plain numbers, because trainers write them to files.
    """
    failure, result = scored.failure, scored.result
    metrics = result.metrics if failure is None and result is not None else {}
    failed = {"failure_class": failure.failure_class, "failure": failure.message} if failure else {}
    return {
        **(result.mapping_values if isinstance(result, CustomAnswer) else {}),
        **{name: metric.score for name, metric in metrics.items() if metric.is_score_valid},
        **{"is_scored": failure is None, "failure_class": "", "failure": ""},
        **failed,
    }


class BatchRewardManager(NaiveRewardManager):
    """A reward manager that scores all rows in a single call to a batch reward or a verl-style batch function.

    A verl-style batch function has the signature `compute_score(data_sources, solution_strs, ground_truths,
    extra_infos)` and returns a list. See `NaiveRewardManager` for the arguments.
    """

    mode: EvaluationMode = "batch"


class PrimeRewardManager(NaiveRewardManager):
    """A reward manager that scores rows in parallel and limits the time of each call.

    A row whose call exceeds the limit is unscored, and its `failure_class` is "timeout".

    Plain functions run in threads, in which a call continues even after its deadline, until it ends. If a reward may
    hang or is CPU-bound in Python, run it in the sandbox instead by passing a `Scorer` that has a deadline.

    Args:
        max_concurrency: the maximum number of concurrent calls.
        deadline_s: the time limit for one call, in seconds. It must be None if `compute_score` is a `Scorer`.

    See `NaiveRewardManager` for the other arguments.
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
        _check_whole("max_concurrency", max_concurrency, 1)
        if deadline_s is not None:
            check_number("deadline_s", deadline_s)
            if deadline_s <= 0:
                raise ConfigError(f"deadline_s must be above 0, got {deadline_s!r}")
        self._max_concurrency, self._deadline_s = max_concurrency, deadline_s


class DAPORewardManager(NaiveRewardManager):
    """A `NaiveRewardManager` that also penalizes responses close to the maximum length.

    This is the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13). The size of the penalty is zero up to
    max_response_length - overlong_buffer_len tokens, and then grows linearly to `overlong_penalty_factor` at
    max_response_length. The penalty, a number of at most 0, is added to the score and reported as `overlong_penalty` in
    `reward_extra_info`.

    Args:
        max_response_length: the maximum length in tokens.
        overlong_buffer_len: the number of tokens before the maximum at which the penalty starts.
        overlong_penalty_factor: the maximum penalty.

    See `NaiveRewardManager` for the other arguments.
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
        _check_whole("max_response_length", max_response_length, 1)
        _check_whole("overlong_buffer_len", overlong_buffer_len, 1)
        check_number("overlong_buffer_len", overlong_buffer_len, 1, max_response_length)
        check_number("overlong_penalty_factor", overlong_penalty_factor, 0.0)
        self._max_length, self._buffer = max_response_length, overlong_buffer_len
        self._factor = overlong_penalty_factor

    def _score(self, batch: RewardBatch) -> BatchScores:
        scored = super()._score(batch)
        lengths = batch.valid_BT.sum(dim=1).cpu().numpy()
        over = np.clip((lengths - (self._max_length - self._buffer)) / self._buffer, 0.0, 1.0)
        penalty = 0.0 - self._factor * over
        return BatchScores(scored.scores_B + penalty, {**scored.info, "overlong_penalty": penalty})


def _as_reward(given: Any, mode: EvaluationMode) -> RewardSpec | Scorer:
    """Return a `Scorer` unchanged, or the specification of a reward. The reward must have the given mode."""
    if hasattr(given, "score_group"):
        scorer: Scorer = given
        return scorer
    spec = given if isinstance(given, RewardSpec) else build_spec(given)
    if hasattr(spec.function, "each"):
        raise ConfigError(
            f"reward {spec.id!r} has post_process_scores, which requires groups, but a reward manager scores "
            "single rows; use an AsyncRewardAgent"
        )
    if spec.mode != mode:
        other = "BatchRewardManager" if mode == "pointwise" else "NaiveRewardManager"
        raise ConfigError(f"reward {spec.id!r} is a {spec.mode} reward; use {other}")
    return spec


REWARD_MANAGERS: dict[str, type[RewardManager]] = {
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "episode": EpisodeRewardManager,
    "naive": NaiveRewardManager,
    "prime": PrimeRewardManager,
}


def load_reward_manager(name: str, tokenizer: Tokenizer, num_examine: int, **options: Any) -> RewardManager:
    """Create a reward manager by name: batch, dapo, episode, naive or prime.

    `options` contains the arguments of the reward manager.

    Raises:
        ConfigError: If the name is unknown, or an option is unknown, missing or invalid.
    """
    if name not in REWARD_MANAGERS:
        known = ", ".join(REWARD_MANAGERS)
        near = did_you_mean(str(name), REWARD_MANAGERS)
        raise ConfigError(f"unknown reward manager {name!r}; known: {known}{near if near.endswith('?') else ''}")
    kind = REWARD_MANAGERS[name]
    parameters = dict(list(inspect.signature(kind).parameters.items())[2:])
    if unknown := [option for option in options if option not in parameters]:
        raise ConfigError(f"reward manager {name!r} has no option {unknown[0]!r}{did_you_mean(unknown[0], parameters)}")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ConfigError(f"reward manager {name!r} requires the option {option!r}")
    return kind(tokenizer, num_examine, **options)
