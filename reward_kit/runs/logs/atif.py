"""Trajectories in Harbor's Agent Trajectory Interchange Format (ATIF 1.0 to 1.8), one JSON object per episode.

ATIF has no score. If a trajectory is in the directory of a Harbor trial, the reward and the name of the task are read
from the `result.json` of the trial.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError
from reward_kit.models import Message
from reward_kit.runs.logs.documents import Document, parse_document
from reward_kit.runs.logs.formats import LogHeader
from reward_kit.runs.logs.records import (
    FieldReport,
    LogEpisode,
    LogScore,
    arguments_object,
    arguments_text,
    as_mappings,
    finite,
    is_empty,
    require_string,
    stored_fields,
    timing_between,
    tokens,
)
from reward_kit.safe_input import LOG_DOCUMENT_BYTES

NAME = "atif"
VERSION = "ATIF-v1.8"
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_STEP_KEYS = ("source", "message", "reasoning_content", "tool_calls", "observation", "step_id", "timestamp", "metrics")
_CALL_KEYS = ("tool_call_id", "function_name", "arguments")
_METRICS = {
    "prompt_tokens": "prompt_tokens",
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
    "cost_usd": "cost",
}
_PLACED = frozenset({"steps", "agent", "session_id", "schema_version", "final_metrics"})
_MEDIA = {"jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
_RESULT = "result.json"
_OBSERVATION = "observation"  # the name of a user message that is a result without a tool call


# Import


def read_trial(path: Path) -> LogHeader:
    """Return the name of the task and the rewards, if the log is in the directory of a trial.

    Raises:
        ConfigError: `result.json` is damaged.
    """
    file = next((folder / _RESULT for folder in path.resolve().parents[:2] if (folder / _RESULT).is_file()), None)
    if file is None or file.stat().st_size > LOG_DOCUMENT_BYTES:
        return LogHeader()
    result = parse_document(file.read_bytes(), str(file))
    verified = result.get("verifier_result") if isinstance(result, dict) else None
    if not isinstance(verified, dict):
        return LogHeader()
    return LogHeader(data={"trial": {"task_name": result.get("task_name"), "rewards": verified.get("rewards")}})


def to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a trajectory.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    data = document.data
    agent = data.get("agent") if isinstance(data, dict) else None
    if not isinstance(agent, dict) or not isinstance(data.get("steps"), list):
        raise ConfigError(f"{where}: a trajectory must have an agent and steps; fix the log, or pass its --format")
    trial = header.data.get("trial") or {}
    policy = agent.get("model_name") or agent.get("name") or NAME
    log = LogEpisode(str(trial.get("task_name") or data.get("session_id") or document.where), str(policy), [])
    log.extra["agent"] = agent
    times: list[str] = []
    for index, step in enumerate(as_mappings(data["steps"], f"{where}: steps")):
        report.add_unknown("step", step, _STEP_KEYS)
        _add_step(log, step, f"{where}: steps[{index}]", report)
        times += [str(step["timestamp"])] if step.get("timestamp") else []
    for key, value in data.items():
        if key not in _PLACED and not is_empty(value):
            log.extra[key] = value
            report.extra[f"trajectory.{key}"] += 1
    final = data.get("final_metrics")
    if not log.usage and isinstance(final, dict):
        total = {key: finite(final.get(f"total_{key}")) for key in _METRICS}
        log.usage = {_METRICS[key]: value for key, value in total.items() if value is not None}
    log.timing = timing_between(times)
    own = data["extra"].get("reward_kit") if isinstance(data.get("extra"), dict) else None
    if isinstance(own, dict):  # exported by this package
        log.sample_id, log.ground_truth = str(own.get("sample_id") or log.sample_id), own.get("ground_truth")
        log.sample = own["sample"] if isinstance(own.get("sample"), dict) else {}
        if (score := finite(own.get("score"))) is not None:
            log.scores.append(LogScore("score", score, "the score in extra.reward_kit"))
    rewards = trial.get("rewards")
    for name, value in rewards.items() if isinstance(rewards, dict) else ():
        log.scores.append(LogScore(str(name), finite(value), "the reward of the trial"))
    return log


def _add_step(log: LogEpisode, step: Mapping[str, Any], where: str, report: FieldReport) -> None:
    role = _ROLES.get(str(step.get("source")))
    if role is None:
        raise ConfigError(f"{where}: source: must be system, user or agent, got {step.get('source')!r:.60}; fix it")
    message: dict[str, Any] = {"role": role, "content": _to_content(step.get("message"), where)}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    calls = list(as_mappings(step.get("tool_calls"), f"{where}.tool_calls"))
    if calls:
        message["content"] = message["content"] or None
        for number, call in enumerate(calls):
            for key in ("tool_call_id", "function_name"):
                require_string(call, key, f"{where}.tool_calls[{number}]")
            report.add_unknown("tool_call", call, _CALL_KEYS)
        message["tool_calls"] = [
            {
                "id": str(call.get("tool_call_id") or ""),
                "function": {"name": call.get("function_name"), "arguments": arguments_text(call.get("arguments"))},
            }
            for call in calls
        ]
    log.messages.append(message)
    names = {call.get("tool_call_id"): call.get("function_name") for call in calls}
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    for result in as_mappings(results, f"{where}.observation.results"):
        report.add_unknown("observation", result, ("source_call_id", "content"))
        if result.get("source_call_id") is not None:
            require_string(result, "source_call_id", f"{where}.observation.results")
        content, call_id = _to_content(result.get("content"), where), result.get("source_call_id")
        if call_id in names:
            log.messages.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content})
        else:
            log.messages.append({"role": "user", "name": _OBSERVATION, "content": content})
    metrics = step.get("metrics")
    if isinstance(metrics, dict):
        report.add_unknown("metrics", metrics, _METRICS)
        for key, name in _METRICS.items():
            if metrics.get(key) is not None:
                value = finite(metrics[key]) or 0.0 if key == "cost_usd" else tokens(metrics[key])
                log.usage[name] = log.usage.get(name, 0) + value


def _to_content(content: Any, where: str) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in as_mappings(content, f"{where}.message"):
        source = part.get("source")
        if part.get("type") == "image" and isinstance(source, dict):
            parts.append({"type": "image_url", "image_url": {"url": source.get("path")}})
        else:
            parts.append(dict(part))
    return parts


# Export


def to_trajectory(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert an episode to a trajectory.

    Args:
        record: the line of `episodes.jsonl`.
        score: the line of `scores.jsonl`, or None.
    """
    fields = stored_fields(record, NAME)
    policy = str(record.get("policy"))
    steps: list[dict[str, Any]] = []
    for stored in record["messages"]:
        message = Message.model_validate(from_json_value(stored))
        if message.role in ("tool", "function") or (message.role == "user" and message.name == _OBSERVATION):
            _add_result(steps, message)
            continue
        source = {"user": "user", "assistant": "agent"}.get(message.role, "system")
        steps.append({"step_id": len(steps) + 1, "source": source, "message": _from_content(message.content)})
        if message.reasoning_content and source == "agent":
            steps[-1]["reasoning_content"] = message.reasoning_content
        if message.tool_calls and source == "agent":
            steps[-1]["tool_calls"] = [
                {
                    "tool_call_id": call.id,
                    "function_name": call.function.name,
                    "arguments": arguments_object(call.function.arguments),
                }
                for call in message.tool_calls
            ]
    timing, usage = record.get("timing") or {}, record.get("usage") or {}
    if timing.get("started_at") and steps:
        steps[0]["timestamp"] = timing["started_at"]
        ended = datetime.datetime.fromisoformat(timing["started_at"]) + datetime.timedelta(
            seconds=timing.get("duration_s") or 0.0
        )
        steps[-1]["timestamp"] = ended.isoformat()
    totals = {f"total_{key}": usage[name] for key, name in _METRICS.items() if usage.get(name) is not None}
    own = {
        **{key: record.get(key) for key in ("rollout_id", "sample_id", "rollout_index", "stop_reason", "failure")},
        **{key: record.get(key) for key in ("sample", "ground_truth")},
        "log": None if fields else (record.get("custom_data") or {}).get("log"),
        "score": None if score is None else score.get("score"),
        "result": None if score is None else score.get("result"),
    }
    extra = fields.get("extra") if isinstance(fields.get("extra"), dict) else {}
    return {
        "schema_version": VERSION,
        "session_id": str(record["sample_id"]),
        "agent": fields.get("agent") or {"name": "reward-kit", "version": "1", "model_name": policy},
        "steps": steps or [{"step_id": 1, "source": "system", "message": ""}],
        **({"final_metrics": {**totals, "total_steps": len(steps)}} if totals else {}),
        **{key: value for key, value in fields.items() if key not in ("agent", "extra")},
        "extra": {**(extra or {}), "reward_kit": {key: value for key, value in own.items() if not is_empty(value)}},
    }


