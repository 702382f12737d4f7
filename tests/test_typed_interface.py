"""Arguments and results of functions decorated with `@reward_function`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import List, Optional  # noqa: UP035 - users write these

import pytest

from reward_kit.errors import ConfigError, InvalidResultError
from reward_kit.models import EvaluateResult, Message
from reward_kit.typed_interface import reward_function, reward_spec

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
MESSAGES = [Message.model_validate(message) for message in CHAT]
ONE = EvaluateResult(score=1.0)


class Recent(Sequence):
    """A sequence that is not a list, such as a step's history."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class TestShapes:
    """Annotations are resolved also under `from __future__ import annotations`, as in this file."""

    @pytest.mark.parametrize("given", [CHAT, MESSAGES, tuple(MESSAGES), Recent(MESSAGES)])
    def test_messages_annotated_as_list_of_message_are_converted(self, given):
        @reward_function
        def reward(messages: list[Message]) -> EvaluateResult:
            assert isinstance(messages, list)
            return EvaluateResult(score=float(messages[-1].text))

        assert reward(given).score == 4.0

    def test_messages_annotated_as_optional_list_are_converted(self):
        @reward_function
        def reward(messages: Optional[List[Message]], ground_truth: list[Message] | None = None):  # noqa: UP006, UP045
            assert messages is None or isinstance(messages[0], Message)
            return {"score": 0.0 if messages is None else 1.0, "reason": type(ground_truth).__name__}

        assert reward(CHAT)["score"] == 1.0
        assert reward(None)["score"] == 0.0
        assert reward(CHAT, ground_truth=None)["reason"] == "NoneType"

    @pytest.mark.parametrize("given", [CHAT, MESSAGES, Recent(MESSAGES)])
    def test_messages_annotated_as_list_of_dict_are_dicts(self, given):
        @reward_function
        def reward(messages: list[dict]):
            return {"score": float(messages[-1]["content"])}

        assert reward(given).score == 4.0

    def test_ground_truth_annotated_as_messages_is_converted(self):
        @reward_function
        def reward(messages: list[Message], ground_truth: list[Message]):
            return {"score": float(messages[-1].text == ground_truth[-1].text)}

        assert reward(CHAT, CHAT).score == 1.0

    def test_ground_truth_without_annotation_is_unchanged(self):
        truth = {"calls": [1, 2]}

        @reward_function
        def reward(messages: list[Message], ground_truth=None):
            return {"score": float(ground_truth is truth)}

        assert reward(CHAT, truth).score == 1.0

    def test_batch_messages_are_converted_per_rollout(self):
        @reward_function(mode="batch")
        def reward(rollouts_messages: list[list[Message]], ground_truths: list[str]):
            return [{"score": float(m[-1].text == g)} for m, g in zip(rollouts_messages, ground_truths, strict=True)]

        assert [r.score for r in reward([CHAT, Recent(MESSAGES)], ["4", "5"])] == [1.0, 0.0]

    def test_invalid_messages_error_names_parameter_and_value(self):
        @reward_function
        def reward(messages: list[Message]):
            return ONE

        with pytest.raises(InvalidResultError, match=r"reward 'reward': Input 'messages' .*: 0\.role.*robot"):
            reward([{"role": "robot", "content": ""}])


