"""Episodes as traces of verifiers (v1), and traces as episodes; plain dicts, so that verifiers need not be here.

A trace is a tree of messages, each with the tokens that it adds; a path from the root to a leaf is what the model saw,
and one training row. An episode's action holds the tokens since the action before it and those that were sampled; where
its context was rewritten, a new branch begins, in which earlier messages are said again without tokens, so that every
sampled token stands in the trace once. What a trace has no room for is kept in `info["reward_kit"]`, and what the nodes
hold is read from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from reward_kit.agent.actions import action_of
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id
from reward_kit.episodes.allowed_ids import AllowedTrack
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import EpisodeFacts, facts_of
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, EpisodeTokens, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, Failure, boundary
from reward_kit.models import FunctionCall, Message, ToolCall
from reward_kit.reward_agent.scoring import Scored

_ROLES = {"developer": "system", "function": "tool"}
_PARTS = ("text", "image_url")


def to_verifiers(message: Message) -> dict[str, Any]:
    """The message in the form of verifiers, which has no room for all that ours may hold; see `is_same`."""
    role = _ROLES.get(message.role, message.role)
    if role != "assistant":
        parts = message.content if isinstance(message.content, list) else None
        kept = [part for part in parts or () if part.get("type") in _PARTS]
        shown: dict[str, Any] = {"role": role, "content": (message.content or "") if parts is None else kept}
        if role == "tool":
            shown |= {"tool_call_id": message.tool_call_id or "", "name": message.name}
        return shown
    calls = [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls or ()
    ]
    text = message.content if message.content is None else message.text
    return {
        "role": role,
        "content": text,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
    }


def from_verifiers(message: Mapping[str, Any]) -> Message:
    """The message of a trace's node."""
    content = message.get("content")
    if isinstance(content, list):
        content = [dict(part) for part in content]
    calls = [
        ToolCall(id=call["id"], function=FunctionCall(name=call["name"], arguments=call["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return Message(
        role=message["role"],
        content=content,
        name=message.get("name"),
        tool_call_id=message.get("tool_call_id"),
        tool_calls=calls or None,
        reasoning_content=message.get("reasoning_content"),
    )


def is_same(message: Message) -> bool:
    """Whether verifiers' form of the message holds all of it."""
    return from_verifiers(to_verifiers(message)) == message


def is_restated(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether one node's message says once more what another's does; reasoning is what a rewritten context drops."""
    return _said(first) == _said(second)


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = tuple((call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls") or ())
    return message["role"], message.get("content") or "", message.get("tool_call_id") or None, calls


_CUT_OFF = {
    "max_turns": StopReason.MAX_STEPS,
    "max_input_tokens": StopReason.TOKEN_LIMIT,
    "max_output_tokens": StopReason.TOKEN_LIMIT,
    "max_total_tokens": StopReason.TOKEN_LIMIT,
    "compaction_failed": StopReason.CONTEXT_LIMIT,
    "agent_timeout": StopReason.WALL_TIME_LIMIT,
    "setup_timeout": StopReason.WALL_TIME_LIMIT,
}


class TokenTurn(NamedTuple):
    """What the model saw and sampled in one action; log-probabilities are None where the trace has none."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None


@dataclass(slots=True)
class Conversation:
    """A trace's messages, each once.

    Attributes:
        messages: in the order in which they were added.
        turns: the position of each message that the model sampled.
        token_turns: its tokens, by the number of the action; nothing where it has none.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    token_turns: dict[int, TokenTurn] = field(default_factory=dict)
    _said: list[Mapping[str, Any]] = field(default_factory=list)  # of each message its node's
    _resume: list[int] = field(default_factory=list)  # of each node where in `_said` what follows it may be restated

    @classmethod
    def of(cls, nodes: Sequence[Mapping[str, Any]]) -> Conversation:
        """The conversation of these nodes.

        Raises:
            EpisodeError: they are of several agents.
        """
        conversation, paths = cls(), _Paths(nodes)
        for number, node in enumerate(nodes):
            for link in node.get("semantic_parents") or ():
                if str(link["type"]).startswith("subagent"):
                    raise EpisodeError(
                        f"node {number} of the trace is another agent's ({link['type']}); it is no episode"
                    )
            conversation._add(node)
            if node.get("sampled"):
                conversation.turns.append(len(conversation.messages) - 1)
                if (turn := paths.turn(number)) is not None:
                    conversation.token_turns[len(conversation.turns) - 1] = turn
        return conversation

    def _add(self, node: Mapping[str, Any]) -> None:
        parent = node.get("parent")
        # What a branch restates begins behind the message that it branches off from.
        begin = 0 if parent is None else self._resume[parent]
        place = len(self._said) if node.get("sampled") else self._restated(node["message"], begin)
        if place == len(self._said):
            self._said.append(node["message"])
            self.messages.append(from_verifiers(node["message"]))
        self._resume.append(place + 1)

    def _restated(self, message: Mapping[str, Any], begin: int) -> int:
        """Where the message was said before, at `begin` or later; the end where it was not."""
        places = range(begin, len(self._said))
        return next((place for place in places if is_restated(self._said[place], message)), len(self._said))


class _Paths:
    """The tokens on the way from the root to a node."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        self._nodes = nodes

    def turn(self, number: int) -> TokenTurn | None:
        node = self._nodes[number]
        own, mask = list(node.get("token_ids") or ()), list(node.get("mask") or ())
        sampled = sum(map(bool, mask))
        if len(mask) != len(own) or any(mask[: len(mask) - sampled]):
            raise EpisodeError(f"node {number} of the trace: its sampled tokens do not stand together at its end")
        if not own:
            return None
        logprobs = list(node.get("logprobs") or ()) or None
        if logprobs is not None and len(logprobs) != sampled:
            raise EpisodeError(f"node {number} of the trace: {sampled} sampled tokens but {len(logprobs)} logprobs")
        split = len(own) - sampled
        return TokenTurn([*self._before(node.get("parent")), *own[:split]], own[split:], logprobs)

    def _before(self, place: int | None) -> list[int]:
        parts: list[Sequence[int]] = []
        while place is not None:
            parts.append(self._nodes[place].get("token_ids") or ())
            place = self._nodes[place].get("parent")
        return [token for part in reversed(parts) for token in part]


def foreign_episode(record: Mapping[str, Any], conversation: Conversation) -> SingleAgentEpisode:
    """The episode of a trace that was made elsewhere; each sampled message is a step."""
    episode = SingleAgentEpisode(str(record["id"]))
    episode.add_messages(conversation.messages)
    turns = conversation.turns
    episode.assistant_turns.extend(turns)
    episode.add_env_reset(_shown(conversation.messages[: turns[0] if turns else None]))
    for t, place in enumerate(turns):
        episode.add_env_step(_shown(episode.answers_to(t)), action_of(conversation.messages[place]), None)
    for step, turn in conversation.token_turns.items():
        episode.tokens.add_turn(step, *turn)
    facts = _facts(record)
    stop = StopReason(facts["stop_reason"])
    episode.is_terminated, episode.is_truncated = stop.is_terminal, stop.is_limit
    episode.custom_data.update(facts)
    return episode


def _shown(messages: Sequence[Message]) -> str:
    return "\n".join(message.text for message in messages)


def _facts(record: Mapping[str, Any]) -> EpisodeFacts:
    task, agent = record["task"], record.get("agent") or {}
    data = dict(task.get("data") or {})
    named = (data.get("id"), data.get("name"), data.get("idx"), task.get("key"))
    sample_id = str(next((name for name in named if name is not None), record["id"]))
    failure = _failure(record)
    return EpisodeFacts(
        sample_id=sample_id,
        group_id=make_group_id(0, sample_id),
        rollout_index=0,
        attempt=0,
        policy=str((agent.get("config") or {}).get("model") or "verifiers"),
        stop_reason=(StopReason.ERROR if failure else _stop_reason(record)).value,
        failure=failure,
        sample=data,
        ground_truth=data.get("ground_truth", data.get("answer")),
    )


def _stop_reason(record: Mapping[str, Any]) -> StopReason:
    calls = [call for call in record.get("calls") or () if call.get("error") is None]
    if (found := _CUT_OFF.get(str(record.get("stop_condition")))) is not None:
        return found
    return StopReason.OUTPUT_LIMIT if calls and calls[-1].get("finish_reason") == "length" else StopReason.RECORDED


def _failure(record: Mapping[str, Any]) -> dict[str, str] | None:
    """Why the rollout broke. An error of a retried attempt is no failure, and one of scoring none of the rollout."""
    errors = record.get("errors") or ()
    if record.get("ok") or not errors or None in (record.get("rewards") or {}).values():
        return None
    error = errors[-1]
    kind = str(error["type"])
    known = {"ProviderError": "provider_error", "TimeoutError": "timeout"}
    message = f"verifiers: {error['message']}"
    return Failure(known.get(kind, "crash"), kind, message).to_json()  # type: ignore[arg-type]


INFO = "reward_kit"
REWARD = "reward"
_STATE_VERSION = 1
# A trace says of its end by name alone whether it was cut off.
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
Credit = float | Sequence[float] | None


def trace_of(
    episode: SingleAgentEpisode, *, scored: Scored | None = None, advantages: Sequence[Credit] | None = None
) -> dict[str, Any]:
    """The episode as a trace, which `verifiers.v1.WireTrace.model_validate` takes.

    Args:
        episode: a whole one, with its messages.
        scored: its score. Where it is unscored, the reward is None, the error is there and the trace is not `ok`, as
            verifiers itself leaves it.
        advantages: (S,) what each action was worth: a number for all its tokens, one for each, or None for unassigned.

    Raises:
        EpisodeError: it is a chunk, tokens belong to no message, or a number cannot stand in a trace.
    """
    _check_whole(episode)
    facts = facts_of(episode)
    graph = _Graph(episode, advantages)
    failure = Failure.from_json(dict(broke)) if (broke := facts.get("failure")) else None
    unscored = scored.failure if scored is not None else None
    errors = [{"type": one.where, "message": one.to_line()} for one in (failure, unscored) if one]
    stop = facts.get("stop_reason")
    return {
        "version": _STATE_VERSION,
        "id": episode.id_,
        "task": {"type": "reward_kit", "data": {"id": facts.get("sample_id")}},
        "agent": {"config": {"model": facts.get("policy")}},
        "nodes": graph.nodes,
        "calls": graph.calls,
        **({} if scored is None else _rewards(scored)),
        "is_completed": episode.is_done,
        "ok": not errors,
        "stop_condition": _STOPS.get(StopReason(stop), stop) if stop else None,
        "is_timeout": stop == StopReason.WALL_TIME_LIMIT,
        "errors": errors,
        "info": {INFO: _beside(episode)},
    }


def _rewards(scored: Scored) -> dict[str, Any]:
    metrics = scored.result.metrics if scored.result is not None and scored.failure is None else {}
    return {
        "rewards": {REWARD: None if scored.score is None else {"score": scored.score, "weight": 1.0}},
        "metrics": {name: metric.score if metric.is_score_valid else None for name, metric in metrics.items()},
    }


def _check_whole(episode: SingleAgentEpisode) -> None:
    if episode.lookback or episode.t_started:
        raise EpisodeError(f"episode {episode.id_}: a chunk is no trace; put its chunks together with concat_episode")
    spans = episode.tokens.spans
    if spans and spans[-1].step >= len(episode.assistant_turns):
        raise EpisodeError(f"episode {episode.id_}: tokens of step {spans[-1].step}, which has no message")
    ends = {span.segment: span.stop for span in spans}
    starts = [segment.start for segment in episode.tokens.segments[1:]] + [len(episode.tokens)]
    if any(ends.get(number) != start for number, start in enumerate(starts[: len(episode.tokens.segments)])):
        raise EpisodeError(f"episode {episode.id_}: there are tokens behind the last action of a segment")


def _beside(episode: SingleAgentEpisode) -> dict[str, Any]:
    """What of the episode the nodes do not hold."""
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


class _Graph:
    """The nodes and model calls of an episode, made in the order of its messages."""

    def __init__(self, episode: SingleAgentEpisode, advantages: Sequence[Credit] | None) -> None:
        if advantages is not None and len(advantages) != len(episode):
            raise EpisodeError(f"episode {episode.id_}: {len(episode)} steps but {len(advantages)} advantages")
        self._episode, self._advantages = episode, advantages
        self._path: list[int] = []  # the node of each message on the present branch
        self._stored = 0  # tokens on it
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        turns, steps = episode.tokens.turns(), {place: t for t, place in enumerate(episode.assistant_turns)}
        for place in range(len(episode.messages)):
            t = steps.get(place)
            turn = turns.get(t) if t is not None else None
            if turn is not None and turn.segment_reason is not None:
                self._branch()
            self._add(place, is_sampled=t is not None)
            if t is not None and turn is not None:
                self._give_tokens(t, turn)

    def _add(self, place: int, *, is_sampled: bool) -> None:
        message = to_verifiers(self._episode.messages[place])
        self.nodes.append({"parent": self._path[-1] if self._path else None, "message": message, "sampled": is_sampled})
        self._path.append(len(self.nodes) - 1)

    def _branch(self) -> None:
        """Say again what stands behind the first tokens, without them."""
        said = len(self._path)
        shared = next((place for place, node in enumerate(self._path) if self.nodes[node].get("token_ids")), said)
        self._path, self._stored = self._path[:shared], 0
        for place in range(shared, said):
            self._add(place, is_sampled=False)

    def _give_tokens(self, step: int, turn: Turn) -> None:
        new, sampled = turn.prompt_ids[self._stored :].tolist(), turn.token_ids.tolist()
        self._stored = len(turn.prompt_ids) + len(sampled)
        credit = None if self._advantages is None else self._credit(step, len(sampled))
        self.nodes[-1] |= {
            "token_ids": [*new, *sampled],
            "mask": [False] * len(new) + [True] * len(sampled),
            "logprobs": [] if turn.logprobs is None else self._finite(step, turn.logprobs),
            "advantages": credit,
        }
        self.calls.append(
            {
                "node": len(self.nodes) - 1,
                "model": facts_of(self._episode).get("policy"),
                "usage": {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(sampled)},
            }
        )

    def _finite(self, step: int, logprobs: Any) -> list[float]:
        if not np.isfinite(logprobs).all():
            raise EpisodeError(
                f"episode {self._episode.id_}, step {step}: a trace holds a finite log-probability for every sampled "
                "token of an action, or for none"
            )
        return [float(value) for value in logprobs]

    def _credit(self, step: int, size: int) -> list[float] | None:
        assert self._advantages is not None
        given = self._advantages[step]
        if given is None:
            return None
        values = [float(value) for value in given] if isinstance(given, Sequence) else [float(given)] * size
        if len(values) != size or not np.isfinite(values).all():
            raise EpisodeError(
                f"episode {self._episode.id_}, step {step}: {size} tokens need one finite advantage or {size}; "
                f"got {given!r:.80}"
            )
        return values


def episode_of_trace(trace: Any) -> SingleAgentEpisode:
    """The episode of a trace: the very one that `trace_of` was given, or that of a trace which verifiers recorded.

    Of a foreign trace each message that the model sampled is a step, nobody rewarded any, and `custom_data` has what
    the trace says of its task and its end. `foreign` tells what becomes of several branches.

    Args:
        trace: a `Trace`, or its record as a dict. A record that was written with rounded numbers, which is how
            verifiers writes one unless it is told otherwise (`to_record(float_decimals=None)`), gives rounded
            log-probabilities.

    Raises:
        EpisodeError: it is no trace, was changed beyond recognition, or is of several agents.
    """
    record = record_of(trace)
    with boundary(EpisodeError, "the trace cannot be read"):
        kept = (record.get("info") or {}).get(INFO)
        conversation = Conversation.of(record["nodes"])
        if kept is None:
            return foreign_episode(record, conversation)
        return _own(kept, conversation)


def record_of(trace: Any) -> Mapping[str, Any]:
    """A trace as a dict, with every digit.

    Raises:
        EpisodeError: it is none.
    """
    record = trace.model_dump(mode="python") if hasattr(trace, "model_dump") else trace
    if not isinstance(record, Mapping) or "nodes" not in record:
        raise EpisodeError(f"a trace of verifiers v1 has nodes; got {trace!r:.80}")
    return record


def _own(kept: Mapping[str, Any], conversation: Conversation) -> SingleAgentEpisode:
    state = dict(kept["state"])
    turns = list(state["assistant_turns"])
    if conversation.turns != turns:
        raise EpisodeError(
            f"trace {state['id_']}: its model messages stand at {conversation.turns}, and stood at {turns} when it was "
            "made of an episode"
        )
    messages = [to_json_value(message.to_chat()) for message in conversation.messages]
    for place, message in kept["messages"].items():
        messages[int(place)] = message
    tokens, before = EpisodeTokens(), TokenTurn([], [], None)
    for step, version in ((int(step), version) for step, version in kept["versions"].items()):
        # An action of no tokens that was shown nothing new has a node without any.
        before = conversation.token_turns.get(step) or TokenTurn([*before.prompt_ids, *before.token_ids], [], None)
        reason = kept["reasons"].get(str(step), REWRITTEN)
        tokens.add_turn(step, *before, policy_version=UNKNOWN_VERSION if version is None else version, reason=reason)
    if "allowed_ids" in kept:
        tokens.allowed = AllowedTrack.from_state(kept["allowed_ids"])
    return SingleAgentEpisode.from_state({**state, "messages": messages, "tokens": tokens.get_state()})


def advantages_of_trace(trace: Any) -> list[list[float] | None]:
    """(S,) of each action the advantages of its sampled tokens, None where nobody assigned any.

    Raises:
        EpisodeError: it is no trace.
    """
    return [node.get("advantages") for node in record_of(trace)["nodes"] if node.get("sampled")]


def score_of_trace(trace: Any) -> float | None:
    """The weighted sum of a trace's rewards; None where it failed, or one of them was not given.

    verifiers' own `Trace.reward` leaves out what was not given, so that an unscored trace has 0.0 there.

    Raises:
        EpisodeError: it is no trace.
    """
    record = record_of(trace)
    rewards = list((record.get("rewards") or {}).values())
    if not record.get("ok") or not rewards or None in rewards:
        return None
    return float(sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards))
