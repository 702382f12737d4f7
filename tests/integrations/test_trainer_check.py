"""Test what the check of trainers reports on the advantages and losses of verl and TRL themselves.

A change here is a change in their code: then the tables in `docs/guides/check_trainers.md` change, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.peers import PYTHON, Peer

pytestmark = pytest.mark.campaign

VERL = {"not-finite", "episode-per-row", "masked-rewards"}
"""The findings with every estimator: verl has no missing scores and no episodes of several rows."""


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    if not PYTHON.exists():
        pytest.skip("verl and TRL are not installed; run `make integrations`")
    with Peer("trainer_check_side.py", tmp_path_factory.mktemp("trainer_check_side")) as peer:
        yield peer


def all_causes(found: dict[str, Any]) -> set[str]:
    return {cause for causes in found.values() for cause in causes}


@pytest.mark.parametrize(
    ("estimator", "causes"),
    [
        ("grpo", VERL | {"divides-by-std", "group-of-one-raw", "row-mean"}),
        ("rloo", VERL | {"group-of-one-raw", "row-mean"}),
        ("rloo_vectorized", VERL | {"group-of-one-skipped", "row-mean"}),
        ("gpg", VERL | {"mean-includes-own", "group-of-one-raw", "row-mean"}),
        ("reinforce_plus_plus", {"not-finite", "whitened-tokens", "row-mean"}),
    ],
)
def test_estimators_of_verl(learners: Peer, estimator: str, causes: set[str]) -> None:
    assert all_causes(learners.ask("verl", estimator=estimator, aggregation="seq-mean-token-sum")) == causes


@pytest.mark.parametrize(
    ("aggregation", "causes"),
    [
        ("token-mean", {"token-mean"}),
        ("seq-mean-token-sum", set()),
        ("seq-mean-token-mean", {"length-weighted"}),
        ("seq-mean-token-sum-norm", {"padding-counted"}),
    ],
)
def test_aggregations_of_verl(learners: Peer, aggregation: str, causes: set[str]) -> None:
    found = learners.ask("verl", estimator="rloo", aggregation=aggregation)
    assert set(found["lengths"]) == set(found["micro-batches"]) == causes


def test_verl_geometric_mean_loss_depends_on_the_number_of_micro_batches(learners: Peer) -> None:
    found = learners.ask("verl", estimator="rloo", policy_loss="geo_mean")
    assert set(found["micro-batches"]) - set(found["lengths"]) == {"micro-batch-scale"}


def test_verl_without_the_size_of_the_batch_depends_on_the_split(learners: Peer) -> None:
    found = learners.ask("verl", estimator="rloo", aggregation="token-mean", per_micro_batch=True)
    assert found["micro-batches"] == ["micro-batch-mean"]


@pytest.mark.parametrize(
    ("options", "causes"),
    [
        ({}, {"divides-by-std", "token-mean"}),
        ({"scale_rewards": "none"}, {"mean-includes-own", "token-mean"}),
        ({"scale_rewards": "none", "loss_type": "dr_grpo"}, {"mean-includes-own"}),
        ({"scale_rewards": "none", "loss_type": "grpo"}, {"mean-includes-own", "length-weighted"}),
        ({"scale_rewards": "none", "loss_type": "bnpo"}, {"mean-includes-own", "token-mean", "micro-batch-mean"}),
    ],
)
def test_losses_of_trl(learners: Peer, options: dict[str, Any], causes: set[str]) -> None:
    found = learners.ask("trl", **options)
    assert all_causes(found) == causes
    assert {"unscored episode", "observations", "micro-batches"} <= found.keys()
