"""Test latencies of simulated reward calls: distributions by their moments, and calls of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from reward_kit.errors import ConfigError
from reward_kit.rl.overlap import parse_latency


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("constant:3", 3, 3, 3),
        ("uniform:1:40", 20.5, 1, 40),
        ("exponential:8", 8, 0, math.inf),
        ("lognormal:8:0.5", 8, 0, math.inf),
        ("lognormal:0:1", 0, 0, 0),
    ],
)
def test_distribution_has_the_configured_mean(text: str, mean: float, low: float, high: float) -> None:
    drawn = parse_latency(text).draw(np.random.default_rng(0), (200, 500))
    assert drawn.shape == (200, 500) and drawn.min() >= low and drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert str(parse_latency(text)) == text


def test_spread_of_a_lognormal_latency_is_on_the_log_scale() -> None:
    drawn = parse_latency("lognormal:8:0.5").draw(np.random.default_rng(0), (100_000,))
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:1:40", "unknown kind 'unifrom'; did you mean 'uniform'?"),
        ("empirical:1", "unknown kind 'empirical'"),
        ("uniform:1", "latency uniform needs 2 numbers; write it as uniform:LOW:HIGH"),
        ("uniform:1:x", "uniform needs numbers; write it as uniform:LOW:HIGH"),
        ("uniform:40:1", "LOW must be at most HIGH, got 40 and 1"),
        ("constant:-1", "-1 is not a finite non-negative number"),
        ("exponential:inf", "inf is not a finite non-negative number"),
        ("uniform:1e308:1e308", "1e+308 is above the maximum, 1e+08 seconds"),
        ("constant:nan", "nan is not a finite non-negative number"),
    ],
)
def test_impossible_latency_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_latency(text)
    assert message in str(refused.value)


def score_line(duration: object, **more: object) -> str:
    return json.dumps({"rollout_id": "r", "timing": {"duration_s": duration}, **more}) + "\n"


def test_latencies_are_drawn_from_the_calls_of_a_run(tmp_path: Path) -> None:
    lines = [score_line(1.5), score_line(4.0), *[score_line(2.0, scored_group="g")] * 3, score_line(2.0)]
    (tmp_path / "scores.jsonl").write_text("".join(lines) + '{"torn')
    latency = parse_latency(f"file:{tmp_path / 'scores.jsonl'}")
    assert latency.figures == (1.5, 4.0, 2.0, 2.0)  # the call for the group counts once
    assert parse_latency(f"file:{tmp_path}") == latency
    assert set(latency.draw(np.random.default_rng(0), (100,)).tolist()) == {1.5, 2.0, 4.0}
    assert str(latency) == "empirical, from 4 measured calls"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("", "has no scores with a duration"),
        (score_line(1) + "{}\n", "scores.jsonl:2 has no number at timing.duration_s"),
        (score_line("soon"), "scores.jsonl:1 has no number at timing.duration_s"),
        (score_line(-2), "timing.duration_s is -2, which is not a valid duration"),
        (score_line(math.nan), "timing.duration_s is nan, which is not a valid duration"),
    ],
)
def test_file_without_durations_is_rejected(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "scores.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"scores\.jsonl") as refused:
        parse_latency(f"file:{path}")
    assert message in str(refused.value)
