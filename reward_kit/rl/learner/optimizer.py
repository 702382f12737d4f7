"""Optimization of trainable parameters: AdamW or Muon with parameter groups, gradient norms, and low-rank adapters.

Low-rank adapters are described in Hu et al. 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, install_hint
from reward_kit.rl.learner.config import LoRAOptions, PPOConfig


def _in_value_head(name: str) -> bool:
    return "value_head" in name.split(".")


def widen(module: nn.Module) -> None:
    """Convert half-precision weights to float32, in place, if they are trained.

    Frozen weights are converted as well, unless only adapters or a value head are trained: other layers cannot compute
    with weights of two types.

    Near 0.02, neighboring bfloat16 numbers differ by 1e-4. An AdamW step is about as large as the learning rate, for
    example 1e-6, so most steps would be lost to rounding.
    """
    half = (torch.bfloat16, torch.float16)
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad and one.dtype in half]
    if all("lora_" in name or _in_value_head(name) for name, _ in trained):
        for _, parameter in trained:
            parameter.data = parameter.data.float()
        return
    nn.Module.float(module)


def check_critic(config: PPOConfig, *, has_values: bool) -> None:
    """Raise a `ConfigError` if critic options are set but the module has no value head."""
    if config.of_critic and not has_values:
        raise ConfigError(
            f"{', '.join(config.of_critic)}: the module has no value head; train a PolicyWithValue (set "
            "value_head: true for an hf policy)"
        )


def make_optimizer(module: nn.Module, config: PPOConfig) -> torch.optim.Optimizer:
    """Create the optimizer of `config` for the groups returned by `parameter_groups`."""
    groups = parameter_groups(module, config)
    return MuonWithAdamW(groups, config) if config.optimizer == "muon" else _adamw(groups, config)


def _adamw(groups: list[dict[str, Any]], config: PPOConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.adam_epsilon, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the groups with `is_muon`, and AdamW for the others, with the state of both.

    The step of Muon is scaled to the size of AdamW's steps (Liu et al. 2025), so learning rates fit both.
    """

    def __init__(self, groups: list[dict[str, Any]], config: PPOConfig) -> None:
        super().__init__(groups, {})
        muon, others = self._groups(is_muon=True), self._groups(is_muon=False)
        if not muon:
            raise ConfigError("optimizer: muon trains matrices of hidden layers, but the module has none; set adamw")
        if any(hasattr(one, "full_tensor") for group in muon for one in group["params"]):
            raise ConfigError("optimizer: muon cannot train weights that are sharded over processes; set adamw")
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = [
            (True, torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw"))
        ]
        self._parts += [(False, _adamw(others, config))] if others else []

    def _groups(self, *, is_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["is_muon"] == is_muon]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step with both optimizers. `closure` must be None."""
        for is_muon, part in self._parts:
            part.param_groups, part.state = self._groups(is_muon=is_muon), self.state
            part.step(closure)


def parameter_groups(module: nn.Module, config: PPOConfig) -> list[dict[str, Any]]:
    """Divide the trainable parameters into groups by name pattern, by value head or policy, and by matrix or vector.

    Raises:
        ConfigError: If the module has no trainable parameters, or a pattern in `lr_by_name` matches no parameter.
    """

    def pattern_of(name: str) -> str | None:
        return next((pattern for pattern in config.lr_by_name if fnmatchcase(name, pattern)), None)

    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    layers.append(getattr(module, "get_output_embeddings", lambda: None)())
    embeddings = {id(getattr(layer, "weight", None)) for layer in layers}
    groups: dict[
        tuple[str | None, bool, bool, bool], list[nn.Parameter]
    ] = {}  # the key: name pattern, whether it belongs to the value head, is a matrix, and is trained with Muon
    for name, parameter in trained.items():
        is_muon = config.optimizer == "muon" and parameter.dim() == 2 and id(parameter) not in embeddings
        is_muon = is_muon and not _in_value_head(name)
        kind = (pattern_of(name), _in_value_head(name), parameter.dim() >= 2, is_muon)
        groups.setdefault(kind, []).append(parameter)
    if not groups:
        raise ConfigError("the module has no trainable parameters; set requires_grad for at least one of them")
    used = {pattern for pattern, *_ in groups}
    for pattern in [one for one in config.lr_by_name if one not in used]:
        if fits := [name for name in trained if fnmatchcase(name, pattern)]:
            raise ConfigError(
                f"lr_by_name: {pattern!r} has no effect, because the earlier pattern {pattern_of(fits[0])!r} "
                "matches the same parameters; put it first"
            )
        names = list(trained)
        shown = ", ".join(names if len(names) <= 6 else [*names[:5], names[-1]])
        raise ConfigError(
            f"lr_by_name: {pattern!r} does not match any of the {len(names)} trained parameters, such as {shown}"
        )
    of_value = [pattern for pattern, is_value, *_ in groups if is_value]
    if config.value_lr is not None and of_value and None not in of_value:
        raise ConfigError(
            "value_lr has no effect, because patterns in lr_by_name match the whole value head; remove one of them"
        )
    made: list[dict[str, Any]] = []
    for (fitting, is_value, is_matrix, is_muon), parameters in groups.items():
        lr = config.value_lr if is_value and config.value_lr is not None else config.lr
        lr = lr if fitting is None else config.lr_by_name[fitting]
        decay = config.weight_decay if is_matrix else 0.0
        made.append({"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": decay, "is_muon": is_muon})
    return made


def rates(config: PPOConfig, factor: float) -> dict[str, float]:
    """Return the learning rates for this factor, keyed by their names in logs: `lr`, `value_lr` and `lr/<pattern>`."""
    named = {"lr": config.lr} | {f"lr/{pattern}": rate for pattern, rate in config.lr_by_name.items()}
    if config.value_lr is not None:
        named["value_lr"] = config.value_lr
    return {name: rate * factor for name, rate in named.items()}


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to its base rate times the factor of the schedule."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def reorder_optimizer_state(
    names: Sequence[str], theirs: Sequence[str] | None, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert a saved state to the parameter order of this optimizer, whose groups may differ from the saved ones.

    `names` and `theirs` are the names of the parameters in this optimizer and in the saved one, in order. If `theirs`
    is `None`, the groups are the same.
    """
    if theirs is None or list(theirs) == list(names):
        return dict(state)
    if sorted(theirs) != sorted(names):
        raise ValueError("the trained parameters of the saved state are different")
    index_of = {name: index for index, name in enumerate(names)}
    moments = {index_of[theirs[int(index)]]: moment for index, moment in state["state"].items()}
    return {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None) -> Tensor:
    """Clip the gradients to the 2-norm `limit` unless it is `None`. Return the norm over all shards before clipping.

    If the norm is not finite, the gradients stay as they are, so that those that are not finite can be named.
    """
    norm: Any = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm.nan_to_num(nan=0.0, posinf=0.0))
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


