"""`llm_judge`: a model scores an answer or a whole conversation by a rubric, dimension by dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import EvaluateResult, Message, MetricResult
from reward_kit.rewards.judging.client import JudgeClients, borrowed
from reward_kit.rewards.judging.conversations import as_text, before_answer, fitting, shown
from reward_kit.rewards.judging.options import ClientOptions
from reward_kit.rewards.judging.questions import Question, reason_of
from reward_kit.rewards.judging.rubrics import (
    DEFAULT_RUBRIC,
    Criterion,
    Rubric,
    check_scale,
    medians,
    rubric_form,
    rubric_of,
    share,
    told,
    weighted_mean,
)
from reward_kit.rewards.judging.usage import METRIC, JudgeUsage
from reward_kit.rewards.reading.texts import last_answer, passed
from reward_kit.typed_interface import reward_function

Judged = Literal["answer", "conversation"]
Votes = Annotated[int, Field(ge=1, le=25)]
Longest = Annotated[int, Field(ge=1_000)]

_TASKS: dict[Judged, str] = {
    "answer": "You judge an assistant's answer. `conversation` is what came before it, `answer` is what you judge.",
    "conversation": "You judge what an assistant did in `conversation`: all of its messages and tool calls.",
}
_REFERENCE = " `reference` is a right answer; another one may be right too, a contradiction to it is not."


@reward_function(resources={"judge_clients": JudgeClients})
async def llm_judge(
    messages: list[Message],
    ground_truth: Any = None,
    sample: Mapping[str, Any] | None = None,
    evaluation_criteria: Mapping[str, Any] | None = None,
    *,
    model: str,
    base_url: str | None = None,
    rubric: dict[str, str | Criterion] | None = None,
    rubric_key: str | None = None,
    judged: Judged = "answer",
    scale: tuple[int, int] = (1, 5),
    votes: Votes = 1,
    cache: str | None = None,
    client: ClientOptions | None = None,
    longest: Longest = 200_000,
    judge_clients: JudgeClients | None = None,
) -> EvaluateResult:
    """Score by a rubric of several dimensions, as a model at an OpenAI-compatible endpoint sees it.

    Every dimension gets a whole number on the scale; the score is their mean by weight, each as a share of the scale:
    1 where all are at the top, 0 where all are at the bottom. An empty answer gets 0 unasked. Where the judge cannot be
    reached, refuses, or says nothing that can be read, the rollout is unscored.

    The form of direct grading with a rubric is that of G-Eval (Liu et al. 2023, arXiv:2303.16634) and of "single answer
    grading" in MT-Bench (Zheng et al. 2023, arXiv:2306.05685).

    Args:
        messages: the conversation.
        ground_truth: shown to the judge as a reference, where there is one.
        sample: where `rubric_key` looks.
        evaluation_criteria: the task's; its `rubric` is used where the options name none.
        model: the judge's name at the endpoint.
        base_url: by default OPENAI_BASE_URL, else OpenAI's own. The key is OPENAI_API_KEY's.
        rubric: name -> what it means, or `{description, weight}`. By default the task's `evaluation_criteria.rubric`,
            else helpfulness, factuality and safety.
        rubric_key: the field of the sample that holds its own rubric.
        judged: the last answer, or all that the assistant did.
        scale: lowest and highest grade.
        votes: how often the judge is asked, each time with another seed; the median counts.
        cache: a file in which verdicts are kept for later runs.
        client: `ClientOptions`: timeouts, retries, rates, prices, temperature, seed, the form of answers.
        longest: characters of data; longer texts are cut in the middle, visibly.
        judge_clients: opened once per worker; left out in a call by hand.

    Raises:
        ConfigError: an option or rubric is wrong.
        ProviderError: there is no verdict.

    Example:
        ```python
        judge = with_options(llm_judge, model="gpt-5-mini", rubric={"tone": "It is polite."})
        ```
    """
    chosen, grades_scale = _rubric(rubric, rubric_key, sample, evaluation_criteria), check_scale(scale)
    if not _has_answer(messages, judged):
        return passed(False, "there is no answer to judge")
    data = fitting(_data(messages, ground_truth, judged), longest)
    task = _TASKS[judged] + (_REFERENCE if "reference" in data else "")
    form = {"grades": rubric_form(chosen, grades_scale)}
    question = Question("rubric_verdict", f"{task}\n{told(chosen, grades_scale)}", data, form)
    usage = JudgeUsage()
    async with borrowed(judge_clients) as clients:
        verdicts = await clients.client(model, base_url, cache, client).ask(question, usage, votes)
    return _result(verdicts, chosen, grades_scale, usage)


def _rubric(
    rubric: Mapping[str, Any] | None,
    rubric_key: str | None,
    sample: Mapping[str, Any] | None,
    evaluation_criteria: Mapping[str, Any] | None,
) -> Rubric:
    """The rubric in force: the option's, the sample's, the task's, or the one for want of any."""
    if rubric is not None and rubric_key is not None:
        raise ConfigError("llm_judge: give rubric or rubric_key, not both")
    if rubric is not None:
        return rubric_of(rubric, "llm_judge, option rubric")
    if rubric_key is not None:
        own = (sample or {}).get(rubric_key)
        if own is None:
            raise RewardError(f"llm_judge: the sample has no field {rubric_key!r}, which is to hold its rubric")
        return rubric_of(own, f"llm_judge, the sample's {rubric_key!r}")
    of_task = (evaluation_criteria or {}).get("rubric")
    return DEFAULT_RUBRIC if of_task is None else rubric_of(of_task, "evaluation_criteria.rubric")


def _has_answer(messages: Sequence[Message], judged: Judged) -> bool:
    if judged == "answer":
        return bool(last_answer(messages))
    return any(message.role == "assistant" for message in messages)


def _data(messages: Sequence[Message], ground_truth: Any, judged: Judged) -> dict[str, Any]:
    reference = {} if ground_truth is None else {"reference": as_text(ground_truth)}
    if judged == "conversation":
        return {**reference, "conversation": shown(messages)}
    return {"conversation": shown(before_answer(messages)), **reference, "answer": last_answer(messages)}


def _result(
    verdicts: Sequence[Mapping[str, Any]], rubric: Rubric, scale: tuple[int, int], usage: JudgeUsage
) -> EvaluateResult:
    grades = medians([verdict["grades"] for verdict in verdicts])
    shares = {name: share(grade, scale) for name, grade in grades.items()}
    ends = f"of {scale[0]} to {scale[1]}"
    metrics = {name: MetricResult(score=shares[name], reason=f"{grades[name]:g} {ends}") for name in rubric}
    listed = ", ".join(f"{name} {grade:g}" for name, grade in grades.items())
    return EvaluateResult(
        score=weighted_mean(shares, rubric),
        reason=f"{listed} ({ends}): {reason_of(verdicts[0])}",
        metrics={**metrics, METRIC: usage.as_metric()},
    )
