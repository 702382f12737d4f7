"""Test rewards of whole trajectories on recorded steps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_kit import EvaluateResult, Message, StepData, with_options
from reward_kit.errors import ConfigError, RewardError
from reward_kit.rewards.trajectory import environment_score, few_steps, milestones, no_tool_errors

START = [Message(role="system", content="find the mug"), Message(role="user", content="you see a mug in your dreams")]


def step(index, *calls, text="", answer=None):
    """Return one step; calls are (name, arguments, answer[, facts of the record])."""
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments, *_) in enumerate(calls)
    ]
    history = [*START, Message(role="assistant", content=text, tool_calls=made or None)]
    history += [Message(role="tool", tool_call_id=f"c{n}", content=call[2]) for n, call in enumerate(calls)]
    history += [Message(role="user", content=answer)] if answer is not None else []
    facts = [{"name": call[0], **(call[3] if len(call) > 3 else {})} for call in calls]
    return StepData(
        system_step_index=index,
        observation_data=None,
        action_taken={"type": "tool_calls", "calls": []},
        resulting_messages_history=history,
        step_info={"tools": facts} if facts else {},
    )


FAILED = {"error": "no such thing", "is_valid": False}
SKIPPED = {"skipped": True}


@pytest.mark.parametrize(
    ("gave", "options", "score"),
    [
        (1.0, {}, 1.0),
        (0.0, {}, 0.0),
        (0.25, {}, 0.25),
        (7, {}, 1.0),
        (-7, {}, 0.0),
        (-1.0, {"low": -1.0}, 0.0),
        (0.0, {"low": -1.0}, 0.5),
        (50.0, {"high": 100.0}, 0.5),
        (float("inf"), {}, 1.0),
        (5, {"low": 4, "high": 6}, 0.5),
        (0.5, {}, 0.5),
        (0.999, {}, 0.999),
        (1.001, {}, 1.0),
        (-0.0, {}, 0.0),
        (True, {}, 1.0),
        (float("-inf"), {}, 0.0),
        (4, {"low": 4, "high": 6}, 0.0),
        (6, {"low": 4, "high": 6}, 1.0),
        (3.9, {"low": 4, "high": 6}, 0.0),
        (6.1, {"low": 4, "high": 6}, 1.0),
        (-5, {"low": -10, "high": 0}, 0.5),
        (-10, {"low": -10, "high": 0}, 0.0),
        (0, {"low": -10, "high": 0}, 1.0),
        (-11, {"low": -10, "high": 0}, 0.0),
        (200, {"low": 0, "high": 500}, 0.4),  # CartPole: one for each step
        (-200, {"low": -500, "high": -100}, 0.75),  # Acrobot, MountainCar: minus one for each step
        (-21, {"low": -21, "high": 21}, 0.0),  # Pong: points won less points lost
        (21, {"low": -21, "high": 21}, 1.0),
        (8, {"low": 0, "high": 10}, 0.8),  # Taxi: about 8 of 20 for a right ride
        (1e-9, {}, 1e-9),
        (1e300, {"high": 1e301}, 0.1),
    ],
)
def test_environment_return_is_scaled_to_its_bounds(gave, options, score):
    assert with_options(environment_score, **options)(messages=[], environment_return=gave).score == score


def test_missing_environment_reward_leaves_the_episode_unscored():
    with pytest.raises(RewardError, match="returned no reward"):
        environment_score(messages=[], environment_return=None)
    with pytest.raises(ConfigError, match="must be less than"):
        environment_score(messages=[], environment_return=1, low=1.0, high=1.0)


@pytest.mark.parametrize(
    ("count", "options", "score"),
    [
        (0, {}, 0.0),
        (1, {}, 1.0),
        (2, {}, 48 / 49),
        (50, {}, 0.0),
        (51, {}, 0.0),
        (1000, {}, 0.0),
        (5, {"best": 5, "worst": 10}, 1.0),
        (3, {"best": 5, "worst": 10}, 1.0),
        (6, {"best": 5, "worst": 10}, 0.8),
        (9, {"best": 5, "worst": 10}, 0.2),
        (2, {"best": 1, "worst": 2}, 0.0),
        (1, {"best": 1, "worst": 2}, 1.0),
        (3, {"best": 1, "worst": 2}, 0.0),
        (0, {"best": 5, "worst": 10}, 0.0),
        (1, {"best": 5, "worst": 10}, 1.0),
        (4, {"best": 5, "worst": 10}, 1.0),
        (7, {"best": 5, "worst": 10}, 0.6),
        (8, {"best": 5, "worst": 10}, 0.4),
        (10, {"best": 5, "worst": 10}, 0.0),
        (11, {"best": 5, "worst": 10}, 0.0),
        (3, {}, 47 / 49),
        (25, {}, 25 / 49),
        (26, {}, 24 / 49),
        (49, {}, 1 / 49),
        (30, {"worst": 31}, 1 / 30),
        (16, {"worst": 31}, 0.5),
        (1, {"worst": 31}, 1.0),
        (31, {"worst": 31}, 0.0),
        (20, {"best": 20}, 1.0),
        (35, {"best": 20}, 0.5),
        (100, {"best": 99, "worst": 101}, 0.5),
    ],
)
def test_fewer_steps_are_better(count, options, score):
    turns = list(range(count))
    assert few_steps(messages=[], assistant_turns=turns, **options).score == pytest.approx(score)


@pytest.mark.parametrize("options", [{"best": 0}, {"best": 5, "worst": 5}, {"best": 9, "worst": 5}])
def test_invalid_step_bounds_are_rejected(options):
    with pytest.raises(ConfigError, match="best"):
        few_steps(messages=[], assistant_turns=[1], **options)


OK = ("look", {}, "a table")
BAD = ("take", {"thing": "mug"}, "Error: no such thing", FAILED)
NEVER = ("take", {"thing": "mug"}, "Not carried out", SKIPPED)


@pytest.mark.parametrize(
    ("steps", "score", "by_step"),
    [
        ([], 1.0, {}),
        ([step(0)], 1.0, {}),
        ([step(0, OK)], 1.0, {0: 1.0}),
        ([step(0, BAD)], 0.0, {0: 0.0}),
        ([step(0, OK, BAD)], 0.5, {0: 0.5}),
        ([step(0, OK), step(1, BAD)], 0.5, {0: 1.0, 1: 0.0}),
        ([step(0, OK), step(1), step(2, BAD)], 0.5, {0: 1.0, 2: 0.0}),
        ([step(0, OK, OK, OK, BAD)], 0.75, {0: 0.75}),
        ([step(0, NEVER)], 1.0, {}),
        ([step(0, OK, NEVER)], 1.0, {0: 1.0}),
        ([step(0, BAD, NEVER)], 0.0, {0: 0.0}),
        ([step(0, ("look", {}, "Error: this is what the sign says"))], 1.0, {0: 1.0}),
        ([step(0, OK, OK)], 1.0, {0: 1.0}),
        ([step(0, BAD, BAD)], 0.0, {0: 0.0}),
        ([step(0, BAD, OK)], 0.5, {0: 0.5}),
        ([step(0, OK), step(1, OK)], 1.0, {0: 1.0, 1: 1.0}),
        ([step(0, BAD), step(1, OK)], 0.5, {0: 0.0, 1: 1.0}),
        ([step(0, BAD), step(1, BAD)], 0.0, {0: 0.0, 1: 0.0}),
        ([step(0, OK, OK), step(1, BAD)], 2 / 3, {0: 1.0, 1: 0.0}),
        ([step(0, OK, BAD), step(1, OK, BAD)], 0.5, {0: 0.5, 1: 0.5}),
        ([step(0, NEVER, NEVER)], 1.0, {}),
        ([step(0, OK), step(1, NEVER)], 1.0, {0: 1.0}),
        ([step(0, BAD), step(1, NEVER)], 0.0, {0: 0.0}),
        ([step(0, NEVER), step(1, BAD)], 0.0, {1: 0.0}),
        ([step(0), step(1), step(2)], 1.0, {}),
        ([step(7, BAD)], 0.0, {7: 0.0}),
        ([step(0, text="Error: I cannot")], 1.0, {}),
        ([step(0, answer="Error: said the user")], 1.0, {}),
        ([step(0, ("f", {}, "", {"error": "", "is_valid": False}))], 0.0, {0: 0.0}),
        ([step(0, ("f", {}, "", {"error": None}))], 0.0, {0: 0.0}),
        ([step(0, ("f", {}, "null", {"is_valid": True}))], 1.0, {0: 1.0}),
        ([step(0, ("f", {}, "cut", {"cut": True}))], 1.0, {0: 1.0}),
    ],
)
def test_failed_calls_are_those_with_tool_errors(steps, score, by_step):
    result = no_tool_errors(messages=[], step_data=steps)
    assert result.score == pytest.approx(score)
    assert {output.step_index: output.base_reward for output in result.step_outputs or []} == by_step
    strict = no_tool_errors(messages=[], step_data=steps, each=False)
    assert strict.score == float(score == 1.0)


MUG = {"name": "saw it", "observed": "you see a mug"}
TOOK = {"name": "took it", "tool": "take", "arguments": {"thing": "mug"}, "weight": 3}
SEES = ("look", {}, "on the table you see a mug")
TAKES = ("take", {"thing": "mug", "hand": "left"}, "taken")


@pytest.mark.parametrize(
    ("steps", "reach", "ordered", "score", "by_step"),
    [
        ([], [MUG], False, 0.0, {}),
        ([step(0)], [MUG], False, 0.0, {}),
        ([step(0, SEES)], [MUG], False, 1.0, {0: 1.0}),
        ([step(0, OK), step(1, SEES)], [MUG], False, 1.0, {1: 1.0}),
        ([step(0, SEES), step(1, SEES)], [MUG], False, 1.0, {0: 1.0}),
        ([step(0, SEES), step(1, TAKES)], [MUG, TOOK], False, 1.0, {0: 0.25, 1: 0.75}),
        ([step(0, SEES, TAKES)], [MUG, TOOK], True, 1.0, {0: 1.0}),
        ([step(0, TAKES), step(1, SEES)], [MUG, TOOK], False, 1.0, {0: 0.75, 1: 0.25}),
        ([step(0, TAKES), step(1, SEES)], [MUG, TOOK], True, 0.25, {1: 0.25}),
        ([step(0, TAKES), step(1, SEES), step(2, TAKES)], [MUG, TOOK], True, 1.0, {1: 0.25, 2: 0.75}),
        ([step(0, BAD)], [TOOK], False, 0.0, {}),
        ([step(0, NEVER)], [TOOK], False, 0.0, {}),
        ([step(0, ("take", {"thing": "cup"}, "taken"))], [TOOK], False, 0.0, {}),
        ([step(0, ("take", {}, "taken"))], [TOOK], False, 0.0, {}),
        ([step(0, ("take", {"thing": ["mug"]}, "taken"))], [TOOK], False, 0.0, {}),
        ([step(0, text="you see a mug, says the agent")], [MUG], False, 0.0, {}),
        ([step(0, ("say", {"words": "you see a mug"}, "said"))], [MUG], False, 0.0, {}),
        ([step(0, ("look", {}, "Error: you see a mug", FAILED))], [MUG], False, 0.0, {}),
        ([step(0, text="look", answer="here you see a mug")], [MUG], False, 1.0, {0: 1.0}),
        ([step(0, text="look", answer="nothing")], [MUG], False, 0.0, {}),
        ([step(0, TAKES)], [TOOK], False, 1.0, {0: 1.0}),
        ([step(0, BAD), step(1, TAKES)], [TOOK], False, 1.0, {1: 1.0}),
        ([step(0, TAKES), step(1, BAD)], [TOOK], False, 1.0, {0: 1.0}),
        ([step(0, BAD, TAKES)], [TOOK], False, 1.0, {0: 1.0}),
        ([step(0, SEES)], [MUG, TOOK], True, 0.25, {0: 0.25}),
        ([step(0, TAKES)], [MUG, TOOK], True, 0.0, {}),
        ([step(0, TAKES, SEES)], [MUG, TOOK], True, 1.0, {0: 1.0}),
        ([step(3, SEES), step(5, TAKES)], [MUG, TOOK], True, 1.0, {3: 0.25, 5: 0.75}),
        ([step(0, ("take", {"thing": "MUG"}, "taken"))], [TOOK], False, 0.0, {}),
        ([step(0, ("Take", {"thing": "mug"}, "taken"))], [TOOK], False, 0.0, {}),
        ([step(0, ("look", {}, "You See A Mug"))], [MUG], False, 0.0, {}),
        ([step(0, ("look", {}, "x" * 10_000 + "you see a mug"))], [MUG], False, 1.0, {0: 1.0}),
        ([step(0, ("look", {}, "you see a mug", SKIPPED))], [MUG], False, 0.0, {}),
        ([step(0, OK, answer="you see a mug")], [MUG], False, 1.0, {0: 1.0}),
    ],
)
def test_milestone_is_credited_to_the_step_that_reaches_it(steps, reach, ordered, score, by_step):
    reward = with_options(milestones, reach=reach, ordered=ordered)
    result = reward(messages=[], step_data=steps)
    assert result.score == pytest.approx(score)
    assert {output.step_index: pytest.approx(output.base_reward) for output in result.step_outputs or []} == by_step
    assert {name: metric.score for name, metric in result.metrics.items()}.keys() == {one["name"] for one in reach}


@pytest.mark.parametrize(
    ("reach", "problem"),
    [
        ([], "at least one milestone"),
        ([MUG, MUG], "the same name"),
        ([{"name": "x"}], "must have either tool or"),
        ([{"name": "x", "tool": "a", "observed": "b"}], "must have either tool or"),
        ([{"name": "x", "observed": "b", "arguments": {"a": 1}}], "arguments requires tool"),
        ([{"name": "x", "observed": ""}], "at least 1 character"),
        ([{"name": "x", "observed": "b", "weight": 0}], "must be above 0"),
        ([{"name": "x", "observe": "b"}], "observe"),
    ],
)
def test_invalid_milestones_are_rejected(reach, problem):
    with pytest.raises(ConfigError, match=problem):
        with_options(milestones, reach=reach)(messages=[], step_data=[])


texts = st.text(max_size=20) | st.sampled_from(["you see a mug", "\ud800", "x" * 100_000])
calls = st.tuples(
    st.sampled_from(["look", "take"]), st.just({}), texts, st.sampled_from([{}, FAILED, SKIPPED, {"error": None}])
)


@given(st.lists(st.lists(calls, max_size=3), max_size=4))
def test_step_credit_adds_up_to_the_score(record):
    steps = [step(index, *made) for index, made in enumerate(record)]
    result = with_options(milestones, reach=[MUG, TOOK])(messages=[], step_data=steps)
    assert isinstance(result, EvaluateResult)
    assert sum(output.base_reward for output in result.step_outputs or []) == pytest.approx(result.score)
    assert 0 <= no_tool_errors(messages=[], step_data=steps).score <= 1
