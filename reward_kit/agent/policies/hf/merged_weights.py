"""A module's weights as a model without adapters has them: what an engine acts with while adapters are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The weights under the names that they have without low-rank adapters, each adapter added to its matrix.

    The module stays as it is. Without adapters this is the module's own `state_dict`.

    Args:
        module: with the adapters of `peft` in it or not.
    """
    state: dict[str, Tensor] = module.state_dict()
    for path, layer in module.named_modules():
        # By what it has, so that nothing of peft is imported where it is not used.
        if hasattr(layer, "lora_A") and hasattr(layer, "get_delta_weight"):
            _merge(state, path, layer)
    return state


def _merge(state: dict[str, Tensor], path: str, layer: Any) -> None:
    for key in [key for key in state if key.startswith(f"{path}.lora_")]:
        del state[key]
    for key in [key for key in state if key.startswith(f"{path}.base_layer.")]:
        state[key.replace(".base_layer.", ".")] = state.pop(key)
    weight = layer.get_base_layer().weight
    # What peft has merged already stands in the weight; and not every adapter has a part in every layer.
    known = {*layer.lora_A, *layer.lora_embedding_A} - {*layer.merged_adapters}
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in known]
    delta = sum((layer.get_delta_weight(name) for name in names), torch.zeros_like(weight))
    state[f"{path}.weight"] = (weight + delta.to(weight.dtype)).detach()
