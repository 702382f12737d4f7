"""Test reward managers for per-row and batch rewards, concurrency, and lookup by name."""

from __future__ import annotations

import functools
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.errors import ConfigError
from reward_kit.models import EvaluateResult, Message
from reward_kit.rl.reward_manager import (
    REWARD_MANAGERS,
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    load_reward_manager,
    stack_facts,
)
from reward_kit.typed_interface import reward_function
from tests.profiles import examples
from tests.rl.reward_cases import WordTokenizer, answers

pytestmark = pytest.mark.device


def sums(*truths: str | None, responses: Any = ((4, 1), (5, 1)), **others: Any) -> Any:
    return answers(responses, reward_model=[{"ground_truth": truth} for truth in truths], **others)


def naive(compute_score: Any, **options: Any) -> NaiveRewardManager:
    return NaiveRewardManager(WordTokenizer(), 0, compute_score, **options)


@reward_function
def exact(messages: list[Message], ground_truth: str) -> EvaluateResult:
    return EvaluateResult(
        score=float(messages[-1].text == ground_truth), metrics={"short": {"score": 0.5, "reason": "one word"}}
    )


def compute_score(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "saw": extra_info}


# Naive


@pytest.mark.parametrize("reward", [exact, compute_score], ids=["ours", "of verl's form"])
def test_a_row_is_scored_by_its_ground_truth_without_special_tokens(reward: Any) -> None:
    found = naive(reward)(sums("one", "one"), return_dict=True)
    assert found["reward_tensor"].tolist() == [[0.0, 1.0], [0.0, 0.0]]  # on <eos>, which the policy sampled too
    info = found["reward_extra_info"]
    assert info["score"].tolist() == [1.0, 0.0] and info["is_scored"].tolist() == [True, True]
    assert {len(values) for values in info.values()} == {2}


def test_extra_values_of_a_reward_are_in_the_info() -> None:
    assert naive(exact)(sums("one", "two"), return_dict=True)["reward_extra_info"]["short"].tolist() == [0.5, 0.5]
    data = sums("one", "two", extra_info=[{"index": 3}, None])
    info = naive(compute_score)(data, return_dict=True)["reward_extra_info"]
    assert info["acc"].tolist() == [True, True] and info["saw"].tolist() == [{"index": 3}, {}]


def test_reward_receives_the_prompt_as_chat_if_available() -> None:
    seen: list[list[tuple[str, str]]] = []

    def reward(messages: list[Message]) -> float:
        seen.append([(message.role, message.text) for message in messages])
        return EvaluateResult(score=1.0)

    chat = [{"role": "system", "content": "count"}, {"role": "user", "content": "what?"}]
    naive(reward)(answers([[4]], raw_prompt=[chat]))
    naive(reward)(answers([[4]]))
    assert seen == [
        [("system", "count"), ("user", "what?"), ("assistant", "one")],
        [("user", "what is"), ("assistant", "one")],
    ]


@pytest.mark.parametrize("number", [torch.tensor(0.5), torch.tensor([0.5]), np.float32(0.5), np.array([0.5])])
def test_single_item_tensor_or_array_is_a_number(number: Any) -> None:
    assert naive(lambda solution_str: number)(answers([[4]])).tolist() == [[0.5]]


def test_score_is_used_if_query_and_response_are_returned() -> None:
    assert naive(lambda solution_str: (0.5, "how good?", "half"))(answers([[4]])).tolist() == [[0.5]]


