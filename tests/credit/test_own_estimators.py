"""Test advantage estimators written by users: their options, their results and the messages about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_kit import StepData
from reward_kit.credit import StepArrays, anchor_numbers, relative, rloo_credit
from reward_kit.credit.step_credit import with_credit
from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.rl_processing import CreditAssigner, CreditBatch


def batch_of(
    scores: Sequence[float | None], lengths: Sequence[int], groups: Sequence[str] | None = None
) -> CreditBatch:
    """Return a batch of episodes whose steps visit the states "0", "1", …"""
    steps = [
        [
            StepData(
                system_step_index=t,
                observation_data=str(t),
                action_taken={},
                step_info={"progress": t / 10, "annotations": {"weight": 2.0}},
            )
            for t in range(length)
        ]
        for length in lengths
    ]
    ids = [f"r{index}" for index in range(len(scores))]
    return CreditBatch(ids, list(groups or ["g"] * len(scores)), steps, list(scores), {})


def advantages(batch: CreditBatch, estimator: Any, **options: Any) -> list[list[float | None]]:
    credited = CreditAssigner(estimator, **options).advantages(batch)
    return [[step.advantage for step in steps] for steps in credited.steps]


def leave_one_out(batch: StepArrays, *, scale: float = 1.0) -> Any:
    return scale * batch.to_steps(relative(batch.scores_B, batch.groups_B, "leave_one_out"))


def progress(batch: StepArrays, *, key: str) -> list[float]:
    return [step.step_info[key] * step.step_info["annotations"]["weight"] for step in batch.steps]


def test_function_equals_the_built_in_estimator_with_the_same_formula() -> None:
    batch = batch_of([1.0, 0.0, None, 0.5, 0.25], [2, 3, 1, 1, 4], ["a", "a", "a", "b", "b"])
    credit = rloo_credit(batch.steps, batch.scores, group_ids=batch.group_ids)
    expected = [[step.advantage for step in steps] for steps in with_credit(batch.steps, credit)]
    own = advantages(batch, leave_one_out)
    assert own[2] == [None]
    for ours, theirs in zip(own, expected, strict=True):
        assert ours == (theirs if None in theirs else pytest.approx(theirs))
    assert advantages(batch, leave_one_out, scale=2)[0] == pytest.approx([2 * float(a or 0) for a in expected[0]])


def test_function_reads_facts_and_annotations_of_each_step() -> None:
    batch = batch_of([1.0, None], [3, 1])
    assert advantages(batch, progress, key="progress") == [pytest.approx([0.0, 0.2, 0.4]), [None]]


def test_options_include_defaults_and_gamma_discounts_the_returns() -> None:
    def plain(batch: StepArrays, *, gamma: float, weights: tuple[int, ...] = (1, 2)) -> list[float]:
        return [gamma] * len(batch.steps)

    assigner = CreditAssigner(plain, gamma=0.5)
    assert (assigner.estimator, assigner.options) == ("plain", {"gamma": 0.5, "weights": (1, 2)})
    (steps,) = assigner.advantages(batch_of([1.0], [3])).steps
    assert [step.return_to_go for step in steps] == pytest.approx([0.25, 0.5, 1.0])


def test_estimator_with_a_state_hash_reports_peers() -> None:
    def sizes(batch: StepArrays, *, state_hash: Any = "observation_text") -> Any:
        anchors_S = anchor_numbers(batch, state_hash)
        return [int(np.sum(anchors_S == anchor)) for anchor in anchors_S]

    batch = batch_of([1.0, 0.0, 1.0], [2, 3, 1], ["a", "a", "b"])
    assert advantages(batch, sizes) == [[2.0, 2.0], [2.0, 2.0, 1.0], [1.0]]
    rows = list(CreditAssigner(sizes).advantages(batch).rows())
    assert [row["peers"] for row in rows] == [1, 1, 1, 1, 0, 0]
    with pytest.raises(ConfigError, match="unknown state hash 'observations'"):
        CreditAssigner(sizes, state_hash="observations")


def test_function_is_not_called_without_scored_steps() -> None:
    def never(batch: StepArrays) -> Any:
        raise AssertionError

    assert advantages(batch_of([None, 1.0], [2, 0]), never) == [[None, None], []]


def test_values_of_unscored_episodes_are_ignored() -> None:
    def ones(batch: StepArrays) -> Any:
        return [1 if is_scored else None for is_scored in batch.is_scored_S[:-1]] + [math.inf]

    assert advantages(batch_of([1.0, None], [1, 2]), ones) == [[1.0], [None, None]]


def test_reference_is_loaded_once_and_kept_as_the_name(tmp_path: Path) -> None:
    file = tmp_path / "advantage.py"
    file.write_text("def half(batch, *, value: float = 0.5):\n    return [value] * len(batch.steps)\n")
    assert CreditAssigner(f"{file}:half").estimator == f"{file}:half"
    assert advantages(batch_of([1.0], [2]), f"{file}:half", value=0.25) == [[0.25, 0.25]]


# Errors


def typed(batch: StepArrays, *, count: int, rate: float = 0.5) -> Any:
    return np.zeros(len(batch.steps))


async def delayed(batch: StepArrays) -> Any:
    return np.zeros(len(batch.steps))


def missing_key(batch: StepArrays) -> Any:
    return [step.step_info["nothing"] for step in batch.steps]


def forward(batch: Batch) -> Any:  # type: ignore[name-defined]  # noqa: F821
    return []


@pytest.mark.parametrize(
    ("estimator", "options", "message"),
    [
        (typed, {"count": 1, "rat": 1.0}, "typed has no option 'rat'; did you mean 'rate'"),
        (typed, {}, "typed needs the option 'count'"),
        (typed, {"count": "1"}, "typed, option 'count': expected a whole number"),
        (typed, {"count": 1, "batch": None}, "typed has no option 'batch'"),
        (lambda batch, rate=1.0: [], {}, r"must have one positional parameter.*make its options keyword-only"),
        (lambda: [], {}, "must have one positional parameter"),
        (rloo_credit, {}, "estimator 'rloo_credit' must have one positional parameter"),
        (forward, {}, "estimator 'forward': its signature cannot be read: NameError: name 'Batch'"),
        ("no.py:function", {}, "estimator 'no.py:function': no such file"),
        ("math:pi", {}, "estimator 'math:pi' is a float, not a function"),
        ("advantage.py", {}, "unknown estimator 'advantage.py'.*to use your own function, write file.py:function"),
    ],
)
def test_unusable_function_is_rejected_at_construction(estimator: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CreditAssigner(estimator, **options)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda batch: batch.scores_B, r"shape \(2,\).*for each of the 5 steps; batch.to_steps repeats one number"),
        (lambda batch: [1.0], r"estimator '<lambda>' returned an array of shape \(1,\); expected one advantage"),
        (lambda batch: None, "returned a NoneType; expected one advantage for each of the 5 steps"),
        (lambda batch: ["much"] * 5, "returned a list; expected one advantage for each of the 5 steps"),
        (delayed, "estimator 'delayed' returned a coroutine; define it with `def`"),
        (missing_key, r"estimator 'missing_key': KeyError: 'nothing' \(.*test_own_estimators.py:\d+ in "),
    ],
)
def test_wrong_result_names_the_function(estimator: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        advantages(batch_of([1.0, 0.0], [2, 3]), estimator)


def test_advantage_that_is_not_finite_names_function_rollout_and_step() -> None:
    def wrong(batch: StepArrays) -> Any:
        return [0.0, 0.0, 0.0, None, 0.0]

    with pytest.raises(InvalidResultError, match="rollout r1, step 1: the advantage from estimator 'wrong' is not fin"):
        advantages(batch_of([1.0, 0.0], [2, 3]), wrong)
