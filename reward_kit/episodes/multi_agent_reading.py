"""What is recorded of several agents in one environment, and how it is read; `MultiAgentEpisode` adds how it is made.

Indices follow the grammar of `columns`, in steps of the environment; with `env_steps=False` in each agent's own steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from reward_kit.episodes.columns import Column, Indices
from reward_kit.episodes.multi_agent_track import ABSENT, AgentID, AgentTrack, Wanted, places
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, did_you_mean

ALL = "__all__"


class MultiAgentRecord:
    """Several agents' parts, and the environment's time they share.

    Attributes:
        id_: unique.
        env_t: the environment's time now.
        env_t_started: its time at the first observation after the lookback.
        is_terminated: the episode ended for all agents.
        is_truncated: it was cut off for all agents.
        custom_data: whatever its user keeps there.
    """

    SKIP_ENV_TS_TAG = "S"

    def __init__(self, id_: str | None, env_t_started: int, env_t: int, lookback: int) -> None:
        self.id_ = id_ or uuid.uuid4().hex
        self.env_t_started, self.env_t = env_t_started, env_t
        self.is_terminated = self.is_truncated = False
        self.custom_data: dict[str, Any] = {}
        self.observation_space: Mapping[Any, Any] = {}
        self.action_space: Mapping[Any, Any] = {}
        self._lookback = lookback
        self._tracks: dict[AgentID, AgentTrack] = {}
        self._modules: dict[AgentID, Any] = {}
        self._rewards_begin: dict[AgentID, float] = {}
        self._was_converted = False
        self._earlier_s = 0.0
        self._start_time: float | None = None
        self._last_step_time: float | None = None

    # Who is there, and when

    @property
    def agent_ids(self) -> set[Any]:
        """The agents that have seen something."""
        return set(self._tracks)

    def knows(self, agent_id: Any) -> bool:
        """Whether an agent is here, was in another chunk, has been given something, or has a space."""
        places = (self._tracks, self._modules, self._rewards_begin, self.observation_space, self.action_space)
        return any(agent_id in known for known in places)

    @property
    def agent_episodes(self) -> dict[Any, SingleAgentEpisode]:
        """Each agent's own episode."""
        return {agent: track.episode for agent, track in self._tracks.items()}

    @property
    def agent_episode_ids(self) -> dict[Any, str]:
        """The ids of the agents' episodes."""
        return {agent: track.episode.id_ for agent, track in self._tracks.items()}

    @property
    def agent_t_started(self) -> dict[Any, int]:
        """Each agent's own time at which its part of this chunk begins."""
        return {agent: track.episode.t_started for agent, track in self._tracks.items()}

    @property
    def env_t_to_agent_t(self) -> dict[Any, Column[Any]]:
        """Each agent's own time by the environment's; "S" where it saw nothing."""
        maps: dict[Any, Column[Any]] = {}
        for agent, track in self._tracks.items():
            first_t = track.episode.t_started - track.episode.lookback
            own = {env_t: first_t + i for i, env_t in enumerate(track.env_ts)}
            times = range(self._first, self.env_t + 1)
            maps[agent] = Column([own.get(env_t, self.SKIP_ENV_TS_TAG) for env_t in times], self._lookback)
        return maps

    @property
    def hanging_actions(self) -> dict[Any, Any]:
        """The actions of agents that have not seen what came of them."""
        return {agent: track.action for agent, track in self._tracks.items() if track.action is not None}

    @property
    def hanging_extra_model_outputs(self) -> dict[Any, dict[str, Any]]:
        """The extra model outputs of the hanging actions."""
        return {agent: dict(track.outputs or {}) for agent, track in self._tracks.items() if track.action is not None}

    @property
    def hanging_rewards(self) -> dict[Any, float]:
        """What agents were given since their last complete step."""
        return {agent: track.reward for agent, track in self._tracks.items() if track.reward is not None}

    @property
    def hanging_rewards_begin(self) -> dict[Any, float]:
        """What agents were given before they had seen anything; no action of theirs earned it."""
        return dict(self._rewards_begin)

    @property
    def _first(self) -> int:
        return self.env_t_started - self._lookback

    @property
    def is_reset(self) -> bool:
        """Some agent has seen something."""
        return bool(self._tracks)

    @property
    def is_done(self) -> bool:
        """Terminated or truncated, for all agents."""
        return self.is_terminated or self.is_truncated

    @property
    def terminated(self) -> bool:
        """The episode ended in this chunk."""
        return self.is_terminated

    @property
    def truncated(self) -> bool:
        """The episode was cut off in this chunk."""
        return self.is_truncated

    def env_steps(self) -> int:
        """The number of the environment's steps, without the lookback."""
        return len(self)

    def agent_steps(self) -> int:
        """The number of complete steps of all agents, without the lookback."""
        return sum(len(track.episode) for track in self._tracks.values())

    def __len__(self) -> int:
        return self.env_t - self.env_t_started

    def __repr__(self) -> str:
        returns = {agent: track.episode.get_return() for agent, track in self._tracks.items()}
        return f"{type(self).__name__}({self.id_!r}, {self._size()}, returns {returns})"

    def _size(self) -> str:
        end = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "not over"
        return f"{len(self)} steps, {end}"

    def get_terminateds(self) -> dict[Any, bool]:
        """Whose task ended; `__all__` for the episode."""
        return {**{a: t.episode.is_terminated for a, t in self._tracks.items()}, ALL: self.is_terminated}

    def get_truncateds(self) -> dict[Any, bool]:
        """Who was cut off; `__all__` for the episode."""
        return {**{a: t.episode.is_truncated for a, t in self._tracks.items()}, ALL: self.is_truncated}

    def get_agents_that_stepped(self) -> set[Any]:
        """The agents that saw something at the last step of the environment."""
        return {agent for agent, track in self._tracks.items() if track.env_ts[-1] == self.env_t}

    def get_agents_to_act(self) -> set[Any]:
        """Those of them that are not done: the next actions are theirs."""
        return {agent for agent in self.get_agents_that_stepped() if not self._tracks[agent].episode.is_done}

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """The undiscounted sum of all agents' rewards, without the lookback.

        Args:
            include_hanging_rewards: count rewards that belong to no complete step yet, too.
        """
        total = sum(track.episode.get_return() for track in self._tracks.values())
        if include_hanging_rewards:
            total += sum(self.hanging_rewards.values()) + sum(self._rewards_begin.values())
        return float(total)

    def get_duration_s(self) -> float:
        """Seconds from the reset to the last step, 0.0 before either; a pause between two states does not count."""
        if self._start_time is None or self._last_step_time is None:
            return self._earlier_s
        return self._earlier_s + self._last_step_time - self._start_time

    def __getstate__(self) -> dict[str, Any]:
        """Every field, with the clock stopped: what is restored may go on elsewhere, by another clock."""
        return {**self.__dict__, "_earlier_s": self.get_duration_s(), "_start_time": None, "_last_step_time": None}

    def timeline(self) -> str:
        """A table of who saw something (x) and whose action hangs (…) at which step of the environment."""
        times = range(-self._lookback, len(self) + 1)
        width = max(len(str(number)) for number in (times[0], times[-1]))
        names = [str(agent) for agent in self._tracks]
        margin = max([len("env_t"), *map(len, names)])
        rows = ["env_t".ljust(margin) + "".join(f"  {number:>{width}}" for number in times)]
        for name, track in zip(names, self._tracks.values(), strict=True):
            seen = set(track.env_ts)
            marks = ["x" if self.env_t_started + number in seen else "." for number in times]
            if track.action is not None:
                waits = [i for i, number in enumerate(times) if self.env_t_started + number > track.env_ts[-1]]
                marks = ["…" if i in waits else mark for i, mark in enumerate(marks)]
            rows.append(name.ljust(margin) + "".join(f"  {mark:>{width}}" for mark in marks))
        return "\n".join(rows)

    # Reading

    def get_observations(
        self,
        indices: Indices = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Observations by agent; an agent without any there is left out, or filled where there is a `fill`.

        Args:
            indices: an int, a slice or ints; all after the lookback for None.
            agent_ids: one agent or several; all for None.
            env_steps: `indices` are the environment's steps; otherwise each agent's own.
            neg_index_as_lookback: -1 is the item just before index 0.
            fill: stands for what is not there.
            one_hot_discrete: one-hot vectors for what is discrete in the agent's space.
            return_list: a list with a dict of agents for each step, instead of one dict of lists.

        Raises:
            IndexError: an index is out of range and there is no `fill`.
            EpisodeError: `return_list` with the agents' own steps, which are no common list.
        """
        wanted = Wanted("observations", None, fill, one_hot_discrete)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    def get_infos(
        self,
        indices: Indices = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """Infos by agent; arguments as in `get_observations`."""
        wanted = Wanted("infos", None, fill)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    def get_actions(
        self,
        indices: Indices = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Actions by agent, each at the step of the observation it answers, hanging ones included."""
        wanted = Wanted("actions", None, fill, one_hot_discrete)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    def get_rewards(
        self,
        indices: Indices = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """Rewards by agent, each at the step of its action and whole, hanging ones included."""
        wanted = Wanted("rewards", None, fill)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    def get_extra_model_outputs(
        self,
        key: str | None = None,
        indices: Indices = None,
        agent_ids: Any = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """One extra model output by agent, hanging ones included; a dict of all of them for `key=None`.

        Raises:
            KeyError: no agent has this key.
        """
        known = {known for track in self._tracks.values() for known in track.output_keys()}
        if key is not None and key not in known:
            raise KeyError(f"no extra model output {key!r}{did_you_mean(key, known)}")
        wanted = Wanted("extra_model_outputs", key, fill)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    # Changing

    def set_observations(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Put new observations in the place of those at indices in the agents' own steps.

        Raises:
            KeyError: an agent is not in this episode.
            IndexError: there are more or fewer new items than places.
        """
        self._set("set_observations", new_data, at_indices, neg_index_as_lookback)

    def set_actions(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """As `set_observations`; hanging actions stay."""
        self._set("set_actions", new_data, at_indices, neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """As `set_observations`; hanging rewards stay."""
        self._set("set_rewards", new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """As `set_observations`, for one key; hanging outputs stay."""
        self._set("set_extra_model_outputs", new_data, at_indices, neg_index_as_lookback, key=key)

    def _set(self, method: str, new_data: Mapping[Any, Any], at_indices: Any, neg: bool, **options: Any) -> None:
        strangers = [agent for agent in new_data if agent not in self._tracks]
        if strangers:
            raise KeyError(f"no agent {strangers[0]!r} in episode {self.id_}; there are {list(self._tracks)}")
        for agent, items in new_data.items():
            setter = getattr(self._tracks[agent].episode, method)
            setter(new_data=items, at_indices=at_indices, neg_index_as_lookback=neg, **options)

    @property
    def is_numpy(self) -> bool:
        """Every agent's episode is stored compactly."""
        return all(track.episode.is_numpy for track in self._tracks.values()) if self._tracks else self._was_converted

    @property
    def is_finalized(self) -> bool:
        """The same as `is_numpy`."""
        return self.is_numpy

    def _get(
        self, wanted: Wanted, indices: Indices, agent_ids: Any, env_steps: bool, neg: bool, return_list: bool
    ) -> Any:
        tracks = self._chosen(agent_ids)
        if not env_steps:
            if return_list:
                raise EpisodeError(
                    f"get_{wanted.what}: a list of dicts is by the environment's steps; leave out return_list=True or "
                    "env_steps=False"
                )
            found = {agent: track.read(wanted, track.own_positions(wanted, indices, neg)) for agent, track in tracks}
            return {agent: value for agent, value in found.items() if value is not ABSENT}
        times = self._times(wanted, indices, neg)
        if return_list:
            return self._listed(wanted, tracks, times if isinstance(times, list | range) else [times])
        return self._at(wanted, tracks, times)

    def _chosen(self, agent_ids: Any) -> list[tuple[Any, AgentTrack]]:
        if agent_ids is None:
            return list(self._tracks.items())
        is_one = isinstance(agent_ids, Hashable) and (isinstance(agent_ids, str) or agent_ids in self._tracks)
        several = not is_one and isinstance(agent_ids, Iterable)
        chosen = set(agent_ids) if several else {agent_ids}
        # As in RLlib, who is not here is left out: an agent may come in any step, and readers ask for all they know.
        return [(agent, track) for agent, track in self._tracks.items() if agent in chosen]

    def _at(self, wanted: Wanted, tracks: list[tuple[Any, AgentTrack]], times: Any) -> dict[Any, Any]:
        found = {agent: track.read(wanted, track.positions(times)) for agent, track in tracks}
        return {agent: value for agent, value in found.items() if value is not ABSENT}

    def _listed(self, wanted: Wanted, tracks: list[tuple[Any, AgentTrack]], times: Any) -> list[dict[Any, Any]]:
        is_plain = not self.is_numpy and (wanted.what != "extra_model_outputs" or wanted.key is not None)
        if not (isinstance(times, range) and is_plain):
            return [self._at(wanted, tracks, time) for time in times]
        listed: list[dict[Any, Any]] = [{} for _ in times]
        for agent, track in tracks:
            positions = track.positions(times)
            values = track.read(wanted, positions)
            for position, value in zip(positions, [] if values is ABSENT else values, strict=False):
                listed[track.env_ts[position] - times.start][agent] = value
        return listed

    def _times(self, wanted: Wanted, indices: Indices, neg: bool) -> Any:
        """The environment's times that are meant: one of them, a list, or a range where they follow one another."""
        end = self.env_t + 1 if wanted.what in ("observations", "infos") else self.env_t
        found = places(wanted, indices, neg, end - self._first, self._lookback)
        if isinstance(found, range):
            return range(found.start + self._first, found.stop + self._first)
        return [place + self._first for place in found] if isinstance(found, list) else found + self._first
