"""The last layer of a decoder at the tokens that are scored, and nowhere else.

What comes after the last layer's attention looks at one token at a time, and of most tokens of an episode, which are
observations, nothing is asked any more. Keys and values are made of all tokens as ever; the attention's output, the
feed-forward part and the last norm are those of the scored tokens alone. Of a model with two layers that is a fifth of
the work, of one with twenty-four a fiftieth.

It is done with hooks for the time of one forward pass; the model's code is not touched. Whether a model is built so
is not believed but tried out, on four tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reward_kit.rl.learner.sharding import layers_of

_CLOSE = 0.02
"""Of the greatest number: more than bfloat16 is off by, and far less than any other token's hidden state."""


@dataclass(frozen=True, slots=True)
class LastLayer:
    """The parts of a layer `x + attention(norm(x))`, followed by what looks at one token at a time.

    Attributes:
        layer: the whole.
        norm: what stands before its attention.
        out: the attention's last projection.
    """

    layer: nn.Module
    norm: nn.Module
    out: nn.Module

    @contextmanager
    def only_at(self, places_N: Tensor) -> Iterator[None]:
        """For the forward passes in this block, hidden states after the layer are (1,N,H), those of these tokens.

        Args:
            places_N: on the flat axis (B·T) of the ids.
        """
        whole_BTH = places_N.new_zeros(0)

        def pick(values: Tensor) -> Tensor:
            return values.reshape(-1, values.shape[-1]).index_select(0, places_N).unsqueeze(0)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal whole_BTH
            whole_BTH = args[0]
            return (pick(whole_BTH), *args[1:])

        def see_all(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (whole_BTH, *args[1:])

        def leave(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (pick(args[0]), *args[1:])

        handles = [
            part.register_forward_pre_hook(hook)
            for part, hook in ((self.layer, enter), (self.norm, see_all), (self.out, leave))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def last_layer_of(module: nn.Module, head: nn.Module) -> LastLayer | None:
    """The last layer of a causal language model, where it is built so; None where it is not, or nobody can tell.

    Args:
        module: called with `input_ids`, in the mode in which it will be scored.
        head: what makes logits of hidden states.
    """
    layers = layers_of(module)
    if not layers:
        return None
    attention = getattr(layers[-1], "self_attn", None)
    norm, out = getattr(layers[-1], "input_layernorm", None), getattr(attention, "o_proj", None)
    if not (isinstance(norm, nn.Module) and isinstance(out, nn.Module)):
        return None
    found = LastLayer(layers[-1], norm, out)
    return found if _holds_of(found, module, head) else None


@torch.no_grad()
def _holds_of(found: LastLayer, module: nn.Module, head: nn.Module) -> bool:
    """Whether hidden states are the same when only some of them are made."""
    device = next(module.parameters()).device
    places = torch.tensor([1, 3], device=device)
    expected = _hidden(module, head, device)[:, places]
    try:
        with found.only_at(places):
            hidden = _hidden(module, head, device)
    except (RuntimeError, TypeError, ValueError, IndexError):  # shapes do not fit: it is built in another way
        return False
    if hidden.shape != expected.shape:
        return False
    return bool((hidden - expected).abs().max() <= _CLOSE * expected.abs().max())


def _hidden(module: nn.Module, head: nn.Module, device: torch.device) -> Tensor:
    """(B,T,H) what the head sees of a row of four tokens."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        module(input_ids=torch.arange(4, device=device).unsqueeze(0), use_cache=False)
    finally:
        handle.remove()
    return seen[0].float()
