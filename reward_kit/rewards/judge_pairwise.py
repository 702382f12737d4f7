"""`pairwise_judge`: is the rollout's answer better than a given one? Asked in both orders, so that no place wins."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.judge import Longest, Votes
from reward_kit.rewards.judging.client import JudgeClient, JudgeClients, borrowed, together
from reward_kit.rewards.judging.conversations import as_text, before_answer, fitting, shown
from reward_kit.rewards.judging.options import ClientOptions
from reward_kit.rewards.judging.questions import Question, reason_of
from reward_kit.rewards.judging.usage import METRIC, JudgeUsage
from reward_kit.rewards.judging.verdicts import Choice
from reward_kit.rewards.reading.texts import last_answer, needed, passed
from reward_kit.typed_interface import reward_function

DEFAULT_CRITERIA = "which does better what was asked for: right, complete, useful and harmless"
_TASK = """\
You compare two answers to one request. `conversation` is what came before them; `first` and `second` are the answers. \
Decide by this: {criteria}. Neither their order nor their length is a merit. `winner` is "first", "second", or "tie" \
where neither is better.\
"""
_OUTCOMES = {"first": 1.0, "tie": 0.5, "second": 0.0}


@reward_function(resources={"judge_clients": JudgeClients})
async def pairwise_judge(
    messages: list[Message],
    ground_truth: Any = None,
    sample: Mapping[str, Any] | None = None,
    *,
    model: str,
    base_url: str | None = None,
    baseline: str | None = None,
    baseline_key: str | None = None,
    criteria: str = DEFAULT_CRITERIA,
    votes: Votes = 1,
    cache: str | None = None,
    client: ClientOptions | None = None,
    longest: Longest = 200_000,
    judge_clients: JudgeClients | None = None,
) -> EvaluateResult:
    """Compare the last answer with another one, twice with the places swapped.

    1 where the judge prefers the rollout's answer in both places, 0 where it prefers the other in both, and 0.5 for all
    else: a tie, or a preference that changes with the place. Which of these it was is in the metrics: `consistent`,
    `won_as_first` and `won_as_second`. An empty answer loses unasked, and an equal one ties.

    The swap is that of MT-Bench (Zheng et al. 2023, arXiv:2306.05685, section 3.4).

    Args:
        messages: the conversation.
        ground_truth: the answer to compare with, unless an option names one.
        sample: where `baseline_key` looks.
        model: and `base_url`, `votes`, `cache`, `client`, `longest`, as for `llm_judge`; the votes are those for each
            order.
        baseline: the one answer that every rollout is compared with.
        baseline_key: the field of the sample that holds the answer to compare with.
        criteria: by what the answers are compared, as the end of "Decide by this:".
        judge_clients: opened once per worker; left out in a call by hand.

    Raises:
        ConfigError: an option is wrong.
        RewardError: there is nothing to compare with.
        ProviderError: there is no verdict.

    Example:
        ```python
        better = with_options(pairwise_judge, model="gpt-5-mini", baseline_key="answer_of_last_week")
        ```
    """
    other = _other(ground_truth, sample, baseline, baseline_key)
    answer = last_answer(messages)
    if not answer:
        return passed(False, "there is no answer to compare")
    if answer == other.strip():
        return EvaluateResult(score=0.5, reason="both answers are the same")
    conversation, usage = shown(before_answer(messages)), JudgeUsage()
    ours = fitting({"conversation": conversation, "first": answer, "second": other}, longest)
    theirs = {**ours, "first": ours["second"], "second": ours["first"]}
    async with borrowed(judge_clients) as clients:
        judge = clients.client(model, base_url, cache, client)
        as_first, as_second = await together(
            _asked(judge, ours, criteria, votes, usage), _asked(judge, theirs, criteria, votes, usage)
        )
    return _result(_outcome(as_first), 1.0 - _outcome(as_second), reason_of(as_first[0]), usage)


def _other(ground_truth: Any, sample: Mapping[str, Any] | None, baseline: str | None, baseline_key: str | None) -> str:
    if baseline is not None and baseline_key is not None:
        raise ConfigError("pairwise_judge: give baseline or baseline_key, not both")
    if baseline is not None:
        return baseline
    if baseline_key is None:
        return as_text(needed(ground_truth, "pairwise_judge"))
    found = (sample or {}).get(baseline_key)
    if found is None:
        raise RewardError(
            f"pairwise_judge: the sample has no field {baseline_key!r}, which is to hold the other answer"
        )
    return as_text(found)


async def _asked(
    judge: JudgeClient, data: Mapping[str, Any], criteria: str, votes: int, usage: JudgeUsage
) -> list[dict[str, Any]]:
    form = {"winner": Choice(tuple(_OUTCOMES))}
    return await judge.ask(Question("pair_verdict", _TASK.format(criteria=criteria), data, form), usage, votes)


def _outcome(verdicts: Sequence[Mapping[str, Any]]) -> float:
    """How the first answer fares: 1, 0.5 or 0; where the votes are split evenly it is a tie."""
    middle = statistics.median(_OUTCOMES[verdict["winner"]] for verdict in verdicts)
    return middle if middle in (0.0, 1.0) else 0.5


def _result(won_as_first: float, won_as_second: float, reason: str, usage: JudgeUsage) -> EvaluateResult:
    is_consistent = won_as_first == won_as_second
    score = won_as_first if is_consistent else 0.5
    said = {1.0: "the answer is better", 0.0: "the other answer is better", 0.5: "neither is better"}[score]
    told = f"{said} in both places" if is_consistent else "the verdict changes with the place: a tie"
    metrics = {
        "consistent": MetricResult(score=float(is_consistent), reason="the same verdict in both places"),
        "won_as_first": MetricResult(score=won_as_first, reason="the rollout's answer stood first"),
        "won_as_second": MetricResult(score=won_as_second, reason="the rollout's answer stood second"),
        METRIC: usage.as_metric(),
    }
    return EvaluateResult(score=score, reason=f"{told}: {reason}", metrics=metrics)
