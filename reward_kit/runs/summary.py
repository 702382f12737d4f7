"""The summary of a run: one row per policy, with separate counts for errors, failures and limits.

An *error* is an exception in an episode or reward; the episode then has no score. A *failure* is a scored episode whose
score is below the pass threshold. A *limit* is an episode that was cut off; it may still be scored.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import parse_tags
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.episodes.record import environment_return, get_attempt, get_facts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import did_you_mean
from reward_kit.models import TaskDefinitionModel
from reward_kit.reward_agent.stats import usage_cost
from reward_kit.rewards.judge_prompts import METRIC
from reward_kit.runs.statistics import (
    Interval,
    bounded_interval,
    mean_pass_at_k,
    mean_pass_hat_k,
    safe_mean,
)

_ROUNDING = 1e-9  # a smaller difference between two sums of dollars is a rounding error
TOKEN_DETAILS = {name: name.replace("_", " ") for name in ("cached_tokens", "cache_write_tokens", "reasoning_tokens")}
"""The parts of the prompt and completion tokens that an endpoint may report, with their labels."""
MOST_TAGS = 50
"""The maximum number of tags with figures. Tags after these in alphabetical order have none."""


class JudgeCall(NamedTuple):
    """A judge's usage for one score. Episodes that were judged together share one call."""

    scored_id: str  # the id of the group, or of the only episode
    usage: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> JudgeCall | None:
        """Return the call in a record of `scores.jsonl`, or None if no judge was called."""
        usage = ((record.get("result") or {}).get("metrics") or {}).get(METRIC)
        if usage is None:
            return None
        return cls(record.get("scored_group") or record["rollout_id"], usage.get("reason") or "")

    @property
    def cost(self) -> float | None:
        """The cost in US dollars; None if the price is unknown."""
        return usage_cost(self.usage)


class ModelUse(NamedTuple):
    """A model that an episode or its score called.

    Attributes:
        role: "policy", "user" or "judge".
        requested: the requested model.
        reported: the model that answered, as the endpoint reports it; "" if unknown.
        prompt: the beginning of the SHA-256 of a judge's system message; otherwise "".
    """

    role: str
    requested: str
    reported: str = ""
    prompt: str = ""


@lru_cache(maxsize=1024)
def _shared(uses: tuple[ModelUse, ...]) -> tuple[ModelUse, ...]:
    """Return the same object for equal tuples, of which a run has many."""
    return uses


def model_uses(timing: Any, role: str) -> tuple[tuple[ModelUse, ...], int]:
    """Return the models called in the `timing` of an episode or score, and the number of retries."""
    calls = timing.get("model_calls") if isinstance(timing, Mapping) else None
    uses, retries = set(), 0
    for call in calls if isinstance(calls, list) else ():
        names = (call.get(key) or "" for key in ("model", "reported_model", "prompt_hash"))
        uses.add(ModelUse(str(call.get("caller") or role), *(str(name)[:200] for name in names)))
        retries += int(call.get("retries") or 0)
    return _shared(tuple(sorted(uses))), retries