class TestParameters:
    def test_only_named_parameters_are_passed(self):
        @reward_function
        def reward(messages, sample):
            return {"score": float(sample["points"])}

        given = {"messages": CHAT, "sample": {"points": 3}, "state": object(), "assistant_turns": [1]}
        assert set(reward_spec(reward).arguments(given)) == {"messages", "sample"}
        assert reward(**given).score == 3.0

    def test_function_with_kwargs_receives_every_argument(self):
        @reward_function
        def reward(messages, **kwargs):
            return {"score": 1.0, "reason": ",".join(sorted(kwargs))}

        assert reward(CHAT, state=1, sample=2).reason == "sample,state"

    def test_direct_call_binds_arguments_as_python_does(self):
        @reward_function
        def reward(messages, ground_truth=None, *, weight=1.0):
            return {"score": weight if ground_truth == "4" else 0.0}

        assert reward(CHAT, "4", weight=0.5).score == 0.5
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
            reward(CHAT, "4", 0.5)
        with pytest.raises(TypeError, match="multiple values for argument 'messages'"):
            reward(CHAT, messages=CHAT)

    def test_extra_positional_argument_is_rejected(self):
        @reward_function
        def reward(messages, **kwargs):
            return ONE

        with pytest.raises(TypeError, match="takes 1 positional arguments but 2 were given"):
            reward(CHAT, "truth")

    @pytest.mark.parametrize("mode", ["pointwise", "batch"])
    def test_messages_parameter_of_the_mode_is_required_at_decoration(self, mode):
        with pytest.raises(ConfigError, match=f"a {mode} reward needs the parameter"):
            reward_function(mode=mode)(lambda answers: ONE)

    def test_positional_only_parameters_are_rejected(self):
        def reward(messages, /):
            return ONE

        with pytest.raises(ConfigError, match="'messages' must not be positional-only"):
            reward_function(reward)

    def test_unknown_mode_is_rejected(self):
        with pytest.raises(ConfigError, match="mode 'grouped' is unknown"):
            reward_function(mode="grouped")(lambda messages: ONE)

    @pytest.mark.parametrize("annotation", ["NoSuchName", "int.nothing", "a b"])
    def test_unresolvable_annotation_error_names_the_reward(self, annotation):
        def reward(messages):
            return ONE

        reward.__annotations__["messages"] = annotation
        with pytest.raises(ConfigError, match="reward 'reward': an annotation cannot be resolved"):
            reward_function(reward)


class TestKinds:
    async def test_async_function_stays_async(self):
        @reward_function
        async def reward(messages: list[Message]) -> EvaluateResult:
            return EvaluateResult(score=float(messages[-1].text))

        assert inspect.iscoroutinefunction(reward)
        assert (await reward(CHAT)).score == 4.0
        assert reward_spec(reward).is_async

    async def test_callable_object_and_partial_can_be_rewards(self):
        class Scorer:
            async def __call__(self, messages: list[Message]):
                return {"score": float(messages[-1].text)}

        def weighted(weight, messages: list[Message]):
            return {"score": weight * float(messages[-1].text)}

        scorer = reward_function(Scorer())
        assert (await scorer(CHAT)).score == 4.0
        assert reward_function(functools.partial(weighted, 2))(messages=CHAT).score == 8.0

    def test_the_decorated_function_keeps_its_name_and_docstring(self):
        @reward_function(id="exact", requirements=["sympy"], resources={"judge": "gpt"})
        def reward(messages, judge):
            """Compare."""
            return ONE

        spec = reward_spec(reward)
        assert (reward.__name__, reward.__doc__) == ("reward", "Compare.")
        assert (spec.id, spec.requirements, spec.resources) == ("exact", ("sympy",), {"judge": "gpt"})

    def test_plain_function_is_a_pointwise_reward(self):
        spec = reward_spec(lambda messages: ONE)
        assert spec.mode == "pointwise"

    def test_value_that_is_not_callable_is_rejected(self):
        with pytest.raises(ConfigError, match="a reward must be a function or a class, got a str"):
            reward_spec("reward")


