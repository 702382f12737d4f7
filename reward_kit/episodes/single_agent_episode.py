"""`SingleAgentEpisode`: the one record of what happened in one run of one policy.

The names and the index grammar are those of RLlib's class on its new API stack, so that a program written for it runs
here with the import changed. On top of RLlib's five tracks an episode holds what a language-model agent adds: the
conversation, stored once (`messages`, with the position of each action's message in `assistant_turns`), and the exact
tokens (`tokens`). `StepData`, histories, token rows and reports are views of it.

An episode of T steps has T + 1 observations and infos, and T actions, rewards and extra model outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from reward_kit.episodes.columns import Column, Indices, places_of, read, written
from reward_kit.episodes.episode_data import (
    REWARD,
    EpisodeData,
    check_reward,
    check_state,
    concat,
    cut,
    data_dict,
    fill,
    sliced,
    state_of,
)
from reward_kit.episodes.storage import compact
from reward_kit.errors import EpisodeError, boundary, did_you_mean
from reward_kit.models import Message


class SingleAgentEpisode(EpisodeData):
    """One episode, or a chunk of one.

    Args:
        id_: unique; a random one by default.
        observations: T + 1 items, or none yet.
        observation_space: what an observation may be (any object with the attributes of Gymnasium's spaces).
        infos: one dict per observation; empty ones by default.
        actions: T items.
        action_space: what an action may be.
        rewards: T numbers.
        extra_model_outputs: T items per key.
        terminated: the task ended; the future is worth nothing.
        truncated: the episode was cut off; the future would have been worth something.
        t_started: the environment's time of the first observation after the lookback.
        len_lookback_buffer: how many of the given steps are lookback; "auto" means all of them.
        agent_id: which agent of an episode of several it is.
        module_id: which policy acts for it.
        multi_agent_episode_id: the episode of several that it is part of.

    Raises:
        EpisodeError: the tracks do not fit together.
    """

    __slots__ = ()

    # Building

    def add_env_reset(self, observation: Any, infos: Mapping[str, Any] | None = None) -> None:
        """Begin with the environment's first observation.

        Raises:
            EpisodeError: the episode has begun already.
        """
        if self.is_reset or self.is_done:
            raise EpisodeError(f"episode {self.id_}: add_env_reset comes first and once; it has {self.size()}")
        if self.is_numpy:
            self.to_lists()
        self._observations.append(observation)
        self._infos.append(dict(infos) if infos else None)
        self._start_time = perf_counter()

    def add_env_step(
        self,
        observation: Any,
        action: Any,
        reward: float | None,
        infos: Mapping[str, Any] | None = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add one action and what came of it.

        Args:
            observation: what the environment shows after the action.
            action: what the policy did.
            reward: the environment's reward; None where it gave none, which `environment_rewards` tells from 0.0.
            infos: facts about this step.
            terminated: the task ended with this step.
            truncated: the episode was cut off after this step.
            extra_model_outputs: what else the policy put out. A key that was not there in earlier steps counts as None
                in them, and the other way round.

        Raises:
            EpisodeError: the episode has not begun or is over, or the reward, the infos or the outputs are none;
                nothing of the step is kept then.
        """
        if self.is_numpy or self.is_terminated or self.is_truncated or not self._observations:
            self._open()
        try:
            kept = dict(infos) if infos else None
        except (TypeError, ValueError):
            raise EpisodeError(f"{self._here()}: infos are a dict; got {infos!r:.80}") from None
        if type(reward) is not float:
            if reward is None:
                reward, kept = 0.0, {**(kept or {}), REWARD: None}
            elif type(reward) is not int:
                check_reward(reward, self.id_, len(self))
        if extra_model_outputs or self.extra_model_outputs:
            self._append_outputs(extra_model_outputs or {})
        self._observations.append(observation)
        self._actions.append(action)
        self._rewards.append(reward)
        self._infos.append(kept)
        self.t += 1
        self.is_terminated = terminated
        self.is_truncated = truncated
        self._last_step_time = now = perf_counter()
        if self._start_time is None:
            self._start_time = now

    def _open(self) -> None:
        """Make ready for a step, or refuse it."""
        if not self.is_reset:
            raise EpisodeError(f"episode {self.id_}: call add_env_reset before add_env_step")
        if self.is_done:
            raise EpisodeError(f"episode {self.id_} is over and takes no further step; it has {self.size()}")
        self.to_lists()

    def _here(self) -> str:
        return f"episode {self.id_}, step {len(self)}"

    def _append_outputs(self, outputs: Mapping[str, Any]) -> None:
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            raise EpisodeError(f"{self._here()}: extra_model_outputs are a dict; got {outputs!r:.80}")
        columns = self.extra_model_outputs
        for key, value in outputs.items():
            column = columns.get(key)
            if column is None:
                column = columns[key] = Column([None] * len(self._rewards), self._lookback)
            column.data.append(value)
        if len(outputs) < len(columns):
            for key in columns.keys() - outputs.keys():
                columns[key].data.append(None)

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Append messages that are not the policy's to the conversation."""
        self.messages.extend(messages)

    def add_assistant_message(self, message: Message) -> None:
        """Append the message of the action that is being taken; each action has exactly one."""
        self.assistant_turns.append(len(self.messages))
        self.messages.append(message)

    # Reading: by an int, a slice or a list of ints; `columns` has the index grammar

    def get_observations(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Observations by int, slice or list of ints; `columns` says in what form several of them come.

        Args:
            indices: which; all after the lookback for None.
            neg_index_as_lookback: -1 is the item just before index 0, and not the last.
            fill: stands for what is out of range; with a space, an item of the space with it in every place.
            one_hot_discrete: discrete parts as one-hot vectors; needs the space.

        Raises:
            IndexError: an index is out of range and there is no `fill`.
            TypeError: `indices` is no index.
        """
        space = self.observation_space
        return read(self._observations, self._lookback, indices, neg_index_as_lookback, fill, space, one_hot_discrete)

    def get_actions(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Actions, as `get_observations` has observations."""
        space = self.action_space
        return read(self._actions, self._lookback, indices, neg_index_as_lookback, fill, space, one_hot_discrete)

    def get_rewards(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """The environment's rewards by int, slice or list of ints."""
        return read(self._rewards, self._lookback, indices, neg_index_as_lookback, fill)

    def get_infos(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Infos by int, slice or list of ints; always the dicts themselves, which may be written to."""
        infos, lookback = self._infos, self._lookback
        if type(indices) is int and 0 <= indices < len(infos) - lookback:  # what every step asks for, several times
            if (info := infos[lookback + indices]) is None:
                info = infos[lookback + indices] = {}
            return info
        places = places_of(len(infos), lookback, indices, neg_index_as_lookback, fill is not None)
        for place in [places] if isinstance(places, int) else places:
            if 0 <= place < len(infos) and infos[place] is None:
                infos[place] = {}
        return read(infos, lookback, indices, neg_index_as_lookback, fill)

    def get_extra_model_outputs(
        self, key: str, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """One extra model output by int, slice or list of ints.

        Raises:
            KeyError: no step has this key.
        """
        return self._output(key).get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def _output(self, key: str) -> Column[Any]:
        if key not in self.extra_model_outputs:
            raise KeyError(f"no extra model output {key!r}{did_you_mean(key, self.extra_model_outputs)}")
        return self.extra_model_outputs[key]

    def get_return(self) -> float:
        """The undiscounted sum of the rewards, without the lookback."""
        rewards = self._rewards[self._lookback :]
        return float(np.sum(rewards) if isinstance(rewards, np.ndarray) else sum(rewards))

    def environment_rewards(self) -> list[float | None]:
        """(T,) what the environment gave in each step; None where it gave nothing, which `get_rewards` has as 0.0."""
        infos = self._infos[self._lookback + 1 :]
        return [
            None if info and info.get(REWARD, reward) is None else float(reward)
            for reward, info in zip(self.get_rewards(), infos, strict=True)
        ]

    def turn_end(self, t: int) -> int:
        """The position in `messages` behind all that followed the t-th action."""
        return self.assistant_turns[t + 1] if t + 1 < len(self.assistant_turns) else len(self.messages)

    def answers_to(self, t: int) -> list[Message]:
        """The messages between the t-th action and the next: tools' answers, a user's turn, a nudge."""
        return self.messages[self.assistant_turns[t] + 1 : self.turn_end(t)]

    # Changing

    def set_observations(
        self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Put other observations in the place of those at an int, a slice or a list of ints, or of all.

        Raises:
            IndexError: an index is out of range, or there are more or fewer new items than places.
        """
        data = written(self._observations, self._lookback, new_data, at_indices, neg_index_as_lookback)
        self._observations = data

    def set_actions(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Put other actions in their place, as `set_observations` does."""
        self._actions = written(self._actions, self._lookback, new_data, at_indices, neg_index_as_lookback)

    def set_rewards(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Put other rewards in their place, as `set_observations` does."""
        self._rewards = written(self._rewards, self._lookback, new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Put other items of one extra model output in their place, as `set_observations` does.

        Raises:
            KeyError: no step has this key.
        """
        self._output(key).set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    # Chunks

    def cut(self, len_lookback_buffer: int = 0) -> SingleAgentEpisode:
        """An episode without steps that goes on where this one stops, with the last steps as its lookback.

        Raises:
            EpisodeError: the episode is over, or the lookback is negative.
        """
        return cut(self, len_lookback_buffer)

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> SingleAgentEpisode:
        """The chunk of the steps that `slice_` takes, clipped as a list's slice is; see `chunks` for what it keeps.

        Raises:
            EpisodeError: the slice has a step, or the lookback is negative.
            TypeError: it is no slice.
        """
        return sliced(self, slice_, len_lookback_buffer)

    def __getitem__(self, slice_: Any) -> SingleAgentEpisode:
        return sliced(self, slice_, None)

    def concat_episode(self, other: SingleAgentEpisode) -> None:
        """Append the chunk that follows this one, in place.

        Raises:
            EpisodeError: `other` is not the next chunk of this episode; nothing is changed then.
        """
        concat(self, other)

    # How it stands

    @property
    def is_reset(self) -> bool:
        """The first observation is there."""
        return len(self._observations) > 0

    @property
    def is_finalized(self) -> bool:
        """Stored compactly; `is_numpy` by its older name."""
        return self.is_numpy

    @property
    def terminated(self) -> bool:
        """The task ended in this chunk."""
        return self.is_terminated

    @property
    def truncated(self) -> bool:
        """The episode was cut off in this chunk."""
        return self.is_truncated

    def env_steps(self) -> int:
        """The number of steps, without the lookback."""
        return len(self)

    def agent_steps(self) -> int:
        """The same as `env_steps`: one agent acts in every step."""
        return len(self)

    def __repr__(self) -> str:
        return f"SingleAgentEpisode({self.id_!r}, {self.size()}, return {self.get_return():g})"

    def _repr_html_(self) -> str:
        from reward_kit.episodes.episode_html import episode_html

        return episode_html(self, self.environment_rewards(), lambda t: (self.get_observations(t), self.get_actions(t)))

    # States

    def to_numpy(self) -> SingleAgentEpisode:
        """Store every track but the infos compactly, in place; reading and adding go on as before."""
        self.validate()
        self._restore(compact)
        self.is_numpy = True
        return self

    def finalize(self) -> SingleAgentEpisode:
        """`to_numpy` by its older name."""
        return self.to_numpy()

    def get_data_dict(self) -> dict[str, Any]:
        """The steps as columns of one length, under RLlib's names; `obs` and `infos` are those acted in."""
        return data_dict(self)

    def get_sample_batch(self) -> dict[str, Any]:
        """The same as `get_data_dict`: a plain dict, since there is no batch class here."""
        return data_dict(self)

    def get_state(self) -> dict[str, Any]:
        """The whole episode but its spaces, as JSON and msgpack hold it; nothing is shared with it."""
        return state_of(self)

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, observation_space: Any = None, action_space: Any = None
    ) -> SingleAgentEpisode:
        """The inverse of `get_state`.

        Raises:
            EpisodeError: the state is of another version, or a field is missing or cannot be read.
        """
        check_state(state)
        episode = cls(state["id_"], observation_space=observation_space, action_space=action_space)
        with boundary(EpisodeError, "the episode state cannot be read"):
            fill(episode, state)
        return episode
