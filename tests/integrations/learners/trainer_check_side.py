"""The check of trainers on verl's and TRL's own code, served over pipes."""

from __future__ import annotations

import logging
import tempfile
from typing import Any

from request_loop import answer_all
from transformers import LlamaConfig, LlamaForCausalLM
from trl_training import make_trainer, save_tokenizer

from reward_kit.checks import check_trainer
from reward_kit.integrations.trl import trl_loss
from reward_kit.integrations.verl import verl_loss

TOLERANCE = 1e-4


def verl(**options: Any) -> dict[str, Any]:
    """Return the causes of each scenario with verl's loss."""
    return _causes(check_trainer(verl_loss(**options), target="verl", tolerance=TOLERANCE))


def trl(**options: Any) -> dict[str, Any]:
    """Return the causes of each scenario that TRL's trainer supports; the options are of `GRPOConfig`."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(folder)
        save_tokenizer(folder, 16)
        trainer = make_trainer(folder, max_completion_length=8, **options)
        return _causes(check_trainer(trl_loss(trainer), target="TRL", tolerance=TOLERANCE))


def _causes(report: Any) -> dict[str, Any]:
    return {result.scenario: list(result.causes) for result in report.results if result.is_supported}


if __name__ == "__main__":
    answer_all({"verl": verl, "trl": trl})
