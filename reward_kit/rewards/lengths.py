"""Rewards for the length of a reply.

They check bounds, scale the score of a correct answer, or compare a reply's length with the shortest reply in its
group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError, RewardKitError, boundary
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.reward_calls import BATCH_NAMES, checks_options, with_options
from reward_kit.rewards.combinators import Call, CombinedReward, Reward, combined, rollout_values
from reward_kit.rewards.judge_prompts import as_text, first_request, shown_messages
from reward_kit.rewards.replies import Part, last_reply, passed
from reward_kit.typed_interface import as_function, reward_function, reward_spec

Unit = Literal["characters", "words"]
"""Unicode characters, or words separated by white space."""
Count = Annotated[int, Field(ge=0)]


def _check_bounds(options: Mapping[str, Any]) -> None:
    at_least, at_most = options["at_least"], options["at_most"]
    if at_most is None and not at_least:
        raise ConfigError("option 'at_most': no bound is set; set at_least, at_most or both")
    if at_most is not None and at_least > at_most:
        raise ConfigError(f"option 'at_least' must not be greater than 'at_most', got {at_least} and {at_most}")


@reward_function
@checks_options(_check_bounds)
def length_within(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    unit: Unit = "characters",
    at_least: Count = 0,
    at_most: Count | None = None,
    below: Count = 0,
    above: Count = 0,
    as_penalty: bool = False,
    of: Part = "whole",
) -> EvaluateResult:
    """Score 1 for a length from `at_least` to `at_most`, and less outside these bounds.

    Outside the bounds, the score decreases linearly to 0 over an optional margin.

    If `at_most` = L_max - L_cache, `above` = L_cache and `as_penalty` is set, this is the soft overlong punishment of
    DAPO (Yu et al. 2025, arXiv 2503.14476): 0, then ((L_max - L_cache) - length) / L_cache, then -1.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the messages that the agent wrote. If None, all assistant messages are used.
        unit: "characters" or "words". A string without spaces counts as a single word, so use "characters" if omitting
            spaces could evade a limit.
        at_least: the minimum length that scores 1.
        at_most: the maximum length that scores 1. If None, there is no upper bound.
        below: the distance below `at_least` at which the score reaches 0.
        above: the distance above `at_most` at which the score reaches 0.
        as_penalty: True to subtract 1. The result is then a penalty in [-1, 0] that can be added to another score. If
            this option is False, an empty reply scores 0; if it is True, an empty reply is scored like any other reply.
        of: the part of the reply to measure: the "whole" reply, its "thought" or its "answer".

    Raises:
        ConfigError: If no bound is set, or if `at_least` is greater than `at_most`.

    Example:
        ```python
        with_options(length_within, unit="words", at_most=200, above=100)  # 250 words earn 0.5
        ```
    """
    _check_bounds({"at_least": at_least, "at_most": at_most})
    length = reply_length(messages, assistant_turns, unit, of)
    if not length and not as_penalty:
        return passed(False, "the reply is empty")
    outside = max(at_least - length, 0)
    margin = below
    if at_most is not None and length > at_most:
        outside, margin = length - at_most, above
    score = 1.0 if not outside else max(0.0, 1.0 - outside / margin) if margin else 0.0
    bounds = f"{at_least} to {'any number' if at_most is None else at_most}"
    return EvaluateResult(score=score - as_penalty, reason=f"{length} {unit}; required: {bounds}")


@reward_function
def measured_length(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    unit: Unit = "characters",
    of: Part = "whole",
) -> EvaluateResult:
    """Return the length as the score, for use in combinators. This score is not in [0, 1]."""
    return EvaluateResult(score=float(reply_length(messages, assistant_turns, unit, of)))


def reply_length(messages: Sequence[Message], assistant_turns: Sequence[int] | None, unit: Unit, of: Part) -> int:
    """Return the length of the agent's last message or of a part of this message."""
    text = last_reply(messages, assistant_turns, of)
    return len(text) if unit == "characters" else len(text.split())


Form = Literal["share", "kimi"]


