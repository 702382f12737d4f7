"""`SimulatedUser`: the other side of a dialogue, a policy that answers the agent between its turns.

The user's policy sees the conversation from its own side: what the agent says is "user" to it and what it said itself
is "assistant". Tool calls, tool results, what the world shows, and the task's system message are the agent's alone.
This is the arrangement of τ-bench (https://arxiv.org/abs/2406.12045), its stop signal included.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_kit.agent.actions import plain
from reward_kit.agent.models import write_log_probs
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PolicyOutput,
    next_action,
    open_session,
)
from reward_kit.agent.samples import Prompt, Sample, derive_seed
from reward_kit.agent.starts import EpisodeStart
from reward_kit.episodes.episode_data import REWARD
from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, PolicyError, RewardKitError, boundary
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.task_parts import STOP_PHRASE

GREETING = "Hello! What can I do for you?"

"""What a user who speaks first is asked; many endpoints refuse a conversation without a user message."""

WHO = "the simulated user"

"""How a user is called beside the policies: in messages, and where a failure of theirs is told apart."""

NO_ANSWER = "(no answer)"

"""What the user hears where the agent says nothing."""

Replies = Sequence[str] | Callable[[Sequence[Message], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """One message of the user.

    Attributes:
        text: what the agent reads, without the stop signal.
        is_over: the user ends the conversation with it.
        facts: JSON-safe facts for the record: the raw output, and `usage`, `finish_reason` and token ids where known;
            of the first one also the user's `instructions`.
    """

    text: str
    is_over: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def messages(self) -> list[Message]:
        """What it adds to the conversation: nothing where the user leaves without a word."""
        return [Message(role="user", content=self.text)] if self.text or not self.is_over else []


class SimulatedUser:
    """Who plays the user in all episodes of a run.

    Args:
        policy: answers in the user's place: a text action is what the user says, terminate ends the conversation.
        instructions: the system message of that policy, a template over the sample's row.
        stop_phrase: an answer that contains it is the last one; the agent reads it without the phrase.
        opens: the user speaks first; by default where no message of the task is the user's.

    Raises:
        ConfigError: a template does not compile.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        *,
        instructions: str | None = None,
        stop_phrase: str = STOP_PHRASE,
        opens: bool | None = None,
    ) -> None:
        self.policy = policy
        self._instructions = _RowTemplates([instructions] if instructions else [], "system")
        self._stop_phrase, self._opens = stop_phrase, opens

    @property
    def is_free(self) -> bool:
        """What the user says costs nothing."""
        return self.policy.is_free

    @property
    def knows_cost(self) -> bool:
        """Whether the usage of the user's answers says what they cost."""
        return self.policy.knows_cost

    def check(self, sample: Sample) -> None:
        """Fill the templates, as `open` will.

        Raises:
            ConfigError: one of them uses what the sample's row does not have.
        """
        self._instructions.of(sample)

    async def open(self, start: EpisodeStart) -> UserSession:
        """The user of one episode. Its seed is neither the agent's nor the world's, and the same for every agent."""
        seed = derive_seed("user", start.seeds.run, start.sample.id, start.rollout_index)
        policy = self._policy_for(start.sample)
        context = EpisodeContext(start.rollout_id, seed, None, start.sample.id, start.rollout_index)
        instructions = self._instructions.of(start.sample)
        with _told_apart():
            session = await open_session(policy, context)
        return UserSession(session, instructions, self._stop_phrase, self._opens, is_shared=session is self.policy)

    async def close(self) -> None:
        """Close the policy; called once, after the last session."""
        await self.policy.close()

    def _policy_for(self, sample: Sample) -> AgentPolicy:
        return self.policy


class ScriptedUser(SimulatedUser):
    """A user who says given texts, and then stops.

    Args:
        replies: the texts in order, templates over the sample's row; or a function, sync or async, of the conversation
            as the user sees it and the row, that returns a text. By default the row's own `replies`, as they are.
        instructions: as in `SimulatedUser`; a function sees them.
        stop_phrase: as in `SimulatedUser`.
        opens: as in `SimulatedUser`.

    Raises:
        ConfigError: `replies` is neither, or a template does not compile.
    """

    def __init__(
        self,
        replies: Replies | None = None,
        *,
        instructions: str | None = None,
        stop_phrase: str = STOP_PHRASE,
        opens: bool | None = None,
    ) -> None:
        super().__init__(ScriptedPolicy([]), instructions=instructions, stop_phrase=stop_phrase, opens=opens)
        self._function = replies if callable(replies) else None
        given = None if replies is None or callable(replies) else _list_of_texts(replies, "replies")
        self._replies = None if given is None else _RowTemplates(given, "user")

    def check(self, sample: Sample) -> None:
        """As in `SimulatedUser`; where there are no `replies`, the row must have them."""
        super().check(sample)
        self._policy_for(sample)

    def _policy_for(self, sample: Sample) -> AgentPolicy:
        if self._function is not None:
            return ScriptedPolicy(_speaker(self._function, sample.row))
        if self._replies is not None:
            texts = [message.text for message in self._replies.of(sample)]
        elif "replies" in sample.row:
            texts = _list_of_texts(sample.row["replies"], f"sample {sample.id!r}: replies")
        else:
            raise ConfigError(f"sample {sample.id!r} has no 'replies', and neither has the scripted user of its task")
        return ScriptedPolicy([{"type": "text", "content": text} for text in texts])


