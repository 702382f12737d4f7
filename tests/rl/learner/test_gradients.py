"""Test that loss and gradient equal a plain float64 loop over unpadded rows, for any micro-batch split."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.errors import ConfigError
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch
from tests.devices import DEVICE, WIDEST, randomize, tolerance
from tests.rl.learner.cases import VOCABULARY, a_model, some_rows
from tests.tolerances import rounding_error

pytestmark = pytest.mark.device

LOW, HIGH = 0.2, 0.3


class Token:
    """An action token: the model's values for it and those in the rows."""

    def __init__(self, rows: TokenBatch, row: int, column: int, logits_V: Tensor, hidden_H: Tensor) -> None:
        self.rows, self.hidden_H = rows, hidden_H
        logprobs_V = logits_V.log_softmax(-1)
        self.logprob = logprobs_V[int(rows.batch["input_ids"][row, column])]
        self.entropy = -(logprobs_V.exp() * logprobs_V).sum()
        self.row, self.column = row, column
        self.old, self.advantage = self.at("logprobs"), self.at("advantages")

    def at(self, key: str) -> float:
        return float(self.rows.batch[key][self.row, self.column])

    def surrogate(self, old: float) -> Tensor:
        ratio = (self.logprob - old).exp()
        return -torch.minimum(ratio * self.advantage, ratio.clamp(1 - LOW, 1 + HIGH) * self.advantage)


def tokens_of(module: nn.Module, rows: TokenBatch, temperature: float = 1.0) -> list[Token]:
    """Return the tokens row by row, without padding, with all logits."""
    found = []
    for row, is_token in enumerate(rows.batch["attention_mask"] == 1):
        columns = np.flatnonzero(is_token)
        ids = torch.as_tensor(rows.batch["input_ids"][row, columns]).long()[None]
        output = module(ids, output_hidden_states=True)
        for t, column in enumerate(columns):
            if rows.batch["loss_mask"][row, column]:
                before = output.logits[0, t - 1] / temperature, output.hidden_states[-1][0, t - 1]
                found.append(Token(rows, row, int(column), *before))
    return found


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in module.named_parameters()
    }


def learner_of(module: nn.Module, **options: Any) -> PPOLearner:
    given = {"clip_low": LOW, "clip_high": HIGH, **options}
    reference = given.pop("reference", None)
    return PPOLearner(module, PPOConfig(**given), reference=reference)


