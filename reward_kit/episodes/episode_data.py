"""What an episode stores: the tracks, the conversation, the tokens, and which episode it is.

`SingleAgentEpisode` adds to it what can be done with them; `chunks` and `state` work on this alone.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from reward_kit.episodes.columns import Column, same_value
from reward_kit.episodes.compaction import compact
from reward_kit.episodes.reward_values import check_rewards
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.storage import as_list, is_compact
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

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
