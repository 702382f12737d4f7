"""The JSON-safe state of an episode of several agents, versioned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_kit.episodes.json_codec import from_json_value, to_json_value
from reward_kit.episodes.multi_agent_reading import MultiAgentRecord
from reward_kit.episodes.multi_agent_track import AgentTrack
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.episodes.state import check_kinds, check_mapping
from reward_kit.errors import EpisodeError, boundary

STATE_VERSION = 1
PLAIN = ("id_", "env_t", "env_t_started", "is_terminated", "is_truncated")
_OTHERS = ("agents", "custom_data", "duration_s", "lookback", "modules", "rewards_begin")

_ITEMS = (list, tuple)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("is_terminated", "is_truncated"), (bool, dict)),
    **dict.fromkeys(("env_t", "env_t_started"), (int, dict)),
    **dict.fromkeys(("agents", "modules", "rewards_begin"), _ITEMS),
    **{"lookback": (int,), "duration_s": (int, float), "custom_data": (dict,)},
}


def state_of(record: MultiAgentRecord) -> dict[str, Any]:
    """The record as JSON-safe values. Agents' ids need not be texts, so mappings by agent are lists of pairs."""
    return {
        "schema_version": STATE_VERSION,
        **{name: to_json_value(getattr(record, name)) for name in PLAIN},
        "lookback": record._lookback,
        "agents": [[to_json_value(agent), _track_state(track)] for agent, track in record._tracks.items()],
        "modules": [[to_json_value(agent), to_json_value(module)] for agent, module in record._modules.items()],
        "rewards_begin": [[to_json_value(agent), to_json_value(r)] for agent, r in record._rewards_begin.items()],
        "custom_data": to_json_value(record.custom_data),
        "duration_s": record.get_duration_s(),
    }


def restore(record: MultiAgentRecord, state: Mapping[str, Any]) -> None:
    """Fill an empty record from a state.

    Raises:
        EpisodeError: the state is of another version, or a field is missing or cannot be read.
    """
    check_mapping(state)
    version = state.get("schema_version")
    if version != STATE_VERSION:
        raise EpisodeError(f"episode state of version {version!r}; this release reads version {STATE_VERSION}")
    missing = {*PLAIN, *_OTHERS} - state.keys()
    if missing:
        raise EpisodeError(f"episode state without {', '.join(sorted(missing))}")
    check_kinds(state, _KINDS)
    with boundary(EpisodeError, "the episode state cannot be read"):
        _fill(record, state)


def _fill(record: MultiAgentRecord, state: Mapping[str, Any]) -> None:
    for name in PLAIN:
        setattr(record, name, from_json_value(state[name]))
    record._lookback, record._earlier_s = state["lookback"], state["duration_s"]
    record._tracks = {from_json_value(agent): _track_of(part) for agent, part in state["agents"]}
    record._modules = {from_json_value(agent): from_json_value(module) for agent, module in state["modules"]}
    record._rewards_begin = {from_json_value(agent): from_json_value(r) for agent, r in state["rewards_begin"]}
    record.custom_data = from_json_value(state["custom_data"])


def _track_state(track: AgentTrack) -> dict[str, Any]:
    return {
        "env_ts": list(track.env_ts),
        "episode": track.episode.get_state(),
        "action": to_json_value(track.action),
        "outputs": to_json_value(None if track.outputs is None else dict(track.outputs)),
        "reward": to_json_value(track.reward),
        "rest": None if track.rest is None else track.rest.get_state(),
    }


def _track_of(state: Mapping[str, Any]) -> AgentTrack:
    track = AgentTrack(SingleAgentEpisode.from_state(state["episode"]), state["env_ts"])
    action, outputs, reward = (from_json_value(state[name]) for name in ("action", "outputs", "reward"))
    track.hang(action, outputs, reward, state["rest"] and SingleAgentEpisode.from_state(state["rest"]))
    return track
