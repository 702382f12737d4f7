"""The weights of a policy for others to load, where they are a model of `transformers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.rl.learner.lora import has_adapters


def save_weights(folder: Path, policy: AgentPolicy) -> bool:
    """Write the model and its tokenizer; a folder that is there is replaced.

    Args:
        folder: where to.
        policy: that is trained.

    Returns:
        Whether there was a model to write. Adapters stay in the checkpoints.

    Raises:
        StoreError: it cannot be written.
    """
    if "transformers" not in sys.modules:  # a model of theirs would have brought it along
        return False
    from transformers import PreTrainedModel

    from reward_kit.rl.model_kit.folder import save_model

    module: Any = getattr(policy, "module", None)
    model = getattr(module, "policy", module)  # a `PolicyWithValue` holds the model beside its head
    if not isinstance(model, PreTrainedModel) or has_adapters(model):
        return False
    save_model(folder, model, getattr(policy, "tokenizer", None))
    return True
