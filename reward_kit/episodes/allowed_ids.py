"""The token ids that were allowed when constrained tokens were sampled.

The log-probability of a constrained token refers to the distribution over the allowed ids, so a trainer must apply the
same mask before its log-softmax. Within a JSON string, the same hundred thousand ids are allowed at every token, so
each distinct set of ids is stored only once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reward_kit.errors import EpisodeError

Ids = npt.NDArray[np.int32]
"""Token ids as an array."""
Allowed = Sequence[int] | npt.NDArray[np.integer[Any]] | None
"""The ids that were allowed at one token; None if all ids were allowed."""


class AllowedIds:
    """The restricted tokens of one row.

    Args:
        places: (M,) the positions of the restricted tokens in ascending order, counted from the row's first token after
            the padding.
        offsets: (M+1,) the index in `ids` at which the ids of each place start, followed by the total number of ids.
        ids: the ids that were allowed, in ascending order for each place.

    Raises:
        EpisodeError: the offsets do not match the places and ids.
    """

    __slots__ = ("places", "sets", "which")

    places: Ids
    which: Ids  # (M,) the index of each place's set
    sets: tuple[Ids, ...]

    def __init__(self, places: npt.ArrayLike, offsets: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        self.places = np.asarray(places, dtype=np.int32)
        bounds, flat = np.asarray(offsets, dtype=np.int64), np.asarray(ids, dtype=np.int32)
        fits = len(bounds) == len(self.places) + 1 and bounds[0] == 0 and bounds[-1] == len(flat)
        if not fits or (np.diff(bounds) < 0).any():
            raise EpisodeError(
                f"{len(self.places)} places and {len(flat)} ids do not match the offsets {bounds.tolist()}"
            )
        self.sets = tuple(np.split(flat, bounds[1:-1])) if len(self.places) else ()
        self.which = np.arange(len(self.places), dtype=np.int32)

    @classmethod
    def shared(cls, places: npt.ArrayLike, which: npt.ArrayLike, sets: Sequence[Ids]) -> AllowedIds:
        """Return an instance whose places may share sets.

        The (M,) array `which` contains the index of each place's set.
        """
        made = cls([], [0], [])
        made.places, made.which = np.asarray(places, dtype=np.int32), np.asarray(which, dtype=np.int32)
        made.sets = tuple(sets)
        return made

    def __len__(self) -> int:
        return len(self.places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllowedIds) or not np.array_equal(self.places, other.places):
            return False
        return all(np.array_equal(self.at(m), other.at(m)) for m in range(len(self)))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"AllowedIds({len(self)} places, {len(self.sets)} sets)"

    def at(self, m: int) -> Ids:
        """Return the ids allowed at the m-th place."""
        ids: Ids = self.sets[self.which[m]]
        return ids

    @property
    def offsets(self) -> Ids:
        """(M+1,) array: the index in `ids` at which each place's ids start, followed by the number of ids.

        Not cached.
        """
        sizes = np.array([len(ids) for ids in self.sets], dtype=np.int32)
        offsets: Ids = np.cumsum(np.append(0, sizes[self.which]), dtype=np.int32)
        return offsets

    @property
    def ids(self) -> Ids:
        """The concatenated ids of all places. The array may be large and is not cached."""
        return np.concatenate([np.zeros(0, np.int32), *(self.sets[number] for number in self.which)])

    def mask(self, vocabulary: int) -> npt.NDArray[np.bool_]:
        """Return an (M, V) mask that is True for allowed ids, where V is the width of the logits."""
        per_set = np.zeros((len(self.sets), vocabulary), dtype=np.bool_)
        for number, ids in enumerate(self.sets):
            per_set[number, ids] = True
        mask_MV: npt.NDArray[np.bool_] = per_set[self.which]
        return mask_MV


class AllowedTrack:
    """The restricted tokens of a growing episode; places are relative to the episode's first token."""

    __slots__ = ("_numbers", "places", "sets", "which")

    def __init__(self) -> None:
        self.places: array[int] = array("i")
        self.which: array[int] = array("i")
        self.sets: list[Ids] = []
        self._numbers: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self.places)

    def add(self, place: int, number: int) -> None:
        """Append a place and the index of its set of allowed ids."""
        self.places.append(place)
        self.which.append(number)

    def add_sets(self, start: int, sets: Sequence[Ids | None]) -> None:
        """Add the result of `check_allowed_ids` for the tokens from position `start` on."""
        numbers: dict[int, int] = {}  # keyed by object identity, since many tokens often share a set
        for place, ids in enumerate(sets, start):
            if ids is not None:
                number = numbers.get(id(ids))
                if number is None:
                    number = numbers[id(ids)] = self.number_of(ids)
                self.add(place, number)

    def number_of(self, ids: Ids) -> int:
        """Return the index of a set, adding the set if it is new."""
        key = ids.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.sets)
            self.sets.append(ids)
        return number

    def between(self, start: int, stop: int) -> AllowedIds | None:
        """Return the restricted tokens in `start:stop`, or None.

        Their places are relative to `start`.
        """
        places = np.array(self.places, dtype=np.int32)
        first, last = np.searchsorted(places, (start, stop))
        if first == last:
            return None
        used, which = np.unique(np.array(self.which[first:last], dtype=np.int32), return_inverse=True)
        return AllowedIds.shared(places[first:last] - start, which, [self.sets[number] for number in used])

    def kept(self, start: int, stop: int) -> AllowedTrack:
        """Return the restricted tokens in `start:stop`; their places are unchanged."""
        kept = AllowedTrack()
        kept.extend(self, start, stop)
        return kept

    def extend(self, other: AllowedTrack, start: int, stop: int) -> None:
        """Add the restricted tokens in `start:stop` of another track."""
        for place, number in zip(other.places, other.which, strict=True):
            if start <= place < stop:
                self.add(place, self.number_of(other.sets[number]))

    def get_state(self) -> dict[str, Any]:
        return {"places": list(self.places), "which": list(self.which), "sets": [_packed(ids) for ids in self.sets]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AllowedTrack:
        """Return the track for a state from `get_state`; raise an EpisodeError if a place refers to a missing set."""
        track, numbers = cls(), []
        for packed in state["sets"]:
            if isinstance(packed, Mapping):
                runs = np.array(packed["runs"], dtype=np.int32).reshape(-1, 2)
                ids = np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in runs])
            else:
                ids = np.array(packed, dtype=np.int32)
            numbers.append(track.number_of(ids))
        if len(state["places"]) != len(state["which"]) or any(not 0 <= n < len(numbers) for n in state["which"]):
            raise EpisodeError("allowed ids: a place refers to a missing set")
        for place, which in zip(state["places"], state["which"], strict=True):
            track.add(place, numbers[which])
        return track