class UserSession:
    """The user of one episode.

    Args:
        policy: the session of the user's policy.
        instructions: its system message, [] where there is none.
        stop_phrase: ends the conversation.
        opens: the user speaks first; None where the task's messages decide.
        is_shared: the policy is not this session's to close.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        instructions: Sequence[Message],
        stop_phrase: str,
        opens: bool | None,
        *,
        is_shared: bool = False,
    ) -> None:
        self._policy, self._is_shared = policy, is_shared
        self._first = list(instructions)
        self._untold = "\n".join(message.text for message in instructions)
        self._stop_phrase, self._opens = stop_phrase, opens
        self._observation = ""
        self._heard: list[tuple[Message, Message | None]] = []

    def begins(self, messages: Sequence[Message], observation: str) -> bool:
        """Whether the user speaks first. Call it once, before `reply`.

        Args:
            messages: the task's first messages.
            observation: what the world shows at first, which one of them may be; the user does not see it.
        """
        self._observation = observation
        speaks_already = any(_is_of_user(message, observation) for message in messages)
        begins = not speaks_already if self._opens is None else self._opens
        if begins:
            self._first.append(Message(role="user", content=GREETING))
        return begins

    async def reply(self, messages: Sequence[Message]) -> UserTurn:
        """The user's next message.

        Args:
            messages: the conversation so far, as the agent sees it.

        Raises:
            PolicyError: the user's policy gave no action, or called a tool.
        """
        with _told_apart():
            output = await next_action(self._policy, self._as_heard(messages), None)
        action = output.action_structured
        if action["type"] not in ("text", "terminate"):
            raise PolicyError(f"{WHO} called a tool, and a user has none: {action!r:.200}")
        text = action.get("content") or ""
        stops = action["type"] == "terminate" or self._stop_phrase in text
        facts = _facts(output, text)
        if self._untold:  # The first answer's record says what the user was told; the conversation does not.
            facts["instructions"], self._untold = self._untold, ""
        return UserTurn(_without(self._stop_phrase, text) if stops else text, stops, facts)

    async def close(self) -> None:
        """Release what the session of the policy holds."""
        if not self._is_shared:
            await self._policy.close()

    def _as_heard(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation from the user's side. A message stays the same object, so that it is encoded once."""
        before: list[tuple[Message | None, Message | None]] = [*self._heard, *[(None, None)] * len(messages)]
        self._heard = [
            (message, known if old is message else heard_by_user(message, self._observation))
            for message, (old, known) in zip(messages, before, strict=False)
        ]
        return [*self._first, *(heard for _, heard in self._heard if heard is not None)]


def heard_by_user(message: Message, observation: str) -> Message | None:
    """One message as the user's policy sees it; None where it does not.

    Args:
        message: of the conversation as the agent sees it.
        observation: what the world showed at first, which one of the messages may be; "" where there is no world.
    """
    if message.role == "assistant" and not message.tool_calls and not message.function_call:
        return Message(role="user", content=message.text or NO_ANSWER)
    return Message(role="assistant", content=message.text) if _is_of_user(message, observation) else None


def _is_of_user(message: Message, observation: str) -> bool:
    return message.role == "user" and not (observation and message.text == observation)