def _add_result(steps: list[dict[str, Any]], message: Message) -> None:
    """Add the result of a tool call to the step of the call, or to the last step if its call is unknown."""

    def has_call(step: Mapping[str, Any]) -> bool:
        return any(call["tool_call_id"] == message.tool_call_id for call in step.get("tool_calls") or ())

    if not steps:
        steps.append({"step_id": 1, "source": "system", "message": ""})
    owner = next((step for step in reversed(steps) if has_call(step)), None)
    result = {"content": _from_content(message.content)}
    if owner is not None:
        result = {"source_call_id": message.tool_call_id, **result}
    (owner or steps[-1]).setdefault("observation", {"results": []})["results"].append(result)


def _from_content(content: Any) -> Any:
    """Return content in ATIF. Parts that are neither text nor an image become text."""
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        url = part.get("image_url", {}).get("url") if isinstance(part.get("image_url"), dict) else None
        if part.get("type") == "image_url" and isinstance(url, str):
            kind = url[5:].partition(";")[0] if url.startswith("data:") else url.rpartition(".")[2].lower()
            source = {"media_type": _MEDIA.get(kind, kind if kind in _MEDIA.values() else "image/png"), "path": url}
            parts.append({"type": "image", "source": source})
        elif part.get("type") == "text":
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        elif part.get("type") in ("image", "audio") and isinstance(part.get("source"), dict):
            parts.append(dict(part))
        else:
            parts.append({"type": "text", "text": json.dumps(part)})
    return parts
