"""Logs of inspect_ai: `.eval` archives and `.json` files (log format version 2, as of inspect_ai 0.3.285).

The first score with a number is the score of an episode; all scores are its metrics. The letters C, P, I and N count as
in inspect's own `value_to_float`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

from reward_kit.agent.models import StopReason
from reward_kit.episodes.json_codec import from_json_value
from reward_kit.errors import ConfigError, Failure
from reward_kit.models import Message
from reward_kit.runs.logs import records
from reward_kit.runs.logs.documents import Document, JsonText, LogArchive, open_text
from reward_kit.runs.logs.formats import LogHeader
from reward_kit.runs.logs.records import (
    FieldReport,
    LogEpisode,
    LogScore,
    arguments_object,
    arguments_text,
    as_mapping,
    as_mappings,
    finite,
    is_empty,
    make_timing,
    stored_fields,
    tokens,
)
from reward_kit.runs.run_folder import RunHeader

NAME = "inspect"
_SAMPLE = re.compile(r"samples/.*_epoch_\d+\.json", re.DOTALL)
_ATTACHMENT = "attachment://"
_FORMATS_WITH_SCORES = (NAME, "atif")  # `score_line` prefixes the names of their scores
_ROW = ("input", "choices")
_PLACED = frozenset(
    {
        *("id", "epoch", "input", "choices", "target", "messages", "scores", "metadata", "model_usage", "limit"),
        *("error", "started_at", "total_time", "attachments"),
    }
)
_LOG_ONLY = frozenset({"events", "events_data", "timelines", "output", "error_retries"})
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "function", "error"})
_SUMMARY = ("id", "epoch", "input", "target", "scores", "model_usage", "uuid", "total_time", "started_at")
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_LIMITS = {
    "message": StopReason.MAX_STEPS,
    "turn": StopReason.MAX_STEPS,
    "time": StopReason.WALL_TIME_LIMIT,
    "working": StopReason.WALL_TIME_LIMIT,
    "token": StopReason.TOKEN_LIMIT,
    "cost": StopReason.COST_LIMIT,
    "context": StopReason.CONTEXT_LIMIT,
}
_LIMIT_NAMES = {stop.value: name for name, stop in reversed(_LIMITS.items())}
_USAGE = {
    "completion_tokens": "output_tokens",
    "cached_tokens": "input_tokens_cache_read",
    "cache_write_tokens": "input_tokens_cache_write",
    "reasoning_tokens": "reasoning_tokens",
}


# Import


def read_header(path: Path, *, to_end: bool = False) -> LogHeader:
    """Read the header of a log; with `to_end`, also the keys after the samples.

    Raises:
        ConfigError: the log is damaged or has no header.
    """
    if zipfile.is_zipfile(path) or path.suffix == ".eval":
        with LogArchive(path) as archive:
            name = next((name for name in ("header.json", "_journal/start.json") if name in archive.names), None)
            if name is None:
                raise ConfigError(f"{path}: has no header.json, so it is not a log of inspect; pass its --format")
            data = archive.parse(name)
            if to_end and "reductions.json" in archive.names:
                data["reductions"] = archive.parse("reductions.json")
    else:
        with open_text(path) as file:
            text, data = JsonText(file, path), {}
            for key, value in text.pairs():
                if key != "samples":
                    data[key] = value()
                elif not to_end:
                    break
                else:
                    for _ in text.items():
                        pass
    spec = data.get("eval") if isinstance(data, dict) else None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), str) or not isinstance(spec.get("task"), str):
        raise ConfigError(f"{path}: eval.task and eval.model are missing; pass a log of inspect, or its --format")
    return LogHeader(spec["task"], spec["model"], data)


def read_samples(path: Path) -> Iterator[Document]:
    """Yield the samples of a log."""
    if zipfile.is_zipfile(path) or path.suffix == ".eval":
        with LogArchive(path) as archive:
            for name in archive.names:
                if _SAMPLE.fullmatch(name):
                    yield Document(name, archive.parse(name))
                elif name.endswith("/skeleton.json"):
                    raise ConfigError(f"{path}: {name}: samples in chunks are not supported; convert the log to .json")
        return
    with open_text(path) as file:
        text = JsonText(file, path)
        for key, value in text.pairs():
            if key != "samples":
                value()
                continue
            for index, sample in enumerate(text.items()):
                yield Document(f"samples[{index}]", sample)


def to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a sample.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    sample = document.data
    if not isinstance(sample, dict) or not isinstance(sample.get("id"), str | int):
        raise ConfigError(f"{where}: id: a sample must have an id; fix the log, or pass its --format")
    metadata = sample.get("metadata") if isinstance(sample.get("metadata"), dict) else {}
    row = {**(metadata or {}), **{key: sample[key] for key in _ROW if not is_empty(sample.get(key))}}
    log = LogEpisode(str(sample["id"]), header.model or NAME, [], row, sample.get("target"))
    attachments = sample.get("attachments") if isinstance(sample.get("attachments"), dict) else {}
    for message in as_mappings(sample.get("messages"), f"{where}: messages"):
        report.add_unknown("message", message, _MESSAGE_KEYS)
        if error := message.get("error"):
            log.tool_errors[len(log.messages)] = str(error.get("message") if isinstance(error, dict) else error)
        log.messages.append(_to_chat(message, attachments or {}, f"{where}: messages[{len(log.messages)}]"))
    for key, value in sample.items():
        if is_empty(value) or key in _PLACED:
            continue
        if key in _LOG_ONLY:
            report.log_only[f"sample.{key}"] += len(value) if isinstance(value, list) else 1
        else:
            log.extra[key] = value
            report.extra[f"sample.{key}"] += 1
    log.usage = _usage(sample.get("model_usage"))
    log.timing = make_timing(sample.get("started_at"), sample.get("total_time"))
    _set_end(log, sample)
    for name, value in as_mapping(sample.get("scores"), f"{where}: scores").items():
        score = as_mapping(value, f"{where}: scores.{name}")
        report.add_unknown("score", score, ("value", "explanation"))
        log.scores += _scores(str(name), score)
    return log


def _to_chat(message: Mapping[str, Any], attachments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a message to chat format. A reasoning part becomes `reasoning_content`."""
    content, reasoning = message.get("content"), None
    if isinstance(content, str):
        content = _resolved(content, attachments)
    elif isinstance(content, list):
        parts = [_to_part(part, attachments) for part in as_mappings(content, f"{where}.content")]
        reasoning = "\n".join(str(part.get("reasoning", "")) for part in parts if part.get("type") == "reasoning")
        kept = [part for part in parts if part.get("type") != "reasoning"]
        is_text = len(kept) == 1 and kept[0].get("type") == "text" and isinstance(kept[0].get("text"), str)
        content = kept[0]["text"] if is_text else kept or ""
    chat: dict[str, Any] = {"role": message.get("role"), "content": content}
    if reasoning:
        chat["reasoning_content"] = reasoning
    if message.get("role") == "tool":
        chat |= {"tool_call_id": message.get("tool_call_id"), "name": message.get("function")}
    if calls := list(as_mappings(message.get("tool_calls"), f"{where}.tool_calls")):
        chat["tool_calls"] = [
            {
                "id": str(call.get("id") or ""),
                "function": {"name": call.get("function"), "arguments": arguments_text(call.get("arguments"))},
            }
            for call in calls
        ]
    return chat