@dataclass(slots=True)
class EpisodeRow:
    """The data about one episode that the summary needs.

    `score` is `None` if the episode is unscored. An unscored episode has no metrics. A metric that has no valid score
    is `None`.
    """

    rollout_id: str
    sample_id: str
    policy: str
    stop_reason: str
    num_steps: int
    environment_return: float | None
    error_class: str | None
    error_message: str | None
    error_traceback: str | None
    usage: Mapping[str, float]
    attempt: int = 0
    tool_errors: int = 0
    score: float | None = None
    score_error: str | None = None
    is_imputed: bool = False
    judge_call: JudgeCall | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    tags: Sequence[str] = ()
    models: tuple[ModelUse, ...] = ()
    retries: int = 0  # of model calls, without the judge's
    judge_models: tuple[ModelUse, ...] = ()
    judge_retries: int = 0
    scorer: str | None = None  # the reward's id and hash

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> EpisodeRow:
        """Create the row for a record in `episodes.jsonl`."""
        failure = record.get("failure") or {}
        models, retries = model_uses(record.get("timing"), "policy")
        return cls(
            rollout_id=record["rollout_id"],
            sample_id=from_json_value(record["sample_id"]),
            policy=record["policy"],
            stop_reason=record["stop_reason"],
            num_steps=record["num_steps"],
            environment_return=record["environment_return"],
            error_class=failure.get("class"),
            error_message=failure.get("message"),
            error_traceback=failure.get("traceback"),
            usage=total_usage(record),
            attempt=get_attempt(record),
            tool_errors=_tool_errors(part.get("info") for part in [*record["steps"][1:], record.get("final") or {}]),
            tags=_tags(record.get("sample")),
            models=models,
            retries=retries,
        )

    @classmethod
    def from_episode(cls, episode: SingleAgentEpisode) -> EpisodeRow:
        """Create the row for an episode in memory."""
        facts = get_facts(episode)
        failure = facts.get("failure") or {}
        models, retries = model_uses(facts.get("timing"), "policy")
        return cls(
            rollout_id=episode.id_,
            sample_id=facts["sample_id"],
            policy=facts["policy"],
            stop_reason=facts["stop_reason"],
            num_steps=len(episode),
            environment_return=environment_return(episode),
            error_class=failure.get("class"),
            error_message=failure.get("message"),
            error_traceback=failure.get("traceback"),
            usage=_usage(facts.get("usage"), facts.get("user_usage")),
            attempt=facts.get("attempt") or 0,
            tool_errors=_tool_errors(episode.get_infos()[1:]),
            tags=_tags(facts.get("sample")),
            models=models,
            retries=retries,
        )

    def add_score(self, record: Mapping[str, Any]) -> None:
        """Add the record of the episode's score from `scores.jsonl`."""
        failure = record.get("failure") or {}
        self.score = record.get("score")
        self.score_error = failure.get("class")
        result = record.get("result") or {}
        self.is_imputed = bool(result.get("is_imputed")) and self.score is not None
        self.judge_call = JudgeCall.of(record)
        self.judge_models, self.judge_retries = model_uses(record.get("timing"), "judge")
        scorer = record.get("scorer") or {}
        self.scorer = sys.intern(f"{scorer['id']} {str(scorer.get('hash'))[:12]}…") if scorer.get("id") else None
        self.metrics = metric_scores(result) if self.score is not None else {}
        self.error_message = self.error_message or failure.get("message")
        self.error_traceback = self.error_traceback or failure.get("traceback")

    @property
    def is_unfinished(self) -> bool:
        """True if the run's budget cut off the episode. Such an episode is run again on resume."""
        return self.stop_reason == StopReason.RUN_LIMIT

    @property
    def is_error(self) -> bool:
        """True if the episode or its scoring ended with an error."""
        return self.error_class is not None or self.score_error is not None


@dataclass(frozen=True, slots=True)
class SliceSummary:
    """The figures of a policy for the samples that have a tag; `score` is `None` if no episode is scored."""

    samples: int
    episodes: int
    scored: int
    passed: int
    score: Interval | None


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """The column of a policy in the summary table. Figures exclude unscored episodes.

    `pass_at_1`, `pass_at_k` and `pass_hat_k` are means over the samples that have `k` scored episodes, where `k` is the
    largest number of scored episodes of any sample. `pass_excluded` is the number of samples that have fewer than `k`
    because of errors.

    `judge_cost` is in US dollars, or None without a judge, or if its price is unknown; `cost` does not include it.
    `metrics` contains the mean of each metric over the episodes that have the metric, or None if no episode has it;
    `n_unscored` counts the other episodes. `tags` contains the figures for each tag of the samples. `token_details`
    contains the parts of `tokens` that endpoints reported, except those of 0 tokens.
    """

    policy: str
    episodes: int
    scored: int
    score: Interval | None
    pass_at_1: float | None
    k: int
    pass_at_k: float | None
    pass_hat_k: float | None
    errors: Mapping[str, int]
    failures: int
    limits: int
    stop_reasons: Mapping[str, int]
    mean_steps: float
    tool_errors: int
    mean_return: float | None
    tokens: int
    cost: float | None
    first_error: str | None
    first_traceback: str | None
    imputed: int = 0
    pass_excluded: int = 0
    judge_cost: float | None = None
    judge_calls: int = 0
    metrics: Mapping[str, Interval | None] = field(default_factory=dict)
    tags: Mapping[str, SliceSummary] = field(default_factory=dict)
    token_details: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_cost(self) -> float | None:
        """The cost in US dollars including the cost of the judge; None if either cost is unknown."""
        if self.cost is None or (self.judge_calls and self.judge_cost is None):
            return None
        return self.cost + (self.judge_cost or 0.0)


def repeated_cost(spent: float, rows: Sequence[EpisodeRow]) -> float:
    """Return the part of a run's cost, in US dollars, that these rows do not include.

    This part was spent on attempts that were replaced or are unfinished. Unknown costs count as 0.
    """
    calls = {row.judge_call for row in rows if row.judge_call is not None}
    counted = sum(row.usage.get("cost", 0.0) for row in rows) + sum(call.cost or 0.0 for call in calls)
    rest = spent - counted
    return rest if rest > _ROUNDING else 0.0


