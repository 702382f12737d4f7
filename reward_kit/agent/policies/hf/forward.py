"""`RowModel`, a `transformers` causal LM that computes the new tokens of many contexts at the same time.

Keys and values are cached in rows. A row stores one context: its token ids and, for a prefix of these, the keys and
values of every layer. A row lasts as long as its session, so a turn computes only new tokens. Memory is allocated for
the largest number of rows and positions needed so far, because a full context of 131,072 tokens for every row would not
fit.

A forward pass computes a chunk, which consists of new tokens from some of the rows. A packed chunk concatenates these
tokens into a single batch row. Nothing is padded, and a prompt with hundreds of tokens can join rows that decode one
token. Only attention distinguishes the rows. It is computed by a custom function that is registered with the attention
interface of `transformers`. For models that do not use this interface, a padded chunk has rows of equal length and a
mask. A decoding chunk has one token in each row and can be replayed as a CUDA graph.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reward_kit.agent.policies.hf.graphs import RECORDERS, DecodingGraphs, DecodingShape
from reward_kit.errors import ConfigError, PolicyError, RewardKitError, boundary

_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]
_POSITIONS = 256
"""Number of positions that are initially allocated per row."""


class SlotLayer(CacheLayerMixin):
    """The keys and values of a layer: two tensors of shape (R, C + 1, heads, width) for R rows of C positions.

    No token attends to the last position. Tokens that only fill a batch are stored there.
    """

    def __init__(self, slots: KVSlots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self.stores: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the reserved memory and fill it with zeros, because even masked values must be finite."""
        shape = (self._slots.reserved[0], self._slots.stride)
        keys, values = (states.new_zeros(*shape, *states.shape[1::2]) for states in (key_states, value_states))
        self.keys, self.values, self.stores = keys, values, (keys, values)
        self.is_initialized = True

    def grow(self, reserved: tuple[int, int]) -> None:
        """Allocate memory for the given numbers of rows and positions, and copy the existing content."""
        if self.stores is None:
            return
        rows, positions = self.stores[0].shape[:2]
        grown = [store.new_zeros(reserved[0], reserved[1] + 1, *store.shape[2:]) for store in self.stores]
        for new, store in zip(grown, self.stores, strict=True):
            new[:rows, :positions] = store
        self.keys, self.values = grown
        self.stores = self.keys, self.values

    def drop(self) -> None:
        """Free the memory of the layer."""
        self.keys = self.values = self.stores = None
        self.is_initialized = False

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values (B, heads, T, width) of the current chunk.

        Returns:
            The keys and values to which the tokens of the chunk attend.
        """
        if self.stores is None:
            self.lazy_initialization(key_states, value_states)
        chunk = self._slots.chunk
        assert chunk is not None and self.stores is not None
        for store, states in zip(self.stores, (key_states, value_states), strict=True):
            store.flatten(0, 1).index_copy_(0, chunk.stored_at, states.transpose(1, 2).flatten(0, 1))
        return chunk.seen(self.stores[0]), chunk.seen(self.stores[1])

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a row to another row."""
        for store in self.stores or ():
            store[target, :count] = store[source, :count]

    def clear_row(self, row: int) -> None:
        """Fill a row with zeros."""
        for store in self.stores or ():
            store[row] = 0

    def get_seq_length(self) -> int:
        """Return the number of positions to which a token may attend."""
        return self._slots.chunk.length if self._slots.chunk else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask sizes, for models that build a mask. They receive the mask of the chunk anyway."""
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        """Return the number of positions in a row."""
        return self._slots.capacity


class KVSlots(Cache):
    """The rows of all layers, and the tokens in the rows."""

    def __init__(self, rows: int, capacity: int, layers: int) -> None:
        self._layers = [SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=[*self._layers])
        self.rows, self.capacity = rows, capacity
        self.reserved = (1, min(capacity, _POSITIONS))  # allocated rows and positions
        self.ids_RC: Ints = np.zeros((rows, capacity), dtype=np.int64)
        self.held_R: Ints = np.zeros(rows, dtype=np.int64)  # length of the prefix with stored keys and values
        self.has_moved = False  # True if memory was allocated or freed; whoever uses its address resets this
        self.chunk: PackedChunk | PaddedChunk | DecodingChunk | None = None

    @property
    def stride(self) -> int:
        """The number of allocated positions per row, including the one that is only for padding."""
        return self.reserved[1] + 1

    @property
    def is_allocated(self) -> bool:
        """True if the layers have memory. They have none before the first pass and when memory was insufficient."""
        return all(layer.stores is not None for layer in self._layers)

    def reserve(self, rows: int, positions: int) -> None:
        """Allocate memory for at least the given number of rows and of positions per row."""
        had_rows, had_positions = self.reserved
        if rows > had_rows:
            had_rows = min(self.rows, max(rows, 2 * had_rows))
        if positions > had_positions:
            had_positions = min(self.capacity, max(positions, had_positions + had_positions // 2))
        wanted = (had_rows, had_positions)
        if wanted == self.reserved:
            return
        self.has_moved = True
        try:
            for layer in self._layers:
                layer.grow(wanted)
            self.reserved = wanted
        finally:
            if self.reserved != wanted:  # out of memory after only some layers have grown
                self.forget()
                for layer in self._layers:
                    layer.drop()

    def common(self, row: int, ids: Ints) -> int:
        """Return the length of the prefix of `ids` that is cached in a row."""
        count = min(len(ids), int(self.held_R[row]))
        differs = self.ids_RC[row, :count] != ids[:count]
        return int(differs.argmax()) if differs.any() else count

    def common_R(self, ids: Ints) -> Ints:
        """Return an (R,) array with the length of the prefix of `ids` that each row contains.

        Keys and values for the prefix need not be stored yet.
        """
        differs_RT = self.ids_RC[:, : len(ids)] != ids
        common_R: Ints = np.where(differs_RT.any(axis=1), differs_RT.argmax(axis=1), len(ids))
        return common_R

    def copy_row(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of a row to another row."""
        self.reserve(target + 1, count)
        for layer in self._layers:
            layer.copy_row(source, target, count)
        self.ids_RC[target, :count] = self.ids_RC[source, :count]
        self.held_R[target] = count

    def clear_row(self, row: int) -> None:
        """Discard the content of a row that may not be finite. Even masked values would spoil later contexts."""
        for layer in self._layers:
            layer.clear_row(row)
        self.held_R[row] = 0

    def forget(self) -> None:
        """Discard all content, because the weights have changed."""
        self.held_R[:] = 0


