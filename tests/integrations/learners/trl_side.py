"""TRL's GRPO loss on requested numbers, computed by the trainer with a tiny Qwen2.

Nothing here knows of reward-kit.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from request_loop import answer_all
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

WORDS = {"<pad>": 0, "<eos>": 1, **{f"word{number}": number for number in range(2, 13)}}


def _saved(folder: str) -> None:
    """Save a model and a tokenizer in a folder from which the trainer also loads its reference."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=len(WORDS), initializer_range=0.5, pad_token_id=0, eos_token_id=1, **size, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def _trainer(options: dict[str, Any]) -> GRPOTrainer:
    made = GRPOTrainer(
        FOLDER,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=FOLDER,
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=2,
            steps_per_generation=1,
            model_init_kwargs={"dtype": "float32"},
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["word2"] * 8}),
    )
    made.current_gradient_accumulation_steps = 1  # what the training loop sets before each step
    made.model.train()
    return made


def logits(ids: Tensor) -> dict[str, Any]:
    """Return the logits (B,T,V) that all losses here are computed from."""
    with torch.no_grad():
        return {"logits": Qwen2ForCausalLM.from_pretrained(FOLDER)(input_ids=ids).logits}


def loss(
    prompt_ids: Tensor, inputs: dict[str, Any], options: dict[str, Any], with_weights: bool = False
) -> dict[str, Any]:
    """Return `GRPOTrainer._compute_loss`, its gradient with respect to the log-probabilities, and these.

    The model gives them in float32; they are widened before the loss is computed, which is then float64 throughout.
    """
    seen: list[Tensor] = []
    trainer = _trainer(options)
    original = trainer._get_per_token_logps_and_entropies

    def widened(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        logprobs, entropies, auxiliary = original(*args, **kwargs)
        seen.extend([logprobs.double(), entropies.double()])
        for found in seen:
            found.retain_grad()
        return seen[0], seen[1], auxiliary

    trainer._get_per_token_logps_and_entropies = widened
    trainer.use_vllm = with_weights  # without a server: only the loss is asked for, which then reads the weights
    found = trainer._compute_loss(
        trainer.model, {"prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids), **inputs}
    )
    found.backward()
    assert all(weight.grad is not None for weight in trainer.model.parameters())
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {
        "loss": found.detach(),
        "logprobs": seen[0].detach(),
        "gradient": seen[0].grad,
        "entropies": seen[1].detach(),
        "entropy_gradient": seen[1].grad,
        "metrics": metrics,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as FOLDER:
        _saved(FOLDER)
        answer_all({"loss": loss, "logits": logits})
