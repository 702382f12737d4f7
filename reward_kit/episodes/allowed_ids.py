"""What a sampled token was chosen from, where a constraint left only some of the vocabulary.

The log-probability of such a token is of the distribution over the allowed ids, so a trainer has to apply the same mask
before its log-softmax. Inside one JSON string the same hundred thousand ids are allowed at every token: each different
set is kept once.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reward_kit.errors import EpisodeError

Ids = npt.NDArray[np.int32]
"""Token ids as an array."""
Allowed = Sequence[int] | npt.NDArray[np.integer[Any]] | None
"""The ids that might come at one token; None: any."""


class AllowedIds:
    """The restricted tokens of one row.

    Args:
        places: (M,) which tokens were restricted, ascending, counted from the row's first token without padding.
        offsets: (M+1,) where the ids of each begin in `ids`, and the end.
        ids: the ids that were allowed, ascending for each place.

    Raises:
        EpisodeError: the offsets are not of these places and ids.
    """

    __slots__ = ("places", "sets", "which")

    places: Ids
    which: Ids  # (M,) the set of each place
    sets: tuple[Ids, ...]

    def __init__(self, places: npt.ArrayLike, offsets: npt.ArrayLike, ids: npt.ArrayLike) -> None:
        self.places = np.asarray(places, dtype=np.int32)
        bounds, flat = np.asarray(offsets, dtype=np.int64), np.asarray(ids, dtype=np.int32)
        if (
            len(bounds) != len(self.places) + 1
            or bounds[0] != 0
            or bounds[-1] != len(flat)
            or (np.diff(bounds) < 0).any()
        ):
            raise EpisodeError(
                f"{len(self.places)} places and {len(flat)} ids do not go with offsets {bounds.tolist()}"
            )
        self.sets = tuple(np.split(flat, bounds[1:-1])) if len(self.places) else ()
        self.which = np.arange(len(self.places), dtype=np.int32)

    @classmethod
    def shared(cls, places: npt.ArrayLike, which: npt.ArrayLike, sets: Sequence[Ids]) -> AllowedIds:
        """From sets of which several places may have the same.

        Args:
            places: (M,) as above.
            which: (M,) the number of each place's set.
            sets: the ids of each set, ascending.
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
        """The ids allowed at the m-th place."""
        ids: Ids = self.sets[self.which[m]]
        return ids

    @property
    def offsets(self) -> Ids:
        """(M+1,) where the ids of each place begin in `ids`; made anew."""
        sizes = np.array([len(ids) for ids in self.sets], dtype=np.int32)
        offsets: Ids = np.cumsum(np.append(0, sizes[self.which]), dtype=np.int32)
        return offsets

    @property
    def ids(self) -> Ids:
        """The ids of all places, one after another; made anew, and large where most of a vocabulary is allowed."""
        return np.concatenate([np.zeros(0, np.int32), *(self.sets[number] for number in self.which)])

    def mask(self, vocabulary: int) -> npt.NDArray[np.bool_]:
        """(M,V) true where an id is allowed.

        Args:
            vocabulary: V, the width of the logits.
        """
        per_set = np.zeros((len(self.sets), vocabulary), dtype=np.bool_)
        for number, ids in enumerate(self.sets):
            per_set[number, ids] = True
        mask_MV: npt.NDArray[np.bool_] = per_set[self.which]
        return mask_MV


