"""Small models that require no hub: chat templates, domain tokenizers, decoders of any size, and model directories.

The chat template uses one token for each role and puts nothing between messages:

    <|tools|>{"type": "function", …}       the available tools, one per line
    <|system|>You do chores.<|user|>You see a fridge 1.
    <|assistant|>go to fridge 1<|end|>     (without these line breaks)
    <|tool|>You arrive.<|assistant|>

A message ends where the token of the next role begins. Only assistant messages end with a separate token, the
end-of-sequence token `<|end|>`. The text of a message never depends on later messages, so an episode's tokens so far
are always a prefix of its next prompt. If a message contains the text of a special token, that text is split into
multiple tokens so that no message can imitate a different role. Tool calls are written in the action format "hermes".

Decoders have the architecture of Qwen3: a Llama in which queries and keys are normalized so that attention cannot
saturate at the high learning rates used for small models. This architecture runs unchanged in `transformers`, vLLM,
SGLang and llama.cpp.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from reward_kit.agent.policies.hf.model import no_progress_bars, refuse_missing_weights
from reward_kit.errors import ConfigError, StoreError, boundary
from reward_kit.rl.checkpoint import atomic_folder
from reward_kit.validation import check_choice

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLE_MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
SPECIAL_TOKENS = (PAD, UNKNOWN, END, *ROLE_MARKS)
CALL_MARKS = ("<tool_call>", "</tool_call>")
"""The tokens around a tool call in JSON. Each of them is one token and part of the text."""
CHAT_TEMPLATE = """\
{%- macro safe(text) -%}{{ text | replace('<|', '< |') }}{%- endmacro -%}
{%- macro words(content) -%}
{%- if content is string -%}{{ safe(content) }}
{%- elif content -%}{%- for part in content -%}{{ safe(part.text or '') }}{%- endfor -%}
{%- endif -%}{%- endmacro -%}
{%- macro written(call) -%}
{%- if call.arguments is string -%}{%- set arguments = call.arguments -%}
{%- else -%}{%- set arguments = call.arguments | tojson -%}{%- endif -%}
{{ '<tool_call>\\n{"name": ' ~ safe(call.name | tojson) ~ ', "arguments": ' ~ safe(arguments) ~ '}\\n</tool_call>' }}
{%- endmacro -%}
{%- if tools -%}<|tools|>{%- for tool in tools -%}
{{ safe(tool | tojson) }}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}<|system|>{{ words(message.content) }}
{%- elif message.role == 'user' -%}<|user|>{{ words(message.content) }}
{%- elif message.role in ('tool', 'function') -%}<|tool|>{{ words(message.content) }}
{%- elif message.role == 'assistant' -%}<|assistant|>
{%- if message.reasoning_content -%}
{{ '<think>\\n' ~ safe(message.reasoning_content) ~ '\\n</think>\\n\\n' }}{%- endif -%}
{{ words(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ written(call.function or call) }}{%- endfor -%}<|end|>
{%- else -%}{{ raise_exception('a message has the role system, user, assistant or tool; got ' ~ message.role) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""A chat template with system messages, tools and calls. Each role is one token, which no message can contain."""
TERSE_TEMPLATE = """\
{%- macro safe(text) -%}{{ text | replace('<|', '< |') }}{%- endmacro -%}
{%- for message in messages -%}
{%- set words = message.content if message.content is string else (message.content or []) | join('', 'text') -%}
{%- if message.role == 'assistant' -%}<|assistant|>{{ safe(words) }}<|end|>
{%- elif message.role in ('user', 'tool', 'function') -%}{{ ' ' ~ safe(words) }}
{%- elif message.role not in ('system', 'developer') -%}
{{ raise_exception('a message has the role system, user, assistant or tool; got ' ~ message.role) }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""The shortest chat template, for models of a single task.

All text other than the messages of the assistant comes from the environment.

    Your task is: …<|assistant|>go to fridge 1<|end|> You arrive.<|assistant|>

System messages, tools and calls are omitted; with the action format "bare", calls are part of the assistant's text.
"""
Level = Literal["word", "byte"]
Spaces = Literal["kept", "single", "none"]


def build_tokenizer(
    texts: Iterable[str] = (),
    *,
    words: Iterable[str] = (),
    units: Sequence[str] = (),
    level: Level = "word",
    spaces: Spaces = "kept",
    dropped: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    context: int | None = None,
) -> PreTrainedTokenizerFast:
    r"""Build a tokenizer that has a chat template and supports `save_pretrained` and `AutoTokenizer.from_pretrained`.

    If `level` is "word", text is split into units, words (`\w+`) and single symbols, each with at most one preceding
    space. Other white space is split into characters. The vocabulary contains white space and all pieces of `texts` and
    `words`, both with and without a preceding space. All other pieces become `<|unknown|>`; `unknown_pieces` counts
    them. The text of a sequence is the concatenation of its token strings, as constrained decoding requires.

    If `level` is "byte", each token is a byte of UTF-8, and no piece is unknown.

    Args:
        texts: strings from the domain, from which the vocabulary is built.
        words: additional words and phrases that may occur but are not in `texts`.
        units: regular expressions (Oniguruma syntax) for sequences of words that become one token. The first expression
            that matches is used. For example, `[a-z]+ \d+` makes "fridge 1" one token, and `\{"name": "` the beginning
            of a tool call.
        level: "word" or "byte".
        spaces: "kept" keeps white space. "single" replaces every run of white space with one space, and removes white
            space at both ends of a string. With "none", white space only separates pieces, so each word has a single
            form, and tokens are joined with one space. With "none", the tokenizer supports only choices from a list,
            not grammars.
        dropped: regular expressions (Oniguruma syntax), such as `(?i)\b(?:a|the)\b`. Their matches are first removed
            from every string, in the order of the expressions. The model cannot distinguish choices that differ only in
            removed text.
        chat_template: the chat template in Jinja. It uses the special tokens above.
        context: the `model_max_length` of the tokenizer.

    Raises:
        ConfigError: If the level is unknown, the vocabulary is missing or has no effect, or an expression is invalid.
    """
    check_choice("level", level, get_args(Level))
    check_choice("spaces", spaces, get_args(Spaces))
    if level == "byte" and (units or list(words) or list(texts) or spaces == "none"):
        raise ConfigError("level='byte' builds no vocabulary; remove texts, words, units and spaces='none'")
    for name, expressions in (("units", units), ("dropped", dropped)):
        for expression in expressions:
            with boundary(ConfigError, f"{name}: {expression!r} is not a valid regular expression"):
                Regex(expression)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(expression), "") for expression in dropped]
    if spaces == "single":
        steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    normalizer = normalizers.Sequence(steps) if steps else None
    if level == "word":
        core = _word_level(chain(texts, words), units, spaces, normalizer)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CALL_MARKS, *alphabet])}
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    core.normalizer = normalizer
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_MARKS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN if level == "word" else None,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END, UNKNOWN)],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **({"model_max_length": context} if context is not None else {}),
    )


def _word_level(
    texts: Iterable[str], units: Sequence[str], spaces: Spaces, normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    alternatives = "|".join([*(f"(?:{unit})" for unit in units), r"\w+", r"[^\w\s]"])
    core = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    if spaces == "none":
        # Without a decoder, a space is added between the texts of tokens.
        core.pre_tokenizer = pre_tokenizers.Split(Regex(alternatives), behavior="removed", invert=True)
    else:
        core.pre_tokenizer = pre_tokenizers.Split(Regex(f" ?(?:{alternatives})|\\s"), behavior="isolated")
        core.decoder = decoders.Fuse()
    pieces: Counter[str] = Counter()
    for text in texts:
        plain = normalizer.normalize_str(text) if normalizer is not None else text
        pieces.update(piece for piece, _ in core.pre_tokenizer.pre_tokenize_str(plain))
    if not pieces:
        raise ConfigError("level='word' requires texts or words for the vocabulary; pass some, or set level='byte'")
    if spaces != "none" and (words := [piece for piece in pieces if not piece.isspace()]):
        # Add the other form of every piece, with or without a space, and white space.
        others = [piece[1:] if piece.startswith(" ") else f" {piece}" for piece in words]
        for piece in (*others, " ", "\n"):
            pieces.setdefault(piece, 0)
    ordered = sorted(pieces, key=lambda piece: (-pieces[piece], piece))
    vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *CALL_MARKS, *ordered])
    core.model = models.WordLevel({piece: index for index, piece in enumerate(vocabulary)}, unk_token=UNKNOWN)
    return core


def unknown_pieces(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Counter[str]:
    """Count the pieces of the given strings that are not in the vocabulary. Special tokens are not counted."""
    pieces: Counter[str] = Counter()
    for text in texts if tokenizer.unk_token_id is not None else ():
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if token == tokenizer.unk_token_id:
                pieces[text[start:stop]] += 1
    return pieces


def tool_texts(tools: Iterable[dict[str, Any]]) -> list[str]:
    """Return the strings that the chat template writes for tools, for use in a tokenizer's vocabulary."""
    return [json.dumps(tool, ensure_ascii=False) for tool in tools]


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
    """Build a decoder with newly initialized weights that depend only on the arguments.

    Embeddings are initialized with a standard deviation of 0.02, so all tokens are about equally likely if the weights
    are tied. Matrices are initialized with a standard deviation of 1/√n for n inputs, so activations have the same size
    at any width. In each layer, the two matrices that write to the residual stream are initialized to zero, so every
    layer starts as the identity.

    Args:
        tokenizer: the tokenizer, or the vocabulary size.
        layers: the number of decoder layers.
        width: the width of the residual stream.
        heads: the number of attention heads, a divisor of `width`.
        context: the maximum sequence length in tokens.
        kv_heads: the number of key and value heads, a divisor of `heads`. If None, `heads` is used.
        hidden: the hidden width of each layer's MLP. If None, it is 8/3 of `width`, rounded up to a multiple of 32.
        tie: whether the embeddings are also used as the output matrix.
        seed: the random seed for the weights.
        dtype: the type of the weights.

    Raises:
        ConfigError: If a number is less than 1 or not divisible as required.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = _MULTIPLE * math.ceil(8 * width / 3 / _MULTIPLE) if hidden is None else hidden
    vocabulary = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    numbers = {"the vocabulary": vocabulary, "layers": layers, "width": width, "heads": heads, "context": context}
    for name, number in (numbers | {"kv_heads": kv_heads, "hidden": hidden}).items():
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    if width % heads or (width // heads) % 2:
        # Rotary positions rotate pairs of numbers, so heads need an even width.
        raise ConfigError(f"width must be an even multiple of heads, got width={width} and heads={heads}")
    if heads % kv_heads:
        raise ConfigError(f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}")
    ids: dict[str, Any] = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    if not isinstance(tokenizer, int):
        ids |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
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
    initialize(model, seed)
    torch.nn.Module.to(model, dtype)
    model.generation_config = GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    logger.info("%s", describe(model))
    return model


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int) -> None:
    """Initialize float32 weights in place, as described in `build_decoder`.

    The names of the layers must be the same as in Llama.
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
    """Initialize the embedding of each multi-word token as the sum of its words' embeddings, in place.

    For example, "take mug 1" becomes "take" + "mug" + half of "1". Tokens that share a word are then similar from the
    start, both as inputs and, if weights are tied, as outputs. A model can therefore copy words instead of learning
    every combination of word and command. The sums are scaled to the norm of a single word. Special tokens are
    unchanged.

    Args:
        model: the model. All its embeddings must have the same standard deviation, as in a model from `build_decoder`.
        tokenizer: a word tokenizer from `build_tokenizer`.
        seed: the random seed for the word embeddings.
        number_weight: the weight of words that are numbers, which matter less than nouns.
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
    """Count the parameters of a model. Tied parameters are counted only once."""
    return sum(weights.numel() for weights in model.parameters())


def describe(model: PreTrainedModel) -> str:
    """Describe a model in one line: "a decoder of 613.2k parameters (40.1k of them embeddings): 2 layers, …"."""
    config = model.config
    weights: Any = model.get_input_embeddings().weight
    return (
        f"a decoder of {_short(parameter_count(model))} parameters ({_short(weights.numel())} of them embeddings): "
        f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads, "
        f"context {config.max_position_embeddings}"
    )


def _short(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1_000_000 else f"{count / 1e3:.1f}k"


class LoadedModel(NamedTuple):
    """A model, and its tokenizer if the directory contains one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def save_model(
    folder: Path | str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    is_private: bool = False,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` can load.

    Weights are saved as safetensors. An existing directory is replaced completely.

    Args:
        folder: the directory for the model. Missing parent directories are created.
        model: a causal language model.
        tokenizer: the tokenizer of the model.
        is_private: whether only the owner can read the directory. By default, the umask determines the permissions.

    Raises:
        StoreError: If the directory cannot be written. An existing directory is then left unchanged.
    """
    what = f"cannot write the model to {folder}"
    with atomic_folder(Path(folder), is_private=is_private) as part, boundary(StoreError, what), no_progress_bars():
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)


def load_model(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load a model, without network access, from a directory written by `save_model`.

    Args:
        folder: the directory of the model.
        dtype: the type of the weights. If None, the weights keep the type in which they were saved.
        device: the device for the weights.

    Raises:
        ConfigError: If the directory contains no readable model, or weights are missing.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; pass a directory written by save_model")
    with boundary(ConfigError, f"cannot load the model in {folder}"), no_progress_bars():
        # No code in the directory is executed.
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        build: Any = AutoModelForCausalLM
        model, report = build.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True, **options)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(folder, **options) if has_tokenizer else None
        torch.nn.Module.to(model, device)
    refuse_missing_weights(f"cannot load the model in {folder}", model, report)
    return LoadedModel(model, tokenizer)
