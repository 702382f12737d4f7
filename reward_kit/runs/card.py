"""The rollout card of a run: the rules by which its figures were made, in `card.json` and on the run's page.

A card declares what decides whether two figures can be compared: attempts, errors, unscored episodes, retries, limits,
sampling, seeds, versions, judges, intervals, exclusions and cost. It is computed from `run.json` and the results, so
runs of earlier releases have one as well; values that they did not record are `None`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.models import TaskDefinitionModel
from reward_kit.providers.keys import PRESETS
from reward_kit.runs.run_folder import RunHeader
from reward_kit.runs.summary import EpisodeRow, ModelUse, PolicySummary
from reward_kit.task_parts import LimitsModel

CONFIDENCE = 0.95
_IDENTITY = {"type", "model"}
# These options of a policy do not change its answers.
_TRANSPORT = {"base_url", "api_key", "api_key_env", "client", "http_client", "default_headers", "price_file", "stream"}
_TRANSPORT |= {"trust_env", "requests_per_minute", "tokens_per_minute", "max_connections", "logprobs"}
_SAMPLING = ("temperature", "top_p", "max_tokens", "send_seed", "max_attempts")
_SHORT_HASH = 16
_MISSING = {"Cost in US dollars": "unknown"}
_DEFAULTS = {"send_seed": True, "max_attempts": 5}


def run_card(
    header: RunHeader, rows: Sequence[EpisodeRow], summaries: Sequence[PolicySummary], repeated_cost: float = 0.0
) -> dict[str, Any]:
    """Return the card of a run as JSON-serializable data.

    Args:
        header: the header of the run.
        rows: the latest attempt of each episode.
        summaries: the summary of each policy.
        repeated_cost: the cost in US dollars of attempts that were replaced or are unfinished.
    """
    task, is_task = header.task, (header.task_path or (header.rescored_from or {}).get("task_path")) is not None
    limits: Mapping[str, Any] = task.get("limits") or {}
    default_steps = TaskDefinitionModel.model_fields["max_episode_steps"].default
    digests = {"dataset": header.digests.get("dataset"), "task_file": header.digests.get("task file")}
    return {
        "schema_version": 1,
        "run": {"id": header.run_id, "task": header.task_name, "status": header.status, "seed": header.seed},
        "attempts": {
            "samples": len({row.sample_id for row in rows}),
            "rollouts_per_sample": _rollouts(header) if is_task else None,
            "episodes": len(rows),
            "missing": max(0, header.total - len(rows)),
            "replaced": sum(row.attempt for row in rows),
        },
        "exclusions": {
            "limit": header.limit,
            "sample_ids": list(header.sample_ids),
            "unscored": "excluded from means, never counted as 0",
            "pass_at_k": "only samples with k scored episodes",
        },
        "limits": {
            "max_episode_steps": task.get("max_episode_steps", default_steps) if is_task else None,
            **({**LimitsModel().model_dump(), **limits} if is_task else {}),
            "run": {name: value for name, value in header.run_limits.items() if value is not None},
        },
        "pass_threshold": header.pass_threshold,
        "policies": {one.policy: _policy(header, one, rows) for one in summaries},
        "user": _models(rows, "user"),
        "judge": _judge(rows),
        "interval": {
            "confidence": CONFIDENCE,
            "clustered_by": "sample",
            "methods": sorted({one.score.method for one in summaries if one.score is not None}),
        },
        "versions": {
            **header.versions,
            "reward": sorted({row.scorer for row in rows if row.scorer}),
            **digests,
        },
        "cost": {
            "policies": _sum(one.cost for one in summaries),
            "judge": _sum(one.judge_cost for one in summaries),
            "replaced": repeated_cost,
        },
    }


def _rollouts(header: RunHeader) -> int:
    key = "num_rollouts" if header.task.get("dataset_path") is None else "num_rollouts_per_sample"
    return int(header.rollouts or header.task.get(key) or 1)


def _policy(header: RunHeader, summary: PolicySummary, rows: Sequence[EpisodeRow]) -> dict[str, Any]:
    own, settings = [row for row in rows if row.policy == summary.policy], header.policy_settings.get(summary.policy)
    sampling = None
    if settings is not None:
        shown = {key: value for key, value in settings.items() if key not in _TRANSPORT | _IDENTITY}
        is_model = settings.get("type") in PRESETS
        sampling = {**({key: _DEFAULTS.get(key) for key in _SAMPLING} if is_model else {}), **shown}
    return {
        "type": settings.get("type") if settings is not None else None,
        **_models(own, "policy"),
        "sampling": sampling,
        "episodes": summary.episodes,
        "scored": summary.scored,
        "unscored": summary.episodes - summary.scored,
        "errors": dict(summary.errors),
        "imputed": summary.imputed,
        "cut_off": summary.limits,
        "retries": sum(row.retries for row in own),
    }


def _models(rows: Iterable[EpisodeRow], role: str) -> dict[str, list[str]]:
    return _names({use for row in rows for use in row.models if use.role == role})


def _names(uses: Iterable[ModelUse]) -> dict[str, list[str]]:
    uses = set(uses)
    reported = sorted({use.reported for use in uses if use.reported})
    return {"models": sorted({use.requested for use in uses}), "reported_models": reported}


def _judge(rows: Iterable[EpisodeRow]) -> dict[str, Any] | None:
    """Return the models and prompts of the judge, or None if the scores called no model."""
    rows = list(rows)
    uses = {use for row in rows for use in row.judge_models}
    if not uses:
        return None
    prompts = sorted({use.prompt for use in uses if use.prompt})
    return {**_names(uses), "prompt_hashes": prompts, "retries": sum(row.judge_retries for row in rows)}


def _sum(costs: Iterable[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


class CardSection(NamedTuple):
    """A section of a card on the page: its title and its lines, as pairs of name and text."""

    title: str
    lines: Sequence[tuple[str, str]]


def card_sections(card: Mapping[str, Any]) -> list[CardSection]:
    """Return the sections of a card as texts."""
    groups: dict[str, Mapping[str, Any]] = {
        "Attempts": card["attempts"],
        "Exclusions": card["exclusions"],
        "Limits of an episode": {key: value for key, value in card["limits"].items() if key != "run"},
        "Limits of the run": card["limits"]["run"],
        **{
            f"Policy {name}": {**policy, "sampling": _sampling_texts(policy["sampling"])}
            for name, policy in card["policies"].items()
        },
        "Simulated user": card["user"] if card["user"]["models"] else {},
        "Judge": card["judge"] or {},
        "Scoring": {"pass_threshold": card["pass_threshold"], "interval": card["interval"]},
        "Seeds and versions": {"seed": card["run"]["seed"], **card["versions"]},
        "Cost in US dollars": {key: cost for key, cost in card["cost"].items() if key != "judge" or card["judge"]},
    }
    return [
        CardSection(
            title,
            [(name.replace("_", " "), _text(value, _MISSING.get(title, "none"))) for name, value in _flat(values)],
        )
        for title, values in groups.items()
        if values
    ]


def _sampling_texts(sampling: Mapping[str, Any] | None) -> Mapping[str, str] | None:
    """Return the options as texts; an option that is not set has the default of the endpoint or the policy."""
    return None if sampling is None else {name: _text(value) for name, value in sampling.items()}


def _flat(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if name == "sampling" and value is None:
            yield name, "not recorded"
        elif isinstance(value, Mapping):
            yield from ((inner if name == "sampling" else f"{name}: {inner}", item) for inner, item in value.items())
        else:
            yield name, value


def _text(value: Any, missing: str = "default") -> str:
    if value is None:
        return missing
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple | Mapping):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, str):
        return f"{value[:_SHORT_HASH]}…" if re.fullmatch("[0-9a-f]{64}", value) else value
    return f"{value:,}"


class RuleDifference(NamedTuple):
    """A rule in which two cards differ."""

    what: str
    before: Any
    now: Any
    message: str


def rule_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[RuleDifference]:
    """Compare the cards of two runs, each with one policy, and return the differences in rules that move scores.

    Rules that only one card records are not compared.
    """
    found: list[RuleDifference] = []

    def add(what: str, name: str, values: tuple[Any, Any], effect: str = "") -> None:
        if values[0] != values[1]:
            text = f"{name} differs ({_text(values[0])} and {_text(values[1])}){effect}"
            found.append(RuleDifference(what, *values, text))

    rollouts = tuple(card["attempts"]["rollouts_per_sample"] for card in (one, other))
    if None not in rollouts:
        add("rollouts", "the number of rollouts per sample", (rollouts[0], rollouts[1]))
    (first,), (second,) = one["policies"].values(), other["policies"].values()
    before, now = first["sampling"] or {}, second["sampling"] or {}
    if "temperature" in before and "temperature" in now:  # both policies call a model
        for key in dict.fromkeys((*before, *now)):
            add("sampling", f"the option {key} of the policy", (before.get(key), now.get(key)))
    names = [(card["reported_models"], card["models"]) for card in (first, second)]
    if names[0][1] == names[1][1] and names[0][0] and names[1][0]:
        add("reported_model", "the model that the endpoint reports", (names[0][0], names[1][0]))
    if bool(first["imputed"]) != bool(second["imputed"]):
        add("imputed", "the number of imputed scores", (first["imputed"], second["imputed"]))
    judges = one["judge"] or {}, other["judge"] or {}
    labels = {"models": "the judge", "reported_models": "the model that the judge's endpoint reports"}
    for key, name in {**labels, "prompt_hashes": "the prompt hash of the judge"}.items():
        values = tuple(judge.get(key) for judge in judges)
        if all(values):
            add("judge", name, (values[0], values[1]), ": scores may not be comparable")
    return found
