"""The constraint of a turn, from the tools of that turn: a trie where all calls can be listed, else a grammar."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reward_kit.agent.policies.hf.action_formats import ActionFormat
from reward_kit.agent.policies.hf.chat_layout import ChatLayout
from reward_kit.agent.policies.hf.constraints import Choices, ChoiceTrie
from reward_kit.agent.policies.hf.json_grammar import GrammarCompiler, JsonGrammar
from reward_kit.agent.policies.hf.tools import Tool, all_calls
from reward_kit.errors import PolicyError

_REMEMBERED = 4096


class TurnConstraints:
    """Makes the constraints of all turns; each set of tools is prepared once.

    Args:
        layout: the tokenizer.
        tokenizer: the same as `transformers` has it, for grammars.
        stop_id: what ends a turn.
        max_new_tokens: of a turn; a choice that is longer could never be made.
    """

    def __init__(self, layout: ChatLayout, tokenizer: Any, stop_id: int, max_new_tokens: int) -> None:
        self._layout, self._tokenizer, self._stop_id = layout, tokenizer, stop_id
        self._max_new_tokens = max_new_tokens
        self._prepared: OrderedDict[str, ChoiceTrie | str] = OrderedDict()
        self._compiler: GrammarCompiler | None = None

    def start(self, key: str, tools: Sequence[Tool], form: ActionFormat) -> Choices | JsonGrammar:
        """A constraint for one turn: it is one call of one of the tools, valid for its schema.

        Args:
            key: equal for equal tools.
            tools: those that can be called now.
            form: how calls are written.

        Raises:
            PolicyError: the format or the tokenizer cannot say a call, or a schema cannot be followed.
            ConfigError: a grammar is needed and llguidance is not installed.
        """
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._trie(tools, form) or self._grammar(tools, form)
            if len(self._prepared) > _REMEMBERED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return Choices(prepared) if isinstance(prepared, ChoiceTrie) else self._grammars().start(prepared)

    def _trie(self, tools: Sequence[Tool], form: ActionFormat) -> ChoiceTrie | None:
        calls = all_calls(tools)
        if calls is None:
            return None
        by_name = {tool.name: tool for tool in tools}
        texts = [form.write(by_name[name], arguments) for name, arguments in calls]
        trie = ChoiceTrie({text: self._layout.encoded(text) for text in texts}, self._stop_id)
        if trie.longest > self._max_new_tokens:
            raise PolicyError(
                f"the longest choice has {trie.longest} tokens, more than max_new_tokens={self._max_new_tokens}"
            )
        return trie

    def _grammar(self, tools: Sequence[Tool], form: ActionFormat) -> str:
        compiler = self._grammars()
        rules = [form.rule(_closed(tool), compiler.literal, compiler.schema) for tool in tools]
        names = [f"call_{number}" for number in range(len(rules))]
        lines = [f"{name}: {rule}" for name, rule in zip(names, rules, strict=True)]
        return "\n".join([f"start: {' | '.join(names)}", *lines])

    def _grammars(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, self._stop_id)
        return self._compiler


def _closed(tool: Tool) -> Tool:
    """The tool with a schema that allows no arguments beside its own, where it leaves that open."""
    schema: Mapping[str, Any] = {"type": "object", "additionalProperties": False, **tool.schema}
    return Tool(tool.name, schema)
