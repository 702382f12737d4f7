"""Test the off-policy metrics: distance of samples from the trained policy, and alarms beyond each limit."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from reward_kit.rl.learner.config import OffPolicyLimits, PPOConfig
from reward_kit.rl.ppo import PPOLearner, explained_variance, version_lag
from tests.rl.learner.cases import Bigram, bigram_rows

pytestmark = pytest.mark.device


def test_lag_is_counted_in_versions_over_tokens() -> None:
    assert version_lag(np.array([5, 5, 3, -1, 4]), 5) == {"lag_mean": 0.75, "lag_max": 2.0, "lag_share": 0.5}
    assert version_lag(np.array([-1, -1]), 5) == {}


def test_explained_variance_is_one_for_a_perfect_and_zero_for_a_constant_critic() -> None:
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns) == {"explained_variance": 1.0}
    assert explained_variance(np.full(3, 7.0), returns) == {"explained_variance": 0.0}
    assert explained_variance(-returns, returns)["explained_variance"] < 0
    assert explained_variance(returns, np.ones(3)) == {}


@pytest.mark.parametrize(
    ("name", "fine", "beyond"),
    [
        ("logprob_gap_mean", 0.1, 0.11),
        ("approx_kl", 0.5, 0.6),
        ("clip_fraction", 0.5, 0.6),
        ("ratio_max", 1e4, 2e4),
        ("effective_share", 0.2, 0.1),
        ("lag_max", 8.0, 9.0),
        ("approx_kl", 0.5, float("nan")),
    ],
)
def test_exceeded_limit_gives_an_alarm_and_a_warning(
    name: str, fine: float, beyond: float, caplog: pytest.LogCaptureFixture
) -> None:
    limits = OffPolicyLimits()
    assert limits.alarms({name: fine}) == {}
    assert not caplog.records
    assert limits.alarms({name: beyond}).keys() == {f"alarm/{name}"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert name in record.message


def test_limit_of_none_is_disabled() -> None:
    assert OffPolicyLimits(lag_max=None).alarms({"lag_max": 1e9}) == {}


def test_stale_samples_raise_alarms() -> None:
    rows = bigram_rows([1.0, -1.0], policy_versions=np.array([[-1, 3], [-1, 12]]))
    rows.batch["logprobs"][:, 1] += [-0.5, -1.5]
    found = PPOLearner(Bigram(), PPOConfig()).update(rows, version=12)
    assert (found["lag_mean"], found["lag_max"], found["lag_share"]) == (4.5, 9.0, 0.5)
    assert (found["logprob_gap"], found["logprob_gap_mean"]) == pytest.approx((1.5, 1.0))
    ratios = np.exp([0.5, 1.5])
    assert (found["ratio_min"], found["ratio_max"]) == pytest.approx(tuple(ratios), rel=1e-5)
    assert found["effective_sample_size"] == pytest.approx(ratios.sum() ** 2 / (ratios**2).sum(), rel=1e-5)
    assert found["effective_share"] == pytest.approx(found["effective_sample_size"] / 2)
    assert found["alarm/lag_max"] == 9.0
    assert found["alarm/logprob_gap_mean"] == pytest.approx(1.0)


def test_logprob_gap_uses_the_module_before_the_update() -> None:
    rows = bigram_rows([1.0, -1.0, 1.0])
    config = PPOConfig(epochs=3, lr=0.5, limits=OffPolicyLimits(approx_kl=None))
    for options in ({}, {"old_logprobs": "recomputed"}):
        found = PPOLearner(Bigram(), PPOConfig(epochs=3, lr=0.5, **options)).update(rows, version=0)  # type: ignore[arg-type]
        assert found["logprob_gap"] < 1e-6
        assert found["approx_kl"] > 1e-3
    assert "alarm/approx_kl" not in PPOLearner(Bigram(), config).update(rows, version=0)
