"""A tiny chat model for `transformers serve`: a Qwen2 whose next token depends only on the last one.

    python transition_model.py FOLDER

Run by the server's own Python. Embeddings are one-hot, attention and MLP add nothing, and the head is a table of
transitions: random ones, but after the line break that opens an answer comes a call of `add`, and after the space that
opens an answer to a tool's result comes "four".
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CALL = ["<tool_call>", '{"name": "add", "arguments": {"x": 2, "y": 2}}', "</tool_call>"]
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{{ ' ' if messages[-1].role == 'tool' else '' }}
{%- endif -%}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with an extra token for each piece of the model's answers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens([*CALL, "four"])
    made.chat_template = TEMPLATE
    return made


def model(words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a model with these transitions."""
    torch.manual_seed(0)
    size = len(words)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=size + size % 2,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    made = Qwen2ForCausalLM(config)
    after = torch.randint(0, size, (size,))
    newline, space = words.encode("\n")[0], words.encode(" ")[0]
    for chain in ([newline, *words.convert_tokens_to_ids(CALL)], [space, words.convert_tokens_to_ids("four")]):
        for one, other in zip(chain, [*chain[1:], words.eos_token_id], strict=True):
            after[one] = other
    layer = made.model.layers[0]
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, made.lm_head.weight):
            weight.zero_()
        made.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        made.lm_head.weight[after, torch.arange(size)] = 10.0
    return made


if __name__ == "__main__":
    words = tokenizer()
    words.save_pretrained(sys.argv[1])
    model(words).save_pretrained(sys.argv[1])
