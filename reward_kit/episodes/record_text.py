"""The line of `episodes.jsonl` as text, made at once and not by way of the object that it stands for.

`episode_to_record` says what a line holds. In a quick run making that object and its text took a tenth of the time;
this takes half of that. What is unusual is left to `episode_to_record` and its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from reward_kit.episodes.json_codec import to_json_value
from reward_kit.episodes.json_text import WRITERS, compact_json, has_lone_surrogates, json_text, quoted
from reward_kit.episodes.record import (
    IDENTITY,
    SAMPLE,
    SCHEMA_VERSION,
    START_AND_END,
    environment_return,
    episode_to_record,
    preceding_text,
)
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message, ToolCall


def episode_to_text(episode: SingleAgentEpisode, *, final_state: Mapping[str, str] | None = None) -> str:
    """`episode_to_record` as one line of ASCII.

    Args:
        episode: the episode.
        final_state: stands in the place of the episode's own, where its payload is kept elsewhere.

    Raises:
        EpisodeError: a value has no JSON form; the message names its type.
        ValueError: its rewards add up to no finite number.
    """
    facts: dict[str, Any] = {**episode.custom_data}
    if final_state:
        facts["final_state"] = dict(final_state)
    parts = [f'{{"schema_version":{SCHEMA_VERSION},"rollout_id":{compact_json(episode.id_)}']
    parts += _taken(facts, IDENTITY)
    parts.append(f'"terminated":{_bool(episode.is_terminated)},"truncated":{_bool(episode.is_truncated)}')
    parts.append(f'"environment_return":{_return(episode)},"num_steps":{len(episode)}')
    parts += _taken(facts, START_AND_END)
    parts.append(f'"messages":[{",".join(map(_message, episode.messages))}]')
    parts += _steps(episode)
    if episode.tokens:
        parts.append(f'"tokens":{compact_json(episode.tokens.get_state())}')
    timing = facts.pop("timing", None)
    parts += _taken(facts, SAMPLE)
    if facts:
        parts.append(f'"custom_data":{compact_json({key: to_json_value(value) for key, value in facts.items()})}')
    text = ",".join(parts) + f',"timing":{json_text(timing)}}}'
    if has_lone_surrogates(text):
        return compact_json(episode_to_record(episode, final_state=final_state))
    return text


def _taken(facts: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """Items of an object; what they say is not among the facts any longer."""
    return [f'"{key}":{json_text(facts.pop(key, None))}' for key in keys]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _return(episode: SingleAgentEpisode) -> str:
    value = environment_return(episode)
    return "null" if value is None else repr(value) if math.isfinite(value) else compact_json(value)


def _message(message: Message) -> str:
    fields = message.__dict__  # each look into it takes half as long as one for an attribute
    if message.__pydantic_extra__ or fields["function_call"] is not None or fields["reasoning_content"] is not None:
        return json_text(message.to_chat())
    content, name, call_id = fields["content"], fields["name"], fields["tool_call_id"]
    text = f'{{"role":{quoted(fields["role"])},"content":{WRITERS[type(content)](content)}'
    if name is not None:
        text += f',"name":{quoted(name)}'
    if call_id is not None:
        text += f',"tool_call_id":{quoted(call_id)}'
    if calls := fields["tool_calls"]:
        text += f',"tool_calls":[{",".join(map(_call, calls))}]'
    return text + "}"


def _call(call: ToolCall) -> str:
    function = call.function
    if call.__pydantic_extra__ or function.__pydantic_extra__:
        return json_text(call.model_dump())
    named = f'{{"name":{quoted(function.name)},"arguments":{quoted(function.arguments)}}}'
    return f'{{"id":{quoted(call.id)},"type":{quoted(call.type)},"function":{named}}}'


def _steps(episode: SingleAgentEpisode) -> list[str]:
    """Items of the episode's object: its steps, and what was seen after the last of them."""
    lookback, turns = episode._lookback, episode.assistant_turns.tolist()
    rewards, infos, shown = _after(lookback, episode._rewards), _after(lookback, episode._infos), _shown(episode)
    outputs = {key: _after(column.lookback, column.data) for key, column in episode.extra_model_outputs.items()}
    steps = []
    for t, action in enumerate(_after(lookback, episode._actions)):
        reward, info = rewards[t], dict(infos[t]) if infos[t] else {}
        state = _plain(info.pop("state_key", None))
        turn = f',"assistant_turn":{turns[t]}' if t < len(turns) else ""
        did = f'"action":{WRITERS[type(action)](action)},"reward":{WRITERS[type(reward)](reward)}'
        text = f'{{"state_key":{state}{turn}{shown[t]},{did}'
        if info:
            text += f',"info":{json_text(info)}'
        if outputs and (put := {key: value for key, values in outputs.items() if (value := values[t]) is not None}):
            text += f',"outputs":{json_text(put)}'
        steps.append(text + "}")
    items = [f'"steps":[{",".join(steps)}]']
    if episode.is_reset:
        last = f'{shown[-1]},"info":{json_text(infos[-1] or {})}'
        items.append(f'"final":{{{last[1:]}}}')
    return items


def _plain(state: Any) -> str:
    """A state's key, which is stored as it is."""
    return "null" if state is None else quoted(state) if type(state) is str else compact_json(state)


def _after(lookback: int, track: Any) -> list[Any]:
    """The items of a track, each as it is read by its index, that lie in the episode."""
    return track[lookback:] if type(track) is list else [track[place] for place in range(lookback, len(track))]


def _shown(episode: SingleAgentEpisode) -> list[str]:
    """Each observation as a further item, "" where it is the text of the message that precedes the action."""
    messages, turns, items = episode.messages, episode.assistant_turns, []
    for t, observation in enumerate(_after(episode._lookback, episode._observations)):
        is_told = isinstance(observation, str) and observation == preceding_text(messages, turns, t)
        items.append("" if is_told else f',"observation":{json_text(observation)}')
    return items
