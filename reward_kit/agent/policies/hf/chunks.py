"""How the new tokens of many rows are laid out for one forward pass.

Packed: one after another in a single row of the batch, so that nothing is padded and a prompt of hundreds of tokens
joins rows that decode one. Only attention looks at rows: it is done by a function of ours that models call through
`transformers`' attention interface. Padded: rows of equal length with a mask, for models that do not use the interface.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reward_kit.agent.policies.hf.kv_slots import Ints

IMPLEMENTATION = "reward_kit_rows"
_EIGHT = 8  # kernels of GPUs want masks whose rows are so aligned


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Which tokens are computed: the next `counts_B` of `rows_B`, each row once, from position `starts_B` on."""

    rows_B: Ints
    starts_B: Ints
    counts_B: Ints

    def length(self, capacity: int) -> int:
        """Positions that the farthest token may look at, rounded up."""
        return min(-(-int((self.starts_B + self.counts_B).max()) // _EIGHT) * _EIGHT, capacity)


class PaddedChunk:
    """(B, T) inputs, the shorter rows padded at the end.

    Padding repeats the row's last token at the same position, so that it writes what is written anyway.
    """

    def __init__(self, new: NewTokens, ids_RC: Ints, picked: tuple[Ints, Ints], like: Tensor) -> None:
        capacity, width = ids_RC.shape[1], int(new.counts_B.max())
        positions_BT = new.starts_B[:, None] + np.minimum(np.arange(width), new.counts_B[:, None] - 1)
        rows_B1 = new.rows_B[:, None]
        self.length = new.length(capacity)
        self._rows_B = _tensor(new.rows_B, like)
        self.stored_at = _tensor((rows_B1 * capacity + positions_BT).ravel(), like)
        self.picked_P = _tensor(picked[0] * width + picked[1], like)
        positions = _tensor(positions_BT, like)
        self.inputs = {
            "input_ids": _tensor(ids_RC[rows_B1, positions_BT], like),
            "position_ids": positions,
            "attention_mask": _causal_mask(positions, self.length, None, like.dtype),
        }

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """The chunk's rows, copied."""
        return store_RCHW[:, : self.length].index_select(0, self._rows_B).transpose(1, 2)


class PackedChunk:
    """(1, N) inputs, the tokens of one row after those of another."""

    def __init__(self, new: NewTokens, ids_RC: Ints, picked: tuple[Ints, Ints], like: Tensor) -> None:
        rows_B, counts_B = new.rows_B, new.counts_B
        first_B = np.cumsum(counts_B) - counts_B
        rows_N = np.repeat(rows_B, counts_B)
        positions_N = np.arange(len(rows_N)) + np.repeat(new.starts_B - first_B, counts_B)
        self.length = new.length(ids_RC.shape[1])
        self.stored_at = _tensor(rows_N * ids_RC.shape[1] + positions_N, like)
        self.picked_P = _tensor(first_B[picked[0]] + picked[1], like)
        positions = _tensor(positions_N, like)
        self.inputs = {
            "input_ids": _tensor(ids_RC[rows_N, positions_N], like)[None],
            "position_ids": positions[None],
            "attention_mask": like.new_zeros(1, 1, 1, 1),  # so that the model makes none
        }
        is_single_B = counts_B == 1
        self._parts = [
            _Part.of(rows_B[is_in_B], first_B[is_in_B], counts_B[is_in_B], positions, self.length, like)
            for is_in_B in (is_single_B, ~is_single_B)
            if is_in_B.any()
        ]

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """The whole store; `attend` takes from it what it needs."""
        return store_RCHW

    def attend(
        self, query_NHW: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of all tokens, each over its own row up to itself: (N, heads, width of a value)."""
        if len(self._parts) == 1 and self._parts[0].queries_BT is None:
            return self._parts[0].attend(query_NHW, keys, values, scale, window)
        result = query_NHW.new_empty(*query_NHW.shape[:2], values.shape[-1])
        for part in self._parts:
            attended = part.attend(query_NHW, keys, values, scale, window)
            result.index_copy_(0, part.targets_M, attended.index_select(0, part.sources_M))
        return result


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a chunk with about as many new tokens each, as (B, T) queries.

    Attributes:
        rows: the rows, as a stretch that is looked at in place (with rows in between that have no query of their own
            and a result nobody reads), or as indices of rows to be copied.
        queries_BT: the token of each query; None where the tokens are the queries as they stand.
        positions_BT: of the queries in their contexts.
        sources_M, targets_M: which results, of the flattened (B*T), belong to which tokens.
        length: how many positions may be looked at.
    """

    rows: slice | Tensor
    queries_BT: Tensor | None
    positions_BT: Tensor
    sources_M: Tensor
    targets_M: Tensor
    length: int
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows_B: Ints, first_B: Ints, counts_B: Ints, positions_N: Tensor, length: int, like: Tensor) -> _Part:
        """The part of a chunk that `rows_B` make up, whose tokens begin at `first_B`."""
        low, high, width = int(rows_B.min()), int(rows_B.max()) + 1, int(counts_B.max())
        is_stretch = 2 * len(rows_B) >= high - low
        lines_B = rows_B - low if is_stretch else np.arange(len(rows_B))
        queries_BT = np.full((high - low if is_stretch else len(rows_B), width), first_B[0])
        places_BT = np.arange(width)
        queries_BT[lines_B] = first_B[:, None] + np.minimum(places_BT, counts_B[:, None] - 1)
        is_real_BT = places_BT < counts_B[:, None]
        queries = _tensor(queries_BT, like)
        is_whole = queries_BT.size == len(positions_N) and np.array_equal(
            queries_BT.ravel(), np.arange(queries_BT.size)
        )
        return cls(
            rows=slice(low, high) if is_stretch else _tensor(rows_B, like),
            queries_BT=None if is_whole else queries,
            positions_BT=positions_N[queries],
            sources_M=_tensor((lines_B[:, None] * width + places_BT)[is_real_BT], like),
            targets_M=_tensor((first_B[:, None] + places_BT)[is_real_BT], like),
            length=length,
        )

    def attend(
        self, query_NHW: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """(B*T, heads, width). Heads that share keys are queries of one head, so that keys need not be repeated."""
        lines, width = self.positions_BT.shape
        shared = query_NHW.shape[1] // keys.shape[2]
        query = query_NHW if self.queries_BT is None else query_NHW[self.queries_BT.flatten()]
        grouped_BKQW = query.reshape(lines, width, keys.shape[2], shared, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        attended_BKQW = scaled_dot_product_attention(
            grouped_BKQW,
            self._rows_of(keys),
            self._rows_of(values),
            attn_mask=self._mask(shared, window, query.dtype),
            scale=scale,
        )
        split = (lines, keys.shape[2], shared, width, values.shape[-1])
        return attended_BKQW.view(split).permute(0, 3, 1, 2, 4).reshape(lines * width, -1, values.shape[-1])

    def _rows_of(self, store_RCHW: Tensor) -> Tensor:
        if isinstance(self.rows, slice):
            return store_RCHW[self.rows, : self.length].transpose(1, 2)
        return store_RCHW[:, : self.length].index_select(0, self.rows).transpose(1, 2)

    def _mask(self, shared: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Made once for all layers."""
        window = None if window is None or window >= self.length else window
        if (shared, window) not in self._masks:
            mask_B1TL = _causal_mask(self.positions_BT, self.length, window, dtype)
            self._masks[shared, window] = mask_B1TL.repeat(1, 1, shared, 1)
        return self._masks[shared, window]


def _causal_mask(positions_BT: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, L) to be added to scores: 0 at positions up to the token's own, at most `window` of them, else -inf."""
    places_L = torch.arange(length, device=positions_BT.device)
    positions_BT1 = positions_BT[..., None]
    is_hidden_BTL = places_L > positions_BT1
    if window is not None:
        is_hidden_BTL |= places_L <= positions_BT1 - window
    zeros = torch.zeros((), dtype=dtype, device=positions_BT.device)
    return zeros.masked_fill(is_hidden_BTL, -torch.inf)[:, None]


def _tensor(array: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


_at_hand = threading.local()
_WITHOUT_EFFECT = {
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "use_cache",
}


def attend_to_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers`' attention interface calls it: of the packed chunk at hand, over the whole stores.

    Outside of an engine's forward pass it is scaled dot-product attention.

    Args:
        module: the layer.
        query: (1, heads, N, width).
        key: the layer's store of keys, (R, C, heads, width), as the cache gave it.
        value: the same of values.
        attention_mask: says nothing; the chunk knows who sees what.
        dropout: none.
        scaling: of the scores.
        others: `sliding_window`, how far a token looks back, and nothing else that changes the result.

    Raises:
        NotImplementedError: the model wants something that this function does not do.
    """
    chunk: PackedChunk | None = getattr(_at_hand, "chunk", None)
    if chunk is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    window = others.pop("sliding_window", None)
    if unknown := [name for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None]:
        raise NotImplementedError(f"attention over rows knows no {', '.join(unknown)}")
    return chunk.attend(query[0].transpose(0, 1), key, value, scaling, window)[None], None


class attending_to:
    """Let `attend_to_rows` know, in this thread, which chunk is computed."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: PackedChunk) -> None:
        self._chunk = chunk

    def __enter__(self) -> None:
        _at_hand.chunk = self._chunk

    def __exit__(self, *_: object) -> None:
        _at_hand.chunk = None


AttentionInterface.register(IMPLEMENTATION, attend_to_rows)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
