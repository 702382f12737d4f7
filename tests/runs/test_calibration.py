"""Calibration of a reward against labels."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from reward_kit import EvaluateResult, Message, reward_function
from reward_kit.errors import ConfigError, RewardError
from reward_kit.reward_agent.in_process import InProcessScorer
from reward_kit.runs.calibration import (
    Pairwise,
    Pointwise,
    Settings,
    calibrate,
    infer_scale,
    pairwise_figures,
    pointwise_figures,
)
from reward_kit.runs.labels import read_labels
from reward_kit.typed_interface import reward_spec


def rows_of(tmp_path, rows, **options):
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_labels(path, **options)


def said(label, response, **more):
    return {"label": label, "prompt": "What?", "response": response, **more}


def pair(winner, a, b, **more):
    return {"winner": winner, "prompt": "What?", "response_a": a, "response_b": b, **more}


@reward_function
def written(messages: list[Message]) -> EvaluateResult:
    """Return the number at the start of the answer."""
    return EvaluateResult(score=float(messages[-1].text.split()[0]), reason=f"read {messages[-1].text[:20]}")


@reward_function
def longer(messages: list[Message], ground_truth: str) -> EvaluateResult:
    """Return whether the answer is longer than the other one."""
    mine, other = len(messages[-1].text), len(ground_truth)
    return EvaluateResult(score=0.5 if mine == other else float(mine > other))


async def done(rows, reward=written, settings=None, **options):
    settings = settings or Settings(resamples=100)
    return await calibrate(rows, InProcessScorer(reward_spec(reward)), settings, **options)


def by_name(figures):
    return {figure.name: figure for figure in figures}


# ---- single answers


async def test_figures_of_a_reward_equal_to_the_labels(tmp_path):
    rows = rows_of(
        tmp_path, [said(level, f"{(level - 1) / 4} {'x' * n}") for n, level in enumerate([1, 2, 3, 4, 5] * 6)]
    )
    found = by_name((await done(rows)).figures)
    for name in ("accuracy", "kappa", "kappa_quadratic", "spearman", "kendall_tau_b"):
        assert found[name].value == pytest.approx(1.0), name
    assert found["mean_difference"].value == pytest.approx(0.0)
    assert found["length_correlation"].value is None  # there is nothing left that length could explain
    assert found["accuracy"].high == 1.0 and 0.85 < found["accuracy"].low < 0.95  # thirty of thirty is not certainty
    assert {figure.n for figure in found.values()} == {30}


async def test_figures_of_an_imperfect_reward(tmp_path):
    """The labels and grades of `test_agreement`, whose kappa is 0.5, and 0.9 with quadratic weights."""
    labels = [1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 1, 3, 5, 2, 4]
    grades = [1, 2, 2, 4, 5, 4, 4, 3, 1, 1, 2, 3, 5, 3, 5]
    rows = rows_of(tmp_path, [said(label, f"{(grade - 1) / 4}") for label, grade in zip(labels, grades, strict=True)])
    found = by_name((await done(rows)).figures)
    values = {name: found[name].value for name in ("accuracy", "kappa", "kappa_quadratic", "spearman", "kendall_tau_b")}
    expected = {"accuracy": 0.6, "kappa": 0.5, "kappa_quadratic": 0.9, "spearman": 0.9, "kendall_tau_b": 0.8111111}
    assert values == pytest.approx(expected)
    for name, value in values.items():
        assert found[name].low < value < found[name].high


async def test_threshold_separates_binary_labels(tmp_path):
    rows = rows_of(tmp_path, [said("yes", "0.6"), said("no", "0.4"), said("yes", "0.9"), said("no", "0.5")])
    assert by_name((await done(rows)).figures)["accuracy"].value == 0.75
    assert by_name((await done(rows, settings=Settings(threshold=0.55))).figures)["accuracy"].value == 1.0
    assert by_name((await done(rows, settings=Settings(threshold=0.95))).figures)["accuracy"].value == 0.5


async def test_score_is_rounded_to_the_nearest_level(tmp_path):
    rows = rows_of(tmp_path, [said(1, "0.1"), said(3, "0.6"), said(5, "0.9"), said(3, "0.76")])
    assert by_name((await done(rows)).figures)["accuracy"].value == 0.75
    levels = Settings(levels=(1, 2, 3, 4, 5))
    assert by_name((await done(rows, settings=levels)).figures)["accuracy"].value == 0.75
    rows = rows_of(tmp_path, [said(1, "0.2"), said(3, "0.6"), said(5, "0.9")])
    assert by_name((await done(rows)).figures)["accuracy"].value == 1.0
    assert by_name((await done(rows, settings=levels)).figures)["accuracy"].value == pytest.approx(2 / 3)


async def test_labels_of_many_values_are_binned(tmp_path):
    rows = rows_of(tmp_path, [said(n, f"{n / 20}") for n in range(21)])
    result = await done(rows)
    assert result.scale.is_binned and by_name(result.figures)["accuracy"].value == 1.0
    assert result.to_json()["levels"] is None


async def test_length_bias_is_detected(tmp_path):
    chance = random.Random(5)
    liking, neutral = [], []
    for _ in range(200):
        label, length = chance.choice([1, 2, 3, 4, 5]), chance.randint(1, 400)
        base = (label - 1) / 4 * 0.6 + chance.uniform(-0.05, 0.05) + 0.1
        liking.append(said(label, f"{base + 0.2 * length / 400:.4f} {'x' * length}"))
        neutral.append(said(label, f"{base:.4f} {'x' * length}"))
    few = Settings(resamples=300)
    found = by_name((await done(rows_of(tmp_path, liking), settings=few)).figures)
    assert found["length_correlation"].low > 0.1 and found["length_gap"].low > 0.02
    found = by_name((await done(rows_of(tmp_path, neutral), settings=few)).figures)
    assert found["length_correlation"].low < 0 < found["length_correlation"].high
    assert found["length_gap"].low < 0 < found["length_gap"].high


async def test_score_bias_is_measured(tmp_path):
    rows = rows_of(tmp_path, [said(n % 2, f"{min(1.0, n % 2 + 0.3)}") for n in range(20)])
    found = by_name((await done(rows)).figures)["mean_difference"]
    assert found.value == pytest.approx(0.15) and found.low > 0


async def test_unscored_rows_are_counted_separately_and_not_as_zero(tmp_path):
    rows = rows_of(tmp_path, [said(1, "1.0"), said(0, "0.0"), said(1, "broken"), said(1, "1.0"), said(0, "0.0")])
    result = await done(rows)
    assert (result.rows, result.scored, dict(result.unscored)) == (5, 4, {"crash": 1})
    assert "broken" in result.first_error
    found = by_name(result.figures)
    assert (found["accuracy"].value, found["accuracy"].n, found["kappa"].value) == (1.0, 4, 1.0)


async def test_unscored_rows_have_no_figures(tmp_path):
    with pytest.raises(
        RewardError, match=r"none of the 2 rows could be scored; the first failed with: .*could not convert"
    ):
        await done(rows_of(tmp_path, [said(1, "x"), said(0, "y")]))


async def test_equal_labels_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="all labels are the same"):
        await done(rows_of(tmp_path, [said(1, "1"), said(1, "0")]))
    with pytest.raises(ConfigError, match="the label 3 is not among the levels 1, 2"):
        await done(rows_of(tmp_path, [said(1, "1"), said(3, "0")]), settings=Settings(levels=(1, 2)))


async def test_scores_out_of_range_are_clipped_and_reported(tmp_path):
    result = await done(rows_of(tmp_path, [said(1, "7"), said(0, "-3"), said(1, "0.9")]))
    assert result.clipped == 2 and by_name(result.figures)["accuracy"].value == 1.0


async def test_worst_disagreements_come_first_and_are_truncated(tmp_path):
    responses = ["0.5 close", "0.0 \x1b[31m" + "far " * 500, "1.0 right"]
    rows = rows_of(
        tmp_path, [said(1, text, id=f"q{n}") for n, text in enumerate(responses)] + [said(0, "0.9 bad", id="q3")]
    )
    result = await done(rows)
    assert [item.id for item in result.worst] == ["q1", "q3", "q0"]  # and not the one that agrees
    first = result.worst[0]
    assert (first.label, first.score, first.difference, first.prompt) == (1.0, 0.0, -1.0, "What?")
    assert first.where.endswith("labels.jsonl:2") and len(first.answers[0]) == 160 and "\x1b" not in first.answers[0]
    assert len((await done(rows, worst=1)).worst) == 1


async def test_figures_are_determined_by_the_seed_and_need_resamples_for_intervals(tmp_path):
    rows = rows_of(tmp_path, [said(n % 2, f"{random.Random(n).random():.3f}") for n in range(30)])
    one, again, other = [
        (await done(rows, settings=Settings(seed=seed, resamples=200))).to_json() for seed in (1, 1, 2)
    ]
    assert one == again != other
    assert all(figure.low is None for figure in (await done(rows, settings=Settings(resamples=0))).figures)
    assert json.loads(json.dumps(one)) == one


def test_rows_of_one_sample_make_wider_intervals():
    chance = np.random.default_rng(2)
    labels = np.repeat(chance.integers(0, 2, 25), 8).astype(float)
    scores = np.repeat(chance.random(25), 8)
    wide = pointwise_figures(
        Pointwise(labels, scores, [1] * 200, np.repeat(range(25), 8).tolist()), infer_scale(labels), Settings()
    )
    narrow = pointwise_figures(
        Pointwise(labels, scores, [1] * 200, range(200)), infer_scale(labels), Settings(resamples=300)
    )
    assert wide[0].high - wide[0].low > 1.5 * (narrow[0].high - narrow[0].low)
    assert wide[0].value == narrow[0].value


# ---- pairs


async def test_scores_of_both_answers_are_compared(tmp_path):
    rows = [pair("A", "0.9", "0.1"), pair("B", "0.2", "0.4"), pair("tie", "0.5", "0.5"), pair("B", "0.7", "0.6")] * 5
    result = await done(rows_of(tmp_path, rows))
    found = by_name(result.figures)
    assert found["accuracy"].value == 0.75
    assert found["a_wins"].value == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found["a_wins_labels"].value == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert "first_place_wins" not in found  # nothing was compared by place
    assert result.worst[0].answers == ("0.7", "0.6")


async def test_pairwise_judge_receives_both_orders(tmp_path):
    rows = rows_of(
        tmp_path, [pair("A", "long one", "short"), pair("B", "x", "xxx"), pair("B", "xx", "x")], pairs="judge"
    )
    found = by_name((await done(rows, longer, pairs="judge")).figures)
    assert found["accuracy"].value == pytest.approx(2 / 3)
    assert found["first_place_wins"].value == 0.5
    assert found["length_gap"].value == pytest.approx(1 / 3)


async def test_position_bias_of_a_judge_is_detected(tmp_path):
    @reward_function
    def first_wins(messages: list[Message], ground_truth: str) -> EvaluateResult:
        return EvaluateResult(score=1.0)

    chance = random.Random(3)
    rows = rows_of(tmp_path, [pair(chance.choice("AB"), "1", "2") for _ in range(20)], pairs="judge")
    found = by_name((await done(rows, first_wins, pairs="judge")).figures)
    assert found["first_place_wins"].value == 1.0
    assert found["accuracy"].value == 0.0 and found["spearman"].value is None


async def test_pairwise_length_bias_is_detected(tmp_path):
    chance = random.Random(4)
    pairs = []
    for n in range(120):
        pairs.append(
            pair(chance.choice("AB"), "x" * chance.randint(1, 99), "x" * (100 + n) if n % 2 else "x", id=str(n))
        )
    found = by_name((await done(rows_of(tmp_path, pairs, pairs="judge"), longer, pairs="judge")).figures)
    assert found["length_gap"].low > 0.2 and found["length_correlation"].low > 0


def test_pairwise_figures_match_values_by_hand():
    rows = Pairwise([1, 0, 0.5, 1], [1, 0, 1, 0.5], [0.3, -0.2, 0.1, 0.0], [5, -5, 0, 2], [None] * 4, range(4))
    found = by_name(pairwise_figures(rows, Settings(resamples=0)))
    assert found["accuracy"].value == 0.5
    # Agreement 2/4; by chance (1·1 + 1·1 + 2·2)/16; so (0.5 − 0.375)/(1 − 0.375).
    assert found["kappa"].value == pytest.approx(0.2)
    assert found["length_gap"].value == pytest.approx(-0.5 / 3)
    assert not math.isnan(found["kendall_tau_b"].value)


async def test_pair_with_an_unscored_answer_is_unscored(tmp_path):
    rows = rows_of(tmp_path, [pair("A", "1", "0"), pair("A", "1", "broken"), pair("B", "broken", "broken")])
    result = await done(rows)
    assert (result.scored, dict(result.unscored)) == (1, {"crash": 2})
