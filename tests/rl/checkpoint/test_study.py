"""Test that the batch of a failed update is kept unchanged and reproduces the failure."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from reward_kit.episodes.allowed_ids import AllowedIds
from reward_kit.errors import TrainingError
from reward_kit.rl.checkpoint import load_batch_for_study, save_batch_for_study
from reward_kit.rl.learner.config import PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.tokens import TokenBatch
from tests.rl.checkpoint.state_values import same
from tests.rl.learner.cases import a_model, some_rows

pytestmark = pytest.mark.device


def test_study_keeps_the_batch_unchanged(tmp_path: Path) -> None:
    rows = TokenBatch(
        {
            "input_ids": np.arange(6, dtype=np.int32).reshape(2, 3),
            "logprobs": np.array([[0.0, -math.inf, math.nan]] * 2),
        },
        {
            "uid": np.array(["a", None], dtype=object),
            "extra_info": np.array([{"sample_id": "s", "score": math.nan}, {}], dtype=object),
            "allowed_ids": np.array([None, AllowedIds([2], [0, 2], [3, 5])], dtype=object),
            "multi_modal_inputs": np.array([object(), {}], dtype=object),
        },
        {"pad_token_id": 0, "padding": "right"},
    )
    first = save_batch_for_study(tmp_path, rows, {"loss": math.nan, "step": 7})
    second = save_batch_for_study(tmp_path, rows, {})
    assert [first.name, second.name] == ["study-000", "study-001"]
    found = load_batch_for_study(first)
    assert same(found.facts, {"loss": math.nan, "step": 7})
    assert same(found.rows.batch, rows.batch)
    assert found.rows.meta_info == rows.meta_info
    others = found.rows.non_tensor_batch
    assert others["multi_modal_inputs"][0].startswith("<object object")
    for key in ("uid", "extra_info", "allowed_ids"):
        assert same(others[key], rows.non_tensor_batch[key])


def test_other_files_in_the_studies_folder_are_kept(tmp_path: Path) -> None:
    for name in ("study-007", "study-007-notes", "study-9"):
        (tmp_path / name).mkdir()
    assert save_batch_for_study(tmp_path, some_rows(1), {}).name == "study-008"


def test_failure_is_reproduced_from_the_kept_batch_and_state(tmp_path: Path) -> None:
    config = PPOConfig(lr=1e-2, epochs=2, minibatches=4, max_tokens_per_micro_batch=60)
    learner = PPOLearner(a_model(), config, on_failure=partial(save_batch_for_study, tmp_path))
    learner.update(some_rows(seed=1), version=0)
    state, rows = copy.deepcopy(learner.state_dict()), some_rows()
    rows.batch["advantages"][5] = np.nan
    with pytest.raises(TrainingError) as first:
        learner.update(rows, version=1)
    study = load_batch_for_study(tmp_path / "study-000")
    # With the weights of that moment the mini-batch alone shows it, and no other one does.
    chosen = study.facts["rows"]
    assert 5 in chosen
    assert math.isnan(learner.gradients(study.rows[np.array(chosen)])["loss"])
    others = np.setdiff1d(np.arange(len(rows)), chosen)
    assert math.isfinite(learner.gradients(study.rows[others])["loss"])
    # From the last checkpoint the same order comes again, and the same step fails.
    again = PPOLearner(a_model(3), config)
    again.load_state_dict(state)
    with pytest.raises(TrainingError) as second:
        again.update(study.rows, version=1)
    assert str(first.value).startswith(str(second.value))
    assert again.optimizer_steps == study.facts["optimizer_step"]