class AllowedTrack:
    """What was allowed at the tokens of an episode that is still growing; places count from its first token."""

    __slots__ = ("_numbers", "places", "sets", "which")

    def __init__(self) -> None:
        self.places: array[int] = array("i")
        self.which: array[int] = array("i")
        self.sets: list[Ids] = []
        self._numbers: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self.places)

    def add(self, place: int, number: int) -> None:
        """The set of this number was allowed at `place`, which lies behind all that are there."""
        self.places.append(place)
        self.which.append(number)

    def number_of(self, ids: Ids) -> int:
        """The number of a set, a new one where it was never allowed before."""
        key = ids.tobytes()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.sets)
            self.sets.append(ids)
        return number

    def between(self, start: int, stop: int) -> AllowedIds | None:
        """The restricted ones of the tokens `start:stop`, counted from `start`; None where there is none."""
        places = np.array(self.places, dtype=np.int32)
        first, last = np.searchsorted(places, (start, stop))
        if first == last:
            return None
        used, which = np.unique(np.array(self.which[first:last], dtype=np.int32), return_inverse=True)
        return AllowedIds.shared(places[first:last] - start, which, [self.sets[number] for number in used])

    def kept(self, start: int, stop: int) -> AllowedTrack:
        """Those of the tokens `start:stop`, at the same places."""
        kept = AllowedTrack()
        kept.extend(self, start, stop)
        return kept

    def extend(self, other: AllowedTrack, start: int, stop: int) -> None:
        """Add those of the tokens `start:stop` of another track."""
        for place, number in zip(other.places, other.which, strict=True):
            if start <= place < stop:
                self.add(place, self.number_of(other.sets[number]))

    def get_state(self) -> dict[str, Any]:
        """A JSON-safe form."""
        return {"places": list(self.places), "which": list(self.which), "sets": [_packed(ids) for ids in self.sets]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> AllowedTrack:
        """The inverse of `get_state`.

        Raises:
            EpisodeError: a place has no set.
        """
        track = cls()
        numbers = [track.number_of(_unpacked(packed)) for packed in state["sets"]]
        if len(state["places"]) != len(state["which"]) or any(not 0 <= n < len(numbers) for n in state["which"]):
            raise EpisodeError("allowed ids: each place names one of the sets")
        for place, which in zip(state["places"], state["which"], strict=True):
            track.add(place, numbers[which])
        return track


class RecordedSets(NamedTuple):
    """What was allowed at the tokens of one action, before it is stored.

    Attributes:
        sets: the ids of each set, ascending.
        which: (N,) the number of each token's set; None: any id.
    """

    sets: list[Ids]
    which: list[int | None]

    @classmethod
    def of(cls, allowed: Sequence[Allowed], token_ids: Sequence[int], step: int) -> RecordedSets:
        """Checked and in order.

        Args:
            allowed: (N,) what was allowed at each token.
            token_ids: (N,) what was sampled.
            step: the action's, for messages.

        Raises:
            EpisodeError: they are not as many as the tokens, or a token was sampled that was not allowed.
        """
        if len(allowed) != len(token_ids):
            raise EpisodeError(f"step {step}: {len(token_ids)} token ids but {len(allowed)} entries of allowed_ids")
        made = cls([], [])
        numbers: dict[int, int] = {}  # one object often stands at many tokens
        for token, given in zip(token_ids, allowed, strict=True):
            if given is None:
                made.which.append(None)
                continue
            if id(given) not in numbers:
                numbers[id(given)] = len(made.sets)
                made.sets.append(_ascending(np.array(given, dtype=np.int32)))
            number = numbers[id(given)]
            _check_allowed(made.sets[number], int(token), step)
            made.which.append(number)
        return made

    def store(self, track: AllowedTrack, start: int) -> None:
        """Write them, where the action's first token stands at place `start`."""
        numbers = [track.number_of(ids) for ids in self.sets]
        for n, which in enumerate(self.which):
            if which is not None:
                track.add(start + n, numbers[which])


def _ascending(ids: Ids) -> Ids:
    """Each id once, in order; most constraints give them so."""
    return ids if len(ids) < 2 or (ids[1:] > ids[:-1]).all() else np.unique(ids)


def _check_allowed(ids: Ids, token: int, step: int) -> None:
    place = int(ids.searchsorted(token))
    if place == len(ids) or ids[place] != token:
        raise EpisodeError(f"step {step}: token {token} was sampled and is not among the {len(ids)} that were allowed")


def _packed(ids: Ids) -> list[int] | dict[str, list[int]]:
    """The ids, or where that is shorter the runs in which they lie: first, count, first, count, …."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    if 2 * (len(breaks) + 1) >= len(ids):
        return [int(number) for number in ids]
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(ids))
    return {"runs": np.stack([ids[starts], counts], axis=1).reshape(-1).tolist()}


def _unpacked(packed: list[int] | Mapping[str, list[int]]) -> Ids:
    if not isinstance(packed, Mapping):
        return np.array(packed, dtype=np.int32)
    runs = np.array(packed["runs"], dtype=np.int32).reshape(-1, 2)
    return np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in runs])
