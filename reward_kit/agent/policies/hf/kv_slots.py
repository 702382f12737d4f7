"""Keys and values of many contexts in rows, as a cache that `transformers` models write to and read from.

A row holds one context: the token ids and, for a prefix of them, keys and values of every layer. It lives as long as
its session, so that a turn computes only what is new since the turn before. A forward pass takes some of the rows, each
with its own number of new tokens: a `Chunk`. Memory is taken for as many rows and positions as were ever needed at
once, not for all that there may be: those of a model with a context of 131,072 tokens would fit no machine.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

Ints = NDArray[np.int64]
_POSITIONS = 256
"""Positions of a row for which memory is taken at first."""


class Chunk(Protocol):
    """The new tokens of some rows, laid out for one forward pass.

    Attributes:
        inputs: what the model is called with.
        stored_at: for each token, in the order of the inputs, its place in a layer's flat store.
        picked_P: places in the flattened inputs whose last hidden states are wanted.
        length: how many positions of a row may be looked at, at most.
    """

    @property
    def inputs(self) -> dict[str, Tensor]: ...
    @property
    def stored_at(self) -> Tensor: ...
    @property
    def picked_P(self) -> Tensor: ...
    @property
    def length(self) -> int: ...

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """What attention is given of the rows: all of it, or (B, heads, length, width) of those of the chunk."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (R, C, heads, width) each: R rows of C positions, as many as are reserved."""

    def __init__(self, slots: KVSlots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self.stores: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory for what is reserved, zeroed: also what is masked must be finite."""
        shape = self._slots.reserved
        keys, values = (states.new_zeros(*shape, *states.shape[1::2]) for states in (key_states, value_states))
        self.keys, self.values, self.stores = keys, values, (keys, values)
        self.is_initialized = True

    def grow(self, reserved: tuple[int, int]) -> None:
        """Take memory for so many rows and positions, and keep what is held."""
        if self.stores is None:
            return
        rows, positions = self.stores[0].shape[:2]
        grown = [store.new_zeros(*reserved, *store.shape[2:]) for store in self.stores]
        for new, store in zip(grown, self.stores, strict=True):
            new[:rows, :positions] = store
        self.keys, self.values = grown
        self.stores = self.keys, self.values

    def drop(self) -> None:
        """Give all memory back, with what is held."""
        self.keys = self.values = self.stores = None
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (B, heads, T, width) of the chunk at hand; the result is what its tokens may look at."""
        if self.stores is None:
            self.lazy_initialization(key_states, value_states)
        chunk = self._slots.chunk
        assert chunk is not None and self.stores is not None
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store.flatten(0, 1).index_copy_(0, chunk.stored_at, states.transpose(1, 2).flatten(0, 1))
        return chunk.seen(self.stores[0]), chunk.seen(self.stores[1])

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row."""
        for store in self.stores or ():
            store[target, :count] = store[source, :count]

    def get_seq_length(self) -> int:
        """How far a token may look."""
        return self._slots.chunk.length if self._slots.chunk else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Asked by models that make a mask of their own; they are given one."""
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """Positions in a row."""
        return self._slots.capacity


class KVSlots(Cache):
    """All rows of all layers, and which tokens they hold.

    Attributes:
        rows: how many contexts fit.
        capacity: positions in a row.
        ids_RC: the tokens of each row.
        held_R: for how many of them, from the first, keys and values are there.
        reserved: rows and positions for which there is memory.
        chunk: what the forward pass at hand computes.
    """

    def __init__(self, rows: int, capacity: int, layers: int) -> None:
        self._layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=[*self._layers])
        self.rows, self.capacity = rows, capacity
        self.reserved = (1, min(capacity, _POSITIONS))
        self.ids_RC: Ints = np.zeros((rows, capacity), dtype=np.int64)
        self.held_R: Ints = np.zeros(rows, dtype=np.int64)
        self.chunk: Chunk | None = None

    def reserve(self, rows: int, positions: int) -> None:
        """See that there is memory for the first `rows`, and in each for so many positions."""
        had_rows, had_positions = self.reserved
        if rows > had_rows:
            had_rows = min(self.rows, max(rows, 2 * had_rows))
        if positions > had_positions:
            had_positions = min(self.capacity, max(positions, had_positions + had_positions // 2))
        if (had_rows, had_positions) != self.reserved:
            self._grow((had_rows, had_positions))

    def _grow(self, reserved: tuple[int, int]) -> None:
        layers = list(self._layers)
        try:
            while layers:
                layers[-1].grow(reserved)
                layers.pop()
            self.reserved = reserved
        finally:
            if layers:  # there is no memory, and some layers have other rows than the rest
                self.forget()
                for layer in self._layers:
                    layer.drop()

    def common(self, row: int, ids: Ints) -> int:
        """How many tokens of `ids`, from the first, are held in `row`."""
        count = min(len(ids), int(self.held_R[row]))
        differs = self.ids_RC[row, :count] != ids[:count]
        return int(differs.argmax()) if differs.any() else count

    def common_R(self, ids: Ints) -> Ints:
        """(R,) how many tokens of `ids`, from the first, stand in each row; keys and values need not be there yet."""
        differs_RT = self.ids_RC[:, : len(ids)] != ids
        common_R: Ints = np.where(differs_RT.any(axis=1), differs_RT.argmax(axis=1), len(ids))
        return common_R

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Let `target` hold the first `count` tokens of `source`."""
        self.reserve(target + 1, count)
        for layer in self._layers:
            layer.copy_row(source, target, count)
        self.ids_RC[target, :count] = self.ids_RC[source, :count]
        self.held_R[target] = count

    def forget(self) -> None:
        """Hold nothing any more, since the weights have changed."""
        self.held_R[:] = 0