def _resolved(value: Any, attachments: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith(_ATTACHMENT):
        return attachments.get(value.removeprefix(_ATTACHMENT), value)
    return value


def _to_part(part: Mapping[str, Any], attachments: Mapping[str, Any]) -> dict[str, Any]:
    resolved = {key: _resolved(value, attachments) for key, value in part.items()}
    if resolved.get("type") == "image":
        url = {"url": resolved.get("image"), "detail": resolved.get("detail") or "auto"}
        return {"type": "image_url", "image_url": url}
    return resolved if resolved.get("type") != "text" else {"type": "text", "text": str(resolved.get("text", ""))}


def _usage(model_usage: Any) -> dict[str, float]:
    """Return the usage of all models of a sample."""
    usage: dict[str, float] = {}
    for one in model_usage.values() if isinstance(model_usage, dict) else ():
        if not isinstance(one, dict):
            continue
        read, written = (tokens(one.get(f"input_tokens_cache_{kind}")) for kind in ("read", "write"))
        usage["prompt_tokens"] = usage.get("prompt_tokens", 0) + tokens(one.get("input_tokens")) + read + written
        for key, name in _USAGE.items():
            if one.get(name) is not None:
                usage[key] = usage.get(key, 0) + tokens(one[name])
        if (cost := finite(one.get("total_cost"))) is not None:
            usage["cost"] = usage.get("cost", 0.0) + cost
    return usage


def _set_end(log: LogEpisode, sample: Mapping[str, Any]) -> None:
    error, limit, output = (sample.get(key) for key in ("error", "limit", "output"))
    if isinstance(error, dict):
        message = str(error.get("message"))
        log.failure = Failure("crash", "inspect", message[:2_000], str(error.get("traceback") or "")[:20_000])
    elif isinstance(limit, dict):
        log.stop_reason = _LIMITS.get(str(limit.get("type")), StopReason.RECORDED)
        log.extra["limit"] = limit
    elif isinstance(output, dict) and isinstance(output.get("choices"), list) and output["choices"]:
        last = output["choices"][0]
        if isinstance(last, dict) and last.get("stop_reason") == "max_tokens":
            log.stop_reason = StopReason.OUTPUT_LIMIT


def _scores(name: str, score: Mapping[str, Any]) -> Iterator[LogScore]:
    value = score.get("value")
    reason = score.get("explanation")
    text = reason if isinstance(reason, str) else json.dumps(value)[:200]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict | list):
        yield from (LogScore(f"{name}/{key}", _to_number(item), text) for key, item in items)
    else:
        yield LogScore(name, _to_number(value), text)


