"""Statistics by SciPy, statsmodels and reward-kit on random data, and the file of the peers' results.

`python -m tests.runs.statistics.peers` writes `peers.json` again, where both are installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reward_kit.runs.statistics import (
    benjamini_hochberg,
    bootstrap_mean,
    cohens_dz,
    difference_interval,
    holm,
    mcnemar_test,
    mean_interval,
    paired_t_test,
    sign_flip_test,
    t_quantile,
    t_two_sided,
    wilson_bounds,
)

FILE = Path(__file__).with_name("peers.json")
Data = dict[str, Any]
Figures = dict[str, list[float]]


def random_data(seed: int) -> Data:
    """Return clustered scores of a run, paired differences, and counts; the seed sets their sizes and shapes."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(20, 60))
    draw: Callable[[int], Any] = [
        lambda n: rng.normal(0.3, 1.0, n),
        lambda n: rng.exponential(1.0, n),
        lambda n: rng.integers(0, 2, n).astype(float),
        lambda n: rng.integers(-3, 4, n).astype(float),
    ][seed % 4]
    return {
        "seed": seed,
        "scores": _rounded(draw(3 * size)),
        "clusters": rng.integers(0, size, 3 * size).tolist(),
        # So many, and with so many digits, that no draw has the mean of all but for rounding: SciPy sees no tie there.
        "differences": (draw(size) + rng.normal(0, 0.01, size)).tolist(),
        "few": _rounded(draw(int(rng.integers(3, 13)))),
        "t": [round(float(rng.normal(0, 2)), 6), int(rng.integers(1, 3_000))],
        "counts": rng.integers(0, 40, 2).tolist(),
        "p_values": _rounded(rng.random(6) ** 3),
    }


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]


def ours(data: Data) -> Figures:
    """Return the statistics by reward-kit."""
    scores, deltas, (t, df) = data["scores"], data["differences"], data["t"]
    mean, difference = mean_interval(scores, data["clusters"]), difference_interval(deltas)
    won, lost = data["counts"]
    return {
        "clustered mean": [mean.mean, mean.standard_error or 0.0, mean.low or 0.0, mean.high or 0.0],
        "paired t": [difference.mean, difference.low or 0.0, difference.high or 0.0, paired_t_test(deltas) or 0.0],
        "sign flips": [sign_flip_test(data["few"]).p],
        "percentile": list(bootstrap_mean(deltas, seed=data["seed"], resamples=999, method="percentile")),  # type: ignore[arg-type]
        "bca": list(bootstrap_mean(deltas, seed=data["seed"], resamples=999)),  # type: ignore[arg-type]
        "student": [t_two_sided(t, df), t_quantile(0.975, df), t_quantile(0.8, df)],
        "mcnemar": [mcnemar_test(won, lost)],
        "wilson": list(wilson_bounds(won / (won + lost), won + lost)),
        "holm": holm(data["p_values"]),
        "benjamini-hochberg": benjamini_hochberg(data["p_values"]),
        "cohens_dz": [cohens_dz(deltas) or 0.0],
    }


def theirs(data: Data) -> Figures:
    """Return the statistics by SciPy and statsmodels."""
    from scipy import stats
    from statsmodels.regression.linear_model import OLS
    from statsmodels.stats.contingency_tables import mcnemar
    from statsmodels.stats.multitest import multipletests
    from statsmodels.stats.proportion import proportion_confint
    from statsmodels.stats.weightstats import DescrStatsW

    scores, deltas, (t, df) = np.array(data["scores"]), np.array(data["differences"]), data["t"]
    clustered = {"cov_type": "cluster", "cov_kwds": {"groups": data["clusters"]}, "use_t": True}
    mean = OLS(scores, np.ones(len(scores))).fit(**clustered)
    paired = stats.ttest_1samp(deltas, 0.0)
    few = np.array(data["few"])
    flips = stats.permutation_test(
        (few, np.zeros(len(few))), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=np.inf
    )

    def bootstrap(method: str) -> list[float]:
        drawn = {"n_resamples": 999, "rng": np.random.default_rng(data["seed"]), "batch": None}
        return list(stats.bootstrap((deltas,), np.mean, method=method, **drawn).confidence_interval)

    won, lost = data["counts"]
    return {
        "clustered mean": [mean.params[0], mean.bse[0], *mean.conf_int()[0]],
        "paired t": [deltas.mean(), *DescrStatsW(deltas).tconfint_mean(), paired.pvalue],
        "sign flips": [flips.pvalue],
        "percentile": bootstrap("percentile"),
        "bca": bootstrap("BCa"),
        "student": [2 * stats.t.sf(abs(t), df), stats.t.ppf(0.975, df), stats.t.ppf(0.8, df)],
        "mcnemar": [mcnemar([[0, won], [lost, 0]], exact=True).pvalue],
        "wilson": list(proportion_confint(won, won + lost, method="wilson")),
        "holm": multipletests(data["p_values"], method="holm")[1].tolist(),
        "benjamini-hochberg": multipletests(data["p_values"], method="fdr_bh")[1].tolist(),
        "cohens_dz": [deltas.mean() / deltas.std(ddof=1)],
    }


def write() -> None:
    """Write the peers' results for twenty data sets."""
    import scipy
    import statsmodels

    sets = [random_data(seed) for seed in range(20)]
    found = [{name: [float(value) for value in values] for name, values in theirs(data).items()} for data in sets]
    versions = {"scipy": scipy.__version__, "statsmodels": statsmodels.__version__, "numpy": np.__version__}
    FILE.write_text(json.dumps({"versions": versions, "data": sets, "figures": found}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write()
