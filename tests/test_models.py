"""Validation of messages, results and task files."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pydantic
import pytest

from reward_kit.errors import AlignmentError
from reward_kit.models import (
    EvaluateResult,
    Message,
    MetricResult,
    StepOutput,
    TaskDefinitionModel,
    match_to_steps,
)
from reward_kit.validation import describe_validation_error

CALL = {"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"to": "left"}'}}


def problems(model, data):
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate(data)
    return describe_validation_error(caught.value, model)


class TestMessage:
    def test_message_text_is_the_content_or_the_joined_text_parts(self):
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
        assert Message(role="user", content="hi").text == "hi"
        assert Message(role="user", content=parts).text == "ab"
        assert Message(role="assistant", content=None).text == ""

    def test_message_requires_a_known_role(self):
        assert problems(Message, {"content": "x"}) == ["role: missing"]
        assert "role" in problems(Message, {"role": "robot"})[0]

    def test_to_chat_contains_content_and_set_fields_only(self):
        assert Message(role="user", content="hi").to_chat() == {"role": "user", "content": "hi"}
        assert Message(role="assistant", content=None).to_chat() == {"role": "assistant", "content": None}

    def test_to_chat_round_trips_every_field(self):
        data = {
            "role": "assistant",
            "content": None,
            "name": "bob",
            "tool_calls": [CALL],
            "function_call": {"name": "f", "arguments": "{}"},
            "reasoning_content": "hm",
        }
        assert Message.model_validate(data).to_chat() == data
        tool = {"role": "tool", "content": "ok", "tool_call_id": "c1"}
        assert Message.model_validate(tool).to_chat() == tool

    def test_unknown_provider_keys_are_kept_in_messages_and_tool_calls(self):
        data = {
            "role": "assistant",
            "content": "",
            "refusal": "no",
            "tool_calls": [{**CALL, "extra_content": {"s": 1}}],
        }
        assert Message.model_validate(data).to_chat() == data

    def test_openai_objects_are_accepted_as_tool_calls(self):
        function = SimpleNamespace(name="f", arguments="{}")
        message = Message(role="assistant", tool_calls=[SimpleNamespace(id="1", type="function", function=function)])
        assert message.tool_calls[0].function.name == "f"

    def test_empty_list_of_tool_calls_becomes_none(self):
        assert Message(role="assistant", tool_calls=[]).tool_calls is None


class TestResults:
    @pytest.mark.parametrize("model", [EvaluateResult, MetricResult])
    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (-float("inf"), "-inf"),
            ("0.5", "'0.5'"),
            ("nan", "'nan'"),
            (None, "None"),
            ([0.5], "[0.5]"),
            (1j, "1j"),
            (np.float32("nan"), "nan"),
            (np.array([0.5, 1.0]), "array"),
        ],
    )
    def test_non_finite_score_is_rejected_with_field_and_value(self, model, value, shown):
        (problem,) = problems(model, {"score": value, "reason": "r"})
        assert problem.startswith("score: ")
        assert shown in problem

    def test_integer_too_large_for_a_float_is_rejected(self):
        assert "finite" in problems(EvaluateResult, {"score": 10**400})[0]

    @pytest.mark.parametrize("value", [1, 0.5, -3, True, np.float32(0.5), np.int64(2), np.bool_(True), np.array(1)])
    def test_numeric_scores_of_any_type_become_floats(self, value):
        assert type(EvaluateResult(score=value).score) is float

    def test_scores_of_results_and_metrics_may_be_outside_0_and_1(self):
        assert EvaluateResult(score=-7.5).score == -7.5
        assert MetricResult(score=1.5, reason="").score == 1.5
        assert "finite" in problems(MetricResult, {"score": float("nan"), "reason": ""})[0]

    def test_misspelled_key_suggests_the_nearest_key(self):
        assert problems(EvaluateResult, {"score": 1, "reson": "x"}) == ["reson: unknown key; did you mean 'reason'?"]
        # The earlier package ignored `success=`.
        assert problems(MetricResult, {"score": 1, "reason": "", "succes": True})[0].startswith("succes: unknown key")

    def test_misspelled_nested_key_suggests_the_nearest_key_of_its_model(self):
        data = {"score": 1, "metrics": {"accuracy": {"scor": 1, "score": 1, "reason": ""}}}
        assert problems(EvaluateResult, data) == ["metrics.accuracy.scor: unknown key; did you mean 'score'?"]
        data = {"score": 1, "step_outputs": [{"step_index": 0, "base_reward": 1, "rason": ""}]}
        assert problems(EvaluateResult, data) == ["step_outputs.0.rason: unknown key; did you mean 'reason'?"]

    def test_result_can_be_read_as_a_mapping(self):
        result = EvaluateResult(score=0.5, reason="ok")
        assert result["score"] == result.get("score") == 0.5
        assert ("score" in result, "nothing" in result) == (True, False)
        assert result.get("nothing", 7) == 7
        assert list(result) == list(result.keys()) == list(EvaluateResult.model_fields)[:6]
        assert dict(result.items())["reason"] == "ok"
        assert 0.5 in result.values()
        with pytest.raises(KeyError, match="did you mean 'score'"):
            result["scor"]

    def test_step_index_can_be_an_integer_or_a_string(self):
        assert StepOutput(step_index=3, base_reward=1).step_index == 3
        assert StepOutput(step_index="3", base_reward=1).step_index == "3"
        assert problems(StepOutput, {"step_index": 0, "base_reward": math.nan})[0].startswith("base_reward: ")


class TestTask:
    def test_unknown_task_key_is_an_error(self):
        assert problems(TaskDefinitionModel, {"name": "t", "poc_max_turn": 9}) == [
            "poc_max_turn: unknown key; did you mean 'poc_max_turns'?"
        ]
        assert problems(TaskDefinitionModel, {"name": "t", "max_episode_step": 9}) == [
            "max_episode_step: unknown key; did you mean 'max_episode_steps'?"
        ]
        assert problems(TaskDefinitionModel, {"name": "t", "limits": {"wall_time": 1}}) == [
            "limits.wall_time: unknown key; did you mean 'wall_time_s'?"
        ]

    def test_known_task_keys_are_listed_without_a_near_match(self):
        (problem,) = problems(TaskDefinitionModel, {"name": "t", "qqqqqq": 1})
        known = problem.split("known: ")[1].split(", ")
        assert len(known) == len(set(known))

    def test_step_limit_has_two_exclusive_names(self):
        assert TaskDefinitionModel(name="t", poc_max_turns=4).max_episode_steps == 4
        assert TaskDefinitionModel(name="t", max_episode_steps=4).max_episode_steps == 4
        both = {"name": "t", "poc_max_turns": 4, "max_episode_steps": 4}
        assert "are the same option" in problems(TaskDefinitionModel, both)[0]

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("max_episode_steps", 0),
            ("num_rollouts", 0),
            ("num_rollouts_per_sample", 0),
            ("name", ""),
            ("on_text", "stop"),
        ],
    )
    def test_out_of_range_value_error_names_key_and_value(self, key, value):
        (problem,) = problems(TaskDefinitionModel, {"name": "t", key: value})
        assert key in problem or "poc_max_turns" in problem
        assert f"(got {value!r})" in problem

    def test_termination_regex_must_compile(self):
        (problem,) = problems(TaskDefinitionModel, {"name": "t", "termination_regex": "("})
        assert problem.startswith("termination_regex: not a regular expression")

    def test_task_keeps_system_and_assistant_messages(self):
        messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]
        task = TaskDefinitionModel(name="t", messages=messages)
        assert [message.role for message in task.messages] == ["system", "assistant"]

    def test_task_policy_keeps_its_own_options(self):
        policy = TaskDefinitionModel(name="t", policy={"type": "openai", "model": "m"}).policy
        assert (policy.type, policy.options()) == ("openai", {"model": "m"})

    def test_task_model_has_a_json_schema(self):
        assert "base_resource_config" in json.dumps(TaskDefinitionModel.model_json_schema())

    def test_long_value_is_truncated_in_the_error(self):
        (problem,) = problems(TaskDefinitionModel, {"name": "t", "num_rollouts": "x" * 500})
        assert "…" in problem
        assert len(problem) < 250


class TestMatchToSteps:
    def test_integer_and_string_step_index_are_equal(self):
        three, four = StepOutput(step_index=3, base_reward=0.5), StepOutput(step_index="4", base_reward=0.25)
        assert match_to_steps([four, three], ["3", "4"], "r") == {"4": four, "3": three}
        assert match_to_steps(None, ["3"], "r") == {}

    @pytest.mark.parametrize(
        ("indices", "known", "message"),
        [
            ([5], 3, "r: unknown step_index '5'; known: 0, 1, 2"),
            ([-1], 0, "unknown step_index '-1'; known: none"),
            (["07"], 99, "unknown step_index '07'; known: 0, 1, 2, 3, 4, …, 98"),
            ([1, "1"], 3, "r: step_index '1' occurs twice"),
        ],
    )
    def test_step_output_for_an_unknown_step_is_rejected(self, indices, known, message):
        outputs = [StepOutput(step_index=index, base_reward=0.0) for index in indices]
        with pytest.raises(AlignmentError, match=re.escape(message)):
            match_to_steps(outputs, [str(n) for n in range(known)], "r")
