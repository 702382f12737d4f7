"""Test rewards as verl's `compute_score` and in its reward loop, without verl."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from reward_kit import reward_function
from reward_kit.errors import ConfigError, RewardError
from reward_kit.integrations.verl.compute_score import as_compute_score
from reward_kit.integrations.verl.data_proto import verl_rows
from reward_kit.integrations.verl.reward_loop import RewardKitManager
from reward_kit.models import EvaluateResult
from reward_kit.reward_agent import Scored, ScoringRequest
from reward_kit.tokens import TokenBatch
from tests.integrations.verl_episodes import collected

REWARD = """
from reward_kit import reward_function

@reward_function
def graded(messages, ground_truth, sample, bonus: float = 0.0):
    if messages[-1].text == "boom":
        raise ValueError("no answer")
    metrics = {"format": {"score": 0.25, "reason": "short"}} if sample else {}
    return {"score": float(messages[-1].text == ground_truth) + bonus, "metrics": metrics}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graded.py").write_text(REWARD)
    return tmp_path


@reward_function
def graded(messages, ground_truth, bonus: float = 0.0):
    if messages[-1].text == "boom":
        raise ValueError("no answer")
    return {"score": float(messages[-1].text == ground_truth) + bonus + len(messages[:-1])}


@reward_function(mode="batch")
def together(rollouts_messages, ground_truths):
    return [{"score": 1.0} for _ in rollouts_messages]


async def test_reward_becomes_a_compute_score_function() -> None:
    compute_score = as_compute_score(graded, options={"bonus": 0.5})
    assert inspect.iscoroutinefunction(compute_score)
    assert await compute_score("gsm8k", "4", "4", {"index": 1}) == {"score": 1.5}
    answers = await asyncio.gather(*(compute_score("gsm8k", str(n), "4") for n in range(6)))
    assert [answer["score"] for answer in answers] == [0.5, 0.5, 0.5, 0.5, 1.5, 0.5]


def test_sync_compute_score_works_in_any_thread_and_event_loop(folder: Path) -> None:
    compute_score = as_compute_score("graded.py:graded", folder=folder, asynchronous=False, metrics=("format", "none"))
    assert not inspect.iscoroutinefunction(compute_score)
    found = compute_score(data_source="x", solution_str="4", ground_truth="4", extra_info={"index": 1})
    assert math.isnan(found.pop("none")) and found == {"score": 1.0, "format": 0.25}
    again = as_compute_score("graded.py:graded", folder=folder, level="in_process")
    # Each with its own loop and a newly opened reward.
    assert [asyncio.run(again("x", "4", truth))["score"] for truth in ("4", "5")] == [1.0, 0.0]


def test_error_is_never_scored_zero(folder: Path) -> None:
    raising = as_compute_score("graded.py:graded", folder=folder, asynchronous=False, level="in_process")
    with pytest.raises(RewardError, match=r"is unscored: .*ValueError: no answer") as raised:
        raising("x", "boom", "4")
    assert raised.value.recorded is not None and raised.value.recorded.failure_class == "crash"
    with_nan = as_compute_score(graded, asynchronous=False, on_unscored="mask", metrics=("format",))
    assert all(math.isnan(value) for value in with_nan("x", "boom", "4").values())
    slow = as_compute_score(_sleeping, asynchronous=False, deadline_s=0.01)
    with pytest.raises(RewardError) as overdue:
        slow("x", "4", "4")
    assert overdue.value.recorded is not None and overdue.value.recorded.failure_class == "timeout"


@reward_function
async def _sleeping(messages):
    await asyncio.sleep(60)


@reward_function
def half_judged(messages):
    metrics = {"format": {"score": 0.25, "reason": "short"}}
    metrics["judge"] = {"score": 0.0, "is_score_valid": False, "reason": "no answer"}
    return {"score": 1.0, "metrics": metrics}


