"""`SimulatedUser`, the user in a dialogue, which replies to the agent after each of the agent's turns.

A policy acts as the user. It sees the conversation from the user's perspective: the agent's messages have the role
"user", and the user's messages have the role "assistant". It does not see tool calls, tool results, the environment's
observation, or the task's system message. This is the setup of τ-bench (https://arxiv.org/abs/2406.12045), including
its stop signal.

`build_dialogue` converts a recorded conversation to an episode with two agents.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reward_kit.agent.actions import to_plain_data
from reward_kit.agent.models import LOG_PROBS_KEYS, write_log_probs
from reward_kit.agent.policies.simple_policies import ScriptedPolicy
from reward_kit.agent.policy_interface import (
    Action,
    AgentPolicy,
    EpisodeContext,
    PastTurn,
    PolicyOutput,
    next_action,
    open_session,
)
from reward_kit.agent.samples import Prompt, Sample, derive_seed
from reward_kit.agent.starts import EpisodeStart, Past
from reward_kit.episodes.episode_data import REWARD
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, PolicyError, RewardKitError, boundary
from reward_kit.models import Message, TaskDefinitionModel
from reward_kit.task_parts import STOP_PHRASE

if TYPE_CHECKING:
    from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode

GREETING = "Hello! What can I do for you?"
"""The first message shown to a user who speaks first. Many endpoints reject a conversation that has no user message."""
WHO = "the simulated user"
"""The user's name in messages and failures."""
NO_ANSWER = "(no answer)"
"""The text shown to the user when the agent's text is empty."""
AGENT, USER = "agent", "user"
Replies = Sequence[str] | Callable[[Sequence[Message], Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user message as the agent reads it. The turn may also end the conversation.

    The `facts` can be stored as JSON. They include the policy's raw output and, if known, the `usage`, the
    `finish_reason` and the token ids. In the first turn, they also include the `instructions` for the user.
    """

    text: str
    is_over: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def messages(self) -> list[Message]:
        """Return the messages to add to the conversation, or [] if the user ended it without text."""
        return [Message(role="user", content=self.text)] if self.text or not self.is_over else []


class SimulatedUser:
    """The simulated user for all episodes of a run.

    Args:
        policy: the policy that acts as the user. Its text actions are the user's messages, and a terminate action ends
            the conversation.
        instructions: the system message for this policy, as a template that is rendered with the sample's row.
        stop_phrase: a phrase that ends the conversation if a reply contains it. It is removed from the reply.
        opens: True if the user speaks first. By default, the user speaks first if the task has no user message.

    Raises:
        ConfigError: If a template cannot be compiled.
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
        """True if the user's replies are free of charge."""
        return self.policy.is_free

    @property
    def knows_cost(self) -> bool:
        """True if the reported usage of the user's replies includes their cost."""
        return self.policy.knows_cost

    def check(self, sample: Sample) -> None:
        """Render the templates for a sample, as `open` does.

        Raises:
            ConfigError: If a field is missing from the sample's row.
        """
        self._instructions.render(sample)

    async def open(self, start: EpisodeStart) -> UserSession:
        """Open the session of the user for one episode.

        The session's seed does not depend on the agent, so every agent meets the same user.
        """
        seed = derive_seed("user", start.seeds.run, start.sample.id, start.rollout_index)
        policy = self._policy_for(start.sample)
        context = EpisodeContext(start.rollout_id, seed, None, start.sample.id, start.rollout_index)
        instructions = self._instructions.render(start.sample)
        with _named_failures():
            session = await open_session(policy, context)
        is_shared = session is self.policy
        return UserSession(session, instructions, self._stop_phrase, opens=self._opens, is_shared=is_shared)

    def speaks_first(self, messages: Sequence[Message], observation: str) -> bool:
        """Return True if the user speaks first in an episode that starts with these messages and this observation."""
        return _speaks_first(self._opens, messages, observation)

    async def close(self) -> None:
        """Close the user's policy. Call this method once, after the last session."""
        await self.policy.close()

    def _policy_for(self, sample: Sample) -> AgentPolicy:
        return self.policy


class ScriptedUser(SimulatedUser):
    """A user who sends predefined replies and then ends the conversation.

    Args:
        replies: the replies in order, as templates that are rendered with the sample's row. Alternatively, a
            synchronous or asynchronous function that receives the row and the conversation as the user sees it, and
            returns a string. By default, the replies are taken from the row's `replies` field and are not rendered.
        instructions: the system message, which is passed to a function in `replies`; see `SimulatedUser`.
        stop_phrase: a phrase that ends the conversation; see `SimulatedUser`.
        opens: True if the user speaks first; see `SimulatedUser`.

    Raises:
        ConfigError: If `replies` has the wrong type, or a template cannot be compiled.
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
        given = None if replies is None or callable(replies) else _check_texts(replies, "replies")
        self._replies = None if given is None else _RowTemplates(given, "user")

    def check(self, sample: Sample) -> None:
        """Render the templates for a sample. If `replies` is not set, check that the row contains replies."""
        super().check(sample)
        self._policy_for(sample)

    def _policy_for(self, sample: Sample) -> AgentPolicy:
        if self._function is not None:
            function, row = self._function, sample.row

            async def speak(conversation: Sequence[Message], tools: object) -> Action:
                text = function(conversation, row)
                text = await text if inspect.isawaitable(text) else text
                if not isinstance(text, str):
                    raise PolicyError(f"the function of a scripted user must return a string, got {text!r:.80}")
                return {"type": "text", "content": text}

            return ScriptedPolicy(speak)
        if self._replies is not None:
            texts = [message.text for message in self._replies.render(sample)]
        elif "replies" in sample.row:
            texts = _check_texts(sample.row["replies"], f"sample {sample.id!r}: replies")
        else:
            raise ConfigError(
                f"sample {sample.id!r} has no 'replies', and the scripted user of the task does not define any"
            )
        return ScriptedPolicy([{"type": "text", "content": text} for text in texts])


class UserSession:
    """The user of one episode.

    If all episodes share one session of the policy, the session is not closed with the episode.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        instructions: Sequence[Message],
        stop_phrase: str,
        *,
        opens: bool | None,
        is_shared: bool,
    ) -> None:
        self._policy, self._is_shared = policy, is_shared
        self._first = list(instructions)
        self._unrecorded = "\n".join(message.text for message in instructions)
        self._stop_phrase, self._opens = stop_phrase, opens
        self._observation = ""
        self._heard: list[tuple[Message, Message | None]] = []

    def speaks_first(self, messages: Sequence[Message], observation: str) -> bool:
        """Return True if the user speaks first. Call this method once, before `reply`.

        The task's first messages may include the environment's first observation, which is hidden from the user.
        """
        self._observation = observation
        if speaks_first := _speaks_first(self._opens, messages, observation):
            self._first.append(Message(role="user", content=GREETING))
        return speaks_first

    async def resume(self, past: Past) -> None:
        """Continue a conversation with recorded user messages. Call this method instead of `speaks_first`.

        Raises:
            PolicyError: If the user's policy cannot continue these turns.
        """
        episode, self._observation = past.episode, past.observation
        opening = episode.get_infos(0).get("user")
        if opening is not None:
            self._first.append(Message(role="user", content=GREETING))
        answers = [(episode.assistant_turns[t] + 1, episode.get_infos(t + 1).get("user")) for t in range(len(episode))]
        if opening is not None:
            end = episode.assistant_turns[0] if len(episode) else len(episode.messages)
            spoke = UserTurn(opening["raw"], facts=opening).messages() if opening else []
            answers.insert(0, (end - len(spoke), opening))
        turns = []
        for end, facts in answers:
            if facts is None:
                continue
            heard = (to_user_view(message, self._observation) for message in episode.messages[:end])
            output = PolicyOutput(
                {"type": "text", "content": facts["raw"]},
                facts["raw"],
                {key: facts[key] for key in LOG_PROBS_KEYS & facts.keys()},
            )
            turns.append(PastTurn([*self._first, *(message for message in heard if message)], None, output))
        if turns:
            self._unrecorded = ""
        if not self._is_shared:
            with _named_failures():
                await self._policy.resume(turns)

    async def reply(self, messages: Sequence[Message], form: str | None = None) -> UserTurn:
        """Return the next message of the user.

        Args:
            messages: the conversation as the agent sees it.
            form: a question from the environment, which follows the conversation but does not become part of it.

        Raises:
            PolicyError: If the user's policy did not return an action, or called a tool.
        """
        # Keep each message the same object from turn to turn, so that the policy encodes it only once.
        seen: list[tuple[Message | None, Message | None]] = [*self._heard, *[(None, None)] * len(messages)]
        self._heard = [
            (message, known if previous is message else to_user_view(message, self._observation))
            for message, (previous, known) in zip(messages, seen, strict=False)
        ]
        conversation = [*self._first, *(heard for _, heard in self._heard if heard is not None)]
        if form is not None:
            conversation.append(Message(role="user", content=form))
        with _named_failures():
            output = await next_action(self._policy, conversation, None, label=WHO)
        action = output.action_structured
        if action["type"] not in ("text", "terminate"):
            raise PolicyError(f"{WHO} called a tool, but it has no tools: {action!r:.200}")
        text = action.get("content") or ""
        stops = action["type"] == "terminate" or self._stop_phrase in text
        known = {key: value for key, value in (output.log_probs or {}).items() if value is not None}
        raw = text if output.raw_policy_output is None else output.raw_policy_output
        facts: dict[str, Any] = to_plain_data({"raw": raw, **known})
        if self._unrecorded and form is None:
            # The conversation does not contain the instructions, so record them with the first reply.
            facts["instructions"], self._unrecorded = self._unrecorded, ""
        if stops:  # keep one space or line break if the phrase had some on both sides
            pattern = rf"\s+(?:{re.escape(self._stop_phrase)}\s+)+"
            text = re.sub(pattern, lambda cut: "\n" if "\n" in cut[0] else " ", text)
            text = text.replace(self._stop_phrase, "").strip()
        return UserTurn(text, stops, facts)

    async def close(self) -> None:
        """Close the session of the policy, unless it is shared."""
        if not self._is_shared:
            await self._policy.close()


def to_user_view(message: Message, observation: str) -> Message | None:
    """Return a message as the user's policy sees it, or None if the message is hidden.

    The environment's `observation` is hidden.
    """
    if message.role == "assistant" and not message.tool_calls and not message.function_call:
        return Message(role="user", content=message.text or NO_ANSWER)
    return Message(role="assistant", content=message.text) if _is_from_user(message, observation) else None


def _speaks_first(opens: bool | None, messages: Sequence[Message], observation: str) -> bool:
    return not any(_is_from_user(message, observation) for message in messages) if opens is None else opens


def _is_from_user(message: Message, observation: str) -> bool:
    return message.role == "user" and not (observation and message.text == observation)


class _RowTemplates:
    """Templates that are compiled once and rendered with each sample's row."""

    def __init__(self, texts: Sequence[str], role: str) -> None:
        messages = [{"role": role, "content": text} for text in texts]
        self._prompt = Prompt(TaskDefinitionModel.model_validate({"name": "user", "messages": messages}))
        self._is_empty = not texts

    def render(self, sample: Sample) -> list[Message]:
        if self._prompt.shows_observation and "observation" not in sample.row:
            raise ConfigError(
                "the user's templates contain {{ observation }}, but the user does not see the environment; remove it"
            )
        return [] if self._is_empty else self._prompt.render(sample)


@contextmanager
def _named_failures() -> Iterator[None]:
    """Prefix the message of a failure with the name of the user.

    Records and tables list such a failure under the label of the agent.
    """
    try:
        with boundary(PolicyError, WHO):
            yield
    except RewardKitError as error:
        if not str(error).startswith(WHO):
            error.args = (f"{WHO}: {error}", *error.args[1:])
        raise


def _check_texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{what} must be a list of strings, got {value!r:.80}")
    return list(value)


class _UserTurn(NamedTuple):
    """A recorded user message. The message is `None` if the user ended the conversation without text."""

    message: Message | None
    facts: Mapping[str, Any]


def build_dialogue(episode: SingleAgentEpisode) -> MultiAgentEpisode:
    """Return a recorded conversation as an episode with an "agent" and a "user".

    Either of them can be inspected or trained.

    Each action of either agent is one step of the environment. The episode of the agent is the recorded one, with the
    same conversation and tokens. The user observes the text of the agent, and the user's replies are its actions. If
    the raw text and usage of the user's messages are known, they become extra model outputs. If the token ids of these
    messages are known, they become the tokens of the user's episode.

    If the user spoke last and the task ended with that message, the user's action is complete. If the conversation was
    cut off or continues, the action is left hanging. The user's rewards are unknown. A user who never spoke is omitted.

    Raises:
        EpisodeError: If the user's recorded tokens are inconsistent.
    """
    from reward_kit.episodes.multi_agent_episode import MultiAgentEpisode

    dialogue = MultiAgentEpisode(episode.id_, agent_module_ids={AGENT: AGENT, USER: USER})
    if not episode.is_reset:
        return dialogue
    opening = _user_turn(episode, -1)
    if opening is None:
        dialogue.add_env_reset(observations={AGENT: episode.get_observations(0)}, infos={AGENT: episode.get_infos(0)})
    else:
        dialogue.add_env_reset(observations={USER: GREETING})
        _add_turn(dialogue, episode, opening, t=-1)
    for t in range(len(episode)):
        _add_step(dialogue, episode, t)
    dialogue.is_terminated, dialogue.is_truncated = episode.is_terminated, episode.is_truncated
    dialogue.custom_data = episode.custom_data
    agent = dialogue.agent_episodes[AGENT]
    agent.id_, agent.custom_data = episode.id_, episode.custom_data
    agent.messages, agent.assistant_turns, agent.tokens = episode.messages, episode.assistant_turns, episode.tokens
    agent.is_terminated, agent.is_truncated = episode.is_terminated, episode.is_truncated
    if USER in dialogue.agent_ids:
        _add_user_conversation(dialogue.agent_episodes[USER], episode)
    return dialogue


def _user_turn(episode: SingleAgentEpisode, t: int) -> _UserTurn | None:
    """Return the user's reply to the t-th action, or None if the user did not reply.

    For -1, return the opening message.
    """
    facts = episode.get_infos(t + 1).get(USER)
    if facts is None:
        return None
    messages = _messages_after(episode, t)
    return _UserTurn(messages[-1] if messages and messages[-1].role == "user" else None, facts)


def _messages_after(episode: SingleAgentEpisode, t: int) -> list[Message]:
    """Return the messages that followed the t-th action. For -1, return the task's first messages."""
    if t >= 0:
        return episode.answers_to(t)
    if given := episode.get_infos(0).get("given_messages"):
        return [Message.model_validate(message) for message in given]
    turns = episode.assistant_turns
    return episode.messages[: turns[0] if len(turns) else len(episode.messages)]


def _add_step(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, t: int) -> None:
    """Add one recorded step: the agent's action and, if there is one, the user's reply."""
    outputs = {key: column.get(t) for key, column in episode.extra_model_outputs.items()}
    acts: dict[str, Any] = {
        "actions": {AGENT: episode.get_actions(t)},
        "extra_model_outputs": {AGENT: {key: value for key, value in outputs.items() if value is not None}},
    }
    text = episode.messages[episode.assistant_turns[t]].text or NO_ANSWER
    turn = _user_turn(episode, t)
    if turn is not None:
        dialogue.add_env_step({USER: text}, rewards={}, **acts)
        _add_turn(dialogue, episode, turn, t)
        return
    is_last = t == len(episode) - 1
    heard = {USER: text} if is_last and episode.get_actions(t).get("type") == "text" else {}
    waits = not heard and USER in dialogue.hanging_actions
    _add_answered(dialogue, episode, t, heard if USER in dialogue.agent_ids else {}, user_waits=waits, **acts)


def _add_turn(dialogue: MultiAgentEpisode, episode: SingleAgentEpisode, turn: _UserTurn, t: int) -> None:
    """Add the user's reply to the t-th action and the next observation of the agent.

    For the opening message, t is -1.
    """
    info: dict[str, Any] = {}
    tokens = write_log_probs(turn.facts, dialogue.agent_episodes[USER], info)
    outputs = {"raw_policy_output": turn.facts.get("raw"), **info, **tokens}
    outputs = {key: value for key, value in outputs.items() if value is not None}
    action = {"type": "text", "content": turn.message.text} if turn.message else {"type": "terminate"}
    acts = {"actions": {USER: action}, "extra_model_outputs": {USER: outputs}}
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
    """Add the environment step in which the agent observes the results of its t-th action."""
    is_last = t == len(episode) - 1
    agents, rewards = {USER}, {}
    if t >= 0:
        reward: float | None = episode.get_rewards(t)
        agents.add(AGENT)
        rewards[AGENT] = reward if episode.get_infos(t + 1).get(REWARD, reward) is not None else None
    dialogue.add_env_step(
        {AGENT: episode.get_observations(t + 1), **heard},
        rewards=rewards,
        infos={AGENT: episode.get_infos(t + 1)},
        terminateds=dict.fromkeys(agents, is_last and episode.is_terminated),
        # A hanging action has no final observation at which to truncate.
        truncateds=dict.fromkeys(agents - {USER} if user_waits else agents, is_last and episode.is_truncated),
        **acts,
    )


def _add_user_conversation(user: SingleAgentEpisode, episode: SingleAgentEpisode) -> None:
    """Add the conversation from the user's perspective.

    It consists of the instructions, the messages that the user saw, and the user's replies.
    """
    user.id_ = f"{episode.id_}-{USER}"
    turns = [_user_turn(episode, t) for t in range(-1, len(episode))]
    instructions = next((turn.facts.get("instructions") for turn in turns if turn is not None), None)
    if instructions:
        user.add_messages([Message(role="system", content=instructions)])
    if turns[0] is not None:
        user.add_messages([Message(role="user", content=GREETING)])
    is_forked = (episode.custom_data.get("start") or {}).get("fork") is not None
    observation = episode.get_observations(0) if is_forked else ""
    for t, turn in enumerate(turns, start=-1):
        messages = _messages_after(episode, t)
        if t >= 0:
            messages = [episode.messages[episode.assistant_turns[t]], *messages]
        own = turn.message if turn is not None else None
        heard = (to_user_view(message, observation) for message in (messages if own is None else messages[:-1]))
        user.add_messages(message for message in heard if message is not None)
        if turn is not None:
            user.add_assistant_message(Message(role="assistant", content=own.text if own is not None else ""))