def total_usage(record: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the usage of an episode, including the usage of its simulated user."""
    return _usage(record.get("usage"), (record.get("custom_data") or {}).get("user_usage"))


def _tags(sample: Any) -> tuple[str, ...]:
    """Return the tags of a stored sample. Equal strings are kept in memory only once."""
    return tuple(map(sys.intern, parse_tags(sample.get("tags")))) if isinstance(sample, Mapping) else ()


def _usage(usage: Mapping[str, float] | None, of_user: Mapping[str, float] | None) -> Mapping[str, float]:
    usage, of_user = usage or {}, of_user or {}
    return {key: usage.get(key, 0) + of_user.get(key, 0) for key in (*usage, *of_user)} if of_user else usage


def _tool_errors(infos: Iterable[Mapping[str, Any] | None]) -> int:
    """Count the tool calls that returned an error because of, for example, invalid arguments or an unknown tool."""
    return sum("error" in tool for info in infos if info for tool in info.get("tools", ()))


def metric_scores(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a stored result, excluding the judge's usage. An invalid metric is `None`."""
    scores: dict[str, float | None] = {}
    for name, metric in (result.get("metrics") or {}).items():
        if name != METRIC:
            score = metric.get("score") if isinstance(metric, Mapping) and metric.get("is_score_valid", True) else None
            if isinstance(score, bool) or not isinstance(score, int | float) or abs(score) > sys.float_info.max:
                score = None
            scores[sys.intern(name)] = None if score is None or math.isnan(score) else float(score)
    return scores


def summarize(rows: Iterable[EpisodeRow], pass_threshold: float) -> list[PolicySummary]:
    """Return one summary per policy, sorted by name."""
    by_policy: dict[str, list[EpisodeRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.rollout_id):
        by_policy[row.policy].append(row)
    return [_summarize_policy(policy, by_policy[policy], pass_threshold) for policy in sorted(by_policy)]


def _summarize_policy(policy: str, rows: Sequence[EpisodeRow], threshold: float) -> PolicySummary:
    scored = [row for row in rows if row.score is not None]
    scores = [row.score for row in scored if row.score is not None]
    attempts = Counter(row.sample_id for row in scored)
    passed = Counter(row.sample_id for row in scored if row.score is not None and row.score >= threshold)
    passes = [(count, passed[sample]) for sample, count in attempts.items()]
    # All pass figures are computed over the same samples: those that have k scored attempts despite errors.
    k = max(attempts.values(), default=0)
    complete = [(count, passed) for count, passed in passes if count == k]
    broken = Counter(row.error_class or row.score_error or "" for row in rows if row.is_error)
    returns = [row.environment_return for row in rows if row.environment_return is not None and not row.error_class]
    costs = [row.usage["cost"] for row in rows if "cost" in row.usage]  # the cost is missing if the price is unknown
    judge_calls = {row.judge_call for row in rows if row.judge_call is not None}
    judge_costs = [call.cost for call in judge_calls]
    is_judge_priced = bool(judge_calls) and None not in judge_costs
    first = next((row for row in rows if row.is_error), None)
    return PolicySummary(
        policy=policy,
        episodes=len(rows),
        scored=len(scored),
        score=bounded_interval([row.score for row in rows], [row.sample_id for row in rows]) if scores else None,
        pass_at_1=mean_pass_at_k(complete, 1).mean if complete else None,
        k=k,
        pass_at_k=mean_pass_at_k(complete, k).mean if k > 1 else None,
        pass_hat_k=mean_pass_hat_k(complete, k).mean if k > 1 else None,
        errors=dict(sorted(broken.items())),
        failures=sum(score < threshold for score in scores),
        limits=sum(StopReason(row.stop_reason).is_limit for row in rows),
        stop_reasons=dict(sorted(Counter(row.stop_reason for row in rows).items())),
        mean_steps=sum(row.num_steps for row in rows) / len(rows),
        tool_errors=sum(row.tool_errors for row in rows),
        mean_return=safe_mean(returns) if returns else None,
        tokens=int(sum(row.usage.get("prompt_tokens", 0) + row.usage.get("completion_tokens", 0) for row in rows)),
        cost=float(sum(costs)) if costs else None,
        first_error=first.error_message if first else None,
        first_traceback=first.error_traceback if first else None,
        imputed=sum(row.is_imputed for row in rows),
        judge_cost=math.fsum(filter(None, judge_costs)) if is_judge_priced else None,
        judge_calls=len(judge_calls),
        pass_excluded=len(passes) - len(complete),
        metrics=_summarize_metrics(rows),
        tags=_summarize_tags(rows, threshold),
        token_details=token_details(row.usage for row in rows),
    )


def token_details(usages: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return the total of each of `TOKEN_DETAILS`, omitting totals of 0."""
    usages = list(usages)
    sums = {key: int(sum(usage.get(key, 0) for usage in usages)) for key in TOKEN_DETAILS}
    return {key: count for key, count in sums.items() if count}


def _summarize_tags(rows: Sequence[EpisodeRow], threshold: float) -> dict[str, SliceSummary]:
    by_tag: dict[str, list[EpisodeRow]] = defaultdict(list)
    for row in rows:
        for tag in row.tags:
            by_tag[tag].append(row)
    return {tag: summarize_slice(by_tag[tag], threshold) for tag in sorted(by_tag)[:MOST_TAGS]}


def summarize_slice(rows: Sequence[EpisodeRow], threshold: float) -> SliceSummary:
    """Return the figures of some episodes of a policy."""
    scores, samples = [row.score for row in rows], [row.sample_id for row in rows]
    known = [score for score in scores if score is not None]
    score = bounded_interval(scores, samples) if known else None
    passed = sum(value >= threshold for value in known)
    return SliceSummary(len(set(samples)), len(rows), len(known), passed, score)


def _summarize_metrics(rows: Sequence[EpisodeRow]) -> dict[str, Interval | None]:
    """Return the mean of each metric, in the order in which the reward returns them; missing values are excluded."""
    samples, means = [row.sample_id for row in rows], {}
    for name in dict.fromkeys(name for row in rows for name in row.metrics):
        values = [row.metrics.get(name) for row in rows]
        is_known = any(value is not None for value in values)
        means[name] = bounded_interval(values, samples) if is_known else None
    return means


class Threshold(NamedTuple):
    """The lowest mean of the score or of a metric that passes a gate."""

    least: float
    metric: str | None = None
    by_lower_bound: bool = False

    @property
    def what(self) -> str:
        """The name of the compared value, for messages."""
        mean = "mean score" if self.metric is None else f"mean of {self.metric!r}"
        return f"lower bound of the {mean}" if self.by_lower_bound else mean

    def value(self, summary: PolicySummary) -> float | None:
        """Return the compared value, or None if it is unknown. The gate fails for an unknown value."""
        interval = summary.score if self.metric is None else summary.metrics.get(self.metric)
        return None if interval is None else interval.low if self.by_lower_bound else interval.mean

    def unknown_reward(self, definition: TaskDefinitionModel) -> str | None:
        """Return the problem if no reward of a task can return the metric.

        Before a run, this is known only for named rewards.
        """
        names = [reward.name for reward in definition.rewards or ()]
        if self.metric is None or not names or any(f"{self.metric}.".startswith(f"{name}.") for name in names):
            return None
        return f"unknown metric {self.metric!r}{did_you_mean(self.metric, names)}"

    def unknown_metric(self, summaries: Iterable[PolicySummary]) -> str | None:
        """Return the problem if no policy has the metric."""
        if self.metric is None or self.metric in (known := metric_names(summaries)):
            return None
        near = did_you_mean(self.metric, known) if known else "; the reward returns no metrics"
        return f"unknown metric {self.metric!r}{near}"


def metric_names(summaries: Iterable[PolicySummary]) -> list[str]:
    """Return the names of the metrics that any policy has."""
    return list(dict.fromkeys(name for summary in summaries for name in summary.metrics))


def summary_to_json(summaries: Sequence[PolicySummary]) -> dict[str, Any]:
    """Return the content of `summary.json`."""
    return {"schema_version": 1, "policies": [asdict(summary) for summary in summaries]}


def summary_from_json(document: Mapping[str, Any]) -> list[PolicySummary]:
    """Parse the content of `summary.json`."""

    def interval(values: Mapping[str, Any] | None) -> Interval | None:
        return Interval(**values) if values else None

    return [
        PolicySummary(
            **{
                **policy,
                "score": interval(policy["score"]),
                "metrics": {name: interval(values) for name, values in policy.get("metrics", {}).items()},
                "tags": {
                    tag: SliceSummary(**{**values, "score": interval(values["score"])})
                    for tag, values in policy.get("tags", {}).items()
                },
            }
        )
        for policy in document["policies"]
    ]
