"""How far two texts are apart, in insertions and deletions. By rapidfuzz, which the extra `similarity` installs.

The distance is |a| + |b| - 2 LCS(a, b), with LCS the length of the longest common subsequence. It is a metric, and the
similarity 2 LCS(a, b) / (|a| + |b|) is 1 minus the distance over |a| + |b|: the ratio that `difflib.SequenceMatcher`
reports where its blocks happen to be a longest common subsequence, and never less.
"""

from __future__ import annotations

from rapidfuzz.distance import Indel


def indel_distance(a: str, b: str, limit: int) -> int | None:
    """The exact distance, or None where it is above `limit`, which is found out much sooner."""
    distance = Indel.distance(a, b, score_cutoff=limit)
    return distance if distance <= limit else None
