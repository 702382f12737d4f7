"""Correction of p-values for multiple comparisons."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_kit.runs.statistics import benjamini_hochberg, holm

p_values = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_corrections_match_values_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.02, 0.04, 0.04, 0.02])


@pytest.mark.parametrize("correction", [holm, benjamini_hochberg])
class TestEither:
    @settings(deadline=None)
    @given(p_values, st.randoms(use_true_random=False))
    def test_order_does_not_matter_and_is_kept(self, correction, given_p, rng):
        places = list(range(len(given_p)))
        rng.shuffle(places)
        corrected = correction(given_p)
        assert correction([given_p[at] for at in places]) == pytest.approx([corrected[at] for at in places])
        pairs = sorted(zip(given_p, corrected, strict=True))
        assert [one for _, one in pairs] == sorted(corrected)

    @settings(deadline=None)
    @given(p_values)
    def test_corrected_p_values_are_not_smaller_and_at_most_1(self, correction, given_p):
        assert all(p <= one + 1e-15 and one <= 1.0 for p, one in zip(given_p, correction(given_p), strict=True))

    def test_single_p_value_is_unchanged(self, correction):
        assert correction([0.037]) == [0.037]
        assert correction([]) == []

    @pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
    def test_invalid_p_value_is_rejected(self, correction, bad):
        with pytest.raises(ValueError, match="between 0 and 1"):
            correction([0.5, bad])


@settings(deadline=None)
@given(p_values)
def test_holm_is_never_below_benjamini_and_hochberg(given_p):
    assert all(one >= other - 1e-15 for one, other in zip(holm(given_p), benjamini_hochberg(given_p), strict=True))


@settings(deadline=None)
@given(p_values)
def test_holm_agrees_with_the_stepwise_procedure(given_p):
    """Holm's procedure rejects in ascending order while p_(i) <= alpha/(m - i + 1)."""
    alpha, rejected = 0.05, set()
    for place, at in enumerate(sorted(range(len(given_p)), key=given_p.__getitem__)):
        if given_p[at] * (len(given_p) - place) > alpha:
            break
        rejected.add(at)
    assert {at for at, p in enumerate(holm(given_p)) if p <= alpha} == rejected
