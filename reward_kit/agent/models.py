"""`StepData`, a step as seen by credit assignment, and `StopReason`, the reason why an episode ended.

This module also writes the token data of an action (`PolicyOutput.log_probs`) to an episode and reads it back. Token
ids are stored with the episode's tokens, which contain only the new part of each prompt. The usage and the finish
reason are stored in the step's info. Data that cannot be stored as a turn, such as sampled ids without their prompt
ids, is stored in the step's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Any, overload

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from reward_kit.environments.base import canonical_json, hash_key
from reward_kit.episodes.record import STATE_KEYS, get_facts
from reward_kit.episodes.segments import REWRITTEN, UNKNOWN_VERSION, Turn
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message


class StopReason(StrEnum):
    """The reason why an episode ended."""

    ANSWERED = "answered"
    """The policy returned a text action, and the task ends on text."""
    TERMINATE_ACTION = "terminate_action"
    """The policy ended the episode with a terminate action or the task's terminate tool."""
    STOP_PHRASE = "stop_phrase"
    """An output contained one of the task's stop phrases."""
    TERMINATION_REGEX = "termination_regex"
    """An output matched the task's termination regex."""
    ENVIRONMENT_TERMINATED = "environment_terminated"
    """The environment ended the task, successfully or not."""
    RECORDED = "recorded"
    """The transcript was imported, not collected."""
    USER_STOPPED = "user_stopped"
    """The simulated user ended the conversation."""
    ENVIRONMENT_TRUNCATED = "environment_truncated"
    """The environment truncated the episode, for example at its own time limit."""
    MAX_STEPS = "max_steps"
    """The step limit was reached: raise `max_episode_steps`, or check why the agent does not finish."""
    TOKEN_LIMIT = "token_limit"
    """The episode reached its token limit: `limits.total_tokens`."""
    OUTPUT_LIMIT = "output_limit"
    """The final answer was cut off by the model's limit (`finish_reason` "length"): raise its `max_tokens`."""
    CONTEXT_LIMIT = "context_limit"
    """The conversation no longer fits the model's context: take fewer steps, or lower `limits.tool_output_chars`."""
    COST_LIMIT = "cost_limit"
    """The episode reached its cost limit: `limits.cost`."""
    WALL_TIME_LIMIT = "wall_time_limit"
    """The episode reached its time limit: `limits.wall_time_s`."""
    RUN_LIMIT = "run_limit"
    """The run's budget was used up; the episode is not finished and runs again on resume."""
    ERROR = "error"
    """An error occurred; it is recorded in the episode."""

    @property
    def is_terminal(self) -> bool:
        """True if the task ended (`terminated`), or False if the episode was cut off (`truncated`)."""
        return self in _TERMINAL

    @property
    def is_limit(self) -> bool:
        """True if a configured limit was reached."""
        return self in _LIMITS


_TERMINAL = frozenset(
    {
        StopReason.ANSWERED,
        StopReason.TERMINATE_ACTION,
        StopReason.STOP_PHRASE,
        StopReason.TERMINATION_REGEX,
        StopReason.ENVIRONMENT_TERMINATED,
        StopReason.RECORDED,
        StopReason.USER_STOPPED,
    }
)
_LIMITS = frozenset(StopReason) - _TERMINAL - {StopReason.ERROR}


class History(Sequence[Message]):
    """The first `stop` messages of a conversation. The messages are not copied."""

    __slots__ = ("_messages", "_stop")

    def __init__(self, messages: Sequence[Message], stop: int) -> None:
        self._messages, self._stop = messages, stop

    @property
    def messages(self) -> Sequence[Message]:
        """The whole conversation."""
        return self._messages

    def __len__(self) -> int:
        return self._stop

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._messages[i] for i in range(*index.indices(self._stop))]
        position = index + self._stop if index < 0 else index
        if not 0 <= position < self._stop:
            raise IndexError(f"message index {index} is out of range for a history with {self._stop} messages")
        return self._messages[position]

    def __iter__(self) -> Iterator[Message]:
        return (self._messages[i] for i in range(self._stop))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"History({list(self)!r})"


class SeenResults:
    """The set of tool results that an agent has seen, regardless of order and repetition."""

    __slots__ = ("_combined", "_hashes")

    def __init__(self) -> None:
        self._hashes: set[str] = set()
        self._combined = 0

    def add(self, messages: Iterable[Message], hashes: Iterable[str] = ()) -> None:
        """Add the tool results among the messages, and the results for which only the `hash_key` is known."""
        results = (message for message in messages if message.role in ("tool", "function"))
        for result in chain(map(_hash_result, results), hashes):
            if result not in self._hashes:
                self._hashes.add(result)
                self._combined ^= int(result, 16)

    def key_with(self, state_key: str) -> str:
        """Return the key of a state in which the agent has seen these results."""
        return hash_key(state_key, f"{self._combined:x}")


def _hash_result(message: Message) -> str:
    return hash_key(canonical_json(message.content) if isinstance(message.content, list) else message.text)


