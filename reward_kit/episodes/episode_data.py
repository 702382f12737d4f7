"""`EpisodeData`: an episode's tracks, conversation, tokens and identity, and methods for its chunks and its state.

`SingleAgentEpisode` adds the methods that build and read steps. A chunk belongs to the same episode as the data it was
cut from: it keeps all ids, the spaces, `custom_data`, and the conversation and tokens up to its end. Tokens that were
sampled for actions outside the chunk become context, so each chunk can be used for training separately and no action is
trained on twice.

In a state, a track that consists of arrays of the same shape is stored as one block of bytes, and a track of plain
numbers or strings is left unchanged. States of version 1, which store every item separately, can still be read.
"""

from __future__ import annotations

import math
import os
import random
from array import array
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import pydantic

from reward_kit.episodes.columns import InfiniteLookbackBuffer, read, same_value
from reward_kit.episodes.json_codec import TAG, from_json_value, to_json_value
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.storage import compact, concat_columns, is_compact, read_list, slice_column
from reward_kit.errors import EpisodeError, boundary, type_name
from reward_kit.models import Message
from reward_kit.validation import describe_validation_error

REWARD = "environment_reward"
"""The key in a step's infos that is `None` if the environment returned no reward."""
IDENTITY = ("id_", "is_terminated", "is_truncated", "t", "t_started", "agent_id", "module_id", "multi_agent_episode_id")
COMPARED = (
    *IDENTITY,
    *("observations", "infos", "actions", "rewards", "extra_model_outputs"),
    *("messages", "assistant_turns", "tokens", "custom_data"),
)
STATE_VERSION = 2
_STACK = "stack"
_PLAIN_KINDS = {float, int}
# A list of numbers is converted to these types anyway, so numbers can be stored without a type.
_USUAL_DTYPES = ("?", "q", "l", "d")
_ITEMS = (list, tuple)
# The types of a state's fields; a dict may also contain values that JSON cannot represent.
_STATE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("is_terminated", "is_truncated"), (bool, dict)),
    **dict.fromkeys(("t", "t_started"), (int, dict)),
    **dict.fromkeys(("observations", "actions", "rewards"), (*_ITEMS, dict)),
    **dict.fromkeys(("infos", "messages", "assistant_turns"), _ITEMS),
    **{"extra_model_outputs": (*_ITEMS, dict), "lookback": (int,), "duration_s": (int, float)},
    **{"tokens": (dict,), "custom_data": (dict,)},
}

# Seeded by the system, and reseeded in a forked child. This is much faster than a system call for every id.
_ids = random.Random()
os.register_at_fork(after_in_child=_ids.seed)


def check_reward(reward: Any, id_: str, step: int, agent: Any = None) -> None:
    """Raise an EpisodeError unless `reward` is a number, including NumPy scalars and 0-d arrays."""
    if isinstance(reward, Real | np.bool_):
        return
    if getattr(reward, "ndim", None) == 0 and hasattr(reward, "__float__") and not np.iscomplexobj(reward):
        return
    whose = "the reward" if agent is None else f"the reward of agent {agent!r}"
    raise EpisodeError(f"episode {id_}, step {step}: {whose} must be a number, got {reward!r:.80}")


def check_rewards(rewards: Any, id_: str) -> None:
    """Check a whole track of rewards. A track of plain numbers, the common case, is checked in one pass in C."""
    if isinstance(rewards, np.ndarray) and rewards.dtype.kind in "biuf":
        return
    if not isinstance(rewards, list) or set(map(type, rewards)) <= _PLAIN_KINDS:
        return
    for step, reward in enumerate(rewards):
        check_reward(reward, id_, step)


def copy_infos(infos: Any, id_: str, step: int, agent: Any = None) -> dict[str, Any] | None:
    """Return the infos of an observation as a new dict, or None if they are empty.

    Raises:
        EpisodeError: the infos are not a dict.
    """
    try:
        return dict(infos) if infos else None
    except (TypeError, ValueError):
        whose = "infos" if agent is None else f"the infos of agent {agent!r}"
        raise EpisodeError(f"episode {id_}, step {step}: {whose} must be a dict, got {infos!r:.80}") from None


