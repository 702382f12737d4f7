"""`group_judge`: the rollouts of one group beside one another; which is better is easier said than how good."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from reward_kit.errors import LimitError, ProviderError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.judge import Longest, Votes
from reward_kit.rewards.judging.client import JudgeClient, JudgeClients, borrowed, together
from reward_kit.rewards.judging.conversations import as_text, first_request, fitting, shown
from reward_kit.rewards.judging.options import ClientOptions
from reward_kit.rewards.judging.questions import Question, reason_of
from reward_kit.rewards.judging.rubrics import check_scale, grades, share
from reward_kit.rewards.judging.usage import METRIC, JudgeUsage
from reward_kit.rewards.judging.verdicts import Members
from reward_kit.rewards.reading.texts import last_answer, passed
from reward_kit.typed_interface import reward_function

Method = Literal["score", "rank"]
DEFAULT_CRITERIA = "which does better what was asked for: right, complete, useful and harmless"
_TASK = """\
You judge several answers to one request beside one another. `conversation` is the request, `answers` are what you \
judge. Decide by this: {criteria}. Neither their order nor their length is a merit. {how}\
"""
_HOW: dict[Method, str] = {
    "score": "Give each answer a whole number from {0} (worst) to {1} (best); the better one has the higher number.",
    "rank": "Give each answer its rank from {0} (best) to {1} (worst); answers that are equally good share a rank.",
}
_REFERENCE = " `reference` is a right answer."


@reward_function(mode="batch", resources={"judge_clients": JudgeClients})
async def group_judge(
    rollouts_messages: list[list[Message]],
    ground_truths: Sequence[Any] | None = None,
    *,
    model: str,
    base_url: str | None = None,
    method: Method = "score",
    criteria: str = DEFAULT_CRITERIA,
    scale: tuple[int, int] = (0, 10),
    order_seed: Annotated[int, Field(ge=0)] = 0,
    votes: Votes = 1,
    cache: str | None = None,
    client: ClientOptions | None = None,
    longest: Longest = 200_000,
    judge_clients: JudgeClients | None = None,
) -> list[EvaluateResult]:
    """Score the last answers of a group relative to one another, in a shuffled order and in its reverse.

    Rollouts with the same request (all before the first assistant message) and the same ground truth are one group; a
    batch may hold several. `score` gives each answer's grade as a share of the scale, `rank` 1 for the best and 0 for
    the last, both as means over the two orders; `order_agreement` in the metrics tells how far these agreed. Equal
    answers are shown once and get one score. An empty answer gets 0 unasked. A group without two different answers has
    no ranks: under `rank` it is unscored. A group whose verdict cannot be had is unscored, and the others of the batch
    are not.

    Scoring a group at once is RULER's idea (OpenPipe ART, 2025).

    Args:
        rollouts_messages: the conversations.
        ground_truths: one for each; shown as a reference where there is one.
        model: and `base_url`, `votes`, `cache`, `client`, `longest`, as for `llm_judge`; the votes are those for each
            order.
        method: "score" or "rank".
        criteria: by what the answers are compared, as the end of "Decide by this:".
        scale: lowest and highest grade of `score`.
        order_seed: of the order, which depends on it and on the answers and on nothing else.
        judge_clients: opened once per worker; left out in a call by hand.

    Raises:
        ConfigError: an option is wrong.
        ProviderError: no group has a verdict.

    Example:
        ```python
        relative = with_options(group_judge, model="gpt-5-mini", method="rank")
        ```
    """
    ends = check_scale(scale)
    truths = list(ground_truths) if ground_truths is not None else [None] * len(rollouts_messages)
    groups = _groups(rollouts_messages, truths)
    async with borrowed(judge_clients) as clients:
        judge = _Judge(
            clients.client(model, base_url, cache, client), method, criteria, ends, order_seed, votes, longest
        )
        scored = await asyncio.gather(*map(judge.scores, groups), return_exceptions=True)
    results: list[EvaluateResult | None] = [None] * len(rollouts_messages)
    for group, outcome in zip(groups, scored, strict=True):
        for position, result in zip(group.positions, _each(group, outcome, len(groups)), strict=True):
            results[position] = result
    return [result for result in results if result is not None]


class _Group(NamedTuple):
    """One group: where its rollouts stand in the batch, what they answered, and what they were asked."""

    positions: list[int]
    answers: list[str]
    request: Sequence[Message]
    truth: Any


def _groups(rollouts: Sequence[Sequence[Message]], truths: Sequence[Any]) -> list[_Group]:
    found: dict[str, _Group] = {}
    for position, (messages, truth) in enumerate(zip(rollouts, truths, strict=True)):
        request = first_request(messages)
        key = json.dumps([shown(request), as_text(truth)])
        group = found.setdefault(key, _Group([], [], request, truth))
        group.positions.append(position)
        group.answers.append(last_answer(messages))
    return list(found.values())


class _Judge(NamedTuple):
    """Asks for one group after the other, all in the same way."""

    client: JudgeClient
    method: Method
    criteria: str
    scale: tuple[int, int]
    order_seed: int
    votes: int
    longest: int

    async def scores(self, group: _Group) -> list[EvaluateResult]:
        """The results of a group's rollouts."""
        distinct = sorted({answer for answer in group.answers if answer})
        if not distinct:
            return [_unanswered() for _ in group.answers]
        if self.method == "rank" and len(distinct) < 2:
            return [_alone() if answer else _unanswered() for answer in group.answers]
        shuffled, usage = self._order(distinct), JudgeUsage()
        one, other = await together(self._asked(group, shuffled, usage), self._asked(group, shuffled[::-1], usage))
        by_answer = {answer: (one.shares[answer], other.shares[answer]) for answer in distinct}
        metrics = {"order_agreement": _agreement(by_answer), METRIC: usage.as_metric()}
        return [
            _scored(*by_answer[answer], len(distinct), one.reason, metrics) if answer else _unanswered()
            for answer in group.answers
        ]

    def _order(self, answers: list[str]) -> list[str]:
        """The answers in an order of chance that is the same in every run."""
        key = json.dumps([self.order_seed, answers])
        chance = random.Random(hashlib.sha256(key.encode()).digest())
        return chance.sample(answers, len(answers))

    async def _asked(self, group: _Group, answers: Sequence[str], usage: JudgeUsage) -> _Shares:
        """Each answer's share of the best, by its median over the votes."""
        names = [f"answer_{number}" for number in range(1, len(answers) + 1)]
        ends = self.scale if self.method == "score" else (1, len(answers))
        reference = {} if group.truth is None else {"reference": as_text(group.truth)}
        data = {"conversation": shown(group.request), **reference, "answers": dict(zip(names, answers, strict=True))}
        task = _TASK.format(criteria=self.criteria, how=_HOW[self.method].format(*ends))
        form = {"grades": Members(dict.fromkeys(names, grades(ends)))}
        question = Question(
            "group_verdict", task + (_REFERENCE if reference else ""), fitting(data, self.longest), form
        )
        verdicts = await self.client.ask(question, usage, self.votes)
        found = {}
        for name, answer in zip(names, answers, strict=True):
            value = _median([share(verdict["grades"][name], ends) for verdict in verdicts])
            found[answer] = value if self.method == "score" else 1.0 - value
        return _Shares(found, reason_of(verdicts[0]))


