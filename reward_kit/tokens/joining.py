"""When batches may be put together: the same keys, and no fact of one that contradicts the other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reward_kit.episodes.columns import same_value
from reward_kit.errors import ConfigError
from reward_kit.tokens.columns import Array


def check_same_keys(batches: Sequence[Mapping[str, Array]], what: str) -> None:
    """Refuse to put together what has different keys.

    Raises:
        ConfigError: a key is not in all of them; the message names every such key.
    """
    every = set().union(*batches)
    partial = sorted(key for key in every if not all(key in batch for batch in batches))
    if partial:
        lacking = [str(i) for i, batch in enumerate(batches) if any(key not in batch for key in partial)]
        raise ConfigError(
            f"batches with different {what} keys cannot be joined: {', '.join(partial)} missing in batch "
            f"{', '.join(lacking)}; select the same keys of each"
        )


def merged_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that any of them says; what several say has to be the same.

    Raises:
        ConfigError: two contradict each other.
    """
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and not same_value(merged[key], value):
                raise ConfigError(f"meta_info[{key!r}] is {merged[key]!r} in one batch and {value!r} in another")
            merged[key] = value
    return merged


def united(first: Mapping[str, Array], second: Mapping[str, Array], what: str) -> dict[str, Array]:
    """The keys of both; a key in both has to hold the same.

    Raises:
        ConfigError: it does not.
    """
    for key in first.keys() & second.keys():
        if not same_value(first[key], second[key]):
            raise ConfigError(f"{what}[{key!r}] differs between the two batches; rename one or leave it out")
    return {**first, **second}
