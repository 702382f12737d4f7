"""`MultiAgentEpisode`, an episode with multiple agents. Its method names and index rules are those of RLlib.

As in RLlib, the constructor is more lenient than `add_env_step`: rewards may be missing, and an agent counts as
terminated if it did not act on its last observation while the others continued.
"""

from __future__ import annotations

import copy
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from reward_kit.episodes.columns import same_value
from reward_kit.episodes.episode_data import REWARD, check_reward, check_state, copy_infos
from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.multi_agent_track import ALL, AgentID, AgentTrack, Move, MultiAgentRecord, add_rewards
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError, boundary, did_you_mean

AgentDicts = Sequence[Mapping[AgentID, Any]]
ByAgent = Mapping[Any, Any]
ModuleOf = Callable[[Any, "MultiAgentEpisode"], Any]
DEFAULT_MODULE = "default_policy"
STATE_VERSION = 1
PLAIN = ("id_", "env_t", "env_t_started", "is_terminated", "is_truncated")
_COMPARED = (*PLAIN, "_lookback", "_tracks", "_modules", "_rewards_begin", "custom_data")
_STATE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("is_terminated", "is_truncated"), (bool, dict)),
    **dict.fromkeys(("env_t", "env_t_started"), (int, dict)),
    **dict.fromkeys(("agents", "modules", "rewards_begin"), (list, tuple)),
    **{"lookback": (int,), "duration_s": (int, float), "custom_data": (dict,)},
}
_NOTHING: ByAgent = {}


def _default_module(*_: Any) -> str:
    return DEFAULT_MODULE


class Flags(NamedTuple):
    """The terminated agents and the truncated agents."""

    terminated: Mapping[AgentID, bool]
    truncated: Mapping[AgentID, bool]

    def of(self, agent: AgentID) -> tuple[bool, bool]:
        """Return two flags for one agent: terminated and truncated. `__all__` applies to every agent."""
        return tuple(bool(flags.get(agent) or flags.get(ALL)) for flags in self)  # type: ignore[return-value]


@dataclass(slots=True)
class _AgentColumns:
    """The columns of one agent, and the agent's hanging action."""

    observations: list[Any] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    outputs: list[Mapping[str, Any]] = field(default_factory=list)
    env_ts: list[int] = field(default_factory=list)
    action: Any = None
    action_outputs: Mapping[str, Any] | None = None
    reward: float | None = None

    def see(self, agent: AgentID, observation: Any, infos: Mapping[str, Any], env_t: int) -> None:
        """Add an observation, which completes the step of the hanging action."""
        if self.env_ts:
            if self.action is None:
                raise EpisodeError(
                    f"agent {agent!r} has observations at environment steps {self.env_ts[-1]} and {env_t}, "
                    "but no action between them"
                )
            self.actions.append(self.action)
            self.rewards.append(self.reward or 0.0)
            infos = infos if self.reward is not None else {**infos, REWARD: None}
            self.outputs.append(self.action_outputs or {})
            self.action = self.action_outputs = self.reward = None
        self.observations.append(observation)
        self.infos.append(infos)
        self.env_ts.append(env_t)


def _collect(
    observations: AgentDicts, given: Mapping[str, AgentDicts], first: int, id_: str
) -> tuple[dict[AgentID, _AgentColumns], dict[AgentID, float]]:
    """Return each agent's columns, and the rewards of agents that have not had an observation yet.

    Raises:
        EpisodeError: an agent acts without an observation, acts twice, or observes twice without acting; or a reward is
            not a number.
    """
    agents: dict[AgentID, _AgentColumns] = {}
    early: dict[AgentID, float] = {}
    for i, seen in enumerate(observations):
        infos, actions, rewards, outputs = (dicts[i] if i < len(dicts) else _NOTHING for dicts in given.values())
        for agent, observation in seen.items():
            columns = agents.setdefault(agent, _AgentColumns())
            columns.see(agent, observation, infos.get(agent) or {}, first + i)
        for agent, action in actions.items():
            if agent not in agents:
                raise EpisodeError(f"agent {agent!r} acts at step {first + i}, before its first observation")
            columns = agents[agent]
            if columns.action is not None:
                raise EpisodeError(f"agent {agent!r} acts twice on its observation at step {columns.env_ts[-1]}")
            columns.action, columns.action_outputs = action, outputs.get(agent)
        for agent, reward in rewards.items():
            if reward is not None:
                check_reward(reward, id_, i, agent)
            if agent in agents:
                agents[agent].reward = add_rewards(agents[agent].reward, reward)
            else:
                early[agent] = early.get(agent, 0.0) + (reward or 0.0)
    return agents, early


