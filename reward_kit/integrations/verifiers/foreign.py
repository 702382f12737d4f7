"""What verifiers recorded, read as one conversation.

The messages stand in the order in which they were added. Where a context was rewritten, a new branch says much of it
again: what repeats in order what was said before is left out, what is new, such as a summary, stands where it came.
Agents side by side in one trace are no one episode, and are refused where the trace says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_kit.agent.actions import action_of
from reward_kit.agent.models import StopReason
from reward_kit.agent.samples import make_group_id
from reward_kit.episodes.record import EpisodeFacts
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, Failure
from reward_kit.integrations.verifiers.messages import from_verifiers, is_restated
from reward_kit.models import Message

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