class StepData(BaseModel):
    """An action of a policy and its results.

    Attributes:
        system_step_index: the index of the action in its episode, from 0.
        observation_data: the new part of the observation in this step.
        action_taken: the structured action.
        raw_policy_output: the text that the model wrote.
        resulting_messages_history: the conversation after the step, as a list or as a `History` that shares its
            messages.
        policy_logprobs: the action's `PolicyOutput.log_probs`, without unknown keys.
        policy_value_estimate: V(s), if the policy has a critic.
        is_done: True in the last step of an episode.
        step_info: `assistant_turn_index`, `state_key`, `environment_reward`, `is_action_valid`, and the tool results.
            If the state key does not cover the tool results, `state_and_results` combines it with the results seen so
            far.
        base_reward: the reward of this step, or None.
        advantage: the advantage of the action. It is None if credit has not been assigned or the episode has no score.
        return_to_go: the target for the critic. It is A + V if the policy reported a value V, and otherwise G_k, the
            discounted return from this step on. It is `None` if `advantage` is `None`.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    system_step_index: int
    observation_data: Any
    action_taken: dict[str, Any]
    raw_policy_output: str | None = None
    resulting_messages_history: History | list[Message] = Field(default_factory=list)
    policy_logprobs: dict[str, Any] | None = None
    policy_value_estimate: float | None = None
    is_done: bool = False
    step_info: dict[str, Any] = Field(default_factory=dict)
    base_reward: float | None = None
    advantage: float | None = None
    return_to_go: float | None = None

    @field_serializer("resulting_messages_history")
    def _history_as_chat(self, history: History | list[Message]) -> list[dict[str, Any]]:
        return [message.to_chat() for message in history]

    @field_serializer("policy_logprobs", when_used="json")
    def _arrays_as_lists(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        return logprobs and {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in logprobs.items()}


def episode_steps(episode: SingleAgentEpisode) -> list[StepData]:
    """Return the steps of an episode. They share the messages and tokens of the episode."""
    turns, rewards = episode.tokens.turns(), episode.environment_rewards()
    group_id = get_facts(episode).get("group_id")

    def output(key: str, t: int) -> Any:
        return episode.get_extra_model_outputs(key, t) if key in episode.extra_model_outputs else None

    steps = []
    infos = [episode.get_infos(t) for t in range(len(episode) + 1)] if len(episode) else []
    for t in range(len(episode)):
        info = {**infos[t + 1], "environment_reward": rewards[t], "assistant_turn_index": t}
        # The keys belong to the state in which the action was taken; the next info contains those of the next state.
        for key in STATE_KEYS:
            info[key] = infos[t].get(key)
        info["group_id"] = group_id
        is_last = t == len(episode) - 1
        if is_last:
            info |= {"terminated": episode.is_terminated, "truncated": episode.is_truncated}
        steps.append(
            StepData(
                system_step_index=t,
                observation_data=episode.get_observations(t),
                action_taken=episode.get_actions(t),
                raw_policy_output=output("raw_policy_output", t),
                resulting_messages_history=History(episode.messages, episode.turn_end(t)) if episode.messages else [],
                policy_logprobs=read_log_probs(episode, t, turns.get(t)),
                policy_value_estimate=output("value_estimate", t),
                is_done=episode.is_done and is_last,
                step_info=info,
            )
        )
    return steps


_IN_OUTPUTS = ("prompt_ids", "token_ids", "logprobs", "policy_version")
_IN_INFO = ("usage", "finish_reason")
LOG_PROBS_KEYS = frozenset({*_IN_OUTPUTS, *_IN_INFO, "segment_reason", "allowed_ids"})
"""The known keys of `PolicyOutput.log_probs`; other keys are dropped."""


def write_log_probs(
    log_probs: Mapping[str, Any] | None, episode: SingleAgentEpisode, info: dict[str, Any]
) -> dict[str, Any]:
    """Store an action's token data in its episode and in the `info` of its step.

    Returns:
        The data that could not be stored there, to be stored as outputs of the step.
    """
    if not log_probs:
        return {}
    info |= {key: log_probs[key] for key in _IN_INFO if log_probs.get(key)}
    outputs = {key: log_probs.get(key) for key in _IN_OUTPUTS}
    prompt_ids, token_ids, logprobs, version = outputs.values()
    if prompt_ids is None or token_ids is None:
        return outputs
    version = UNKNOWN_VERSION if version is None else version
    reason = log_probs.get("segment_reason") or REWRITTEN
    allowed = log_probs.get("allowed_ids")
    episode.tokens.add_turn(len(episode), prompt_ids, token_ids, logprobs, version, reason, allowed)
    return {}


def read_log_probs(episode: SingleAgentEpisode, t: int, turn: Turn | None) -> dict[str, Any] | None:
    """Return the token data of the t-th action, or None if it has none.

    `turn` is the turn of the action, `episode.tokens.turns().get(t)`.
    """
    facts = {key: episode.get_extra_model_outputs(key, t) for key in _IN_OUTPUTS if key in episode.extra_model_outputs}
    if turn is not None:
        facts |= turn._asdict()
    info = episode.get_infos(t + 1)
    facts |= {key: info.get(key) for key in _IN_INFO}
    return {key: value for key, value in facts.items() if value is not None} or None
