"""Conversion of messages to token ids with a chat template, without tokenizing any text twice.

The context of a turn consists of the exact ids of the episode so far, followed by the ids of the text that the template
adds after an answer: the rest of the template after the end token of the answer, the new messages, and the generation
prompt. That text is rendered from a short conversation with placeholders, tokenized once, and cached. This works only
if the template does not change earlier text, which is tested first.
"""

from __future__ import annotations

import json
import logging
import marshal
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from transformers.utils.chat_template_utils import encode_marked_chat, mark_control_tokens

from reward_kit.agent.message_actions import parse_action
from reward_kit.environments.base import ToolSpec
from reward_kit.errors import ConfigError, PolicyError, boundary
from reward_kit.models import Message

logger = logging.getLogger("reward_kit.agent")

# Reasons why a context is rewritten.
TOOLS_CHANGED = "tools changed"
CONVERSATION_CHANGED = "conversation changed"
REASONING_LEFT_OUT = "chat template leaves out earlier reasoning"
TEMPLATE_REWRITES = "chat template rewrites earlier turns"
Chat = dict[str, Any]
_Value = TypeVar("_Value")
_PLACEHOLDER, _MARK = "zq1stand2in", "zq3mark4"
_MARKER = mark_control_tokens("x", re.compile("x"))[0]
_CACHED_RESULTS = 8192
_CACHED_TOKENS = 2_000_000  # about 100 MB, including the texts
_UNTRUSTED_ROLES = ("user", "tool", "function")
_NAMES = ("tool_call_id", "name")
_PLAIN_KEYS = {"role", "content", *_NAMES}
_THINK_END = "</think>"
_TOOLS_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)


class Delta(NamedTuple):
    """The text that the template adds after an answer, and its token ids."""

    ids: tuple[int, ...]
    text: str


class Tools(NamedTuple):
    """The tools of a turn as passed to the template. If two keys are equal, the tools are equal as well."""

    key: str
    specs: Sequence[ToolSpec] | None


NO_TOOLS = Tools("", None)


def tools_given(specs: Sequence[ToolSpec] | None) -> Tools:
    """Return the tools of a turn and their key.

    The key is looked up in each turn, because specifications may be modified in place.
    """
    if not specs:
        return NO_TOOLS
    content: Any = specs
    try:
        # This is much faster than encoding JSON. In version 2 of the format, equal values have equal bytes.
        return Tools(_tools_key(marshal.dumps(content, 2)), specs)
    except ValueError:
        return Tools(_TOOLS_ENCODER.encode(specs), specs)


@lru_cache(maxsize=1024)
def _tools_key(content: bytes) -> str:
    return _TOOLS_ENCODER.encode(marshal.loads(content))