def _to_number(value: Any) -> float | None:
    """Return the number of a score, as inspect's `value_to_float` does, or None if it has none."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        known = _LETTERS.get(value, _LETTERS.get(value.lower()))
        try:
            return known if known is not None else finite(float(value))
        except ValueError:
            return None
    return finite(value)


# Export


def to_sample(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert an episode to a sample.

    Args:
        record: the line of `episodes.jsonl`.
        score: the line of `scores.jsonl`, or None.
    """
    row, policy = dict(record.get("sample") or {}), str(record.get("policy"))
    extra = stored_fields(record, NAME)
    chats = [from_json_value(message) for message in record["messages"]]
    messages = [_from_chat(Message.model_validate(chat)) for chat in chats]
    given = row.pop("input", None)
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    answer = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    target = record.get("ground_truth")
    if not isinstance(target, str) and not (isinstance(target, list) and all(isinstance(one, str) for one in target)):
        target = "" if target is None else json.dumps(target)
    timing, failure = record.get("timing") or {}, record.get("failure")
    sample: dict[str, Any] = {
        "id": str(record["sample_id"]),
        "epoch": record["rollout_index"] + 1,
        "input": given if isinstance(given, str | list) else messages[:first],
        **({"choices": row.pop("choices")} if isinstance(row.get("choices"), list) else {}),
        "target": target,
        "messages": messages,
        "output": _output(policy, answer, record.get("stop_reason")),
        "scores": _sample_scores(score),
        "metadata": row,
        "store": {},
        "events": [],
        "model_usage": {policy: _model_usage(usage)} if (usage := record.get("usage")) else {},
        "attachments": {},
        **{key: value for key, value in extra.items() if key != "limit"},
    }
    if timing.get("started_at"):
        sample |= {"started_at": timing["started_at"], "total_time": timing.get("duration_s")}
        ended = datetime.fromisoformat(timing["started_at"]) + timedelta(seconds=timing.get("duration_s") or 0.0)
        sample["completed_at"] = extra.get("completed_at") or ended.isoformat()
    if failure:
        trace = failure.get("traceback") or ""
        sample["error"] = {"message": failure["message"], "traceback": trace, "traceback_ansi": trace}
    elif "limit" in extra:
        sample["limit"] = extra["limit"]
    elif (limit := _LIMIT_NAMES.get(str(record.get("stop_reason")))) is not None:
        sample["limit"] = {"type": limit, "limit": 0.0}
    return sample


def _from_chat(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else "tool" if message.role == "function" else message.role
    content: Any = message.content or ""
    if isinstance(content, list):
        content = [_from_part(part) for part in content]
    if message.reasoning_content:
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "reasoning", "reasoning": message.reasoning_content}, *text]
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        result |= {"tool_call_id": message.tool_call_id, "function": message.name}
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "function": call.function.name,
                "arguments": arguments_object(call.function.arguments),
                "type": "function",
            }
            for call in message.tool_calls
        ]
    return result


def _from_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "image_url" and isinstance(part.get("image_url"), dict):
        return {
            "type": "image",
            "image": part["image_url"].get("url"),
            "detail": part["image_url"].get("detail", "auto"),
        }
    return dict(part)


def _output(policy: str, answer: Mapping[str, Any] | None, stop: str | None) -> dict[str, Any]:
    if answer is None:
        return {"model": policy, "choices": [], "completion": ""}
    content = answer["content"]
    parts = content if isinstance(content, list) else []
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in parts)
    reason = "max_tokens" if stop == StopReason.OUTPUT_LIMIT else "tool_calls" if answer.get("tool_calls") else "stop"
    return {"model": policy, "choices": [{"message": dict(answer), "stop_reason": reason}], "completion": text}


