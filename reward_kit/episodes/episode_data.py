"""The data of an episode: its tracks, conversation, tokens and identity; chunks of it; its state as plain values.

`SingleAgentEpisode` adds the public methods. A chunk is the same episode: it keeps every id, the spaces, `custom_data`
and the conversation up to its end. Of the tokens it keeps all up to its end, too; those that an action outside the
chunk sampled are context in it and no longer actions, so a chunk can be trained on by itself and no action is trained
on twice.

In a state, a track of arrays of one shape is one block of bytes, and a track of plain numbers or texts stands as it is.
Version 1 had every item by itself; it is still read.
"""

from __future__ import annotations

import math
import os
import random
from array import array
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np
import pydantic

from reward_kit.episodes.columns import Column, read, same_value
from reward_kit.episodes.json_codec import TAG, from_json_value, to_json_value
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.storage import as_list, compact, is_compact, joined, part_of
from reward_kit.errors import EpisodeError, kind_of
from reward_kit.models import Message
from reward_kit.validation import describe_validation_error

_PLAIN_KINDS = {float, int}


def check_reward(reward: Any, id_: str, step: int, agent: Any = None) -> None:
    """Let a number pass, one of NumPy or of an array without axes too.

    Raises:
        EpisodeError: it is none; the message names the episode, the step and the value.
    """
    if isinstance(reward, Real | np.bool_):
        return
    if getattr(reward, "ndim", None) == 0 and hasattr(reward, "__float__") and not np.iscomplexobj(reward):
        return
    whose = "the reward" if agent is None else f"the reward of agent {agent!r}"
    raise EpisodeError(f"episode {id_}, step {step}: {whose} is a number; got {reward!r:.80}")


def check_rewards(rewards: Any, id_: str) -> None:
    """Check a whole track; plain numbers, which are the usual ones, in one pass in C.

    Raises:
        EpisodeError: an item is no number.
    """
    if isinstance(rewards, np.ndarray) and rewards.dtype.kind in "biuf":
        return
    if not isinstance(rewards, list) or set(map(type, rewards)) <= _PLAIN_KINDS:
        return
    for step, reward in enumerate(rewards):
        check_reward(reward, id_, step)


REWARD = "environment_reward"
"""In a step's infos: None where the environment gave none."""

# Seeded from the system, and anew in a forked child; much quicker than asking the system for every id.
_ids = random.Random()

os.register_at_fork(after_in_child=_ids.seed)


