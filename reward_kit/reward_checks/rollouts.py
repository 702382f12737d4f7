"""The rollouts that a reward is tried on: those that models and their environments really bring about."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reward_kit.agent.actions import episode_of
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message
from reward_kit.reward_agent.scoring import ScoringRequest

QUESTION = "Please answer the question."
_MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Odd:
    """A history that a reward may not expect.

    Attributes:
        name: what is odd about it.
        messages: the whole conversation.
        is_models: a model's output alone brings it about, without any fault elsewhere.
    """

    name: str
    messages: tuple[Message, ...]
    is_models: bool = True


def with_messages(request: ScoringRequest, messages: Sequence[Message]) -> ScoringRequest:
    """The request of a rollout like this one in which these messages were exchanged; its end is kept."""
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    episode = request.episode and _episode(request.rollout_id, messages)
    return replace(request, messages=tuple(messages), assistant_turns=turns, episode=episode)


def request_of(messages: Sequence[Message], ground_truth: Any = None, **facts: Any) -> ScoringRequest:
    """A rollout of these messages, with the steps that a transcript of them has."""
    turns = [position for position, message in enumerate(messages) if message.role == "assistant"]
    return ScoringRequest(
        rollout_id="check",
        messages=tuple(messages),
        ground_truth=ground_truth,
        assistant_turns=turns,
        stop_reason="recorded",
        episode=_episode("check", messages),
        **facts,
    )


def user(text: str) -> Message:
    """A message of the user."""
    return Message(role="user", content=text)


def said(text: str | None, **more: Any) -> Message:
    """A message of the assistant."""
    return Message(role="assistant", content=text, **more)


def calling(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    """A tool call in the form of chat endpoints; arguments that are a text are handed on as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def odd_histories(prompt: Sequence[Message]) -> Iterator[Odd]:
    """Histories that break rewards, each a mistake in a reward that somebody published or a provider's habit.

    Args:
        prompt: what an agent was asked.
    """
    asked = tuple(prompt) or (user(QUESTION),)
    call = calling("look_up", {"key": "value"})
    answer = Message(role="tool", tool_call_id="call_1", content="found")
    yield Odd("no messages", (), is_models=False)
    yield Odd("only a system message", (Message(role="system", content="Be brief."),), is_models=False)
    yield Odd("no answer", asked, is_models=False)
    yield Odd("an empty answer", (*asked, said("")))
    yield Odd("an answer without content", (*asked, said(None)))
    yield Odd(
        "an answer in parts",
        (*asked, said_in_parts([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])),
    )
    yield Odd(
        "an answer with an image", (*asked, said_in_parts([{"type": "image_url", "image_url": {"url": "data:,"}}]))
    )
    yield Odd("only a tool call", (*asked, said(None, tool_calls=[call])))
    yield Odd("ends with a tool's answer", (*asked, said(None, tool_calls=[call]), answer))
    yield Odd("a tool call that is not JSON", (*asked, said(None, tool_calls=[calling("look_up", '{"key": ')])))
    yield Odd("a tool call whose arguments are null", (*asked, said(None, tool_calls=[calling("look_up", "null")])))
    yield Odd("a tool call without a name", (*asked, said(None, tool_calls=[calling("", "{}")])))
    yield Odd("a function call", (*asked, said(None, function_call={"name": "look_up", "arguments": "{}"})))
    yield Odd("only reasoning", (*asked, said(None, reasoning_content="I think so.")))
    yield Odd("ends with the user", (*asked, said("First."), user("And then?")), is_models=False)
    yield Odd("several answers in a row", (*asked, said("First."), said("Second.")))
    yield Odd("five hundred turns", (*asked, *(m for i in range(500) for m in (said(f"Turn {i}."), user("Go on.")))))


def said_in_parts(parts: list[dict[str, Any]]) -> Message:
    """A message of the assistant whose content is a list of parts."""
    return Message(role="assistant", content=parts)


def odd_texts() -> Iterator[tuple[str, str]]:
    """Answers that parsers trip over, each with its name."""
    yield from {
        "spaces": " \n\t ",
        "a lone surrogate": "\ud83d answer",
        "right-to-left and zero-width signs": "\u202e42\u202c\u200b\u200d\ufeff",
        "a NUL": "4\x002",
        "a combining flood": "a" + "\u0301" * 500,
        "superscript and full-width digits": "\u00b2 \uff11\uff12",
        "nan": "nan",
        "infinity": "1e999",
        "a division by zero": "1/0",
        "a number of 5,000 digits": "9" * 5000,
        "nested brackets": "[" * 3000,
        "nested braces": "{" * 3000 + "}" * 3000,
        "an unclosed box": "\\boxed{",
        "an unclosed tag": "<answer>",
        "a lone minus": "-",
        "a lone comma": ",",
        "format marks": "{0} {name} %s %d {",
        "a Python expression": "__import__('os').getpid()",
        "JSON that is no object": "null",
        "JSON of the wrong kind": '{"answer": {"answer": []}}',
        "regular expression marks": "(?P<a>[*+\\",
    }.items()


def long_texts() -> Iterator[tuple[str, str]]:
    """Answers of a megabyte."""
    yield "a megabyte of words", "word " * (_MEGABYTE // 5)
    yield "a megabyte of lines", "line\n" * (_MEGABYTE // 5)


def clearly_different() -> tuple[str, ...]:
    """Answers that no reward should find all alike."""
    return (
        "",
        "I do not know.",
        "42",
        "<think>Two and two is four.</think>\n<answer>4</answer>",
        "The answer is \\boxed{\\frac{1}{2}}.",
        "```python\ndef f(x):\n    return x + 1\n```",
        '{"name": "Ada", "age": 36}',
        "Step 1: look. Step 2: think. First, we add; second, we check. Therefore the result is 7.",
        "la la la la la la la la la la la la la la la la la la la la",
        "Das ist ein deutscher Satz, und noch einer folgt ihm.",
        " ".join(f"word{index}" for index in range(400)),
    )


def _episode(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    episode = episode_of(rollout_id, messages)
    episode.custom_data = {"stop_reason": "recorded", "failure": None}
    return episode
