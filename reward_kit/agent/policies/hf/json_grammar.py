"""Turns that fit a grammar, where their texts cannot be listed: JSON that is valid for a schema, through llguidance."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from reward_kit.agent.policies.hf.constraints import TokenIds
from reward_kit.errors import ConfigError, PolicyError, boundary, how_to_install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MASKS = 512
_GRAMMARS = 256
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each once.

    Args:
        tokenizer: a fast tokenizer of `transformers`, whose tokens are bytes.
        stop_id: the token that ends a turn.

    Raises:
        ConfigError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_id: int) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ConfigError(
                f"constrain: JSON needs a package that is not here; {how_to_install('constrained')}"
            ) from None
        with boundary(ConfigError, "constrain: llguidance cannot read this tokenizer"):
            self._tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=stop_id)
        self._added: Mapping[str, int] = tokenizer.added_tokens_encoder
        self._stop_ids: TokenIds = np.array([stop_id], dtype=np.int64)
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._masks: OrderedDict[bytes, TokenIds] = OrderedDict()

    def literal(self, text: str) -> str:
        """`text` in the language of the grammar; a text that is one added token is that token."""
        return f"<[{self._added[text]}]>" if text in self._added else json.dumps(text)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that is valid for `schema`, with a space after each comma and colon and none elsewhere."""
        return "%json " + json.dumps({**schema, "x-guidance": _STYLE})

    def start(self, grammar: str) -> JsonGrammar:
        """A turn that fits `grammar`, in Lark's notation with a rule `start`.

        Raises:
            PolicyError: it is no grammar, or a schema in it uses what llguidance does not know.
        """
        matcher = self._matchers.get(grammar)
        if matcher is None:
            matcher = self._matchers[grammar] = self._compiled(grammar)
            if len(self._matchers) > _GRAMMARS:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(grammar)
        return JsonGrammar(self, matcher.deep_copy())

    def _compiled(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, "%llguidance {}\n" + grammar, log_level=0)
        if matcher.is_error():
            # What follows the first lines is the state of the parser.
            reason = " ".join(matcher.get_error().split("<state>")[0].split())[:500]
            raise PolicyError(f"constrain: the tools' schemas cannot be followed token by token: {reason}")
        return matcher

    def ids_of(self, bitmask: bytes) -> TokenIds:
        """The ids whose bits are set. Equal masks give one and the same array, so that it is stored once."""
        ids = self._masks.get(bitmask)
        if ids is None:
            bits = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), bitorder="little")
            ids = self._masks[bitmask] = np.flatnonzero(bits)
            if len(self._masks) > _MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(bitmask)
        return ids

    @property
    def stop_ids(self) -> TokenIds:
        """(1,) what ends a turn."""
        return self._stop_ids


class JsonGrammar:
    """One turn that fits a grammar, and then the stop token."""

    __slots__ = ("_compiler", "_matcher", "is_done")

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher) -> None:
        self._compiler, self._matcher = compiler, matcher
        self.is_done = False

    def allowed(self) -> TokenIds:
        """The ids that continue the turn.

        Raises:
            PolicyError: the grammar is too complex for llguidance.
        """
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return self._compiler.stop_ids
        ids = self._compiler.ids_of(self._matcher.compute_bitmask())
        self._refuse_errors()
        return ids

    def advance(self, token_id: int) -> None:
        """Take note of the token that came.

        Raises:
            PolicyError: it does not fit the grammar.
        """
        if token_id == self._compiler.stop_ids[0] and self._matcher.is_accepting():
            self.is_done = True
            return
        self._matcher.consume_token(token_id)
        self._refuse_errors()

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split("<state>")[0].split())[:500]
            raise PolicyError(f"constrain: {reason}")