class EpisodeData:
    """The data of an episode. The raw tracks `_observations`, … are in one of the forms of `storage`.

    The first `_lookback` items of every track lie before the episode. In `_infos` None stands for an empty dict, which
    would take 64 bytes a step.
    """

    __slots__ = (
        "_actions",
        "_earlier_s",
        "_infos",
        "_last_step_time",
        "_lookback",
        "_messages",
        "_observations",
        "_rewards",
        "_start_time",
        "_tokens",
        "_turns",
        "action_space",
        "agent_id",
        "custom_data",
        "extra_model_outputs",
        "id_",
        "is_numpy",
        "is_terminated",
        "is_truncated",
        "module_id",
        "multi_agent_episode_id",
        "observation_space",
        "t",
        "t_started",
    )

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Iterable[Any] | None = None,
        observation_space: Any = None,
        infos: Iterable[Mapping[str, Any]] | None = None,
        actions: Iterable[Any] | None = None,
        action_space: Any = None,
        rewards: Iterable[float] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Iterable[Any]] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | Literal["auto"] = "auto",
        agent_id: Any = None,
        module_id: Any = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        self.id_ = id_ or f"{_ids.getrandbits(128):032x}"
        self._observations: Any = []
        self._infos: list[Any] = []
        self._actions: Any = []
        self._rewards: Any = []
        self._lookback = 0
        self.extra_model_outputs: dict[str, Column[Any]] = {}
        self.observation_space, self.action_space = observation_space, action_space
        self.is_terminated, self.is_truncated = terminated, truncated
        self.t = self.t_started = t_started or 0
        self.custom_data: dict[str, Any] = {}
        self.agent_id, self.module_id = agent_id, module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.is_numpy = False
        self._messages: list[Message] | None = None
        self._turns: array[int] | None = None
        self._tokens: EpisodeTokens | None = None
        self._earlier_s = 0.0
        self._start_time: float | None = None
        self._last_step_time: float | None = None
        given = observations is not None or actions is not None or rewards is not None
        if given or infos is not None or extra_model_outputs is not None:
            self._observations, self._actions, self._rewards = map(_given, (observations, actions, rewards))
            self._take(infos, extra_model_outputs or {}, len_lookback_buffer)

    def _take(
        self,
        infos: Iterable[Mapping[str, Any]] | None,
        outputs: Mapping[str, Iterable[Any]],
        lookback: int | Literal["auto"],
    ) -> None:
        """The rest of the constructor, where tracks are given."""
        check_rewards(self._rewards, self.id_)
        given = len(self._rewards)
        self._lookback = given if lookback == "auto" else min(lookback, given)
        if self._lookback < 0:
            raise EpisodeError(f"episode {self.id_}: a lookback cannot be negative, got {lookback}")
        given_infos = as_list(_given(infos)) or [None] * len(self._observations)
        self._infos = [dict(info) if info else None for info in given_infos]
        self.extra_model_outputs = {key: Column(_given(items), self._lookback) for key, items in outputs.items()}
        self.is_numpy = any(not isinstance(data, list) for data in self._stored())
        self.t += given - self._lookback
        self.validate()

    def _stored(self) -> list[Any]:
        """The tracks that compact storage is for: all but the infos."""
        outputs = (column.data for column in self.extra_model_outputs.values())
        return [self._observations, self._actions, self._rewards, *outputs]

    def _restore(self, function: Any) -> None:
        """Put every track but the infos into the form that `function` gives it."""
        self._observations = function(self._observations)
        self._actions, self._rewards = function(self._actions), function(self._rewards)
        for column in self.extra_model_outputs.values():
            column.data = function(column.data)

    def to_lists(self) -> None:
        """The inverse of `to_numpy`."""
        self._restore(as_list)
        self.is_numpy = False

    def validate(self) -> None:
        """Check that the tracks fit together.

        Raises:
            EpisodeError: they do not; the message says which.
        """
        steps, observations = len(self._rewards), len(self._observations)
        outputs = self.extra_model_outputs
        expected = steps + 1 if observations else 0
        fits = observations == len(self._infos) == expected and len(self._actions) == steps
        if fits and all(len(column.data) == steps for column in outputs.values()):
            return
        lengths = {"observations": observations, "infos": len(self._infos)}
        wrong = [f"{name} {n}" for name, n in lengths.items() if n != expected]
        of_steps = {"actions": len(self._actions)}
        of_steps |= {f"extra_model_outputs[{key!r}]": len(column.data) for key, column in outputs.items()}
        wrong += [f"{name} {n}" for name, n in of_steps.items() if n != steps]
        raise EpisodeError(
            f"episode {self.id_}: {steps} rewards need {steps} actions and outputs and {steps + 1} observations "
            f"and infos; got {', '.join(wrong)}"
        )

    # The tracks as columns. Such a column is made on the way: what is appended to it or set in it is the episode's.

    def _column(self, name: str, space: Any = None) -> Column[Any]:
        return Column(getattr(self, name), self._lookback, space, partial(setattr, self, name))

    @property
    def observations(self) -> Column[Any]:
        """The track of observations."""
        return self._column("_observations", self.observation_space)

    @observations.setter
    def observations(self, items: Iterable[Any]) -> None:
        self._observations = _given(items)

    @property
    def infos(self) -> Column[dict[str, Any]]:
        """The track of infos."""
        self._infos[:] = [{} if info is None else info for info in self._infos]
        return self._column("_infos")

    @infos.setter
    def infos(self, items: Iterable[dict[str, Any]]) -> None:
        self._infos = as_list(_given(items))

    @property
    def actions(self) -> Column[Any]:
        """The track of actions."""
        return self._column("_actions", self.action_space)

    @actions.setter
    def actions(self, items: Iterable[Any]) -> None:
        self._actions = _given(items)

    @property
    def rewards(self) -> Column[float]:
        """The track of rewards."""
        return self._column("_rewards")

    @rewards.setter
    def rewards(self, items: Iterable[float]) -> None:
        self._rewards = _given(items)

    # What a language-model agent adds, made when it is first asked for

    @property
    def messages(self) -> list[Message]:
        """The conversation, once."""
        if self._messages is None:
            self._messages = []
        return self._messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._messages = messages

    @property
    def assistant_turns(self) -> array[int]:
        """The position in `messages` of each action's message, the lookback left out."""
        if self._turns is None:
            self._turns = array("i")
        return self._turns

    @assistant_turns.setter
    def assistant_turns(self, turns: array[int]) -> None:
        self._turns = turns

    @property
    def tokens(self) -> EpisodeTokens:
        """The exact tokens; their steps count from the first action after the lookback."""
        if self._tokens is None:
            self._tokens = EpisodeTokens()
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: EpisodeTokens) -> None:
        self._tokens = tokens

    # How it stands

    @property
    def lookback(self) -> int:
        """How many steps of what came before are kept beside the episode."""
        return self._lookback

    @property
    def is_done(self) -> bool:
        """Terminated or truncated."""
        return self.is_terminated or self.is_truncated

    def get_duration_s(self) -> float:
        """Seconds from the reset to the last step, 0.0 before either; a pause between two states does not count."""
        if self._start_time is None or self._last_step_time is None:
            return self._earlier_s
        return self._earlier_s + self._last_step_time - self._start_time

    def __len__(self) -> int:
        return self.t - self.t_started

    def __eq__(self, other: object) -> bool:
        """The same record; the clock and the spaces do not count."""
        if not isinstance(other, EpisodeData):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in COMPARED)

    __hash__ = None  # type: ignore[assignment]

    def size(self) -> str:
        """How long it is and how it stands, for messages."""
        end = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "not over"
        return f"{len(self)} steps, {end}"

    def __getstate__(self) -> dict[str, Any]:
        """Every field; a list of arrays as one array, from which they come back as they were.

        The clock is stopped, as in a state: what is restored may go on elsewhere, by another clock.
        """
        fields = {name: getattr(self, name) for name in EpisodeData.__slots__}
        fields |= {"_earlier_s": self.get_duration_s(), "_start_time": None, "_last_step_time": None}
        for name in ("_observations", "_actions", "_rewards"):
            fields[name] = _packed(fields[name])
        if not any(self._infos):
            fields["_infos"] = len(self._infos)
        outputs = self.extra_model_outputs.items()
        fields["extra_model_outputs"] = {key: (_packed(column.data), column.space) for key, column in outputs}
        fields["_listed"] = [isinstance(data, list) for data in self._stored()]
        return fields

    def __setstate__(self, fields: dict[str, Any]) -> None:
        listed, outputs = fields.pop("_listed"), fields.pop("extra_model_outputs")
        for name, value in fields.items():
            setattr(self, name, value)
        infos: Any = fields["_infos"]
        self._infos = [None] * infos if isinstance(infos, int) else infos
        for name, was_list in zip(("_observations", "_actions", "_rewards"), listed[:3], strict=True):
            if was_list:
                setattr(self, name, as_list(getattr(self, name)))
        self.extra_model_outputs = {
            key: Column(as_list(data) if was_list else data, self._lookback, space)
            for (key, (data, space)), was_list in zip(outputs.items(), listed[3:], strict=True)
        }


