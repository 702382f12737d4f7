"""One agent's part of a multi-agent episode (`AgentTrack`), and access to all parts by environment step.

An action *hangs* until its agent observes something. The hanging action, its outputs and its rewards so far are stored
here, because a step of a `SingleAgentEpisode` consists of an action and the observation that follows the action.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from reward_kit.episodes.columns import Indices, InfiniteLookbackBuffer, one_hot, resolve_positions, same_value
from reward_kit.episodes.episode_data import EpisodeStatus
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.episodes.storage import compact
from reward_kit.errors import EpisodeError, did_you_mean

AgentID = Hashable
Track = Literal["observations", "infos", "actions", "rewards", "extra_model_outputs"]
ABSENT = object()
"""The value that a getter returns for an agent that has no items at the requested positions."""
_SEEN = ("observations", "infos")
_NOWHERE = 2**62  # beyond the end of any episode, so a column returns its fill


class Move(NamedTuple):
    """An agent's part of an environment step; missing values are `None`."""

    observation: Any
    action: Any
    reward: float | None
    infos: Mapping[str, Any] | None
    outputs: Mapping[str, Any] | None
    terminated: bool
    truncated: bool
    is_rewarded: bool

    def is_empty(self) -> bool:
        """Return True if the move contains no data; flags do not count as data."""
        return all(part is None for part in (self.observation, self.action, self.reward, self.infos, self.outputs))


class TrackQuery(NamedTuple):
    """The arguments of a getter: a track, the key of an output, and the handling of gaps and discrete values."""

    what: Track
    key: str | None = None
    fill: Any = None
    one_hot_discrete: bool = False


