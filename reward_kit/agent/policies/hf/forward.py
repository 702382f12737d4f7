"""A `transformers` causal LM that computes the new tokens of many contexts at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from reward_kit.agent.policies.hf.chunks import IMPLEMENTATION, NewTokens, PackedChunk, PaddedChunk, attending_to
from reward_kit.agent.policies.hf.kv_slots import Ints, KVSlots
from reward_kit.errors import ConfigError, PolicyError, RewardKitError, boundary

_PROBE = 7
"""Tokens of the contexts with which a model is tried out."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How far last hidden states may differ from a plain forward pass, in their standard deviations."""


class Outcome(NamedTuple):
    """What the model said at the wanted places: `logits_PV` and the last hidden states `hidden_PH`."""

    logits_PV: Tensor
    hidden_PH: Tensor


class RowModel:
    """A causal LM and the rows it computes in.

    Logits are computed at the wanted places only: a hook in front of the output embedding picks the hidden states
    there, which works for every causal LM. Rows are packed where the model lets attention be done by a function of
    ours, else padded; either is tried out first against a plain forward pass.

    Args:
        model: in evaluation mode from here on.
        rows: how many contexts are held.
        capacity: tokens of a context.

    Raises:
        ConfigError: the model is no causal LM, or cannot compute in rows.
    """

    def __init__(self, model: PreTrainedModel, rows: int, capacity: int) -> None:
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if not isinstance(head, nn.Module):
            raise ConfigError(f"{type(model).__name__} has no output embedding: give a causal language model")
        text = model.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None) or capacity
        if capacity > positions:
            raise ConfigError(f"max_context: {capacity} is above the {positions} positions of {type(model).__name__}")
        self._model = model.train(mode=False)
        self._like = torch.empty(0, dtype=model.dtype, device=model.device)
        self.vocabulary = int(text.vocab_size)
        self.slots = KVSlots(rows, capacity, int(text.num_hidden_layers))
        self._hidden: Tensor | None = None
        self._hook = head.register_forward_pre_hook(self._pick)
        self._own_attention = model.config._attn_implementation
        self.is_packed = True
        self._choose_layout(text)

    def tensor(self, array: NDArray[Any] | Tensor) -> Tensor:
        """An array where the model is."""
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(self._like.device, non_blocking=True)

    def _pick(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._hidden = inputs[0].flatten(0, 1)
        if self.slots.chunk is None:
            return inputs
        self._hidden = self._hidden.index_select(0, self.slots.chunk.picked_P)
        return (self._hidden[None], *inputs[1:])

    def close(self) -> None:
        """Leave the model as it was found, in evaluation mode."""
        self._hook.remove()
        self._attend_with(self._own_attention)

    def load(
        self,
        state_dict: Mapping[str, Tensor],
        value_head: nn.Module | None = None,
        head_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take over weights, all or none.

        Args:
            state_dict: of the model.
            value_head: stands beside the model.
            head_state: of the value head; none leaves it as it is.

        Raises:
            PolicyError: names or shapes are not those of the model or the value head.
        """
        own = self._model.state_dict()
        problems = _misfits(own, state_dict)
        heads = value_head.state_dict() if value_head is not None else {}
        problems += [f"{problem} of the value head" for problem in _misfits(heads, head_state)] if head_state else []
        if problems:
            raise PolicyError(f"the weights do not fit the model: {', '.join(problems[:5])}")
        with torch.no_grad():
            for target, given in ((own, state_dict), (heads, head_state or {})):
                for name, new in given.items():
                    target[name].copy_(new)

    @torch.inference_mode()
    def run(self, rows_B: Ints, counts_B: Ints, picked: tuple[Ints, Ints]) -> Outcome:
        """Compute the next tokens of some rows, and hold their keys and values.

        Args:
            rows_B: which rows, each once.
            counts_B: how many tokens of each, from the first that is not held yet.
            picked: for every wanted place the index into `rows_B` and the index among the row's new tokens.
        """
        slots, new = self.slots, NewTokens(rows_B, self.slots.held_R[rows_B], counts_B)
        kind = PackedChunk if self.is_packed else PaddedChunk
        slots.reserve(int(rows_B.max()) + 1, int((new.starts_B + counts_B).max()))
        slots.chunk = chunk = kind(new, slots.ids_RC[:, : slots.reserved[1]], picked, self._like)
        try:
            with attending_to(chunk) if isinstance(chunk, PackedChunk) else nullcontext():
                output = self._model(**chunk.inputs, past_key_values=slots, use_cache=True)
        finally:
            slots.chunk = None
        slots.held_R[rows_B] += counts_B
        assert self._hidden is not None
        return Outcome(output.logits[0], self._hidden)

    def _choose_layout(self, text: PretrainedConfig) -> None:
        """Packed if that gives what a plain forward pass gives, else padded."""
        problem = "its last hidden states differ"
        plain = self._plain_hidden()
        for self.is_packed in (True, False):
            self._attend_with(IMPLEMENTATION if self.is_packed else self._own_attention)
            try:
                with boundary(ConfigError, "tried out"):
                    difference = float((self._hidden_in_rows() - plain).abs().max() / plain.std().clamp(min=1e-9))
            except RewardKitError as error:
                problem = str(error)
                continue
            reach = self._reach(text)
            if difference < _TOLERANCE.get(self._like.dtype, 0.2) and reach >= self.slots.capacity:
                return
            problem = problem if reach >= self.slots.capacity else f"set max_context to {reach}, how far it looks back"
        self.close()
        raise ConfigError(f"{type(self._model).__name__} does not compute the same with a cache in rows: {problem}")

    def _reach(self, text: PretrainedConfig) -> int:
        """The longest context in which the layout looks as far back as the model does, and no farther."""
        limits = [getattr(text, "attention_chunk_size", None)]
        if not self.is_packed:
            limits.append(getattr(text, "sliding_window", None))
        return min((limit for limit in limits if limit is not None), default=self.slots.capacity)

    def _attend_with(self, implementation: str) -> None:
        if self._model.config._attn_implementation != implementation and self._model._can_set_attn_implementation():
            self._model.set_attn_implementation(implementation)

    def _probes(self) -> tuple[Ints, Ints]:
        """Contexts that rows are tried out with, and how many of their tokens a first pass computes."""
        count, lines = min(_PROBE, self.slots.capacity), min(2, self.slots.rows)
        ids_BT = np.arange(1, lines * count + 1).reshape(lines, count) % self.vocabulary
        return ids_BT, np.array([count // 2, 0])[:lines]

    @torch.inference_mode()
    def _plain_hidden(self) -> Tensor:
        """(B, H) last hidden states of the probes, computed in the ordinary way."""
        ids_BT, _ = self._probes()
        self._model(input_ids=self.tensor(ids_BT), use_cache=False)
        assert self._hidden is not None
        return self._hidden.unflatten(0, ids_BT.shape)[:, -1]  # type: ignore[no-untyped-call,no-any-return]

    def _hidden_in_rows(self) -> Tensor:
        """The same, computed in rows: one row in two passes, the other in one."""
        (ids_BT, first_B), slots = self._probes(), self.slots
        lines, count = ids_BT.shape
        slots.ids_RC[:lines, :count] = ids_BT
        slots.forget()
        nowhere = np.zeros(0, dtype=np.int64)
        if first_B[0]:
            self.run(np.array([0]), first_B[:1], (nowhere, nowhere))
        rest_B = count - first_B
        hidden = self.run(np.arange(lines), rest_B, (np.arange(lines), rest_B - 1)).hidden_PH
        slots.forget()
        return hidden


def _misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights from being taken over."""
    places = {own[name].data_ptr() for name in given if name in own}
    problems = [f"unknown {name}" for name in given if name not in own]
    # Of tied weights one name is enough.
    problems += [f"missing {name}" for name in own if name not in given and own[name].data_ptr() not in places]
    return problems + [
        f"{name} is {tuple(new.shape)}, not {tuple(own[name].shape)}"
        for name, new in given.items()
        if name in own and new.shape != own[name].shape
    ]
