"""An episode as plain values: its state, which JSON and msgpack hold, and its steps as a dict of columns.

A track of arrays of one shape is one block of bytes in the state, and a track of plain numbers or texts stands as it
is. Version 1 had every item by itself; it is still read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic

from reward_kit.episodes.columns import Column, read
from reward_kit.episodes.compaction import compact
from reward_kit.episodes.episode_data import COMPARED, IDENTITY, EpisodeData
from reward_kit.episodes.json_codec import TAG, from_json_value, to_json_value
from reward_kit.episodes.reward_values import check_rewards
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.storage import as_list
from reward_kit.errors import EpisodeError, kind_of
from reward_kit.models import Message
from reward_kit.validation import describe_validation_error

STATE_VERSION = 2
_READ = (1, STATE_VERSION)
_STACK = "stack"
# What a list of numbers becomes anyway, so that nothing is lost by writing the numbers.
_USUAL = ("?", "q", "l", "d")


def state_of(episode: EpisodeData) -> dict[str, Any]:
    """The episode's state."""
    tracks = {name: getattr(episode, f"_{name}") for name in ("observations", "actions", "rewards")}
    outputs = {key: column.data for key, column in episode.extra_model_outputs.items()}
    return {
        "schema_version": STATE_VERSION,
        **{name: to_json_value(getattr(episode, name)) for name in IDENTITY},
        **{name: _track_state(data) for name, data in tracks.items()},
        "infos": [to_json_value(info) if info else {} for info in episode._infos],
        "extra_model_outputs": [[to_json_value(key), _track_state(data)] for key, data in outputs.items()],
        "lookback": episode.lookback,
        "is_numpy": episode.is_numpy,
        "messages": [to_json_value(message.to_chat()) for message in episode.messages],
        "assistant_turns": episode.assistant_turns.tolist(),
        "tokens": episode.tokens.get_state(),
        "custom_data": to_json_value(episode.custom_data),
        "duration_s": episode.get_duration_s(),
    }


def _track_state(data: Any) -> Any:
    if isinstance(data, list) and data and type(data[0]) is np.ndarray:
        data = compact(data, exact=True)
    if isinstance(data, np.ndarray) and (data.ndim > 1 or data.dtype.char not in _USUAL):
        return {TAG: _STACK, "value": to_json_value(data)}
    items = as_list(data)
    return list(items) if _is_plain(items) else [to_json_value(item) for item in items]


def _is_plain(items: list[Any]) -> bool:
    """All are texts, or all are finite numbers: the most usual tracks, told by a pass in C."""
    kind = type(items[0]) if items else None
    if kind not in (str, int, float) or [*map(type, items)].count(kind) < len(items):
        return False
    if kind is str:
        try:
            "".join(items).encode()
        except UnicodeEncodeError:
            return False
        return True
    if kind is int:
        return bool(min(items) >= -(2**63) and max(items) < 2**64)  # the rest is for `to_json_value`
    # One that is not finite makes the sum so, too.
    return math.isfinite(sum(items)) or all(map(math.isfinite, items))


_ITEMS = (list, tuple)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("is_terminated", "is_truncated"), (bool, dict)),
    **dict.fromkeys(("t", "t_started"), (int, dict)),
    **dict.fromkeys(("observations", "actions", "rewards"), (*_ITEMS, dict)),
    **dict.fromkeys(("infos", "messages", "assistant_turns"), _ITEMS),
    **{"extra_model_outputs": (*_ITEMS, dict), "lookback": (int,), "duration_s": (int, float)},
    **{"tokens": (dict,), "custom_data": (dict,)},
}
"""As what a field may stand in a state; a dict also holds what JSON has no word for."""


