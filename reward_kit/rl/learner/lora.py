"""Low-rank adapters (Hu et al. 2022) by way of `peft`: a module's weights stay, small matrices beside them train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reward_kit.credit.options import check_number
from reward_kit.errors import ConfigError, how_to_install


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAOptions:
    """Which matrices get an adapter, and how large.

    Attributes:
        rank: of an adapter's two matrices.
        alpha: an adapter's output is multiplied by alpha / rank.
        targets: names of linear layers, by the end of their path; "all-linear" is every one but the head.

    Raises:
        ConfigError: a number is out of range, or there are no targets.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = "all-linear"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora.rank is a whole number from 1; got {self.rank!r}")
        check_number("lora.alpha", self.alpha, 0.0)
        if not self.targets:
            raise ConfigError("lora.targets names at least one layer")


def add_adapters(module: nn.Module, options: LoRAOptions, seed: int = 0) -> None:
    """Put adapters into the module, in place; only they are trainable afterwards, and a value head.

    They begin by changing nothing: one of the two matrices is 0, the other random.

    Args:
        module: a model of `transformers`, or a `PolicyWithValue`.
        options: which layers.
        seed: of the random matrices.

    Raises:
        ConfigError: `peft` is not installed, there are adapters already, or no layer has such a name.
    """
    peft = _peft()
    if has_adapters(module):
        raise ConfigError("the module has adapters already; leave lora out to train those")
    base = getattr(module, "policy", module)  # a `PolicyWithValue` holds the model beside its head
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    config = peft.LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, base)
    except ValueError as error:
        raise ConfigError(f"lora.targets {options.targets!r}: {error}") from error
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("lora_" in name)


def has_adapters(module: nn.Module) -> bool:
    """Whether low-rank adapters are in the module."""
    return any(_is_adapter(layer) for layer in module.modules())


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """The module as it was before the adapters: inside the block they add nothing."""
    layers: list[Any] = [layer for layer in module.modules() if _is_adapter(layer)]
    trainable = {parameter: parameter.requires_grad for parameter in module.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # peft freezes adapters that are off.
        for parameter, was in trainable.items():
            parameter.requires_grad_(was)


def _is_adapter(layer: nn.Module) -> bool:
    # By what it has, so that nothing of peft is imported where it is not used.
    return hasattr(layer, "lora_A") and hasattr(layer, "enable_adapters")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora needs peft; {how_to_install('lora')}") from error
    return peft