class ChatLayout:
    """A tokenizer, its chat template, and the template's options. All sessions share this object.

    Attributes:
        source: the source of the chat template.
        shows_tools: True if tools can change the template's output.
        end_id: the token that the template adds at the end of an answer, or None if it adds ordinary text.
        opening: the text that the template adds between the last message and an answer.

    Raises:
        ConfigError: If the template is missing, or cannot render a question and an answer.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._options = tokenizer, dict(options or {})
        self._cache = RecentResults(_CACHED_RESULTS)
        self._key_names: tuple[str, ...] = _NAMES
        with boundary(ConfigError, "chat_template: the tokenizer has no usable template; set chat_template"):
            self.source: str = tokenizer.get_chat_template(template)
        self.shows_tools = "tools" in self.source
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
        self.opening = closing.text.partition(_MARK)[2]
        # The text may depend on a result's name or id, which can differ between equal texts.
        self._key_names = tuple(name for name in _NAMES if name in self.source or self._writes(name))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a string, without adding special tokens. Lone surrogates are replaced."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if _MARKER in text:
            with boundary(PolicyError, "a message contains a control token that cannot be encoded as plain text"):
                marked: list[int] = encode_marked_chat(self._tokenizer, text)
            return marked
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encoded(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a string from the cache. Use this method for strings that may occur again."""
        return self._cache.get(("text", text), lambda: tuple(self.encode(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids, including special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def whole(self, chat: Sequence[Chat], tools: Tools) -> Delta:
        """Render a conversation from its beginning up to the next answer.

        Raises:
            PolicyError: If the template rejects the conversation.
        """
        return self._cache.get(("whole", self._key(chat), tools.key), lambda: self.whole_uncached(chat, tools))

    def whole_uncached(self, chat: Sequence[Chat], tools: Tools) -> Delta:
        """Render a conversation like `whole`, but without using the cache.

        Use this method if the conversation will not occur again.
        """
        text = self._render(chat, tools)
        return Delta(tuple(self.encode(text)), text)

    def delta(self, new: Sequence[Chat], tools: Tools) -> Delta:
        """Render the text after an answer: its end token, the new messages, and the header of the next answer."""

        def render() -> Delta:
            answer = _PLACEHOLDER
            while any(answer in each for each in (tools.key, *(message["content"] for message in new))):
                answer += "x"
            begin = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
            text = self._render([*begin, *new], tools)
            if text.count(answer) != 1:
                raise PolicyError("the chat template omits or repeats the last answer")
            head, _, tail = text.partition(answer)
            before, ids = self.encoded(head + answer), self.encode(text)
            # Some tokenizers encode a text differently at the beginning of a string.
            is_alike = tuple(ids[: len(before)]) == before
            return Delta(tuple(ids[len(before) :] if is_alike else self.encode(tail)), tail)

        return self._cache.get(("delta", self._key(new), tools.key), render)

    def keeps(self, first: Sequence[Chat], new: Sequence[Chat], tools: Tools, *, reasons: bool) -> bool:
        """Return True if new messages with these roles do not change the text before them.

        This is tested once for each sequence of roles. The test conversation contains two answers, because a template
        may render the last answer differently from earlier answers. `first` contains the messages before the first
        answer. `reasons` is True if the answers contain reasoning.

        Raises:
            PolicyError: If the template rejects or omits messages.
        """

        def test() -> bool:
            text = f"<think>\n{_PLACEHOLDER}\n</think>\n\n{_PLACEHOLDER}" if reasons else _PLACEHOLDER
            answer, marked = {"role": "assistant", "content": text}, [{**message, "content": _MARK} for message in new]
            head, tail = self.whole(first, tools), self.delta(marked, tools)
            if tail.text.count(_MARK) < len(marked):
                raise PolicyError(
                    f"the chat template omits messages with the role {' or '.join(sorted(set(roles)))}; set a "
                    "different chat_template or, for tool results, tool_role: user"
                )
            whole = self._render([*first, answer, *marked, answer, *marked], tools)
            if whole != head.text + (text + tail.text) * 2:
                return False
            ids = tuple(self.encode(whole))
            if ids[: len(head.ids)] != head.ids or ids[len(ids) - len(tail.ids) :] != tail.ids:
                logger.info("text between answers has different token ids alone than in context; it is tokenized alone")
            return True

        roles, first_roles = (tuple(message["role"] for message in chat) for chat in (new, first))
        return self._cache.get(("keeps", first_roles, roles, tools.key if self.shows_tools else "", reasons), test)

    def _render(self, chat: Sequence[Chat], tools: Tools) -> str:
        # External messages and specifications must not contain the control tokens that mark roles.
        safe = [
            {**message, "content": mark_control_tokens(message["content"], self._control)}
            if message["role"] in _UNTRUSTED_ROLES and self._control.search(message["content"])
            else message
            for message in chat
        ]
        specs: list[Any] = list(tools.specs or ())
        if self._control.search(tools.key):
            specs = self._mark_nested(specs)
        roles = ", ".join(message["role"] for message in chat)
        with boundary(PolicyError, f"the chat template rejects this conversation ({roles})"):
            text: str = self._tokenizer.apply_chat_template(
                safe,
                tools=specs or None,
                chat_template=self.source,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,
            )
        return text

    def _mark_nested(self, value: Any) -> Any:
        """Mark control tokens everywhere in a value, including parameter names, which `mark_control_tokens` skips."""
        if isinstance(value, Mapping):
            return {self._mark_nested(key): self._mark_nested(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_nested(each) for each in value]
        return mark_control_tokens(value, self._control)

    def _writes(self, name: str) -> bool:
        result = {"role": "tool", "content": "x", name: _MARK}
        try:
            return _MARK in self._render([{"role": "user", "content": "x"}, result], NO_TOOLS)
        except PolicyError:
            return True

    def _key(self, chat: Sequence[Chat]) -> Hashable:
        """Return a key that is equal for all conversations that are rendered as the same text."""
        return tuple(
            (message["role"], message["content"], *(message.get(name) for name in self._key_names))
            if isinstance(message.get("content"), str) and not message.keys() - _PLAIN_KEYS
            else json.dumps(message, sort_keys=True)
            for message in chat
        )


class RecentResults:
    """A cache of recently used results. It limits the number of results and their total number of tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the cached result for a key. Otherwise, call `make` and store its result."""
        if key in self._known:
            self._known.move_to_end(key)
            known: _Value = self._known[key]
            return known
        made = self._known[key] = make()
        self._size += _token_count(made)
        while len(self._known) > self._most or self._size > _CACHED_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._size -= _token_count(oldest)
        return made


def _token_count(result: Any) -> int:
    return len(result.ids) if isinstance(result, Delta) else len(result) if isinstance(result, tuple) else 0


def to_chat(message: Message, tool_role: str = "tool") -> Chat:
    """Convert a message for a template. The content is text, arguments are mappings, and None values are omitted."""
    chat: Chat = {"role": message.role, "content": message.text}
    if message.role == "tool":
        chat["role"] = tool_role
        if tool_role != "tool":
            return chat
        chat |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    if message.tool_calls:
        action = parse_action(message)
        calls = action.get("calls") or [action]
        arguments = [call.get("arguments", call.get("arguments_text")) for call in calls]
        chat["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": each}}
            for call, each in zip(message.tool_calls, arguments, strict=True)
        ]
    if message.reasoning_content:
        chat["reasoning_content"] = message.reasoning_content
    return chat


class PromptTokens(NamedTuple):
    """The model's input for one turn: the whole context.

    `reason` is `None` if the context extends the previous one. Otherwise, it describes why the context was rewritten.
    """

    ids: list[int]
    reason: str | None


class TokenConversation:
    """The context of one episode as exact token ids.

    Each turn extends the context or rewrites it for a recorded reason.
    """

    def __init__(self, layout: ChatLayout, stop_ids: Collection[int], *, tools_in_prompt: bool, tool_role: str) -> None:
        self._layout, self._stop_ids, self._tool_role = layout, stop_ids, tool_role
        self._shows_tools = tools_in_prompt and layout.shows_tools
        self._ids: list[int] = []
        self._first: list[Chat] = []
        self._chat: list[Chat] = []
        self._tools = NO_TOOLS
        self._has_ended = self._awaits_answer = False
        self._kept: tuple[Any, ...] = ()  # the last input of `keeps` for which it returned True
        self._reasoned: set[bool] = set()  # True for each sampled answer in the context that has reasoning

    def prompt(self, observation: Sequence[Message], tools: Tools) -> PromptTokens:
        """Return the context for the next turn. All messages after the last answer are new.

        Raises:
            PolicyError: If the chat template rejects the messages.
        """
        tools = tools if self._shows_tools else NO_TOOLS
        if not self._chat:
            self._first = self._chat = [to_chat(message, self._tool_role) for message in observation]
            return self._begin(self._layout.whole(self._chat, tools), tools, None)
        seen = len(self._chat)
        if self._awaits_answer and len(observation) == seen and tools.key == self._tools.key:
            return PromptTokens(list(self._ids), None)  # a repeated request for the same turn
        new = [to_chat(message, self._tool_role) for message in observation[seen:]]
        if self._awaits_answer or len(observation) < seen or any(chat["role"] == "assistant" for chat in new):
            self._first = self._chat = [to_chat(message, self._tool_role) for message in observation]
            return self._begin(self._layout.whole_uncached(self._chat, tools), tools, CONVERSATION_CHANGED)
        reason = TOOLS_CHANGED if tools.key != self._tools.key else None
        # A template may drop reasoning, or insert an empty block if an answer has no reasoning.
        for reasons in self._reasoned:
            tested = (reasons, tools.key, *[chat["role"] for chat in new])
            if reason is None and tested != self._kept:
                if self._layout.keeps(self._first, new, tools, reasons=reasons):
                    self._kept = tested
                else:
                    reason = REASONING_LEFT_OUT if reasons else TEMPLATE_REWRITES
        self._chat = [*self._chat, *new]
        if reason is not None:
            return self._begin(self._layout.whole_uncached(self._chat, tools), tools, reason)
        added = self._layout.delta(new, tools).ids
        # The end token was sampled; if the answer was truncated, use the template's end token.
        self._ids += added[1:] if self._has_ended and added and added[0] in self._stop_ids else added
        self._awaits_answer = True
        return PromptTokens(list(self._ids), None)

    def answered(self, token_ids: Sequence[int], text: str) -> None:
        """Record an answer, given all sampled ids, and the text without the token that ended the answer."""
        self._ids += token_ids
        self._awaits_answer = False
        self._chat = [*self._chat, {"role": "assistant", "content": text}]
        self._has_ended = bool(token_ids) and token_ids[-1] in self._stop_ids
        self._reasoned.add(_THINK_END in text)

    def _begin(self, whole: Delta, tools: Tools, reason: str | None) -> PromptTokens:
        self._ids, self._tools, self._reasoned, self._awaits_answer = list(whole.ids), tools, set(), True
        self._kept = ()
        return PromptTokens(list(self._ids), reason)