IDENTITY = ("id_", "is_terminated", "is_truncated", "t", "t_started", "agent_id", "module_id", "multi_agent_episode_id")
TRACKS = ("observations", "infos", "actions", "rewards", "extra_model_outputs")
COMPARED = (*IDENTITY, *TRACKS, "messages", "assistant_turns", "tokens", "custom_data")


def _packed(data: Any) -> Any:
    """For a pickle: one array is written 20 times as quickly as many; plain values are quick as they are."""
    are_arrays = isinstance(data, list) and data and type(data[0]) is np.ndarray
    return compact(data, exact=True) if are_arrays else data


def _given(items: Any) -> Any:
    """A track as it was given: compact storage as it is, anything else as a list of its own."""
    if items is None:
        return []
    if isinstance(items, Column):
        items = items.data
    return items if is_compact(items) else list(items)


E = TypeVar("E", bound=EpisodeData)


def cut(episode: E, len_lookback_buffer: int) -> E:
    """An episode without steps that goes on where this one stops.

    Raises:
        EpisodeError: the episode is over, or the lookback is negative.
    """
    if episode.is_done:
        raise EpisodeError(f"episode {episode.id_} is over and has no successor; it has {episode.size()}")
    if not len(episode._observations):
        raise EpisodeError(f"episode {episode.id_}: call add_env_reset before cut")
    return _part(episode, len(episode), len(episode), len_lookback_buffer)


