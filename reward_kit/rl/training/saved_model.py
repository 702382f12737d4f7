"""The weights of a policy for others to load, where they are a model of `transformers`."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reward_kit.agent.policies.hf.model import merged_state_dict, remember
from reward_kit.agent.policy_interface import AgentPolicy
from reward_kit.rl.learner.lora import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_weights(folder: Path, policy: AgentPolicy) -> bool:
    """Write the model and its tokenizer; a folder that is there is replaced.

    Args:
        folder: where to.
        policy: that is trained.

    Returns:
        Whether there was a model to write. Adapters are added to the weights that they are beside; in the checkpoints
        they stay apart.

    Raises:
        StoreError: it cannot be written.
    """
    if "transformers" not in sys.modules:  # a model of theirs would have brought it along
        return False
    from transformers import PreTrainedModel

    from reward_kit.rl.model_kit.folder import save_model

    module: Any = getattr(policy, "module", None)
    model = getattr(module, "policy", module)  # a `PolicyWithValue` holds the model beside its head
    if not isinstance(model, PreTrainedModel):
        return False
    tokenizer: Any = getattr(policy, "tokenizer", None)
    if tokenizer is not None:
        remember(tokenizer, **getattr(policy, "taught", {}))
    save_model(folder, _merged(model) if has_adapters(model) else model, tokenizer, is_private=True)
    return True


def _merged(model: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters, whose weights are those with the adapters added."""
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    plain.load_state_dict(merged_state_dict(model), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