def assert_same(module: nn.Module, loss: Tensor, found: dict[str, float], atol: float = tolerance(1e-10)) -> None:
    """Compare the learner's gradient, which is in the module, with that of the loop."""
    theirs = gradients_of(module)
    module.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert found["loss"] == pytest.approx(loss.item(), abs=atol)
    for name, gradient in gradients_of(module).items():
        torch.testing.assert_close(theirs[name], gradient, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_clipped_surrogate_matches_the_reference_loop(padding: str, temperature: float) -> None:
    model, rows = a_model(dtype=torch.float64), some_rows(padding=padding)
    found = learner_of(model, temperature=temperature, max_tokens_per_micro_batch=60).gradients(rows)
    tokens = tokens_of(model, rows, temperature)
    assert 0.1 < found["clip_fraction"] < 0.9
    assert_same(model, torch.stack([token.surrogate(token.old) for token in tokens]).mean(), found)
    assert found["entropy"] == pytest.approx(np.mean([token.entropy.item() for token in tokens]))
    gaps = [abs(token.logprob.item() - token.old) for token in tokens]
    assert (found["logprob_gap"], found["logprob_gap_mean"]) == pytest.approx((max(gaps), np.mean(gaps)))


def test_entropy_and_kl_terms_match_the_reference_loop() -> None:
    model, reference, rows = a_model(dtype=torch.float64), a_model(1, torch.float64), some_rows()
    learner = learner_of(
        model, reference=reference, kl_coefficient=0.3, kl_kind="k3", entropy_coefficient=0.2, dual_clip=3.0
    )
    found = learner.gradients(rows)
    terms = []
    for token, other in zip(tokens_of(model, rows), tokens_of(reference, rows), strict=True):
        surrogate = token.surrogate(token.old)
        if token.advantage < 0:
            surrogate = surrogate.clamp(max=-3.0 * token.advantage)
        difference = token.logprob - other.logprob.detach()
        terms.append(surrogate - 0.2 * token.entropy + 0.3 * ((-difference).exp() - 1 + difference))
    assert_same(model, torch.stack(terms).mean(), found)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_recomputed_logprobs_with_truncated_weights_match_the_reference_loop(level: str) -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    found = learner_of(model, importance=level, importance_cap=1.5, max_tokens_per_micro_batch=60).gradients(rows)
    tokens = tokens_of(model, rows)
    terms, ratios = [], {}
    for token in tokens:
        shared = [one for one in tokens if one.row == token.row] if level == "sequence" else [token]
        ratio = np.exp(sum(one.logprob.item() - one.old for one in shared))
        ratios[token.row if level == "sequence" else len(ratios)] = ratio
        terms.append(min(ratio, 1.5) * token.surrogate(token.logprob.item()))
    assert_same(model, torch.stack(terms).mean(), found)
    weights = np.minimum([*ratios.values()], 1.5)
    assert found["weight_mean"] == pytest.approx(weights.mean())
    assert found["weight_capped_fraction"] == pytest.approx(np.mean([*ratios.values()] > np.float64(1.5)))
    assert found["ratio_max"] == pytest.approx(1.0)


def test_decoupled_loss_excludes_tokens_beyond_the_cap() -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    found = learner_of(model, loss="decoupled", decoupled_cap=1.2, max_tokens_per_micro_batch=50).gradients(rows)
    terms = []
    for token in tokens_of(model, rows):
        weight = (token.logprob.detach() - token.old).exp()
        if weight <= 1.2:
            terms.append(weight * token.surrogate(token.logprob.item()))
    assert 0.0 < found["weight_capped_fraction"] < 1.0
    assert_same(model, torch.stack(terms).mean(), found)


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_gspo_and_cispo_match_the_reference_loop(loss: str) -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    found = learner_of(model, loss=loss, max_tokens_per_micro_batch=50).gradients(rows)
    by_row: dict[int, list[Token]] = {}
    for token in tokens_of(model, rows):
        by_row.setdefault(token.row, []).append(token)
    sequences, everything = [], []
    for tokens in by_row.values():
        log_ratios = torch.stack([token.logprob - token.old for token in tokens])
        advantages = torch.tensor([token.advantage for token in tokens], dtype=torch.float64)
        # s_i with the gradient of each token's own log-probability.
        ratios = (log_ratios.mean().detach() + log_ratios - log_ratios.detach()).exp()
        clipped = ratios.clamp(1 - LOW, 1 + HIGH)
        sequences.append(-torch.minimum(ratios * advantages, clipped * advantages).mean())
        weights = log_ratios.exp().clamp(1 - LOW, 1 + HIGH).detach()
        logprobs = torch.stack([token.logprob for token in tokens])
        everything.append(-weights * advantages * logprobs)
    expected = torch.stack(sequences).mean() if loss == "gspo" else torch.cat(everything).mean()
    assert_same(model, expected, found)


@pytest.mark.parametrize("loss", ["turn_gspo", "turn_ppo"])
def test_turn_losses_match_the_reference_loop(loss: str) -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    found = learner_of(model, loss=loss, max_tokens_per_micro_batch=50).gradients(rows)
    turns: dict[tuple[int, int], list[Token]] = {}
    number = 0
    for token in tokens_of(model, rows):
        number += token.at("value_mask") != 0
        turns.setdefault((token.row, number), []).append(token)
    losses = []
    for tokens in turns.values():
        log_ratios = torch.stack([token.logprob - token.old for token in tokens])
        advantages = torch.tensor([token.advantage for token in tokens], dtype=torch.float64)
        shared = log_ratios.mean() if loss == "turn_gspo" else log_ratios.sum()
        ratios = (shared.detach() + log_ratios - log_ratios.detach()).exp()
        losses.append(-torch.minimum(ratios * advantages, ratios.clamp(1 - LOW, 1 + HIGH) * advantages))
    assert len(turns) > len({row for row, _ in turns})
    assert 0.0 < found["clip_fraction"] < 1.0
    assert_same(model, torch.cat(losses).mean(), found)


def softly_gated(log_ratio: Tensor, advantage: float) -> Tensor:
    temperature = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / temperature * torch.sigmoid(temperature * (log_ratio.exp() - 1))


def within_divergence(token: Token, bounds: tuple[float, float], *, is_kl: bool) -> bool:
    p, q = token.logprob.detach().exp().item(), np.exp(token.old)
    apart = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)) if is_kl else abs(p - q)
    return not (apart > bounds[token.advantage > 0] and (p > q) == (token.advantage > 0))


