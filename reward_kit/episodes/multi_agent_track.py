"""One agent's part of an episode of several agents (`AgentTrack`), and reading all of them by step of the environment.

An agent that acted and has seen nothing since has a *hanging* action: the action, its outputs and the rewards so far
wait here, because a step of a `SingleAgentEpisode` is an action with the observation that follows it.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from reward_kit.episodes.columns import Column, Indices, places_of, same_value
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.episodes.storage import compact
from reward_kit.errors import EpisodeError, did_you_mean

AgentID = Hashable
Track = Literal["observations", "infos", "actions", "rewards", "extra_model_outputs"]
ABSENT = object()
"""A getter's result where an agent has nothing there."""
_SEEN = ("observations", "infos")
_NOWHERE = 2**62  # a position that no episode reaches, for which a column gives its fill


class Move(NamedTuple):
    """What one environment step holds for one agent; None where it holds nothing."""

    observation: Any
    action: Any
    reward: float | None
    infos: Mapping[str, Any] | None
    outputs: Mapping[str, Any] | None
    terminated: bool
    truncated: bool
    is_rewarded: bool

    def is_empty(self) -> bool:
        """It holds no data; flags are none."""
        return all(part is None for part in (self.observation, self.action, self.reward, self.infos, self.outputs))


class Wanted(NamedTuple):
    """What a getter is asked for: a track, of outputs a key, and how gaps and discrete values are to look."""

    what: Track
    key: str | None = None
    fill: Any = None
    one_hot_discrete: bool = False


