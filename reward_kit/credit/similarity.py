"""Group texts by similarity: connected components of the similar pairs. Distances by rapidfuzz (extra `similarity`).

Two texts are similar where 2 LCS / (|a| + |b|) reaches the threshold, with LCS the length of their longest common
subsequence. The groups are the connected components of that relation, so they do not depend on the order of the texts,
and two similar texts are never apart. But groups chain: if a is similar to b and b to c, all three are together,
however far a is from c. Short texts that differ in one word can be similar ("You are in the kitchen." and "You are in
the bedroom." at 0.7); raise the threshold, or use a hash that reads only the relevant part.

Not all pairs are compared. Equal texts are merged. Near copies are first gathered around leaders, found by hashes of
their pieces. As the distance is a metric, two clusters can hold a similar pair only if their leaders are near; counts
of symbols and of symbol pairs give a lower bound for all leaders at once. The rest is compared exactly.

The distance is |a| + |b| - 2 LCS(a, b), in insertions and deletions; it is a metric. The similarity above is 1 minus
the distance over |a| + |b|: the ratio of `difflib.SequenceMatcher` if its blocks are a longest common subsequence,
never less.
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
    """Return the exact distance, or much sooner None if it is above `limit`."""
    distance = Indel.distance(a, b, score_cutoff=limit)
    return distance if distance <= limit else None


Counts = npt.NDArray[Any]
_BUCKETS = (64, 1024, 4096)  # of single symbols, of pairs and of triples of neighbours
_CHANGED = (1, 3, 5)

# Runs of five tell texts apart that are made of the same few words. They cost more, and are made for leaders alone.
_FIVE_BUCKETS, _FIVE_CHANGED = 4096, 9
_SPREAD = 1_000_003  # so that runs of five do not crowd into few buckets
_PIECE = 8
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
_BASE = 0x5851F42D4C957F2D

# Below this, the sum of the differences of two texts, at most both lengths together, fits into 16 bits.
_SHORT_TEXTS = 10_000


@dataclass(frozen=True, slots=True)
class TextSketches:
    """Sketches of N texts.

    One insertion or deletion changes the counts of symbols by 1, those of pairs of neighbours by 3 (one pair becomes
    two, or the other way round), those of triples by 5 and those of runs of five by 9. The differences of the counts
    therefore bound the distance from below. Counts that share a bucket only make the bound smaller.

    Attributes:
        texts: the texts.
        symbols: (buckets, N) the count of each bucket's symbols in the text; buckets that all texts fill alike are left
            out, here and below.
        runs: (N, buckets) the same of pairs, and of triples.
        pieces: (N, up to 4) hashes of pieces of eight symbols, likely to be equal for texts that are near.
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
        """Return (M,) a lower bound of the distance of one text to each of the others."""
        bounds = _difference(self.symbols[:, others], self.symbols[:, index, None], axis=0)
        for table, changed in zip(self.runs, _CHANGED[1:], strict=True):
            bounds = np.maximum(bounds, -(-_difference(table[others], table[index], axis=1) // changed))
        return bounds

    def near_pairs(self, indices: Codes, reaches: Floats) -> Iterator[tuple[int, list[int]]]:
        """Yield positions in `indices` with later ones that may be within the sum of their reaches, nearest first."""
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
        """Return (M, buckets) the counts of runs of five in some of the texts."""
        counts = np.zeros((len(indices), _FIVE_BUCKETS), dtype=self.symbols.dtype)
        for row, index in enumerate(indices.tolist()):
            pairs, triples = _short_runs(_codes(self.texts[index]))
            counts[row] = np.bincount((triples[:-2] * _SPREAD + pairs[3:]) % _FIVE_BUCKETS, minlength=_FIVE_BUCKETS)
        return _varying(counts)


def _codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _short_runs(codes: Codes) -> tuple[Codes, Codes]:
    """Return numbers for the pairs of neighbours, and for the triples."""
    return codes[:-1] * 37 + codes[1:], codes[:-2] * 1369 + codes[1:-1] * 37 + codes[2:]


def _varying(counts: Counts) -> Counts:
    """Return the columns in which not all texts are alike."""
    is_varying = (counts != counts[:1]).any(axis=0)
    return np.ascontiguousarray(counts[:, is_varying])


def _difference(many: Counts, one: Counts, axis: int) -> Codes:
    """Return the sums of the absolute differences, in the counts' own type, which is several times as fast."""
    difference = many - one
    np.abs(difference, out=difference)
    return difference.sum(axis=axis, dtype=difference.dtype)  # type: ignore[no-any-return]


def _pieces(codes: npt.NDArray[np.uint64]) -> list[int]:
    """Return for each of four random orders the hash of the text's first piece in that order (MinHash)."""
    if len(codes) < _PIECE:
        return []
    rolled = codes
    for step in (1, 2, 4):
        rolled = rolled[:-step] * np.uint64(pow(_BASE, step, 2**64)) + rolled[step:]
    rolled ^= rolled >> np.uint64(29)
    return [int((rolled * mix).min()) for mix in _MIX]


def similar_groups(texts: Sequence[str], groups_S: Codes, threshold: float) -> Codes:
    """Return (S,) a number for each component of similar texts within a group: equal if two steps share a state.

    The threshold is in (0, 1]; 1 takes equal texts only.
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
    """Return the connected components of distinct texts, each the positions of its members in order."""
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
        leader: its position.
        members: their positions, the leader's first.
        distances: of each member to the leader.
    """

    leader: int
    members: list[int] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)


class _Linker:
    """Joins the texts of one group until no similar pair is apart."""

    def __init__(self, texts: Sequence[str], threshold: float) -> None:
        self._texts, self._threshold = texts, threshold
        self._parents = list(range(len(texts)))
        self._clusters: list[_TextCluster] = []
        self._sketches = TextSketches.of(texts if threshold < 1.0 else ())

    def find(self, index: int) -> int:
        """Return the representative text of the component."""
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
        # By the same division as the similarity, so that rounding cannot make them differ.
        while limit and (total - limit) / total < self._threshold:
            limit -= 1
        return limit

    def _distance(self, a: int, b: int, limit: int) -> int | None:
        return indel_distance(self._texts[a], self._texts[b], limit)

    def gather(self) -> None:
        """Add each text to a similar leader, if its pieces lead to one, else make it a leader; link the rest later."""
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
        """Join every two clusters that hold a similar pair."""
        leaders = np.array([cluster.leader for cluster in self._clusters], dtype=np.int64)
        # A similar pair a, b of two clusters has leaders at most reach + reach apart: by the triangle inequality at
        # D(a, b) + both radii, and D(a, b) is at most (1 - threshold) (|a| + |b|).
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
        """Return whether two clusters with leaders this far apart hold a similar pair beside their leaders."""
        for a, radius in zip(one.members, one.distances, strict=True):
            least = self._sketches.least_distances(a, np.array(two.members))
            least = np.maximum(least, distance - radius - np.array(two.distances))
            for position in np.argsort(least, kind="stable").tolist():
                b = two.members[position]
                limit = self._limit(a, b)
                if least[position] <= limit and self._distance(a, b, limit) is not None:
                    return True
        return False
