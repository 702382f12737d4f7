"""Selective computation in the forward pass."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.rl.learner import forward
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.forward import LogprobModel
from reward_kit.rl.learner.training_rows import Restriction, TrainingRows
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch
from tests.devices import DEVICE
from tests.rl.learner.cases import VOCABULARY, a_model, some_rows

pytestmark = pytest.mark.device


def capped_model() -> Gemma2ForCausalLM:
    """Return a decoder of one layer whose logits are soft-capped."""
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
    return Gemma2ForCausalLM(config).to(DEVICE)


def test_soft_cap_is_applied_even_for_small_logits() -> None:
    model, rows = capped_model(), some_rows()
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
    part = flat.part(np.arange(3), DEVICE)
    scorer = LogprobModel(a_model(), PPOConfig(max_logits=max_logits))
    with torch.no_grad():
        asked, not_asked = scorer(part), scorer(part, entropies=False)
    assert asked.entropies_N is not None
    assert len(asked.entropies_N) == len(part.targets_N)
    assert not_asked.entropies_N is None
    assert torch.equal(asked.logprobs_N, not_asked.logprobs_N)
    monkeypatch.delattr(torch.linalg, "vecdot")
    PPOLearner(a_model(), PPOConfig(max_logits=max_logits)).logprobs(some_rows())


def constrained_rows() -> TokenBatch:
    """Return rows in which every sampled token was chosen from one to four of the first 12 ids."""
    rows, rng = some_rows(), np.random.default_rng(3)
    rows.batch["input_ids"] %= 12
    allowed = np.empty(len(rows.batch["input_ids"]), dtype=object)
    for row, sampled in enumerate(rows.batch["action_mask"]):
        places = np.flatnonzero(sampled)
        sets = [np.unique([token, *rng.integers(0, 12, 3)]) for token in rows.batch["input_ids"][row, places]]
        allowed[row] = AllowedIds(places, np.cumsum([0, *map(len, sets)]), np.concatenate(sets))
    rows.non_tensor_batch["allowed_ids"] = allowed
    return rows


@pytest.mark.parametrize("max_logits", [10_000, 40])
@pytest.mark.parametrize("is_capped", [False, True])
def test_head_computes_only_allowed_logits_with_the_same_scores_and_gradient(max_logits: int, is_capped: bool) -> None:
    rows = constrained_rows()
    module: Any = capped_model() if is_capped else a_model(tie_word_embeddings=True)
    reference = copy.deepcopy(module)
    widths: list[int] = []
    functional_linear = torch.nn.functional.linear

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is functional_linear:
                widths.append(made.shape[-1])
            return made

    part = TrainingRows.of(rows).part(np.arange(9), DEVICE)
    with Watched():
        scores = LogprobModel(module, PPOConfig(max_logits=max_logits, entropy_coefficient=0.1))(part)
    assert scores.entropies_N is not None
    assert 12 in widths
    (scores.logprobs_N + scores.entropies_N).sum().backward()

    logprobs, entropies = [], []
    for row, allowed in enumerate(rows.non_tensor_batch["allowed_ids"]):
        ids = torch.as_tensor(rows.batch["input_ids"][row][rows.batch["attention_mask"][row] > 0].astype(np.int64))
        logits_MV = reference(input_ids=ids[None]).logits[0, allowed.places - 1]
        logprobs_MV = logits_MV.masked_fill(~torch.as_tensor(allowed.mask(VOCABULARY)), -1e9).log_softmax(dim=-1)
        logprobs.append(logprobs_MV.gather(1, ids[allowed.places, None])[:, 0])
        entropies.append(-(logprobs_MV.exp() * logprobs_MV).sum(dim=-1))
    torch.testing.assert_close(scores.logprobs_N, torch.cat(logprobs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.entropies_N, torch.cat(entropies), rtol=1e-4, atol=1e-5)
    (torch.cat(logprobs) + torch.cat(entropies)).sum().backward()
    for one, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad, rtol=1e-3, atol=1e-4)


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
