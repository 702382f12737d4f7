"""Tests of rewards with the signatures of other libraries."""

from __future__ import annotations

import inspect
from typing import Any

import anyio
import pytest

from reward_kit.checks.code_exploits import code_exploits, find_code
from reward_kit.checks.minimize import shorten
from reward_kit.errors import ConfigError, RewardError
from reward_kit.models import Message
from reward_kit.reward_agent.custom_rewards import build_spec

QUESTION, ANSWER = Message(role="user", content="6 * 7?"), Message(role="assistant", content="42")


def score(given: Any, *messages: Message, **values: Any) -> Any:
    spec = build_spec(given)
    values = {"messages": list(messages or (QUESTION, ANSWER)), "ground_truth": "42", **values}
    returned = spec.function(**spec.arguments(values))
    return anyio.run(lambda: returned) if inspect.iscoroutine(returned) else returned


def test_trl_function_gets_lists_of_strings() -> None:
    def exact(completions, answer, **kwargs):
        assert (completions, answer, kwargs["prompts"]) == (["42"], ["42"], ["6 * 7?"])
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    assert score(exact) == 1.0


def test_trl_function_that_reads_content_gets_messages() -> None:
    def exact(prompts, completions, solution, **kwargs):
        texts = [one[-1]["content"] for one in completions]
        return [float(text == truth) for text, truth in zip(texts, solution, strict=True)]

    assert score(exact) == 1.0


def test_truth_may_come_from_keyword_arguments_or_from_the_sample() -> None:
    def from_kwargs(completions, **kwargs):
        return [float(text == truth) for text, truth in zip(completions, kwargs["target"], strict=True)]

    def from_column(completions, tests, difficulty):
        return [float(tests == ["42"] and difficulty == ["hard"])]

    assert score(from_kwargs) == 1.0
    assert score(from_column, sample={"difficulty": "hard"}) == 1.0


def test_missing_score_and_missing_truth_leave_the_rollout_unscored() -> None:
    def nothing(completions, answer):
        return [None]

    for values in ({}, {"ground_truth": None}):
        with pytest.raises(RewardError, match=r"unscored|requires a ground_truth"):
            score(nothing, **values)


def test_verifiers_function_gets_the_completion_and_the_state() -> None:
    def correct(completion, answer, state, info):
        return float(completion[-1]["content"] == answer == state["answer"])

    assert score(correct) == 1.0


def test_verifiers_rubric_is_the_weighted_sum() -> None:
    class Rubric:
        def __init__(self) -> None:
            self.funcs, self.weights = [self.exact, self.short], [0.75, 0.25]
            self.class_objects: dict[str, Any] = {"parser": str.strip}

        async def exact(self, parser, completion, answer):
            return float(parser(completion[-1]["content"]) == answer)

        def short(self, completion, **kwargs):
            return 0.5

    assert score(Rubric()) == pytest.approx(0.875)


def test_rubric_of_synchronous_functions_is_synchronous() -> None:
    class Rubric:
        funcs, weights = [lambda completion, answer: float(completion[0]["content"] == answer)], [1.0]

    assert not build_spec(Rubric()).is_async
    assert score(Rubric()) == 1.0


def test_openenv_rubric_gets_an_action_and_an_observation() -> None:
    class Exact:
        def forward(self, action, observation):
            return float(action.message == observation.metadata["answer"] == observation.target)

    assert score(Exact) == score(Exact()) == 1.0


@pytest.mark.parametrize("names", ["answer, target", "reference, prediction", "response, expected", "text, tests"])
def test_plain_function_gets_the_answer_and_the_truth_by_name(names: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def check({names}, strict=True):\n    return bool({names.replace(', ', ' == ')})", space)
    assert score(space["check"]) is True


def test_function_without_a_known_truth_is_rejected() -> None:
    def check(response, one, other):
        return 1.0

    with pytest.raises(ConfigError, match="name it 'ground_truth'"):
        build_spec(check)


def test_code_is_found_in_the_last_block() -> None:
    answer = "Text.\n```python\nx = 1\n```\n```python\ndef f():\n    return 1\n```\nMore."
    assert find_code(answer) == ("Text.\n```python\nx = 1\n```\n```python\n", "def f():\n    return 1\n", "```\nMore.")
    assert find_code("The answer is 42.") is None


def test_exploits_keep_the_names_of_the_program() -> None:
    for exploit in code_exploits("class Solution:\n    def add(self, a, b):\n        return a + b\n"):
        compile(exploit.program, "<exploit>", "exec")
        if exploit.kind in ("always-equal-earns", "constant-code-earns", "reads-reference-earns"):
            assert "class Solution:\n    def add(self, *args, **kwargs):" in exploit.program


async def test_shorten_keeps_what_is_needed() -> None:
    async def works(text: str) -> bool:
        return "needed" in text

    assert await shorten("a line\nsome needed words\nand more\n", works, 200) == "needed"
