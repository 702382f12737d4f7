"""Test the layout of rows for the module: independent of padding, with allowed ids, reading only tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reward_kit.agent.models import episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.learner.training_rows import TrainingRows
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch, build_rows
from tests.rl.learner.cases import VOCABULARY, a_model, some_rows

pytestmark = pytest.mark.device

# What a policy saw and sampled, turn by turn, and which ids a constraint left to each sampled token.
TURNS = [([5, 6, 7], [8, 9]), ([1, 2], [3, 4, 10]), ([11], [12])]
ALLOWED: list[list[list[int] | None]] = [[None, [9, 20]], [[3, 4, 5], None, [9, 20, 10]], [None]]


def an_episode(rollout_id: str, turns: int = 3, critic: bool = False) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(rollout_id)
    episode.add_env_reset("o")
    context: list[int] = []
    for t, (observed, sampled) in enumerate(TURNS[:turns]):
        context += observed
        outputs = {"value_estimate": t + 0.5} if critic else {}
        episode.tokens.add_turn(
            t, list(context), sampled, [-1.0] * len(sampled), policy_version=0, allowed_ids=ALLOWED[t]
        )
        episode.add_env_step("o", {"type": "text", "content": ""}, 0.0, extra_model_outputs=outputs)
        context += sampled
    return episode


def rows_of(*episodes: SingleAgentEpisode, padding: str = "right") -> TokenBatch:
    steps = [
        [
            step.model_copy(update={"advantage": 1.0 + t, "return_to_go": 2.0})
            for t, step in enumerate(episode_steps(one))
        ]
        for one in episodes
    ]
    return build_rows(list(episodes), steps, pad_token_id=0, padding=padding)  # type: ignore[arg-type]


def loop_logprobs(episode: SingleAgentEpisode, turns: int, temperature: float) -> list[float]:
    """Return log-probabilities token by token from all logits, with disallowed ones at -inf."""
    model, context, found = a_model(), [], []
    for (observed, sampled), allowed in zip(TURNS[:turns], ALLOWED, strict=False):
        context += observed
        for token, ids in zip(sampled, allowed, strict=True):
            with torch.no_grad():
                logits_V = model(torch.tensor([context])).logits[0, -1] / temperature
            if ids is not None:
                mask_V = torch.full((VOCABULARY,), -torch.inf)
                mask_V[ids] = 0.0
                logits_V = logits_V + mask_V
            found.append(logits_V.log_softmax(-1)[token].item())
            context.append(token)
    return found


@pytest.mark.parametrize("padding", ["right", "left", "outer"])
@pytest.mark.parametrize("max_logits", [10_000, 2 * VOCABULARY])
def test_recorded_constraints_are_applied_in_every_padding(padding: str, max_logits: int) -> None:
    rows = rows_of(an_episode("a"), an_episode("b", 2), padding=padding)
    learner = PPOLearner(a_model(), PPOConfig(temperature=0.8, max_logits=max_logits))
    logprobs = learner.logprobs(rows)
    for row, turns in ((0, 3), (1, 2)):
        expected = loop_logprobs(an_episode("c", turns), turns, 0.8)
        np.testing.assert_allclose(logprobs[row][rows.batch["action_mask"][row] == 1], expected, rtol=0, atol=1e-5)
    assert not logprobs[rows.batch["action_mask"] == 0].any()
    found = learner.gradients(rows)
    assert np.isfinite([found["loss"], found["entropy"], found["grad_norm"]]).all()


def test_equal_allowed_sets_are_stored_once() -> None:
    flat = TrainingRows.of(rows_of(an_episode("a"), an_episode("b")))
    assert len(flat.sets) == 3
    assert flat.sets_N.tolist()[:6] == flat.sets_N.tolist()[6:]
    assert (flat.sets_N >= 0).tolist()[:6] == [False, True, True, False, True, False]


def test_values_outside_the_tokens_are_never_read() -> None:
    rows = some_rows()
    learner = PPOLearner(a_model(), PPOConfig(max_tokens_per_micro_batch=60))
    expected = learner.gradients(rows)
    changed = some_rows()
    changed.batch["input_ids"][changed.batch["attention_mask"] == 0] = 10**6  # no token of this vocabulary
    changed.batch["advantages"][changed.batch["loss_mask"] == 0] = np.inf
    assert learner.gradients(changed) == expected


def test_row_longer_than_the_budget_is_its_own_micro_batch() -> None:
    rows = some_rows()
    config = PPOConfig(max_tokens_per_micro_batch=10)
    assert PPOLearner(a_model(), config).gradients(rows)["loss"] == pytest.approx(
        PPOLearner(a_model(), PPOConfig()).gradients(rows)["loss"], abs=1e-6
    )


def test_recorded_values_are_laid_out_on_their_actions() -> None:
    rows = rows_of(an_episode("a", critic=True))
    assert rows.batch["values"][0].tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 1.5, 1.5, 1.5, 0, 2.5]
    assert np.flatnonzero(rows.batch["value_mask"][0]).tolist() == [3, 7, 11]
    assert not {"values", "value_mask"} & rows_of(an_episode("a")).batch.keys()


def test_value_is_used_once_per_action() -> None:
    flat = TrainingRows.of(rows_of(an_episode("a", critic=True)))
    assert np.flatnonzero(flat.is_first_N).tolist() == [0, 2, 5]
    without = TrainingRows.of(rows_of(an_episode("a")))
    assert np.array_equal(without.is_first_N, flat.is_first_N)
