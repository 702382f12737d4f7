"""Agreement with SciPy and statsmodels to 1e-9 on random data: stored results and installed versions."""

from __future__ import annotations

import json

import pytest

from tests.runs.statistics.peers import FILE, ours, random_data, theirs

KEPT = json.loads(FILE.read_text())


@pytest.mark.parametrize("place", range(20))
def test_agrees_with_scipy_and_statsmodels(place):
    """`peers.json`: SciPy 1.17.1 and statsmodels 0.15.0."""
    found = ours(KEPT["data"][place])
    assert found.keys() == KEPT["figures"][place].keys()
    for name, expected in KEPT["figures"][place].items():
        assert found[name] == pytest.approx(expected, abs=1e-9, rel=1e-9), name


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(10))
def test_agrees_with_installed_scipy_and_statsmodels(part):
    pytest.importorskip("scipy")
    pytest.importorskip("statsmodels")
    for seed in range(30 * part, 30 * part + 30):
        data = random_data(seed)
        found = ours(data)
        for name, expected in theirs(data).items():
            assert found[name] == pytest.approx(expected, abs=1e-9, rel=1e-9), (name, seed)
