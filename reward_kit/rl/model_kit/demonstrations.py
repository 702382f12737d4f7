"""What an expert did, as the tokens that a model would have sampled to do it: the rows of a warm start.

A prompt is laid out by the `Conversation` that lays it out for `HFAgentPolicy`, and an action is written by the action
format that reads it there; so a model sees while training what it will see while acting.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from reward_kit.agent.actions import assistant_message
from reward_kit.agent.policies.hf.action_formats import FORMATS, ActionFormat, Plain, Tool, find_action_format, tools_of
from reward_kit.agent.policies.hf.chat_layout import ChatLayout, Conversation, tools_given
from reward_kit.agent.policies.hf.constraints import TokenConstraint, TurnConstraints
from reward_kit.agent.policy_interface import Action, AgentPolicy, EpisodeContext, PolicyOutput, tool_calls_of
from reward_kit.environments.base import ToolSpec
from reward_kit.episodes.segments import REWRITTEN, EpisodeTokens
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import ConfigError, PolicyError, did_you_mean
from reward_kit.models import Message

logger = logging.getLogger("reward_kit.rl")

Specs = Sequence[ToolSpec] | None
ToolsOf = Callable[[SingleAgentEpisode, int], Specs]
TaughtOf = Callable[[SingleAgentEpisode, int], bool]

_TEXT = Plain()  # where there is no tool, everything is a text
_ANY_LENGTH = 2**31


class Demonstrations:
    """Writes what was done as the tokens of one model. Its options are those of the `HFAgentPolicy` that will act.

    Args:
        tokenizer: of the model, with its chat template.
        action_format: how it writes tool calls.
        constrain: record what the policy's constraint would have allowed at each token, so that `SFTConfig` with
            `use_allowed_ids` trains under the masks under which the model will act.
        tools_in_prompt: the template is shown the tools.
        tool_role: the role under which results of tools appear, "tool" or "user".
        chat_template: where it is not the tokenizer's own.
        template_options: variables of the chat template.
        max_context: an action that ends beyond so many tokens is left out, and those after it; None: none is.

    Raises:
        ConfigError: the tokenizer has no chat template, or there is no such format.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        action_format: str = "auto",
        constrain: bool = False,
        tools_in_prompt: bool = True,
        tool_role: str = "tool",
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> None:
        self._layout = ChatLayout(tokenizer, chat_template, template_options)
        self._unknown = tokenizer.unk_token_id
        self._form = find_action_format(action_format, tokenizer, self._layout.source)
        end = self._layout.end_id if self._layout.end_id is not None else tokenizer.eos_token_id
        if not isinstance(end, int):
            raise ConfigError("tokenizer: nothing ends an answer: it has no eos_token, and the chat template none")
        self._end, self._max_context = end, max_context
        self._constraints = TurnConstraints(self._layout, tokenizer, end, _ANY_LENGTH) if constrain else None
        self._in_prompt = {"tools_in_prompt": tools_in_prompt, "tool_role": tool_role}

    def __call__(
        self,
        episodes: Iterable[SingleAgentEpisode],
        tools: Specs | ToolsOf = None,
        *,
        taught: TaughtOf | None = None,
    ) -> list[SingleAgentEpisode]:
        """Copies of the episodes with the tokens of every action; `build_rows` makes rows of them.

        Log-probabilities are unknown. An action that only ends the episode has no tokens. Pieces of text that are not
        in the vocabulary are counted in the log.

        Args:
            episodes: with messages, as the rollout worker records them.
            tools: what `get_tools_spec` of the episodes' resource gives, or a function of an episode and a step where
                it is not always the same; None where no calls are made.
            taught: whether the action of an episode's step is to be learned; one that is not, such as a slip, stands
                in the context of those after it. None: every action is.

        Raises:
            ConfigError: an action cannot be written in this format so that it is read as the same action.
        """
        of: ToolsOf = tools if callable(tools) else lambda episode, step: tools
        made = [self._with_tokens(episode, of, taught) for episode in episodes]
        if self._unknown is not None:
            unknown = sum(episode.tokens.ids.count(self._unknown) for episode in made)
            total = sum(len(episode.tokens) for episode in made)
            log = logger.warning if unknown else logger.debug
            log("%d of the %d tokens of %d demonstrations are not in the vocabulary", unknown, total, len(made))
        return made

    def _with_tokens(self, episode: SingleAgentEpisode, tools: ToolsOf, taught: TaughtOf | None) -> SingleAgentEpisode:
        made = copy.copy(episode)
        made.tokens = EpisodeTokens()
        writer = self.begin()
        for step, turn in enumerate(episode.assistant_turns):
            try:
                said = writer.said(episode.get_actions(step), episode.messages[:turn], tools(episode, step))
            except PolicyError as error:
                raise ConfigError(f"episode {episode.id_}, step {step}: {error}") from error
            if said is None:
                break
            reason = said.pop("segment_reason", REWRITTEN)
            if taught is not None and not taught(episode, step):
                continue
            made.tokens.add_turn(step, **said, reason=reason)
        return made

    def begin(self) -> Writer:
        """What writes the actions of one more episode."""
        conversation = Conversation(self._layout, {self._end}, **self._in_prompt)  # type: ignore[arg-type]
        return Writer(self, conversation)

    def text_of(self, action: Action, tools: Sequence[Tool]) -> str:
        """What the model writes to do this.

        Raises:
            PolicyError: it cannot be written so that it is read as the same action.
        """
        form = self._form_of(tools)
        text = _written(action, tools, form)
        if _chat_of(read := form.action(text, tools)) != _chat_of(action):
            raise PolicyError(
                f"action_format {form.name} reads {text!r} as {read!r}, not as {action!r}; take another action_format"
                + ("" if tools else ", or give the tools that are called")
            )
        return text

    def _form_of(self, tools: Sequence[Tool]) -> ActionFormat:
        if not tools:
            return _TEXT
        if isinstance(self._form, PolicyError):
            raise PolicyError(str(self._form))
        self._form.check(tools)
        return self._form

    def facts(self, conversation: Conversation, action: Action, seen: Sequence[Message], specs: Specs) -> Any:
        """`Writer.said`, of any episode's conversation."""
        given, tools = tools_given(specs), tools_of(specs)
        text = self.text_of(action, tools)
        prompt = conversation.prompt(seen, given)
        answer = [*self._layout.encoded(text), self._end]
        if self._max_context is not None and len(prompt.ids) + len(answer) > self._max_context:
            return None
        conversation.answered(answer, text)
        said: dict[str, Any] = {"prompt_ids": prompt.ids, "token_ids": answer}
        if prompt.reason is not None:
            said["segment_reason"] = prompt.reason
        if self._constraints is not None and tools:
            said["allowed_ids"] = _allowed(self._constraints.start(given.key, tools, self._form_of(tools)), answer)
        return said