def check_state(
    state: Any, versions: tuple[int, ...], needed: Iterable[str], types: Mapping[str, tuple[type, ...]]
) -> None:
    """Raise an EpisodeError unless `state` is a mapping of a known version whose `needed` fields have valid types."""
    if not isinstance(state, Mapping):
        raise EpisodeError(f"an episode state must be a dict as returned by get_state, got {state!r:.80}")
    version = state.get("schema_version")
    if version not in versions:
        known = f"version{'s' if len(versions) > 1 else ''} {' and '.join(map(str, versions))}"
        raise EpisodeError(f"the episode state has version {version!r}, but this release reads only {known}")
    if missing := {*needed} - state.keys():
        raise EpisodeError(f"the episode state is missing {', '.join(sorted(missing))}")
    for name, kinds in types.items():
        if not isinstance(state[name], kinds):
            raise EpisodeError(f"episode state: {name} must be {type_name(kinds[0]())}, got {state[name]!r:.80}")


class EpisodeStatus:
    """The length, the end and the duration of a single- or multi-agent episode."""

    __slots__ = ()
    is_terminated: bool
    is_truncated: bool
    _earlier_s: float
    _start_time: float | None
    _last_step_time: float | None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def is_done(self) -> bool:
        """True if the episode is terminated or truncated."""
        return self.is_terminated or self.is_truncated

    @property
    def terminated(self) -> bool:
        """True if the task ended in this chunk."""
        return self.is_terminated

    @property
    def truncated(self) -> bool:
        """True if the episode was cut off in this chunk."""
        return self.is_truncated

    def env_steps(self) -> int:
        """Return the number of environment steps, excluding the lookback."""
        return len(self)

    def size(self) -> str:
        """Return the episode's length and whether the episode is over, as a phrase for messages."""
        end = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "not over"
        return f"{len(self)} steps, {end}"

    def get_duration_s(self) -> float:
        """Return the number of seconds from the reset to the last step.

        The time between saving a state and restoring it is excluded.
        """
        if self._start_time is None or self._last_step_time is None:
            return self._earlier_s
        return self._earlier_s + self._last_step_time - self._start_time


