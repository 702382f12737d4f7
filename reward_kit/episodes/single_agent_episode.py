"""`SingleAgentEpisode`: the one record of what happened in one run of one policy.

The names and the index grammar are those of RLlib's class on its new API stack, so that a program written for it runs
here with the import changed. On top of RLlib's five tracks an episode holds what a language-model agent adds: the
conversation, stored once (`messages`, with the position of each action's message in `assistant_turns`), and the exact
tokens (`tokens`). `StepData`, histories, token rows and reports are views of it.

An episode of T steps has T + 1 observations and infos, and T actions, rewards and extra model outputs.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from reward_kit.episodes.columns import Column, Indices, RaggedNumbers, RaggedText, compact, same_value
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.errors import EpisodeError, did_you_mean
from reward_kit.models import Message

STATE_VERSION = 1
_REWARD = "environment_reward"  # in a step's infos: None where the environment gave none


class SingleAgentEpisode:
    """One episode, or a chunk of one.

    Args:
        id_: unique; a random one by default.
        observations: T + 1 items, or none yet.
        infos: one dict per observation; empty ones by default.
        actions: T items.
        rewards: T numbers.
        extra_model_outputs: T items per key.
        terminated: the task ended; the future is worth nothing.
        truncated: the episode was cut off; the future would have been worth something.
        t_started: the environment's time of the first observation after the lookback.
        len_lookback_buffer: how many of the given steps are lookback; "auto" means all of them.

    Raises:
        EpisodeError: the tracks do not fit together.
    """

    __slots__ = (
        "_earlier_s",
        "_last_step_time",
        "_start_time",
        "actions",
        "agent_id",
        "assistant_turns",
        "custom_data",
        "extra_model_outputs",
        "id_",
        "infos",
        "is_numpy",
        "is_terminated",
        "is_truncated",
        "messages",
        "module_id",
        "multi_agent_episode_id",
        "observations",
        "rewards",
        "t",
        "t_started",
        "tokens",
    )

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Iterable[Any] | None = None,
        infos: Iterable[Mapping[str, Any]] | None = None,
        actions: Iterable[Any] | None = None,
        rewards: Iterable[float] | None = None,
        extra_model_outputs: Mapping[str, Iterable[Any]] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        t_started: int | None = None,
        len_lookback_buffer: int | Literal["auto"] = "auto",
        agent_id: Any = None,
        module_id: Any = None,
        multi_agent_episode_id: str | None = None,
    ) -> None:
        self.id_ = id_ or uuid.uuid4().hex
        rewards = _given(rewards)
        lookback = len(rewards) if len_lookback_buffer == "auto" else min(len_lookback_buffer, len(rewards))
        if lookback < 0:
            raise EpisodeError(f"episode {self.id_}: a lookback cannot be negative, got {len_lookback_buffer}")
        self.observations: Column[Any] = Column(_given(observations), lookback)
        given_infos = [dict(info) for info in infos] if infos is not None else [{} for _ in self.observations.data]
        self.infos: Column[dict[str, Any]] = Column(given_infos, lookback)
        self.actions: Column[Any] = Column(_given(actions), lookback)
        self.rewards: Column[float] = Column(rewards, lookback)
        outputs = extra_model_outputs or {}
        self.extra_model_outputs: dict[str, Column[Any]] = {k: Column(list(v), lookback) for k, v in outputs.items()}
        self.is_terminated = terminated
        self.is_truncated = truncated
        self.t_started = t_started or 0
        self.t = self.t_started + len(self.rewards)
        self.custom_data: dict[str, Any] = {}
        self.messages: list[Message] = []
        self.assistant_turns: array[int] = array("i")
        self.tokens = EpisodeTokens()
        self.agent_id, self.module_id = agent_id, module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.is_numpy = False
        self._earlier_s = 0.0
        self._start_time: float | None = None
        self._last_step_time: float | None = None
        self.validate()

    # Building

    def add_env_reset(self, observation: Any, infos: Mapping[str, Any] | None = None) -> None:
        """Begin with the environment's first observation.

        Raises:
            EpisodeError: the episode has begun already.
        """
        if self.is_reset or self.is_done:
            raise EpisodeError(f"episode {self.id_}: add_env_reset comes first and once; it has {self._size()}")
        self.observations.append(observation)
        self.infos.append(dict(infos or {}))
        self._start_time = time.perf_counter()

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
            EpisodeError: the episode has not begun, or is over.
        """
        if not self.is_reset:
            raise EpisodeError(f"episode {self.id_}: call add_env_reset before add_env_step")
        if self.is_done:
            raise EpisodeError(f"episode {self.id_} is over and takes no further step; it has {self._size()}")
        if self.is_numpy:
            self._to_lists()
        self.observations.append(observation)
        facts = dict(infos) if infos else {}
        if reward is None:
            facts[_REWARD] = None
        self.infos.append(facts)
        self.actions.append(action)
        self.rewards.append(0.0 if reward is None else reward)
        self._append_outputs(extra_model_outputs or {})
        self.t += 1
        self.is_terminated, self.is_truncated = terminated, truncated
        self._last_step_time = time.perf_counter()
        if self._start_time is None:
            self._start_time = self._last_step_time

    def _append_outputs(self, outputs: Mapping[str, Any]) -> None:
        steps = len(self.rewards.data)
        for key in outputs:
            if key not in self.extra_model_outputs:
                self.extra_model_outputs[key] = Column([None] * (steps - 1), self.rewards.lookback)
        for key, column in self.extra_model_outputs.items():
            column.append(outputs.get(key))

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Append messages that are not the policy's to the conversation."""
        self.messages.extend(messages)

    def add_assistant_message(self, message: Message) -> None:
        """Append the message of the action that is being taken; each action has exactly one."""
        self.assistant_turns.append(len(self.messages))
        self.messages.append(message)

    def validate(self) -> None:
        """Check that the tracks fit together.

        Raises:
            EpisodeError: they do not; the message says which.
        """
        steps, observations = len(self.rewards.data), len(self.observations.data)
        expected = steps + 1 if observations else 0
        lengths = {"observations": observations, "infos": len(self.infos.data)}
        wrong = [f"{name} {n}" for name, n in lengths.items() if n != expected]
        outputs = {f"extra_model_outputs[{k!r}]": len(c.data) for k, c in self.extra_model_outputs.items()}
        wrong += [f"{name} {n}" for name, n in {"actions": len(self.actions.data), **outputs}.items() if n != steps]
        if wrong:
            raise EpisodeError(
                f"episode {self.id_}: {steps} rewards need {steps} actions and outputs and {steps + 1} observations "
                f"and infos; got {', '.join(wrong)}"
            )

    # Reading

    def get_observations(
        self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """Observations by int, slice or list of ints; see `columns` for the index grammar."""
        return self.observations.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_infos(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Infos by int, slice or list of ints."""
        return self.infos.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_actions(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Actions by int, slice or list of ints."""
        return self.actions.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_rewards(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """The environment's rewards by int, slice or list of ints."""
        return self.rewards.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_extra_model_outputs(
        self, key: str, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """One extra model output by int, slice or list of ints.

        Raises:
            KeyError: no step has this key.
        """
        if key not in self.extra_model_outputs:
            raise KeyError(f"no extra model output {key!r}{did_you_mean(key, self.extra_model_outputs)}")
        return self.extra_model_outputs[key].get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_return(self) -> float:
        """The undiscounted sum of the rewards, without the lookback."""
        return float(np.sum(self.rewards.data[self.rewards.lookback :]))

    def environment_rewards(self) -> list[float | None]:
        """(T,) what the environment gave in each step; None where it gave nothing, which `get_rewards` has as 0.0."""
        rewards, infos = self.get_rewards(), self.get_infos(slice(1, None))
        return [
            float(reward) if info.get(_REWARD, reward) is not None else None
            for reward, info in zip(rewards, infos, strict=True)
        ]

    def turn_end(self, t: int) -> int:
        """The position in `messages` behind all that followed the t-th action."""
        return self.assistant_turns[t + 1] if t + 1 < len(self.assistant_turns) else len(self.messages)

    def answers_to(self, t: int) -> list[Message]:
        """The messages between the t-th action and the next: tools' answers, a user's turn, a nudge."""
        return self.messages[self.assistant_turns[t] + 1 : self.turn_end(t)]

    def get_duration_s(self) -> float:
        """Seconds from the reset to the last step, 0.0 before either; a pause between two states does not count."""
        if self._start_time is None or self._last_step_time is None:
            return self._earlier_s
        return self._earlier_s + self._last_step_time - self._start_time

    @property
    def is_reset(self) -> bool:
        """The first observation is there."""
        return len(self.observations.data) > 0

    @property
    def is_done(self) -> bool:
        """Terminated or truncated."""
        return self.is_terminated or self.is_truncated

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

    def __len__(self) -> int:
        return self.t - self.t_started

    def __repr__(self) -> str:
        return f"SingleAgentEpisode({self.id_!r}, {self._size()}, return {self.get_return():g})"

    def __eq__(self, other: object) -> bool:
        """The same record; the clock does not count."""
        if not isinstance(other, SingleAgentEpisode):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in _COMPARED)

    __hash__ = None  # type: ignore[assignment]

    def _size(self) -> str:
        end = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "not over"
        return f"{len(self)} steps, {end}"

    # States

    def to_numpy(self) -> SingleAgentEpisode:
        """Store every track compactly (`columns.compact`), in place; reading and adding go on as before."""
        self.validate()
        for column in (self.observations, self.actions, self.rewards, *self.extra_model_outputs.values()):
            column.data = compact(column.data)
        self.is_numpy = True
        return self

    def _to_lists(self) -> None:
        for column in (self.observations, self.actions, self.rewards, *self.extra_model_outputs.values()):
            column.data = _as_list(column.data)
        self.is_numpy = False

    def get_state(self) -> dict[str, Any]:
        """The whole episode as JSON-safe values; `from_state` gives an equal one. Nothing is shared with it."""
        tracks = {name: _as_list(getattr(self, name).data) for name in ("observations", "infos", "actions", "rewards")}
        outputs = {key: _as_list(column.data) for key, column in self.extra_model_outputs.items()}
        return {
            "schema_version": STATE_VERSION,
            **{name: to_json_value(getattr(self, name)) for name in _PLAIN},
            **{name: to_json_value(data) for name, data in tracks.items()},
            "extra_model_outputs": to_json_value(outputs),
            "lookback": self.rewards.lookback,
            "messages": [to_json_value(message.to_chat()) for message in self.messages],
            "assistant_turns": self.assistant_turns.tolist(),
            "tokens": self.tokens.get_state(),
            "custom_data": to_json_value(self.custom_data),
            "duration_s": self.get_duration_s(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SingleAgentEpisode:
        """The inverse of `get_state`.

        Raises:
            EpisodeError: the state is of another version, or a field is missing.
        """
        version = state.get("schema_version")
        if version != STATE_VERSION:
            raise EpisodeError(f"episode state of version {version!r}; this release reads version {STATE_VERSION}")
        missing = {*_PLAIN, *_COMPARED, "lookback", "duration_s"} - state.keys()
        if missing:
            raise EpisodeError(f"episode state without {', '.join(sorted(missing))}")
        episode = cls(state["id_"])
        for name in _PLAIN:
            setattr(episode, name, from_json_value(state[name]))
        for name in ("observations", "infos", "actions", "rewards"):
            setattr(episode, name, Column(from_json_value(state[name]), state["lookback"]))
        outputs = from_json_value(state["extra_model_outputs"])
        episode.extra_model_outputs = {key: Column(data, state["lookback"]) for key, data in outputs.items()}
        episode.messages = [Message.model_validate(from_json_value(message)) for message in state["messages"]]
        episode.assistant_turns = array("i", state["assistant_turns"])
        episode.tokens = EpisodeTokens.from_state(state["tokens"])
        episode.custom_data = from_json_value(state["custom_data"])
        episode._earlier_s = state["duration_s"]
        episode.validate()
        return episode


_PLAIN = ("id_", "is_terminated", "is_truncated", "t", "t_started", "agent_id", "module_id", "multi_agent_episode_id")
_TRACKS = ("observations", "infos", "actions", "rewards", "extra_model_outputs")
_COMPARED = (*_PLAIN, *_TRACKS, "messages", "assistant_turns", "tokens", "custom_data")


def _given(items: Iterable[Any] | None) -> list[Any]:
    return [] if items is None else list(items)


def _as_list(data: Any) -> list[Any]:
    if isinstance(data, np.ndarray):
        return list(data) if data.ndim > 1 else [item.item() for item in data]
    if isinstance(data, RaggedText | RaggedNumbers):
        return [data[i] for i in range(len(data))]
    return list(data)