def cosine_length(
    reward: Reward,
    *,
    max_length: int,
    unit: Unit = "characters",
    of: Part = "whole",
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (0.0, 0.0),
    exceed: float = 0.0,
    at_least: float = 1.0,
    id: str = "cosine_length",
) -> Reward:
    """Return a reward for correctness that is scaled, along half a cosine wave, by the length of the reply.

    For a reply of length L below L_max, the score is r_L + (r_0 - r_L) · (1 + cos(π L / L_max)) / 2, where r_0 and r_L
    are taken from `correct` or `wrong`. For longer replies, the score is `exceed`. The formula is from "Demystifying
    Long Chain-of-Thought Reasoning in LLMs" (Yeo et al. 2025, arXiv 2502.03373). In the paper, r_0 and r_L are 2 and 1
    for correct replies, and -10 and 0 for wrong replies, and `exceed` is -10. With this function's default values,
    scores are in [0, 1], and wrong replies score 0.

    Args:
        reward: the reward that determines whether the reply is correct. If this reward leaves the rollout unscored, the
            result is unscored as well.
        max_length: the length L_max, measured in `unit`.
        unit: the unit of the length; see `length_within`.
        of: the part of the reply to measure; see `length_within`.
        correct: the scores r_0 and r_L of a correct reply, at length 0 and at length L_max.
        wrong: the scores r_0 and r_L of a wrong reply.
        exceed: the score of a reply whose length is L_max or more.
        at_least: the lowest score of `reward` that counts as correct.
        id: the name under which the reward is recorded.

    Raises:
        ConfigError: If `max_length` is less than 1, or if a number is not finite.

    Example:
        ```python
        evaluate = cosine_length(math_answer, max_length=8000)
        ```
    """
    if max_length < 1:
        raise ConfigError(f"cosine_length(): max_length must be at least 1, got {max_length!r}")
    if not all(map(math.isfinite, (*correct, *wrong, exceed, at_least))):
        raise ConfigError("cosine_length(): correct, wrong, exceed and at_least must be finite numbers")

    async def combine(call: Call) -> EvaluateResult:
        result = await call("reward")
        length = int((await call("length")).score)
        is_correct = result.score >= at_least
        first, last = correct if is_correct else wrong
        wave = last + (first - last) * (1.0 + math.cos(math.pi * length / max_length)) / 2
        score = exceed if length >= max_length else wave
        reason = f"{'correct' if is_correct else 'wrong'}, {length} {unit} of {max_length}: {result.reason or ''}"
        metrics = {**result.metrics, "correct": MetricResult(score=float(is_correct), reason=result.reason or "")}
        return result.model_copy(update={"score": score, "reason": reason, "metrics": metrics})

    return combined(id, {"reward": reward, "length": with_options(measured_length, unit=unit, of=of)}, combine)


