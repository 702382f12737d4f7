"""TRL's GRPO training step on given rows: loss, gradient and the updated weights.

`GRPOTrainer` itself runs. Only its `_prepare_inputs` is put aside, which would generate completions and score them: the
rows come as it would hand them on. Nothing here knows of reward-kit.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

Inputs = dict[str, Tensor]


def make_trainer(folder: str, **options: Any) -> GRPOTrainer:
    """Return a trainer for the model in a folder, with its optimizer, as at the start of its training loop.

    Args:
        folder: model and tokenizer, in the format of `transformers`.
        options: of `GRPOConfig`.
    """
    defaults = {
        "output_dir": tempfile.gettempdir(),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "num_generations": 2,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32"},
    }
    made = GRPOTrainer(
        folder,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(**{**defaults, **options}),
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 8}),
    )
    made.create_optimizer_and_scheduler(num_training_steps=1000)
    made.optimizer = made.accelerator.prepare(made.optimizer)
    made._prepare_inputs = lambda inputs: inputs
    made.model.train()
    return made


def save_tokenizer(folder: str, vocabulary: int) -> None:
    """Save a tokenizer with as many words as the model has tokens; the trainer requires one."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(folder)


def use_reference(trainer: GRPOTrainer, folder: str) -> None:
    """Measure the divergence from the model in this folder instead of from the initial model."""
    trainer.ref_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    add_fused_lm_head(trainer.ref_model, temperature=trainer.temperature)


def reference_logprobs(trainer: GRPOTrainer, inputs: Inputs) -> Tensor:
    """Return the reference's log-probabilities (B,C), from the trainer's forward pass."""
    return _logprobs(trainer, trainer.ref_model, inputs)


def own_logprobs(trainer: GRPOTrainer, inputs: Inputs) -> Tensor:
    """Return the trained model's log-probabilities (B,C), from the trainer's forward pass."""
    return _logprobs(trainer, trainer.model, inputs)


@torch.no_grad()
def _logprobs(trainer: GRPOTrainer, model: torch.nn.Module, inputs: Inputs) -> Tensor:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    found: Tensor = trainer._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
    return found


def optimizer_step(trainer: GRPOTrainer, parts: list[Inputs]) -> tuple[float, float]:
    """Run one optimizer step as the training loop does, without logging; return the loss and gradient norm.

    Args:
        trainer: of `make_trainer`.
        parts: the micro-batches.
    """
    trainer.current_gradient_accumulation_steps = len(parts)
    loss = torch.zeros((), device=parts[0]["prompt_ids"].device)
    for place, part in enumerate(parts):
        trainer.accelerator.gradient_state._set_sync_gradients(place == len(parts) - 1)
        loss += trainer.training_step(trainer.model, part, None)
    norm = trainer._clip_grad_norm(trainer.model)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.model.zero_grad()
    return loss.item(), float(norm)