def sliced(episode: E, part: slice, len_lookback_buffer: int | None) -> E:
    """The steps that a slice of the episode's steps takes, clipped as a list's slice is.

    Raises:
        EpisodeError: the slice has a step, the lookback is negative, or there is nothing to slice.
        TypeError: it is no slice.
    """
    if not isinstance(part, slice):
        raise TypeError(
            f"an episode takes a slice of steps, episode[a:b], and not {part!r}; for one item call "
            "get_observations(i), get_actions(i), …"
        )
    if part.step not in (None, 1):
        raise EpisodeError(f"episode {episode.id_}: a chunk is whole, so its slice has no step; got {part.step!r}")
    if not len(episode._observations):
        raise EpisodeError(f"episode {episode.id_}: call add_env_reset before taking a slice")
    start, stop, _ = part.indices(episode.t - episode.t_started)
    lookback = episode._lookback if len_lookback_buffer is None else len_lookback_buffer
    return _part(episode, start, stop if stop > start else start, lookback)


def _part(episode: E, start: int, stop: int, lookback: int) -> E:
    """The chunk from step `start` to `stop`. Slices must be quick: no constructor, no call that can be spared."""
    if lookback < 0:
        raise EpisodeError(f"episode {episode.id_}: a lookback cannot be negative, got {lookback}")
    first, last = episode._lookback + start, episode._lookback + stop
    begin = first - lookback if lookback < first else 0
    lookback = first - begin
    kind = type(episode)
    chunk = kind.__new__(kind)
    if episode.is_numpy:
        chunk._observations = part_of(episode._observations, begin, last + 1)
        chunk._actions = part_of(episode._actions, begin, last)
        chunk._rewards = part_of(episode._rewards, begin, last)
    else:
        chunk._observations = episode._observations[begin : last + 1]
        chunk._actions = episode._actions[begin:last]
        chunk._rewards = episode._rewards[begin:last]
    chunk._infos = episode._infos[begin : last + 1]
    chunk._lookback = lookback
    outputs = episode.extra_model_outputs
    chunk.extra_model_outputs = {}
    for key in outputs:
        chunk.extra_model_outputs[key] = Column(part_of(outputs[key].data, begin, last), lookback, outputs[key].space)
    chunk.id_, chunk.is_numpy = episode.id_, episode.is_numpy
    chunk.t_started, chunk.t = episode.t_started + start, episode.t_started + stop
    at_end = chunk.t == episode.t
    chunk.is_terminated, chunk.is_truncated = at_end and episode.is_terminated, at_end and episode.is_truncated
    chunk.observation_space, chunk.action_space = episode.observation_space, episode.action_space
    chunk.agent_id, chunk.module_id = episode.agent_id, episode.module_id
    chunk.multi_agent_episode_id = episode.multi_agent_episode_id
    chunk.custom_data = deepcopy(episode.custom_data) if episode.custom_data else {}
    chunk._earlier_s, chunk._start_time, chunk._last_step_time = 0.0, None, None
    chunk._messages, chunk._turns, chunk._tokens = None, None, None
    if episode._messages or episode._tokens:
        _take_language(episode, chunk, start, stop)
    return chunk


