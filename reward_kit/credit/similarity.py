"""Grouping texts by similarity: the parts that hang together when all similar pairs of a group are linked.

Two texts are similar where 2 LCS / (|a| + |b|) reaches the threshold, with LCS the length of their longest common
subsequence. The groups are the connected components of that relation, so they do not depend on the order of the texts,
and two similar texts are never apart. The price is that groups chain: where a is similar to b and b to c, all three are
together, however far a is from c. Short texts that differ in one word can be similar ("You are in the kitchen." and
"You are in the bedroom." at 0.7); raise the threshold, or use a hash that reads what matters.

Not all pairs are compared. Equal texts are one. Near copies are first gathered around leaders, found by hashes of their
pieces. Two leaders' clusters can hold a similar pair only if the leaders are near, the distance being a metric; counts
of symbols and of pairs of symbols bound it from below for all leaders at once. What is left is compared exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from reward_kit.credit.edit_distance import indel_distance
from reward_kit.credit.step_arrays import Codes
from reward_kit.credit.text_sketches import TextSketches


def similar_groups(texts: Sequence[str], groups_S: Codes, threshold: float) -> Codes:
    """(S,) a number for each component of similar texts within a group: equal where two steps share a state.

    Args:
        texts: (S,) the state of every step.
        groups_S: (S,) texts of different groups are never together.
        threshold: in (0, 1]; 1 takes equal texts only.
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
    """The connected components of distinct texts, each the positions of its members in order."""
    linker = _Linker(texts, threshold)
    if threshold < 1.0:
        linker.gather()
        linker.link_clusters()
    parts: dict[int, list[int]] = {}
    for index in range(len(texts)):
        parts.setdefault(linker.find(index), []).append(index)
    return list(parts.values())


@dataclass(slots=True)
class _Cluster:
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
        self._clusters: list[_Cluster] = []
        self._sketches = TextSketches.of(texts if threshold < 1.0 else ())

    def find(self, index: int) -> int:
        """The text that stands for the component."""
        parents = self._parents
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    def _join(self, a: int, b: int) -> None:
        self._parents[self.find(a)] = self.find(b)

    def _limit(self, a: int, b: int) -> int:
        """The largest distance at which two texts are similar."""
        total = len(self._texts[a]) + len(self._texts[b])
        limit = math.ceil((1.0 - self._threshold) * total)
        # By the same division as the similarity, so that no rounding can tell the two apart.
        while limit and (total - limit) / total < self._threshold:
            limit -= 1
        return limit

    def _distance(self, a: int, b: int, limit: int) -> int | None:
        return indel_distance(self._texts[a], self._texts[b], limit)

    def gather(self) -> None:
        """Put each text to a similar leader, if its pieces lead to one, or let it lead. The rest is linked later."""
        by_piece: dict[int, _Cluster] = {}
        for index, pieces in enumerate(self._sketches.pieces):
            candidates = {id(by_piece[piece]): by_piece[piece] for piece in pieces if piece in by_piece}
            cluster = self._near(index, list(candidates.values()))
            for piece in pieces:
                by_piece.setdefault(piece, cluster)

    def _near(self, index: int, candidates: list[_Cluster]) -> _Cluster:
        for cluster in candidates:
            distance = self._distance(cluster.leader, index, self._limit(cluster.leader, index))
            if distance is not None:
                cluster.members.append(index)
                cluster.distances.append(distance)
                self._join(index, cluster.leader)
                return cluster
        self._clusters.append(_Cluster(index, [index], [0]))
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

    def _reach(self, cluster: _Cluster) -> float:
        longest = max(len(self._texts[index]) for index in cluster.members)
        return (1.0 - self._threshold) * longest + max(cluster.distances) + 1e-6 * longest

    def _link(self, one: _Cluster, two: _Cluster, reach: int) -> None:
        distance = self._distance(one.leader, two.leader, reach)
        if distance is None:
            return
        if distance <= self._limit(one.leader, two.leader) or self._has_similar_pair(one, two, distance):
            self._join(one.leader, two.leader)

    def _has_similar_pair(self, one: _Cluster, two: _Cluster, distance: int) -> bool:
        """Whether two clusters with leaders this far apart hold a similar pair beside their leaders."""
        for a, radius in zip(one.members, one.distances, strict=True):
            least = self._sketches.least_distances(a, np.array(two.members))
            least = np.maximum(least, distance - radius - np.array(two.distances))
            for position in np.argsort(least, kind="stable").tolist():
                b = two.members[position]
                limit = self._limit(a, b)
                if least[position] <= limit and self._distance(a, b, limit) is not None:
                    return True
        return False
