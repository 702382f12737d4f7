"""Selective computation in the forward pass."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from reward_kit.rl.learner import forward
from reward_kit.rl.learner.forward import LogprobModel
from reward_kit.rl.learner.training_rows import Restriction, TrainingRows
from reward_kit.rl.ppo import PPOConfig, PPOLearner
from tests.rl.learner.cases import VOCABULARY, a_model, some_rows


def test_soft_cap_is_applied_even_for_small_logits() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=30.0,
        pad_token_id=0,
    )
    model, rows = Gemma2ForCausalLM(config), some_rows()
    whole = PPOLearner(copy.deepcopy(model), PPOConfig())
    chunked = PPOLearner(model, PPOConfig(max_logits=5 * VOCABULARY))
    chunked.logprobs(rows)  # here it is found out what becomes of logits, all of which are below 1
    with torch.no_grad():
        for learner in (whole, chunked):
            learner.module.lm_head.weight.mul_(200.0)  # type: ignore[union-attr,operator]
    np.testing.assert_allclose(chunked.logprobs(rows), whole.logprobs(rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("max_logits", [10_000, 5 * VOCABULARY])
def test_entropies_are_computed_only_on_request(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = TrainingRows.of(some_rows())
    part = flat.part(np.arange(3), torch.device("cpu"))
    scorer = LogprobModel(a_model(), PPOConfig(max_logits=max_logits))
    with torch.no_grad():
        asked, not_asked = scorer(part), scorer(part, entropies=False)
    assert asked.entropies_N is not None
    assert len(asked.entropies_N) == len(part.targets_N)
    assert not_asked.entropies_N is None
    assert torch.equal(asked.logprobs_N, not_asked.logprobs_N)
    monkeypatch.delattr(torch.linalg, "vecdot")
    PPOLearner(a_model(), PPOConfig(max_logits=max_logits)).logprobs(some_rows())


def test_chunk_contains_only_allowed_sets_of_its_tokens() -> None:
    # Four tokens under three sets: {0}, {1, 2}, {3}; the second and the fourth share one.
    whole = Restriction(
        tokens_K=torch.tensor([1, 2, 5, 7]),
        sets_K=torch.tensor([0, 1, 2, 1]),
        owners_A=torch.tensor([0, 1, 1, 2]),
        ids_A=torch.tensor([0, 1, 2, 3]),
        sets=3,
    )
    assert forward._cut(whole, 3, 5) is None
    cut = forward._cut(whole, 4, 8)
    assert cut is not None
    assert cut.sets == 2
    logits = torch.zeros(4, 5)
    is_allowed = forward.restrict_logits(logits, cut) == 0.0
    assert is_allowed.tolist() == [[True] * 5, [i == 3 for i in range(5)], [True] * 5, [i in (1, 2) for i in range(5)]]