def _take_language(episode: EpisodeData, chunk: EpisodeData, start: int, stop: int) -> None:
    turns = episode.assistant_turns
    end = turns[stop] if stop < len(turns) else len(episode.messages)
    chunk.messages, chunk.assistant_turns = episode.messages[:end], turns[start:stop]
    chunk.tokens = episode.tokens.part(start, stop if stop < len(episode) else None)


def concat(episode: EpisodeData, other: EpisodeData) -> None:
    """Append the chunk that follows, in place.

    Raises:
        EpisodeError: `other` is not the next chunk of this episode; nothing is changed then.
    """
    _check_follows(episode, other)
    messages, turns, tokens = _joined_language(episode, other)
    begin = other._lookback
    episode._observations = joined(
        part_of(episode._observations, 0, len(episode._observations) - 1),
        part_of(other._observations, begin, len(other._observations)),
    )
    episode._infos = episode._infos[:-1] + other._infos[begin:]
    _join_outputs(episode, other)
    episode._actions = joined(episode._actions, part_of(other._actions, begin, len(other._actions)))
    episode._rewards = joined(episode._rewards, part_of(other._rewards, begin, len(other._rewards)))
    episode._messages, episode._turns, episode._tokens = messages, turns, tokens
    episode._earlier_s = episode.get_duration_s() + other.get_duration_s()
    episode._start_time = episode._last_step_time = None
    episode.t = other.t
    episode.is_terminated, episode.is_truncated = other.is_terminated, other.is_truncated
    episode.custom_data.update(other.custom_data)


def _check_follows(episode: EpisodeData, other: EpisodeData) -> None:
    problem = ""
    if other.id_ != episode.id_:
        problem = f"{other.id_} is another episode"
    elif episode.is_done:
        problem = f"it is over and takes no further chunk; it has {episode.size()}"
    elif not (len(episode._observations) and len(other._observations)):
        problem = "both chunks need an observation at least"
    elif episode.t != other.t_started:
        problem = f"it stops at t={episode.t} and the chunk begins at t={other.t_started}"
    elif not same_value(episode._observations[len(episode._observations) - 1], other._observations[other._lookback]):
        problem = "its last observation is not the chunk's first"
    if problem:
        raise EpisodeError(f"cannot append the chunk to episode {episode.id_}: {problem}")
    episode.validate()
    other.validate()


def _join_outputs(episode: EpisodeData, other: EpisodeData) -> None:
    """A key that one of the two lacks counts as None in all of its steps, as in `add_env_step`."""
    before, after = len(episode._rewards), len(other)
    for key in {**episode.extra_model_outputs, **other.extra_model_outputs}:
        mine, theirs = episode.extra_model_outputs.get(key), other.extra_model_outputs.get(key)
        data = [None] * before if mine is None else mine.data
        added = [None] * after if theirs is None else part_of(theirs.data, other._lookback, len(theirs.data))
        space = (mine or theirs).space  # type: ignore[union-attr]
        episode.extra_model_outputs[key] = Column(joined(data, added), episode._lookback, space)


def _joined_language(
    episode: EpisodeData, other: EpisodeData
) -> tuple[list[Message] | None, array[int] | None, EpisodeTokens | None]:
    messages, turns, tokens = episode._messages, episode._turns, episode._tokens
    if other._messages:
        if other._messages[: len(episode.messages)] != episode.messages:
            raise EpisodeError(
                f"cannot append the chunk to episode {episode.id_}: its conversation does not begin with the episode's"
            )
        messages, turns = other._messages[:], episode.assistant_turns + other.assistant_turns
    if other._tokens:
        tokens = episode.tokens.continued(other._tokens, len(episode))
    return messages, turns, tokens


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


def check_state(state: Mapping[str, Any]) -> None:
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
