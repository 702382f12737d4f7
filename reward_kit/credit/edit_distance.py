"""How far two texts are apart, in insertions and deletions. By rapidfuzz, which the extra `similarity` installs.

The distance is |a| + |b| - 2 LCS(a, b), with LCS the length of the longest common subsequence. It is a metric, and the
similarity 2 LCS(a, b) / (|a| + |b|) is 1 minus the distance over |a| + |b|.
"""

from __future__ import annotations

from rapidfuzz.distance import Indel


def similarity(a: str, b: str) -> float:
    """2 LCS(a, b) / (|a| + |b|), in [0, 1]; 1.0 for two empty texts.

    The ratio that `difflib.SequenceMatcher` reports where its blocks happen to be a longest common subsequence, and
    never less than it: no symbol is left out for being frequent, and the order of the arguments does not matter.
    """
    total = len(a) + len(b)
    return (total - Indel.distance(a, b)) / total if total else 1.0


def indel_distance(a: str, b: str, limit: int) -> int | None:
    """The exact distance, or None where it is above `limit`, which is found out much sooner."""
    distance = Indel.distance(a, b, score_cutoff=limit)
    return distance if distance <= limit else None