class MultiAgentEpisode(MultiAgentRecord):
    """An episode with multiple agents, or a chunk of such an episode.

    Args:
        id_: the unique id; random by default.
        observations: T + 1 dicts, one per environment time, each with the agents' observations.
        observation_space: the observation spaces, keyed by agent.
        infos: infos in the same form as `observations`.
        actions: T dicts, or T + 1 if the last actions hang.
        action_space: the action spaces, keyed by agent.
        rewards: rewards in the same form as `actions`.
        terminateds: a flag for each agent whose task ended; `__all__` stands for the episode, and True means all
            agents. An agent that has not acted on its last observation while the others continued also counts as
            terminated.
        truncateds: a flag for each agent that was cut off, in the same form as `terminateds`.
        extra_model_outputs: outputs in the same form as `actions`; each agent has a dict of outputs.
        env_t_started: the environment time of the first observation after the lookback.
        agent_t_started: each agent's own time at that observation.
        len_lookback_buffer: how many of the given steps form the lookback; "auto" means all of them.
        agent_episode_ids: the ids of the agents' episodes; random by default.
        agent_module_ids: the known modules that act for the agents, keyed by agent.
        agent_to_module_mapping_fn: a function that takes an agent's id and this episode and returns the agent's module.
            It is called once per agent.

    Raises:
        EpisodeError: the arguments are inconsistent.
    """

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: AgentDicts | None = None,
        observation_space: ByAgent | None = None,
        infos: AgentDicts | None = None,
        actions: AgentDicts | None = None,
        action_space: ByAgent | None = None,
        rewards: AgentDicts | None = None,
        terminateds: Mapping[AgentID, bool] | bool = False,
        truncateds: Mapping[AgentID, bool] | bool = False,
        extra_model_outputs: AgentDicts | None = None,
        env_t_started: int | None = None,
        agent_t_started: Mapping[AgentID, int] | None = None,
        len_lookback_buffer: int | Literal["auto"] = "auto",
        agent_episode_ids: Mapping[AgentID, str] | None = None,
        agent_module_ids: ByAgent | None = None,
        agent_to_module_mapping_fn: ModuleOf | None = None,
    ) -> None:
        n = len(observations or ())
        given: dict[str, AgentDicts] = {
            "infos": infos or [{}] * n,
            "actions": actions or (),
            "rewards": rewards or (),
            "outputs": extra_model_outputs or (),
        }
        fits = {"infos": (n,), "actions": (n - 1, n), "rewards": (n - 1, n), "outputs": range(n + 1)}
        wrong = [f"{name} {len(given[name])}" for name, sizes in fits.items() if len(given[name]) not in sizes]
        if wrong and (n or any(map(len, given.values()))):
            raise EpisodeError(
                f"{n} observations require {n} infos and {max(n - 1, 0)} actions and rewards, or {n} if the last "
                f"actions hang; got {', '.join(wrong)}"
            )
        steps = max(n - 1, 0)
        lookback = steps if len_lookback_buffer == "auto" else min(len_lookback_buffer, steps)
        if lookback < 0:
            raise EpisodeError(f"the lookback must not be negative, got {len_lookback_buffer}")
        started = env_t_started or 0
        super().__init__(id_, started, started + steps - lookback, lookback)
        self.observation_space, self.action_space = observation_space or {}, action_space or {}
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn or _default_module
        self._modules |= agent_module_ids or {}
        flags = Flags(
            {ALL: terminateds} if isinstance(terminateds, bool) else terminateds,
            {ALL: truncateds} if isinstance(truncateds, bool) else truncateds,
        )
        self.is_terminated, self.is_truncated = (bool(each.get(ALL)) for each in flags)
        agents, self._rewards_begin = _collect(observations or (), given, self._first, self.id_)
        for agent, columns in agents.items():
            terminated, truncated = flags.of(agent)
            if columns.action is None and columns.env_ts[-1] < self.env_t:
                terminated = terminated or not truncated
            if len(columns.env_ts) == 1 and (terminated or truncated):
                continue  # the agent neither acted here nor will act
            keys = dict.fromkeys(key for outputs in columns.outputs for key in outputs)
            episode = self._new_episode(
                agent,
                id_=(agent_episode_ids or {}).get(agent),
                t_started=(agent_t_started or {}).get(agent),
                terminated=terminated,
                truncated=truncated,
                len_lookback_buffer=bisect_left(columns.env_ts, self.env_t_started),
                observations=columns.observations,
                infos=columns.infos,
                actions=columns.actions,
                rewards=columns.rewards,
                extra_model_outputs={key: [outputs.get(key) for outputs in columns.outputs] for key in keys},
            )
            self._tracks[agent] = track = AgentTrack(episode, columns.env_ts)
            track.hang(columns.action, columns.action_outputs, columns.reward)
        self.validate()

    def _new_episode(self, agent: AgentID, **options: Any) -> SingleAgentEpisode:
        spaces = {"observation_space": self.observation_space, "action_space": self.action_space}
        options |= {name: space[agent] for name, space in spaces.items() if agent in space}
        return SingleAgentEpisode(
            agent_id=agent, module_id=self.module_for(agent), multi_agent_episode_id=self.id_, **options
        )

    # Building

    def add_env_reset(self, *, observations: ByAgent, infos: ByAgent | None = None) -> None:
        """Add the first observations of some agents; raise an EpisodeError if the episode was already reset."""
        if self.is_reset or self.is_done or self.env_t:
            raise EpisodeError(
                f"episode {self.id_}: add_env_reset must be called once, before any step; "
                f"the episode already has {self.size()}"
            )
        self._check_infos(infos or _NOTHING, 0)
        for agent, observation in observations.items():
            self._enter(agent, observation, (infos or _NOTHING).get(agent))
        self._start_time = time.perf_counter()

    def _enter(self, agent: AgentID, observation: Any, infos: Mapping[str, Any] | None) -> None:
        episode = self._new_episode(agent)
        episode.add_env_reset(observation, infos)
        self._tracks[agent] = AgentTrack(episode, [self.env_t])

    def add_env_step(
        self,
        observations: ByAgent,
        actions: ByAgent,
        rewards: ByAgent,
        infos: ByAgent | None = None,
        *,
        terminateds: Mapping[AgentID, bool] | None = None,
        truncateds: Mapping[AgentID, bool] | None = None,
        extra_model_outputs: ByAgent | None = None,
    ) -> None:
        """Add one environment step. If the step is rejected, the episode is left unchanged.

        Args:
            observations: observations of some agents after the step. An agent enters with its first observation.
            actions: the actions of the agents that acted. An action hangs if its agent has no observation in this step.
            rewards: the rewards. The rewards of an agent that neither acted nor observed are added up until the agent's
                next complete step.
            infos: the infos of the agents that have an observation.
            terminateds: a flag for each agent whose task ended; `__all__` ends the episode. If an agent acted but gets
                no new observation, its last observation is repeated as the final one.
            truncateds: a flag for each agent that was cut off. An agent that acted needs a final observation.
            extra_model_outputs: a dict for each agent that acted.

        Raises:
            EpisodeError: the episode has not begun or is over, a flag names an unknown agent, or an agent's part is
                impossible; the message names the agent.
        """
        flags = Flags(terminateds or _NOTHING, truncateds or _NOTHING)
        self._check_step(observations, actions, rewards, infos or _NOTHING, flags)
        is_flagged = True in flags.terminated.values() or True in flags.truncated.values()
        agents: dict[AgentID, Any] = {**observations, **actions, **rewards}
        if is_flagged:
            ends = any(each.get(ALL) for each in flags)
            agents |= {**flags.terminated, **flags.truncated, **(self._tracks if ends else {})}
            agents.pop(ALL, None)
        moves, infos, outputs = {}, infos or _NOTHING, extra_model_outputs or _NOTHING
        for agent in agents:
            done = flags.of(agent) if is_flagged else (False, False)
            moves[agent] = move = Move(
                observations.get(agent),
                actions.get(agent),
                rewards.get(agent),
                infos.get(agent),
                outputs.get(agent),
                *done,
                agent in rewards,
            )
            if agent in self._tracks:
                self._tracks[agent].check(move)
        self.env_t += 1
        for agent, move in moves.items():
            track = self._tracks.get(agent)
            if track is not None:
                track.take(move, self.env_t)
            elif move.terminated or move.truncated:
                self._rewards_begin.pop(agent, None)
            else:  # either the first observation, with which the agent enters, or only a reward
                if move.reward is not None:
                    self._rewards_begin[agent] = self._rewards_begin.get(agent, 0.0) + move.reward
                if move.observation is not None:
                    self._enter(agent, move.observation, move.infos)
        self.is_terminated, self.is_truncated = (bool(each.get(ALL)) for each in flags)
        if is_flagged and self._tracks and not self.is_done:
            episodes = [track.episode for track in self._tracks.values()]
            if all(episode.is_done for episode in episodes):
                self.is_terminated = any(episode.is_terminated for episode in episodes)
                self.is_truncated = not self.is_terminated
        self._last_step_time = time.perf_counter()
        if self._start_time is None:
            self._start_time = self._last_step_time

    def _check_infos(self, infos: ByAgent, step: int) -> None:
        if not isinstance(infos, Mapping):
            raise EpisodeError(
                f"episode {self.id_}, step {step}: infos must be a dict keyed by agent, got {infos!r:.80}"
            )
        for agent, given in infos.items():
            if type(given) is not dict:
                copy_infos(given, self.id_, step, agent)

    def _check_step(
        self, observations: ByAgent, actions: ByAgent, rewards: ByAgent, infos: ByAgent, flags: Flags
    ) -> None:
        """Check a step across agents. Each agent's part is checked by that agent's track."""
        if self.is_terminated or self.is_truncated:
            raise EpisodeError(f"episode {self.id_} is over ({self.size()}); no further step can be added")
        if not self._tracks and not self.env_t and self._start_time is None:
            raise EpisodeError(f"episode {self.id_}: call add_env_reset before add_env_step")
        if not actions.keys() <= self._tracks.keys():
            for agent, action in actions.items():
                if agent not in self._tracks and action is not None:
                    near = did_you_mean(str(agent), map(str, self._tracks))
                    raise EpisodeError(f"agent {agent!r} acts before its first observation{near}")
        for agent, reward in rewards.items():
            if type(reward) is not float and reward is not None:
                check_reward(reward, self.id_, len(self), agent)
        self._check_infos(infos, len(self))
        # An environment may list agents that never entered, but only as continuing or through `__all__`.
        if any(each.get(ALL) for each in flags):
            return
        for name, ended in (("terminateds", flags.terminated), ("truncateds", flags.truncated)):
            for agent, flag in ended.items():
                if flag and agent not in observations and agent not in rewards and not self.knows(agent):
                    near = did_you_mean(str(agent), [ALL, *map(str, self._tracks)])
                    raise EpisodeError(
                        f"episode {self.id_}, step {len(self)}: {name} contains the unknown agent {agent!r}{near}"
                    )

    def validate(self) -> None:
        """Raise an EpisodeError if an agent's part is invalid or inconsistent with the environment time.

        The message names the agent.
        """
        for track in self._tracks.values():
            track.validate(self._first, self.env_t_started, self.env_t)

    def module_for(self, agent_id: Any) -> Any:
        """Return the module for an agent, even if the agent has not entered yet.

        The mapping function is called once per agent.
        """
        if agent_id not in self._modules:
            self._modules[agent_id] = self.agent_to_module_mapping_fn(agent_id, self)
        return self._modules[agent_id]

    # Chunks

    def to_numpy(self) -> MultiAgentEpisode:
        """Store every agent's tracks compactly, in place. Reading and appending still work as before."""
        for track in self._tracks.values():
            track.episode.to_numpy()
        self._was_converted = True
        return self

    def finalize(self) -> MultiAgentEpisode:
        """An older name for `to_numpy`."""
        return self.to_numpy()

    def __getitem__(self, slice_: slice) -> MultiAgentEpisode:
        if not isinstance(slice_, slice):
            raise TypeError(
                f"an episode index must be a slice, episode[a:b]; for one step, call get_observations({slice_!r}), …"
            )
        return self.slice(slice_)

    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> MultiAgentEpisode:
        """Return the chunk between two environment steps; the preceding steps form its lookback.

        If the observation that follows an action is outside the chunk, the action hangs in the chunk. An agent that has
        no observation in the chunk is omitted. Rewards that an agent got before its first observation are assigned to
        the first steps, since the times of these rewards are not recorded.

        Args:
            slice_: the environment steps, clipped like a list slice. The slice's step must be 1.
            len_lookback_buffer: the maximum number of lookback steps; by default the number in this episode.

        Raises:
            EpisodeError: the slice's step is not 1, or the lookback is negative.
        """
        if slice_.step not in (None, 1):
            raise EpisodeError(f"the step of an episode slice must be 1, got {slice_.step}")
        start, stop, _ = slice_.indices(len(self))
        start, stop = self.env_t_started + start, self.env_t_started + max(start, stop)
        chunk = self._chunk(start, stop, self._lookback if len_lookback_buffer is None else len_lookback_buffer)
        chunk.is_terminated = self.is_terminated and stop == self.env_t
        chunk.is_truncated = self.is_truncated and stop == self.env_t
        if start == self.env_t_started < stop:
            chunk._rewards_begin = dict(self._rewards_begin)
        return chunk

    def cut(self, len_lookback_buffer: int = 0) -> MultiAgentEpisode:
        """Return an empty chunk that continues this one and has the same hanging actions.

        Args:
            len_lookback_buffer: the number of environment steps in the lookback. If necessary, the lookback is extended
                so that every agent that is not done has an observation from which to continue.

        Raises:
            EpisodeError: the episode is over, or the lookback is negative.
        """
        if self.is_done:
            raise EpisodeError(f"episode {self.id_} is over ({self.size()}) and cannot be cut")
        waits = [self.env_t - t.env_ts[-1] for t in self._tracks.values() if not t.episode.is_done]
        needed = len_lookback_buffer if len_lookback_buffer < 0 else max([len_lookback_buffer, *waits])
        return self._chunk(self.env_t, self.env_t, needed)

    def _chunk(self, start: int, stop: int, lookback: int) -> MultiAgentEpisode:
        if lookback < 0:
            raise EpisodeError(f"episode {self.id_}: the lookback must not be negative, got {lookback}")
        chunk = MultiAgentEpisode(
            self.id_,
            observation_space=self.observation_space,
            action_space=self.action_space,
            agent_module_ids=self._modules,
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
        )
        chunk._lookback = min(lookback, start - self._first)
        chunk.env_t_started, chunk.env_t = start, stop
        chunk.custom_data = copy.deepcopy(self.custom_data)
        chunk._was_converted = self.is_numpy
        for agent, track in self._tracks.items():
            part = track.window(chunk._first, start, stop, is_start=start == self.env_t_started)
            if part is not None:
                chunk._tracks[agent] = part
        return chunk

    def concat_episode(self, other: MultiAgentEpisode) -> None:
        """Append the chunk that follows this one. If the chunk is rejected, nothing changes.

        A hanging action is completed by its agent's first observation in the other chunk, so concatenating
        `episode[:t]` and `episode[t:]` restores the original episode.

        Raises:
            EpisodeError: the chunks belong to different episodes, this episode is over, or the other chunk does not
                begin where this episode ends.
        """
        if other.id_ != self.id_ or self.is_done or other.env_t_started != self.env_t:
            raise EpisodeError(
                f"episode {self.id_!r} ({self.size()}) ends at environment step {self.env_t}; the next chunk "
                f"must have the same id and begin there, got {other.id_!r} from step {other.env_t_started}"
            )
        other.validate()
        for agent, track in other._tracks.items():
            if agent in self._tracks:
                self._tracks[agent].check_follower(track)
        for agent, track in other._tracks.items():
            mine = self._tracks.get(agent)
            if mine is not None:
                mine.concat(track)
            elif part := track.window(other.env_t_started, other.env_t_started, other.env_t, is_start=True):
                self._tracks[agent] = part
        for agent, reward in other._rewards_begin.items():
            self._rewards_begin[agent] = self._rewards_begin.get(agent, 0.0) + reward
        self.env_t, self._modules = other.env_t, {**other._modules, **self._modules}
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data |= other.custom_data
        self._earlier_s, self._start_time = self.get_duration_s() + other.get_duration_s(), None
        self.validate()

    # Conversion to plain values

    def get_state(self) -> dict[str, Any]:
        """Return the whole episode as independent JSON-safe values, which `from_state` reads.

        The spaces and the mapping function are not included, but the modules determined so far are. Mappings keyed by
        agent become lists of pairs, because agent ids need not be strings.
        """
        agents = [
            [
                to_json_value(agent),
                {
                    "env_ts": list(track.env_ts),
                    "episode": track.episode.get_state(),
                    "action": to_json_value(track.action),
                    "outputs": to_json_value(None if track.outputs is None else dict(track.outputs)),
                    "reward": to_json_value(track.reward),
                    "rest": None if track.rest is None else track.rest.get_state(),
                },
            ]
            for agent, track in self._tracks.items()
        ]
        return {
            "schema_version": STATE_VERSION,
            **{name: to_json_value(getattr(self, name)) for name in PLAIN},
            "lookback": self._lookback,
            "agents": agents,
            "modules": [[to_json_value(agent), to_json_value(module)] for agent, module in self._modules.items()],
            "rewards_begin": [[to_json_value(agent), to_json_value(r)] for agent, r in self._rewards_begin.items()],
            "custom_data": to_json_value(self.custom_data),
            "duration_s": self.get_duration_s(),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, agent_to_module_mapping_fn: ModuleOf | None = None
    ) -> MultiAgentEpisode:
        """Restore an episode from the result of `get_state`.

        Args:
            state: the result of `get_state`, possibly after a JSON round trip.
            agent_to_module_mapping_fn: the mapping function for agents that enter later.

        Raises:
            EpisodeError: the version of the state is unknown, or a field is missing or invalid.
        """
        check_state(state, (STATE_VERSION,), {*PLAIN, *_STATE_TYPES}, _STATE_TYPES)
        episode = cls(agent_to_module_mapping_fn=agent_to_module_mapping_fn)
        with boundary(EpisodeError, "the episode state cannot be read"):
            for name in PLAIN:
                setattr(episode, name, from_json_value(state[name]))
            episode._lookback, episode._earlier_s = state["lookback"], state["duration_s"]
            for agent, part in state["agents"]:
                track = AgentTrack(SingleAgentEpisode.from_state(part["episode"]), part["env_ts"])
                action, outputs, reward = (from_json_value(part[name]) for name in ("action", "outputs", "reward"))
                track.hang(action, outputs, reward, part["rest"] and SingleAgentEpisode.from_state(part["rest"]))
                episode._tracks[from_json_value(agent)] = track
            episode._modules = {from_json_value(agent): from_json_value(module) for agent, module in state["modules"]}
            episode._rewards_begin = {from_json_value(agent): from_json_value(r) for agent, r in state["rewards_begin"]}
            episode.custom_data = from_json_value(state["custom_data"])
        episode.validate()
        return episode

    def __eq__(self, other: object) -> bool:
        """Compare the records; the clock, the spaces and the mapping function are ignored."""
        if not isinstance(other, MultiAgentEpisode):
            return NotImplemented
        return all(same_value(getattr(self, name), getattr(other, name)) for name in _COMPARED)

    __hash__ = None  # type: ignore[assignment]
