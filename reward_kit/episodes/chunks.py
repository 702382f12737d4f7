"""Episodes in chunks: cut at a fragment's end, slice, and put together again.

A chunk is the same episode: it keeps every id, the spaces, `custom_data` and the conversation up to its end. Of the
tokens it keeps all up to its end, too; those that an action outside the chunk sampled are context in it and no longer
actions, so that a chunk can be trained on by itself and no action is ever trained on twice.
"""

from __future__ import annotations

from array import array
from copy import deepcopy
from typing import TypeVar

from reward_kit.episodes.columns import Column, same_value
from reward_kit.episodes.compaction import joined
from reward_kit.episodes.episode_data import EpisodeData
from reward_kit.episodes.segments import EpisodeTokens
from reward_kit.episodes.storage import part_of
from reward_kit.errors import EpisodeError
from reward_kit.models import Message

E = TypeVar("E", bound=EpisodeData)


def cut(episode: E, len_lookback_buffer: int) -> E:
    """An episode without steps that goes on where this one stops.

    Raises:
        EpisodeError: the episode is over, or the lookback is negative.
    """
    if episode.is_done:
        raise EpisodeError(f"episode {episode.id_} is over and has no successor; it has {episode.size()}")
    if not len(episode._observations):
        raise EpisodeError(f"episode {episode.id_}: call add_env_reset before cut")
    return _part(episode, len(episode), len(episode), len_lookback_buffer)


def sliced(episode: E, part: slice, len_lookback_buffer: int | None) -> E:
    """The steps that a slice of the episode's steps takes, clipped as a list's slice is.

    Raises:
        EpisodeError: the slice has a step, the lookback is negative, or there is nothing to slice.
        TypeError: it is no slice.
    """
    if not isinstance(part, slice):
        raise TypeError(
            f"an episode takes a slice of steps, episode[a:b], and not {part!r}; for one item call "
            "get_observations(i), get_actions(i), …"
        )
    if part.step not in (None, 1):
        raise EpisodeError(f"episode {episode.id_}: a chunk is whole, so its slice has no step; got {part.step!r}")
    if not len(episode._observations):
        raise EpisodeError(f"episode {episode.id_}: call add_env_reset before taking a slice")
    start, stop, _ = part.indices(episode.t - episode.t_started)
    lookback = episode._lookback if len_lookback_buffer is None else len_lookback_buffer
    return _part(episode, start, stop if stop > start else start, lookback)


def _part(episode: E, start: int, stop: int, lookback: int) -> E:
    """The chunk from step `start` to `stop`. Slices must be quick: no constructor, no call that can be spared."""
    if lookback < 0:
        raise EpisodeError(f"episode {episode.id_}: a lookback cannot be negative, got {lookback}")
    first, last = episode._lookback + start, episode._lookback + stop
    begin = first - lookback if lookback < first else 0
    lookback = first - begin
    kind = type(episode)
    chunk = kind.__new__(kind)
    if episode.is_numpy:
        chunk._observations = part_of(episode._observations, begin, last + 1)
        chunk._actions = part_of(episode._actions, begin, last)
        chunk._rewards = part_of(episode._rewards, begin, last)
    else:
        chunk._observations = episode._observations[begin : last + 1]
        chunk._actions = episode._actions[begin:last]
        chunk._rewards = episode._rewards[begin:last]
    chunk._infos = episode._infos[begin : last + 1]
    chunk._lookback = lookback
    outputs = episode.extra_model_outputs
    chunk.extra_model_outputs = {}
    for key in outputs:
        chunk.extra_model_outputs[key] = Column(part_of(outputs[key].data, begin, last), lookback, outputs[key].space)
    chunk.id_, chunk.is_numpy = episode.id_, episode.is_numpy
    chunk.t_started, chunk.t = episode.t_started + start, episode.t_started + stop
    at_end = chunk.t == episode.t
    chunk.is_terminated, chunk.is_truncated = at_end and episode.is_terminated, at_end and episode.is_truncated
    chunk.observation_space, chunk.action_space = episode.observation_space, episode.action_space
    chunk.agent_id, chunk.module_id = episode.agent_id, episode.module_id
    chunk.multi_agent_episode_id = episode.multi_agent_episode_id
    chunk.custom_data = deepcopy(episode.custom_data) if episode.custom_data else {}
    chunk._earlier_s, chunk._start_time, chunk._last_step_time = 0.0, None, None
    chunk._messages, chunk._turns, chunk._tokens = None, None, None
    if episode._messages or episode._tokens:
        _take_language(episode, chunk, start, stop)
    return chunk


