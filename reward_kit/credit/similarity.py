"""Grouping of texts by similarity, with distances computed by rapidfuzz (extra `similarity`).

Two texts are similar if 2 LCS / (|a| + |b|) is at least the threshold, where LCS is the length of their longest common
subsequence. The groups are the connected components of this relation, so they do not depend on the order of the texts,
and two similar texts are always in the same group. Groups can chain: if a is similar to b and b to c, all three are in
one group, however far a is from c. Short texts that differ in one word can be similar ("You are in the kitchen." and
"You are in the bedroom." at 0.7); raise the threshold, or use a hash that reads only the relevant part.

Most pairs are not compared. Equal texts are merged. Near copies are then clustered around leaders, which are found by
hashes of text pieces. Since the distance is a metric, two clusters can contain a similar pair only if their leaders are
near each other. Counts of symbols and symbol pairs give lower bounds of these distances for all leaders at once. The
remaining pairs are compared exactly.

The distance is |a| + |b| - 2 LCS(a, b), in insertions and deletions; it is a metric. The similarity is 1 minus the
distance over |a| + |b|. It is at least the ratio of `difflib.SequenceMatcher`, and equal to that ratio if the matching
blocks form a longest common subsequence.
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
    """Return the exact distance, or None if it is above `limit`, which is much faster to determine."""
    distance = Indel.distance(a, b, score_cutoff=limit)
    return distance if distance <= limit else None


Counts = npt.NDArray[Any]
_BUCKETS = (64, 1024, 4096)  # for symbols, adjacent pairs and adjacent triples
_CHANGED = (1, 3, 5)

# Runs of five distinguish texts that consist of the same few words. They are expensive, so only leaders have them.
_FIVE_BUCKETS, _FIVE_CHANGED = 4096, 9
_SPREAD = 1_000_003  # maps the runs of five to buckets
_PIECE = 8
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
_BASE = 0x5851F42D4C957F2D

# Below this length, the sum of the differences of two texts, which is at most the sum of their lengths, fits into 16
# bits.
_SHORT_TEXTS = 10_000


@dataclass(frozen=True, slots=True)
class TextSketches:
    """Sketches of N texts.

    One insertion or deletion changes the counts of symbols by 1, those of adjacent pairs by 3 (one pair becomes two, or
    vice versa), those of triples by 5 and those of runs of five by 9. The differences of the counts are therefore lower
    bounds of the distance. Hash collisions only lower the bounds.

    Attributes:
        texts: the texts.
        symbols: (buckets, N) the number of symbols in each bucket, for each text. Here and below, buckets with the same
            count in all texts are omitted.
        runs: (N, buckets) the counts of pairs, and of triples.
        pieces: (N, up to 4) hashes of pieces of eight symbols, which are likely to be equal for similar texts.
    """

    texts: Sequence[str]
    symbols: Counts
    runs: tuple[Counts, Counts]
    pieces: list[list[int]]

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextSketches:
        """Return the sketches of texts."""
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
        """Return (M,) lower bounds of the distances from one text to the others."""
        bounds = _difference(self.symbols[:, others], self.symbols[:, index, None], axis=0)
        for table, changed in zip(self.runs, _CHANGED[1:], strict=True):
            bounds = np.maximum(bounds, -(-_difference(table[others], table[index], axis=1) // changed))
        return bounds

    def near_pairs(self, indices: Codes, reaches: Floats) -> Iterator[tuple[int, list[int]]]:
        """Yield each position in `indices` with the later positions that may be within the sum of their reaches,
        nearest first.
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
        """Return (M, buckets) the counts of runs of five in the texts at `indices`."""
        counts = np.zeros((len(indices), _FIVE_BUCKETS), dtype=self.symbols.dtype)
        for row, index in enumerate(indices.tolist()):
            pairs, triples = _short_runs(_codes(self.texts[index]))
            counts[row] = np.bincount((triples[:-2] * _SPREAD + pairs[3:]) % _FIVE_BUCKETS, minlength=_FIVE_BUCKETS)
        return _varying(counts)


