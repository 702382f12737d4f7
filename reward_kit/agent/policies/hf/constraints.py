"""What may come next while a turn is being sampled, so that a tool call is always valid.

A constraint belongs to one turn. The engine asks what is allowed, samples among that, and tells what came. A token that
is alone allowed costs no forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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


class _Node:
    """A place in the trie: what may come, and where each leads, made when somebody goes there.

    Attributes:
        allowed: what may come.
        text: what is said once nothing may follow; None before.
    """

    __slots__ = ("_depth", "_parts", "_then", "allowed", "text")

    def __init__(self, choices: list[tuple[tuple[int, ...], str]], depth: int) -> None:
        """The place that these choices, which are sorted and agree in their first `depth` tokens, go through."""
        self._depth, self._then = depth, dict[int, _Node]()
        self._parts: dict[int, list[tuple[tuple[int, ...], str]]] = {}
        self.text = choices[0][1] if len(choices[0][0]) == depth else None
        if self.text is None:
            for choice in choices:
                self._parts.setdefault(choice[0][depth], []).append(choice)
        self.allowed: TokenIds = np.array(list(self._parts), dtype=np.int64)

    def then(self, token_id: int) -> _Node | None:
        """Where a token leads; None where it may not come."""
        found = self._then.get(token_id)
        if found is None and token_id in self._parts:
            found = self._then[token_id] = _Node(self._parts[token_id], self._depth + 1)
        return found


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
        self.root = _Node(sorted(by_ids.items()), 0)


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
        node = self._node.then(token_id)
        if node is None:
            raise PolicyError(f"token {token_id} is none of the allowed {self._node.allowed.tolist()}")
        self._node = node