def test_extra_info_of_any_type_is_passed_to_a_verl_style_function() -> None:
    assert naive(lambda solution_str, extra_info: float(extra_info))(answers([[4]], extra_info=["0.5"])).sum() == 0.5


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (math.nan, "no score (NaN)"),
        (None, "no score (None)"),
        ("1", "reward returned a str as the score; return a number, (score, query, response)"),
        ({"acc": 1}, "a mapping without 'score'; it has ['acc']"),
        ((0.5, "query"), "2 values; return (score, query, response)"),
        (torch.tensor([1.0, 2.0]), "a Tensor with multiple items as the score"),
        (ValueError("no digits"), "ValueError: no digits"),
    ],
)
def test_invalid_score_leaves_only_its_row_unscored(wrong: Any, told: str) -> None:
    def reward(solution_str: str) -> Any:
        if solution_str == "two" and isinstance(wrong, Exception):
            raise wrong
        return np.float32(0.5) if solution_str == "one" else wrong

    found = naive(reward)(sums("one", "one"), return_dict=True)
    assert found["reward_tensor"].tolist() == [[0.0, 0.5], [0.0, 0.0]]
    info = found["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, False] and math.isnan(info["score"][1])
    assert info["failure"][0] == "" and told in info["failure"][1]
    assert info["failure_class"].tolist() == ["", "crash" if isinstance(wrong, Exception) else "invalid_result"]


def test_reward_cannot_overwrite_manager_info() -> None:
    def reward(solution_str: str) -> dict[str, Any]:
        return {"score": 0.5, "is_scored": "perhaps", "failure": 7}

    info = naive(reward)(sums("one", "one"), return_dict=True)["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, True] and info["failure"].tolist() == ["", ""]


def test_precomputed_rewards_are_used_without_calling_the_reward() -> None:
    data = sums("one", "one")
    data.batch["rm_scores"] = torch.ones(2, 2)
    found = naive(lambda solution_str: 1 / 0)(data, return_dict=True)
    assert found["reward_tensor"] is data.batch["rm_scores"] and "reward_extra_info" in found


def test_an_empty_answer_is_scored_and_gets_no_reward() -> None:
    found = naive(lambda solution_str: 1.0)(answers([[4], []]), return_dict=True)
    assert found["reward_tensor"].tolist() == [[1.0], [0.0]]
    assert found["reward_extra_info"]["is_empty"].tolist() == [False, True]


async def test_async_reward_works_inside_an_event_loop() -> None:
    async def reward(solution_str: str) -> float:
        return float(solution_str == "one")

    assert naive(reward)(sums("one", "one")).sum() == 1.0


def test_missing_required_ground_truth_is_reported() -> None:
    with pytest.raises(
        ConfigError, match=r"'exact' needs ground_truth, but no row of .* has one \(their fields: extra_info"
    ):
        naive(exact)(answers([[4]], extra_info=[{}]))
    with pytest.raises(ConfigError, match="'compute_score' needs ground_truth"):
        naive(compute_score)(answers([[4]]))
    info = naive(exact)(sums("one", None), return_dict=True)["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, False]


def test_empty_batch_makes_no_calls() -> None:
    assert naive(compute_score)(answers([])).shape == (0, 0)


keys = st.sampled_from(["acc", "format", "note"])
facts = st.dictionaries(keys, st.integers(0, 3) | st.text(max_size=2) | st.lists(st.integers(), max_size=2))


@given(st.lists(facts, max_size=5))
def test_info_has_one_item_per_row_for_differing_keys(items: list[dict[str, Any]]) -> None:
    columns = stack_facts(items)
    assert set(columns) == {key for item in items for key in item}
    for key, values in columns.items():
        assert values.shape == (len(items),)
        assert values.tolist() == [item.get(key) for item in items]


# Batch


def test_batch_is_scored_in_one_call_by_both_kinds() -> None:
    calls: list[list[str]] = []

    @reward_function(mode="batch")
    def longest(rollouts_messages: list[list[Message]], ground_truths: list[Any]) -> list[EvaluateResult]:
        calls.append([messages[-1].text for messages in rollouts_messages])
        return [EvaluateResult(score=float(len(text))) for text in calls[-1]]

    def of_verl(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
        calls.append(list(solution_strs))
        assert ground_truths == ["one", "one"] and (data_sources, extra_infos) == ([None, None], [{}, {}])
        return np.array([3.0, 3.0])

    for reward in (longest, of_verl):
        assert BatchRewardManager(WordTokenizer(), 0, reward)(sums("one", "one")).tolist() == [[0.0, 3.0], [0.0, 3.0]]
    assert calls == [["one", "two"]] * 2


@pytest.mark.parametrize(
    ("returned", "told"),
    [([1.0], "1 scores for 2 solutions"), (1.0, "must return a list for multiple solutions, got a float")],
)
def test_batch_result_of_wrong_length_leaves_all_rows_unscored(returned: Any, told: str) -> None:
    found = BatchRewardManager(WordTokenizer(), 0, lambda solution_strs: returned)(sums("one", "one"), return_dict=True)
    info = found["reward_extra_info"]
    assert found["reward_tensor"].abs().sum() == 0 and not info["is_scored"].any()
    assert all(told in failure for failure in info["failure"])


def test_invalid_batch_item_leaves_only_its_row_unscored() -> None:
    info = BatchRewardManager(WordTokenizer(), 0, lambda solution_strs: [1.0, None])(
        sums("one", "one"), return_dict=True
    )["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, False]


def test_reward_of_the_other_mode_error_names_the_right_manager() -> None:
    with pytest.raises(ConfigError, match="'exact' is a pointwise reward; use NaiveRewardManager"):
        BatchRewardManager(WordTokenizer(), 0, exact)
    with pytest.raises(ConfigError, match="is a batch reward; use BatchRewardManager"):
        naive(lambda solution_strs: [])


def test_verl_style_class_is_scored_per_row_and_not_as_a_group() -> None:
    class Judge:
        def compute_score(self, solution_str: str, ground_truth: str) -> float:
            return float(solution_str == ground_truth)

    class Relative(Judge):
        def post_process_scores(self, scores: list[float]) -> list[float]:
            return scores

    assert naive(Judge)(sums("one", "one")).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    for manager in (NaiveRewardManager, BatchRewardManager):
        with pytest.raises(ConfigError, match="'Relative' has post_process_scores, which requires groups"):
            manager(WordTokenizer(), 0, Relative)


def test_partially_applied_function_is_accepted() -> None:
    def near(solution_str: str, ground_truth: str, worth: float) -> float:
        return worth * (solution_str == ground_truth)

    assert naive(functools.partial(near, worth=0.5))(sums("one", "one")).tolist() == [[0.0, 0.5], [0.0, 0.0]]
    info = naive(near)(sums("one", "one"), return_dict=True)["reward_extra_info"]
    assert all("worth" in told for told in info["failure"])


# DAPO


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 10), st.floats(0, 3))
@settings(max_examples=examples(40))
def test_the_overlong_penalty_is_linear_in_the_buffer(lengths: list[int], buffer: int, factor: float) -> None:
    dapo = DAPORewardManager(
        WordTokenizer(),
        0,
        lambda solution_str: 1.0,
        max_response_length=10,
        overlong_buffer_len=buffer,
        overlong_penalty_factor=factor,
    )
    found = dapo(answers([[4] * length for length in lengths]), return_dict=True)
    for row, length in enumerate(lengths):
        exceeded = min(max(length - (10 - buffer), 0), buffer)
        penalty = -exceeded / buffer * factor
        assert found["reward_extra_info"]["overlong_penalty"][row] == pytest.approx(penalty)
        assert found["reward_tensor"][row].sum().item() == pytest.approx((1.0 + penalty) if length else 0.0, abs=1e-6)


def test_an_unscored_answer_that_is_too_long_stays_unscored() -> None:
    dapo = DAPORewardManager(
        WordTokenizer(), 0, lambda solution_str: None, max_response_length=2, overlong_buffer_len=2
    )
    found = dapo(answers([[4, 5]]), return_dict=True)
    assert found["reward_tensor"].tolist() == [[0.0, 0.0]] and math.isnan(found["reward_extra_info"]["score"][0])


# Prime


def test_rows_are_scored_concurrently() -> None:
    together = threading.Barrier(8, timeout=10)

    def reward(solution_str: str) -> int:
        return together.wait() >= 0

    prime = PrimeRewardManager(WordTokenizer(), 0, reward, max_concurrency=8, deadline_s=20)
    assert prime(answers([[4]] * 8)).sum() == 8.0


def test_timed_out_call_is_unscored_and_does_not_delay_others() -> None:
    over = threading.Event()

    def reward(solution_str: str) -> float:
        return 1.0 if solution_str == "one" else float(over.wait(30))

    found = PrimeRewardManager(WordTokenizer(), 0, reward, deadline_s=0.2)(sums("a", "b"), return_dict=True)
    over.set()
    assert found["reward_tensor"].tolist() == [[0.0, 1.0], [0.0, 0.0]]
    info = found["reward_extra_info"]
    assert info["is_scored"].tolist() == [True, False] and math.isnan(info["score"][1])
    assert info["failure_class"].tolist() == ["", "timeout"] and "timed out" in info["failure"][1]


def test_completion_order_does_not_change_positions() -> None:
    def reward(extra_info: dict[str, Any], solution_str: str) -> float:
        time.sleep(0.002 * (5 - extra_info["index"]))
        return float(extra_info["index"])

    data = answers([[4]] * 5, extra_info=[{"index": index} for index in range(5)])
    prime = PrimeRewardManager(WordTokenizer(), 0, reward, deadline_s=20)
    assert prime(data).flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# By name


def test_every_manager_has_a_name() -> None:
    numbers = {"max_response_length": 8, "overlong_buffer_len": 2}
    options = {"batch": {"compute_score": lambda solution_strs: []}, "episode": {"normalize_by_length": True}}
    for name, kind in REWARD_MANAGERS.items():
        given_options = options.get(name, {"compute_score": exact, **(numbers if name == "dapo" else {})})
        assert type(load_reward_manager(name, WordTokenizer(), 1, **given_options)) is kind


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("epsiode", {}, "unknown reward manager 'epsiode'; known: batch, dapo, episode, naive, prime; did you mean"),
        ("x", {}, "known: batch, dapo, episode, naive, prime$"),
        ("episode", {"normalise": True}, "'episode' has no option 'normalise'; known: echo, norm"),
        ("naive", {}, "'naive' requires the option 'compute_score'"),
        ("prime", {"compute_score": exact, "deadline_s": 0}, "deadline_s must be above 0, got 0"),
        ("naive", {"compute_score": 3}, "a reward must be a function or a class, got an int"),
        (
            "dapo",
            {"compute_score": exact, "max_response_length": 2, "overlong_buffer_len": 3},
            "overlong_buffer_len must be in",
        ),
    ],
)
def test_invalid_name_or_option_error_lists_valid_ones(name: str, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward_manager(name, WordTokenizer(), 0, **options)


def test_every_manager_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "reward_managers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page and kind.__name__ in page for name, kind in REWARD_MANAGERS.items())
