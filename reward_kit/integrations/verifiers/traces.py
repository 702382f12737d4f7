"""Episodes as traces of verifiers (v1), and traces as episodes; plain dicts, so that verifiers need not be here.

A trace is a tree of messages, each with the tokens that it adds; a path from the root to a leaf is what the model saw,
and one training row. An episode's action holds the tokens since the action before it and those that were sampled; where
its context was rewritten, a new branch begins, in which earlier messages are said again without tokens, so that every
sampled token stands in the trace once. What a trace has no room for is kept in `info["reward_kit"]`, and what the nodes
hold is read from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reward_kit.agent.models import StopReason
from reward_kit.episodes.allowed_ids import AllowedTrack
from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.record import facts_of
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, EpisodeTokens, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, Failure, boundary
from reward_kit.integrations.verifiers.foreign import Conversation, TokenTurn, foreign_episode
from reward_kit.integrations.verifiers.messages import is_same, to_verifiers
from reward_kit.reward_agent.scoring import Scored

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
    errors = [{"type": one.where, "message": one.told()} for one in (failure, unscored) if one]
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