def add_adapters(module: nn.Module, options: LoRAOptions, seed: int = 0) -> None:
    """Add adapters to a `transformers` model or a `PolicyWithValue`, in place.

    Only the adapters and, if present, the value head are trained. Initially, adapters have no effect, because one of an
    adapter's two matrices is 0. The other matrix is random.

    Raises:
        ConfigError: If `peft` is not installed, the module already has adapters, or no layer matches a target.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"lora requires peft; {install_hint('lora')}") from error
    if has_adapters(module):
        raise ConfigError("the module already has adapters; remove lora to train the existing ones")
    base: Any = getattr(module, "policy", module)  # a `PolicyWithValue` contains the model and its head
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    make: Any = peft.LoraConfig  # its annotation of lora_alpha is narrower than the accepted types
    config = make(r=options.rank, lora_alpha=options.alpha, target_modules=targets, lora_dropout=0.0)
    try:
        # peft draws adapters on the CPU. Forking the generators of several GPUs would raise a warning.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(config, base)
    except ValueError as error:
        raise ConfigError(f"lora.targets {options.targets!r}: {error}") from error
    for name, parameter in base.named_parameters():
        parameter.requires_grad_("lora_" in name)


def has_adapters(module: nn.Module) -> bool:
    """Return True if the module has low-rank adapters."""
    return any(_is_adapter(layer) for layer in module.modules())


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Disable the adapters of the module during the block."""
    layers: list[Any] = [layer for layer in module.modules() if _is_adapter(layer)]
    trainable = {parameter: parameter.requires_grad for parameter in module.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # peft freezes adapters that are disabled.
        for parameter, was in trainable.items():
            parameter.requires_grad_(was)


def _is_adapter(layer: nn.Module) -> bool:
    # Test attributes so that peft is imported only if it is used.
    return hasattr(layer, "lora_A") and hasattr(layer, "enable_adapters")
