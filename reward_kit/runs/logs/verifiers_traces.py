"""verifiers (v1) traces: conversion of episodes, and logs (`traces.jsonl`). verifiers is not imported.

A trace is a tree of messages. Each message has the tokens that it adds. A path from the root to a leaf is one of the
model's contexts and corresponds to one training row. For each action of an episode, the trace contains the tokens since
the previous action and the sampled tokens. If the context was rewritten, a new branch starts. It repeats earlier
messages without their tokens, so every sampled token occurs only once in the trace. `info["reward_kit"]` contains the
data for which a trace has no field.

A line of a log is an episode of verifiers, which contains the traces of its agents, or a single trace.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic

from reward_kit.agent.message_actions import parse_action
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id
from reward_kit.episodes.allowed_ids import AllowedTrack
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import EpisodeFacts, episode_from_record, get_facts
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, EpisodeError, Failure, boundary
from reward_kit.models import EvaluateResult, FunctionCall, Message, ToolCall
from reward_kit.reward_agent.scoring import Scored
from reward_kit.runs.logs.documents import Document, read_documents
from reward_kit.runs.logs.formats import LogHeader
from reward_kit.runs.logs.records import (
    LOG,
    FieldReport,
    LogEpisode,
    LogScore,
    as_mapping,
    as_mappings,
    finite,
    is_empty,
    require_string,
    stored_fields,
    tokens,
)
from reward_kit.validation import describe_validation_error

NAME = "verifiers"
INFO = "reward_kit"
REWARD = "reward"
_STATE_VERSION = 1
_ROLES = {"developer": "system", "function": "tool"}
_PARTS = ("text", "image_url")
_CUT_OFF = {
    "max_turns": StopReason.MAX_STEPS,
    "max_input_tokens": StopReason.TOKEN_LIMIT,
    "max_output_tokens": StopReason.TOKEN_LIMIT,
    "max_total_tokens": StopReason.TOKEN_LIMIT,
    "compaction_failed": StopReason.CONTEXT_LIMIT,
    "agent_timeout": StopReason.WALL_TIME_LIMIT,
    "setup_timeout": StopReason.WALL_TIME_LIMIT,
}
# In a trace, only the name of the stop condition indicates that the end was truncated.
_STOPS = {
    StopReason.MAX_STEPS: "max_turns",
    StopReason.ENVIRONMENT_TRUNCATED: "max_turns",
    StopReason.TOKEN_LIMIT: "max_total_tokens",
    StopReason.OUTPUT_LIMIT: "max_output_tokens",
    StopReason.CONTEXT_LIMIT: "max_total_tokens",
    StopReason.COST_LIMIT: "max_total_tokens",
    StopReason.RUN_LIMIT: "max_total_tokens",
    StopReason.WALL_TIME_LIMIT: "agent_timeout",
}
_PLACED = frozenset(
    {
        *("id", "task", "agent", "nodes", "calls", "rewards", "metrics", "errors", "ok", "stop_condition", "timing"),
        *("info", "root_reply", "is_completed", "version"),
    }
)
_NODE_KEYS = frozenset({"parent", "message", "sampled", "token_ids", "mask", "logprobs"})
_MESSAGE_KEYS = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})
_CALL_KEYS = frozenset({"node", "model", "finish_reason", "usage"})
_EPISODE_KEYS = frozenset({"task", "traces", "ok", "errors"})
_USAGE = {
    "completion_tokens": "completion_tokens",
    "cached_tokens": "cached_input_tokens",
    "reasoning_tokens": "reasoning_tokens",
}
_TOTAL = "reward"  # the score of an imported trace; its items are the rewards
Credit = float | Sequence[float] | None


def to_verifiers(message: Message) -> dict[str, Any]:
    """Convert a message to verifiers' format. Content may be lost. See `is_same`."""
    role = _ROLES.get(message.role, message.role)
    if role != "assistant":
        parts = message.content if isinstance(message.content, list) else None
        kept = [part for part in parts or () if part.get("type") in _PARTS]
        record: dict[str, Any] = {"role": role, "content": (message.content or "") if parts is None else kept}
        if role == "tool":
            record |= {"tool_call_id": message.tool_call_id or "", "name": message.name}
        return record
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    return {
        "role": role,
        "content": message.content if message.content is None else message.text,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
    }


