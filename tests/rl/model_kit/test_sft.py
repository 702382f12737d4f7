"""Test supervised training: loss over action tokens only, decreasing loss, and reproducible weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.agent.policies.hf_policy import HFAgentPolicy
from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import ConfigError, TrainingError
from reward_kit.rl.checkpoint import load_batch_for_study, save_batch_for_study
from reward_kit.rl.model_kit.models import build_decoder
from reward_kit.rl.model_kit.sft import Demonstrations, SFTConfig, SFTProgress, evaluate, fit, split_rows
from reward_kit.tokens import TokenBatch, build_rows
from tests.rl.learner.cases import VOCABULARY, a_model, some_rows
from tests.rl.model_kit.frozen_lake import TOOLS, tokenizer_of, walks
from tests.tolerances import rounding_error

pytestmark = pytest.mark.device

ROWS = some_rows(count=12)


def loss_by_hand(model: torch.nn.Module, rows: TokenBatch) -> float:
    """Return the mean over all action tokens, row by row, from full logits."""
    losses = []
    for row in range(len(rows)):
        real = rows.batch["attention_mask"][row] == 1
        ids = torch.as_tensor(rows.batch["input_ids"][row][real].astype(np.int64))
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(rows.batch["action_mask"][row][real]):
            losses.append(-logprobs[place - 1, ids[place]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("budget", [24, 100, 10_000])
def test_the_loss_is_the_mean_over_action_tokens(padding: str, budget: int) -> None:
    model, rows = a_model(), some_rows(padding=padding)
    found = evaluate(model, rows, SFTConfig(max_tokens_per_batch=budget))
    assert found.loss == pytest.approx(loss_by_hand(model, rows), abs=1e-5)
    assert found.tokens == rows.batch["action_mask"].sum()


def test_accuracies_count_tokens_and_whole_actions() -> None:
    model = a_model()
    rows = some_rows(count=4)
    for row in range(4):  # of two actions of a row make the first one likeliest, token by token
        places = np.flatnonzero(rows.batch["action_mask"][row])
        first = places[: np.flatnonzero(np.diff(places, append=99) > 1)[0] + 1]
        for place in first:
            ids = torch.as_tensor(rows.batch["input_ids"][row, :place].astype(np.int64))
            rows.batch["input_ids"][row, place] = model(ids[None]).logits[0, -1].argmax().item()
    found = evaluate(model, rows)
    assert found.action_accuracy >= 4 / found.actions
    assert 0.0 < found.token_accuracy < 1.0
    runs = np.diff(rows.batch["action_mask"], axis=1, prepend=0) == 1
    assert found.actions == runs.sum()


def test_training_lowers_the_loss_and_reports_progress() -> None:
    model, said = a_model(), list[SFTProgress]()
    before = evaluate(model, ROWS)
    config = SFTConfig(epochs=30, lr=1e-2, max_tokens_per_batch=80, warmup_share=0.1)
    reports = fit(model, ROWS, config, held_out=ROWS, progress=said.append)
    after = evaluate(model, ROWS)
    # `fit` evaluates in batches of 80 tokens and `evaluate` in larger ones: on some processors the sums of a forward
    # pass, of which that over the vocabulary is the longest, then round in another order.
    held_out = reports[-1].held_out
    assert held_out is not None
    assert held_out.loss == pytest.approx(after.loss, abs=rounding_error(VOCABULARY))
    assert held_out._replace(loss=after.loss) == after
    assert after.loss < 0.3 * before.loss
    assert after.token_accuracy > 0.9 > before.token_accuracy
    assert [one.step for one in said] == list(range(1, said[-1].steps + 1))
    assert max(one.lr for one in said) == pytest.approx(1e-2)
    assert said[0].lr < 1e-2 > said[-1].lr >= 1e-3
    assert len(reports) == 30
    assert reports[0].loss > reports[-1].loss


def test_observation_tokens_are_not_trained_on() -> None:
    first, second = a_model(), a_model()
    rows = some_rows(count=6)
    changed = copy.deepcopy(rows)
    after = np.zeros(rows.batch["action_mask"].shape, dtype=bool)
    for row in range(6):  # what stands behind the last action is in no action's context
        after[row, np.flatnonzero(rows.batch["action_mask"][row])[-1] + 1 :] = True
    changed.batch["input_ids"][after] = 0
    for model, each in ((first, rows), (second, changed)):
        fit(model, each, SFTConfig(lr=1e-2))
    for key, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, atol=1e-6, rtol=1e-5)


def test_weights_depend_on_the_seed_and_not_on_micro_batches() -> None:
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        model = a_model()
        fit(model, ROWS, SFTConfig(**{"epochs": 2, "lr": 1e-3, "max_tokens_per_batch": 80, **options}))
        return dict(model.state_dict())

    reference = trained(seed=1)
    assert all(torch.equal(value, reference[key]) for key, value in trained(seed=1).items())
    assert any(not torch.equal(value, reference[key]) for key, value in trained(seed=2).items())
    for key, value in trained(seed=1, max_tokens_per_micro_batch=24).items():
        torch.testing.assert_close(value, reference[key], atol=2e-5, rtol=1e-4)


def test_every_row_is_in_exactly_one_batch_within_the_budget() -> None:
    from reward_kit.rl.model_kit.sft import _batches

    lengths = np.random.default_rng(0).integers(0, 90, 500)
    generator = np.random.default_rng(1)
    first, second = (_batches(lengths, 200, generator) for _ in range(2))
    for batches in (first, second):
        assert sorted(np.concatenate(batches)) == np.flatnonzero(lengths).tolist()
        assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= 200 for rows in batches)
        padded = sum(len(rows) * lengths[rows].max() for rows in batches)
        assert padded < 1.1 * lengths.sum()
    assert [rows.tolist() for rows in first] != [rows.tolist() for rows in second]


def test_constrained_loss_is_over_allowed_tokens() -> None:
    model, rows = a_model(), some_rows(count=2)
    places = [np.flatnonzero(mask) for mask in rows.batch["action_mask"]]
    only = [
        AllowedIds(place, np.arange(len(place) + 1), rows.batch["input_ids"][row][place])
        for row, place in enumerate(places)
    ]
    masked = TokenBatch(rows.batch, {"allowed_ids": np.array(only, dtype=object)}, rows.meta_info)
    under = evaluate(model, masked, SFTConfig(use_allowed_ids=True))
    assert (under.loss, under.token_accuracy) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert evaluate(model, masked) == evaluate(model, rows)


def smoothed_by_hand(model: torch.nn.Module, rows: TokenBatch, smoothing: float) -> float:
    """Return the loss over the allowed alternatives, one token at a time."""
    losses = []
    for row in range(len(rows)):
        real = rows.batch["attention_mask"][row] == 1
        ids = torch.as_tensor(rows.batch["input_ids"][row][real].astype(np.int64))
        allowed = rows.non_tensor_batch["allowed_ids"][row]
        sets = {int(place): allowed.at(m) for m, place in enumerate(allowed.places)}
        for place in np.flatnonzero(rows.batch["action_mask"][row][real]):
            logits, could = model(ids[None]).logits[0, place - 1], sets.get(int(place), np.arange(VOCABULARY))
            if len(could) == 1:
                continue
            logprobs = {one: (logits[one] - logits[torch.as_tensor(could).long()].logsumexp(0)).item() for one in could}
            spread = sum(logprobs.values()) / len(logprobs)
            losses.append(-(1 - smoothing) * logprobs[int(ids[place])] - smoothing * spread)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_label_smoothing_spreads_over_allowed_tokens(padding: str) -> None:
    model, rows, draw = a_model(), some_rows(count=3, padding=padding), np.random.default_rng(0)
    allowed = []
    for row in range(3):
        real = rows.batch["input_ids"][row][rows.batch["attention_mask"][row] == 1]
        places = np.flatnonzero(rows.batch["action_mask"][row][rows.batch["attention_mask"][row] == 1])[1:]
        sets = [np.union1d(draw.choice(VOCABULARY, place % 4, replace=False), real[place]) for place in places]
        allowed.append(AllowedIds(places, np.cumsum([0, *map(len, sets)]), np.concatenate(sets)))
    assert {1} < {len(ids) for one in allowed for ids in one.sets}
    masked = TokenBatch(rows.batch, {"allowed_ids": np.array(allowed, dtype=object)}, rows.meta_info)
    expected = smoothed_by_hand(model, masked, 0.4)
    options = {"max_tokens_per_batch": 10_000, "lr": 0.0, "use_allowed_ids": True, "label_smoothing": 0.4}
    for budget in (None, 24):
        (report,) = fit(model, masked, SFTConfig(**options, max_tokens_per_micro_batch=budget))
        assert report.loss == pytest.approx(expected, abs=1e-5)


def test_label_smoothing_lowers_confidence() -> None:
    sure, unsure = a_model(), a_model()
    for model, smoothing in ((sure, 0.0), (unsure, 0.5)):
        fit(model, ROWS, SFTConfig(epochs=30, lr=1e-2, max_tokens_per_batch=80, label_smoothing=smoothing))
    assert evaluate(sure, ROWS).loss < 0.3 < evaluate(unsure, ROWS).loss
    assert evaluate(unsure, ROWS).token_accuracy > 0.9


def test_non_finite_batch_is_kept_and_not_applied(tmp_path: Path) -> None:
    model = a_model()
    with torch.no_grad():
        model.model.norm.weight[3] = math.nan
    before = copy.deepcopy(model.state_dict())

    def keep(rows: TokenBatch, facts: Mapping[str, Any]) -> Path:
        return save_batch_for_study(tmp_path, rows, facts)

    with pytest.raises(TrainingError, match=r"step 0: the loss is nan.*saved in .*study-000"):
        fit(model, ROWS, SFTConfig(), on_failure=keep)
    study = load_batch_for_study(tmp_path / "study-000")
    assert math.isnan(study.facts["loss"])
    assert len(study.rows) == len(ROWS)
    assert all(torch.equal(value, before[key]) or value.isnan().any() for key, value in model.state_dict().items())


def test_groups_are_held_out_as_a_whole() -> None:
    groups = np.array(list("aabbccddeeff"), dtype=object)
    rows = TokenBatch(ROWS.batch, {"uid": groups}, ROWS.meta_info)
    train, held_out = split_rows(rows, 0.34, seed=3)
    kept, out = set(train.non_tensor_batch["uid"]), set(held_out.non_tensor_batch["uid"])
    assert len(out) == 2
    assert kept | out == set(groups)
    assert not kept & out
    with pytest.raises(ConfigError, match="all rows belong to the same group"):
        split_rows(rows[:2], 0.5)


def test_invalid_options_are_rejected() -> None:
    for wrong in (
        *({"epochs": 0}, {"lr": -1.0}, {"warmup_share": 1.0}, {"max_tokens_per_batch": 0}),
        *({"label_smoothing": 1.0}, {"label_smoothing": -0.1}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SFTConfig(**wrong)
    batch = {**ROWS.batch, "action_mask": np.zeros_like(ROWS.batch["action_mask"])}
    with pytest.raises(ConfigError, match="no row has an action token"):
        fit(a_model(), TokenBatch(batch, {}, ROWS.meta_info), SFTConfig())


async def test_model_learns_the_actions_of_the_expert() -> None:
    episodes = await walks(1)
    tokenizer = tokenizer_of(episodes)
    settings = {"action_format": "bare", "tools_in_prompt": False}
    demonstrated = Demonstrations(tokenizer, **settings)(episodes, TOOLS)
    rows = build_rows(demonstrated, pad_token_id=tokenizer.pad_token_id)
    model = build_decoder(tokenizer, layers=2, width=32, heads=2, context=512)
    fit(model, rows, SFTConfig(epochs=60, lr=1e-2))
    policy = HFAgentPolicy(model, tokenizer, temperature=0.0, max_new_tokens=4, **settings)
    (walk,) = await walks(1, policy)
    await policy.close()
    assert walk.get_return() == 1.0
    assert list(walk.tokens.ids) == list(demonstrated[0].tokens.ids)


def test_test_rows_fit_the_vocabulary() -> None:
    assert ROWS.batch["input_ids"].max() < VOCABULARY
