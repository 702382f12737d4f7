"""A policy small enough to train in a test: it plays FrozenLake 4x4 token by token.

Tokens: one per cell (0 to 15), one per action (16 to 19), one for padding. The context of an action is everything so
far, `s0 a0 s1 a1 … st`, and the model is a causal transformer with one attention layer, so that the logits depend on
the exact sequence.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reward_kit.agent.policy_interface import AgentPolicy, EpisodeContext, PastTurn, PolicyOutput
from reward_kit.environments.base import ToolSpec
from reward_kit.models import Message
from tests.devices import DEVICE

SIDE = 4
ACTIONS = ("left", "down", "right", "up")
FIRST_ACTION = SIDE * SIDE
PAD = FIRST_ACTION + len(ACTIONS)
VOCABULARY = PAD + 1
_AGENT = re.compile(r"\[.\]")


class TinyModel(nn.Module):
    """(ids_BT, attention_mask_BT) -> logits_BTV. Only action tokens have probability, initially uniform."""

    def __init__(self, width: int = 24, context: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(context, width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.hidden = nn.Linear(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, VOCABULARY)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.places.weight, std=0.02)
        only_actions = torch.full((VOCABULARY,), -1e9)
        only_actions[FIRST_ACTION:PAD] = 0.0
        self.register_buffer("only_actions", only_actions)

    def forward(self, ids_BT: Tensor, attention_mask_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        tokens_BTW = self.tokens(ids_BT)
        inputs_BTW = tokens_BTW + self.places(torch.arange(length, device=ids_BT.device))
        queries, keys, values = self.queries_keys_values(inputs_BTW).chunk(3, dim=-1)
        scores_BTT = queries @ keys.mT / math.sqrt(keys.shape[-1])
        # Padding is on the right, so that causality alone keeps it out.
        future_TT = torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).triu(1)
        seen_BTW = scores_BTT.masked_fill(future_TT, -torch.inf).softmax(dim=-1) @ values
        hidden_BTH = self.hidden(torch.cat([tokens_BTW, seen_BTW], dim=-1)).tanh()
        return self.head(hidden_BTH) + self.only_actions


class TinyPolicy(AgentPolicy):
    """Samples from `acting`, a copy that `publish` swaps; `module` is what a trainer updates."""

    pad_token_id = PAD

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.module = TinyModel().to(DEVICE)
        self.acting, self.version = copy.deepcopy(self.module), 0

    async def open(self, context: EpisodeContext) -> AgentPolicy:
        return _Session(self, context.seed)

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        raise AssertionError("act through the session that open returns")

    async def publish(self, version: int) -> None:
        self.acting, self.version = copy.deepcopy(self.module), version

    @torch.no_grad()
    def next_logprobs(self, ids: Sequence[int]) -> Tensor:
        """Return the (V,) log-probabilities of the token after `ids`."""
        context_BT = torch.tensor([ids], device=DEVICE)
        return self.acting(context_BT, torch.ones_like(context_BT))[0, -1].log_softmax(dim=-1)


class _Session(AgentPolicy):
    def __init__(self, policy: TinyPolicy, seed: int) -> None:
        self._policy, self._ids = policy, list[int]()
        self._generator = torch.Generator().manual_seed(seed)

    async def resume(self, turns: Sequence[PastTurn]) -> None:
        for turn in turns:
            assert turn.output.log_probs is not None
            self._ids = [*turn.output.log_probs["prompt_ids"], *turn.output.log_probs["token_ids"]]

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: list[ToolSpec] | None = None
    ) -> PolicyOutput:
        self._ids.append(cell_of(observation[-1].text))
        prompt_ids, version = list(self._ids), self._policy.version
        logprobs_V = self._policy.next_logprobs(prompt_ids)
        token = int(torch.multinomial(logprobs_V.exp().cpu(), 1, generator=self._generator))
        self._ids.append(token)
        name = ACTIONS[token - FIRST_ACTION]
        sampled = {
            "prompt_ids": prompt_ids,
            "token_ids": [token],
            "logprobs": [float(logprobs_V[token])],
            "policy_version": version,
        }
        return PolicyOutput({"type": "tool_call", "name": "act", "arguments": {"action": name}}, name, sampled)


def cell_of(text: str) -> int:
    """Return the cell of the agent, marked by [brackets]; every cell is three characters wide."""
    for row, line in enumerate(text.splitlines()[:SIDE]):
        if match := _AGENT.search(line):
            return row * SIDE + match.start() // 3
    raise AssertionError(f"no agent on this board:\n{text}")