def from_verifiers(message: Mapping[str, Any]) -> Message:
    """Return the message of a node in a trace."""
    content = message.get("content")
    calls = [
        ToolCall(id=call["id"], function=FunctionCall(name=call["name"], arguments=call["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return Message(
        role=message.get("role"),
        content=[dict(part) for part in content] if isinstance(content, list) else content,
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
        tool_calls=calls or None,
        reasoning_content=message.get("reasoning_content"),
    )


def is_same(message: Message) -> bool:
    """Return True if the message keeps its full content in verifiers' format."""
    return from_verifiers(to_verifiers(message)) == message


class TokenTurn(NamedTuple):
    """The context and the sampled tokens of one action. Their log-probabilities are included if they are known."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None


class Conversation(NamedTuple):
    """A trace's messages without repetitions, the indices of the sampled messages, and each action's tokens."""

    messages: list[Message]
    turns: list[int]
    token_turns: dict[int, TokenTurn]


def _read_conversation(nodes: Sequence[Mapping[str, Any]]) -> Conversation:
    conversation = Conversation([], [], {})
    messages, turns, token_turns = conversation
    seen: list[tuple[Any, ...]] = []  # The content of each message
    resume: list[int] = []  # for each node, the position in `seen` from which its children may repeat messages
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and not (isinstance(parent, int) and 0 <= parent < number):
            raise EpisodeError(f"node {number} of the trace: parent: expected the index of an earlier node")
        for link in node.get("semantic_parents") or ():
            if str(link["type"]).startswith("subagent"):
                raise EpisodeError(
                    f"node {number} of the trace belongs to a different agent "
                    f"({link['type']}) and cannot be part of the episode"
                )
        with boundary(EpisodeError, f"node {number} of the trace: message"):
            message = node.get("message") or {}
            try:
                chat = from_verifiers(message)
            except pydantic.ValidationError as error:
                problems = "; ".join(describe_validation_error(error, Message))
                raise EpisodeError(f"node {number} of the trace: message: {problems}") from None
            calls = tuple((call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls") or ())
        # The reasoning is not compared, because rewritten contexts omit it.
        contents = (message["role"], message.get("content") or "", message.get("tool_call_id") or None, calls)
        position = len(seen)
        if not node.get("sampled"):
            repeated = range(0 if parent is None else resume[parent], len(seen))
            position = next((index for index in repeated if seen[index] == contents), position)
        if position == len(seen):
            seen.append(contents)
            messages.append(chat)
        resume.append(position + 1)
        if node.get("sampled"):
            turns.append(len(messages) - 1)
            if (turn := _token_turn(nodes, number)) is not None:
                token_turns[len(turns) - 1] = turn
    return conversation


def _token_turn(nodes: Sequence[Mapping[str, Any]], number: int) -> TokenTurn | None:
    """Return the tokens from the root to a sampled node."""
    node = nodes[number]
    own, mask = list(node.get("token_ids") or ()), list(node.get("mask") or ())
    sampled = sum(map(bool, mask))
    if len(mask) != len(own) or any(mask[: len(mask) - sampled]):
        raise EpisodeError(f"node {number} of the trace: its sampled tokens are not contiguous at its end")
    if not own:
        return None
    logprobs = list(node.get("logprobs") or ()) or None
    if logprobs is not None and len(logprobs) != sampled:
        raise EpisodeError(f"node {number} of the trace has {sampled} sampled tokens but {len(logprobs)} logprobs")
    split, parts, parent = len(own) - sampled, list[Sequence[int]](), node.get("parent")
    while parent is not None:
        parts.append(nodes[parent].get("token_ids") or ())
        parent = nodes[parent].get("parent")
    before = [token for part in reversed(parts) for token in part]
    return TokenTurn([*before, *own[:split]], own[split:], logprobs)


def episode_to_trace(
    episode: SingleAgentEpisode, *, scored: Scored | None = None, advantages: Sequence[Credit] | None = None
) -> dict[str, Any]:
    """Convert an episode to a trace for `verifiers.v1.WireTrace.model_validate`.

    Args:
        episode: a complete episode with messages.
        scored: the score of the episode. If the episode is unscored, the trace is not `ok`, its reward is `None`, and
            its errors contain the reason, as in verifiers itself.
        advantages: a sequence of S items with the advantages of each action. An item is one number for all tokens of
            the action, one number for each token, or None if no advantages are assigned.

    Raises:
        EpisodeError: If the episode is a chunk, if tokens belong to no message, or if a trace cannot store a number.
    """
    if episode.lookback or episode.t_started:
        raise EpisodeError(
            f"episode {episode.id_}: a chunk cannot be converted to a trace; join the chunks with concat_episode"
        )
    spans = episode.tokens.spans
    if spans and spans[-1].step >= len(episode.assistant_turns):
        raise EpisodeError(f"episode {episode.id_}: step {spans[-1].step} has tokens but no message")
    ends = {span.segment: span.stop for span in spans}
    starts = [segment.start for segment in episode.tokens.segments[1:]] + [len(episode.tokens)]
    if any(ends.get(number) != start for number, start in enumerate(starts[: len(episode.tokens.segments)])):
        raise EpisodeError(f"episode {episode.id_}: there are tokens after the last action of a segment")
    nodes, calls = _graph(episode, advantages)
    facts = get_facts(episode)
    failure = Failure.from_json(dict(recorded)) if (recorded := facts.get("failure")) else None
    failures = [failure, scored.failure if scored is not None else None]
    errors = [{"type": one.where, "message": one.to_line()} for one in failures if one]
    scores: dict[str, Any] = {}
    if scored is not None:
        metrics = scored.result.metrics if scored.result is not None and scored.failure is None else {}
        scores = {
            "rewards": {REWARD: None if scored.score is None else {"score": scored.score, "weight": 1.0}},
            "metrics": {name: metric.score if metric.is_score_valid else None for name, metric in metrics.items()},
        }
    stop = facts.get("stop_reason")
    return {
        "version": _STATE_VERSION,
        "id": episode.id_,
        "task": {"type": "reward_kit", "data": {"id": facts.get("sample_id")}},
        "agent": {"config": {"model": facts.get("policy")}},
        "nodes": nodes,
        "calls": calls,
        **scores,
        "is_completed": episode.is_done,
        "ok": not errors,
        "stop_condition": _STOPS.get(StopReason(stop), stop) if stop else None,
        "is_timeout": stop == StopReason.WALL_TIME_LIMIT,
        "errors": errors,
        "info": {INFO: _beside(episode)},
    }


def _beside(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return the data of the episode that the nodes do not contain."""
    state = episode.get_state()
    messages, turns = state.pop("messages"), episode.tokens.turns()
    tokens = state.pop("tokens")
    kept = {
        "state": state,
        "messages": {str(n): messages[n] for n, message in enumerate(episode.messages) if not is_same(message)},
        "versions": {str(step): turn.policy_version for step, turn in turns.items()},
        "reasons": {str(step): turn.segment_reason for step, turn in turns.items() if turn.segment_reason},
    }
    return kept | ({"allowed_ids": tokens["allowed_ids"]} if "allowed_ids" in tokens else {})


def _graph(
    episode: SingleAgentEpisode, advantages: Sequence[Credit] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the nodes and the model calls of an episode, in the order of its messages."""
    if advantages is not None and len(advantages) != len(episode):
        raise EpisodeError(f"episode {episode.id_}: got {len(advantages)} advantages for {len(episode)} steps")
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    path: list[int] = []  # The node of each message on the current branch
    stored = 0  # The tokens on the current branch

    def add(index: int, *, is_sampled: bool) -> None:
        message = to_verifiers(episode.messages[index])
        nodes.append({"parent": path[-1] if path else None, "message": message, "sampled": is_sampled})
        path.append(len(nodes) - 1)

    turns, steps = episode.tokens.turns(), {index: t for t, index in enumerate(episode.assistant_turns)}
    for index in range(len(episode.messages)):
        step = steps.get(index)
        turn = turns.get(step) if step is not None else None
        if turn is not None and turn.segment_reason is not None:
            # This is a new branch, which repeats later messages without their tokens.
            reached = len(path)
            shared = next((i for i, node in enumerate(path) if nodes[node].get("token_ids")), reached)
            path, stored = path[:shared], 0
            for repeated in range(shared, reached):
                add(repeated, is_sampled=False)
        add(index, is_sampled=step is not None)
        if step is None or turn is None:
            continue
        new, sampled = turn.prompt_ids[stored:].tolist(), turn.token_ids.tolist()
        stored = len(turn.prompt_ids) + len(sampled)
        if turn.logprobs is not None and not np.isfinite(turn.logprobs).all():
            raise EpisodeError(
                f"episode {episode.id_}, step {step}: a trace must have a finite log-probability for "
                "every sampled token of an action, or for none of them"
            )
        credit, size = None if advantages is None else advantages[step], len(sampled)
        values = None
        if credit is not None:
            values = [float(value) for value in credit] if isinstance(credit, Sequence) else [float(credit)] * size
            if len(values) != size or not np.isfinite(values).all():
                raise EpisodeError(
                    f"episode {episode.id_}, step {step}: {size} tokens require one finite advantage, or "
                    f"{size} of them, got {credit!r:.80}"
                )
        nodes[-1] |= {
            "token_ids": [*new, *sampled],
            "mask": [False] * len(new) + [True] * size,
            "logprobs": [] if turn.logprobs is None else [float(value) for value in turn.logprobs],
            "advantages": values,
        }
        calls.append(
            {
                "node": len(nodes) - 1,
                "model": get_facts(episode).get("policy"),
                "usage": {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": size},
            }
        )
    return nodes, calls


def trace_to_episode(trace: Any) -> SingleAgentEpisode:
    """Convert a trace to an episode. The trace was created by `episode_to_trace` or recorded by verifiers.

    If verifiers recorded the trace, each message that the model sampled becomes a step without rewards, and
    `custom_data` contains the task and the end of the trace. A message that multiple branches repeat occurs once in the
    episode.

    Args:
        trace: a `Trace`, or its record as a dictionary. By default, verifiers rounds the numbers in a record, including
            log-probabilities. `to_record(float_decimals=None)` does not round them.

    Raises:
        EpisodeError: If the value is not a trace, has multiple agents, or was changed so much that it cannot be
            converted.
    """
    record = trace_record(trace)
    with boundary(EpisodeError, "the trace cannot be read"):
        kept = (record.get("info") or {}).get(INFO)
        conversation = _read_conversation(record["nodes"])
        return _foreign_episode(record, conversation) if kept is None else _own_episode(kept, conversation)


def trace_record(trace: Any) -> Mapping[str, Any]:
    """Return a trace as a dictionary without rounding numbers.

    Raises:
        EpisodeError: If the value is not a trace.
    """
    record = trace.model_dump(mode="python") if hasattr(trace, "model_dump") else trace
    if not isinstance(record, Mapping) or "nodes" not in record:
        raise EpisodeError(f"a verifiers v1 trace must have nodes, got {trace!r:.80}")
    return record


def _own_episode(kept: Mapping[str, Any], conversation: Conversation) -> SingleAgentEpisode:
    state = dict(kept["state"])
    turns = list(state["assistant_turns"])
    if conversation.turns != turns:
        raise EpisodeError(
            f"trace {state['id_']}: the indices of its model messages are {conversation.turns}, but they were "
            f"{turns} when the trace was created from an episode"
        )
    messages = [to_json_value(message.to_chat()) for message in conversation.messages]
    for index, message in kept["messages"].items():
        messages[int(index)] = message
    tokens, before = EpisodeTokens(), TokenTurn([], [], None)
    for step, version in kept["versions"].items():
        # If an action without tokens follows an unchanged context, its node has no tokens.
        before = conversation.token_turns.get(int(step)) or TokenTurn([*before.prompt_ids, *before.token_ids], [], None)
        reason = kept["reasons"].get(step, REWRITTEN)
        version = UNKNOWN_VERSION if version is None else version
        tokens.add_turn(int(step), *before, policy_version=version, reason=reason)
    if "allowed_ids" in kept:
        tokens.allowed = AllowedTrack.from_state(kept["allowed_ids"])
    return SingleAgentEpisode.from_state({**state, "messages": messages, "tokens": tokens.get_state()})


def _foreign_episode(record: Mapping[str, Any], conversation: Conversation) -> SingleAgentEpisode:
    """Return the episode of a trace that verifiers recorded. Each sampled message becomes a step."""

    def observation(messages: Sequence[Message]) -> str:
        return "\n".join(message.text for message in messages)

    episode, turns = SingleAgentEpisode(str(record.get("id", "trace"))), conversation.turns
    episode.add_messages(conversation.messages)
    episode.assistant_turns.extend(turns)
    episode.add_env_reset(observation(conversation.messages[: turns[0] if turns else None]))
    for t, index in enumerate(turns):
        episode.add_env_step(observation(episode.answers_to(t)), parse_action(conversation.messages[index]), None)
    for step, turn in conversation.token_turns.items():
        episode.tokens.add_turn(step, *turn)
    task, agent = record.get("task") or {}, record.get("agent") or {}
    data = dict(task.get("data") or {})
    name, idx = data.get("name"), data.get("idx")  # names may be equal, so the index is added
    named = f"{name}-{idx}" if None not in (name, idx) else None
    names = (data.get("id"), named, name, idx, task.get("key"), record.get("id", "trace"))
    sample_id = str(next(name for name in names if name is not None))
    failure, errors = None, record.get("errors") or ()
    # An error in a retried attempt or in scoring is not a failure of the rollout.
    if errors and not record.get("ok") and None not in (record.get("rewards") or {}).values():
        kind = str(errors[-1]["type"])
        known = {"ProviderError": "provider_error", "TimeoutError": "timeout"}
        failure = Failure(known.get(kind, "crash"), kind, f"verifiers: {errors[-1]['message']}").to_json()  # type: ignore[arg-type]
    stop = StopReason.ERROR if failure else _CUT_OFF.get(str(record.get("stop_condition")))
    if stop is None:
        calls = [call for call in record.get("calls") or () if call.get("error") is None]
        is_cut = bool(calls) and calls[-1].get("finish_reason") == "length"
        stop = StopReason.OUTPUT_LIMIT if is_cut else StopReason.RECORDED
    episode.is_terminated, episode.is_truncated = stop.is_terminal, not stop.is_terminal
    episode.custom_data.update(
        EpisodeFacts(
            sample_id=sample_id,
            group_id=make_group_id(0, sample_id),
            rollout_index=0,
            attempt=0,
            policy=str((agent.get("config") or {}).get("model") or "verifiers"),
            stop_reason=stop.value,
            failure=failure,
            sample=data,
            ground_truth=data.get("ground_truth", data.get("answer")),
        )
    )
    return episode


def trace_advantages(trace: Any) -> list[list[float] | None]:
    """Return, for each action, the advantages of its sampled tokens, or None if it has no advantages.

    Raises:
        EpisodeError: If the value is not a trace.
    """
    return [node.get("advantages") for node in trace_record(trace)["nodes"] if node.get("sampled")]


def trace_score(trace: Any) -> float | None:
    """Return the weighted sum of a trace's rewards, or None if the trace failed or a reward is missing.

    verifiers' own `Trace.reward` skips missing rewards, so it would be 0.0 for an unscored trace.

    Raises:
        EpisodeError: If the value is not a trace.
    """
    record = trace_record(trace)
    rewards = list((record.get("rewards") or {}).values())
    if not record.get("ok") or not rewards or None in rewards:
        return None
    return float(sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards))


# Logs


def read_header(path: Path) -> LogHeader:
    """Return the name of the environment and the model of the first trace."""
    for document in read_traces(path):
        parent, trace = document.parent or {}, document.data
        env = parent.get("env")
        model = _model(trace)
        return LogHeader(str(env["id"]) if isinstance(env, dict) and env.get("id") else None, model, {"model": model})
    return LogHeader()


def read_traces(path: Path) -> Iterator[Document]:
    """Yield the traces of a log. An episode without traces yields a trace without messages.

    Raises:
        ConfigError: a line is not an object, or its `traces` is not a list of objects.
    """
    for document in read_documents(path):
        line, where = document.data, document.where
        if not isinstance(line, dict):
            raise ConfigError(f"{path}: {where}: expected an object, got {line!r:.60}; fix the log")
        if "traces" not in line:
            yield document
            continue
        traces = list(as_mappings(line["traces"], f"{path}: {where}: traces"))
        for index, trace in enumerate(traces):
            yield Document(f"{where}: traces[{index}]", trace, line)
        if not traces:
            failed = {key: line[key] for key in ("id", "task", "errors") if key in line}
            yield Document(where, {**failed, "nodes": []}, line)


def _model(trace: Any) -> str | None:
    """Return the model of a trace, with the name of its agent if the environment has several."""
    agent = trace.get("agent") if isinstance(trace, dict) else None
    config = agent.get("config") if isinstance(agent, dict) else None
    if not isinstance(agent, dict) or not isinstance(config, dict):
        return None
    model, name = str(config.get("model") or NAME), agent.get("name")
    return model if name in (None, "agent") else f"{model} ({name})"


def to_log(document: Document, header: LogHeader, report: FieldReport, where: str) -> LogEpisode:
    """Convert a trace.

    Raises:
        ConfigError: a field is missing or invalid, or the trace has subagents.
    """
    trace = document.data
    if not isinstance(trace, dict) or not isinstance(trace.get("nodes"), list):
        raise ConfigError(f"{where}: nodes: a trace must have a list of nodes; fix the log, or pass its --format")
    _check_fields(document, report, where)
    try:
        episode = trace_to_episode(trace)
    except EpisodeError as error:
        raise ConfigError(f"{where}: {error}; fix the log") from None
    facts, model = get_facts(episode), _model(trace)
    failure, is_own = facts.get("failure"), INFO in (trace.get("info") or {})
    log = LogEpisode(
        str(facts["sample_id"]),
        str(header.model if model is not None and model == header.data.get("model") else model or facts["policy"]),
        [],
        dict(facts["sample"] or {}),
        facts["ground_truth"],
        StopReason(facts["stop_reason"]),
        Failure.from_json(dict(failure)) if failure else None,
        usage=dict(facts.get("usage") or {}) if is_own else _sum_usage(trace),
        timing=facts.get("timing") if is_own else _timing(trace.get("timing")),
        episode=episode,
    )
    own = {key: value for key, value in (trace.get("info") or {}).items() if key != INFO}
    for key, value in {"info": own, "root_reply": trace.get("root_reply")}.items():
        if not is_empty(value):
            log.extra[key] = value
            report.extra[f"trace.{key}"] += 1
    _add_scores(log, trace, where)
    return log


def _check_fields(document: Document, report: FieldReport, where: str) -> None:
    """Check the types of the fields that are read, and count the others."""
    trace, parents = document.data, {"task": ("data",), "agent": ("config",), "info": (), "timing": ()}
    for key, inner in parents.items():
        value = as_mapping(trace.get(key), f"{where}: {key}")
        for name in inner:
            as_mapping(value.get(name), f"{where}: {key}.{name}")
    for error in as_mappings(trace.get("errors"), f"{where}: errors"):
        if "type" not in error or "message" not in error:
            raise ConfigError(f"{where}: errors: an error must have a type and a message; fix the log")
    report.add_unknown("episode", document.parent or {}, _EPISODE_KEYS)
    report.add_unknown("trace", trace, _PLACED)
    for index, node in enumerate(as_mappings(trace["nodes"], f"{where}: nodes")):
        report.add_unknown("node", node, _NODE_KEYS)
        at = f"{where}: nodes[{index}]"
        message = as_mapping(node.get("message"), f"{at}.message")
        report.add_unknown("message", message, _MESSAGE_KEYS)
        for number, call in enumerate(as_mappings(message.get("tool_calls"), f"{at}.message.tool_calls")):
            for key in ("id", "name", "arguments"):
                require_string(call, key, f"{at}.message.tool_calls[{number}]")
        for link in as_mappings(node.get("semantic_parents"), f"{at}.semantic_parents"):
            require_string(link, "type", f"{at}.semantic_parents")
    for call in as_mappings(trace.get("calls"), f"{where}: calls"):
        report.add_unknown("call", call, _CALL_KEYS)


def _sum_usage(trace: Mapping[str, Any]) -> dict[str, float]:
    usage: dict[str, float] = {}
    for call in trace.get("calls") or ():
        one = call.get("usage")
        if not isinstance(one, dict):
            continue
        prompt = tokens(one.get("prompt_tokens")) + tokens(one.get("cached_input_tokens"))
        usage["prompt_tokens"] = usage.get("prompt_tokens", 0) + prompt
        for key, name in _USAGE.items():
            if one.get(name) is not None:
                usage[key] = usage.get(key, 0) + tokens(one[name])
        if (cost := finite(one.get("cost"))) is not None:
            usage["cost"] = usage.get("cost", 0.0) + cost
    return usage


def _timing(timing: Mapping[str, Any] | None) -> dict[str, Any] | None:
    start = finite((timing or {}).get("start"))
    if start is None or not 0 <= start < 1e11:
        return None
    agent = (timing or {}).get("agent")
    end = finite(agent.get("end")) if isinstance(agent, dict) else None
    began = datetime.datetime.fromtimestamp(start, datetime.UTC)
    return {"started_at": began.isoformat(timespec="microseconds"), "duration_s": max((end or start) - start, 0.0)}


def _add_scores(log: LogEpisode, trace: Mapping[str, Any], where: str) -> None:
    """Add the weighted sum of the rewards as the score. The rewards and the metrics of the trace are its metrics."""
    rewards, metrics = (as_mapping(trace.get(key), f"{where}: {key}") for key in ("rewards", "metrics"))
    for name in rewards:
        reward = as_mapping(rewards[name], f"{where}: rewards.{name}")
        value, weight = (finite(reward.get(key, default)) for key, default in (("score", None), ("weight", 1.0)))
        if reward and weight is None:
            raise ConfigError(f"{where}: rewards.{name}.weight: expected a number; fix the log")
        if (name, weight) == (_TOTAL, 1.0) and len(rewards) == 1:  # it is the score itself
            continue
        reason = f"weight {weight:g}" if reward else "the reward was not computed"
        log.metrics.append(LogScore(f"{_TOTAL}/{name}", value, reason))
    log.metrics += [LogScore(str(name), finite(value), "") for name, value in metrics.items()]
    if not rewards and not metrics:
        return
    is_scored = all(isinstance(reward, dict) and finite(reward.get("score")) is not None for reward in rewards.values())
    total = finite(trace_score(trace)) if is_scored else None
    reason = "the weighted sum of the rewards" if rewards else "the trace has no rewards"
    if total is None and trace.get("errors"):
        reason = str(trace["errors"][-1]["message"])
    log.scores.append(LogScore(_TOTAL, total, reason))


def to_trace(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert an episode to a trace.

    Args:
        record: the line of `episodes.jsonl`.
        score: the line of `scores.jsonl`, or None.
    """
    episode = episode_from_record(record)
    episode.custom_data.pop("final_state", None)
    if (episode.custom_data.get(LOG) or {}).get("format") == NAME:
        del episode.custom_data[LOG]
    scored = None
    if score is not None:
        result, failure = score.get("result"), score.get("failure")
        scored = Scored(
            episode.id_,
            EvaluateResult.model_validate(result) if result is not None else None,
            Failure.from_json(failure) if failure is not None else None,
        )
    trace = episode_to_trace(episode, scored=scored)
    # Reading the record restarted the episode's clock.
    trace["info"][INFO]["state"]["duration_s"] = (record.get("timing") or {}).get("duration_s") or 0.0
    trace["info"] |= stored_fields(record, NAME).get("info") or {}
    if score is not None and _is_imported(score):
        metrics = ((score.get("result") or {}).get("metrics") or {}).items()
        values = {name: metric["score"] if metric.get("is_score_valid", True) else None for name, metric in metrics}
        prefix = f"{_TOTAL}/"
        rewards = {
            name.removeprefix(prefix): None if value is None else {"score": value, "weight": 1.0}
            for name, value in values.items()
            if name.startswith(prefix)
        }
        trace["rewards"] = rewards or trace["rewards"]
        trace["metrics"] = {
            name: value for name, value in values.items() if name != _TOTAL and not name.startswith(prefix)
        }
    return trace


def _is_imported(score: Mapping[str, Any] | None) -> bool:
    return str(((score or {}).get("scorer") or {}).get("id")).startswith(f"{NAME}:")


def lost_fields(record: Mapping[str, Any], score: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the fields of an episode and its score that a trace does not contain."""
    if record.get("final_state"):
        yield "final_state"
    if _is_imported(score):  # its reasons are not from the trace
        return
    result = (score or {}).get("result") or {}
    yield from (f"score.{key}" for key in ("reason", "step_outputs") if not is_empty(result.get(key)))
    for metric in (result.get("metrics") or {}).values():
        if not is_empty(metric.get("reason")):
            yield "metric.reason"


def make_line(trace: Mapping[str, Any], task: str, group: str) -> dict[str, Any]:
    """Return the line of a trace that was not imported: an episode of verifiers with one agent."""
    return {
        "id": trace["id"],
        "env": {"id": task},
        "task": trace["task"],
        "group": {"id": group},
        "ok": trace["ok"],
        "errors": [],
        "traces": [trace],
    }