def check_allowed_ids(allowed: Sequence[Allowed], token_ids: Sequence[int], step: int) -> list[Ids | None]:
    """Return the allowed ids of each of the N tokens in ascending order. Entries that are one object share an array.

    Raises:
        EpisodeError: the number of entries differs from the number of tokens, or a sampled token was not allowed.
    """
    if len(allowed) != len(token_ids):
        raise EpisodeError(f"step {step} has {len(token_ids)} token ids but {len(allowed)} entries in allowed_ids")
    arrays: dict[int, Ids] = {}
    sets: list[Ids | None] = []
    for token, given in zip(token_ids, allowed, strict=True):
        if given is None:
            sets.append(None)
            continue
        ids = arrays.get(id(given))
        if ids is None:
            if isinstance(given, np.ndarray) and len(given) <= _SMALL:
                ids = _cached_ascending(given.tobytes(), given.dtype)
            else:
                ids = _ascending(given)
            arrays[id(given)] = ids
        index = int(ids.searchsorted(token))
        if index == len(ids) or ids[index] != token:
            raise EpisodeError(f"step {step}: the sampled token {token} is not among the {len(ids)} allowed ids")
        sets.append(ids)
    return sets


_SMALL = 256
"""The number of ids up to which an ascending copy of a set is cached. The tokens of a turn often share such sets."""


def _ascending(given: npt.ArrayLike) -> Ids:
    ids: Ids = np.array(given, dtype=np.int32)
    return ids if len(ids) < 2 or (ids[1:] > ids[:-1]).all() else np.unique(ids)


@lru_cache(maxsize=4096)
def _cached_ascending(content: bytes, dtype: np.dtype[Any]) -> Ids:
    ids = _ascending(np.frombuffer(content, dtype=dtype))
    ids.flags.writeable = False
    return ids


def _packed(ids: Ids) -> list[int] | dict[str, list[int]]:
    """Return the ids or, if this is shorter, their runs of consecutive ids: first, count, first, count, …."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    if 2 * (len(breaks) + 1) >= len(ids):
        return [int(number) for number in ids]
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(ids))
    return {"runs": np.stack([ids[starts], counts], axis=1).reshape(-1).tolist()}