def shortest_in_group(
    reward: Reward,
    *,
    unit: Unit = "characters",
    of: Part = "whole",
    form: Form = "share",
    weight: float = 0.5,
    at_least: float = 1.0,
    id: str = "shortest_in_group",
) -> Reward:
    """Return a batch reward that prefers shorter replies among the correct replies in a group.

    Rollouts that have the same ground truth and the same request (everything before the first assistant message) form a
    group. A batch may contain multiple groups. The score depends on p = (length - shortest) / (longest - shortest),
    which is 0 if all lengths are equal:

    - "share": a correct reply earns its score times 1 - weight · p, where p compares only correct replies. A wrong
      reply earns 0. If `weight` is less than 1, the longest correct reply still earns more than a wrong reply.
    - "kimi": weight · λ is added to the score, where λ = 0.5 - p for a correct reply and min(0, 0.5 - p) for a wrong
      reply, and p compares all replies. If all lengths are equal, λ = 0. This is the length reward of Kimi k1.5 (2025,
      arXiv 2501.12599). For scores in [0, 1], the result is in [-weight / 2, 1 + weight / 2].

    A rollout that `reward` leaves unscored stays unscored and does not affect the other rollouts.

    Args:
        reward: a pointwise reward that determines whether a reply is correct.
        unit: the unit of the length; see `length_within`.
        of: the part of the reply to measure; see `length_within`.
        form: "share" or "kimi".
        weight: the weight of the length. For "share", the weight must be at most 1.
        at_least: the lowest score of `reward` that counts as correct.
        id: the name under which the reward is recorded.

    Raises:
        ConfigError: If `reward` is a batch reward, if `weight` is negative or too large, or if another argument has an
            unknown value.

    Example:
        ```python
        evaluate = shortest_in_group(math_answer, unit="words")
        ```
    """
    part = reward_spec(reward)
    if part.mode == "batch":
        raise ConfigError(f"{id}: {part.id!r} is a batch reward; only pointwise rewards can be combined")
    if form not in get_args(Form):
        raise ConfigError(f"{id}: form must be {' or '.join(map(repr, get_args(Form)))}, got {form!r}")
    if not 0 <= weight <= 1 and (form == "share" or not 0 <= weight < math.inf):
        raise ConfigError(f"{id}: weight must be in [0, 1] or, for 'kimi', finite and at least 0, got {weight!r}")
    with_options(measured_length, unit=unit, of=of)  # rejects unknown values

    def length(rollout: Mapping[str, Any]) -> int:
        return reply_length(rollout["messages"], rollout.get("assistant_turns"), unit, of)

    def scaled(results: Sequence[EvaluateResult], lengths: Sequence[int]) -> list[EvaluateResult]:
        """Return the results for one group, in which all rollouts are scored."""
        correct = [result.score >= at_least for result in results]
        compared = [length for length, ok in zip(lengths, correct, strict=True) if ok or form == "kimi"]
        low, high = (min(compared), max(compared)) if compared else (0, 0)
        changed = []
        for result, ok, length in zip(results, correct, lengths, strict=True):
            share = (length - low) / (high - low) if high > low else 0.0
            if form == "share":
                score = result.score * (1.0 - weight * share) if ok else 0.0
            else:
                gain = 0.5 - share if high > low else 0.0
                score = result.score + weight * (gain if ok else min(0.0, gain))
            verdict = "correct" if ok else "wrong"
            reason = f"{verdict}, {length} {unit}, group range {low} to {high}: {result.reason or ''}"
            metrics = {**result.metrics, "correct": MetricResult(score=float(ok), reason=result.reason or "")}
            changed.append(result.model_copy(update={"score": score, "reason": reason, "metrics": metrics}))
        return changed

    attributes = {"made_of": {"reward": part}, "length": staticmethod(length), "scaled": staticmethod(scaled)}
    kind = type(id, (GroupReward,), attributes)
    spec = reward_spec(reward_function(mode="batch", id=id, requirements=part.requirements, sandbox=part.sandbox)(kind))
    # The reward needs the values that its part takes, and the values that determine groups and lengths.
    required = part.required - part.resources.keys() - part.options.keys() | {"messages"}
    names = rollout_values(part) | {"messages", "ground_truth", "assistant_turns"}
    in_batch = [frozenset(BATCH_NAMES.get(name, name) for name in each) for each in (names, required)]
    parameters = None if part.parameters is None else in_batch[0]
    return as_function(replace(spec, origin=None, parameters=parameters, required=in_batch[1]))


class GroupReward(CombinedReward):
    """The reward returned by `shortest_in_group`."""

    length: Callable[[Mapping[str, Any]], int]
    scaled: Callable[[Sequence[EvaluateResult], Sequence[int]], list[EvaluateResult]]

    async def score(  # type: ignore[override]  # a batch reward takes lists
        self, rollouts_messages: list[list[Message]], ground_truths: Sequence[Any] | None = None, **values: Any
    ) -> list[EvaluateResult]:
        """Return the results of a batch.

        `values` contains all other rollout values. Each value is a list with one item for each rollout.
        """
        lists = {"ground_truth": ground_truths, **values}
        rollouts = [
            {"messages": messages, **{name: value[index] for name, value in lists.items() if value is not None}}
            for index, messages in enumerate(rollouts_messages)
        ]
        results = [await self._result(rollout, alone=len(rollouts) == 1) for rollout in rollouts]
        groups: dict[str, list[int]] = {}
        for index, (rollout, result) in enumerate(zip(rollouts, results, strict=True)):
            if result.is_score_valid and result.error is None:
                messages, turns = rollout["messages"], rollout.get("assistant_turns")
                request = first_request(messages) if turns is None else messages[: turns[0] if turns else None]
                key = json.dumps([shown_messages(request), as_text(rollout.get("ground_truth"))])
                groups.setdefault(key, []).append(index)
        for members in groups.values():
            lengths = [self.length(rollouts[index]) for index in members]
            scaled = self.scaled([results[index] for index in members], lengths)
            for index, result in zip(members, scaled, strict=True):
                results[index] = result
        return results

    async def _result(self, rollout: Mapping[str, Any], alone: bool) -> EvaluateResult:
        """Return the result of the part. A failure becomes an unscored result or, if `alone` is set, is raised."""
        try:
            with boundary(RewardError, f"reward {self.made_of['reward'].id!r}"):
                return await self.call_part("reward", rollout)
        except ConfigError:
            raise
        except RewardKitError as error:
            if alone:
                raise
            return EvaluateResult(score=0.0, is_score_valid=False, error=f"{type(error).__name__}: {error}")
