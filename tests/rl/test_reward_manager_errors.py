"""Test errors of reward managers: options, states, and ambiguous batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reward_kit.errors import ConfigError
from reward_kit.rl.reward_manager import EpisodeRewardManager, NaiveRewardManager, load_reward_manager
from tests.devices import DEVICE
from tests.rl.reward_cases import WordTokenizer, answers, proto

pytestmark = pytest.mark.device


def manager(**options: Any) -> EpisodeRewardManager:
    return EpisodeRewardManager(WordTokenizer(), 0, **options)


def naive() -> NaiveRewardManager:
    return NaiveRewardManager(WordTokenizer(), 0, lambda solution_str, ground_truth: 1.0)


async def eventually(inputs: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"normalization_type": "varianz"}, "unknown normalization_type 'varianz'; did you mean 'variance'"),
        ({"normalize_by_length": True, "normalization_type": "variance"}, "normalize_by_length=True contradicts"),
        ({"normalize_by_length": True, "normalization_type": "none"}, "normalize_by_length=True contradicts"),
        ({"normalize_by_length": "no"}, "normalize_by_length must be True or False, got 'no'"),
        ({"step_rewards": "no"}, "step_rewards must be True or False, got 'no'"),
        ({"visual_rule": "ad"}, "unknown visual_rule 'ad'; did you mean 'add'"),
        ({"visual_rule": None}, "unknown visual_rule None; known: add, multiply"),
        ({"visual_scorer": 3}, "visual_scorer must be a synchronous function that takes one row's inputs, got 3"),
        ({"visual_scorer": eventually}, "visual_scorer must be a synchronous function"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"echo": 3}, "echo must be a function that takes one line, got 3"),
    ],
)
def test_contradicting_and_unknown_options_are_rejected(options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        manager(**options)


@pytest.mark.parametrize("number", [-1, True, 1.5, "1", None])
def test_invalid_num_examine_is_rejected(number: Any) -> None:
    with pytest.raises(ConfigError, match="num_examine must be an integer of at least 0, got"):
        EpisodeRewardManager(WordTokenizer(), number)


def test_numpy_integer_num_examine_is_accepted() -> None:
    few: Any = np.int64(1)
    EpisodeRewardManager(WordTokenizer(), few)


def test_invalid_tokenizer_is_rejected() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="the tokenizer must have a method `decode`, got None"):
        EpisodeRewardManager(nothing, 1)
    with pytest.raises(ConfigError, match="the tokenizer must have a method `decode`, got None"):
        NaiveRewardManager(nothing, 0, lambda solution_str: 1.0)
    assert EpisodeRewardManager(nothing, 0)(answers([[4]], episode_rewards=[1.0])).sum() == 1.0  # decodes nothing


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        (None, {}, "unknown reward manager None; known: batch, dapo"),
        ("prime", {"max_concurrency": 1.5}, "max_concurrency must be an integer of at least 1, got 1.5"),
        ("prime", {"max_concurrency": None}, "max_concurrency must be an integer"),
        ("prime", {"deadline_s": math.nan}, "deadline_s must be a finite number, got nan"),
        ("dapo", {"max_response_length": 3.5, "overlong_buffer_len": 1}, "max_response_length must be an integer"),
        (
            "dapo",
            {"max_response_length": 3, "overlong_buffer_len": 0},
            "overlong_buffer_len must be an integer of at",
        ),
    ],
)
def test_wrong_types_of_manager_options_are_rejected(name: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward_manager(name, WordTokenizer(), 0, compute_score=lambda solution_str: 1.0, **options)


@pytest.mark.parametrize(
    "state",
    [
        {"count": 1.5, "mean": 0.0, "m2": 0.0},
        {"count": math.inf, "mean": 0.0, "m2": 0.0},
        {"count": 0, "mean": 5.0, "m2": 7.0},
        {"count": 2, "mean": math.nan, "m2": 0.0},
    ],
)
def test_impossible_running_statistics_are_rejected(state: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="invalid running statistics"):
        manager(normalization_type="variance").load_state_dict({"normalization_type": "variance", **state})


def test_state_that_is_not_a_mapping_is_rejected() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"the state must be a mapping that state_dict\(\) returned, got None"):
        manager().load_state_dict(nothing)


# Batches


@pytest.mark.parametrize("data", [None, {"responses": [[1]]}, SimpleNamespace(batch=None)])
def test_value_that_is_not_a_batch_is_rejected(data: Any) -> None:
    with pytest.raises(ConfigError, match="a batch must have `batch` and `non_tensor_batch`, like DataProto"):
        manager()(data)


def test_batch_without_non_tensor_entries_is_rejected() -> None:
    with pytest.raises(ConfigError, match="non_tensor_batch has no 'episode_rewards'"):
        manager()(SimpleNamespace(batch={"action_mask": torch.ones(1, 2)}))


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"episode_reward": [1.0, 1.0]}, "has no 'episode_rewards'; did you mean 'episode_reward'"),
        ({"episode_rewards": [1.0]}, r"episode_rewards'\] must have one item for each of the 2 rows"),
        ({"episode_rewards": [0.0, math.inf]}, "infinite in row 1"),
        ({"episode_rewards": [0.0, 1e300]}, "infinite in row 1"),  # in float32
        ({"episode_rewards": ["won", 1.0]}, "not a number: 'won' is a string"),
        ({"episode_rewards": ["1", 1.0]}, "not a number: '1' is a string"),
        ({"episode_rewards": [1.0, 2.0], "traj_uid": ["a", "a"]}, r"episode_rewards\[1\] is 2, but an earlier row of"),
        ({"episode_rewards": [None, 2.0], "traj_uid": ["a", "a"]}, r"episode_rewards\[1\] is 2, .* has nan"),
        ({"episode_rewards": [1.0, 1.0], "traj_uid": ["a", None]}, "traj_uid'] is None in at least one row"),
        ({"episode_rewards": [1.0, 1.0], "traj_uid": [["a"], ["b"]]}, "traj_uid'] must contain strings or numbers"),
        (
            {"episode_rewards": [1.0, 1.0], "ends_episode": ["False", "True"]},
            "ends_episode'] must contain true or false",
        ),
        ({"episode_rewards": [1.0, 1.0], "ends_episode": [None, True]}, "ends_episode'] must contain true or false"),
    ],
)
def test_missing_episode_rewards_are_rejected(others: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        manager()(answers([[4], [5]], **others))


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("responses", torch.ones(2), r"'responses' must have two axes, row and token, but its shape is \(2,\)"),
        ("responses", torch.ones(2, 2, 1), "'responses' must have two axes, row and token"),
        (
            "attention_mask",
            torch.ones(1, 5),
            r"'attention_mask' has shape \(1, 5\); in a batch with 'responses', it must be \(2, 2\), or",
        ),
        (
            "attention_mask",
            torch.ones(2, 4),
            r"has shape \(2, 4\); .* it must be \(2, 2\), or \(2, 5\) including the prompts",
        ),
        ("response_mask", torch.ones(2, 1), r"'response_mask' has shape \(2, 1\)"),
        ("response_mask", np.full((2, 2), None), "'response_mask' cannot be converted"),
        (
            "response_mask",
            np.ones((2, 2), dtype=">i8"),
            "'response_mask' cannot be converted to .* byte order",
        ),
        (
            "rm_scores",
            torch.ones(2),
            r"'rm_scores' must have one reward for each token, so its shape must be \(2, 2\), got \(2,\)",
        ),
        (
            "rm_scores",
            torch.ones(3, 2),
            r"'rm_scores' must have one reward for each token, so its shape must be \(2, 2\), got \(3, 2\)",
        ),
    ],
)
def test_arrays_of_wrong_shape_or_type_are_rejected(name: str, values: Any, told: str) -> None:
    data = answers([[4, 5], [6]], episode_rewards=[1.0, 2.0])
    data.batch[name] = values
    with pytest.raises(ConfigError, match=told):
        manager()(data)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="only masks on the CPU are checked")
@pytest.mark.parametrize("width", [3, 300])
@pytest.mark.parametrize("number", [2, -1])
@pytest.mark.parametrize("name", ["response_mask", "attention_mask"])
def test_mask_of_other_numbers_is_rejected(name: str, number: int, width: int) -> None:
    masks = {key: torch.ones((1, width), dtype=torch.int64) for key in ("response_mask", "attention_mask")}
    masks[name][0, -1] = number
    data = SimpleNamespace(
        batch={"responses": torch.ones(1, width), **masks}, non_tensor_batch={"episode_rewards": [1.0]}
    )
    with pytest.raises(ConfigError, match="must contain only 0 and 1"):
        manager()(data)


def test_batch_without_a_mask_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"needs 'responses' with .* the batch has ids"):
        manager()(proto({"ids": torch.zeros(1, 1)}, episode_rewards=[1.0]))
    with pytest.raises(
        ConfigError, match=r"'attention_mask' has shape \(1, 1\); in a batch with 'responses', it must be \(1, 2\)$"
    ):
        short = {"responses": torch.zeros(1, 2), "attention_mask": torch.ones(1, 1)}
        manager()(proto(short, episode_rewards=[1.0]))


def test_step_rewards_with_a_number_per_row_are_rejected() -> None:
    data = answers([[4], [5]], episode_rewards=[1.0, 2.0], step_rewards=np.array([0.5, 0.25]))
    with pytest.raises(
        ConfigError, match=r"step_rewards'\]\[0\] must be a list with one reward for each action, got 0.5"
    ):
        manager(step_rewards=True)(data)


def test_infinite_token_reward_is_rejected() -> None:
    data = answers([[4], [5]], episode_rewards=[1.0, 2.0])
    data.batch["step_rewards"] = torch.tensor([[0.0], [math.inf]])
    with pytest.raises(ConfigError, match="the reward of row 1 is inf, which is not a finite float32"):
        manager(step_rewards=True)(data)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"reward_model": ["one"]}, r"reward_model'\]\[0\] must be a mapping with 'ground_truth'.*, got 'one'"),
        ({"reward_model": [{"groundtruth": "one"}]}, "rename 'groundtruth' to 'ground_truth'"),
        (
            {"raw_prompt": ["what?"], "reward_model": [{"ground_truth": 1}]},
            r"raw_prompt'\]\[0\] must be a list of messages",
        ),
        ({"raw_prompt": [[{"rol": "user"}]], "reward_model": [{"ground_truth": 1}]}, "must be a list of messages"),
    ],
)
def test_malformed_prompts_and_ground_truths_are_rejected(others: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        naive()(answers([[4]], **others))
