"""Tiny models with random weights, tokenizers, and chat templates like those of published models."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.devices import DEVICE

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_REASONING = (
    "{%- set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' and loop.index0 < last.user %}"
    "{{ '\n' + message.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{ '\n' + message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else "
    "message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    "{#- <|python_tag|> -#}"
)
REFUSES_SYSTEM = (
    "{%- for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{%- if message.role != 'tool' %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_TEXT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def byte_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    core.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, bos_token="<|begin|>", chat_template=template)


def word_tokenizer(words: list[str], template: str = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word, sign and line break; all else is unknown."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", "\n", *words])}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Punctuation()]
    )
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", unk_token="[UNK]", chat_template=template
    )


def small_llama(vocabulary: int, *, context: int = 2048, seed: int = 0, scale: float = 0.3) -> LlamaForCausalLM:
    """Return a model with random weights so large that the logits depend on the whole context."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            initializer_range=scale,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config).to(DEVICE)
