"""One agent's part of a `MultiAgentEpisode`: its own episode, when it saw what, and what of its last action hangs.

An agent that acted and has seen nothing since has a *hanging* action: the action, its outputs and the rewards so far
wait here, because a step of a `SingleAgentEpisode` is an action with the observation that follows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from reward_kit.episodes.columns import Column, Indices, places_of, same_value
from reward_kit.episodes.compaction import compact
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError

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