IMPLEMENTATION = "reward_kit_rows"
_EIGHT = 8  # alignment of mask rows for GPU kernels
_INPUTS = 4  # the inputs of a token in a decoding chunk: id, position, row, and index in the flattened store


class NewTokens(NamedTuple):
    """The tokens to compute: in each row of `rows_B`, the next `counts_B` tokens, starting at position `starts_B`.

    `length` is the number of positions in a row to which these tokens can attend.
    """

    rows_B: Ints
    starts_B: Ints
    counts_B: Ints
    length: int


class PaddedChunk:
    """Inputs of shape (B, T). Shorter rows are padded at the end.

    The padding repeats the row's last token at the same position, so the same values are written again.
    """

    def __init__(self, new: NewTokens, slots: KVSlots, picked: tuple[Ints, Ints], like: Tensor) -> None:
        width = int(new.counts_B.max())
        positions_BT = new.starts_B[:, None] + np.minimum(np.arange(width), new.counts_B[:, None] - 1)
        rows_B1 = new.rows_B[:, None]
        self.length = new.length
        self._rows_B = _tensor(new.rows_B, like)
        self.stored_at = _tensor((rows_B1 * slots.stride + positions_BT).ravel(), like)
        self.picked_P = _tensor(picked[0] * width + picked[1], like)
        positions = _tensor(positions_BT, like)
        self.inputs = {
            "input_ids": _tensor(slots.ids_RC[rows_B1, positions_BT], like),
            "position_ids": positions,
            "attention_mask": _causal_mask(positions, self.length, None, like.dtype),
        }

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """Return a copy of the rows in this chunk."""
        return store_RCHW[:, : self.length].index_select(0, self._rows_B).transpose(1, 2)


