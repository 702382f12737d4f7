"""Transcripts: OpenAI chats, OpenAI responses, and the session files of Claude Code.

A chat is an object with `messages` and, optionally, the `choices` of the completion; a response is an object with the
`input` and `output` of the Responses API. A session file has one entry per line; messages with the same id are parts of
one message. Entries of subagents and errors of the API are not part of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reward_kit.agent.models import StopReason
from reward_kit.errors import ConfigError, Failure
from reward_kit.runs.logs.documents import Document, read_documents
from reward_kit.runs.logs.formats import LogHeader
from reward_kit.runs.logs.records import (
    FieldReport,
    LogEpisode,
    as_mapping,
    as_mappings,
    is_empty,
    require_string,
    timing_between,
    tokens,
)

CHAT, RESPONSES, CLAUDE = "openai-chat", "openai-responses", "claude-code"
_IDS = ("id", "custom_id", "sample_id")
_CHAT_KEYS = frozenset({*_IDS, "messages", "choices", "model", "policy", "ground_truth", "usage"})
_RESPONSE_KEYS = frozenset({*_IDS, "input", "output", "instructions", "model", "policy", "ground_truth", "usage"})
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_ENTRY_KEYS = frozenset({"type", "message", "sessionId", "timestamp", "isSidechain", "parentUuid", "uuid"})
_CONVERSATION = ("user", "assistant")
_SYNTHETIC = "<synthetic>"  # the model of messages that Claude Code wrote itself
_STRINGS = {
    "text": ("text",),
    "input_text": ("text",),
    "output_text": ("text",),
    "summary_text": ("text",),
    "reasoning_text": ("text",),
    "refusal": ("refusal",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "function_call": ("name", "arguments"),
    "function_call_output": ("call_id",),
    "message": ("role",),
}
"""The fields of items and content parts that must be strings, by type."""
_LISTS = {
    "message": ("content",),
    "function_call_output": ("output",),
    "reasoning": ("content", "summary"),
    "tool_result": ("content",),
}
"""The fields that contain content: a string, a list of parts, or null."""


# OpenAI


def chat_to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a chat.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    data = {"messages": document.data} if isinstance(document.data, list) else document.data
    if not isinstance(data, dict) or "messages" not in data:
        raise ConfigError(f"{where}: messages: a chat must have messages; fix the log, or pass its --format")
    messages = [dict(message) for message in as_mappings(data["messages"], f"{where}: messages")]
    choices = list(as_mappings(data.get("choices"), f"{where}: choices"))[:1]
    messages += [dict(as_mapping(choice.get("message"), f"{where}: choices[0].message")) for choice in choices]
    log = _log_of_row(data, messages, document, _CHAT_KEYS, report)
    if choices and choices[0].get("finish_reason") == "length":
        log.stop_reason = StopReason.OUTPUT_LIMIT
    log.usage = _usage(data.get("usage"), "prompt_tokens", "completion_tokens", "prompt_tokens_details")
    return log


def response_to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a response.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    from aiohttp import web

    from reward_kit.agent.recording.api import ServedModel
    from reward_kit.agent.recording.responses_api import ResponsesApi

    data = document.data
    if not isinstance(data, dict) or not isinstance(data.get("output"), list):
        raise ConfigError(f"{where}: output: a response must have a list of items; fix the log, or pass its --format")
    items: list[Mapping[str, Any]] = []
    for key in ("input", "output"):
        given = data.get(key)
        given = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        for index, item in enumerate(as_mappings(given, f"{where}: {key}")):
            item = {"type": "message", **item}
            if item["type"] in _ITEMS:
                _check_part(item, f"{where}: {key}[{index}]")
                items.append(item)
            else:  # such as a search at the provider
                report.log_only[f"item ({item['type']})"] += 1
    body = {"input": items, "instructions": data.get("instructions")}
    api = ResponsesApi(ServedModel(str(data.get("model")), api=ResponsesApi.name))
    try:
        messages = api.parse(body).messages
    except web.HTTPBadRequest as error:
        raise ConfigError(f"{where}: {error.text}; fix the log") from None
    log = _log_of_row(data, messages, document, _RESPONSE_KEYS, report)
    if problem := as_mapping(data.get("error"), f"{where}: error"):
        log.failure = Failure("provider_error", RESPONSES, str(problem.get("message"))[:2_000])
    if as_mapping(data.get("incomplete_details"), f"{where}: incomplete_details").get("reason") == "max_output_tokens":
        log.stop_reason = StopReason.OUTPUT_LIMIT
    log.usage = _usage(data.get("usage"), "input_tokens", "output_tokens", "input_tokens_details")
    return log


def _check_part(part: Mapping[str, Any], where: str) -> None:
    """Check the types of the fields of an item or a content part that are read."""
    kind = part.get("type")
    for key in ("type", *_STRINGS.get(str(kind), ())):
        require_string(part, key, where)
    required = {"message": "content", "tool_use": "input"}.get(str(kind))
    if required is not None and part.get(required) is None:
        raise ConfigError(f"{where}.{required}: is missing; fix the log")
    for key in _LISTS.get(str(kind), ()):
        if kind == "reasoning" or not isinstance(part.get(key), str):
            for index, inner in enumerate(as_mappings(part.get(key), f"{where}.{key}")):
                _check_part(inner, f"{where}.{key}[{index}]")


def _log_of_row(
    data: Mapping[str, Any], messages: list[dict[str, Any]], document: Document, known: frozenset[str],
    report: FieldReport,
) -> LogEpisode:  # fmt: skip
    """Return the episode of a row. Its other fields are fields of the sample."""
    sample_id = next((data[key] for key in _IDS if isinstance(data.get(key), str | int)), document.where)
    policy = str(data.get("policy") or data.get("model") or "transcript")
    row = {key: value for key, value in data.items() if key not in known and not is_empty(value)}
    report.extra.update(f"sample.{key}" for key in row)
    return LogEpisode(str(sample_id), policy, messages, row, data.get("ground_truth"))


def _usage(usage: Any, prompt: str, completion: str, details: str) -> dict[str, float]:
    if not isinstance(usage, dict):
        return {}
    cached = usage[details].get("cached_tokens") if isinstance(usage.get(details), dict) else None
    counts = {"prompt_tokens": usage.get(prompt), "completion_tokens": usage.get(completion), "cached_tokens": cached}
    return {key: tokens(value) for key, value in counts.items() if value is not None}


# Claude Code


def read_sessions(path: Path) -> Iterator[Document]:
    """Yield the sessions of a file, each as the list of its entries."""
    sessions: dict[str, list[Any]] = {}
    last = path.stem
    for document in read_documents(path):
        entry = document.data
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {document.where}: expected an object, got {entry!r:.60}; pass its --format")
        last = str(entry.get("sessionId") or last)
        sessions.setdefault(last, []).append(entry)
    for name, entries in sessions.items():
        if any(entry.get("type") in _CONVERSATION for entry in entries):
            yield Document(name, entries)


def _is_failed(block: Mapping[str, Any]) -> bool:
    return block["type"] == "tool_result" and bool(block.get("is_error"))


def session_to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a session.

    Raises:
        ConfigError: a field is missing or invalid.
    """
    from aiohttp import web

    from reward_kit.agent.recording.api import ServedModel
    from reward_kit.agent.recording.messages_api import MessagesApi

    turns: dict[str, dict[str, Any]] = {}
    usage: dict[str, Mapping[str, Any]] = {}
    model, times, error, is_cut = CLAUDE, [], None, False
    for number, entry in enumerate(document.data):
        kind, message = entry.get("type"), entry.get("message")
        if kind not in _CONVERSATION or not isinstance(message, dict) or entry.get("isSidechain"):
            report.log_only[f"entry of a subagent ({kind})" if entry.get("isSidechain") else f"entry ({kind})"] += 1
            continue
        report.add_unknown("entry", entry, _ENTRY_KEYS)
        report.add_unknown("message", message, ("id", "role", "type", "content", "model", "usage", "stop_reason"))
        times += [entry["timestamp"]] if entry.get("timestamp") else []
        content = message.get("content")
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        at = f"{where}: entry {number + 1}: message.content"
        blocks = list(as_mappings(given, at))
        for index, block in enumerate(blocks):
            _check_part(block, f"{at}[{index}]")
        error = None
        if entry.get("isApiErrorMessage"):  # not an answer of the model
            error = " ".join(str(block.get("text")) for block in blocks)
            report.log_only["entry (error of the API)"] += 1
            continue
        if kind == "assistant" and message.get("model") not in (None, _SYNTHETIC):
            model = str(message["model"])
        is_cut = message.get("stop_reason") == "max_tokens"
        key = str(message.get("id") or number)
        turns.setdefault(key, {"role": kind, "content": []})["content"] += blocks
        if isinstance(message.get("usage"), dict):
            usage[key] = message["usage"]
    api = MessagesApi(ServedModel(model, api=MessagesApi.name))
    try:
        messages = api.parse({"messages": list(turns.values())}).messages
    except web.HTTPBadRequest as error:
        raise ConfigError(f"{where}: {error.text}; fix the log") from None
    log = LogEpisode(document.where, model, messages)
    failed = {block["tool_use_id"] for turn in turns.values() for block in turn["content"] if _is_failed(block)}
    for index, message in enumerate(messages):
        if message["role"] == "tool" and message["tool_call_id"] in failed:
            log.tool_errors[index] = str(message["content"])
    for one in usage.values():
        read, written = tokens(one.get("cache_read_input_tokens")), tokens(one.get("cache_creation_input_tokens"))
        counts = {"prompt_tokens": tokens(one.get("input_tokens")) + read + written, "cached_tokens": read}
        counts |= {"cache_write_tokens": written, "completion_tokens": tokens(one.get("output_tokens"))}
        log.usage = {name: log.usage.get(name, 0) + count for name, count in counts.items()}
    log.timing = timing_between(times)
    log.failure = Failure("provider_error", CLAUDE, error[:2_000]) if error is not None else None
    log.stop_reason = StopReason.OUTPUT_LIMIT if is_cut else log.stop_reason
    return log
