"""Tolerances for two floating-point computations of one number, derived from the precision they are made in.

Processors, thread counts and batch shapes decide the order of a sum, and with it the last bits. Bit equality is
asserted only where the package promises it: the same computation again, on one machine with one number of threads.
"""

from __future__ import annotations

import numpy as np


def rounding_error(terms: int, dtype: str = "float32", magnitude: float = 1.0) -> float:
    """Return how far two sums of the same numbers in different orders can differ.

    Each sum of n terms is off by at most (n - 1) · eps / 2 · Σ|x| (Higham, "Accuracy and Stability of Numerical
    Algorithms", 2nd edition, section 4.2), so two of them differ by at most n · eps · Σ|x|.

    Args:
        terms: n, of the longest sum that contributes.
        dtype: the precision of the less precise computation.
        magnitude: Σ|x|.
    """
    return terms * float(np.finfo(dtype).eps) * magnitude
