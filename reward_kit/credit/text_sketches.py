"""`TextSketches`: small arrays made of texts, that bound from below how far two texts are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.credit.step_arrays import Codes, Floats

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
        symbols: (buckets, N) how often a symbol of each bucket stands in the text; buckets that all texts fill alike
            are left out, here and below.
        runs: (N, buckets) the same of pairs, and of triples.
        pieces: (N, up to 4) hashes of pieces of eight symbols, likely to be equal for texts that are near.
    """

    texts: Sequence[str]
    symbols: Counts
    runs: tuple[Counts, Counts]
    pieces: list[list[int]]

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextSketches:
        """The sketches of texts."""
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
        """(M,) a lower bound of the distance of one text to each of the others."""
        bounds = _difference(self.symbols[:, others], self.symbols[:, index, None], axis=0)
        for table, changed in zip(self.runs, _CHANGED[1:], strict=True):
            bounds = np.maximum(bounds, -(-_difference(table[others], table[index], axis=1) // changed))
        return bounds

    def near_pairs(self, indices: Codes, reaches: Floats) -> Iterator[tuple[int, list[int]]]:
        """The pairs of `indices` that may be within the sum of their reaches, nearest first.

        Yields:
            A position in `indices`, and later positions that may be near; only where there are any.
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
        """(M, buckets) the counts of runs of five in some of the texts."""
        counts = np.zeros((len(indices), _FIVE_BUCKETS), dtype=self.symbols.dtype)
        for row, index in enumerate(indices.tolist()):
            pairs, triples = _short_runs(_codes(self.texts[index]))
            counts[row] = np.bincount((triples[:-2] * _SPREAD + pairs[3:]) % _FIVE_BUCKETS, minlength=_FIVE_BUCKETS)
        return _varying(counts)


def _codes(text: str) -> Codes:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)


def _short_runs(codes: Codes) -> tuple[Codes, Codes]:
    """Numbers for the pairs of neighbours, and for the triples."""
    return codes[:-1] * 37 + codes[1:], codes[:-2] * 1369 + codes[1:-1] * 37 + codes[2:]


def _varying(counts: Counts) -> Counts:
    """The columns in which not all texts are alike."""
    is_varying = (counts != counts[:1]).any(axis=0)
    return np.ascontiguousarray(counts[:, is_varying])


def _difference(many: Counts, one: Counts, axis: int) -> Codes:
    """The sums of the absolute differences; in the counts' own type, which is several times as fast."""
    difference = many - one
    np.abs(difference, out=difference)
    return difference.sum(axis=axis, dtype=difference.dtype)  # type: ignore[no-any-return]


def _pieces(codes: npt.NDArray[np.uint64]) -> list[int]:
    """For each of four random orders, the hash of the text's first piece in that order (MinHash)."""
    if len(codes) < _PIECE:
        return []
    rolled = codes
    for step in (1, 2, 4):
        rolled = rolled[:-step] * np.uint64(pow(_BASE, step, 2**64)) + rolled[step:]
    rolled ^= rolled >> np.uint64(29)
    return [int((rolled * mix).min()) for mix in _MIX]