@pytest.mark.parametrize("loss", ["sapo", "gmpo", "dppo_tv", "dppo_kl"])
def test_newer_losses_match_the_reference_loop(loss: str) -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    bounds = (0.001, 0.002)
    low, high = (None, None) if loss == "sapo" else bounds
    found = learner_of(model, loss=loss, clip_low=low, clip_high=high).gradients(rows)
    by_row: dict[int, list[Token]] = {}
    for token in tokens_of(model, rows):
        by_row.setdefault(token.row, []).append(token)
    sequences, everything = [], []
    for tokens in by_row.values():
        log_ratios = [token.logprob - token.old for token in tokens]
        advantages = [token.advantage for token in tokens]
        pairs = list(zip(log_ratios, advantages, strict=True))
        if loss == "sapo":
            sequences.append(torch.stack([softly_gated(*pair) for pair in pairs]).mean())
        elif loss == "gmpo":
            bounded = [one.clamp(max=bounds[1]) if a >= 0 else one.clamp(min=-bounds[0]) for one, a in pairs]
            sequences.append(-torch.stack(bounded).mean().exp() * np.mean(advantages))
        else:
            kept = [within_divergence(token, bounds, is_kl=loss == "dppo_kl") for token in tokens]
            everything += [-a * one.exp() * keep for (one, a), keep in zip(pairs, kept, strict=True)]
    assert_same(model, torch.stack(sequences or everything).mean(), found)
    assert loss == "sapo" or 0.0 < found["clip_fraction"] < 1.0


@pytest.mark.parametrize("clip", [0.1, None])
def test_value_loss_matches_the_reference_loop(clip: float | None) -> None:
    model = PolicyWithValue(a_model(dtype=torch.float64))
    randomize(model.value_head.weight)
    rows = some_rows()
    found = learner_of(model, value_coefficient=0.7, value_clip=clip, max_tokens_per_micro_batch=50).gradients(rows)
    tokens, errors = tokens_of(model, rows), []
    for token in tokens:
        if token.at("value_mask"):
            value = model.value_head(token.hidden_H).squeeze()
            square = (value - token.at("returns")) ** 2
            if clip is not None:
                near = token.at("values") + (value - token.at("values")).clamp(-clip, clip)
                square = torch.maximum(square, (near - token.at("returns")) ** 2)
            errors.append(0.5 * square)
    surrogate = torch.stack([token.surrogate(token.old) for token in tokens]).mean()
    assert found["value_loss"] == pytest.approx(torch.stack(errors).mean().item())
    assert_same(model, surrogate + 0.7 * torch.stack(errors).mean(), found)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("dtype", [WIDEST, torch.float32])
