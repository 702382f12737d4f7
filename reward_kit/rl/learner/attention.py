"""The attention of a trained module: an implementation of `transformers`, or attention within packed rows.

The rows of a packed micro-batch are concatenated, so that no padding passes through the module. Only attention must
distinguish them. Two functions for this are registered with the attention interface of `transformers`: one calls the
kernel for rows of variable length that `torch` has for GPUs, and the other computes one row after the other. The
implementations of FlashAttention in `transformers` support packed rows themselves.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from reward_kit.agent.policies.hf.forward import check_attention_options, masked_window
from reward_kit.errors import ConfigError, boundary
from reward_kit.rl.learner.config import Attention
from reward_kit.rl.learner.training_rows import Packing

logger = logging.getLogger("reward_kit.rl")
VARLEN, BY_ROW = "reward_kit_varlen", "reward_kit_by_row"
CLOSE = 0.02
"""The relative tolerance of comparisons, above the error of bfloat16 and far below the difference of two tokens."""
_LENGTHS = (3, 5)
"""The lengths of the rows in a trial."""
_PACKABLE = {"full_attention", "sliding_attention"}
"""The kinds of layers that mix tokens only in the attention interface."""
_FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}


def attend_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute scaled dot-product attention within packed rows, one row after the other.

    The signature is that of the attention interface in `transformers`. If the rows are not packed, `cu_seq_lens_q` is
    None, and the mask is that of the model.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    check_attention_options(others)
    cuts, attended = cu_seq_lens_q.tolist(), []
    for start, stop in itertools.pairwise(cuts):
        one, mask = [states[:, :, start:stop] for states in (query, key, value)], None
        if sliding_window is not None and sliding_window < stop - start:
            columns_T = torch.arange(stop - start, device=query.device)
            distances_TT = columns_T.unsqueeze(1) - columns_T
            mask = ((distances_TT >= 0) & (distances_TT < sliding_window))[None, None]
        attended.append(sdpa_attention_forward(module, one[0], one[1], one[2], mask, dropout, scaling)[0])
    return torch.cat(attended, dim=1), None


def attend_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention within packed rows with the kernel of `torch` for rows of variable length.

    The kernel exists only for GPUs and types of 16 bits.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    check_attention_options(others)
    if dropout:
        raise NotImplementedError("the kernel for rows of variable length has no dropout")
    device, dtype = query.device.type, query.dtype
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # Autocast does not know the kernel.
    attended_NHW = varlen_attn(
        query[0].transpose(0, 1).to(dtype),
        key[0].transpose(0, 1).to(dtype),
        value[0].transpose(0, 1).to(dtype),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended_NHW, Tensor)
    return attended_NHW.unsqueeze(0), None


for _name, _function in ((VARLEN, attend_varlen), (BY_ROW, attend_by_row)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)


def packed_inputs(packing: Packing, name: str) -> dict[str, Any]:
    """Return the arguments of a module with the attention implementation `name` for packed rows."""
    inputs = {
        "position_ids": packing.positions_1L,
        "cu_seq_lens_q": packing.cu_seqlens,
        "cu_seq_lens_k": packing.cu_seqlens,
        "max_length_q": packing.longest,
        "max_length_k": packing.longest,
    }
    # A mask with four dimensions keeps the model from making one.
    return inputs if name in _FLASH else inputs | {"attention_mask": packing.cu_seqlens.new_zeros(1, 1, 1, 1)}


def attention_name(module: nn.Module) -> str:
    """Return the name of the attention implementation of a module, or "" if it is not a `transformers` model."""
    name: str | None = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name or ""


def last_hidden(module: nn.Module, head: nn.Module, **inputs: Any) -> Tensor:
    """Return the hidden states from which the head of a causal language model computes logits."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        module(use_cache=False, **inputs)
    finally:
        handle.remove()
    return seen[0].float()


def use_attention(module: nn.Module, head: nn.Module, name: Attention) -> None:
    """Use an attention implementation of `transformers`. If it does not work, keep the current one, and log a warning.

    A trial on a few tokens compares the results of both.
    """
    try:
        if name in _FLASH and not _FLASH[name]():
            reason = "there is no GPU"
            if torch.cuda.is_available():
                reason = f"the package {_PACKAGES[name]} is not installed, or is too old"
            raise ConfigError(reason)
        _try_attention(module, head, name, is_packed=False)
    except ConfigError as error:
        logger.warning("ppo.attention: %s is used instead of %s: %s", attention_name(module), name, _line(error))


def use_packed_attention(module: nn.Module, head: nn.Module) -> bool:
    """Use attention for packed rows, and return whether that works. If it does not, log a warning.

    A trial on a few tokens compares packed rows with single rows.
    """
    names = [BY_ROW]
    if (own := attention_name(module)) in _FLASH:
        names = [own]
    elif next(module.parameters()).device.type == "cuda":
        names = [VARLEN, BY_ROW]
    reason = ""
    for name in names:
        try:
            _try_attention(module, head, name, is_packed=True)
        except ConfigError as error:
            reason = _line(error)
            logger.info("ppo.packed: %s", reason)
        else:
            return True
    logger.warning("ppo.packed: rows are padded, because the module cannot compute packed rows: %s", reason)
    return False


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _try_attention(module: nn.Module, head: nn.Module, name: str, *, is_packed: bool) -> None:
    """Set the attention implementation of a module if it computes the same hidden states.

    Raises:
        ConfigError: If it fails, or computes others.
    """
    base: Any = getattr(module, "policy", module)
    own, device = attention_name(module), next(module.parameters()).device
    if not (hasattr(base, "set_attn_implementation") and base._can_set_attn_implementation()):
        raise ConfigError(f"{type(base).__name__} has a fixed attention")
    text: Any = base.config.get_text_config(decoder=True)
    others = sorted({*(getattr(text, "layer_types", None) or ())} - _PACKABLE)
    if is_packed and others:
        raise ConfigError(f"{type(base).__name__} has layers of the type {others[0]}")
    if is_packed and name not in _FLASH and masked_window(base) is not None:
        raise ConfigError(f"{type(base).__name__} does not pass its sliding window to its attention function")
    first, count = _LENGTHS[0], sum(_LENGTHS)
    ids_N = torch.arange(count, device=device) % int(text.vocab_size)
    inputs: dict[str, Any] = {"input_ids": ids_N[None]}
    rows = [ids_N[None]]
    if is_packed:
        rows = [ids_N[None, :first], ids_N[None, first:]]
        inputs |= packed_inputs(Packing.of(np.array(_LENGTHS), device), name)
    with torch.no_grad():
        expected_NH = torch.cat([last_hidden(module, head, input_ids=ids)[0] for ids in rows])
    trained = [one for one in module.parameters() if one.requires_grad][:1]
    try:
        with boundary(ConfigError, name):
            base.set_attn_implementation(name)
            with torch.set_grad_enabled(bool(trained)):
                found_NH = last_hidden(module, head, **inputs)[0]
                if trained:  # The kernel of the backward pass may be missing.
                    torch.autograd.grad(found_NH.square().sum(), trained, allow_unused=True)
            difference = float((found_NH.detach() - expected_NH).abs().max() / expected_NH.abs().max())
        if not difference <= CLOSE:
            raise ConfigError(f"{name}: hidden states differ by {difference:.2g}")
    except ConfigError:
        base.set_attn_implementation(own)
        raise
