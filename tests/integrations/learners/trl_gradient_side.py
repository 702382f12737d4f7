"""Results of TRL's training step, served over pipes; see `trl_training`."""

from __future__ import annotations

from typing import Any

import torch
from request_loop import answer_all
from trl_training import Inputs, make_trainer, optimizer_step, reference_logprobs, save_tokenizer, use_reference


def step(
    folder: str, parts: list[Inputs], options: dict[str, Any], reference: str | None, vocabulary: int
) -> dict[str, Any]:
    """Return loss, norm, gradient and weights of one optimizer step over micro-batches.

    Args:
        folder: the model.
        parts: the micro-batches, as the trainer has them.
        options: of `GRPOConfig`.
        reference: the folder of the reference; None: the options want none.
        vocabulary: of the model.
    """
    save_tokenizer(folder, vocabulary)
    trainer = make_trainer(folder, steps_per_generation=len(parts), gradient_accumulation_steps=len(parts), **options)
    if reference is not None:
        use_reference(trainer, reference)
        for part in parts:
            part["ref_per_token_logps"] = reference_logprobs(trainer, part)
    gradient: dict[str, torch.Tensor] = {}
    clip = trainer._clip_grad_norm

    def seen(model: torch.nn.Module) -> torch.Tensor:
        gradient.update({name: weight.grad.clone() for name, weight in model.named_parameters()})
        return clip(model)

    trainer._clip_grad_norm = seen
    loss, norm = optimizer_step(trainer, parts)
    weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {"loss": loss, "norm": norm, "gradient": gradient, "weights": weights, "metrics": metrics}


if __name__ == "__main__":
    answer_all({"step": step})