def test_gradient_does_not_depend_on_the_number_of_micro_batches(aggregation: str, dtype: torch.dtype) -> None:
    rows, reference = some_rows(7), a_model(1, dtype)
    # A gradient is a sum over the tokens of all rows, which micro-batches make in parts.
    share = rounding_error(rows.batch["input_ids"].size, str(dtype).removeprefix("torch."))
    model = PolicyWithValue(a_model(dtype=dtype))
    randomize(model.value_head.weight)
    found = {}
    for parts, budget in ((1, 1_000), (3, 60), (7, 24)):
        learner = learner_of(
            model,
            reference=reference,
            kl_coefficient=0.1,
            entropy_coefficient=0.01,
            aggregation=aggregation,
            norm_length=24.0 if aggregation.endswith("norm") else None,
            max_tokens_per_micro_batch=budget,
        )
        calls: list[int] = []
        handle = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found[parts] = (learner.gradients(rows), gradients_of(model))
        handle.remove()
        assert len(calls) == parts
    whole, whole_gradients = found[1]
    for made, gradients in (found[3], found[7]):
        assert made == pytest.approx(whole, rel=1e-5, abs=1e-6)
        for name, gradient in gradients.items():
            atol = share * max(whole_gradients[name].norm().item(), 1.0)
            torch.testing.assert_close(gradient, whole_gradients[name], rtol=0, atol=atol)


@pytest.mark.parametrize("model", ["plain", "soft cap"])
def test_chunked_output_head_gives_equal_gradients(model: str) -> None:
    rows = some_rows()
    made = a_model(dtype=torch.float64) if model == "plain" else a_soft_cap()
    whole = learner_of(made, entropy_coefficient=0.1)
    expected, gradients, logprobs = whole.gradients(rows), gradients_of(made), whole.logprobs(rows)
    # Five tokens at once.
    chunked = learner_of(made, entropy_coefficient=0.1, max_logits=5 * VOCABULARY)
    assert chunked.gradients(rows) == pytest.approx(expected)
    np.testing.assert_allclose(chunked.logprobs(rows), logprobs, rtol=0, atol=tolerance(1e-12))
    for name, gradient in gradients_of(made).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=tolerance(1e-12))


def a_soft_cap(cap: float | None = 2.0) -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=cap,
        initializer_range=0.3,
    )
    return Gemma2ForCausalLM(config).to(DEVICE, WIDEST).eval()


def test_soft_cap_is_applied() -> None:
    model, rows = a_soft_cap(), some_rows()
    logprobs = learner_of(model).logprobs(rows)
    for token in tokens_of(model, rows):
        assert logprobs[token.row, token.column] == pytest.approx(token.logprob.item(), abs=tolerance(1e-10))
    uncapped = a_soft_cap(None)
    uncapped.load_state_dict(model.state_dict())
    assert abs(learner_of(uncapped).logprobs(rows) - logprobs).max() > 0.1


class Shifts(nn.Module):
    """A head with an unknown change of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = a_model()
        self.config = self.inner.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, **kwargs: Any) -> Any:
        found = self.inner(**kwargs)
        found.logits = found.logits.sin()
        return found


def test_output_head_with_unknown_postprocessing_is_not_chunked() -> None:
    rows = some_rows()
    assert np.isfinite(learner_of(Shifts()).gradients(rows)["loss"])
    with pytest.raises(ConfigError, match="raise max_logits"):
        learner_of(Shifts(), max_logits=5 * VOCABULARY).gradients(rows)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model, rows = a_model(dtype=torch.float64), some_rows()
    learner_of(model).gradients(rows)
    gradients = gradients_of(model)
    learner = learner_of(copy.deepcopy(model), gradient_checkpointing=True)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    learner.module.model.layers[0].self_attn.register_forward_hook(count)  # type: ignore[union-attr,index]
    learner.gradients(rows)
    assert calls == 2, "once forwards, and once more for the gradient"
    for name, gradient in gradients_of(learner.module).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=tolerance(1e-12))