def _codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _short_runs(codes: Codes) -> tuple[Codes, Codes]:
    """Return codes for the adjacent pairs and for the adjacent triples."""
    return codes[:-1] * 37 + codes[1:], codes[:-2] * 1369 + codes[1:-1] * 37 + codes[2:]


def _varying(counts: Counts) -> Counts:
    """Return the columns in which the texts differ."""
    is_varying = (counts != counts[:1]).any(axis=0)
    return np.ascontiguousarray(counts[:, is_varying])


def _difference(many: Counts, one: Counts, axis: int) -> Codes:
    """Return the sums of the absolute differences, in the type of the counts, which is several times faster."""
    difference = many - one
    np.abs(difference, out=difference)
    return difference.sum(axis=axis, dtype=difference.dtype)  # type: ignore[no-any-return]


def _pieces(codes: npt.NDArray[np.uint64]) -> list[int]:
    """Return, for each of four random orders, the hash of the text's first piece in that order (MinHash)."""
    if len(codes) < _PIECE:
        return []
    rolled = codes
    for step in (1, 2, 4):
        rolled = rolled[:-step] * np.uint64(pow(_BASE, step, 2**64)) + rolled[step:]
    rolled ^= rolled >> np.uint64(29)
    return [int((rolled * mix).min()) for mix in _MIX]


def similar_groups(texts: Sequence[str], groups_S: Codes, threshold: float) -> Codes:
    """Return (S,) a number for each component of similar texts within a group; equal numbers mean a shared state.

    The threshold is in (0, 1]; 1 groups only equal texts.
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
    """Return the connected components of distinct texts, each as the ascending positions of its members."""
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
    """Texts that are similar to their leader.

    Attributes:
        leader: the position of the leader.
        members: the positions of the members, starting with the leader.
        distances: the distance of each member to the leader.
    """

    leader: int
    members: list[int] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)


class _Linker:
    """Joins the texts of one group until every similar pair is in one component."""

    def __init__(self, texts: Sequence[str], threshold: float) -> None:
        self._texts, self._threshold = texts, threshold
        self._parents = list(range(len(texts)))
        self._clusters: list[_TextCluster] = []
        self._sketches = TextSketches.of(texts if threshold < 1.0 else ())

    def find(self, index: int) -> int:
        """Return the representative text of the component that contains a text."""
        parents = self._parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def _join(self, a: int, b: int) -> None:
        self._parents[self.find(a)] = self.find(b)

    def _limit(self, a: int, b: int) -> int:
        """Return the largest distance at which two texts are similar."""
        total = len(self._texts[a]) + len(self._texts[b])
        limit = math.ceil((1.0 - self._threshold) * total)
        # Use the same division as the similarity, so that rounding cannot make the results differ.
        while limit and (total - limit) / total < self._threshold:
            limit -= 1
        return limit

    def _distance(self, a: int, b: int, limit: int) -> int | None:
        return indel_distance(self._texts[a], self._texts[b], limit)

    def gather(self) -> None:
        """Add each text to a cluster with a similar leader, or make it the leader of a new cluster."""
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
        # If a and b are a similar pair of two clusters, their leaders are at most reach + reach apart: by the triangle
        # inequality, at most D(a, b) plus both radii, where D(a, b) is at most (1 - threshold) (|a| + |b|).
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
        """Return True if two clusters with leaders at `distance` contain a similar pair other than their leaders."""
        for a, radius in zip(one.members, one.distances, strict=True):
            least = self._sketches.least_distances(a, np.array(two.members))
            least = np.maximum(least, distance - radius - np.array(two.distances))
            for position in np.argsort(least, kind="stable").tolist():
                b = two.members[position]
                limit = self._limit(a, b)
                if least[position] <= limit and self._distance(a, b, limit) is not None:
                    return True
        return False
