"""Test that the page on metrics names every metric of training, evaluation and the reward agent.

`tests/rl/training/test_session.py` holds a whole run against the page; here is what one run does not show: figures of
other losses, of a critic, of alarms, of every reason and failure class.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from reward_kit.agent.models import StopReason
from reward_kit.agent.policies.hf.model import PolicyWithValue
from reward_kit.credit.diagnostics import credit_diagnostics
from reward_kit.credit.group_filter import DropReason
from reward_kit.credit.step_credit import StepCredit
from reward_kit.errors import FAILURE_CLASSES, Failure
from reward_kit.reward_agent.stats import AgentStats
from reward_kit.rl.learner.config import OffPolicyLimits, PPOConfig
from reward_kit.rl.ppo import PPOLearner
from reward_kit.rl.training.config import SELECTION_METRICS
from reward_kit.rl.training.figures import prefixed, score_figures
from tests.docs.conftest import DOCS
from tests.rl.learner.cases import a_model, some_rows

PAGE = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([a-z_0-9]+/[a-zA-Z_0-9/<>]+)`", PAGE)
PATTERNS = [re.compile(re.sub(r"<\w+>", r"[\\w.*]+", name)) for name in NAMED]


def unexplained(names: Any) -> list[str]:
    return sorted(name for name in names if not any(pattern.fullmatch(name) for pattern in PATTERNS))


def test_missing_name_is_detected() -> None:
    assert unexplained(["held_out/score", "held_out/scores"]) == ["held_out/scores"]


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "ppo", "dual_clip": 3.0, "kl_coefficient": 0.1, "kl_target": 1.0, "entropy_coefficient": 0.1},
        {"loss": "gspo", "importance": "sequence", "value_lr": 0.1, "lr_by_name": {"*norm*": 0.1}},
        {"loss": "cispo", "importance": "token", "old_logprobs": "recomputed"},
        {"loss": "decoupled", "limits": {"lag_max": 0.0, "ratio_max": 0.0, "clip_fraction": 0.0, "grad_norm": 0.0}},
    ],
    ids=lambda options: str(options["loss"]),
)
def test_learner_metrics_are_listed(options: dict[str, Any]) -> None:
    options = {**options, "limits": OffPolicyLimits(**options.get("limits", {}))}
    learner = PPOLearner(PolicyWithValue(a_model()), PPOConfig(lr=1e-3, **options), reference=a_model(seed=1))
    found = learner.update(some_rows(), version=1)
    assert {"loss", "value_loss", "explained_variance", "lag_mean"} <= found.keys()
    assert unexplained(prefixed("learner", found)) == []


def test_score_metrics_are_listed() -> None:
    failures = [Failure(name, "RewardError", "it broke") for name in FAILURE_CLASSES]
    figures = score_figures([0.5, 1.0, *[None] * len(failures)], failures, 1.0)
    assert len(figures) == 5 + len(FAILURE_CLASSES)
    assert unexplained(prefixed("score", figures)) == []
    held_out = {"score" if name == "mean" else name: value for name, value in figures.items()}
    assert unexplained(prefixed("held_out", held_out)) == []
    assert unexplained(SELECTION_METRICS) == []


def test_stop_and_drop_reasons_are_listed() -> None:
    assert unexplained(f"episode/stop/{reason}_share" for reason in StopReason) == []
    assert unexplained(f"groups/dropped/{reason}" for reason in DropReason) == []
    assert all(f"`{reason}`" in PAGE for reason in DropReason)


def test_credit_metrics_are_listed() -> None:
    values_S, anchors_S = np.array([1.0, 0.0, -1.0, 0.5]), np.array([4, 5, 4, 6])
    credit = StepCredit(values_S, values_S, values_S, values_S, anchors_S)
    figures = credit_diagnostics(credit, [2, 2], [1.0, 0.0]).summary()
    assert len(figures) == 12
    assert unexplained(figures) == []


def test_reward_agent_metrics_are_listed() -> None:
    known = {name: 1 for name in AgentStats.__slots__ if name != "failed"}
    figures = AgentStats(**known, failed=dict.fromkeys(FAILURE_CLASSES, 1)).metrics()  # type: ignore[arg-type]
    assert len(figures) == len(AgentStats.__slots__) + len(FAILURE_CLASSES)
    assert unexplained(figures) == []