class AgentTrack:
    """One agent's part of the episode.

    Attributes:
        episode: the agent's steps, in the agent's own time.
        env_ts: the environment time of each of the agent's observations, including those of the lookback.
        action: the hanging action, or None.
        outputs: the extra model outputs of the hanging action.
        reward: the sum of the agent's rewards since its last complete step; None if there were no rewards.
        rest: the complete step of the hanging action, if the episode is a slice that ends within that step.
    """

    __slots__ = ("action", "env_ts", "episode", "outputs", "rest", "reward")

    def __init__(self, episode: SingleAgentEpisode, env_ts: Iterable[int]) -> None:
        self.episode = episode
        self.env_ts = list(env_ts)
        self.action: Any = None
        self.outputs: Mapping[str, Any] | None = None
        self.reward: float | None = None
        self.rest: SingleAgentEpisode | None = None

    # Building

    def check(self, move: Move) -> None:
        """Raise an EpisodeError if this agent's step is impossible.

        The message names the agent and describes what is expected.
        """
        agent, acts, sees = self.episode.agent_id, move.action is not None, move.observation is not None
        if self.episode.is_done:
            if not move.is_empty():
                raise EpisodeError(f"agent {agent!r} is done, but has data in this step")
            return
        hangs = self.action is not None
        if acts and hangs:
            raise EpisodeError(
                f"agent {agent!r} acts again before it has observed the result of its last action; it may act "
                "once per observation"
            )
        if sees and acts and not move.is_rewarded:
            raise EpisodeError(
                f"agent {agent!r} acted and got an observation, but no reward; pass a reward, or None if the "
                "environment returns none"
            )
        if sees and not acts and not hangs and not (move.terminated or move.truncated):
            raise EpisodeError(
                f"agent {agent!r} got an observation but has not acted on its last one; pass its action, or omit the "
                "agent from the observations until it acts"
            )
        if (acts or hangs) and not sees and move.truncated and not move.terminated:
            raise EpisodeError(
                f"agent {agent!r} acted and was truncated without a last observation; pass the last observation, "
                "which is needed to estimate the value of the last state"
            )

    def take(self, move: Move, env_t: int) -> None:
        """Add this agent's part of the environment step that ends at `env_t`; `check` must have accepted the step."""
        self.reward = add_rewards(self.reward, move.reward)
        if move.action is not None:
            self.action, self.outputs = move.action, move.outputs
        if self.action is not None:
            if move.observation is not None:
                self._complete(move.observation, move.infos, move, env_t)
            elif move.terminated:
                # The last observation is repeated to complete the step. Nothing after an agent's end affects training.
                self._complete(self.episode.get_observations(-1), self.episode.get_infos(-1), move, env_t)
        elif move.terminated or move.truncated:
            self.reward = None
            self.episode.is_terminated = self.episode.is_terminated or move.terminated
            self.episode.is_truncated = self.episode.is_truncated or move.truncated

    def _complete(self, observation: Any, infos: Mapping[str, Any] | None, move: Move, env_t: int) -> None:
        self.episode.add_env_step(
            observation,
            self.action,
            self.reward,
            infos,
            terminated=move.terminated,
            truncated=move.truncated,
            extra_model_outputs=self.outputs,
        )
        self.env_ts.append(env_t)
        self.hang(None, None, None)

    def hang(
        self,
        action: Any,
        outputs: Mapping[str, Any] | None,
        reward: float | None,
        rest: SingleAgentEpisode | None = None,
    ) -> None:
        """Store an action until its agent's next observation."""
        self.action, self.outputs, self.reward, self.rest = action, outputs, reward, rest

    # Reading

    def positions(self, times: Any) -> Any:
        """Return the positions of the environment steps `times` in the agent's columns, as an int or ints."""
        if isinstance(times, range):
            return range(bisect_left(self.env_ts, times.start), bisect_left(self.env_ts, times.stop))
        if isinstance(times, Sequence):
            return [self._position(time) for time in times]
        return self._position(times)

    def _position(self, time: int) -> int:
        position = bisect_left(self.env_ts, time)
        return position if position < len(self.env_ts) and self.env_ts[position] == time else _NOWHERE

    def count(self, what: Track) -> int:
        """Return the number of items in a track, including the lookback and hanging items."""
        hangs = self.action is not None or (what == "rewards" and self.reward is not None)
        return len(self.env_ts) if what in _SEEN else len(self.env_ts) - 1 + hangs

    def read(self, wanted: TrackQuery, positions: Any) -> Any:
        """Return the items at `positions`; gaps are filled or omitted. Return `ABSENT` if no items remain."""
        is_seen = wanted.what == "observations" and type(positions) is int and 0 <= positions < len(self.env_ts)
        if is_seen and not wanted.one_hot_discrete:  # read by environment runners in every step
            return self.episode.get_observations(positions - self.episode.lookback, neg_index_as_lookback=True)
        last = self.count(wanted.what)
        if isinstance(positions, range):
            positions = range(positions.start, min(positions.stop, last))
        elif isinstance(positions, Sequence):
            positions = [p if 0 <= p < last else _NOWHERE for p in positions]
            positions = positions if wanted.fill is not None else [p for p in positions if p != _NOWHERE]
        elif not 0 <= positions < last:
            if wanted.fill is None:
                return ABSENT
            positions = _NOWHERE
        if isinstance(positions, Sequence) and not len(positions):
            return ABSENT
        if wanted.what != "extra_model_outputs":
            hanging = (self.reward or 0.0) if wanted.what == "rewards" else self.action
            if wanted.one_hot_discrete and wanted.what == "actions":
                hanging = one_hot(self.action, self.episode.action_space)
            return self._items(wanted, getattr(self.episode, f"get_{wanted.what}"), hanging, positions)
        outputs = {}
        for key in self.output_keys() if wanted.key is None else {wanted.key}.intersection(self.output_keys()):
            column = self.episode.extra_model_outputs.get(key)
            if column is None:  # only the hanging action has this output
                column = InfiniteLookbackBuffer([None] * (len(self.env_ts) - 1), self.episode.lookback)
            outputs[key] = self._items(wanted, column.get, (self.outputs or {}).get(key), positions)
        return outputs.get(wanted.key, ABSENT) if wanted.key is not None else outputs or ABSENT

    def output_keys(self) -> list[str]:
        """Return the keys of all extra model outputs, including hanging ones."""
        return list({**self.episode.extra_model_outputs, **(self.outputs or {})})

    def _items(self, wanted: TrackQuery, get: Callable[..., Any], hanging: Any, positions: Any) -> Any:
        """Return the items at `positions` of a column to which the hanging item is appended."""
        size = len(self.env_ts) if wanted.what in _SEEN else len(self.env_ts) - 1
        if isinstance(positions, Sequence) and size in positions:
            items = [self._items(wanted, get, hanging, position) for position in positions]
            return InfiniteLookbackBuffer(compact(items)).get() if self.episode.is_numpy else items
        if not isinstance(positions, Sequence) and positions == size:
            return hanging
        lookback = self.episode.lookback
        options: dict[str, Any] = {"one_hot_discrete": True} if wanted.one_hot_discrete else {}
        indices: Any
        if isinstance(positions, range):
            indices = slice(positions.start - lookback, positions.stop - lookback)
        elif isinstance(positions, Sequence):
            indices = [p - lookback for p in positions]
        else:
            indices = positions - lookback
        return get(indices, neg_index_as_lookback=True, fill=wanted.fill, **options)

    # Chunks

    def window(self, first: int, start: int, stop: int, *, is_start: bool) -> AgentTrack | None:
        """Return the agent's part of the environment steps `start:stop`; its lookback begins at `first`.

        An action before `stop` hangs if its observation follows later. Its reward is then the reward of the complete
        step, because partial rewards are not recorded.

        Args:
            first: the environment time of the first observations in the lookback.
            start: the environment time of the first observations after the lookback.
            stop: the environment time of the last observations.
            is_start: True if this chunk also begins at `start`. Both lookbacks then end there.

        Returns:
            A new track, or None if the agent has no observation in these steps from which to continue.
        """
        low, high = bisect_left(self.env_ts, first), bisect_left(self.env_ts, stop + 1)
        is_end = high == len(self.env_ts)
        if low == high or (high - low == 1 and self.episode.is_done and self.env_ts[-1] <= start):
            return None
        begin = self.episode.lookback if is_start else bisect_left(self.env_ts, start)
        begin, end = min(max(begin, low), high - 1), high - 1
        track = AgentTrack(self._part(low, begin, end), self.env_ts[low:high])
        if self.env_ts[end] == stop:
            return track  # its action on this observation comes later
        if is_end:
            track.hang(self.action, self.outputs, self.reward, self.rest)
        else:
            rest = self._part(end, end, end + 1)
            outputs = {key: column.get(0) for key, column in rest.extra_model_outputs.items()}
            track.hang(rest.get_actions(0), outputs, rest.environment_rewards()[0], rest)
        return track

    def _part(self, low: int, begin: int, end: int) -> SingleAgentEpisode:
        """Return the chunk between two observation positions; its lookback begins at `low`."""
        episode, lookback = self.episode, self.episode.lookback
        if begin >= lookback:
            return episode.slice(slice(begin - lookback, end - lookback), len_lookback_buffer=begin - low)
        # Unlike any slice of an episode, the part begins in the lookback, for which the conversation and the tokens are
        # unknown.
        steps, seen = slice(low - lookback, end - lookback), slice(low - lookback, end + 1 - lookback)
        outputs = episode.extra_model_outputs.items()
        part = SingleAgentEpisode(
            episode.id_,
            observations=episode.get_observations(seen, neg_index_as_lookback=True),
            observation_space=episode.observation_space,
            infos=episode.get_infos(seen, neg_index_as_lookback=True),
            actions=episode.get_actions(steps, neg_index_as_lookback=True),
            action_space=episode.action_space,
            rewards=episode.get_rewards(steps, neg_index_as_lookback=True),
            extra_model_outputs={key: column.get(steps, neg_index_as_lookback=True) for key, column in outputs},
            t_started=episode.t_started + begin - lookback,
            len_lookback_buffer=begin - low,
            agent_id=episode.agent_id,
            module_id=episode.module_id,
            multi_agent_episode_id=episode.multi_agent_episode_id,
        )
        return part.to_numpy() if episode.is_numpy else part

    def check_follower(self, other: AgentTrack) -> None:
        """Raise an EpisodeError unless the other track continues this one.

        The message names the agent and both times.
        """
        mine, theirs = self.episode, other.episode
        if mine.is_done:
            if len(theirs) or other.action is not None:
                raise EpisodeError(f"agent {mine.agent_id!r} is done in the first chunk, but has steps in the second")
            return
        rest = self._rest_before(other)
        ends = mine if rest is None else rest
        if ends.t != theirs.t_started:
            raise EpisodeError(
                f"agent {mine.agent_id!r} stops at its own step {mine.t} in the first chunk, but begins at "
                f"{theirs.t_started} in the second"
            )
        if not same_value(ends.get_observations(-1), theirs.get_observations(0)):
            raise EpisodeError(
                f"agent {mine.agent_id!r}: the last observation in the first chunk differs from the first observation "
                "in the second"
            )

    def _rest_before(self, other: AgentTrack) -> SingleAgentEpisode | None:
        """Return the complete step of the hanging action, if the other track begins after it."""
        return self.rest if other.episode.t_started == self.episode.t + 1 else None

    def concat(self, other: AgentTrack) -> None:
        """Append the steps of a track that `check_follower` accepted."""
        if self.episode.is_done:
            return
        begin = other.episode.lookback
        if (rest := self._rest_before(other)) is not None:
            self.episode.concat_episode(rest)
            self.env_ts.append(other.env_ts[begin])
        if not self.episode.is_done:
            self.episode.concat_episode(other.episode)
        self.env_ts.extend(other.env_ts[begin + 1 :])
        self.hang(other.action, other.outputs, other.reward, other.rest)

    # Validation and comparison

    def validate(self, first: int, start: int, env_t: int) -> None:
        """Raise an EpisodeError unless the episode is valid and every observation has an environment time."""
        self.episode.validate()
        times, agent = self.env_ts, self.episode.agent_id
        if len(times) != len(self.episode.observations.data):
            raise EpisodeError(
                f"agent {agent!r} has {len(self.episode.observations.data)} observations but {len(times)} times"
            )
        if any(a >= b for a, b in pairwise(times)) or times[0] < first or times[-1] > env_t:
            raise EpisodeError(f"agent {agent!r}: the times {times!r:.200} do not increase from {first} to {env_t}")
        # If an action hangs at the start of the chunk, the part begins with the earlier observation to which it
        # responds.
        before = bisect_left(times, start)
        if self.episode.lookback not in (before, before - 1):
            raise EpisodeError(
                f"agent {agent!r}: {before} observations precede the environment step {start}, but the lookback "
                f"is {self.episode.lookback}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AgentTrack):
            return NotImplemented
        own, others = ([t.env_ts, t.action, dict(t.outputs or {}), t.reward, t.rest] for t in (self, other))
        return self.episode == other.episode and same_value(own, others)

    __hash__ = None  # type: ignore[assignment]


def _positions(wanted: TrackQuery, indices: Indices, neg_index_as_lookback: bool, size: int, lookback: int) -> Any:
    """Return the positions of indices among `size` items: an int, a list, or a range if they are contiguous."""
    filled = wanted.fill is not None
    positions = resolve_positions(size, lookback, indices, neg_index_as_lookback, filled)
    return list(positions) if isinstance(positions, range) and (filled or positions.step != 1) else positions


def add_rewards(collected: float | None, reward: float | None) -> float | None:
    """Return the sum of two rewards, either of which may be None (unknown)."""
    if collected is None or reward is None:
        return reward if collected is None else collected
    return collected + reward


ALL = "__all__"


class MultiAgentRecord(EpisodeStatus):
    """The parts of multiple agents, and the environment time that the agents share.

    Attributes:
        id_: the unique id of the episode.
        env_t: the current environment time.
        env_t_started: the environment time of the first observation after the lookback.
        is_terminated: True if the episode ended for all agents.
        is_truncated: True if the episode was cut off for all agents.
        custom_data: arbitrary data of the user.
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

    # Agents and times

    @property
    def agent_ids(self) -> set[Any]:
        """The agents that have at least one observation."""
        return set(self._tracks)

    def knows(self, agent_id: Any) -> bool:
        """Return True if an agent is in this chunk or in a different one, or has a reward or a space."""
        known = (self._tracks, self._modules, self._rewards_begin, self.observation_space, self.action_space)
        return any(agent_id in ids for ids in known)

    @property
    def agent_episodes(self) -> dict[Any, SingleAgentEpisode]:
        """Each agent's episode."""
        return {agent: track.episode for agent, track in self._tracks.items()}

    @property
    def agent_episode_ids(self) -> dict[Any, str]:
        """The ids of the agents' episodes."""
        return {agent: track.episode.id_ for agent, track in self._tracks.items()}

    @property
    def agent_t_started(self) -> dict[Any, int]:
        """Each agent's own time at the start of its part of this chunk."""
        return {agent: track.episode.t_started for agent, track in self._tracks.items()}

    @property
    def env_t_to_agent_t(self) -> dict[Any, InfiniteLookbackBuffer[Any]]:
        """Each agent's own time at each environment time; "S" (skipped) if the agent observed nothing."""
        maps: dict[Any, InfiniteLookbackBuffer[Any]] = {}
        for agent, track in self._tracks.items():
            first_t = track.episode.t_started - track.episode.lookback
            own = {env_t: first_t + i for i, env_t in enumerate(track.env_ts)}
            times = range(self._first, self.env_t + 1)
            steps = [own.get(env_t, self.SKIP_ENV_TS_TAG) for env_t in times]
            maps[agent] = InfiniteLookbackBuffer(steps, self._lookback)
        return maps

    @property
    def hanging_actions(self) -> dict[Any, Any]:
        """The actions of agents that have not yet observed the results."""
        return {agent: track.action for agent, track in self._tracks.items() if track.action is not None}

    @property
    def hanging_extra_model_outputs(self) -> dict[Any, dict[str, Any]]:
        """The extra model outputs of the hanging actions."""
        return {agent: dict(track.outputs or {}) for agent, track in self._tracks.items() if track.action is not None}

    @property
    def hanging_rewards(self) -> dict[Any, float]:
        """The rewards of agents since their last complete step."""
        return {agent: track.reward for agent, track in self._tracks.items() if track.reward is not None}

    @property
    def hanging_rewards_begin(self) -> dict[Any, float]:
        """The rewards that agents got before their first observation, and thus before their first action."""
        return dict(self._rewards_begin)

    @property
    def _first(self) -> int:
        return self.env_t_started - self._lookback

    @property
    def is_reset(self) -> bool:
        """True if at least one agent has an observation."""
        return bool(self._tracks)

    def agent_steps(self) -> int:
        """Return the number of complete steps of all agents, excluding the lookback."""
        return sum(len(track.episode) for track in self._tracks.values())

    def __len__(self) -> int:
        return self.env_t - self.env_t_started

    def __repr__(self) -> str:
        returns = {agent: track.episode.get_return() for agent, track in self._tracks.items()}
        return f"{type(self).__name__}({self.id_!r}, {self.size()}, returns {returns})"

    def get_terminateds(self) -> dict[Any, bool]:
        """Return a flag for each agent that is True if its task ended; `__all__` stands for the episode."""
        return {**{a: t.episode.is_terminated for a, t in self._tracks.items()}, ALL: self.is_terminated}

    def get_truncateds(self) -> dict[Any, bool]:
        """Return a flag for each agent that is True if it was cut off; `__all__` stands for the episode."""
        return {**{a: t.episode.is_truncated for a, t in self._tracks.items()}, ALL: self.is_truncated}

    def get_agents_that_stepped(self) -> set[Any]:
        """Return the agents that observed something at the last environment step."""
        return {agent for agent, track in self._tracks.items() if track.env_ts[-1] == self.env_t}

    def get_agents_to_act(self) -> set[Any]:
        """Return the agents that observed something at the last environment step and are not done."""
        return {agent for agent in self.get_agents_that_stepped() if not self._tracks[agent].episode.is_done}

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """Return the undiscounted sum of all agents' rewards after the lookback.

        Hanging rewards are added if `include_hanging_rewards` is true.
        """
        total = sum(track.episode.get_return() for track in self._tracks.values())
        if include_hanging_rewards:
            total += sum(self.hanging_rewards.values()) + sum(self._rewards_begin.values())
        return float(total)

    def __getstate__(self) -> dict[str, Any]:
        """Return every field. The clock is stopped, since another process may continue the episode."""
        return {**self.__dict__, "_earlier_s": self.get_duration_s(), "_start_time": None, "_last_step_time": None}

    def timeline(self) -> str:
        """Return a table of agents by step: x means that an agent observed something, and … that its action hangs."""
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
        """Return observations by agent; an agent that has none at `indices` is omitted unless `fill` is passed.

        Args:
            indices: an int, a slice or a list of ints; None for all observations after the lookback.
            agent_ids: one or more agents; None for all.
            env_steps: True if `indices` count environment steps, False if they count each agent's own steps.
            neg_index_as_lookback: True if -1 is the item just before index 0.
            fill: the value that replaces missing items.
            one_hot_discrete: whether to return discrete parts of the agent's space as one-hot vectors.
            return_list: whether to return a list with a dict of agents for each step, instead of a dict of lists.

        Raises:
            IndexError: an index is out of range and there is no `fill`.
            EpisodeError: `return_list` is combined with `env_steps=False`, where the agents have no common steps.
        """
        wanted = TrackQuery("observations", None, fill, one_hot_discrete)
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
        """Return infos by agent; see `get_observations` for the arguments."""
        wanted = TrackQuery("infos", None, fill)
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
        """Return actions by agent, including hanging ones.

        Each is at the step of the observation that it responds to.
        """
        wanted = TrackQuery("actions", None, fill, one_hot_discrete)
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
        """Return rewards by agent, including hanging ones. Each is at the step of its action."""
        wanted = TrackQuery("rewards", None, fill)
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
        """Return one extra model output, or a dict of all outputs, by agent; hanging outputs are also included.

        Raises:
            KeyError: no agent has this key.
        """
        known = {known for track in self._tracks.values() for known in track.output_keys()}
        if key is not None and key not in known:
            raise KeyError(f"no extra model output {key!r}{did_you_mean(key, known)}")
        wanted = TrackQuery("extra_model_outputs", key, fill)
        return self._get(wanted, indices, agent_ids, env_steps, neg_index_as_lookback, return_list)

    # Changing

    def set_observations(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace observations at indices that count the agents' own steps.

        Raises:
            KeyError: an agent is not in this episode.
            IndexError: the number of new items differs from the number of indices.
        """
        self._set("set_observations", new_data, at_indices, neg_index_as_lookback)

    def set_actions(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace actions in the same way as `set_observations`; hanging actions remain unchanged."""
        self._set("set_actions", new_data, at_indices, neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace rewards in the same way as `set_observations`; hanging rewards remain unchanged."""
        self._set("set_rewards", new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Mapping[Any, Any], at_indices: Any = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace items of one extra model output in the same way as `set_observations`.

        Hanging outputs remain unchanged.
        """
        self._set("set_extra_model_outputs", new_data, at_indices, neg_index_as_lookback, key=key)

    def _set(self, method: str, new_data: Mapping[Any, Any], at_indices: Any, neg: bool, **options: Any) -> None:
        unknown = [agent for agent in new_data if agent not in self._tracks]
        if unknown:
            raise KeyError(f"unknown agent {unknown[0]!r} in episode {self.id_}; known: {list(self._tracks)}")
        for agent, items in new_data.items():
            setter = getattr(self._tracks[agent].episode, method)
            setter(new_data=items, at_indices=at_indices, neg_index_as_lookback=neg, **options)

    @property
    def is_numpy(self) -> bool:
        """True if every agent's episode is stored compactly."""
        return all(track.episode.is_numpy for track in self._tracks.values()) if self._tracks else self._was_converted

    @property
    def is_finalized(self) -> bool:
        """An older name for `is_numpy`."""
        return self.is_numpy

    def _get(
        self, wanted: TrackQuery, indices: Indices, agent_ids: Any, env_steps: bool, neg: bool, return_list: bool
    ) -> Any:
        tracks = list(self._tracks.items())
        if agent_ids is not None:
            is_one = isinstance(agent_ids, Hashable) and (isinstance(agent_ids, str) or agent_ids in self._tracks)
            chosen = set(agent_ids) if not is_one and isinstance(agent_ids, Iterable) else {agent_ids}
            # As in RLlib, unknown agents are omitted: an agent may enter at any step, and readers request all agents
            # they know of.
            tracks = [(agent, track) for agent, track in tracks if agent in chosen]
        if not env_steps:
            if return_list:
                raise EpisodeError(
                    f"get_{wanted.what}: return_list=True returns one dict per environment step and cannot be combined "
                    "with env_steps=False; remove one of them"
                )
            values = {}
            for agent, track in tracks:
                # As in RLlib, a hanging step has an index, but is not included if all steps of an agent are requested.
                has_all = indices is None and wanted.what not in _SEEN
                size = len(track.env_ts) - 1 if has_all else track.count(wanted.what)
                lookback = track.episode.lookback
                values[agent] = track.read(wanted, _positions(wanted, indices, neg, size, lookback))
            return {agent: value for agent, value in values.items() if value is not ABSENT}
        # Environment times: a single time, a list, or a range if the times are contiguous.
        end = self.env_t + 1 if wanted.what in _SEEN else self.env_t
        times = _positions(wanted, indices, neg, end - self._first, self._lookback)
        if isinstance(times, range):
            times = range(times.start + self._first, times.stop + self._first)
        else:
            times = [time + self._first for time in times] if isinstance(times, list) else times + self._first
        if return_list:
            return self._listed(wanted, tracks, times if isinstance(times, list | range) else [times])
        return self._at(wanted, tracks, times)

    def _at(self, wanted: TrackQuery, tracks: list[tuple[Any, AgentTrack]], times: Any) -> dict[Any, Any]:
        values = {agent: track.read(wanted, track.positions(times)) for agent, track in tracks}
        return {agent: value for agent, value in values.items() if value is not ABSENT}

    def _listed(self, wanted: TrackQuery, tracks: list[tuple[Any, AgentTrack]], times: Any) -> list[dict[Any, Any]]:
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
