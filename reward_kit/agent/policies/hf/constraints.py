"""What may come next while a turn is being sampled, so that a tool call is always valid.

A constraint belongs to one turn. The engine asks what is allowed, samples among that, and tells what came. A token that
is alone allowed costs no forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from reward_kit.errors import PolicyError

TokenIds = npt.NDArray[np.int64]


class TokenConstraint(Protocol):
    """What one turn may say.

    Attributes:
        is_done: nothing may follow: the turn is over.
    """

    @property
    def is_done(self) -> bool: ...

    def allowed(self) -> Sequence[int] | npt.NDArray[np.integer[Any]] | None:
        """The ids that may come next; None: any."""

    def advance(self, token_id: int) -> None:
        """Take note of the token that came."""


class _Node(NamedTuple):
    """A place in the trie: what may come, where each leads, and what is said once nothing may follow."""

    allowed: TokenIds
    then: dict[int, _Node]
    text: str | None


class ChoiceTrie:
    """The token ids of a set of texts, each ended by the stop token. One trie serves many turns.

    Args:
        choices: for each text its ids, without the stop token.
        stop_id: what ends each of them.

    Raises:
        PolicyError: there are no choices, or two have the same ids.
    """

    __slots__ = ("longest", "root")

    def __init__(self, choices: Mapping[str, Sequence[int]], stop_id: int) -> None:
        if not choices:
            raise PolicyError("a constraint needs at least one choice; the tool's schema leaves none")
        by_ids: dict[tuple[int, ...], str] = {}
        for text, ids in choices.items():
            key = (*map(int, ids), stop_id)
            if stop_id in key[:-1]:
                raise PolicyError(f"the choice {text!r} contains the token {stop_id}, which ends a turn")
            if key in by_ids:
                raise PolicyError(
                    f"the choices {by_ids[key]!r} and {text!r} have the same token ids; the tokenizer does not tell "
                    "them apart (are their words in its vocabulary?)"
                )
            by_ids[key] = text
        self.longest = max(map(len, by_ids))
        """Tokens of the longest choice, with the stop token."""
        self.root = _node(sorted(by_ids.items()), 0)


def _node(choices: list[tuple[tuple[int, ...], str]], depth: int) -> _Node:
    """The place that these choices, which are sorted and agree in their first `depth` tokens, go through."""
    if len(choices) == 1 and len(choices[0][0]) == depth:
        return _Node(np.zeros(0, dtype=np.int64), {}, choices[0][1])
    parts: dict[int, list[tuple[tuple[int, ...], str]]] = {}
    for ids, text in choices:
        parts.setdefault(ids[depth], []).append((ids, text))
    return _Node(np.array(list(parts), dtype=np.int64), {i: _node(part, depth + 1) for i, part in parts.items()}, None)


class Choices:
    """One of the texts of a trie, and then the stop token."""

    __slots__ = ("_node",)

    def __init__(self, trie: ChoiceTrie) -> None:
        self._node = trie.root

    @property
    def is_done(self) -> bool:
        """A whole choice was said."""
        return self._node.text is not None

    @property
    def chosen(self) -> str | None:
        """Which choice was said; None before its end."""
        return self._node.text

    def allowed(self) -> TokenIds:
        """The ids that continue a choice."""
        return self._node.allowed

    def advance(self, token_id: int) -> None:
        """Take note of the token that came.

        Raises:
            PolicyError: it continues no choice.
        """
        if token_id not in self._node.then:
            raise PolicyError(f"token {token_id} is none of the allowed {self._node.allowed.tolist()}")
        self._node = self._node.then[token_id]