class _Shares(NamedTuple):
    shares: dict[str, float]
    reason: str


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _agreement(by_answer: Mapping[str, tuple[float, float]]) -> MetricResult:
    apart = sum(abs(one - other) for one, other in by_answer.values()) / len(by_answer)
    return MetricResult(score=1.0 - apart, reason="1 less the mean difference between the two orders")


def _scored(one: float, other: float, count: int, reason: str, metrics: dict[str, MetricResult]) -> EvaluateResult:
    told = f"{one:.2f} in one order and {other:.2f} in the other, among {count} different answers: {reason}"
    return EvaluateResult(score=(one + other) / 2, reason=told, metrics=metrics)


def _unanswered() -> EvaluateResult:
    return passed(False, "there is no answer to judge")


def _alone() -> EvaluateResult:
    return EvaluateResult(score=0.0, is_score_valid=False, error="a group without two different answers has no ranks")


def _each(group: _Group, outcome: list[EvaluateResult] | BaseException, groups: int) -> list[EvaluateResult]:
    """The results of a group; where it failed and others may not have, unscored ones.

    Raises:
        BaseException: it failed, and it is the only group or the failure is a mistake.
    """
    if not isinstance(outcome, BaseException):
        return outcome
    if groups == 1 or not isinstance(outcome, ProviderError | LimitError):
        raise outcome
    return [EvaluateResult(score=0.0, is_score_valid=False, error=f"ProviderError: {outcome}") for _ in group.answers]
