"""Alignment of step outputs with steps, and assignment of credit."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest

from reward_kit.agent.models import StepData, episode_steps
from reward_kit.credit.estimators import USUAL_OPTIONS
from reward_kit.episodes import SingleAgentEpisode
from reward_kit.errors import AlignmentError, ConfigError, Failure, RewardError
from reward_kit.models import EvaluateResult, MetricResult, StepOutput
from reward_kit.reward_agent import Scored
from reward_kit.rl_helpers import ESTIMATORS
from reward_kit.rl_processing import CreditAssigner, RLDataAligner


def episode(rollout_id: str, rewards: list[float | None], group_id: str = "g") -> SingleAgentEpisode:
    """Return an episode through the states s0, s1, …; None is a step without an environment reward."""
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
def test_step_output_is_assigned_to_the_step_it_names(index: int | str) -> None:
    steps = episode_steps(episode("r1", [0.0, 0.0, 0.0]))
    metric = MetricResult(score=0.5, reason="half")
    aligned = align([StepOutput(step_index=index, base_reward=0.7, metrics={"m": metric}, reason="why")], steps)
    assert [step.base_reward for step in aligned] == [None, 0.7, None]
    assert aligned[1].step_info["metrics"] == {"m": {"is_score_valid": True, "score": 0.5, "reason": "half"}}
    assert aligned[1].step_info["reward_reason"] == "why"


def test_steps_are_matched_by_assistant_turn_and_not_by_position() -> None:
    steps = episode_steps(episode("r1", [0.0, 0.0, 0.0]))[1:]
    aligned = align([StepOutput(step_index=2, base_reward=0.2)], steps)
    assert [step.base_reward for step in aligned] == [None, 0.2]


def test_aligning_does_not_change_the_input_steps() -> None:
    steps = episode_steps(episode("r1", [0.0, 0.0]))
    before = [step.model_copy(deep=True) for step in steps]
    align([StepOutput(step_index=0, base_reward=1.0, metrics={"m": MetricResult(score=1.0, reason="")})], steps)
    assert [step.model_dump() for step in steps] == [step.model_dump() for step in before]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([2], "rollout r1: unknown step_index '2'; known: 0, 1"),
        ([-1], "unknown step_index '-1'"),
        (["last"], "unknown step_index 'last'"),
        (["01"], "unknown step_index '01'"),
        ([0, 1, "0"], "rollout r1: step_index '0' occurs twice"),
    ],
)
def test_step_output_without_a_matching_step_is_an_error(indices: list[int | str], message: str) -> None:
    outputs = [StepOutput(step_index=index, base_reward=1.0) for index in indices]
    with pytest.raises(AlignmentError, match=message):
        align(outputs, episode_steps(episode("r1", [0.0, 0.0])))


def test_steps_with_duplicate_or_missing_turn_index_are_an_error() -> None:
    first, second = episode_steps(episode("r1", [0.0, 0.0]))
    second.step_info["assistant_turn_index"] = 0
    with pytest.raises(AlignmentError, match="two steps have the same assistant_turn_index, 0"):
        align([], [first, second])
    del second.step_info["assistant_turn_index"]
    with pytest.raises(AlignmentError, match="the step at 1 has no assistant_turn_index"):
        align([], [first, second])


# A batch


def align_batch(*results: EvaluateResult | None, ids: tuple[str, ...] = ("a", "b")) -> list[list[StepData]]:
    steps = [episode_steps(episode(name, [0.0, 0.0])) for name in "ab"]
    return RLDataAligner().align_batch_for_rl_processing(results, steps, ids)


def test_batch_is_aligned_per_rollout_and_unscored_rollouts_keep_their_steps() -> None:
    aligned = align_batch(result(1.0, i1=0.25), None)
    assert [[step.base_reward for step in steps] for steps in aligned] == [[None, 0.25], [None, None]]


def test_steps_of_an_unscored_rollout_are_copied() -> None:
    steps = episode_steps(episode("a", [0.0]))
    ((copy,),) = RLDataAligner().align_batch_for_rl_processing([None], [steps], ["a"])
    copy.step_info["group_id"] = copy.base_reward = 7.0
    assert (steps[0].step_info["group_id"], steps[0].base_reward) == ("g", None)


def test_alignment_errors_of_a_batch_are_reported_together() -> None:
    with pytest.raises(AlignmentError) as error:
        align_batch(result(1.0, i5=0.0), result(1.0, i6=0.0))
    lines = str(error.value).splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "rollout a: unknown step_index '5'",
        "rollout b: unknown step_index '6'",
    ]


def test_first_ten_alignment_errors_are_listed_and_the_rest_counted() -> None:
    ids = [f"r{n}" for n in range(12)]
    steps = [episode_steps(episode(name, [0.0])) for name in ids]
    with pytest.raises(AlignmentError) as error:
        RLDataAligner().align_batch_for_rl_processing([result(1.0, i5=0.0)] * 12, steps, ids)
    lines = str(error.value).splitlines()
    assert len(lines) == 11 and lines[9].startswith("rollout r9:") and lines[10] == "… and 2 more"


def test_invalid_batch_is_rejected() -> None:
    with pytest.raises(AlignmentError, match="1 results, 2 lists of steps and 2 rollout ids"):
        align_batch(result())
    with pytest.raises(AlignmentError, match="rollout a is in the batch more than once"):
        align_batch(result(), result(), ids=("a", "a"))


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
    with pytest.raises(ConfigError, match="1 of the episodes have no score, for example b"):
        assigner.assign(episodes, [scored("a", result())])


def test_episode_that_cannot_be_aligned_is_unscored_without_affecting_others() -> None:
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


def test_fully_unscored_group_has_no_credit_and_does_not_affect_other_groups() -> None:
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


def test_environment_rewards_are_used_on_request_without_step_outputs() -> None:
    episodes = [episode("a", [0.25, 0.5]), episode("b", [0.25, None]), episode("c", [0.25, 0.5])]
    results = [scored("a", result()), scored("b", result()), scored("c", result(1.0, i0=0.0, i1=0.125))]
    asked = CreditAssigner(step_rewards="environment", omega=0.5, gamma=0.5).align(episodes, results)
    assert [[step.base_reward for step in steps] for steps in asked.steps] == [[0.25, 0.5], [0.25, 0.0], [0.0, 0.125]]
    not_asked = CreditAssigner(omega=0.5, gamma=0.5).align(episodes, results)
    assert [[step.base_reward for step in steps] for steps in not_asked.steps] == [[None] * 2, [None] * 2, [0.0, 0.125]]


def test_non_finite_environment_reward_leaves_only_its_episode_unscored() -> None:
    episodes = [episode("a", [0.25, math.nan]), episode("b", [0.25, 0.5]), episode("c", [0.0, 0.5])]
    results = [scored("a", result()), scored("b", result()), scored("c", result(0.0))]
    batch = CreditAssigner(step_rewards="environment").assign(episodes, results)
    assert batch.scores == [None, 1.0, 0.0]
    assert batch.failures["a"].failure_class == "invalid_result"
    assert batch.failures["a"].message == "rollout a: the environment's reward at step 1 is nan"
    assert [steps[0].advantage is None for steps in batch.steps] == [True, False, False]
    # Where its rewards do not count, they cost nothing.
    assert CreditAssigner().assign(episodes, results).scores == [1.0, 1.0, 0.0]


def test_rows_contain_the_credit_of_each_step() -> None:
    episodes = [episode("a", [1.0], "g1"), episode("b", [0.0], "g1"), episode("c", [0.0], "g1")]
    results = [scored("a", result(1.0)), scored("b", result(0.0)), scored("c", None)]
    options = {"omega": 0.25, "gamma": 0.9, "epsilon": 0.0}
    rows = list(CreditAssigner(step_rewards="environment", **options).assign(episodes, results).rows())
    half = pytest.approx(0.5**0.5)
    first = {"rollout_id": "a", "group_id": "g1", "step": 0, "state_key": "s0", "anchor": 0, "peers": 1}
    assert rows[0] == {**first, "base_reward": 1.0, "return_to_go": 1.0, "A_E": half, "A_S": half, "A": half}
    last = {"rollout_id": "c", "group_id": "g1", "step": 0, "state_key": "s0", "anchor": 0, "peers": None}
    assert rows[2] == {**last, "base_reward": 0.0, "return_to_go": None, "A_E": None, "A_S": None, "A": None}
    with pytest.raises(ConfigError, match="the batch has no credit yet"):
        next(CreditAssigner(**options).align(episodes, results).rows())


def test_anchors_are_numbered_in_order_and_unscored_steps_have_no_peers() -> None:
    episodes = [episode("a", [0.0, 0.0], "g"), episode("b", [0.0], "g"), episode("c", [0.0], "h")]
    results = [scored("a", result()), scored("b", None), scored("c", result())]
    rows = list(CreditAssigner().assign(episodes, results).rows())
    # c is in the state of a and b, and in another group.
    assert [(row["anchor"], row["peers"]) for row in rows] == [(0, 0), (1, 0), (0, None), (2, 0)]


def test_estimator_without_states_has_no_anchors() -> None:
    episodes = [episode("a", [0.0]), episode("b", [0.0])]
    rows = list(CreditAssigner("rloo").assign(episodes, [scored("a", result(1.0)), scored("b", result(0.0))]).rows())
    assert [(row["state_key"], row["anchor"], row["peers"]) for row in rows] == [("s0", None, None)] * 2
    assert [row["A"] for row in rows] == [1.0, -1.0]


def test_row_includes_the_critic_value_and_an_unchanged_return() -> None:
    batch = CreditAssigner("gae", gamma=0.5, lam=1.0).align([episode("a", [0.0, 0.0])], [scored("a", result(1.0))])
    batch.steps[0][0].policy_value_estimate, batch.steps[0][1].policy_value_estimate = 0.25, 0.75
    rows = list(CreditAssigner("gae", gamma=0.5, lam=1.0).advantages(batch).rows())
    assert [(row["return_to_go"], row["value"], row["A"]) for row in rows] == [(0.5, 0.25, 0.25), (1.0, 0.75, 0.25)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_estimate_is_ignored(value: float) -> None:
    batch = CreditAssigner(gamma=0.5).align([episode("a", [0.0])], [scored("a", result(1.0, i0=0.5))])
    batch.steps[0][0].policy_value_estimate = value
    credited = CreditAssigner(gamma=0.5).advantages(batch)
    assert credited.steps[0][0].return_to_go == 0.5
    (row,) = credited.rows()
    assert "value" not in row
    json.dumps(row, allow_nan=False)


def test_missing_estimator_input_error_names_the_rollout_id() -> None:
    episodes = [episode("the-first", [0.0]), episode("the-second", [0.0])]
    with pytest.raises(ConfigError, match="rollout the-second") as error:
        CreditAssigner("gae").assign(episodes, [scored("the-first", None), scored("the-second", result())])
    assert "policy_value_estimate" in str(error.value) and "trajectory" not in str(error.value)


def test_duplicate_episode_in_a_batch_is_rejected() -> None:
    with pytest.raises(ConfigError, match="rollout a is in the batch more than once"):
        CreditAssigner().align([episode("a", [0.0]), episode("a", [0.0])], [scored("a", result())])


# Its options


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_works_without_any_option(estimator: str) -> None:
    options = CreditAssigner(estimator).options
    assert all(options[name] == usual for name, usual in USUAL_OPTIONS.items() if name in REQUIRED[estimator])
    keywords = inspect.signature(ESTIMATORS[estimator]).parameters.values()
    assert [p.name for p in keywords if p.kind is p.KEYWORD_ONLY and p.name != "group_ids"] == list(options)


REQUIRED = {
    estimator: {p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty}
    for estimator, function in ESTIMATORS.items()
}


def test_omega_defaults_to_one_half_only_for_the_convex_combination() -> None:
    assert CreditAssigner().options["omega"] == 0.5
    assert CreditAssigner(combination="additive", step_weight=1.0).options["omega"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gigpoo", "omega": 0.5, "gamma": 0.9}, "unknown estimator 'gigpoo'; did you mean 'gigpo'"),
        ({"omega": 0.5, "gama": 0.9}, "no option 'gama'; did you mean 'gamma'"),
        ({"estimator": "rloo", "omega": 0.5}, "rloo has no option 'omega'"),
        ({"gamma": "0.9"}, r"gigpo, option 'gamma': expected a number \(got '0.9'\)"),
        ({"gamma": True}, "option 'gamma': expected a number"),
        ({"normalization": "stdd"}, "option 'normalization': expected 'std', 'mean'"),
        ({"omega": 2.0, "gamma": 0.9}, "omega in"),
        ({"state_hash": "state-key"}, "unknown state hash 'state-key'; did you mean 'state_key'"),
        ({"omega": 0.5, "gamma": 0.9, "step_rewards": "env"}, "unknown step_rewards 'env'"),
        ({"omega": 0.5, "gamma": 0.9, "group_ids": []}, "no option 'group_ids'"),
    ],
)
def test_invalid_assigner_options_are_rejected_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CreditAssigner(**options)
