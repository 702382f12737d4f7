"""Small decoders from a few numbers: a stock model of `transformers`, begun so that it trains well from the first step.

The architecture is Qwen3's: a Llama whose queries and keys are normalised before they meet, so that attention cannot
saturate at the high learning rates that small models want. `transformers`, vLLM, SGLang and llama.cpp run it as it is.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from reward_kit.errors import ConfigError

logger = logging.getLogger("reward_kit.rl")

EMBEDDING_STD = 0.02
_MULTIPLE = 32


def build_decoder(
    tokenizer: PreTrainedTokenizerBase | int,
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    kv_heads: int | None = None,
    hidden: int | None = None,
    tie: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Qwen3ForCausalLM:
    """A decoder with fresh weights; the same arguments give the same weights, and no global generator is touched.

    Embeddings begin at a standard deviation of 0.02, so that with tied weights all tokens are about equally likely at
    first; matrices at 1/√(their inputs), so that activations keep their size at any width; the two matrices of a layer
    that write to the residual stream at zero, so that every layer begins as the identity.

    Args:
        tokenizer: the tokenizer, or the number of its tokens.
        layers: decoder layers.
        width: of the residual stream.
        heads: of attention; `width` is a multiple of them.
        context: the longest sequence, in tokens.
        kv_heads: heads of keys and values, of which `heads` is a multiple; by default as many as heads.
        hidden: width inside a layer's MLP; by default 8/3 of `width`, up to the next multiple of 32.
        tie: the embeddings are the output matrix too.
        seed: of the weights.
        dtype: of the weights.

    Raises:
        ConfigError: a number is below 1, or the heads do not divide.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = _MULTIPLE * math.ceil(8 * width / 3 / _MULTIPLE) if hidden is None else hidden
    vocabulary = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    _check(vocabulary=vocabulary, layers=layers, width=width, heads=heads, context=context, kv=kv_heads, hidden=hidden)
    ids: dict[str, Any] = _special_ids(tokenizer)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=context,
        tie_word_embeddings=tie,
        initializer_range=EMBEDDING_STD,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    initialise(model, seed)
    torch.nn.Module.to(model, dtype)
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    logger.info("%s", describe(model))
    return model


def _check(*, vocabulary: int, layers: int, width: int, heads: int, context: int, kv: int, hidden: int) -> None:
    numbers = {"the vocabulary": vocabulary, "layers": layers, "width": width, "heads": heads, "context": context}
    for name, number in (numbers | {"kv_heads": kv, "hidden": hidden}).items():
        if number < 1:
            raise ConfigError(f"{name} is at least 1; got {number}")
    if width % heads or (width // heads) % 2:
        # Rotary positions turn pairs of numbers.
        raise ConfigError(f"width is an even multiple of heads; got width={width} and heads={heads}")
    if heads % kv:
        raise ConfigError(f"heads is a multiple of kv_heads; got heads={heads} and kv_heads={kv}")


def _special_ids(tokenizer: PreTrainedTokenizerBase | int) -> dict[str, int | None]:
    if isinstance(tokenizer, int):
        return {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int) -> None:
    """Begin anew, in place, as `build_decoder` says; any decoder with Llama's names of layers.

    Args:
        model: its weights are float32 here, so that every dtype begins alike.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weights in model.named_parameters():
        if weights.ndim < 2:
            weights.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights.zero_()
        else:
            is_table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            std = EMBEDDING_STD if is_table else weights.shape[1] ** -0.5
            weights.copy_(torch.randn(weights.shape, generator=generator) * std)


@torch.no_grad()
def compose_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, number_weight: float = 0.5
) -> None:
    """Let a token of several words begin as the sum of its words, in place: "take mug 1" as "take" + "mug" + half "1".

    Tokens that share a word are then akin from the start, as input and, with tied weights, as output: to take the mug
    that is asked for, a model has to copy the word and not to learn every pair of a word and a command. The sums are
    scaled to the size of one word. Special tokens keep what they have.

    Args:
        model: its embeddings are of one standard deviation, as `build_decoder` begins them.
        tokenizer: of words, from `build_tokenizer`.
        seed: of the words.
        number_weight: of a word that is a number; which of several mugs it is says less than that it is one.
    """
    table: Any = model.get_input_embeddings().weight
    std, generator = float(table.std()), torch.Generator().manual_seed(seed)
    words: dict[str, torch.Tensor] = {}
    for text, token in sorted(tokenizer.get_vocab().items()):
        parts = text.split()
        if not parts or token in tokenizer.added_tokens_decoder:
            continue
        for part in parts:
            if part not in words:
                words[part] = torch.randn(table.shape[1], generator=generator) * std
        weights = [number_weight if part.isdigit() else 1.0 for part in parts]
        total = torch.stack([words[part] * weight for part, weight in zip(parts, weights, strict=True)]).sum(dim=0)
        table[token] = total / math.hypot(*weights)


def parameter_count(model: PreTrainedModel) -> int:
    """The numbers in all weights, tied ones counted once."""
    return sum(weights.numel() for weights in model.parameters())


def describe(model: PreTrainedModel) -> str:
    """One line, such as "a decoder of 613.2k parameters (40.1k of them embeddings): 2 layers, width 128, …"."""
    config = model.config
    weights: Any = model.get_input_embeddings().weight
    return (
        f"a decoder of {_short(parameter_count(model))} parameters ({_short(weights.numel())} of them embeddings): "
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"context {config.max_position_embeddings}"
    )


def _short(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1_000_000 else f"{count / 1e3:.1f}k"
