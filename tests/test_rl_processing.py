"""The aligner is strict, changes nothing it is given, and one bad result costs one episode."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reward_kit.agent.models import StepData, steps_of
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import AlignmentError, ConfigError, Failure, RewardError
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.reward_agent import Scored
from reward_kit.rl_processing import CreditAssigner, RLDataAligner


def episode(rollout_id: str, rewards: list[float | None], group_id: str = "g") -> SingleAgentEpisode:
    """An episode through the states s0, s1, …; None is a step in which the environment gave no reward."""
    made = SingleAgentEpisode(rollout_id)
    made.add_env_reset("o0", {"state_key": "s0"})
    for t, reward in enumerate(rewards):
        info: dict[str, Any] = {"state_key": f"s{t + 1}"}
        if reward is None:
            info["environment_reward"] = None
        is_last = t == len(rewards) - 1
        made.add_env_step(f"o{t + 1}", {"type": "text", "content": ""}, reward or 0.0, info, terminated=is_last)
    made.custom_data.update(group_id=group_id, failure=None)
    return made


def result(score: float = 1.0, **base_rewards: float) -> EvaluateResult:
    """`result(i0=0.5)`: a result whose step 0 has the base reward 0.5."""
    outputs = [StepOutput(step_index=name[1:], base_reward=reward) for name, reward in base_rewards.items()]
    return EvaluateResult(score=score, step_outputs=outputs or None)


def align(outputs: list[StepOutput], steps: list[StepData]) -> list[StepData]:
    return RLDataAligner().align_data_for_rl_processing(EvaluateResult(score=1.0, step_outputs=outputs), steps, "r1")


@pytest.mark.parametrize("index", [1, "1"])
def test_an_output_lands_on_the_step_it_names(index: int | str) -> None:
    steps = steps_of(episode("r1", [0.0, 0.0, 0.0]))
    metric = MetricResult(score=0.5, reason="half")
    aligned = align([StepOutput(step_index=index, base_reward=0.7, metrics={"m": metric}, reason="why")], steps)
    assert [step.base_reward for step in aligned] == [None, 0.7, None]
    assert aligned[1].step_info["metrics"] == {"m": {"is_score_valid": True, "score": 0.5, "reason": "half"}}
    assert aligned[1].step_info["reward_reason"] == "why"


def test_the_assistant_turn_decides_not_the_place_in_the_list() -> None:
    steps = steps_of(episode("r1", [0.0, 0.0, 0.0]))[1:]
    aligned = align([StepOutput(step_index=2, base_reward=0.2)], steps)
    assert [step.base_reward for step in aligned] == [None, 0.2]


def test_the_given_steps_are_not_changed() -> None:
    steps = steps_of(episode("r1", [0.0, 0.0]))
    before = [step.model_copy(deep=True) for step in steps]
    align([StepOutput(step_index=0, base_reward=1.0, metrics={"m": MetricResult(score=1.0, reason="")})], steps)
    assert [step.model_dump() for step in steps] == [step.model_dump() for step in before]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([2], "rollout r1: step_index '2' names no step; known: 0, 1"),
        ([-1], "step_index '-1' names no step"),
        (["last"], "step_index 'last' names no step"),
        (["01"], "step_index '01' names no step"),
        ([0, 1, "0"], "rollout r1: step_index '0' is given twice"),
    ],
)
def test_an_output_that_fits_no_step_is_an_error(indices: list[int | str], message: str) -> None:
    outputs = [StepOutput(step_index=index, base_reward=1.0) for index in indices]
    with pytest.raises(AlignmentError, match=message):
        align(outputs, steps_of(episode("r1", [0.0, 0.0])))


def test_steps_that_cannot_be_told_apart_are_an_error() -> None:
    first, second = steps_of(episode("r1", [0.0, 0.0]))
    second.step_info["assistant_turn_index"] = 0
    with pytest.raises(AlignmentError, match="two steps have the assistant_turn_index 0"):
        align([], [first, second])
    del second.step_info["assistant_turn_index"]
    with pytest.raises(AlignmentError, match="the step at 1 has no assistant_turn_index"):
        align([], [first, second])


# The component


def scored(rollout_id: str, given: EvaluateResult | None, failure: Failure | None = None) -> Scored:
    return Scored(rollout_id, given, failure)


def test_credit_is_joined_by_rollout_id() -> None:
    episodes = [episode("a", [0.0]), episode("b", [0.0])]
    assigner = CreditAssigner(omega=1.0, gamma=0.9)
    batch = assigner.assign(episodes, [scored("b", result(0.0)), scored("a", result(1.0))])
    assert batch.scores == [1.0, 0.0]
    assert batch.steps[0][0].advantage == pytest.approx(0.7071, abs=1e-4)
    assert batch.summary() == {"score": 0.5, "unscored": 0.0}
    with pytest.raises(ConfigError, match="no scores for 1 episodes, the first of them b"):
        assigner.assign(episodes, [scored("a", result())])


def test_one_episode_that_cannot_be_aligned_is_unscored_and_the_others_go_on() -> None:
    episodes = [episode(name, [0.0]) for name in "abc"]
    results = [scored("a", result(1.0, i0=1.0)), scored("b", result(1.0, i9=1.0)), scored("c", result(0.0, i0=0.0))]
    batch = CreditAssigner(omega=0.5, gamma=0.9).assign(episodes, results)
    failure = batch.failures["b"]
    assert (failure.failure_class, failure.where) == ("invalid_result", "AlignmentError")
    assert "step_index '9'" in failure.message
    assert batch.scores == [1.0, None, 0.0]
    assert [steps[0].advantage is None for steps in batch.steps] == [False, True, False]
    assert batch.summary()["unscored"] == 1.0


def test_failed_rewards_and_failed_episodes_are_unscored() -> None:
    failed = episode("a", [0.0])
    failed.custom_data["failure"] = Failure.from_exception(RewardError("the world broke")).to_json()
    failure = Failure.from_exception(RewardError("the reward broke"))
    results = [scored("a", result(1.0, i0=1.0)), scored("b", None, failure)]
    results += [scored("c", result(1.0)), scored("d", result(0.0))]
    batch = CreditAssigner(omega=0.5, gamma=0.9).assign(
        [failed, episode("b", [0.0]), episode("c", [0.0]), episode("d", [0.0])], results
    )
    assert batch.scores == [None, None, 1.0, 0.0]
    # Of one group and one state, c and d are each other's only peers.
    assert [steps[0].advantage for steps in batch.steps[:2]] == [None, None]
    assert [steps[0].advantage for steps in batch.steps[2:]] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert {name: failure.message for name, failure in batch.failures.items()} == {
        "a": "the world broke",
        "b": "the reward broke",
    }


def test_a_group_of_which_nothing_is_scored_has_no_credit_and_leaves_the_others_theirs() -> None:
    episodes = [episode(name, [0.0]) for name in "abcd"]
    for e, group in zip(episodes, ("g", "g", "h", "h"), strict=True):
        e.custom_data["group_id"] = group
    failure = Failure.from_exception(RewardError("the reward broke"))
    results = [scored("a", None, failure), scored("b", None, failure)]
    results += [scored("c", result(1.0)), scored("d", result(0.0))]
    batch = CreditAssigner(omega=1.0, gamma=0.9).assign(episodes, results)
    credit = [steps[0].advantage for steps in batch.steps]
    assert credit[:2] == [None, None] and credit[2] == -credit[3] != 0.0
    assert all(math.isfinite(value) for value in credit[2:])
    assert batch.summary() == {"score": 0.5, "unscored": 2.0}


def test_environment_rewards_stand_in_where_asked_and_step_outputs_are_absent() -> None:
    episodes = [episode("a", [0.25, 0.5]), episode("b", [0.25, None]), episode("c", [0.25, 0.5])]
    results = [scored("a", result()), scored("b", result()), scored("c", result(1.0, i0=0.0, i1=0.125))]
    asked = CreditAssigner(step_rewards="environment", omega=0.5, gamma=0.5).align(episodes, results)
    assert [[step.base_reward for step in steps] for steps in asked.steps] == [[0.25, 0.5], [0.25, 0.0], [0.0, 0.125]]
    not_asked = CreditAssigner(omega=0.5, gamma=0.5).align(episodes, results)
    assert [[step.base_reward for step in steps] for steps in not_asked.steps] == [[None] * 2, [None] * 2, [0.0, 0.125]]


def test_rows_say_what_each_step_was_credited_with() -> None:
    episodes = [episode("a", [1.0], "g1"), episode("b", [0.0], "g1"), episode("c", [0.0], "g1")]
    results = [scored("a", result(1.0)), scored("b", result(0.0)), scored("c", None)]
    options = {"omega": 0.25, "gamma": 0.9, "epsilon": 0.0}
    rows = list(CreditAssigner(step_rewards="environment", **options).assign(episodes, results).rows())
    half = pytest.approx(0.5**0.5)
    common = {"step": 0, "state_key": "s0", "group_id": "g1"}
    assert rows[0] == {"rollout_id": "a", "return_to_go": 1.0, "A_E": half, "A_S": half, "A": half, **common}
    assert rows[2] == {"rollout_id": "c", "return_to_go": None, "A_E": None, "A_S": None, "A": None, **common}
    with pytest.raises(ConfigError, match="there is no credit yet"):
        next(CreditAssigner(**options).align(episodes, results).rows())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gigpoo", "omega": 0.5, "gamma": 0.9}, "unknown estimator 'gigpoo'; did you mean 'gigpo'"),
        ({"omega": 0.5, "gama": 0.9}, "no option 'gama'; did you mean 'gamma'"),
        ({"omega": 0.5}, "gigpo needs the option 'gamma'"),
        ({"omega": 2.0, "gamma": 0.9}, "omega in"),
        ({"omega": 0.5, "gamma": 0.9, "step_rewards": "env"}, "unknown step_rewards 'env'"),
        ({"omega": 0.5, "gamma": 0.9, "group_ids": []}, "no option 'group_ids'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_collected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CreditAssigner(**options)