async def test_invalid_metric_is_not_zero() -> None:
    compute_score = as_compute_score(half_judged, metrics=("format", "judge"))
    found = await compute_score("x", "4", "4")
    assert math.isnan(found.pop("judge")) and found == {"score": 1.0, "format": 0.25}


class CountedScorer:
    """A scorer that counts how often it is opened and answers after one iteration of the event loop."""

    mode = "pointwise"

    def __init__(self) -> None:
        self.opened = self.open = 0

    async def __aenter__(self) -> CountedScorer:
        self.opened += 1
        self.open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open -= 1

    async def score(self, request: ScoringRequest) -> Scored:
        await asyncio.sleep(0.001)
        return Scored(request.rollout_id, EvaluateResult(score=0.5))

    async def score_group(self, requests: list[ScoringRequest]) -> list[Scored]:
        raise AssertionError("one at a time")


def test_each_event_loop_has_its_own_persistent_agent() -> None:
    scorer = CountedScorer()
    compute_score = as_compute_score(scorer)
    start = threading.Barrier(2)

    async def many() -> list[float]:
        start.wait()  # both loops are there before either asks
        return [(await compute_score("x", "4"))["score"] for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        found = [one.result() for one in [pool.submit(asyncio.run, many()) for _ in range(2)]]
    assert found == [[0.5] * 20] * 2
    assert (scorer.opened, scorer.open) == (2, 0), "one for each loop, closed at its end"


def test_forked_process_scores_in_its_own_thread() -> None:
    compute_score = as_compute_score(graded, asynchronous=False)
    assert compute_score("x", "4", "4") == {"score": 1.0}
    forked = multiprocessing.get_context("fork").Process(target=_exit_with_score, args=(compute_score,))
    forked.start()
    forked.join(timeout=60)
    hangs = forked.is_alive()
    forked.kill()
    assert not hangs and forked.exitcode == 41
    assert compute_score("x", "4", "4") == {"score": 1.0}


def _exit_with_score(compute_score: Any) -> None:
    os._exit(40 + int(compute_score("x", "4", "4")["score"]))


@pytest.mark.parametrize(("options", "named"), [({"level": "warm"}, "level"), ({"options": {"bonus": 1}}, "options")])
def test_scorer_rejects_options(options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} has no effect on a CountedScorer"):
        as_compute_score(CountedScorer(), **options)


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        (graded, {"max_concurency": 4}, r"as_compute_score\.max_concurency: unknown key; did you mean"),
        (graded, {"on_unscored": "zero"}, "on_unscored"),
        (graded, {"level": "warm"}, "level has no effect on a loaded reward; pass a reference such as 'file"),
        (graded, {"folder": "."}, "folder has no effect on a loaded reward"),
        (together, {}, "scores groups, but verl requests one row at a time here; use RewardPipeline"),
        ("nowhere.py:graded", {}, "no such file"),
    ],
)
def test_ineffective_options_and_uncallable_rewards_are_rejected(reward: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_compute_score(reward, **options)


class Words:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(str(number) for number in token_ids)


def config(section: dict[str, Any] | None = None, path: str | None = None) -> Any:
    reward = {"reward_kit": section or {}, "custom_reward_function": SimpleNamespace(path=path)}
    return SimpleNamespace(reward=SimpleNamespace(**reward, get=reward.get))


def rows() -> TokenBatch:
    return TokenBatch(
        batch={
            "prompts": np.array([[0, 7], [7, 7]]),
            "responses": np.array([[4, 0, 0], [5, 6, 0]]),
            "attention_mask": np.array([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        },
        non_tensor_batch={
            "reward_model": np.array([{"ground_truth": "4"}, {"ground_truth": "5 6"}]),
            "extra_info": np.array([{"index": 0}, {"index": 1}]),
            "raw_prompt": np.array([[{"role": "user", "content": "?"}]] * 2),
        },
    )


async def test_manager_scores_concurrent_rows(folder: Path) -> None:
    section = {"reward": "graded.py:graded", "folder": str(folder), "options": {"bonus": 0.5}, "metrics": ["format"]}
    manager = RewardKitManager(config(section), Words(), compute_score=None)
    found = await asyncio.gather(*(manager.run_single(rows()[row : row + 1]) for row in (0, 1, 0)))
    assert [one["reward_score"] for one in found] == [1.5, 1.5, 1.5]
    assert found[0]["reward_extra_info"] == {"score": 1.5, "format": 0.25, "is_scored": 1.0}
    await manager.held.close()


async def test_manager_uses_the_function_loaded_by_verl() -> None:
    async def call_with_kwargs(raw_fn: Any, extra: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("verl's own way to call it")

    loaded = functools.partial(call_with_kwargs, graded, {"bonus": 0.25})
    manager = RewardKitManager(config(path="rewards.py"), Words(), loaded)
    # The user's turn of the prompt is there: one message more.
    assert (await manager.run_single(rows()[:1]))["reward_score"] == 2.25
    assert (await manager.run_single(rows()))["reward_score"] == 2.25  # of several rows the last one
    with pytest.raises(ConfigError, match=r"no reward is set; set \+reward\.reward_kit\.reward=file\.py:function"):
        RewardKitManager(config(), Words(), loaded)
    with pytest.raises(ConfigError, match=r"reward\.reward_kit\.bonus: unknown key"):
        RewardKitManager(config({"reward": "graded.py:graded", "bonus": 1}), Words(), None)


async def test_manager_scores_the_full_attached_episode() -> None:
    given = collected(2)
    found = verl_rows(given.episodes, given.steps, pad_token_id=0)
    manager = RewardKitManager(config(path="rewards.py"), Words(), _turns)
    scores = [(await manager.run_single(found[row : row + 1]))["reward_score"] for row in range(len(found))]
    lengths = found.non_tensor_batch["episode_lengths"]
    assert scores == [length + 0.5 for length in lengths.tolist()]
    # In verl's reward loop it comes in the extra fields of the agent loop.
    extra = np.array([{"reward_kit_episode": found.non_tensor_batch["reward_kit_episode"][0]}])
    row = rows()[:1]
    row.non_tensor_batch["tool_extra_fields"] = extra
    assert (await manager.run_single(row))["reward_score"] == lengths[0] + 0.5


@reward_function
def _turns(messages, ground_truth, assistant_turns):
    return {"score": len(assistant_turns) + 0.5 * (ground_truth == ["egg", 2])}


async def test_unscored_row_raises_or_is_nan() -> None:
    raising = RewardKitManager(config(path="r.py"), Words(), _never)
    with pytest.raises(RewardError, match="is unscored"):
        await raising.run_single(rows())
    with_nan = RewardKitManager(config({"on_unscored": "mask"}, path="r.py"), Words(), _never)
    found = await with_nan.run_single(rows())
    assert math.isnan(found["reward_score"]) and found["reward_extra_info"]["is_scored"] == 0.0


@reward_function
def _never(messages):
    raise ValueError("never")


def test_scores_are_on_the_last_sampled_token_and_nan_is_kept() -> None:
    batch = {**rows().batch, "response_mask": np.array([[1, 0, 0], [1, 0, 0]])}  # the last word is a tool's
    placed = RewardKitManager.assemble_rm_scores(TokenBatch(batch), [1.0, 0.5])
    assert placed.tolist() == [[1, 0, 0], [0.5, 0, 0]]
    empty = {**batch, "response_mask": np.array([[0, 0, 0], [1, 0, 0]])}
    assert not RewardKitManager.assemble_rm_scores(TokenBatch(empty), [1.0, 0.5])[0].any()
    lost = RewardKitManager.assemble_rm_scores(TokenBatch(batch), [math.nan, 0.5])
    assert torch.isnan(lost).tolist() == [[True, False, False], [False] * 3]