def _sample_scores(score: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the scores: the metrics, and the score itself unless it is one of the metrics.

    A metric "a/b" becomes the item "b" of the score "a".
    """
    if score is None:
        return {}
    result = score.get("result") or {}
    metrics = result.get("metrics") or {}
    scores: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.get("score") if metric.get("is_score_valid", True) else float("nan")
        group, separator, item = name.partition("/")
        if separator and isinstance(scores.setdefault(group, {"value": {}, "explanation": None})["value"], dict):
            scores[group]["value"][item] = value
        else:
            scores[name] = {"value": value, "explanation": metric.get("reason")}
    name = str((score.get("scorer") or {}).get("id"))
    form, _, own_name = name.partition(":")
    if form in _FORMATS_WITH_SCORES and own_name in metrics:
        return scores
    value = score.get("score")
    reason = result.get("reason") or (score.get("failure") or {}).get("message")
    return {name: {"value": float("nan") if value is None else value, "explanation": reason}, **scores}


def _model_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    read, written = int(usage.get("cached_tokens") or 0), int(usage.get("cache_write_tokens") or 0)
    prompt, completion = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    counts = {name: int(usage[key]) for key, name in _USAGE.items() if usage.get(key) is not None}
    cost = {"total_cost": usage["cost"]} if usage.get("cost") is not None else {}
    return {"input_tokens": prompt - read - written, **counts, "total_tokens": prompt + completion, **cost}


def lost_fields(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the fields of an episode and its score that a sample does not contain."""
    yield from records.lost_fields(record, score)
    if ((score or {}).get("result") or {}).get("step_outputs"):
        yield "score.step_outputs"


class InspectWriter:
    """A writer of a log, as `.eval` or `.json`.

    Args:
        file: the file.
        header: the header of the log, which may be changed until `close`.
        as_json: whether to write JSON instead of an archive.
    """

    def __init__(self, file: IO[bytes], header: dict[str, Any], *, as_json: bool) -> None:
        self._file, self._header = file, header
        self._summaries: list[dict[str, Any]] = []
        # Readers of JSON logs expect the header before the samples, but it is known only at the end.
        self._samples = tempfile.TemporaryFile() if as_json else None  # noqa: SIM115 - closed by `release`
        self._zip = None if as_json else zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Write a sample."""
        text = json.dumps(sample)
        if self._zip is not None:
            self._zip.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", text)
        elif self._samples is not None:
            self._samples.write((b",\n" if self._samples.tell() else b"\n") + text.encode())
        summary = {key: sample[key] for key in _SUMMARY if key in sample} | {"metadata": {}, "completed": True}
        error = (sample.get("error") or {}).get("message")
        self._summaries.append(summary | ({"error": error} if error else {}))

    def release(self) -> None:
        """Close the files, even if the log is incomplete."""
        for file in (self._zip, self._samples):
            if file is not None:
                file.close()

    def close(self) -> None:
        """Write the header and the end of the log."""
        header = {key: value for key, value in self._header.items() if key != "reductions"}
        reductions = self._header.get("reductions")
        if self._samples is not None:
            self._samples.seek(0)
            self._file.write(json.dumps(header)[:-1].encode() + b', "samples": [')
            shutil.copyfileobj(self._samples, self._file)
            self._file.write(
                b"\n]" + (f', "reductions": {json.dumps(reductions)}' if reductions else "").encode() + b"}\n"
            )
        elif self._zip is not None:
            start = {key: header[key] for key in ("version", "eval", "plan") if key in header}
            members = {"_journal/start.json": start, "summaries.json": self._summaries, "header.json": header}
            for name, content in (members | ({"reductions.json": reductions} if reductions else {})).items():
                self._zip.writestr(name, json.dumps(content))
            self._zip.close()


def make_header(run: RunHeader, policy: str) -> dict[str, Any]:
    """Return the header of a log for a run that was not imported from one."""
    created, run_id = run.timing.started_at.isoformat(), run.run_id or run.task_name
    spec = {
        "created": created,
        "task": run.task_name,
        **dict.fromkeys(("task_id", "run_id"), run_id),
        "eval_id": f"{run_id}-{policy}",
        "model": policy,
        "dataset": {"name": run.task_name},
        "config": {},
        "packages": {"reward_kit": run.versions.get("reward_kit", "")},
    }
    stats = {"started_at": created, "completed_at": created, "model_usage": {}}
    return {"version": 2, "status": "success", "eval": spec, "plan": {"name": "plan", "steps": []}, "stats": stats}
