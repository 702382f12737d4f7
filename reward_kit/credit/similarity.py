"""Grouping of strings by similarity, with distances computed by rapidfuzz (extra `similarity`).

Two strings a and b are similar if 2 LCS(a, b) / (|a| + |b|) is at least the threshold, where LCS is the length of their
longest common subsequence. The groups are the connected components of this relation. The groups do not depend on the
order of the strings, and two similar strings are always in the same group. Groups can form chains: if a is similar to
b, and b is similar to c, then all three are in one group, even if a and c differ greatly. Short strings that differ in
one word can be similar: at a threshold of 0.7, "You are in the kitchen." is similar to "You are in the bedroom." In
that case, raise the threshold, or use a hash that reads only the relevant part.

The distance between two strings is |a| + |b| - 2 LCS(a, b), which is the minimum number of insertions and deletions
that turn one string into the other. This distance is a metric. The similarity is 1 minus the distance divided by |a| +
|b|. The similarity is never lower than the ratio that `difflib.SequenceMatcher` computes. The two are equal if the
matching blocks form a longest common subsequence.

Most pairs are never compared:

1. Equal strings are merged.
2. Nearly equal strings are clustered around leaders, which are found through hashes of short pieces.
3. Because the distance is a metric, two clusters can contain a similar pair only if their leaders are close to each
   other. A single vectorized computation derives lower bounds on the distances between all leaders from their counts of
   characters, pairs and triples.
4. The remaining pairs are compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Indel

from reward_kit.credit.step_arrays import Codes, Floats


def indel_distance(a: str, b: str, limit: int) -> int | None:
    """Return the exact distance between two strings, or None if it exceeds `limit`.

    A low limit makes the computation much faster.
    """
    distance = Indel.distance(a, b, score_cutoff=limit)
    return distance if distance <= limit else None


Counts = npt.NDArray[Any]
_BUCKETS = (64, 1024, 4096)  # for symbols, adjacent pairs and adjacent triples
_CHANGED = (1, 3, 5)

# Runs of five distinguish strings that consist of the same few words. They are expensive, so they are counted only for
# leaders.
_FIVE_BUCKETS, _FIVE_CHANGED = 4096, 9
_SPREAD = 1_000_003  # maps the runs of five to buckets
_PIECE = 8
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
_BASE = 0x5851F42D4C957F2D

# If two strings are shorter than this, the sum of the differences of their counts fits into 16 bits because it is at
# most the sum of their lengths.
_SHORT_TEXTS = 10_000


@dataclass(frozen=True, slots=True)
class TextSketches:
    """Sketches of N strings, from which lower bounds on the distances between the strings are computed.

    One insertion or deletion changes the counts of characters by 1, the counts of adjacent pairs by at most 3 (one pair
    becomes two or two become one), the counts of triples by at most 5, and the counts of runs of five by at most 9. The
    total difference in each kind of count, divided by its number, is therefore a lower bound on the distance. Hash
    collisions can only lower the bounds.

    Attributes:
        texts: the strings.
        symbols: (buckets, N) the number of characters of each string in each bucket. Buckets whose count is the same in
            all strings are omitted, both here and in `runs`.
        runs: (N, buckets) the counts of adjacent pairs and the counts of adjacent triples.
        pieces: (N, up to 4) hashes of eight-character pieces. Similar strings probably have a hash in common.
    """

    texts: Sequence[str]
    symbols: Counts
    runs: tuple[Counts, Counts]
    pieces: list[list[int]]

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextSketches:
        """Compute the sketches of the strings."""
        longest = max(map(len, texts), default=0)
        kind = np.int16 if longest < _SHORT_TEXTS else np.int64
        counts = [np.zeros((len(texts), buckets), dtype=kind) for buckets in _BUCKETS]
        pieces = []
        for index, text in enumerate(texts):
            codes = _codes(text)
            runs = [codes, *_short_runs(codes)]
            for table, run, buckets in zip(counts, runs, _BUCKETS, strict=True):
                table[index] = np.bincount(run % buckets, minlength=buckets)
            pieces.append(_pieces(codes.astype(np.uint64)))
        symbols, pairs, triples = map(_varying, counts)
        return cls(texts, np.ascontiguousarray(symbols.T), (pairs, triples), pieces)

    def least_distances(self, index: int, others: Codes) -> Codes:
        """Return lower bounds (M,) on the distances from one string to M other strings."""
        bounds = _difference(self.symbols[:, others], self.symbols[:, index, None], axis=0)
        for table, changed in zip(self.runs, _CHANGED[1:], strict=True):
            bounds = np.maximum(bounds, -(-_difference(table[others], table[index], axis=1) // changed))
        return bounds

    def near_pairs(self, indices: Codes, reaches: Floats) -> Iterator[tuple[int, list[int]]]:
        """Yield pairs of strings that may be close to each other.

        Each item consists of a position in `indices` and a list of later positions, nearest first. The list contains
        each string whose distance from the first string may be at most the sum of the two reaches.
        """
        symbols, fives = np.ascontiguousarray(self.symbols[:, indices]), self._fives(indices)
        for row in range(len(indices) - 1):
            bounds = _difference(symbols[:, row + 1 :], symbols[:, row, None], axis=0)
            near = np.flatnonzero(bounds <= reaches[row + 1 :] + reaches[row]) + row + 1
            bounds = bounds[near - row - 1]
            for table, changed in zip(self.runs, _CHANGED[1:], strict=True):
                if len(near):
                    by_runs = _difference(table[indices[near]], table[indices[row]], axis=1)
                    is_near = by_runs <= (reaches[near] + reaches[row]) * changed
                    near, bounds = near[is_near], np.maximum(bounds, by_runs // changed)[is_near]
            if len(near):
                by_fives = _difference(fives[near], fives[row], axis=1)
                is_near = by_fives <= (reaches[near] + reaches[row]) * _FIVE_CHANGED
                near, bounds = near[is_near], np.maximum(bounds, by_fives // _FIVE_CHANGED)[is_near]
            if len(near):
                yield row, near[np.argsort(bounds, kind="stable")].tolist()

    def _fives(self, indices: Codes) -> Counts:
        """Return the number of five-character runs in each bucket, (M, buckets), for the strings at `indices`."""
        counts = np.zeros((len(indices), _FIVE_BUCKETS), dtype=self.symbols.dtype)
        for row, index in enumerate(indices.tolist()):
            pairs, triples = _short_runs(_codes(self.texts[index]))
            counts[row] = np.bincount((triples[:-2] * _SPREAD + pairs[3:]) % _FIVE_BUCKETS, minlength=_FIVE_BUCKETS)
        return _varying(counts)


def _codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _short_runs(codes: Codes) -> tuple[Codes, Codes]:
    """Return codes for adjacent pairs and for adjacent triples."""
    return codes[:-1] * 37 + codes[1:], codes[:-2] * 1369 + codes[1:-1] * 37 + codes[2:]


def _varying(counts: Counts) -> Counts:
    """Return the columns whose counts are not the same for all strings."""
    is_varying = (counts != counts[:1]).any(axis=0)
    return np.ascontiguousarray(counts[:, is_varying])


def _difference(many: Counts, one: Counts, axis: int) -> Codes:
    """Return the sums of the absolute differences.

    The sums are computed in the counts' data type, which is several times faster than computing them in int64.
    """
    difference = many - one
    np.abs(difference, out=difference)
    return difference.sum(axis=axis, dtype=difference.dtype)  # type: ignore[no-any-return]


def _pieces(codes: npt.NDArray[np.uint64]) -> list[int]:
    """Return four hashes of short pieces of the string (MinHash).

    For each of four random orders, the result contains the hash of the piece that comes first in that order.
    """
    if len(codes) < _PIECE:
        return []
    rolled = codes
    for step in (1, 2, 4):
        rolled = rolled[:-step] * np.uint64(pow(_BASE, step, 2**64)) + rolled[step:]
    rolled ^= rolled >> np.uint64(29)
    return [int((rolled * mix).min()) for mix in _MIX]


def similar_groups(texts: Sequence[str], groups_S: Codes, threshold: float) -> Codes:
    """Assign a number to each string so that similar strings in the same group have equal numbers.

    Args:
        texts: (S,) the strings.
        groups_S: (S,) the group of each string; only strings in the same group are compared.
        threshold: the minimum similarity, in (0, 1]. If it is 1, only equal strings are similar.

    Returns:
        (S,) the number of the connected component of each string.
    """
    keys = list(zip(groups_S.tolist(), texts, strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    members: dict[int, list[str]] = {}
    for group, text in numbers:
        members.setdefault(group, []).append(text)
    parts: list[int] = list(range(len(numbers)))
    for group, distinct in members.items():
        for part in components(distinct, threshold):
            first = numbers[group, distinct[part[0]]]
            for index in part:
                parts[numbers[group, distinct[index]]] = first
    return np.fromiter((parts[numbers[key]] for key in keys), dtype=np.int64, count=len(keys))


def components(texts: Sequence[str], threshold: float) -> list[list[int]]:
    """Return the connected components of distinct strings.

    Each component is a list of the positions of its members, in ascending order.
    """
    linker = _Linker(texts, threshold)
    if threshold < 1.0:
        linker.gather()
        linker.link_clusters()
    parts: dict[int, list[int]] = {}
    for index in range(len(texts)):
        parts.setdefault(linker.find(index), []).append(index)
    return list(parts.values())


@dataclass(slots=True)
class _TextCluster:
    """Strings that are similar to their leader.

    Attributes:
        leader: the position of the leader.
        members: the positions of the members, starting with the leader.
        distances: the distance between each member and the leader.
    """

    leader: int
    members: list[int] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)


class _Linker:
    """Joins the strings in one group until every pair of similar strings is in the same component."""

    def __init__(self, texts: Sequence[str], threshold: float) -> None:
        self._texts, self._threshold = texts, threshold
        self._parents = list(range(len(texts)))
        self._clusters: list[_TextCluster] = []
        self._sketches = TextSketches.of(texts if threshold < 1.0 else ())

    def find(self, index: int) -> int:
        """Return the position that represents the component of the string at `index`."""
        parents = self._parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def _join(self, a: int, b: int) -> None:
        self._parents[self.find(a)] = self.find(b)

    def _limit(self, a: int, b: int) -> int:
        """Return the maximum distance at which two strings are similar."""
        total = len(self._texts[a]) + len(self._texts[b])
        limit = math.ceil((1.0 - self._threshold) * total)
        # Use the same division as the similarity, so that rounding cannot make the results differ.
        while limit and (total - limit) / total < self._threshold:
            limit -= 1
        return limit

    def _distance(self, a: int, b: int, limit: int) -> int | None:
        return indel_distance(self._texts[a], self._texts[b], limit)

    def gather(self) -> None:
        """Add each string to a cluster with a similar leader, or make it the leader of a new cluster."""
        by_piece: dict[int, _TextCluster] = {}
        for index, pieces in enumerate(self._sketches.pieces):
            candidates = {id(by_piece[piece]): by_piece[piece] for piece in pieces if piece in by_piece}
            cluster = self._near(index, list(candidates.values()))
            for piece in pieces:
                by_piece.setdefault(piece, cluster)

    def _near(self, index: int, candidates: list[_TextCluster]) -> _TextCluster:
        for cluster in candidates:
            distance = self._distance(cluster.leader, index, self._limit(cluster.leader, index))
            if distance is not None:
                cluster.members.append(index)
                cluster.distances.append(distance)
                self._join(index, cluster.leader)
                return cluster
        self._clusters.append(_TextCluster(index, [index], [0]))
        return self._clusters[-1]

    def link_clusters(self) -> None:
        """Join all pairs of clusters that contain a similar pair."""
        leaders = np.array([cluster.leader for cluster in self._clusters], dtype=np.int64)
        # If two clusters contain a similar pair a and b, the distance of their leaders is at most the sum of the two
        # reaches. By the triangle inequality, it is at most D(a, b) plus both radii, and D(a, b) is at most (1 -
        # threshold) (|a| + |b|).
        reaches = np.array([self._reach(cluster) for cluster in self._clusters])
        for row, near in self._sketches.near_pairs(leaders, reaches):
            for other in near:
                one, two = self._clusters[row], self._clusters[other]
                if self.find(one.leader) != self.find(two.leader):
                    self._link(one, two, int(reaches[row] + reaches[other]))

    def _reach(self, cluster: _TextCluster) -> float:
        longest = max(len(self._texts[index]) for index in cluster.members)
        return (1.0 - self._threshold) * longest + max(cluster.distances) + 1e-6 * longest

    def _link(self, one: _TextCluster, two: _TextCluster, reach: int) -> None:
        distance = self._distance(one.leader, two.leader, reach)
        if distance is None:
            return
        if distance <= self._limit(one.leader, two.leader) or self._has_similar_pair(one, two, distance):
            self._join(one.leader, two.leader)

    def _has_similar_pair(self, one: _TextCluster, two: _TextCluster, distance: int) -> bool:
        """Return True if two clusters, whose leaders are `distance` apart, contain a similar pair."""
        for a, radius in zip(one.members, one.distances, strict=True):
            least = self._sketches.least_distances(a, np.array(two.members))
            least = np.maximum(least, distance - radius - np.array(two.distances))
            for position in np.argsort(least, kind="stable").tolist():
                b = two.members[position]
                limit = self._limit(a, b)
                if least[position] <= limit and self._distance(a, b, limit) is not None:
                    return True
        return False
