"""Return values of rewards and conversion of arguments to their annotations."""

from __future__ import annotations

import asyncio
import dataclasses
import textwrap
import typing
from pathlib import Path

import numpy as np
import pydantic
import pytest

from reward_kit import EvaluateResult, Task, TaskDefinitionModel, evaluate, reward_function
from reward_kit.agent import ScriptedPolicy
from reward_kit.errors import InvalidResultError
from reward_kit.models import Message
from reward_kit.reward_agent import ScoringRequest
from reward_kit.reward_agent.loading import SandboxChoice, load_reward, make_scorer
from reward_kit.reward_agent.scoring import Scored
from reward_kit.runs.datasets import read_samples

CHAT = [Message(role="user", content="2+2?"), Message(role="assistant", content="4")]
LEVELS = ("in_process", "warm")
REWARDS = """
from __future__ import annotations

import dataclasses
import typing
from typing import Literal, NotRequired, TypedDict

from pydantic import BaseModel
from reward_kit import Message, reward_function


class Order(BaseModel):
    city: str
    count: int


@dataclasses.dataclass
class Point:
    x: float
    label: str = "none"


class Row(TypedDict):
    city: str
    count: NotRequired[int]


@reward_function
def number(messages, ground_truth):
    return {"half": 0.5, "one": 1, "true": True, "nan": float("nan"), "inf": float("-inf"), "text": "1.0"}[ground_truth]

@reward_function
def pair(messages, ground_truth):
    return 0.25, ground_truth

@reward_function
def order(messages, ground_truth: Order):
    return ground_truth.count, ground_truth.city

@reward_function
def point(messages, ground_truth: Point | None = None):
    return (ground_truth.x, ground_truth.label) if ground_truth else (9.0, "no point")

@reward_function
def row(messages, ground_truth: list[Row]):
    return len(ground_truth), repr(ground_truth[0])

@reward_function
def whole(messages, ground_truth: int):
    return float(messages[-1].text == str(ground_truth)), type(ground_truth).__name__

@reward_function
def text(messages, ground_truth: str):
    return float(messages[-1].text == ground_truth), repr(ground_truth)

@reward_function
def names(messages, ground_truth: list[str]):
    return len(ground_truth), ",".join(ground_truth)

@reward_function
def choice(messages, ground_truth: Literal["a", "b"]):
    return 1.0

@reward_function
def sampled(messages, sample: Order):
    return sample.count

@reward_function
def untyped(messages, ground_truth):
    return 1, f"{type(ground_truth).__name__} {ground_truth!r}"

@reward_function(mode="batch")
def together(rollouts_messages, ground_truths: list[Order]):
    return [(truth.count, truth.city) for truth in ground_truths]

class Judge:
    def score(self, messages, ground_truth: Order):
        return True, ground_truth.city
"""


async def score_all(reward, *requests: ScoringRequest) -> list[Scored]:
    async with make_scorer(reward) as scorer:
        return list(await scorer.score_group(requests))


def score(folder: Path, name: str, *truths: object, level: str = "in_process", **values: object) -> list[Scored]:
    (folder / "reward.py").write_text(textwrap.dedent(REWARDS))
    loaded = load_reward(f"reward.py:{name}", folder, SandboxChoice(level=level))
    requests = [ScoringRequest(f"r{i}", CHAT, truth, [1], **values) for i, truth in enumerate(truths)]
    return asyncio.run(score_all(loaded.reward, *requests))


@pytest.mark.parametrize("level", LEVELS)
class TestReturns:
    def test_number_or_bool_is_the_score(self, tmp_path: Path, level: str) -> None:
        scored = score(tmp_path, "number", "half", "one", "true", level=level)
        assert [one.score for one in scored] == [0.5, 1.0, 1.0]

    def test_score_and_reason_may_be_a_tuple(self, tmp_path: Path, level: str) -> None:
        (scored,) = score(tmp_path, "pair", "close", level=level)
        assert (scored.result.score, scored.result.reason) == (0.25, "close")

    @pytest.mark.parametrize(
        "name, truth, problem",
        [
            ("number", "nan", "score: a score must be finite"),
            ("number", "inf", "score: a score must be finite"),
            ("number", "text", "returned a str; return a number, (score, reason) or an EvaluateResult"),
            ("pair", {"a": 1}, "reason: expected a string"),
        ],
    )
    def test_other_values_are_an_invalid_result(
        self, tmp_path: Path, level: str, name: str, truth: object, problem: str
    ) -> None:
        (scored,) = score(tmp_path, name, truth, level=level)
        assert scored.score is None
        assert scored.failure.failure_class == "invalid_result"
        assert problem in scored.failure.message


def test_decorated_function_returns_a_result_for_a_number() -> None:
    @reward_function
    def length(messages: list[Message]):
        return np.bool_(len(messages) == 2)

    assert length(CHAT) == EvaluateResult(score=1.0)
    assert reward_function(lambda messages: (np.float32(0.5), None))(CHAT) == EvaluateResult(score=0.5)
    with pytest.raises(InvalidResultError, match="score: a score must be finite"):
        reward_function(lambda messages: float("nan"))(CHAT)


ORDER = {"city": "Paris", "count": "2"}


