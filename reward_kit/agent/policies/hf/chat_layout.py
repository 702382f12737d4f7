"""From messages to token ids: what a chat template adds for the messages that are new, and nothing twice.

A turn's context is the exact ids of the episode so far and the ids of what the template writes behind an answer: the
rest after its end token, the new messages, the generation prompt. That text is rendered from a short conversation of
stand-ins, tokenised once and remembered. It is right only where the template leaves earlier text as it was; whether it
does is tried out, with the real messages, before it is relied on.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from reward_kit.agent.actions import action_of
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, boundary
from reward_kit.models import Message

logger = logging.getLogger("reward_kit.agent")

Chat = dict[str, Any]

_Value = TypeVar("_Value")

_STAND_IN = "zq1stand2in"

_REMEMBERED = 8192

_REMEMBERED_TOKENS = 2_000_000  # about 100 MB, with the texts

_ROLES = "the chat template refuses this conversation"

_MARK = "zq3mark4"

_MARKER = mark_control_tokens("x", re.compile("x"))[0]

_OF_THE_WORLD = ("user", "tool", "function")


class Delta(NamedTuple):
    """What the template adds behind an answer: `ids`, and the `text` they are of."""

    ids: tuple[int, ...]
    text: str


class Tools(NamedTuple):
    """The tools of a turn as the template gets them; equal keys are equal tools."""

    key: str
    specs: Sequence[ToolSpec] | None


NO_TOOLS = Tools("", None)


class _Memory:
    """The most recent results, by what they were made of."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """What `make` gives; asked only where the key is new."""
        if key in self._known:
            self._known.move_to_end(key)
            found: _Value = self._known[key]
            return found
        made = self._known[key] = make()
        self._size += _size_of(made)
        while len(self._known) > _REMEMBERED or self._size > _REMEMBERED_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._size -= _size_of(oldest)
        return made


def _size_of(value: Any) -> int:
    """Tokens that are kept with a result."""
    return len(value.ids) if isinstance(value, Delta) else len(value) if isinstance(value, tuple) else 0


class ChatLayout:
    """One tokenizer and its chat template; shared by all sessions.

    Args:
        tokenizer: of the model.
        template: the chat template, where it is not the tokenizer's own.
        options: variables of the template, such as `enable_thinking`.

    Raises:
        ConfigError: there is no template, or it cannot lay out a question and an answer.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._template, self._options = tokenizer, template, dict(options or {})
        self._memory = _Memory()
        self._seen: tuple[str, ...] = _NAMES
        with boundary(ConfigError, "chat_template: the tokenizer has none that can be used; give one"):
            self.source: str = tokenizer.get_chat_template(template)
        self.shows_tools = "tools" in self.source
        """Whether tools can change what the template writes."""
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special or t.content in self.source)}
        longest_first = sorted(special, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        try:
            closing = self.delta([{"role": "user", "content": _MARK}], NO_TOOLS)
        except PolicyError as error:
            raise ConfigError(f"chat_template: {error}") from error.__cause__
        added_ids = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.end_id: int | None = closing.ids[0] if closing.ids and closing.ids[0] in added_ids else None
        """The token that the template puts behind an answer; None where it is ordinary text."""
        self.opening = closing.text.partition(_MARK)[2]
        """What the template writes between the last message and an answer."""
        self._seen = tuple(name for name in _NAMES if self._looks_at(name))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with no token added. What is no character, half a surrogate pair, is replaced."""
        text = _of_characters(text)
        if _MARKER in text:
            with boundary(PolicyError, "a message holds a control token, and it cannot be written as plain text"):
                marked: list[int] = encode_marked_chat(self._tokenizer, text)
            return marked
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encoded(self, text: str) -> tuple[int, ...]:
        """The ids of a text that may come again."""
        return self._memory.get(("text", text), lambda: tuple(self.encode(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def whole(self, chat: Sequence[Chat], tools: Tools) -> Delta:
        """A conversation from its beginning, up to where the model goes on.

        Raises:
            PolicyError: the template refuses it.
        """

        return self._memory.get(("whole", self._key(chat), tools.key), lambda: self.anew(chat, tools))

    def anew(self, chat: Sequence[Chat], tools: Tools) -> Delta:
        """As `whole`, for a conversation that will not come again."""
        text = self._render(chat, tools)
        return Delta(tuple(self.encode(text)), text)

    def delta(self, new: Sequence[Chat], tools: Tools) -> Delta:
        """What follows the text of an answer: its end token, the new messages, and the head of the next answer.

        Raises:
            PolicyError: the template refuses the messages.
        """
        return self._memory.get(("delta", self._key(new), tools.key), lambda: self._delta(new, tools))

    def _delta(self, new: Sequence[Chat], tools: Tools) -> Delta:
        said = _STAND_IN
        while any(said in each for each in (tools.key, *(message["content"] for message in new))):
            said += "x"
        question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": said}
        text = self._render([question, answer, *new], tools)
        if text.count(said) != 1:
            raise PolicyError("the chat template leaves out the last answer, or writes it twice")
        head, _, tail = text.partition(said)
        before, ids = self.encoded(head + said), self.encode(text)
        # Some tokenizers write a text differently at the beginning of a string.
        if tuple(ids[: len(before)]) == before:
            return Delta(tuple(ids[len(before) :]), tail)
        return Delta(tuple(self.encode(tail)), tail)

    def keeps(self, first: Sequence[Chat], new: Sequence[Chat], tools: Tools, *, reasons: bool) -> bool:
        """Whether new messages of these roles leave the text before them as it was.

        Tried out once for each sequence of roles, with two answers, of which an old one may be treated in another way
        than the last.

        Args:
            first: the messages that the conversation began with.
            new: what came after an answer.
            tools: those that stand in the prompt.
            reasons: answers hold reasoning.

        Raises:
            PolicyError: the template refuses the messages, or leaves some out.
        """
        roles = tuple(message["role"] for message in new)
        begun = tuple(message["role"] for message in first)
        key = ("keeps", begun, roles, tools.key if self.shows_tools else "", reasons)
        return self._memory.get(key, lambda: self._keeps(first, new, tools, reasons))

    def _keeps(self, first: Sequence[Chat], new: Sequence[Chat], tools: Tools, reasons: bool) -> bool:
        said = f"<think>\n{_STAND_IN}\n</think>\n\n{_STAND_IN}" if reasons else _STAND_IN
        answer, told = {"role": "assistant", "content": said}, [{**message, "content": _MARK} for message in new]
        begun, tail = self.whole(first, tools), self.delta(told, tools)
        if tail.text.count(_MARK) < len(told):
            raise PolicyError(
                f"the chat template leaves out messages of role {' or '.join(sorted({m['role'] for m in told}))}; give "
                "another chat_template, or for results of tools set tool_role: user"
            )
        whole = self._render([*first, answer, *told, answer, *told], tools)
        if whole != begun.text + (said + tail.text) * 2:
            return False
        ids = tuple(self.encode(whole))
        if ids[: len(begun.ids)] != begun.ids or ids[len(ids) - len(tail.ids) :] != tail.ids:
            logger.info("text between answers has other token ids by itself than in its place; it is given by itself")
        return True

    def _render(self, chat: Sequence[Chat], tools: Tools) -> str:
        # What the world says must not speak in another role, by writing the tokens that mark roles.
        safe = [self._marked(message) for message in chat]
        with boundary(PolicyError, f"{_ROLES} ({', '.join(message['role'] for message in chat)})"):
            text: str = self._tokenizer.apply_chat_template(
                safe,
                tools=self._safe_tools(tools),
                chat_template=self.source,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,
            )
        return text

    def _safe_tools(self, tools: Tools) -> list[Any] | None:
        """The specifications; a server of tools, too, has no say in who speaks."""
        specs: list[Any] = list(tools.specs or ())
        return (self._marked_in(specs) if self._control.search(tools.key) else specs) or None

    def _marked_in(self, value: Any) -> Any:
        """As `mark_control_tokens`, which leaves the names of parameters as they are."""
        if isinstance(value, Mapping):
            return {self._marked_in(key): self._marked_in(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked_in(each) for each in value]
        return mark_control_tokens(value, self._control)

    def _looks_at(self, name: str) -> bool:
        """Whether what is written may depend on a result's name or id; ids count turns, and equal texts come again."""
        if name in self.source:
            return True
        result = {"role": "tool", "content": "x", name: _MARK}
        try:
            return _MARK in self._render([{"role": "user", "content": "x"}, result], NO_TOOLS)
        except PolicyError:
            return True

    def _key(self, chat: Sequence[Chat]) -> Hashable:
        """Equal for conversations that are written alike; quick where all is text."""
        return tuple(
            (message["role"], message["content"], *(message.get(name) for name in self._seen))
            if isinstance(message.get("content"), str) and not message.keys() - _PLAIN
            else json.dumps(message, sort_keys=True)
            for message in chat
        )

    def _marked(self, message: Chat) -> Chat:
        if message["role"] not in _OF_THE_WORLD or not self._control.search(message["content"]):
            return message
        return {**message, "content": mark_control_tokens(message["content"], self._control)}


def _of_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_NAMES = ("tool_call_id", "name")

_PLAIN = {"role", "content", *_NAMES}


def to_chat(message: Message, tool_role: str = "tool") -> Chat:
    """A message as templates want it: content is text, arguments are mappings, what is None is left out.

    Args:
        message: of the conversation.
        tool_role: the role under which results of tools appear.
    """
    chat: Chat = {"role": message.role, "content": message.text}
    if message.role == "tool":
        chat["role"] = tool_role
        if tool_role != "tool":
            return chat
        chat |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            for call, arguments in zip(message.tool_calls, _arguments(message), strict=True)
        ]
    if message.reasoning_content:
        chat["reasoning_content"] = message.reasoning_content
    return chat


def _arguments(message: Message) -> list[Any]:
    action = action_of(message)
    calls = action.get("calls") or [action]
    return [call.get("arguments", call.get("arguments_text")) for call in calls]


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
