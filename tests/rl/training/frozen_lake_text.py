"""The train file of `frozen_lake`, with a language model of a few thousand weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reward_kit.rl.model_kit.models import build_decoder, build_tokenizer, save_model
from tests.rl.training.frozen_lake import lake_folder

CLOCK = ("time/", "speed/", "overlap/", "reward_agent/", "at")
"""Figures that hang on the clock begin so."""
PPO = {"lr": 0.01, "epochs": 2, "minibatches": 2, "kl_coefficient": 0.01}
POLICY = {
    "type": "hf",
    "model": "model",
    "action_format": "bare",
    "constrain": True,
    "lockstep": True,
    "tools_in_prompt": False,
    "max_new_tokens": 16,
}


def language_lake(folder: Path, *, policy: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Return the folder, with the model in `model` and changes to the train file and its `policy`."""
    tokenizer = build_tokenizer(level="byte")
    model = build_decoder(tokenizer, layers=1, width=16, heads=2, context=512, seed=1)
    save_model(folder / "model", model, tokenizer)
    usual = {"ppo": PPO, "checkpoints": {"every": 1, "best_by": "score/mean"}}
    return lake_folder(folder, **{**usual, "policy": {**POLICY, **(policy or {})}, **changes})
