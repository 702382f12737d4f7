"""Constraints on the tokens of a turn, which guarantee valid tool calls.

A constraint belongs to one turn. The engine requests the allowed ids from it, samples one of them, and reports the
sampled id back. If only one id is allowed, no forward pass is needed. If all calls can be listed, the constraint is a
trie (`Choices`). Otherwise, it is a grammar for JSON that is valid for the schemas (`JsonGrammar`, which uses
llguidance).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from reward_kit.agent.policies.hf.action_formats import ActionFormat, ToolSchema, all_calls
from reward_kit.agent.policies.hf.chat_layout import ChatLayout, RecentResults
from reward_kit.errors import ConfigError, PolicyError, boundary, install_hint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TokenIds = npt.NDArray[np.int64]
_TOOL_SETS, _GRAMMARS, _MASKS = 4096, 256, 512  # sizes of the caches
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class TokenConstraint(Protocol):
    """A constraint on one turn. The turn is over once `is_done` is True."""

    @property
    def is_done(self) -> bool: ...

    def allowed(self) -> Sequence[int] | npt.NDArray[np.integer[Any]] | None:
        """Return the ids that may come next, or None if any id may."""

    def advance(self, token_id: int) -> None:
        """Record a sampled token."""


class TurnConstraints:
    """A factory that creates the constraint for each turn. Each set of tools is prepared only once."""

    def __init__(self, layout: ChatLayout, tokenizer: Any, stop_id: int, max_new_tokens: int) -> None:
        self._layout, self._tokenizer, self._stop_id = layout, tokenizer, stop_id
        self._max_new_tokens = max_new_tokens
        self._prepared = RecentResults(_TOOL_SETS)

    def start(self, key: str, tools: Sequence[ToolSchema], form: ActionFormat) -> Choices | JsonGrammar:
        """Return a constraint that forces one turn to be a valid call of one of the tools. `key` identifies the tools.

        Raises:
            PolicyError: If the format or the tokenizer cannot express a call, or a schema is not supported.
            ConfigError: If a grammar is needed and llguidance is not installed.
        """

        def prepare() -> ChoiceTrie | str:
            calls = all_calls(tools)
            if calls is not None:
                by_name = {tool.name: tool for tool in tools}
                texts = [form.write(by_name[name], arguments) for name, arguments in calls]
                trie = ChoiceTrie({text: self._layout.encoded(text) for text in texts}, self._stop_id)
                if trie.longest > self._max_new_tokens:
                    limit = f"max_new_tokens={self._max_new_tokens}"
                    raise PolicyError(f"the longest choice has {trie.longest} tokens, but the limit is {limit}")
                return trie
            lines = [f"start: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
            for number, tool in enumerate(tools):
                # Schemas without `additionalProperties` allow no additional arguments.
                closed = ToolSchema(tool.name, {"type": "object", "additionalProperties": False, **tool.schema})
                lines.append(f"call_{number}: {form.rule(closed, self._grammars.literal, self._grammars.schema)}")
            return "\n".join(lines)

        prepared = self._prepared.get(key, prepare)
        return Choices(prepared) if isinstance(prepared, ChoiceTrie) else self._grammars.start(prepared)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self._tokenizer, self._stop_id)


class _Node:
    """A node of a trie. It contains the choices that share their first `depth` tokens.

    Children are created on first use.

    At the end of a choice, `text` is set. `allowed` contains the ids that may come next.
    """

    __slots__ = ("_children", "_depth", "_parts", "allowed", "text")

    def __init__(self, choices: list[tuple[tuple[int, ...], str]], depth: int) -> None:
        self._depth, self._children = depth, dict[int, _Node]()
        self._parts: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        self.text = choices[0][1] if len(choices[0][0]) == depth else None
        if self.text is None:
            for choice in choices:
                self._parts.setdefault(choice[0][depth], []).append(choice)
        self.allowed: TokenIds = np.array(list(self._parts), dtype=np.int64)

    def child(self, token_id: int) -> _Node | None:
        """Return the child for a token, or None if the token is not allowed."""
        child = self._children.get(token_id)
        if child is None and token_id in self._parts:
            child = self._children[token_id] = _Node(self._parts[token_id], self._depth + 1)
        return child


class ChoiceTrie:
    """A trie of the token ids of multiple strings, each followed by the stop token. Many turns can share it.

    `choices` contains the ids of each string without the stop token.

    Raises:
        PolicyError: If there are no choices, or two of them have the same ids.
    """

    __slots__ = ("longest", "root")

    def __init__(self, choices: Mapping[str, Sequence[int]], stop_id: int) -> None:
        if not choices:
            raise PolicyError("a constraint needs at least one choice, but the tool's schema allows none")
        by_ids: dict[tuple[int, ...], str] = {}
        for text, ids in choices.items():
            key = (*map(int, ids), stop_id)
            if stop_id in key[:-1]:
                raise PolicyError(f"the choice {text!r} contains the token {stop_id}, which ends a turn")
            if key in by_ids:
                raise PolicyError(
                    f"the choices {by_ids[key]!r} and {text!r} have the same token ids, so the tokenizer "
                    "cannot distinguish them; check that their words are in its vocabulary"
                )
            by_ids[key] = text
        self.longest = max(map(len, by_ids))
        """The number of tokens in the longest choice, including the stop token."""
        self.root = _Node(sorted(by_ids.items()), 0)


class Choices:
    """A choice among the strings of a trie, followed by the stop token."""

    __slots__ = ("_node",)

    def __init__(self, trie: ChoiceTrie) -> None:
        self._node = trie.root

    @property
    def is_done(self) -> bool:
        """True once the turn contains a complete choice."""
        return self._node.text is not None

    @property
    def chosen(self) -> str | None:
        """The complete choice, or None if the choice is not complete."""
        return self._node.text

    def allowed(self) -> TokenIds:
        """Return the ids that continue a choice."""
        return self._node.allowed

    def advance(self, token_id: int) -> None:
        """Record a sampled token.

        Raises:
            PolicyError: If the token does not continue a choice.
        """
        node = self._node.child(token_id)
        if node is None:
            raise PolicyError(f"token {token_id} is not allowed here; allowed: {self._node.allowed.tolist()}")
        self._node = node


class GrammarCompiler:
    """A grammar compiler for a fast `transformers` tokenizer with byte-level tokens. It caches the compiled grammars.

    Raises:
        ConfigError: If llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_id: int) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ConfigError(
                f"constrain: JSON needs llguidance, which is not installed; {install_hint('constrained')}"
            ) from None
        with boundary(ConfigError, "constrain: llguidance cannot read this tokenizer"):
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=stop_id)
        self._added: Mapping[str, int] = tokenizer.added_tokens_encoder
        self.stop_ids: TokenIds = np.array([stop_id], dtype=np.int64)
        self._matcher = lru_cache(_GRAMMARS)(self._compile)
        # Equal masks share one array, so that it is stored once.
        self.ids_of = lru_cache(_MASKS)(_allowed_ids)

    def literal(self, text: str) -> str:
        """Return a string as a grammar literal. If the string is an added token, return that token."""
        return f"<[{self._added[text]}]>" if text in self._added else json.dumps(text)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON that is valid for a schema, with spaces only after commas and colons."""
        return "%json " + json.dumps({**schema, "x-guidance": _STYLE})

    def start(self, grammar: str) -> JsonGrammar:
        """Return a constraint for a Lark grammar that has a rule named `start`.

        Raises:
            PolicyError: If the grammar is invalid.
        """
        return JsonGrammar(self, self._matcher(grammar).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, "%llguidance {}\n" + grammar, log_level=0)
        if matcher.is_error():
            raise PolicyError(f"constrain: the tools' schemas cannot be enforced token by token: {_error_of(matcher)}")
        return matcher


def _allowed_ids(bitmask: bytes) -> TokenIds:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), bitorder="little"))


class JsonGrammar:
    """A turn that matches a grammar, followed by the stop token."""

    __slots__ = ("_compiler", "_matcher", "is_done")

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher) -> None:
        self._compiler, self._matcher = compiler, matcher
        self.is_done = False

    def allowed(self) -> TokenIds:
        """Return the ids that continue the turn.

        Raises:
            PolicyError: If the grammar is too complex for llguidance.
        """
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return self._compiler.stop_ids
        ids = self._compiler.ids_of(self._matcher.compute_bitmask())
        self._check()
        return ids

    def advance(self, token_id: int) -> None:
        """Record a sampled token.

        Raises:
            PolicyError: If the token does not match the grammar.
        """
        if token_id == self._compiler.stop_ids[0] and self._matcher.is_accepting():
            self.is_done = True
            return
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise PolicyError(f"constrain: {_error_of(self._matcher)}")


def _error_of(matcher: LLMatcher) -> str:
    """Return the error message of a matcher without the parser state."""
    return " ".join(matcher.get_error().split("<state>")[0].split())[:500]