class _RowTemplates:
    """Templates over a sample's row, compiled once."""

    def __init__(self, texts: Sequence[str], role: str) -> None:
        messages = [{"role": role, "content": text} for text in texts]
        self._prompt = Prompt(TaskDefinitionModel.model_validate({"name": "user", "messages": messages}))
        self._is_empty = not texts

    def of(self, sample: Sample) -> list[Message]:
        """One message for each text."""
        if self._prompt.shows_observation and "observation" not in sample.row:
            raise ConfigError("{{ observation }}: what the world shows is not for the user")
        return [] if self._is_empty else self._prompt.render(sample)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Say that a failure is the user's: in the record and the table it stands under the agent's name."""
    try:
        with boundary(PolicyError, WHO):
            yield
    except RewardKitError as error:
        if not str(error).startswith(WHO):
            error.args = (f"{WHO}: {error}", *error.args[1:])
        raise


def _without(phrase: str, text: str) -> str:
    """The text without the phrase, and with one gap where there was one on either side of it."""

    def gap(cut: re.Match[str]) -> str:
        return "\n" if "\n" in cut[0] else " "

    return re.sub(rf"\s+(?:{re.escape(phrase)}\s+)+", gap, text).replace(phrase, "").strip()


def _list_of_texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{what}: expected a list of texts, got {value!r:.80}")
    return list(value)


def _speaker(function: Callable[..., Any], row: Mapping[str, Any]) -> Callable[..., Any]:
    """A script for `ScriptedPolicy` that asks `function(conversation, row)` for a text."""

    async def speak(conversation: Sequence[Message], tools: object) -> Action:
        text = function(conversation, row)
        text = await text if inspect.isawaitable(text) else text
        if not isinstance(text, str):
            raise PolicyError(f"the function of a scripted user returns a text, not {text!r:.80}")
        return {"type": "text", "content": text}

    return speak


def _facts(output: PolicyOutput, text: str) -> dict[str, Any]:
    """What is known of one answer besides its text."""
    known = {key: value for key, value in (output.log_probs or {}).items() if value is not None}
    raw = text if output.raw_policy_output is None else output.raw_policy_output
    facts: dict[str, Any] = plain({"raw": raw, **known})
    return facts


AGENT, USER = "agent", "user"


class _Turn(NamedTuple):
    """One message of the user as it is recorded: what the agent read of it, None where they left without a word."""

    message: Message | None
    facts: Mapping[str, Any]

    def action(self) -> dict[str, Any]:
        """What the user did."""
        return {"type": "text", "content": self.message.text} if self.message else {"type": "terminate"}


def dialogue_of(episode: SingleAgentEpisode) -> MultiAgentEpisode:
    """The recorded conversation as an episode of the agents "agent" and "user".

    What the user said carries its raw text, usage and token ids, where they are known, as extra model outputs and in
    the tokens of the user's own episode. Where the user spoke last, that action is complete if the task ended with it,
    and hangs if the conversation was cut off or goes on. Nobody rewards the user: their rewards are unknown.

    Args:
        episode: as the worker records it, or read from a run. Its conversation and tokens are shared, not copied. A
            user who never came to speak is not in the dialogue.

    Raises:
        EpisodeError: what is recorded of the user's tokens contradicts itself.
    """
    dialogue = MultiAgentEpisode(episode.id_, agent_module_ids={AGENT: AGENT, USER: USER})
    if not episode.is_reset:
        return dialogue
    opening = _opening(episode)
    if opening is None:
        dialogue.add_env_reset(observations={AGENT: episode.get_observations(0)}, infos={AGENT: episode.get_infos(0)})
    else:
        dialogue.add_env_reset(observations={USER: GREETING})
        _add_turn(dialogue, episode, opening, t=-1)
    for t in range(len(episode)):
        _add_step(dialogue, episode, t)
    dialogue.is_terminated, dialogue.is_truncated = episode.is_terminated, episode.is_truncated
    dialogue.custom_data = episode.custom_data
    _share(dialogue.agent_episodes[AGENT], episode)
    if USER in dialogue.agent_ids:
        _write_conversation(dialogue.agent_episodes[USER], episode)
    return dialogue


def _opening(episode: SingleAgentEpisode) -> _Turn | None:
    """The user's first message, where they began."""
    facts = episode.get_infos(0).get(USER)
    if facts is None:
        return None
    before = _first_messages(episode)
    return _Turn(before[-1] if before and before[-1].role == "user" else None, facts)


def _first_messages(episode: SingleAgentEpisode) -> list[Message]:
    """What was said before the agent's first action. A policy may have made a prompt of its own of it."""
    if given := episode.get_infos(0).get("given_messages"):
        return [Message.model_validate(message) for message in given]
    turns = episode.assistant_turns
    return episode.messages[: turns[0] if len(turns) else len(episode.messages)]


def _turn_after(episode: SingleAgentEpisode, t: int) -> _Turn | None:
    """The user's answer to the t-th action; None where somebody else answered it."""
    facts = episode.get_infos(t + 1).get(USER)
    if facts is None:
        return None
    answers = episode.answers_to(t)
    return _Turn(answers[-1] if answers and answers[-1].role == "user" else None, facts)


