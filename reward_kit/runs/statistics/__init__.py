"""How sure a figure is: intervals that respect samples with several rollouts, paired comparisons, unbiased pass@k."""

from reward_kit.runs.statistics.bootstrap import Bounds, bootstrap_bounds, bootstrap_mean
from reward_kit.runs.statistics.correction import benjamini_hochberg, holm
from reward_kit.runs.statistics.intervals import Interval, mean_interval, mean_of, wilson_bounds
from reward_kit.runs.statistics.paired import (
    PairedFigures,
    SignFlipTest,
    cohens_dz,
    difference_interval,
    mcnemar_test,
    paired_cliffs_delta,
    paired_figures,
    paired_t_test,
    sign_flip_test,
)
from reward_kit.runs.statistics.passes import SampleMean, mean_pass_at_k, mean_pass_hat_k, pass_at_k, pass_hat_k
from reward_kit.runs.statistics.power import minimum_detectable_difference, t_test_power
from reward_kit.runs.statistics.student import incomplete_beta, t_quantile, t_two_sided

__all__ = [
    "Bounds",
    "Interval",
    "PairedFigures",
    "SampleMean",
    "SignFlipTest",
    "benjamini_hochberg",
    "bootstrap_bounds",
    "bootstrap_mean",
    "cohens_dz",
    "difference_interval",
    "holm",
    "incomplete_beta",
    "mcnemar_test",
    "mean_interval",
    "mean_of",
    "mean_pass_at_k",
    "mean_pass_hat_k",
    "minimum_detectable_difference",
    "paired_cliffs_delta",
    "paired_figures",
    "paired_t_test",
    "pass_at_k",
    "pass_hat_k",
    "sign_flip_test",
    "t_quantile",
    "t_test_power",
    "t_two_sided",
    "wilson_bounds",
]
