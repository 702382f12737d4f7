"""Test that the check reports nothing for correct rewards: all built-in ones and a few custom ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import reward_kit.rewards
from reward_kit import Message
from reward_kit.checks.reward_bench import Given
from reward_kit.environments.base import StateSnapshot
from reward_kit.reward_agent.scoring import ScoringRequest
from tests.checks.reward_check import checked, codes, written

TESTS = {"tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]}


class Case(NamedTuple):
    """A built-in reward's ground truth, correct answer, and options."""

    truth: Any = None
    gold: str | None = None
    options: Mapping[str, Any] | None = None

    @property
    def given(self) -> Given:
        truths = () if self.truth is None else (self.truth,)
        return Given(truths, () if self.gold is None else (self.gold,))


BUILT_IN = {
    "choice_answer": Case("B", "The answer is (B)."),
    "contains_all": Case(None, "An apple and a pear.", {"keywords": ("apple", "pear")}),
    "contains_none": Case(None, None, {"keywords": ("apple",)}),
    "environment_score": Case(),
    "exact_answer": Case("Paris", "Paris"),
    "few_steps": Case(),
    "json_answer": Case({"city": "Oslo", "days": 3}, '{"city": "Oslo", "days": 3}'),
    "json_schema_answer": Case({"type": "object", "required": ["days"]}, '{"days": 3}'),
    "length_within": Case(None, "four", {"at_least": 2, "at_most": 8}),
    "list_answer": Case(["red", "green", "blue"], "red, green, blue"),
    "milestones": Case(None, None, {"reach": [{"name": "saw", "observed": "a mug"}]}),
    "math_answer": Case("1000", "\\boxed{1000}"),
    "no_repetition": Case(),
    "no_tool_errors": Case(),
    "number_answer": Case(1000, "The answer is 1000."),
    "program_code": Case(TESTS, "```bash\nread a b; echo $((a + b))\n```", {"language": "bash"}),
    "python_code": Case(TESTS, "```python\na, b = map(int, input().split())\nprint(a + b)\n```"),
    "reasoning_steps": Case(),
    "regex_format": Case(None, "Answer: 42", {"pattern": r"Answer: \d+"}),
    "same_language": Case(None, None, {"language": "en"}),
    "tool_calls_match": Case({"name": "weather", "arguments": {"city": "Oslo"}}),
    "tool_path": Case(None, None, {"assertions": [{"before": ["search", "buy"]}]}),
    "tag_format": Case(None, "<think>Two and two.</think><answer>4</answer>"),
}
ASKS_A_MODEL = {"grounded_judge", "group_judge", "llm_judge", "pairwise_judge"}
"""They are checked against a local endpoint, in their own tests."""
NO_REWARDS = {
    "Milestone",
    "clip",
    "cosine_length",
    "first_of",
    "gate",
    "shortest_in_group",
    "ToolAssertion",
    "weighted",
}
"""What makes rewards, and is none itself."""


def ended(state: StateSnapshot, truth: Any, text: str) -> ScoringRequest:
    messages = [Message(role="user", content="Go."), Message(role="assistant", content=text)]
    return ScoringRequest("r", messages, truth, [1], final_state=state)


def database(*statements: str) -> StateSnapshot:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(";".join(statements))
        return StateSnapshot("sqlite", connection.serialize())


TABLE = "CREATE TABLE t (x); INSERT INTO t VALUES (1), (2)"
JUDGES_A_STATE = {
    "final_state_matches": (
        ended(StateSnapshot("json", b'{"sent": 2}'), {"sent": 2}, "Done."),
        ended(StateSnapshot("json", b'{"sent": 0}'), {"sent": 2}, ""),
    ),
    "harbor_tests": (
        ended(StateSnapshot("json", b'{"rewards": {"reward": 1.0}, "reward": 1.0, "log": ""}'), None, "Done."),
        ended(StateSnapshot("json", b'{"rewards": {"reward": 0.0}, "reward": 0.0, "log": ""}'), None, ""),
    ),
    "sql_result": (
        ended(database(TABLE), {"query": "SELECT sum(x) FROM t"}, "```sql\nSELECT 1 + max(x) FROM t\n```"),
        ended(database(TABLE), {"query": "SELECT sum(x) FROM t"}, ""),
    ),
}
"""The end of an episode that is right, and of one in which nothing was done."""


def test_every_built_in_reward_is_tested() -> None:
    known = BUILT_IN.keys() | ASKS_A_MODEL | NO_REWARDS | JUDGES_A_STATE.keys()
    assert set(reward_kit.rewards.__all__) <= known, "add a right answer for each new reward to BUILT_IN"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name in reward_kit.rewards.__all__])
def test_built_in_reward_passes(name: str) -> None:
    case = BUILT_IN[name]
    report = checked(f"reward_kit.rewards:{name}", case.given, options=case.options)
    assert not codes(report, "error"), "\n".join(report.lines())
    assert case.truth is None or not codes(report, "warning"), "\n".join(report.lines())


@pytest.mark.parametrize("name", JUDGES_A_STATE)
def test_built_in_state_reward_passes(name: str) -> None:
    right, nothing = JUDGES_A_STATE[name]
    report = checked(f"reward_kit.rewards:{name}", Given(rollouts=[right, nothing], ends=[(right, nothing)]))
    assert not codes(report, "error", "warning"), "\n".join(report.lines())


LAST_NUMBER = """
@reward_function
def reward(messages: list[Message], ground_truth: int) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    answer = last(messages).rpartition("</think>")[2]
    found = re.findall(r"(?<![\\w.,-])-?\\d[\\d,]*(?:\\.0)?(?![\\w-])", answer)
    value = {number.removesuffix(".0").replace(",", "") for number in found[-1:]}
    return EvaluateResult(score=float(value == {str(ground_truth)}))
"""
BY_STEPS = """
@reward_function
def reward(messages: list[Message], ground_truth: str, assistant_turns: list[int]) -> EvaluateResult:
    if ground_truth is None:
        raise ValueError("no ground truth")
    steps = [StepOutput(step_index=index, base_reward=0.0) for index in range(len(assistant_turns))]
    return EvaluateResult(score=float(last(messages).strip() == ground_truth), step_outputs=steps)
"""
CLASS = """
@reward_function
class reward:
    def setup(self) -> None:
        self.pattern = re.compile(r"<answer>([^<]*)</answer>")

    def score(self, messages: list[Message], ground_truth: str) -> EvaluateResult:
        if ground_truth is None:
            raise ValueError("no ground truth")
        found = self.pattern.findall(last(messages).rpartition("</think>")[2])
        return EvaluateResult(score=float(bool(found) and found[-1].strip() == ground_truth))
"""


@pytest.mark.parametrize("body", [LAST_NUMBER, BY_STEPS, CLASS], ids=["last number", "steps", "class"])
def test_correct_custom_reward_passes(tmp_path: Path, body: str) -> None:
    report = checked(written(tmp_path, body))
    assert not codes(report, "error", "warning"), "\n".join(report.lines())
