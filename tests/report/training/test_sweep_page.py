"""Test the page of a sweep, without processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reward_kit.report.sweep_page import SweepTable, arm_curves, draw_curves, write_sweep_page
from reward_kit.report.training_data import read_training
from tests.report.training.training_run_factory import make_training, update

HOSTILE = "</td><script>alert(1)</script>\x1b[2J\u202e"


def run_of_arm(folder: Path, name: str, scores: list[float], *, steps: float = 32.0) -> Path:
    lines = [
        (number, update(number, score__mean=score, progress__env_steps=steps * number))
        for number, score in enumerate(scores, 1)
    ]
    return make_training(folder, lines).rename(folder / name)


def test_curve_is_the_mean_and_the_extremes_over_the_steps_that_all_seeds_reached(tmp_path: Path) -> None:
    first = run_of_arm(tmp_path, "gigpo-0", [0.0, 0.4, 0.8])
    second = run_of_arm(tmp_path, "gigpo-1", [0.2, 0.4], steps=40.0)
    runs = {"gigpo": [read_training(first), read_training(second)]}
    (curve,) = arm_curves(runs, "score/mean")
    assert (curve.steps_P[0], curve.steps_P[-1]) == (40.0, 80.0)
    # The first run scores 0.1 at 40 steps and 0.6 at 80.
    assert curve.mean_P[[0, -1]] == pytest.approx([0.15, 0.5])
    assert curve.low_P[[0, -1]] == pytest.approx([0.1, 0.4]) and curve.high_P[[0, -1]] == pytest.approx([0.2, 0.6])
    assert arm_curves(runs, "held_out/score") == []


def test_curve_of_one_point_is_drawn(tmp_path: Path) -> None:
    curves = arm_curves({"a": [read_training(run_of_arm(tmp_path, "a-0", [0.5]))]}, "score/mean")
    assert np.array_equal(curves[0].steps_P, [32.0])
    assert next(path.d for path in draw_curves("Score", curves).paths if path.kind == "line l0").endswith("h3")


def page_of(folder: Path) -> str:
    run_of_arm(folder, "gigpo-0", [0.1, 0.2])
    (folder / "gigpo-0" / "report.html").write_text("the page of the run")
    runs: dict[str, dict[str, Any]] = {
        "gigpo": {"0": {"status": "complete", "updates": 2, "env_steps": 64}},
        "grpo": {"0": {"status": "failed", "error": HOSTILE}},
    }
    summary = {
        "name": HOSTILE,
        "status": "failed",
        "baseline": "gigpo",
        "seeds": [0],
        "notes": [HOSTILE],
        "arms": {arm: {"runs": of_arm} for arm, of_arm in runs.items()},
    }
    table = SweepTable("By chore", ["category", "gigpo"], [[HOSTILE, "0.5"]])
    return write_sweep_page(folder, summary, [table]).read_text()


def test_page_links_to_the_pages_of_runs_that_exist(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert re.findall(r'<a class="stranger" href="([^"]+)">', page) == ["gigpo-0/report.html"]
    assert "grpo-0" in page and "2</td>" in page and "64</td>" in page


def test_page_escapes_untrusted_text_and_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)=\"https?:", page)