class TestResults:
    @staticmethod
    def returning(value):
        return reward_function(lambda messages: value)

    def test_dict_result_is_validated(self):
        assert self.returning({"score": 1})(CHAT) == EvaluateResult(score=1.0)
        with pytest.raises(InvalidResultError, match="reson: unknown key; did you mean 'reason'"):
            self.returning({"score": 1, "reson": ""})(CHAT)

    @pytest.mark.parametrize("score", [float("nan"), float("inf"), "0.5"])
    def test_non_finite_score_error_names_field_and_value(self, score):
        with pytest.raises(InvalidResultError) as caught:
            self.returning({"score": score})(CHAT)
        assert "score: " in str(caught.value)
        assert f"(got {score!r})" in str(caught.value)

    def test_result_modified_to_be_invalid_is_rejected(self):
        result = EvaluateResult(score=0.5, step_outputs=[{"step_index": 0, "base_reward": 1.0}])
        result.score = float("nan")
        with pytest.raises(InvalidResultError, match="score: "):
            self.returning(result)(CHAT)
        result.score, result.step_outputs[0].base_reward = 0.5, "much"
        with pytest.raises(InvalidResultError, match=r"step_outputs\.0\.base_reward: "):
            self.returning(result)(CHAT)

    def test_subclass_of_the_result_is_kept(self):
        class Mine(EvaluateResult):
            colour: str = "red"

        assert self.returning(Mine(score=1, colour="blue"))(CHAT).colour == "blue"

    @pytest.mark.parametrize("value", [None, "1.0", [0.5], (1.0, "query", "response")])
    def test_other_result_types_are_rejected_by_type(self, value):
        with pytest.raises(InvalidResultError, match=r"returned (an? |nothing).*; return a number, \(score, reason\)"):
            self.returning(value)(CHAT)

    def test_coroutine_returned_by_a_sync_function_is_explained(self):
        async def inner():
            return ONE

        coroutine = inner()
        with pytest.raises(InvalidResultError, match="declare the function with `async def`"):
            self.returning(coroutine)(CHAT)
        coroutine.close()

    def test_batch_reward_must_return_a_result_per_rollout(self):
        reward = reward_function(mode="batch")(lambda rollouts_messages: [ONE, {"score": 0.0}])
        assert [result.score for result in reward([CHAT, CHAT])] == [1.0, 0.0]
        with pytest.raises(InvalidResultError, match="2 results for 3 rollouts"):
            reward([CHAT, CHAT, CHAT])

    def test_invalid_batch_result_error_names_the_item(self):
        with pytest.raises(InvalidResultError, match="a batch reward must return a list, got an EvaluateResult"):
            reward_function(mode="batch")(lambda rollouts_messages: ONE)([CHAT])
        with pytest.raises(InvalidResultError, match=r"reward 'b'\[1\] returned a str"):
            reward_function(mode="batch", id="b")(lambda rollouts_messages: [ONE, "0.5"])([CHAT, CHAT])


class TestClasses:
    """A class with `score` is a reward; uncallable ones are rejected when the file loads."""

    def test_class_spec_is_read_from_its_score_method(self):
        @reward_function(resources={"judge": "gpt"}, sandbox="isolated")
        class Judged:
            async def score(self, messages: list[Message], judge, limit=3): ...

        spec = reward_spec(Judged)
        assert (spec.id, spec.is_async, spec.sandbox) == ("Judged", True, "isolated")
        assert (spec.parameters, spec.required) == ({"messages", "judge", "limit"}, {"messages", "judge"})
        assert spec.arguments({"messages": CHAT})["messages"] == MESSAGES
        assert (spec.origin.file.name, spec.origin.qualname.split(".")[-1]) == ("test_typed_interface.py", "Judged")

    def test_subclass_of_a_reward_class_has_its_own_spec(self):
        class First:
            def score(self, messages): ...

        class Second(reward_function(First)):
            def score(self, messages, ground_truth): ...

        assert reward_spec(Second).required == {"messages", "ground_truth"}

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ({}, r"needs a method score\(self, messages, …\)"),
            ({"score": staticmethod(lambda messages: ONE)}, "needs a method score"),
            ({"score": lambda self, message: ONE}, "needs the parameter 'messages'"),
            (
                {"score": lambda self, messages: ONE, "setup": lambda self, key: None},
                "setup is called without arguments",
            ),
            ({"score": lambda self, messages: ONE, "__init__": lambda self, key: None}, "give 'key' a default"),
        ],
    )
    def test_class_without_a_valid_score_method_is_rejected(self, members, message):
        with pytest.raises(ConfigError, match=message):
            reward_function(type("Bad", (), members))

    def test_unknown_sandbox_level_and_unused_resource_are_rejected(self):
        with pytest.raises(ConfigError, match="sandbox 'warmer' is unknown"):
            reward_function(sandbox="warmer")(lambda messages: ONE)
        with pytest.raises(ConfigError, match="the resource 'judge' is not a parameter"):
            reward_function(resources={"judge": 1})(lambda messages: ONE)


def test_wrong_signature_is_rejected_with_line_and_nearest_name():
    expected = r"test_typed_interface\.py:\d+: reward 'f': .*'messages' instead of 'mesages'"
    with pytest.raises(ConfigError, match=expected):

        @reward_function
        def f(mesages):
            return None
