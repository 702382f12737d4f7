"""One episode's context: the exact ids so far, and how they go on with every turn, or why they are written anew."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from reward_kit.agent.policies.hf.chat_layout import NO_TOOLS, Chat, ChatLayout, Delta, Tools, to_chat
from reward_kit.environments.base import ToolSpec
from reward_kit.models import Message

TOOLS_CHANGED = "tools changed"
CONVERSATION_CHANGED = "conversation changed"
REASONING_LEFT_OUT = "chat template leaves out earlier reasoning"
TEMPLATE_REWRITES = "chat template rewrites earlier turns"
_REASONED = "</think>"
_TOOLS = json.JSONEncoder(default=str, ensure_ascii=False)


def tools_given(specs: Sequence[ToolSpec] | None) -> Tools:
    """The tools of a turn, under a key that says what they are."""
    # Not compared with those of the turn before: a world may change its specifications in place.
    return Tools(_TOOLS.encode(specs), specs) if specs else NO_TOOLS


class Prompt(NamedTuple):
    """What the model is given in one turn.

    Attributes:
        ids: the whole context.
        reason: why it does not go on from what was there before; None where it does.
    """

    ids: list[int]
    reason: str | None


class Conversation:
    """The context of one episode.

    Args:
        layout: of the model.
        stop_ids: the tokens that end an answer.
        tools_in_prompt: whether the template is given the tools.
        tool_role: the role under which results of tools appear.
    """

    def __init__(self, layout: ChatLayout, stop_ids: Collection[int], *, tools_in_prompt: bool, tool_role: str) -> None:
        self._layout, self._stop_ids, self._tool_role = layout, stop_ids, tool_role
        self._shows_tools = tools_in_prompt and layout.shows_tools
        self._ids: list[int] = []
        self._first: list[Chat] = []
        self._chat: list[Chat] = []
        self._tools = NO_TOOLS
        self._ended = self._asks = False
        self._reasoned: set[bool] = set()  # of the answers that stand in the context as they were sampled

    def prompt(self, observation: Sequence[Message], tools: Tools) -> Prompt:
        """The context of the next turn.

        Args:
            observation: the whole conversation; what came after the last answer is new.
            tools: those that can be called now.

        Raises:
            PolicyError: the chat template refuses the messages.
        """
        tools = tools if self._shows_tools else NO_TOOLS
        if not self._chat:
            self._first = self._chat = [to_chat(message, self._tool_role) for message in observation]
            return self._begin(self._layout.whole(self._chat, tools), tools, None)
        seen = len(self._chat)
        if self._asks and len(observation) == seen and tools.key == self._tools.key:
            return Prompt(list(self._ids), None)  # it was asked before, and nobody answered
        new = [to_chat(message, self._tool_role) for message in observation[seen:]]
        if self._asks or len(observation) < seen or any(chat["role"] == "assistant" for chat in new):
            self._first = self._chat = [to_chat(message, self._tool_role) for message in observation]
            return self._begin(self._layout.anew(self._chat, tools), tools, CONVERSATION_CHANGED)
        reason = self._why_anew(new, tools)
        self._chat = [*self._chat, *new]
        if reason is not None:
            return self._begin(self._layout.anew(self._chat, tools), tools, reason)
        added = self._layout.delta(new, tools).ids
        # The end token was sampled; where it was not, because the answer was cut, the template's stands here.
        self._ids += added[1:] if self._ended and added and added[0] in self._stop_ids else added
        self._asks = True
        return Prompt(list(self._ids), None)

    def answered(self, token_ids: Sequence[int], text: str) -> None:
        """Take note of what was sampled.

        Args:
            token_ids: all of it.
            text: without the token that ended it.
        """
        self._ids += token_ids
        self._asks = False
        self._chat = [*self._chat, {"role": "assistant", "content": text}]
        self._ended = bool(token_ids) and token_ids[-1] in self._stop_ids
        self._reasoned.add(_REASONED in text)

    def _begin(self, whole: Delta, tools: Tools, reason: str | None) -> Prompt:
        self._ids, self._tools, self._reasoned, self._asks = list(whole.ids), tools, set(), True
        return Prompt(list(self._ids), reason)

    def _why_anew(self, new: Sequence[Chat], tools: Tools) -> str | None:
        if tools.key != self._tools.key:
            return TOOLS_CHANGED
        # A template may drop reasoning, and it may put an empty one where there was none.
        for reasons in self._reasoned:
            if not self._layout.keeps(self._first, new, tools, reasons=reasons):
                return REASONING_LEFT_OUT if reasons else TEMPLATE_REWRITES
        return None
