"""Models with random weights, rows of random episodes, clocks, and rounding errors, for all stages."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from reward_kit.tokens import TokenBatch


class Shape(NamedTuple):
    """The dimensions of a Qwen2 model."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = True


SHAPES = {
    "tiny": Shape(layers=2, width=32, hidden=64, heads=4, kv_heads=2, vocabulary=96),
    "small": Shape(layers=12, width=768, hidden=2048, heads=12, kv_heads=4, vocabulary=8192),
    # The dimensions of Qwen2.5-0.5B and Qwen2.5-1.5B.
    "0.5B": Shape(layers=24, width=896, hidden=4864, heads=14, kv_heads=2, vocabulary=151_936),
    "1.5B": Shape(layers=28, width=1536, hidden=8960, heads=12, kv_heads=2, vocabulary=151_936),
}


def qwen2(
    shape: Shape,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    is_peaked: bool = False,
    attention: str = "sdpa",
    positions: int = 16_384,
) -> Qwen2ForCausalLM:
    """Return a model with random weights, in evaluation mode.

    If `is_peaked` is true, weights are larger, so that logits depend on the whole context and greedy tokens are not
    ties. Models wider than 800 are drawn on the device, which is faster; all others are equal on every device.
    """
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.is_tied and not is_peaked,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    torch.manual_seed(seed)
    with torch.device(device if shape.width > 800 else "cpu"):
        model = Qwen2ForCausalLM(config)
    if is_peaked:
        for name, weights in model.named_parameters():
            if weights.dim() > 1 and "embed_tokens" not in name:
                gain = 3.0 if "lm_head" in name else 1.0
                torch.nn.init.normal_(weights, std=gain * weights.shape[1] ** -0.5)
    return model.to(device=device, dtype=dtype).eval()


def parameters(model: torch.nn.Module) -> int:
    """Count the weights of a model."""
    return sum(one.numel() for one in model.parameters())


def random_rows(count: int, length: int, vocabulary: int, seed: int = 0, *, is_ragged: bool = True) -> TokenBatch:
    """Return rows of random tokens of which about a quarter are in the loss, in actions of up to 32 tokens.

    If `is_ragged` is true, the lengths of the rows lie between a quarter of `length` and `length`.
    """
    rng, period = np.random.default_rng(seed), min(128, max(length // 4, 4))
    lengths_B = rng.integers(max(length // 4, 1), length + 1, count) if is_ragged else np.full(count, length)
    lengths_B[0] = length
    columns_T = np.arange(length)
    is_token_BT = columns_T < lengths_B[:, None]
    is_action_BT = is_token_BT & (columns_T % period >= period - period // 4)
    shape = (count, length)
    return TokenBatch(
        {
            "input_ids": rng.integers(1, vocabulary, shape).astype(np.int32) * is_token_BT,
            "attention_mask": is_token_BT.astype(np.int8),
            "action_mask": is_action_BT.astype(np.int8),
            "loss_mask": is_action_BT.astype(np.int8),
            "logprobs": np.where(is_action_BT, -np.log(vocabulary), 0.0).astype(np.float32),
            "advantages": (rng.normal(size=(count, 1)) * is_action_BT).astype(np.float32),
            "policy_versions": np.zeros(shape, dtype=np.int32),
        },
        {},
        {"padding": "right", "pad_token_id": 0},
    )


def epsilon(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps)


def logit_error(dtype: torch.dtype, layers: int, width: int, scale: float) -> float:
    """Return a bound for the difference of a logit that is computed twice, in different orders or with other kernels.

    Every layer rounds about eight intermediate results, and each rounding adds an independent relative error of at most
    half an epsilon to a part of the residual stream: together √(8·L + 8)·ε/2 relative to the logits, of standard
    deviation `scale`. In float32 the sums over `width` terms, whose error grows like √width, are rounded as well; in
    bfloat16 kernels add in float32. Six standard deviations cover the extreme of millions of logits, and two
    computations differ by √2 times as much as one.
    """
    terms = 8 * layers + 8
    sums = width**0.5 if dtype == torch.float32 else 1.0
    return 6.0 * 2**0.5 * terms**0.5 * sums * epsilon(dtype) / 2 * scale


def synchronize(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], device: str, rounds: int = 3, warm_ups: int = 1) -> float:
    """Return the median of the seconds that a call takes."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)


def reset_peak_memory(device: str) -> None:
    """Free cached memory, and begin to measure the peak."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_gb(device: str) -> float | None:
    """Return the peak of allocated memory in GB, or None on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None


def matmul_rate(device: str, dtype: torch.dtype, side: int) -> float:
    """Return the measured FLOP/s of a square matrix product."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / timed(lambda: one @ other, device, rounds=10, warm_ups=3)


def is_importable(module: str) -> bool:
    """Return whether a module is installed."""
    return importlib.util.find_spec(module) is not None
