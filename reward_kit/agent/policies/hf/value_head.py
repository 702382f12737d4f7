"""A causal language model with a critic: one number per token, read from the hidden state that its logits come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reward_kit.errors import ConfigError, kind_of


class PolicyWithValue(nn.Module):
    """A model and a value head, trained together.

    Called, it is the model. The value of a state is `value_head` of the hidden state at the last token before an
    action, the one from which the action's first token is sampled.

    Args:
        policy: a causal language model of `transformers`.
        value_head: (…,H) -> (…,1); None: a linear layer that begins with 0, in the model's own type and on its device.

    Raises:
        ConfigError: the model has no output embeddings to take the hidden state from.
    """

    def __init__(self, policy: nn.Module, value_head: nn.Module | None = None) -> None:
        super().__init__()
        embeddings: Any = getattr(policy, "get_output_embeddings", lambda: None)()
        if embeddings is None:
            raise ConfigError(f"a value head needs a causal language model with a head; got {kind_of(policy)}")
        self.policy = policy
        self.value_head = _zero_head(embeddings.weight) if value_head is None else value_head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        return self.policy(*args, **kwargs)

    def get_output_embeddings(self) -> Any:
        """The model's head."""
        policy: Any = self.policy
        return policy.get_output_embeddings()

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.policy.config


def _zero_head(weight: Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
    # A critic that says 0 at first makes advantages of returns, and not of noise.
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    return head