class PackedChunk:
    """Inputs of shape (1, N): the concatenated new tokens of all rows.

    `stored_at` contains the index of each input token in the flattened store of a layer. `picked_P` contains the
    indices of the tokens whose last hidden states are needed, as positions in the flattened inputs.
    """

    def __init__(self, new: NewTokens, slots: KVSlots, picked: tuple[Ints, Ints], like: Tensor) -> None:
        rows_B, counts_B, self.length = new.rows_B, new.counts_B, new.length
        first_B = np.cumsum(counts_B) - counts_B
        rows_N = np.repeat(rows_B, counts_B)
        positions_N = np.arange(len(rows_N)) + np.repeat(new.starts_B - first_B, counts_B)
        self.stored_at = _tensor(rows_N * slots.stride + positions_N, like)
        self.picked_P = _tensor(first_B[picked[0]] + picked[1], like)
        positions = _tensor(positions_N, like)
        self.inputs = {
            "input_ids": _tensor(slots.ids_RC[rows_N, positions_N], like)[None],
            "position_ids": positions[None],
            "attention_mask": like.new_zeros(1, 1, 1, 1),  # so that the model does not create one
        }
        is_single_B = counts_B == 1
        self._parts = [
            _Part.of(rows_B[is_in_B], first_B[is_in_B], counts_B[is_in_B], positions, self.length, like)
            for is_in_B in (is_single_B, ~is_single_B)
            if is_in_B.any()
        ]

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """Return the whole store, from which `attend` selects the rows."""
        return store_RCHW

    def attend(
        self, query_NHW: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Return the attention output of shape (N, heads, value width).

        Each token attends to its row up to and including itself.
        """
        if len(self._parts) == 1 and self._parts[0].queries_BT is None:
            return self._parts[0].attend(query_NHW, keys, values, scale, window)
        result = query_NHW.new_empty(*query_NHW.shape[:2], values.shape[-1])
        for part in self._parts:
            attended = part.attend(query_NHW, keys, values, scale, window)
            assert part.sources_M is not None and part.targets_M is not None
            result.index_copy_(0, part.targets_M, attended.index_select(0, part.sources_M))
        return result


class DecodingChunk:
    """One token in each line of a batch. The rows of `inputs_KL` are its inputs, see `decoding_inputs`.

    Packed, the inputs of the model have the shape (1, L), otherwise (L, 1).
    """

    picked_P = None  # the logits of all tokens are requested

    def __init__(self, shape: DecodingShape, inputs_KL: Tensor, like: Tensor, *, is_packed: bool) -> None:
        ids_L, positions_L, rows_L, self.stored_at = inputs_KL
        self.length, self._is_packed = shape.length, is_packed
        self._part = _Part(
            rows=slice(shape.first, shape.first + shape.lines) if shape.is_in_place else rows_L,
            queries_BT=None,
            positions_BT=positions_L[:, None],
            sources_M=None,
            targets_M=None,
            length=shape.length,
        )
        mask = like.new_zeros(1, 1, 1, 1) if is_packed else self._part.mask(1, None, like.dtype)
        batch_dimension = 0 if is_packed else 1
        self.inputs = {
            "input_ids": ids_L.unsqueeze(batch_dimension),
            "position_ids": positions_L.unsqueeze(batch_dimension),
            "attention_mask": mask,
        }

    def seen(self, store_RCHW: Tensor) -> Tensor:
        """Return the whole store if the chunk is packed, otherwise the rows of the lines."""
        return store_RCHW if self._is_packed else self._part.rows_of(store_RCHW).transpose(1, 2)

    def attend(
        self, query_NHW: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Return the attention output of a packed chunk, of shape (L, heads, value width)."""
        return self._part.attend(query_NHW, keys, values, scale, window)


def decoding_inputs(shape: DecodingShape, rows_B: Ints, slots: KVSlots) -> tuple[Ints, Ints]:
    """Return the inputs of a decoding chunk, inputs_KL, and the line of each row, lines_B.

    Lines without a row compute a token of id 0 at position 0, which is stored at the position for padding.
    """
    lines_B = rows_B - shape.first if shape.is_in_place else np.arange(len(rows_B))
    inputs_KL = np.zeros((_INPUTS, shape.lines), dtype=np.int64)
    ids_L, positions_L, rows_L, stored_at_L = inputs_KL
    if shape.is_in_place:
        rows_L[:] = np.arange(shape.first, shape.first + shape.lines)
    rows_L[lines_B], positions_L[lines_B] = rows_B, slots.held_R[rows_B]
    stored_at_L[:] = (rows_L + 1) * slots.stride - 1
    stored_at_L[lines_B] = rows_B * slots.stride + positions_L[lines_B]
    ids_L[lines_B] = slots.ids_RC[rows_B, positions_L[lines_B]]
    return inputs_KL, lines_B


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a chunk with similar numbers of new tokens, as queries of shape (B, T).

    If the rows are a slice, they are read in place, and results for rows without queries are ignored. Otherwise, they
    are the indices of the rows to copy.
    """

    rows: slice | Tensor
    queries_BT: Tensor | None  # index of the token of each query; None if the tokens are the queries in order
    positions_BT: Tensor  # positions of the queries in their contexts
    sources_M: Tensor | None  # indices of results in the flattened (B*T), unless they are the tokens in order
    targets_M: Tensor | None  # indices of the corresponding tokens
    length: int
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, rows_B: Ints, first_B: Ints, counts_B: Ints, positions_N: Tensor, length: int, like: Tensor) -> _Part:
        """Return the part of a chunk that consists of `rows_B`. The tokens of each row begin at `first_B`."""
        low, high, width = int(rows_B.min()), int(rows_B.max()) + 1, int(counts_B.max())
        is_stretch = 2 * len(rows_B) >= high - low
        lines_B = rows_B - low if is_stretch else np.arange(len(rows_B))
        queries_BT = np.full((high - low if is_stretch else len(rows_B), width), first_B[0])
        offsets_T = np.arange(width)
        queries_BT[lines_B] = first_B[:, None] + np.minimum(offsets_T, counts_B[:, None] - 1)
        is_real_BT = offsets_T < counts_B[:, None]
        queries = _tensor(queries_BT, like)
        is_whole = np.array_equal(queries_BT.ravel(), np.arange(len(positions_N)))
        return cls(
            rows=slice(low, high) if is_stretch else _tensor(rows_B, like),
            queries_BT=None if is_whole else queries,
            positions_BT=positions_N[queries],
            sources_M=None if is_whole else _tensor((lines_B[:, None] * width + offsets_T)[is_real_BT], like),
            targets_M=None if is_whole else _tensor((first_B[:, None] + offsets_T)[is_real_BT], like),
            length=length,
        )

    def attend(
        self, query_NHW: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Return the attention output of shape (B*T, heads, width).

        Heads that share keys become additional queries of a single head, so keys need not be repeated.
        """
        lines, width = self.positions_BT.shape
        shared = query_NHW.shape[1] // keys.shape[2]
        query = query_NHW if self.queries_BT is None else query_NHW[self.queries_BT.flatten()]
        grouped_BKQW = query.reshape(lines, width, keys.shape[2], shared, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = self.mask(shared, window, query.dtype)
        key_BKLW, value_BKLW = (self.rows_of(store).transpose(1, 2) for store in (keys, values))
        attended_BKQW = scaled_dot_product_attention(grouped_BKQW, key_BKLW, value_BKLW, attn_mask=mask, scale=scale)
        split = (lines, keys.shape[2], shared, width, values.shape[-1])
        return attended_BKQW.view(split).permute(0, 3, 1, 2, 4).reshape(lines * width, -1, values.shape[-1])

    def mask(self, shared: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask for heads of which `shared` share keys. It is computed once for all layers."""
        window = None if window is None or window >= self.length else window
        if (shared, window) not in self._masks:
            mask_B1TL = _causal_mask(self.positions_BT, self.length, window, dtype)
            self._masks[shared, window] = mask_B1TL.repeat(1, 1, shared, 1)
        return self._masks[shared, window]

    def rows_of(self, store_RCHW: Tensor) -> Tensor:
        """Return the keys or values of the rows, of shape (B, L, heads, width)."""
        if isinstance(self.rows, slice):
            return store_RCHW[self.rows, : self.length]
        return store_RCHW[:, : self.length].index_select(0, self.rows)


def _causal_mask(positions_BT: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return a mask of shape (B, 1, T, L) to add to the scores: 0 where a query attends to a position, otherwise -inf.

    A query attends to the last `window` positions up to its own, or to all of them if `window` is `None`.
    """
    places_L = torch.arange(length, device=positions_BT.device)
    positions_BT1 = positions_BT[..., None]
    is_hidden_BTL = places_L > positions_BT1
    if window is not None:
        is_hidden_BTL |= places_L <= positions_BT1 - window
    zeros = torch.zeros((), dtype=dtype, device=positions_BT.device)
    return zeros.masked_fill(is_hidden_BTL, -torch.inf)[:, None]


def _tensor(array: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


_current = threading.local()  # the packed chunk being computed in this thread
_WITHOUT_EFFECT = {
    "cache",
    "cache_position",
    "cu_seq_lens_k",
    "max_length_k",
    "max_length_q",
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
    """Compute attention over all stored rows for the current packed chunk.

    The signature is that of the attention interface in `transformers`. The query has the shape (1, heads, N, width).
    The key and the value are the layer's stores in the cache, each of shape (R, C, heads, width). The chunk builds the
    mask. Outside a forward pass of the engine, this function computes scaled dot-product attention.

    Raises:
        NotImplementedError: If an option other than `sliding_window` may change the result.
    """
    chunk: PackedChunk | DecodingChunk | None = getattr(_current, "chunk", None)
    if chunk is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    window = others.pop("sliding_window", None)
    check_attention_options(others)
    return chunk.attend(query[0].transpose(0, 1), key, value, scaling, window)[None], None


def check_attention_options(options: Mapping[str, Any]) -> None:
    """Raise a `NotImplementedError` if one of the options of an attention function may change the result."""
    if unknown := [name for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None]:
        raise NotImplementedError(f"attention over rows does not support {', '.join(unknown)}")


AttentionInterface.register(IMPLEMENTATION, attend_to_rows)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
_one_probe = threading.Lock()


@torch.no_grad()
def masked_window(model: Any) -> int | None:
    """Return the sliding window of a model that does not pass it to its attention function, or None.

    Such a model puts its window only into the mask, which attention over rows does not use. A trial on two tokens
    shows what the model passes.
    """
    text, own = model.config.get_text_config(decoder=True), model.config._attn_implementation
    window: int | None = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if window is None or (types is not None and "sliding_attention" not in types):
        return None
    passed: list[int | None] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        passed.append(options.get("sliding_window"))
        return sdpa_attention_forward(module, query, key, value, attention_mask)

    with _one_probe:
        AttentionInterface.register(f"{IMPLEMENTATION}_probe", attend)
        model.set_attn_implementation(f"{IMPLEMENTATION}_probe")
        try:
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
        finally:
            model.set_attn_implementation(own)
    return window if all(one is None for one in passed) else None


_PROBE = 7
"""Length in tokens of the contexts used to test a layout."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Maximum deviation of last hidden states from a plain forward pass, in standard deviations."""


class RowModel:
    """A causal LM and the cache rows in which it computes.

    Logits are computed only for the requested tokens: a hook before the output embedding selects the hidden states of
    these tokens. This works for every causal LM. Rows are packed if the model uses the attention interface. Otherwise,
    they are padded. Before a layout is used, its results are compared with those of a plain forward pass.

    Args:
        model: the model. It stays in evaluation mode from now on.
        rows: the number of contexts.
        capacity: the number of tokens in each context.
        cuda_graphs: True to replay decoding steps as CUDA graphs. If the device has none, or their results differ, a
            warning is logged and they are not used.

    Raises:
        ConfigError: If the model is not a causal LM, or does not support a cache in rows.
    """

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int, *, cuda_graphs: bool = False) -> None:
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Module):
            raise ConfigError(f"{type(model).__name__} has no output embedding; pass a causal language model")
        text = model.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None) or capacity
        if capacity > positions:
            raise ConfigError(f"max_context: {capacity} exceeds the {positions} positions of {type(model).__name__}")
        self._model = model.train(mode=False)
        # transformers 5.24 renamed past_key_values; a model's own code may keep the old name.
        has_new_name = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if has_new_name else "past_key_values"
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.vocabulary = int(text.vocab_size)
        self.slots = KVSlots(rows, capacity, int(text.num_hidden_layers))
        self._hidden: Tensor | None = None
        self._hook = head.register_forward_pre_hook(self._pick)
        self._own_attention = model.config._attn_implementation
        self.is_packed = True
        self._graphs: DecodingGraphs | None = None
        self._choose_layout(text)
        if cuda_graphs:
            self._try_graphs()

    @property
    def has_graphs(self) -> bool:
        """True if decoding steps are replayed as CUDA graphs."""
        return self._graphs is not None

    def tensor(self, array: NDArray[Any] | Tensor) -> Tensor:
        """Return an array as a tensor on the device of the model."""
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(self._like.device, non_blocking=True)

    def _pick(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._hidden = inputs[0].flatten(0, 1)
        if self.slots.chunk is None:
            return inputs
        if self.slots.chunk.picked_P is None:
            return (self._hidden[None], *inputs[1:])
        self._hidden = self._hidden.index_select(0, self.slots.chunk.picked_P)
        return (self._hidden[None], *inputs[1:])

    def close(self) -> None:
        """Restore the original state of the model, but leave it in evaluation mode."""
        self._hook.remove()
        self._attend_with(self._own_attention)

    def load(
        self,
        state_dict: Mapping[str, Tensor],
        value_head: nn.Module | None = None,
        head_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load weights into the model and, if weights for the value head are passed, into the value head.

        Either all weights are loaded or none.

        Raises:
            PolicyError: If a name or shape does not match the model or the value head.
        """
        own = self._model.state_dict()
        problems = _misfits(own, state_dict)
        heads = value_head.state_dict() if value_head is not None else {}
        problems += [f"{problem} of the value head" for problem in _misfits(heads, head_state)] if head_state else []
        if problems:
            raise PolicyError(f"the weights do not match the model: {', '.join(problems[:5])}")
        with torch.no_grad():
            for target, given in ((own, state_dict), (heads, head_state or {})):
                for name, new in given.items():
                    target[name].copy_(new)

    @torch.inference_mode()
    def run(self, rows_B: Ints, counts_B: Ints, picked: tuple[Ints, Ints]) -> tuple[Tensor, Tensor]:
        """Compute the next `counts_B` tokens in each of the rows `rows_B`, and store their keys and values.

        No row may occur twice. For each token whose logits are requested, `picked` contains the index of its row in
        `rows_B` and the index of the token among the new tokens of that row.

        Returns:
            The logits of the requested tokens, logits_PV, and their last hidden states, hidden_PH.
        """
        slots, result = self.slots, None
        if len(picked[0]) == len(rows_B) == counts_B.sum():
            result = self._decode(rows_B[picked[0]])
        if result is None:
            starts_B = slots.held_R[rows_B]
            length = self._length(starts_B + counts_B)
            slots.reserve(int(rows_B.max()) + 1, length)
            kind = PackedChunk if self.is_packed else PaddedChunk
            result = self._compute(kind(NewTokens(rows_B, starts_B, counts_B, length), slots, picked, self._like))
        slots.held_R[rows_B] += counts_B
        return result

    def _length(self, ends_B: Ints) -> int:
        """Return the number of positions to which tokens attend: the last end, rounded up."""
        return min(-(-int(ends_B.max()) // _EIGHT) * _EIGHT, self.slots.capacity)

    def _compute(self, chunk: PackedChunk | PaddedChunk | DecodingChunk) -> tuple[Tensor, Tensor]:
        """Return the requested logits and last hidden states of a chunk, and store its keys and values."""
        self.slots.chunk = chunk
        _current.chunk = chunk if self.is_packed else None
        try:
            output = self._model(**chunk.inputs, **{self._cache_argument: self.slots}, use_cache=True)
        finally:
            self.slots.chunk = _current.chunk = None
        assert self._hidden is not None
        return output.logits[0], self._hidden

    def _compute_decoding(self, shape: DecodingShape, inputs_KL: Tensor) -> tuple[Tensor, Tensor]:
        return self._compute(DecodingChunk(shape, inputs_KL, self._like, is_packed=self.is_packed))

    def _decode(self, rows_B: Ints) -> tuple[Tensor, Tensor] | None:
        """Compute the next token in each row, with a CUDA graph if possible.

        Return `None` if there are no graphs and keys are best read in place, although the rows are not consecutive.
        """
        slots, ends_B, low, high = self.slots, self.slots.held_R[rows_B] + 1, int(rows_B.min()), int(rows_B.max()) + 1
        if self._graphs is not None:
            shape = DecodingShape.covering(rows_B, int(ends_B.max()), slots.rows, slots.capacity)
        elif 2 * len(rows_B) < high - low:  # as in `_Part`
            shape = DecodingShape(len(rows_B), self._length(ends_B), is_in_place=False)
        elif len(rows_B) == high - low:
            shape = DecodingShape(high - low, self._length(ends_B), is_in_place=True, first=low)
        else:
            return None
        slots.reserve(max(shape.lines, high), shape.length)
        inputs_KL, lines_B = decoding_inputs(shape, rows_B, slots)
        if self._graphs is None or not slots.is_allocated:
            logits_LV, hidden_LH = self._compute_decoding(shape, self.tensor(inputs_KL))
        else:
            if slots.has_moved:
                self._graphs.discard()
                slots.has_moved = False
            try:
                with boundary(PolicyError, "a decoding step"):
                    logits_LV, hidden_LH = self._graphs.run(shape, inputs_KL)
            except RewardKitError as error:
                self._stop_graphs(str(error))
                return None
        if np.array_equal(lines_B, np.arange(len(lines_B))):
            return logits_LV[: len(lines_B)], hidden_LH[: len(lines_B)]
        lines = self.tensor(lines_B)
        return logits_LV.index_select(0, lines), hidden_LH.index_select(0, lines)

    def _stop_graphs(self, reason: str) -> None:
        _log.warning("cuda_graphs: decoding continues without graphs: %s", reason)
        self._graphs = None

    @torch.inference_mode()
    def _try_graphs(self) -> None:
        """Use graphs if they compute the same last hidden states in two steps, the first of which is captured."""
        slots, device, steps = self.slots, self._like.device, 2
        try:
            with boundary(PolicyError, "CUDA graphs"):
                if device.type not in RECORDERS:
                    raise PolicyError(f"there are no graphs on a device of type {device.type}")
                if slots.capacity <= steps:
                    raise PolicyError(f"contexts of {slots.capacity} tokens are too short")
                graphs = DecodingGraphs(self._compute_decoding, RECORDERS[device.type](device), device)
        except RewardKitError as error:
            self._stop_graphs(str(error))
            return
        rows_B, nowhere = np.arange(min(3, slots.rows)), np.zeros(0, dtype=np.int64)
        ones_B, zeros_B = np.ones_like(rows_B), np.zeros_like(rows_B)
        starts_B = np.maximum(min(_PROBE, slots.capacity - steps) - rows_B, 1)
        count = int(starts_B[0]) + steps
        slots.ids_RC[rows_B, :count] = np.arange(1, len(rows_B) * count + 1).reshape(-1, count) % self.vocabulary
        slots.forget()
        self.run(rows_B, starts_B, (nowhere, nowhere))
        for _ in range(steps):
            self._graphs = None
            _, expected_BH = self.run(rows_B, ones_B, (rows_B, zeros_B))
            slots.held_R[rows_B] -= 1
            self._graphs = graphs
            _, hidden_BH = self.run(rows_B, ones_B, (rows_B, zeros_B))
            if not self.has_graphs:
                break
            difference = float((hidden_BH - expected_BH).abs().max() / expected_BH.std().clamp(min=1e-9))
            if not difference < _TOLERANCE.get(self._like.dtype, 0.2):
                self._stop_graphs(f"their last hidden states differ by {difference:.2g} standard deviations")
                break
        slots.forget()

    @torch.inference_mode()
    def _choose_layout(self, text: PretrainedConfig) -> None:
        """Choose packed rows if their last hidden states match those of a plain forward pass.

        Otherwise, choose padded rows.

        There are two test contexts. One is computed in two passes and the other in one pass.
        """
        slots, nowhere = self.slots, np.zeros(0, dtype=np.int64)
        lines, count = min(2, slots.rows), min(_PROBE, slots.capacity)
        ids_BT = np.arange(1, lines * count + 1).reshape(lines, count) % self.vocabulary
        first_B = np.array([count // 2, 0])[:lines]
        rest_B = count - first_B
        self._model(input_ids=self.tensor(ids_BT), use_cache=False)
        assert self._hidden is not None
        plain_BH = self._hidden.unflatten(0, ids_BT.shape)[:, -1]  # type: ignore[no-untyped-call]
        problem = "its last hidden states differ"
        window: int | None = getattr(text, "sliding_window", None)
        unpassed = masked_window(self._model) if self._model._can_set_attn_implementation() else None
        for self.is_packed in (True, False):
            self._attend_with(IMPLEMENTATION if self.is_packed else self._own_attention)
            try:
                with boundary(ConfigError, "test of a layout"):
                    slots.ids_RC[:lines, :count] = ids_BT
                    slots.forget()
                    if first_B[0]:
                        self.run(np.array([0]), first_B[:1], (nowhere, nowhere))
                    _, hidden_BH = self.run(np.arange(lines), rest_B, (np.arange(lines), rest_B - 1))
                    slots.forget()
                    difference = float((hidden_BH - plain_BH).abs().max() / plain_BH.std().clamp(min=1e-9))
            except RewardKitError as error:
                problem = str(error)
                continue
            # The longest context for which the layout attends exactly as far back as the model.
            limits = (getattr(text, "attention_chunk_size", None), unpassed if self.is_packed else window)
            reach = min((limit for limit in limits if limit is not None), default=slots.capacity)
            if difference < _TOLERANCE.get(self._like.dtype, 0.2) and reach >= slots.capacity:
                return
            problem = problem if reach >= slots.capacity else f"set max_context to {reach}, the range of its attention"
        self.close()
        raise ConfigError(
            f"{type(self._model).__name__} does not produce the same results with a cache in rows: {problem}"
        )

    def _attend_with(self, implementation: str) -> None:
        if self._model.config._attn_implementation != implementation and self._model._can_set_attn_implementation():
            self._model.set_attn_implementation(implementation)


def _misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Return the reasons why the weights cannot be loaded."""
    places = {own[name].data_ptr() for name in given if name in own}
    problems = [f"unknown {name}" for name in given if name not in own]
    # One name is enough for tied weights.
    problems += [f"missing {name}" for name in own if name not in given and own[name].data_ptr() not in places]
    return problems + [
        f"{name} has the shape {tuple(new.shape)}, expected {tuple(own[name].shape)}"
        for name, new in given.items()
        if name in own and new.shape != own[name].shape
    ]
