"""Test rewards in verl's reward loop: its worker, configuration and loading of files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from verl.experimental.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

from reward_kit.errors import RewardError
from reward_kit.integrations.verl.reward_loop import RewardKitManager, register_manager

pytestmark = pytest.mark.campaign

REWARD = """
from reward_kit import reward_function

@reward_function
def graded(messages, ground_truth, bonus: float = 0.0):
    if "word9" in messages[-1].text:
        raise ValueError("no answer")
    metrics = {"format": {"score": 0.25, "reason": "short"}}
    return {"score": (messages[-1].text == ground_truth) / len(messages) + bonus, "metrics": metrics}
"""
FOR_VERL = """
from pathlib import Path
from reward_kit.integrations.verl.compute_score import as_compute_score
compute_score = as_compute_score("graded.py:graded", folder=Path(__file__).parent)
plain = as_compute_score("graded.py:graded", folder=Path(__file__).parent, asynchronous=False, metrics=("format",))
"""
MANAGER = (
    "reward.reward_manager.source=importlib",
    "reward.reward_manager.module.path=pkg://reward_kit.integrations.verl.reward_loop",
    "reward.reward_manager.name=RewardKitManager",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graded.py").write_text(REWARD)
    (tmp_path / "for_verl.py").write_text(FOR_VERL)
    return tmp_path


def rows(*answers: list[int]) -> Any:
    """Return answers to a one-word question as verl's agent loop passes them to its reward loop."""
    width = max(map(len, answers))
    padded = [answer + [0] * (width - len(answer)) for answer in answers]
    attention = [[0, 1] + [1] * len(answer) + [0] * (width - len(answer)) for answer in answers]
    count = len(answers)
    return verl.DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 5]] * count),
            "responses": torch.tensor(padded),
            "attention_mask": torch.tensor(attention),
        },
        non_tensors={
            "data_source": np.array(["words"] * count, dtype=object),
            "reward_model": np.array([{"ground_truth": "word3 word4"}] * count, dtype=object),
            "extra_info": np.array([{"index": n} for n in range(count)], dtype=object),
            # verl makes it so: an array of lists becomes one of two axes.
            "raw_prompt": np.array([[{"role": "user", "content": "word5"}]] * count),
            "tool_extra_fields": np.array([{} for _ in range(count)], dtype=object),
        },
    )


async def test_two_line_file_is_a_custom_reward_function(configured: Callable[..., Any], folder: Path) -> None:
    path = f"reward.custom_reward_function.path={folder / 'for_verl.py'}"
    worker = RewardLoopWorker(configured(path))
    found = await worker.compute_score_batch(rows([3, 4], [3], [3, 4, 1]))
    assert [one["reward_score"] for one in found] == [1.0, 0.0, 1.0]
    plain = RewardLoopWorker(configured(path, "reward.custom_reward_function.name=plain"))
    found = await plain.compute_score_batch(rows([3, 4], [3]))
    assert [one["reward_extra_info"] for one in found] == [
        {"score": 1.0, "format": 0.25},
        {"score": 0.0, "format": 0.25},
    ]
    for failing in (worker, plain):
        with pytest.raises(RewardError, match=r"is unscored: .*ValueError: no answer"):
            await failing.compute_score_batch(rows([9]))


async def test_verl_loads_and_configures_the_manager(configured: Callable[..., Any], folder: Path) -> None:
    section = (
        "+reward.reward_kit.reward=graded.py:graded",
        f"+reward.reward_kit.folder={folder}",
        "+reward.reward_kit.options.bonus=0.125",
        "+reward.reward_kit.metrics=[format]",
        "+reward.reward_kit.on_unscored=mask",
    )
    worker = RewardLoopWorker(configured(*MANAGER, *section))
    # The prompt's chat is there, so that two messages share the point.
    found = await worker.compute_score_batch(rows([3, 4], [3], [9]))
    assert [one["reward_score"] for one in found[:2]] == [0.625, 0.125]
    assert math.isnan(found[2]["reward_score"]) and found[2]["reward_extra_info"]["is_scored"] == 0.0
    # verl takes the names of the first row for all.
    assert len({tuple(one["reward_extra_info"]) for one in found}) == 1
    rewards = worker.reward_manager.assemble_rm_scores(rows([3, 4], [3], [9]), [one["reward_score"] for one in found])
    assert rewards[:2].tolist() == [[0.0, 0.625], [0.125, 0.0]] and torch.isnan(rewards[2, 0])
    await worker.reward_manager.held.close()


async def test_registered_manager_uses_the_function_loaded_by_verl(
    configured: Callable[..., Any], folder: Path
) -> None:
    register_manager()
    register_manager()  # a second time does nothing
    assert get_reward_manager_cls("reward_kit") is RewardKitManager
    function = (
        f"reward.custom_reward_function.path={folder / 'graded.py'}",
        "reward.custom_reward_function.name=graded",
        "+reward.custom_reward_function.reward_kwargs.bonus=0.25",
    )
    worker = RewardLoopWorker(configured("reward.reward_manager.name=reward_kit", *function))
    found = await worker.compute_score_batch(rows([3, 4], [3]))
    assert [one["reward_score"] for one in found] == [0.75, 0.25]
    with pytest.raises(RewardError, match="no answer"):
        await worker.compute_score(rows([9]))