class Writer:
    """Writes the actions of one episode, one after another.

    Args:
        demonstrations: how.
        conversation: the context so far.
    """

    def __init__(self, demonstrations: Demonstrations, conversation: Conversation) -> None:
        self._demonstrations, self._conversation = demonstrations, conversation
        self._is_full = False

    def said(self, action: Action, seen: Sequence[Message], specs: Specs) -> dict[str, Any] | None:
        """The tokens of the next action.

        Args:
            action: what is done.
            seen: the whole conversation before it.
            specs: the tools that can be called.

        Returns:
            `prompt_ids`, `token_ids`, and where there are any `segment_reason` and `allowed_ids`, as in
            `PolicyOutput.log_probs`; None for an action that only ends the episode, and where the context is full.

        Raises:
            PolicyError: the action cannot be written, or the constraint does not allow it.
        """
        if action["type"] == "terminate" or self._is_full:
            return None
        found: dict[str, Any] | None = self._demonstrations.facts(self._conversation, action, seen, specs)
        self._is_full = found is None
        return found


class DemonstratingPolicy(AgentPolicy):
    """Acts as another policy does, and says the tokens that a model would have sampled to do it.

    For worlds whose tools are not always the same: the record of an episode does not keep them, and here they are seen.

    Args:
        expert: who acts.
        demonstrations: how it is written.
        taught: whether what the expert put out is to be learned; what is not, such as a slip, stands in the context of
            what comes after it. None: everything is.
    """

    is_free = True

    def __init__(
        self,
        expert: AgentPolicy,
        demonstrations: Demonstrations,
        *,
        taught: Callable[[PolicyOutput], bool] | None = None,
    ) -> None:
        self._expert, self._demonstrations, self._taught = expert, demonstrations, taught
        self._writer = demonstrations.begin()

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        """The expert's session, with a context of its own."""
        return DemonstratingPolicy(await self._expert.open(context), self._demonstrations, taught=self._taught)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        """The expert's action, with its tokens.

        Raises:
            PolicyError: the expert failed, or its action cannot be written.
        """
        output = await self._expert.get_action(observation, available_tools_specs)
        said = self._writer.said(output.action_structured, observation, available_tools_specs)
        if self._taught is not None and not self._taught(output):
            said = None
        return output._replace(log_probs={**(output.log_probs or {}), **(said or {})} or None)

    async def see_end(self, messages: Sequence[Message]) -> None:
        """Let the expert see it."""
        await self._expert.see_end(messages)

    async def close(self) -> None:
        """Close the expert's session."""
        await self._expert.close()


def episode_texts(
    episodes: Iterable[SingleAgentEpisode], *, action_format: str = "plain", tools: Specs = None
) -> list[str]:
    """All texts of episodes, for the vocabulary of a tokenizer: what messages say, and what actions will be written as.

    Args:
        episodes: with messages.
        action_format: hermes, llama, mistral, plain or bare.
        tools: what `get_tools_spec` gives.

    Raises:
        ConfigError: there is no such format.
        PolicyError: it cannot write an action.
    """
    if action_format not in FORMATS:
        raise ConfigError(f"action_format: {action_format!r}{did_you_mean(action_format, FORMATS)}")
    form, known = FORMATS[action_format](), tools_of(tools)
    texts: list[str] = []
    for episode in episodes:
        turns = set(episode.assistant_turns)
        texts += (message.text for place, message in enumerate(episode.messages) if place not in turns)
        texts += (_written(episode.get_actions(step), known, form) for step in range(len(episode)))
    return texts


def _written(action: Action, tools: Sequence[Tool], form: ActionFormat) -> str:
    calls = [form.write(_named(call["name"], tools), call.get("arguments") or {}) for call in tool_calls_of(action)]
    text = "\n".join([*([action["content"]] if action.get("content") else []), *calls])
    reasoning = action.get("reasoning_content")
    return f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text


def _named(name: str, tools: Sequence[Tool]) -> Tool:
    return next((tool for tool in tools if tool.name == name), Tool(name, {"type": "object"}))


def _chat_of(action: Action) -> dict[str, Any]:
    """The action as a message, without the ids of its calls."""
    chat = assistant_message(action, 0).to_chat()
    for call in chat.get("tool_calls", ()):
        del call["id"]
    return {**chat, "content": chat["content"] or ""}


def _allowed(rule: TokenConstraint, answer: Sequence[int]) -> list[Any]:
    """What the constraint allowed at each token of an answer."""
    allowed = []
    for token in answer:
        if rule.is_done:
            raise PolicyError("the constraint ends this action before it is said")
        allowed.append(rule.allowed())
        rule.advance(token)
    return allowed
