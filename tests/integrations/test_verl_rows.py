"""Test episodes as verl rows and back, without verl; tests with it are in `tests/integrations/verl`."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from reward_kit.agent.models import episode_steps
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import ConfigError
from reward_kit.integrations.verl.data_proto import EPISODE, from_data_proto, to_data_proto, verl_rows
from reward_kit.rl_helpers import ESTIMATORS, with_credit
from reward_kit.tokens import TokenBatch
from tests.integrations.verl_episodes import collected, equal


def episode(rollout_id: str, turns: list[tuple[list[int], list[int]]]) -> SingleAgentEpisode:
    made = SingleAgentEpisode(rollout_id)
    made.add_env_reset("o", {"state_key": "s0"})
    for step, (prompt, sampled) in enumerate(turns):
        made.tokens.add_turn(step, prompt, sampled, [-n / 8 for n in sampled], policy_version=5 + (step > 0))
        made.add_env_step("o", {"type": "text", "content": ""}, 0.0, {"state_key": f"s{step + 1}"})
    return made


# p = 1 2, a1 = 3 4, o1 = 5, a2 = 6, then a new context; and p = 7 7 7, a1 = 8.
LONG = episode("long", [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([9], [9])])
SHORT = episode("short", [([7, 7, 7], [8])])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("prompts", [[0, 1, 2], [0, 0, 9], [7, 7, 7]]),
        ("responses", [[3, 4, 5, 6], [9, 0, 0, 0], [8, 0, 0, 0]]),
        ("input_ids", [[0, 1, 2, 3, 4, 5, 6], [0, 0, 9, 9, 0, 0, 0], [7, 7, 7, 8, 0, 0, 0]]),
        ("attention_mask", [[0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]]),
        ("position_ids", [[0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 3, 3, 3]]),
        ("response_mask", [[1, 1, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0]]),
        ("rollout_log_probs", [[-3 / 8, -0.5, 0, -0.75], [-9 / 8, 0, 0, 0], [-1, 0, 0, 0]]),
        ("policy_versions", [[5, 5, -1, 6], [6, -1, -1, -1], [5, -1, -1, -1]]),
        ("rm_scores", [[0, 0, 0, 0], [0.5, 0, 0, 0], [0.25, 0, 0, 0]]),
        ("token_level_scores", [[0, 0, 0, 0], [0.5, 0, 0, 0], [0.25, 0, 0, 0]]),
    ],
)
def test_verl_row_layout(key: str, expected: list[list[float]]) -> None:
    rows = verl_rows([LONG, SHORT], pad_token_id=0, scores=[0.5, 0.25])
    np.testing.assert_array_equal(rows.batch[key], expected)
    (mark,) = test_verl_row_layout.pytestmark  # type: ignore[attr-defined]
    assert {key for key, _ in mark.args[1]} == rows.batch.keys()


def test_non_tensor_columns_of_verl_rows() -> None:
    steps = [
        [
            step.model_copy(update={"base_reward": reward})
            for step, reward in zip(episode_steps(made), rewards, strict=True)
        ]
        for made, rewards in ((LONG, [0.5, None, 1.0]), (SHORT, [2.0]))
    ]
    rows = verl_rows([LONG, SHORT], steps, pad_token_id=0, scores=[0.5, 0.25]).non_tensor_batch
    found = {key: values.tolist() for key, values in rows.items() if key != EPISODE}
    expected = {
        "traj_uid": ["long", "long", "short"],
        "uid": ["long", "long", "short"],
        "segment": [0, 1, 0],
        "ends_episode": [False, True, True],
        "steps": [[0, 1], [2], [0]],
        "action_lengths": [[2, 1], [1], [1]],
        "state_keys": [["s0", "s1"], ["s2"], ["s0"]],
        "step_rewards": [[0.5, None], [1.0], [2.0]],
        "valid_actions": [[True, True], [True], [True]],
        "episode_rewards": [0.5, 0.5, 0.25],
        "episode_lengths": [3, 3, 1],
        "reward_model": [{"ground_truth": None}] * 3,
    }
    assert {key: found[key] for key in expected} == expected
    # verl takes the one for pixels, and the other says nothing here.
    assert not {"multi_modal_inputs", "message_parts", "allowed_ids"} & found.keys()
    assert rows[EPISODE][0] is rows[EPISODE][1]
    by_action = verl_rows([LONG, SHORT], pad_token_id=0, per="action").non_tensor_batch
    assert by_action["anchor_obs"].tolist() == ["s0", "s1", "s2", "s0"]
    # Not scored yet, which differs from a score of NaN.
    assert "episode_rewards" not in by_action


def test_rows_have_the_configured_width_and_are_not_truncated() -> None:
    rows = verl_rows([LONG, SHORT], pad_token_id=0, scores=[0.5, 0.25], prompt_length=5, response_length=6)
    narrow = verl_rows([LONG, SHORT], pad_token_id=0, scores=[0.5, 0.25])
    assert {key: values.shape[1] for key, values in rows.batch.items()} == {
        **dict.fromkeys(rows.batch, 6),
        "prompts": 5,
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), 11),
    }
    assert rows.batch["position_ids"][2].tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3]
    for key in ("responses", "response_mask", "rollout_log_probs", "rm_scores"):
        np.testing.assert_array_equal(rows.batch[key][:, :4], narrow.batch[key])
    with pytest.raises(
        ConfigError, match="response_length is 3, but a row needs 4 tokens, and rows are never truncated"
    ):
        verl_rows([LONG, SHORT], pad_token_id=0, response_length=3)


def test_unscored_rows_are_dropped_or_masked_and_never_zero() -> None:
    left_out = verl_rows([LONG, SHORT], pad_token_id=0, scores=[None, 0.0])
    assert left_out.non_tensor_batch["rollout_id"].tolist() == ["short"]
    masked = verl_rows([LONG, SHORT], pad_token_id=0, scores=[None, 0.0], unscored="mask")
    assert masked.batch["response_mask"].tolist() == [[0] * 4, [0] * 4, [1, 0, 0, 0]]
    assert np.isnan(masked.non_tensor_batch["episode_rewards"]).tolist() == [True, True, False]
    assert from_data_proto(masked).scores == [None, 0.0]
    with pytest.raises(ConfigError, match="no episode has both tokens and a score"):
        verl_rows([LONG], pad_token_id=0, scores=[None])
    with pytest.raises(ConfigError, match="unscored"):
        verl_rows([LONG], pad_token_id=0, unscored="drop")  # type: ignore[arg-type]


def test_steps_without_credit_are_masked() -> None:
    steps = [
        [
            step.model_copy(update={"advantage": value, "return_to_go": value})
            for step, value in zip(of, values, strict=True)
        ]
        for of, values in ((episode_steps(LONG), [0.5, None, -1.0]), (episode_steps(SHORT), [2.0]))
    ]
    rows = verl_rows([LONG, SHORT], steps, pad_token_id=0, scores=[0.5, 0.25])
    assert rows.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert rows.batch["advantages"].tolist() == [[0.5, 0.5, 0, 0], [-1.0, 0, 0, 0], [2.0, 0, 0, 0]]
    # The score stays where the episode ended.
    assert rows.batch["rm_scores"].sum(axis=1).tolist() == [0.0, 0.5, 0.25]
    back = from_data_proto(rows).step_data_lists
    assert [[step.advantage for step in of] for of in back] == [[0.5, None, -1.0], [2.0]]


def test_missing_log_probabilities_are_left_to_verl() -> None:
    unknown = SingleAgentEpisode("u")
    unknown.add_env_reset("o")
    unknown.tokens.add_turn(0, [1], [2])
    unknown.add_env_step("o", {"type": "text", "content": ""}, 0.0)
    assert "rollout_log_probs" not in verl_rows([unknown, SHORT], pad_token_id=0).batch


def test_episode_with_tokens_for_only_some_steps_is_rejected() -> None:
    partly = episode("partly", [([1], [2])])
    partly.add_env_step("o", {"type": "text", "content": "by hand"}, 0.0)
    with pytest.raises(ConfigError, match="episode partly: step 1 has no tokens in these rows"):
        verl_rows([partly], pad_token_id=0)


@pytest.mark.parametrize("per", ["segment", "action"])
@pytest.mark.parametrize("seed", range(12))
def test_episode_round_trip_is_exact_in_any_order(seed: int, per: str) -> None:
    given = collected(seed)
    if seed % 2:
        credit = ESTIMATORS["gigpo"](given.steps, given.scores, group_ids=given.group_ids, omega=0.5, gamma=0.9)
        given = given._replace(steps=with_credit(given.steps, credit))
    options = {"pad_token_id": 0, "scores": given.scores, "per": per, "unscored": "mask"}
    rows = verl_rows(given.episodes, given.steps, **options)
    # What trainers do: other widths, another order, and the way through float32.
    rows = rows.reorder(np.random.default_rng(seed).permutation(len(rows)))
    arrays = {k: v.astype(np.float32) if v.dtype == np.float64 else v for k, v in rows.batch.items()}
    back = from_data_proto(TokenBatch(arrays, rows.non_tensor_batch))
    found = {made.id_: place for place, made in enumerate(back.episodes)}
    assert found.keys() == {made.id_ for made in given.episodes}
    for made, steps, score in zip(*given, strict=True):
        place = found[made.id_]
        assert back.episodes[place].get_state() == made.get_state()
        assert back.scores[place] == score
        assert all(equal(a, b) for a, b in zip(back.step_data_lists[place], steps, strict=True))


def test_credit_from_verl_is_assigned_to_the_steps() -> None:
    rows = verl_rows([LONG, SHORT], pad_token_id=0)
    credited = {
        "advantages": np.array([[0.5, 0.5, 0, -1.0], [2.0, 0, 0, 0], [0.0, 0, 0, 0]], dtype=np.float32),
        "rm_scores": np.array([[0, 0, 0, 0], [0.5, 0, 0, 0], [0.25, 0, 0, 0]], dtype=np.float32),
    }
    back = from_data_proto(TokenBatch({**rows.batch, **credited}, rows.non_tensor_batch))
    assert [[step.advantage for step in steps] for steps in back.step_data_lists] == [[0.5, -1.0, 2.0], [0.0]]
    assert back.scores == [0.5, 0.25]


def test_modified_rows_are_rejected() -> None:
    rows = verl_rows([LONG, SHORT], pad_token_id=0)
    changed = rows.batch["input_ids"].copy()
    changed[0, 3] += 1
    with pytest.raises(ConfigError, match="the 6 tokens of row 0 differ from the 6 tokens of episode long"):
        from_data_proto(TokenBatch({**rows.batch, "input_ids": changed}, rows.non_tensor_batch))
    logprobs = rows.batch["rollout_log_probs"] + 0.5
    with pytest.raises(ConfigError, match="row 0: rollout_log_probs differ from the log-probabilities"):
        from_data_proto(TokenBatch({**rows.batch, "rollout_log_probs": logprobs}, rows.non_tensor_batch))
    with pytest.raises(ConfigError, match="non_tensor_batch has no 'reward_kit_episode'"):
        from_data_proto(verl_rows([LONG], pad_token_id=0, with_episodes=False))


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_missing_verl_is_reported() -> None:
    with pytest.raises(ConfigError, match="verl is not installed"):
        to_data_proto([SHORT], pad_token_id=0)
