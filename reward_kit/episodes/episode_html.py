"""The HTML of an episode for a notebook: its outcome, then the conversation with its tool calls and step rewards.

A long episode is shortened to its beginning and end; the run's page shows the whole episode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from reward_kit.display_text import pluralize
from reward_kit.episodes.episode_data import EpisodeData
from reward_kit.errors import safe_str
from reward_kit.models import Message
from reward_kit.notebook_html import (
    Html,
    block,
    code,
    details,
    element,
    faint,
    first_and_last,
    line,
    root,
    strong,
    table,
)

_MOST_CALLS = 5
_CALL_CHARS = 400
_FOLDED_FROM = 10  # longer conversations are collapsed


def episode_html(
    episode: EpisodeData, rewards: Sequence[float | None], step_at: Callable[[int], tuple[Any, Any]]
) -> str:
    """Return the HTML of an episode or a chunk of an episode.

    Args:
        episode: the episode.
        rewards: (T,) the environment's rewards; None for a step without a reward.
        step_at: a function that returns the observation and the action of a step. It is used if the episode has no
            conversation.
    """
    known = [reward for reward in rewards if reward is not None]
    state = "terminated" if episode.is_terminated else "truncated" if episode.is_truncated else "not over"
    reason = episode.custom_data.get("stop_reason")
    facts = [
        pluralize(len(rewards), "step"),
        f"environment return {sum(known):g}" if known else "no environment reward",
        f"{state} ({reason})" if reason else state,
    ]
    parts = [line(strong(f"Episode {episode.id_}"), faint(f" · {' · '.join(facts)}"))]
    if failure := episode.custom_data.get("failure"):
        is_record = isinstance(failure, Mapping)
        text = f"{failure.get('class')}: {failure.get('message')}" if is_record else str(failure)
        parts.append(line(strong("broke: "), text))
    if episode.messages:
        body = _conversation(episode.messages, list(episode.assistant_turns), rewards)
        label = pluralize(len(episode.messages), "message")
        parts.append(details(label, *body, is_open=len(episode.messages) <= _FOLDED_FROM))
    elif rewards:

        def cells(t: int) -> list[str]:
            reward = rewards[t]
            return [str(t), *map(_short, step_at(t)), "–" if reward is None else f"{reward:g}"]

        parts.append(table(["step", "observation", "action", "reward"], range(len(rewards)), cells))
    return root(*parts)


def _conversation(messages: list[Message], turns: list[int], rewards: Sequence[float | None]) -> Iterator[Html]:
    step_at = {position: step for step, position in enumerate(turns)}
    for left_out, item in first_and_last(list(enumerate(messages)), "messages"):
        if item is None:
            yield line(left_out)
            continue
        position, message = item
        step, label = step_at.get(position), ""
        if step is not None:
            reward = rewards[step] if step < len(rewards) else None
            label = f" · step {step}" + ("" if reward is None else f" · reward {reward:g}")
        yield block(*_message(message, label))


def _message(message: Message, label: str) -> Iterator[Html]:
    role = f"{message.role} ({message.name})" if message.name else message.role
    yield line(strong(role), faint(label))
    if message.reasoning_content:
        yield details(faint("reasoning"), code(message.reasoning_content))
    # For other parts, such as images, only the type is shown.
    content = [{"text": message.content}] if isinstance(message.content, str) else message.content or []
    if text := "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in content):
        shown = code(text)
        yield details(faint("instructions"), shown) if message.role in ("system", "developer") else shown
    calls = [call.function for call in message.tool_calls or ()]
    calls += [message.function_call] if message.function_call else []
    for call in calls[:_MOST_CALLS]:
        yield line(element("code", f"{call.name}({call.arguments[:_CALL_CHARS]})", style="color:inherit;"))
    if len(calls) > _MOST_CALLS:
        yield line(faint(f"… and {len(calls) - _MOST_CALLS:,} more calls"))


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return " ".join(safe_str(value).split())
