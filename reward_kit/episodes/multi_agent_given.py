"""What `MultiAgentEpisode` makes of lists it is given: each agent's part, from one dict of agents for each step.

The constructor is more lenient than `add_env_step`, as RLlib's is: a reward may be missing, and an agent that has not
acted on its last observation while the others went on counts as terminated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reward_kit.episodes.episode_data import REWARD
from reward_kit.episodes.multi_agent_track import AgentID, AgentTrack, added
from reward_kit.episodes.reward_values import check_reward
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.errors import EpisodeError

AgentDicts = Sequence[Mapping[AgentID, Any]]


class Given(NamedTuple):
    """The lists: an item is one environment step, by agent. There is one observation more than there are actions.

    Where actions and rewards are as many as observations, the last ones hang.
    """

    observations: AgentDicts
    infos: AgentDicts
    actions: AgentDicts
    rewards: AgentDicts
    outputs: AgentDicts

    @classmethod
    def of(
        cls,
        observations: AgentDicts | None,
        infos: AgentDicts | None,
        actions: AgentDicts | None,
        rewards: AgentDicts | None,
        outputs: AgentDicts | None,
    ) -> Given:
        """The lists, checked for their lengths.

        Raises:
            EpisodeError: they do not fit together.
        """
        n = len(observations or ())
        given = cls(observations or (), infos or [{}] * n, actions or (), rewards or (), outputs or ())
        fits = {"infos": (n,), "actions": (n - 1, n), "rewards": (n - 1, n), "outputs": range(n + 1)}
        lengths = {name: len(getattr(given, name)) for name in fits}
        wrong = [f"{name} {lengths[name]}" for name, sizes in fits.items() if lengths[name] not in sizes]
        if wrong and (n or any(lengths.values())):
            raise EpisodeError(
                f"{n} observations need {n} infos and {max(n - 1, 0)} actions and rewards, or {n} where the last ones "
                f"hang; got {', '.join(wrong)}"
            )
        return given


class Flags(NamedTuple):
    """Which agents are terminated, and which truncated."""

    terminated: Mapping[AgentID, bool]
    truncated: Mapping[AgentID, bool]

    def of(self, agent: AgentID) -> tuple[bool, bool]:
        """Both flags of one agent; `__all__` is every agent's."""
        return tuple(bool(flags.get(agent) or flags.get("__all__")) for flags in self)  # type: ignore[return-value]


@dataclass(slots=True)
class Collected:
    """One agent's columns, and what hangs behind them."""

    observations: list[Any] = field(default_factory=list)
    infos: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    outputs: list[Mapping[str, Any]] = field(default_factory=list)
    env_ts: list[int] = field(default_factory=list)
    action: Any = None
    said: Mapping[str, Any] | None = None
    reward: float | None = None

    def see(self, agent: AgentID, observation: Any, infos: Mapping[str, Any], env_t: int) -> None:
        """Add an observation, which completes the step of the action that hangs."""
        if self.env_ts:
            if self.action is None:
                raise EpisodeError(
                    f"agent {agent!r} has observations at steps {self.env_ts[-1]} and {env_t} of the environment, but "
                    "no action between them"
                )
            self.actions.append(self.action)
            self.rewards.append(self.reward or 0.0)
            infos = infos if self.reward is not None else {**infos, REWARD: None}
            self.outputs.append(self.said or {})
            self.action = self.said = self.reward = None
        self.observations.append(observation)
        self.infos.append(infos)
        self.env_ts.append(env_t)

    def act(self, agent: AgentID, action: Any, outputs: Mapping[str, Any] | None) -> None:
        """Add an action, which hangs for now."""
        if self.action is not None:
            raise EpisodeError(f"agent {agent!r} acts twice on its observation at step {self.env_ts[-1]}")
        self.action, self.said = action, outputs

    def track(self, episode: SingleAgentEpisode) -> AgentTrack:
        """The agent's part, around its episode."""
        track = AgentTrack(episode, self.env_ts)
        track.hang(self.action, self.said, self.reward)
        return track

    def columns(self) -> dict[str, Any]:
        """The arguments of a `SingleAgentEpisode`."""
        keys = dict.fromkeys(key for outputs in self.outputs for key in outputs)
        return {
            "observations": self.observations,
            "infos": self.infos,
            "actions": self.actions,
            "rewards": self.rewards,
            "extra_model_outputs": {key: [outputs.get(key) for outputs in self.outputs] for key in keys},
        }


def collect(given: Given, first: int, id_: str) -> tuple[dict[AgentID, Collected], dict[AgentID, float]]:
    """Each agent's columns, and the rewards of agents that had seen nothing yet.

    Args:
        given: the lists.
        first: the environment's time of the first observation.
        id_: of the episode, for messages.

    Raises:
        EpisodeError: an agent acts that has seen nothing, or twice, or sees twice without acting; a reward is no
            number.
    """
    agents: dict[AgentID, Collected] = {}
    early: dict[AgentID, float] = {}
    for i, observations in enumerate(given.observations):
        for agent, observation in observations.items():
            known = agents.setdefault(agent, Collected())
            known.see(agent, observation, given.infos[i].get(agent) or {}, first + i)
        outputs = _at(given.outputs, i)
        for agent, action in _at(given.actions, i).items():
            if agent not in agents:
                raise EpisodeError(f"agent {agent!r} acts at step {first + i} and has seen nothing yet")
            agents[agent].act(agent, action, outputs.get(agent))
        for agent, reward in _at(given.rewards, i).items():
            if reward is not None:
                check_reward(reward, id_, i, agent)
            if agent in agents:
                agents[agent].reward = added(agents[agent].reward, reward)
            else:
                early[agent] = early.get(agent, 0.0) + (reward or 0.0)
    return agents, early


def _at(dicts: AgentDicts, i: int) -> Mapping[AgentID, Any]:
    return dicts[i] if i < len(dicts) else {}