def check_kinds(state: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Refuse a state with something else in the place of a field.

    Raises:
        EpisodeError: the message names the field.
    """
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise EpisodeError(f"episode state: {name} is {kind_of(kind[0]())}; got {state[name]!r:.80}")


def check(state: Mapping[str, Any]) -> None:
    """Refuse what is no state of an episode.

    Raises:
        EpisodeError: it is no mapping, the state is of another version, or a field is missing or no such field.
    """
    check_mapping(state)
    version = state.get("schema_version")
    if version not in _READ:
        raise EpisodeError(f"episode state of version {version!r}; this release reads versions 1 and {STATE_VERSION}")
    needed = {*COMPARED, "lookback", "duration_s"} | ({"is_numpy"} if version > 1 else set())
    if missing := needed - state.keys():
        raise EpisodeError(f"episode state without {', '.join(sorted(missing))}")
    check_kinds(state, _KINDS)


def check_mapping(state: Any) -> None:
    """Refuse what is no mapping.

    Raises:
        EpisodeError: it is none.
    """
    if not isinstance(state, Mapping):
        raise EpisodeError(f"an episode's state is a dict, as get_state gives it; got {state!r:.80}")


def fill(episode: EpisodeData, state: Mapping[str, Any]) -> None:
    """Give an episode without tracks all that a checked state has.

    Raises:
        EpisodeError: the tracks do not fit together.
    """
    is_numpy, lookback = state.get("is_numpy", False), state["lookback"]
    for name in IDENTITY:
        setattr(episode, name, from_json_value(state[name]))
    for name in ("observations", "actions", "rewards"):
        setattr(episode, f"_{name}", _track(state[name], is_numpy))
    episode._infos = [info or None for info in from_json_value(state["infos"])]
    outputs = state["extra_model_outputs"]
    if state["schema_version"] == 1:
        outputs = from_json_value(outputs).items()
        episode.extra_model_outputs = {key: Column(data, lookback) for key, data in outputs}
    else:
        pairs = {from_json_value(key): _track(track, is_numpy) for key, track in outputs}
        episode.extra_model_outputs = {key: Column(data, lookback) for key, data in pairs.items()}
    episode._lookback, episode.is_numpy = lookback, is_numpy
    episode.messages = [_message(number, message) for number, message in enumerate(state["messages"])]
    episode.assistant_turns = array("i", state["assistant_turns"])
    episode.tokens = EpisodeTokens.from_state(state["tokens"])
    episode.custom_data = from_json_value(state["custom_data"])
    episode._earlier_s = state["duration_s"]
    episode.validate()
    check_rewards(episode._rewards, episode.id_)


def _message(number: int, state: Any) -> Message:
    try:
        return Message.model_validate(from_json_value(state))
    except pydantic.ValidationError as error:
        told = "; ".join(describe_validation_error(error))
        raise EpisodeError(f"episode state, messages[{number}]: {told}") from None


def _track(state: Any, is_numpy: bool) -> Any:
    stack = isinstance(state, dict) and state.get(TAG) == _STACK
    data = from_json_value(state["value"] if stack else state)
    return compact(data) if is_numpy else as_list(data)


def data_dict(episode: EpisodeData) -> dict[str, Any]:
    """The steps as columns of one length, under RLlib's names."""
    steps, lookback = len(episode), episode.lookback
    columns = {
        "terminateds": _only_last(steps, episode.is_terminated),
        "truncateds": _only_last(steps, episode.is_truncated),
        "t": list(range(episode.t_started, episode.t)),
        "eps_id": [episode.id_] * steps,
    }
    if episode.is_numpy:
        # The ids stay a list: text is no array here.
        kinds = {"terminateds": np.bool_, "truncateds": np.bool_, "t": np.int64}
        columns |= {name: np.array(columns[name], dtype=kind) for name, kind in kinds.items()}
    columns["obs"] = read(episode._observations, lookback, slice(None, -1))
    columns["infos"] = [{} if info is None else info for info in episode._infos[lookback:-1]]
    columns["actions"] = read(episode._actions, lookback)
    columns["rewards"] = read(episode._rewards, lookback)
    return columns | {key: column.get() for key, column in episode.extra_model_outputs.items()}


def _only_last(steps: int, flag: bool) -> list[bool]:
    return [False] * (steps - 1) + [flag] if steps else []