class AgentTrack:
    """One agent's part.

    Attributes:
        episode: its steps, in its own time.
        env_ts: the environment's time of each of its observations, the lookback's included.
        action: hangs; None where none does.
        outputs: the extra model outputs of that action.
        reward: what it was given since its last complete step; None where it was given nothing.
        rest: the whole step of that action, where the episode is a slice that ended within it.
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
        """Refuse what no step of this agent can be.

        Raises:
            EpisodeError: the message names the agent and says what was expected.
        """
        agent, acts, sees = self.episode.agent_id, move.action is not None, move.observation is not None
        if self.episode.is_done:
            if not move.is_empty():
                raise EpisodeError(f"agent {agent!r} is done and takes no further step, but has data in this one")
            return
        hangs = self.action is not None
        if acts and hangs:
            raise EpisodeError(
                f"agent {agent!r} acts again before it has seen what came of its last action; an agent acts once for "
                "each observation"
            )
        if sees and acts and not move.is_rewarded:
            raise EpisodeError(
                f"agent {agent!r} acted and got an observation, but no reward; give one, or None where the "
                "environment gives none"
            )
        if sees and not acts and not hangs and not (move.terminated or move.truncated):
            raise EpisodeError(
                f"agent {agent!r} got an observation but has not acted on its last one; give its action, or leave it "
                "out of the observations until it acts"
            )
        if (acts or hangs) and not sees and move.truncated and not move.terminated:
            raise EpisodeError(
                f"agent {agent!r} acted and was truncated without a last observation; what it would have been worth "
                "from there cannot be estimated without one"
            )

    def take(self, move: Move, env_t: int) -> None:
        """Add what an environment step, the one that ends at `env_t`, holds for this agent. `check` it before."""
        self.reward = added(self.reward, move.reward)
        if move.action is not None:
            self.action, self.outputs = move.action, move.outputs
        if self.action is not None:
            if move.observation is not None:
                self._complete(move.observation, move.infos, move, env_t)
            elif move.terminated:
                # It completes the step; nothing is ever learned from what follows an end.
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
        """Let an action wait for what the agent sees next."""
        self.action, self.outputs, self.reward, self.rest = action, outputs, reward, rest

    # Reading

    def positions(self, times: Any) -> Any:
        """Where in the agent's columns the environment steps `times` lie: an int, or several of them."""
        if isinstance(times, range):
            return range(bisect_left(self.env_ts, times.start), bisect_left(self.env_ts, times.stop))
        if isinstance(times, Sequence):
            return [self._position(time) for time in times]
        return self._position(times)

    def _position(self, time: int) -> int:
        position = bisect_left(self.env_ts, time)
        return position if position < len(self.env_ts) and self.env_ts[position] == time else _NOWHERE

    def own_positions(self, wanted: Wanted, indices: Indices, neg_index_as_lookback: bool) -> Any:
        """Where in the agent's columns indices in its own steps lie."""
        return places(wanted, indices, neg_index_as_lookback, self.count(wanted.what), self.episode.lookback)

    def count(self, what: Track) -> int:
        """How many items a getter may find in a track, the lookback's and what hangs included."""
        hangs = self.action is not None or (what == "rewards" and self.reward is not None)
        return len(self.env_ts) if what in _SEEN else len(self.env_ts) - 1 + hangs

    def read(self, wanted: Wanted, positions: Any) -> Any:
        """The items at `positions`, filled or left out where there are none; `ABSENT` where nothing is left."""
        is_seen = wanted.what == "observations" and type(positions) is int and 0 <= positions < len(self.env_ts)
        if is_seen and not wanted.one_hot_discrete:  # What an environment runner asks for at every step.
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
            return self._items(wanted, getattr(self.episode, f"get_{wanted.what}"), self._hanging(wanted), positions)
        keys = [wanted.key] if wanted.key is not None else self.output_keys()
        found = {key: self._output(wanted, key, positions) for key in keys if key in self.output_keys()}
        return found.get(wanted.key, ABSENT) if wanted.key is not None else found or ABSENT

    def output_keys(self) -> list[str]:
        """The keys of all extra model outputs, those that hang included."""
        return list({**self.episode.extra_model_outputs, **(self.outputs or {})})

    def _output(self, wanted: Wanted, key: str, positions: Any) -> Any:
        column = self.episode.extra_model_outputs.get(key)
        if column is None:  # known of the hanging action alone
            column = Column([None] * (len(self.env_ts) - 1), self.episode.lookback)
        return self._items(wanted, column.get, (self.outputs or {}).get(key), positions)

    def _hanging(self, wanted: Wanted) -> Any:
        if wanted.what == "rewards":
            return self.reward or 0.0
        if not wanted.one_hot_discrete or wanted.what != "actions":
            return self.action
        return Column([self.action], space=self.episode.action_space).get(0, one_hot_discrete=True)

    def _items(self, wanted: Wanted, get: Callable[..., Any], hanging: Any, positions: Any) -> Any:
        """Of a column's items and the one that hangs behind them, those at `positions`."""
        size = len(self.env_ts) if wanted.what in _SEEN else len(self.env_ts) - 1
        if isinstance(positions, Sequence) and size in positions:
            items = [self._items(wanted, get, hanging, position) for position in positions]
            return Column(compact(items)).get() if self.episode.is_numpy else items
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
        """What the agent has of the environment steps `start:stop`, with a lookback that begins at `first`.

        An action taken before `stop` whose answer came after it hangs; its reward is the whole step's, because nobody
        keeps the parts it was given in.

        Args:
            first: the environment's time of the lookback's first observations.
            start: of the first observations after the lookback.
            stop: of the last ones.
            is_start: `start` is where this chunk begins too, so that its lookback ends where this one's does.

        Returns:
            A track of its own; None where the agent has nothing there to look at or to go on from.
        """
        low, high = bisect_left(self.env_ts, first), bisect_left(self.env_ts, stop + 1)
        is_end = high == len(self.env_ts)
        if low == high or (high - low == 1 and self.episode.is_done and self.env_ts[-1] <= start):
            return None
        begin = self.episode.lookback if is_start else bisect_left(self.env_ts, start)
        begin, end = min(max(begin, low), high - 1), high - 1
        track = AgentTrack(self._part(low, begin, end), self.env_ts[low:high])
        if self.env_ts[end] == stop:
            return track  # Whatever it did on this observation comes after.
        if is_end:
            track.hang(self.action, self.outputs, self.reward, self.rest)
        else:
            rest = self._part(end, end, end + 1)
            outputs = {key: column.get(0) for key, column in rest.extra_model_outputs.items()}
            track.hang(rest.get_actions(0), outputs, rest.environment_rewards()[0], rest)
        return track

    def _part(self, low: int, begin: int, end: int) -> SingleAgentEpisode:
        """The chunk between two observations by position, with a lookback that begins at `low`."""
        episode, lookback = self.episode, self.episode.lookback
        if begin >= lookback:
            return episode.slice(slice(begin - lookback, end - lookback), len_lookback_buffer=begin - low)
        # It begins in the lookback, where no slice of an episode does; its conversation and tokens are not known there.
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
        """Refuse a track that does not go on where this one stops.

        Raises:
            EpisodeError: the message names the agent and both times.
        """
        mine, theirs = self.episode, other.episode
        if mine.is_done:
            if len(theirs) or other.action is not None:
                raise EpisodeError(f"agent {mine.agent_id!r} is done in the first chunk and takes steps in the second")
            return
        ends = self.rest if self.rest is not None and self._is_answered_by(other) else mine
        if ends.t != theirs.t_started:
            raise EpisodeError(
                f"agent {mine.agent_id!r} stops at its step {mine.t} in the first chunk, and begins at "
                f"{theirs.t_started} in the second"
            )
        if not same_value(ends.get_observations(-1), theirs.get_observations(0)):
            raise EpisodeError(
                f"agent {mine.agent_id!r}: its last observation in the first chunk is not its first in the second"
            )

    def _is_answered_by(self, other: AgentTrack) -> bool:
        return self.rest is not None and other.episode.t_started == self.episode.t + 1

    def concat(self, other: AgentTrack) -> None:
        """Add the steps of the track that `check_follower` let pass."""
        if self.episode.is_done:
            return
        begin = other.episode.lookback
        if self.rest is not None and self._is_answered_by(other):
            self.episode.concat_episode(self.rest)
            self.env_ts.append(other.env_ts[begin])
        if not self.episode.is_done:
            self.episode.concat_episode(other.episode)
        self.env_ts.extend(other.env_ts[begin + 1 :])
        self.hang(other.action, other.outputs, other.reward, other.rest)

    # As a record

    def validate(self, first: int, start: int, env_t: int) -> None:
        """Check the episode and that every observation has its time.

        Raises:
            EpisodeError: they do not fit together.
        """
        self.episode.validate()
        times, agent = self.env_ts, self.episode.agent_id
        if len(times) != len(self.episode.observations.data):
            raise EpisodeError(
                f"agent {agent!r}: {len(self.episode.observations.data)} observations, {len(times)} times"
            )
        if any(a >= b for a, b in pairwise(times)) or times[0] < first or times[-1] > env_t:
            raise EpisodeError(f"agent {agent!r}: its times {times!r:.200} do not ascend from {first} to {env_t}")
        # One whose action hung at the chunk's start begins with the observation it acted on, which lies before.
        before = bisect_left(times, start)
        if self.episode.lookback not in (before, before - 1):
            raise EpisodeError(
                f"agent {agent!r}: {before} of its observations come before step {start} of the environment, but its "
                f"lookback is {self.episode.lookback}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AgentTrack):
            return NotImplemented
        return self.episode == other.episode and same_value(self._own(), other._own())

    __hash__ = None  # type: ignore[assignment]

    def _own(self) -> list[Any]:
        return [self.env_ts, self.action, dict(self.outputs or {}), self.reward, self.rest]


def places(wanted: Wanted, indices: Indices, neg_index_as_lookback: bool, size: int, lookback: int) -> Any:
    """Where indices lie among `size` items: an int, a list, or a range where they follow one another without a gap."""
    filled = wanted.fill is not None
    found = places_of(size, lookback, indices, neg_index_as_lookback, filled)
    if isinstance(found, range) and (filled or found.step != 1):
        return list(found)
    return found


def added(collected: float | None, reward: float | None) -> float | None:
    """The sum, of which either part may be unknown."""
    if collected is None or reward is None:
        return reward if collected is None else collected
    return collected + reward


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