class EpisodeData(EpisodeStatus):
    """The data of an episode. The raw tracks, such as `_observations`, are stored in the forms that `storage` defines.

    The first `_lookback` items of every track precede the episode. In `_infos`, None represents an empty dict, because
    a dict would take 64 bytes per step.
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
        self.extra_model_outputs: dict[str, InfiniteLookbackBuffer[Any]] = {}
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
            check_rewards(self._rewards, self.id_)
            steps, outputs = len(self._rewards), extra_model_outputs or {}
            self._lookback = steps if len_lookback_buffer == "auto" else min(len_lookback_buffer, steps)
            if self._lookback < 0:
                raise EpisodeError(f"episode {self.id_}: the lookback must not be negative, got {len_lookback_buffer}")
            given_infos = read_list(_given(infos)) or [None] * len(self._observations)
            self._infos = [copy_infos(info, self.id_, i) for i, info in enumerate(given_infos)]
            self.extra_model_outputs = {
                key: InfiniteLookbackBuffer(_given(items), self._lookback) for key, items in outputs.items()
            }
            self.is_numpy = any(not isinstance(data, list) for data in self._stored())
            self.t += steps - self._lookback
            self.validate()

    def _stored(self) -> list[Any]:
        """Return the tracks that are stored compactly: all except the infos."""
        outputs = (column.data for column in self.extra_model_outputs.values())
        return [self._observations, self._actions, self._rewards, *outputs]

    def _convert(self, function: Callable[[Any], Any]) -> None:
        self._observations = function(self._observations)
        self._actions, self._rewards = function(self._actions), function(self._rewards)
        for column in self.extra_model_outputs.values():
            column.data = function(column.data)

    def to_numpy(self) -> Self:
        """Store every track except the infos compactly, in place. Reading and appending still work as before."""
        self.validate()
        self._convert(compact)
        self.is_numpy = True
        return self

    def finalize(self) -> Self:
        """An older name for `to_numpy`."""
        return self.to_numpy()

    def to_lists(self) -> None:
        """Convert the tracks back to lists."""
        self._convert(read_list)
        self.is_numpy = False

    def validate(self) -> None:
        """Raise an EpisodeError that names the tracks whose lengths are inconsistent."""
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
            f"episode {self.id_}: {steps} rewards require {steps} actions and outputs, and {steps + 1} observations "
            f"and infos; got {', '.join(wrong)}"
        )

    # The tracks as columns, created on each access; changes to a column change the episode.

    def _column(self, name: str, space: Any = None) -> InfiniteLookbackBuffer[Any]:
        return InfiniteLookbackBuffer(getattr(self, name), self._lookback, space, partial(self._set_track, name))

    def _set_track(self, name: str, data: Any) -> None:
        data = read_list(data) if name == "_infos" else data
        setattr(self, name, data)
        self.is_numpy = self.is_numpy or not isinstance(data, list)

    @property
    def observations(self) -> InfiniteLookbackBuffer[Any]:
        """The track of observations."""
        return self._column("_observations", self.observation_space)

    @observations.setter
    def observations(self, items: Iterable[Any]) -> None:
        self._observations = _given(items)

    @property
    def infos(self) -> InfiniteLookbackBuffer[dict[str, Any]]:
        """The track of infos."""
        self._infos[:] = [{} if info is None else info for info in self._infos]
        return self._column("_infos")

    @infos.setter
    def infos(self, items: Iterable[dict[str, Any]]) -> None:
        self._infos = read_list(_given(items))

    @property
    def actions(self) -> InfiniteLookbackBuffer[Any]:
        """The track of actions."""
        return self._column("_actions", self.action_space)

    @actions.setter
    def actions(self, items: Iterable[Any]) -> None:
        self._actions = _given(items)

    @property
    def rewards(self) -> InfiniteLookbackBuffer[float]:
        """The track of rewards."""
        return self._column("_rewards")

    @rewards.setter
    def rewards(self, items: Iterable[float]) -> None:
        self._rewards = _given(items)

    # Data of a language-model agent, created on first access

    @property
    def messages(self) -> list[Message]:
        """The conversation. Each message is stored only once."""
        if self._messages is None:
            self._messages = []
        return self._messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self._messages = messages

    @property
    def assistant_turns(self) -> array[int]:
        """For each action after the lookback, the position of its message in `messages`."""
        if self._turns is None:
            self._turns = array("i")
        return self._turns

    @assistant_turns.setter
    def assistant_turns(self, turns: array[int]) -> None:
        self._turns = turns

    @property
    def tokens(self) -> EpisodeTokens:
        """The exact tokens. Their step numbers count from the first action after the lookback."""
        if self._tokens is None:
            self._tokens = EpisodeTokens()
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: EpisodeTokens) -> None:
        self._tokens = tokens

    @property
    def lookback(self) -> int:
        """The number of preceding steps that are kept."""
        return self._lookback

    def __len__(self) -> int:
        return self.t - self.t_started

    def __eq__(self, other: object) -> bool:
        """Compare the records; the clock and the spaces are ignored."""
        if not isinstance(other, EpisodeData):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in COMPARED)

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Return every field; lists of arrays are merged.

        The clock is stopped, so any process can continue the episode.
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
                setattr(self, name, read_list(getattr(self, name)))
        self.extra_model_outputs = {
            key: InfiniteLookbackBuffer(read_list(data) if was_list else data, self._lookback, space)
            for (key, (data, space)), was_list in zip(outputs.items(), listed[3:], strict=True)
        }

    # Chunks

    def cut(self, len_lookback_buffer: int = 0) -> Self:
        """Return an empty chunk that continues this episode. Its lookback consists of this episode's last steps.

        Raises:
            EpisodeError: the episode is over, or the lookback is negative.
        """
        if self.is_done:
            raise EpisodeError(f"episode {self.id_} is over ({self.size()}) and cannot be cut")
        if not len(self._observations):
            raise EpisodeError(f"episode {self.id_}: call add_env_reset before cut")
        return self._part(len(self), len(self), len_lookback_buffer)

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> Self:
        """Return the chunk with the steps selected by `slice_`, which is clipped like a list slice.

        Raises:
            EpisodeError: the slice's step is not 1, the lookback is negative, or the episode has no observation.
            TypeError: `slice_` is not a slice.
        """
        if not isinstance(slice_, slice):
            raise TypeError(
                f"an episode index must be a slice of steps, episode[a:b], got {slice_!r}; for a single item, "
                "call get_observations(i), get_actions(i), …"
            )
        if slice_.step not in (None, 1):
            raise EpisodeError(f"episode {self.id_}: the step of an episode slice must be 1, got {slice_.step!r}")
        if not len(self._observations):
            raise EpisodeError(f"episode {self.id_}: call add_env_reset before taking a slice")
        start, stop, _ = slice_.indices(self.t - self.t_started)
        lookback = self._lookback if len_lookback_buffer is None else len_lookback_buffer
        return self._part(start, stop if stop > start else start, lookback)

    def __getitem__(self, slice_: Any) -> Self:
        return self.slice(slice_)

    def _part(self, start: int, stop: int, lookback: int) -> Self:
        """Return the chunk from step `start` to `stop`; the constructor is bypassed for speed."""
        if lookback < 0:
            raise EpisodeError(f"episode {self.id_}: the lookback must not be negative, got {lookback}")
        first, last = self._lookback + start, self._lookback + stop
        begin = first - lookback if lookback < first else 0
        lookback = first - begin
        kind = type(self)
        chunk = kind.__new__(kind)
        if self.is_numpy:
            chunk._observations = slice_column(self._observations, begin, last + 1)
            chunk._actions = slice_column(self._actions, begin, last)
            chunk._rewards = slice_column(self._rewards, begin, last)
        else:
            chunk._observations = self._observations[begin : last + 1]
            chunk._actions = self._actions[begin:last]
            chunk._rewards = self._rewards[begin:last]
        chunk._infos = self._infos[begin : last + 1]
        chunk._lookback = lookback
        outputs = self.extra_model_outputs
        chunk.extra_model_outputs = {}
        for key in outputs:
            data = slice_column(outputs[key].data, begin, last)
            chunk.extra_model_outputs[key] = InfiniteLookbackBuffer(data, lookback, outputs[key].space)
        chunk.id_, chunk.is_numpy = self.id_, self.is_numpy
        chunk.t_started, chunk.t = self.t_started + start, self.t_started + stop
        at_end = chunk.t == self.t
        chunk.is_terminated, chunk.is_truncated = at_end and self.is_terminated, at_end and self.is_truncated
        chunk.observation_space, chunk.action_space = self.observation_space, self.action_space
        chunk.agent_id, chunk.module_id = self.agent_id, self.module_id
        chunk.multi_agent_episode_id = self.multi_agent_episode_id
        chunk.custom_data = deepcopy(self.custom_data) if self.custom_data else {}
        chunk._earlier_s, chunk._start_time, chunk._last_step_time = 0.0, None, None
        chunk._messages, chunk._turns, chunk._tokens = None, None, None
        if self._messages or self._tokens:
            turns = self.assistant_turns
            end = turns[stop] if stop < len(turns) else len(self.messages)
            chunk.messages, chunk.assistant_turns = self.messages[:end], turns[start:stop]
            chunk.tokens = self.tokens.part(start, stop if stop < len(self) else None)
        return chunk

    def concat_episode(self, other: EpisodeData) -> None:
        """Append the chunk that follows this one, in place.

        Raises:
            EpisodeError: `other` is not the next chunk; this episode is then left unchanged.
        """
        begin, problem = other._lookback, ""
        if other.id_ != self.id_:
            problem = f"{other.id_} is a different episode"
        elif self.is_done:
            problem = f"it is over ({self.size()})"
        elif not (len(self._observations) and len(other._observations)):
            problem = "both chunks need at least one observation"
        elif self.t != other.t_started:
            problem = f"it stops at t={self.t}, but the chunk begins at t={other.t_started}"
        elif not same_value(self._observations[len(self._observations) - 1], other._observations[begin]):
            problem = "its last observation is not the chunk's first"
        elif other._messages and other._messages[: len(self.messages)] != self.messages:
            problem = "its conversation does not begin with the episode's"
        if problem:
            raise EpisodeError(f"cannot append the chunk to episode {self.id_}: {problem}")
        self.validate()
        other.validate()
        tokens = self.tokens.continued(other._tokens, len(self)) if other._tokens else self._tokens
        if other._messages:
            self._messages, self._turns = other._messages[:], self.assistant_turns + other.assistant_turns
        self._tokens = tokens
        self._observations = concat_columns(
            slice_column(self._observations, 0, len(self._observations) - 1),
            slice_column(other._observations, begin, len(other._observations)),
        )
        self._infos = self._infos[:-1] + other._infos[begin:]
        # A key that is missing in one of the two counts as None in all steps of that chunk, as in `add_env_step`.
        before, after = len(self._rewards), len(other)
        for key in {**self.extra_model_outputs, **other.extra_model_outputs}:
            mine, theirs = self.extra_model_outputs.get(key), other.extra_model_outputs.get(key)
            data = [None] * before if mine is None else mine.data
            added = [None] * after if theirs is None else slice_column(theirs.data, begin, len(theirs.data))
            space = (mine or theirs).space  # type: ignore[union-attr]
            self.extra_model_outputs[key] = InfiniteLookbackBuffer(concat_columns(data, added), self._lookback, space)
        self._actions = concat_columns(self._actions, slice_column(other._actions, begin, len(other._actions)))
        self._rewards = concat_columns(self._rewards, slice_column(other._rewards, begin, len(other._rewards)))
        self._earlier_s = self.get_duration_s() + other.get_duration_s()
        self._start_time = self._last_step_time = None
        self.t = other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)

    # Conversion to plain values

    def get_data_dict(self) -> dict[str, Any]:
        """Return the steps as columns of equal length, keyed by RLlib's names.

        `obs` and `infos` contain the values before each action.
        """
        steps = len(self)
        columns: dict[str, Any] = {
            "terminateds": [False] * (steps - 1) + [self.is_terminated] if steps else [],
            "truncateds": [False] * (steps - 1) + [self.is_truncated] if steps else [],
            "t": list(range(self.t_started, self.t)),
            "eps_id": [self.id_] * steps,
        }
        if self.is_numpy:
            # The ids remain a list, while the other columns are arrays of numbers.
            kinds = {"terminateds": np.bool_, "truncateds": np.bool_, "t": np.int64}
            columns |= {name: np.array(columns[name], dtype=kind) for name, kind in kinds.items()}
        columns["obs"] = read(self._observations, self._lookback, slice(None, -1))
        columns["infos"] = [{} if info is None else info for info in self._infos[self._lookback : -1]]
        columns["actions"] = read(self._actions, self._lookback)
        columns["rewards"] = read(self._rewards, self._lookback)
        return columns | {key: column.get() for key, column in self.extra_model_outputs.items()}

    def get_sample_batch(self) -> dict[str, Any]:
        """Return the result of `get_data_dict`, since this package, unlike RLlib, has no batch class."""
        return self.get_data_dict()

    def get_state(self) -> dict[str, Any]:
        """Return the whole episode, except its spaces, as a value that JSON and msgpack can encode.

        The value shares no data with the episode.
        """
        tracks = {name: getattr(self, f"_{name}") for name in ("observations", "actions", "rewards")}
        outputs = {key: column.data for key, column in self.extra_model_outputs.items()}
        return {
            "schema_version": STATE_VERSION,
            **{name: to_json_value(getattr(self, name)) for name in IDENTITY},
            **{name: _track_state(data) for name, data in tracks.items()},
            "infos": [to_json_value(info) if info else {} for info in self._infos],
            "extra_model_outputs": [[to_json_value(key), _track_state(data)] for key, data in outputs.items()],
            "lookback": self.lookback,
            "is_numpy": self.is_numpy,
            "messages": [to_json_value(message.to_chat()) for message in self.messages],
            "assistant_turns": self.assistant_turns.tolist(),
            "tokens": self.tokens.get_state(),
            "custom_data": to_json_value(self.custom_data),
            "duration_s": self.get_duration_s(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, observation_space: Any = None, action_space: Any = None) -> Self:
        """Return the episode for a state from `get_state`.

        Raises:
            EpisodeError: the version of the state is unknown, or a field is missing or invalid.
        """
        needed = [*COMPARED, "lookback", "duration_s"]
        if isinstance(state, Mapping) and state.get("schema_version") == STATE_VERSION:
            needed.append("is_numpy")
        check_state(state, (1, STATE_VERSION), needed, _STATE_TYPES)
        episode = cls(state["id_"], observation_space=observation_space, action_space=action_space)
        with boundary(EpisodeError, "the episode state cannot be read"):
            episode._fill(state)
        return episode

    def _fill(self, state: Mapping[str, Any]) -> None:
        is_numpy, lookback = state.get("is_numpy", False), state["lookback"]
        for name in IDENTITY:
            setattr(self, name, from_json_value(state[name]))
        for name in ("observations", "actions", "rewards"):
            setattr(self, f"_{name}", _track_from(state[name], is_numpy))
        self._infos = [info or None for info in from_json_value(state["infos"])]
        outputs = state["extra_model_outputs"]
        if state["schema_version"] == 1:
            tracks = from_json_value(outputs)
        else:
            tracks = {from_json_value(key): _track_from(track, is_numpy) for key, track in outputs}
        self.extra_model_outputs = {key: InfiniteLookbackBuffer(data, lookback) for key, data in tracks.items()}
        self._lookback, self.is_numpy = lookback, is_numpy
        self.messages = []
        for number, chat in enumerate(state["messages"]):
            try:
                self.messages.append(Message.model_validate(from_json_value(chat)))
            except pydantic.ValidationError as error:
                problems = "; ".join(describe_validation_error(error))
                raise EpisodeError(f"episode state, messages[{number}]: {problems}") from None
        self.assistant_turns = array("i", state["assistant_turns"])
        self.tokens = EpisodeTokens.from_state(state["tokens"])
        self.custom_data = from_json_value(state["custom_data"])
        self._earlier_s = state["duration_s"]
        self.validate()
        check_rewards(self._rewards, self.id_)


def _packed(data: Any) -> Any:
    """Merge a list of arrays to make pickling 20 times faster. Plain values are left unchanged."""
    are_arrays = isinstance(data, list) and data and type(data[0]) is np.ndarray
    return compact(data, exact=True) if are_arrays else data


def _given(items: Any) -> Any:
    """Return compact storage unchanged, and any other sequence as a new list."""
    if items is None:
        return []
    if isinstance(items, InfiniteLookbackBuffer):
        items = items.data
    return items if is_compact(items) else list(items)


def _track_state(data: Any) -> Any:
    data = _packed(data)
    if isinstance(data, np.ndarray) and (data.ndim > 1 or data.dtype.char not in _USUAL_DTYPES):
        return {TAG: _STACK, "value": to_json_value(data)}
    items = read_list(data)
    return list(items) if _is_plain(items) else [to_json_value(item) for item in items]


def _track_from(state: Any, is_numpy: bool) -> Any:
    is_stack = isinstance(state, dict) and state.get(TAG) == _STACK
    data = from_json_value(state["value"] if is_stack else state)
    return compact(data) if is_numpy else read_list(data)


def _is_plain(items: list[Any]) -> bool:
    """Return True if all items are strings or all items are finite numbers. The check takes one pass in C."""
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
        return bool(min(items) >= -(2**63) and max(items) < 2**64)  # `to_json_value` handles larger ones
    # A single non-finite item makes the sum non-finite.
    return math.isfinite(sum(items)) or all(map(math.isfinite, items))