def _take_language(episode: EpisodeData, chunk: EpisodeData, start: int, stop: int) -> None:
    turns = episode.assistant_turns
    end = turns[stop] if stop < len(turns) else len(episode.messages)
    chunk.messages, chunk.assistant_turns = episode.messages[:end], turns[start:stop]
    chunk.tokens = episode.tokens.part(start, stop if stop < len(episode) else None)


def concat(episode: EpisodeData, other: EpisodeData) -> None:
    """Append the chunk that follows, in place.

    Raises:
        EpisodeError: `other` is not the next chunk of this episode; nothing is changed then.
    """
    _check_follows(episode, other)
    messages, turns, tokens = _joined_language(episode, other)
    begin = other._lookback
    episode._observations = joined(
        part_of(episode._observations, 0, len(episode._observations) - 1),
        part_of(other._observations, begin, len(other._observations)),
    )
    episode._infos = episode._infos[:-1] + other._infos[begin:]
    _join_outputs(episode, other)
    episode._actions = joined(episode._actions, part_of(other._actions, begin, len(other._actions)))
    episode._rewards = joined(episode._rewards, part_of(other._rewards, begin, len(other._rewards)))
    episode._messages, episode._turns, episode._tokens = messages, turns, tokens
    episode._earlier_s = episode.get_duration_s() + other.get_duration_s()
    episode._start_time = episode._last_step_time = None
    episode.t = other.t
    episode.is_terminated, episode.is_truncated = other.is_terminated, other.is_truncated
    episode.custom_data.update(other.custom_data)


def _check_follows(episode: EpisodeData, other: EpisodeData) -> None:
    problem = ""
    if other.id_ != episode.id_:
        problem = f"{other.id_} is another episode"
    elif episode.is_done:
        problem = f"it is over and takes no further chunk; it has {episode.size()}"
    elif not (len(episode._observations) and len(other._observations)):
        problem = "both chunks need an observation at least"
    elif episode.t != other.t_started:
        problem = f"it stops at t={episode.t} and the chunk begins at t={other.t_started}"
    elif not same_value(episode._observations[len(episode._observations) - 1], other._observations[other._lookback]):
        problem = "its last observation is not the chunk's first"
    if problem:
        raise EpisodeError(f"cannot append the chunk to episode {episode.id_}: {problem}")
    episode.validate()
    other.validate()


def _join_outputs(episode: EpisodeData, other: EpisodeData) -> None:
    """A key that one of the two lacks counts as None in all of its steps, as in `add_env_step`."""
    before, after = len(episode._rewards), len(other)
    for key in {**episode.extra_model_outputs, **other.extra_model_outputs}:
        mine, theirs = episode.extra_model_outputs.get(key), other.extra_model_outputs.get(key)
        data = [None] * before if mine is None else mine.data
        added = [None] * after if theirs is None else part_of(theirs.data, other._lookback, len(theirs.data))
        space = (mine or theirs).space  # type: ignore[union-attr]
        episode.extra_model_outputs[key] = Column(joined(data, added), episode._lookback, space)


def _joined_language(
    episode: EpisodeData, other: EpisodeData
) -> tuple[list[Message] | None, array[int] | None, EpisodeTokens | None]:
    messages, turns, tokens = episode._messages, episode._turns, episode._tokens
    if other._messages:
        if other._messages[: len(episode.messages)] != episode.messages:
            raise EpisodeError(
                f"cannot append the chunk to episode {episode.id_}: its conversation does not begin with the episode's"
            )
        messages, turns = other._messages[:], episode.assistant_turns + other.assistant_turns
    if other._tokens:
        tokens = episode.tokens.continued(other._tokens, len(episode))
    return messages, turns, tokens
