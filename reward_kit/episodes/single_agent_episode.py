"""`SingleAgentEpisode`, the record of a single policy's episode.

The names and the index rules match those of the class in RLlib's new API stack, so in a program written for RLlib, only
the import needs to be changed. In addition to RLlib's five tracks, an episode stores the data of a language-model
agent: the conversation (`messages`), the position of each action's message (`assistant_turns`) and the exact tokens
(`tokens`). `StepData`, histories, token rows and reports are views of the episode.

An episode of T steps has T + 1 observations and infos, and T actions, rewards and extra model outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from reward_kit.episodes.columns import Indices, InfiniteLookbackBuffer, read, resolve_positions, write
from reward_kit.episodes.episode_data import REWARD, EpisodeData, check_reward, copy_infos
from reward_kit.errors import EpisodeError, did_you_mean
from reward_kit.models import Message


class SingleAgentEpisode(EpisodeData):
    """An episode, or a chunk of an episode.

    Args:
        id_: the unique id; random by default.
        observations: T + 1 items, or no items yet.
        observation_space: the space of observations: any object that has the attributes of Gymnasium's spaces.
        infos: one dict per observation; empty dicts by default.
        actions: T items.
        action_space: the space of actions.
        rewards: T numbers.
        extra_model_outputs: T items per key.
        terminated: True if the task ended, so the value of later steps is 0.
        truncated: True if the episode was cut off, so later steps would have had a value.
        t_started: the environment time of the first observation after the lookback.
        len_lookback_buffer: how many of the given steps form the lookback; "auto" means all of them.
        agent_id: the id of the agent in a multi-agent episode.
        module_id: the policy that acts for the agent.
        multi_agent_episode_id: the id of the multi-agent episode that contains this one.

    Raises:
        EpisodeError: the lengths of the tracks are inconsistent.
    """

    __slots__ = ()

    # Building

    def add_env_reset(self, observation: Any, infos: Mapping[str, Any] | None = None) -> None:
        """Add the environment's first observation.

        Raises:
            EpisodeError: the episode has already begun, or `infos` is not a dict.
        """
        if self.is_reset or self.is_done:
            raise EpisodeError(
                f"episode {self.id_}: add_env_reset must be called once, before any step; "
                f"the episode already has {self.size()}"
            )
        kept = copy_infos(infos, self.id_, 0)
        if self.is_numpy:
            self.to_lists()
        self._observations.append(observation)
        self._infos.append(kept)
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
        """Add one action and its results.

        Args:
            observation: the environment's observation after the action.
            action: the policy's action.
            reward: the environment's reward; None if the environment returned none. `environment_rewards` distinguishes
                a missing reward from 0.0.
            infos: additional information about this step.
            terminated: True if the task ended with this step.
            truncated: True if the episode was cut off after this step.
            extra_model_outputs: additional outputs of the policy. In steps where a key is missing, its value is None.

        Raises:
            EpisodeError: the episode has not begun or is over, or the reward, the infos or the outputs are invalid. The
                episode is then left unchanged.
        """
        if self.is_numpy or self.is_terminated or self.is_truncated or not self._observations:
            if not self.is_reset:
                raise EpisodeError(f"episode {self.id_}: call add_env_reset before add_env_step")
            if self.is_done:
                raise EpisodeError(f"episode {self.id_} is over ({self.size()}); no further step can be added")
            self.to_lists()
        kept = None
        if infos:
            kept = dict(infos) if type(infos) is dict else copy_infos(infos, self.id_, len(self))
        if type(reward) is not float:
            if reward is None:
                reward, kept = 0.0, {**(kept or {}), REWARD: None}
            elif type(reward) is not int:
                check_reward(reward, self.id_, len(self))
        if extra_model_outputs or self.extra_model_outputs:
            outputs, columns = extra_model_outputs or {}, self.extra_model_outputs
            if type(outputs) is not dict and not isinstance(outputs, Mapping):
                raise EpisodeError(f"{self._here()}: extra_model_outputs must be a dict, got {outputs!r:.80}")
            for key, value in outputs.items():
                column = columns.get(key)
                if column is None:
                    column = columns[key] = InfiniteLookbackBuffer([None] * len(self._rewards), self._lookback)
                column.append(value)
            if len(outputs) < len(columns):
                for key in columns.keys() - outputs.keys():
                    columns[key].append(None)
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

    def _here(self) -> str:
        return f"episode {self.id_}, step {len(self)}"

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Extend the conversation with messages that the policy did not write."""
        self.messages.extend(messages)

    def add_assistant_message(self, message: Message) -> None:
        """Append the message of the current action. Each action has exactly one message."""
        self.assistant_turns.append(len(self.messages))
        self.messages.append(message)

    # Reading: by an int, a slice or a list of ints, as documented in `columns`

    def get_observations(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return observations by int, slice or list of ints.

        Args:
            indices: the indices; None for all observations after the lookback.
            neg_index_as_lookback: True if -1 is the item just before index 0 instead of the last item.
            fill: the value that replaces items that are out of range. If the episode has a space, such an item is
                replaced by an item of the space with every number set to `fill`.
            one_hot_discrete: whether to return discrete parts as one-hot vectors. This requires the space.

        Raises:
            IndexError: an index is out of range and there is no `fill`.
            TypeError: `indices` has an unsupported type.
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
        """Return actions; see `get_observations` for the arguments."""
        space = self.action_space
        return read(self._actions, self._lookback, indices, neg_index_as_lookback, fill, space, one_hot_discrete)

    def get_rewards(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Return the environment's rewards by int, slice or list of ints."""
        return read(self._rewards, self._lookback, indices, neg_index_as_lookback, fill)

    def get_infos(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Return infos by int, slice or list of ints. The dicts are not copies and may be modified."""
        infos, lookback = self._infos, self._lookback
        if type(indices) is int and 0 <= indices < len(infos) - lookback:  # read several times in every step
            if (info := infos[lookback + indices]) is None:
                info = infos[lookback + indices] = {}
            return info
        positions = resolve_positions(len(infos), lookback, indices, neg_index_as_lookback, fill is not None)
        for position in [positions] if isinstance(positions, int) else positions:
            if 0 <= position < len(infos) and infos[position] is None:
                infos[position] = {}
        return read(infos, lookback, indices, neg_index_as_lookback, fill)

    def get_extra_model_outputs(
        self, key: str, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """Return one extra model output by int, slice or list of ints; raise a KeyError for an unknown key."""
        return self._output(key).get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def _output(self, key: str) -> InfiniteLookbackBuffer[Any]:
        if key not in self.extra_model_outputs:
            raise KeyError(f"no extra model output {key!r}{did_you_mean(key, self.extra_model_outputs)}")
        return self.extra_model_outputs[key]

    def get_return(self) -> float:
        """Return the undiscounted sum of the rewards, excluding the lookback."""
        rewards = self._rewards[self._lookback :]
        return float(np.sum(rewards) if isinstance(rewards, np.ndarray) else sum(rewards))

    def environment_rewards(self) -> list[float | None]:
        """Return the environment's reward for each of the T steps.

        A missing reward is None here but 0.0 in `get_rewards`.
        """
        infos = self._infos[self._lookback + 1 :]
        return [
            None if info and info.get(REWARD, reward) is None else float(reward)
            for reward, info in zip(self.get_rewards(), infos, strict=True)
        ]

    def turn_end(self, t: int) -> int:
        """Return the position in `messages` after the last message that follows the t-th action."""
        return self.assistant_turns[t + 1] if t + 1 < len(self.assistant_turns) else len(self.messages)

    def answers_to(self, t: int) -> list[Message]:
        """Return the messages between the t-th action and the next: tool results, a user's turn, or a reminder."""
        return self.messages[self.assistant_turns[t] + 1 : self.turn_end(t)]

    # Changing

    def set_observations(
        self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace the observations at an int, a slice or a list of ints, or all observations.

        Raises:
            IndexError: an index is out of range, or the number of new items differs from the number of indices.
        """
        data = write(self._observations, self._lookback, new_data, at_indices, neg_index_as_lookback)
        self._observations = data

    def set_actions(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Replace actions; see `set_observations` for the arguments."""
        self._actions = write(self._actions, self._lookback, new_data, at_indices, neg_index_as_lookback)

    def set_rewards(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Replace rewards; see `set_observations` for the arguments."""
        self._rewards = write(self._rewards, self._lookback, new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace items of one extra model output; see `set_observations`. Raise a KeyError for an unknown key."""
        self._output(key).set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    # State

    @property
    def is_reset(self) -> bool:
        """True if the first observation has been added."""
        return len(self._observations) > 0

    @property
    def is_finalized(self) -> bool:
        """True if the tracks are stored compactly; an older name for `is_numpy`."""
        return self.is_numpy

    def agent_steps(self) -> int:
        """Return the number of environment steps, since the agent acts in every step."""
        return len(self)

    def __repr__(self) -> str:
        return f"SingleAgentEpisode({self.id_!r}, {self.size()}, return {self.get_return():g})"

    def _repr_html_(self) -> str:
        from reward_kit.episodes.episode_html import episode_html

        return episode_html(self, self.environment_rewards(), lambda t: (self.get_observations(t), self.get_actions(t)))