def _add_step(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, t: int) -> None:
    """One recorded step: the agent's action alone, or that and the user's answer to it."""
    acts: dict[str, Any] = {"actions": {AGENT: episode.get_actions(t)}}
    outputs = {key: column.get(t) for key, column in episode.extra_model_outputs.items()}
    acts["extra_model_outputs"] = {AGENT: {key: value for key, value in outputs.items() if value is not None}}
    turn = _turn_after(episode, t)
    if turn is not None:
        dialogue.add_env_step({USER: _said(episode, t)}, rewards={}, **acts)
        _add_turn(dialogue, episode, turn, t)
        return
    is_last = t == len(episode) - 1
    heard = {USER: _said(episode, t)} if is_last and episode.get_actions(t).get("type") == "text" else {}
    waits = not heard and USER in dialogue.hanging_actions
    _add_answered(dialogue, episode, t, heard if USER in dialogue.agent_ids else {}, user_waits=waits, **acts)


def _add_turn(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, turn: _Turn, t: int) -> None:
    """The user's answer to the t-th action, and what the agent sees then; for t = -1 the opening."""
    info: dict[str, Any] = {}
    tokens = write_log_probs(turn.facts, dialogue.agent_episodes[USER], info)
    outputs = {"raw_policy_output": turn.facts.get("raw"), **info, **tokens}
    outputs = {key: value for key, value in outputs.items() if value is not None}
    acts = {"actions": {USER: turn.action()}, "extra_model_outputs": {USER: outputs}}
    _add_answered(dialogue, episode, t, {}, user_waits=True, **acts)


def _add_answered(
    dialogue: MultiAgentEpisode,
    episode: SingleAgentEpisode,
    t: int,
    heard: dict[str, Any],
    *,
    user_waits: bool,
    **acts: Any,
) -> None:
    """The environment's step with which the agent sees what came of its t-th action."""
    is_last = t == len(episode) - 1
    agents = {AGENT, USER} if t >= 0 else {USER}
    dialogue.add_env_step(
        {AGENT: episode.get_observations(t + 1), **heard},
        rewards={AGENT: _reward(episode, t)} if t >= 0 else {},
        infos={AGENT: episode.get_infos(t + 1)},
        terminateds=dict.fromkeys(agents, is_last and episode.is_terminated),
        # An action that hangs has no last observation to be cut off at.
        truncateds=dict.fromkeys(agents - {USER} if user_waits else agents, is_last and episode.is_truncated),
        **acts,
    )


def _reward(episode: SingleAgentEpisode, t: int) -> float | None:
    reward: float | None = episode.get_rewards(t)
    return reward if episode.get_infos(t + 1).get(REWARD, reward) is not None else None


def _said(episode: SingleAgentEpisode, t: int) -> str:
    return episode.messages[episode.assistant_turns[t]].text or NO_ANSWER


def _share(agent: SingleAgentEpisode, episode: SingleAgentEpisode) -> None:
    """Let the agent's part have the recorded conversation and tokens."""
    agent.id_, agent.custom_data = episode.id_, episode.custom_data
    agent.messages, agent.assistant_turns, agent.tokens = episode.messages, episode.assistant_turns, episode.tokens
    agent.is_terminated, agent.is_truncated = episode.is_terminated, episode.is_truncated


def _write_conversation(user: SingleAgentEpisode, episode: SingleAgentEpisode) -> None:
    """The conversation from the user's side: their instructions, what they heard, and their own messages as turns."""
    user.id_ = f"{episode.id_}-{USER}"
    opening, before = _opening(episode), _first_messages(episode)
    turns = [opening, *(_turn_after(episode, t) for t in range(len(episode)))]
    instructions = next((turn.facts.get("instructions") for turn in turns if turn is not None), None)
    if instructions:
        user.add_messages([Message(role="system", content=instructions)])
    if opening is not None:
        user.add_messages([Message(role="user", content=GREETING)])
    _write_stretch(user, episode, before, opening)
    for t, turn in enumerate(turns[1:]):
        _write_stretch(user, episode, [episode.messages[episode.assistant_turns[t]], *episode.answers_to(t)], turn)


def _write_stretch(
    user: SingleAgentEpisode, episode: SingleAgentEpisode, said: list[Message], turn: _Turn | None
) -> None:
    """Some messages of the conversation, the last of which may be the user's turn."""
    own = turn.message if turn is not None else None
    start = (episode.custom_data.get("start") or {}).get("fork")
    shown = episode.get_observations(0) if start is not None else ""
    heard = (heard_by_user(message, shown) for message in (said if own is None else said[:-1]))
    user.add_messages(message for message in heard if message is not None)
    if turn is not None:
        user.add_assistant_message(Message(role="assistant", content=own.text if own is not None else ""))