@pytest.mark.parametrize("level", LEVELS)
class TestAnnotations:
    @pytest.mark.parametrize(
        "name, truth, expected",
        [
            ("order", ORDER, (2.0, "Paris")),
            ("order", '{"city": "Paris", "count": 2}', (2.0, "Paris")),
            ("Judge", ORDER, (1.0, "Paris")),
            ("together", ORDER, (2.0, "Paris")),
            ("point", {"x": 1}, (1.0, "none")),
            ("point", None, (9.0, "no point")),
            ("row", [{"city": "Rome"}], (1.0, "{'city': 'Rome'}")),
            ("whole", "4", (1.0, "int")),
            ("text", "4", (1.0, "'4'")),
            ("text", 4, (1.0, "'4'")),
            ("names", '["a", "b"]', (2.0, "a,b")),
            ("untyped", "4", (1.0, "str '4'")),
            ("untyped", {"a": [1]}, (1.0, "dict {'a': [1]}")),
        ],
    )
    def test_ground_truth_has_the_type_of_its_annotation(
        self, tmp_path: Path, level: str, name: str, truth: object, expected: tuple[float, str]
    ) -> None:
        (scored,) = score(tmp_path, name, truth, level=level)
        assert scored.failure is None
        assert (scored.result.score, scored.result.reason) == expected

    @pytest.mark.parametrize(
        "name, truth, problem",
        [
            ("order", {"city": "Paris"}, "validation: count: missing"),
            ("order", "Paris", "validation: expected a mapping of keys"),
            ("Judge", {"city": [], "count": 1}, "validation: city: expected a string (got [])"),
            ("point", {"x": "far"}, "validation: x: expected a number (got 'far')"),
            ("point", {"x": 1, "lable": "a"}, "validation: lable: unknown key"),
            ("row", [{"count": 1}], "validation: 0.city: missing"),
            ("row", [{"city": "Rome", "cuont": 1}], "validation: 0.cuont: unknown key"),
            ("whole", "four", "validation: expected a whole number (got 'four')"),
            ("text", {"answer": "4"}, "validation: expected a string (got {'answer': '4'})"),
            ("choice", "c", "validation: expected 'a' or 'b' (got 'c')"),
        ],
    )
    def test_mismatch_is_an_invalid_result_with_the_field(
        self, tmp_path: Path, level: str, name: str, truth: object, problem: str
    ) -> None:
        (scored,) = score(tmp_path, name, truth, level=level)
        assert scored.score is None
        assert scored.failure.failure_class == "invalid_result"
        assert problem in scored.failure.message

    def test_mismatch_in_a_batch_leaves_its_own_rollout_unscored(self, tmp_path: Path, level: str) -> None:
        first, second, third = score(tmp_path, "together", ORDER, {"city": "Rome"}, ORDER, level=level)
        assert (first.score, second.score, third.score) == (2.0, None, 2.0)
        assert second.failure.failure_class == "invalid_result"
        assert "count: missing" in second.failure.message

    def test_sample_has_the_type_of_its_annotation(self, tmp_path: Path, level: str) -> None:
        (scored,) = score(tmp_path, "sampled", None, level=level, sample={**ORDER, "id": "7"})
        assert scored.score == 2.0


class Loose(typing.TypedDict):
    __pydantic_config__ = pydantic.ConfigDict(extra="ignore")  # type: ignore[misc]
    city: str


@dataclasses.dataclass
class Named:
    city: str


def test_unknown_keys_of_samples_and_configured_types_are_ignored() -> None:
    @reward_function
    def city(messages: list[Message], ground_truth: Loose, sample: Named) -> float:
        return float(ground_truth["city"] == sample.city)

    row = {"city": "Rome", "id": "7"}
    assert city(CHAT, ground_truth=row, sample=row).score == 1.0


def test_csv_ground_truth_is_json_unless_the_annotation_is_str(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        'id,question,ground_truth\na,q,"{""city"": ""Paris"", ""count"": 2}"\nb,q,"[""x"", ""y""]"\nc,q,4\n'
    )
    task = TaskDefinitionModel(name="t", dataset_path="rows.csv")
    order, names, four = [sample.ground_truth for sample in read_samples(task, tmp_path)]
    assert [score(tmp_path, "order", order)[0].score, score(tmp_path, "names", names)[0].score] == [2.0, 2.0]
    assert [score(tmp_path, name, four)[0].result.reason for name in ("whole", "text")] == ["int", "'4'"]
    assert score(tmp_path, "text", order)[0].result.reason == repr(order)


def test_run_counts_a_mismatch_as_unscored(tmp_path: Path) -> None:
    def exact(messages: list[Message], ground_truth: int) -> bool:
        return messages[-1].text == str(ground_truth)

    rows = [{"id": "right", "ground_truth": "4"}, {"id": "wrong", "ground_truth": "four"}]
    policy = ScriptedPolicy([{"type": "text", "content": "4"}])
    task = Task("sums", reward=exact, policy=policy, dataset=rows, initial_user_prompt="2+2?")
    run = evaluate(task, log_dir=tmp_path)
    assert run.score == 1.0  # the mean of what is scored
    assert [row.sample_id for row in run.errors] == ["wrong"]
