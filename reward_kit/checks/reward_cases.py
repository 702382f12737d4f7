"""Test cases of the reward check: unusual rollouts, and correct, wrong and almost correct answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reward_kit.agent.actions import episode_from_messages
from reward_kit.episodes.single_agent_episode import SingleAgentEpisode
from reward_kit.models import Message
from reward_kit.reward_agent.scoring import ScoringRequest

QUESTION = "Please answer the question."
_MEGABYTE = 1 << 20


class OddHistory(NamedTuple):
    """A history that a reward may not expect. If a model's output can cause it, `is_models` is True."""

    name: str
    messages: tuple[Message, ...]
    is_models: bool = True


def with_messages(request: ScoringRequest, messages: Sequence[Message]) -> ScoringRequest:
    """Return a copy of the request with different messages. The facts about the end of the episode stay the same."""
    episode = request.episode and _episode(request.rollout_id, messages)
    return replace(request, messages=tuple(messages), assistant_turns=_turns(messages), episode=episode)


def make_request(messages: Sequence[Message], ground_truth: Any = None, **facts: Any) -> ScoringRequest:
    """Create a rollout with these messages. The steps are derived from the messages."""
    return ScoringRequest(
        rollout_id="check",
        messages=tuple(messages),
        ground_truth=ground_truth,
        assistant_turns=_turns(messages),
        stop_reason="recorded",
        episode=_episode("check", messages),
        **facts,
    )


def _turns(messages: Sequence[Message]) -> list[int]:
    return [position for position, message in enumerate(messages) if message.role == "assistant"]


def _episode(rollout_id: str, messages: Sequence[Message]) -> SingleAgentEpisode:
    episode = episode_from_messages(rollout_id, messages)
    episode.custom_data = {"stop_reason": "recorded", "failure": None}
    return episode


def user(text: str) -> Message:
    """Create a user message."""
    return Message(role="user", content=text)


def said(content: str | list[dict[str, Any]] | None, **more: Any) -> Message:
    """Create an assistant message."""
    return Message(role="assistant", content=content, **more)


def calling(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    """Create a tool call in the format of chat endpoints. Arguments that are already a string are not encoded again."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def odd_histories(prompt: Sequence[Message]) -> Iterator[OddHistory]:
    """Yield continuations of `prompt` that break rewards.

    The cases are known from published bugs and from model providers' APIs.
    """
    asked = tuple(prompt) or (user(QUESTION),)
    call = calling("look_up", {"key": "value"})
    answer = Message(role="tool", tool_call_id="call_1", content="found")
    yield OddHistory("no messages", (), is_models=False)
    yield OddHistory("only a system message", (Message(role="system", content="Be brief."),), is_models=False)
    yield OddHistory("no answer", asked, is_models=False)
    yield OddHistory("an empty answer", (*asked, said("")))
    yield OddHistory("an answer without content", (*asked, said(None)))
    yield OddHistory("an answer in parts", (*asked, said([{"type": "text", "text": text} for text in ("one ", "two")])))
    yield OddHistory("an answer with an image", (*asked, said([{"type": "image_url", "image_url": {"url": "data:,"}}])))
    yield OddHistory("only a tool call", (*asked, said(None, tool_calls=[call])))
    yield OddHistory("ends with a tool result", (*asked, said(None, tool_calls=[call]), answer))
    yield OddHistory("a tool call that is not JSON", (*asked, said(None, tool_calls=[calling("look_up", '{"key": ')])))
    yield OddHistory(
        "a tool call whose arguments are null", (*asked, said(None, tool_calls=[calling("look_up", "null")]))
    )
    yield OddHistory("a tool call without a name", (*asked, said(None, tool_calls=[calling("", "{}")])))
    yield OddHistory("a function call", (*asked, said(None, function_call={"name": "look_up", "arguments": "{}"})))
    yield OddHistory("only reasoning", (*asked, said(None, reasoning_content="I think so.")))
    yield OddHistory("ends with the user", (*asked, said("First."), user("And then?")), is_models=False)
    yield OddHistory("several answers in a row", (*asked, said("First."), said("Second.")))
    yield OddHistory(
        "five hundred turns", (*asked, *(m for i in range(500) for m in (said(f"Turn {i}."), user("Go on."))))
    )


def odd_texts() -> Iterator[tuple[str, str]]:
    """Yield the names and contents of answers that break parsers."""
    yield from {
        "spaces": " \n\t ",
        "a lone surrogate": "\ud83d answer",
        "right-to-left and zero-width characters": "\u202e42\u202c\u200b\u200d\ufeff",
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
        "JSON that is not an object": "null",
        "JSON of the wrong kind": '{"answer": {"answer": []}}',
        "regular expression syntax": "(?P<a>[*+\\",
    }.items()


def long_texts() -> Iterator[tuple[str, str]]:
    """Yield the names and contents of one-megabyte answers."""
    yield "a megabyte of words", "word " * (_MEGABYTE // 5)
    yield "a megabyte of lines", "line\n" * (_MEGABYTE // 5)


def clearly_different() -> tuple[str, ...]:
    """Return answers that should not all get the same score."""
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


_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?\Z")
_NUMBERS = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(\.\d+)?(?!\w)")
_SINGLE_LETTER = re.compile(r"[A-J]\Z")
_WORDS = ("a zebra", "no", "yesterday", "Reykjavik", "green", "seven", "nobody", "a violin")


class Form(NamedTuple):
    """An answer form: a name, and a function that adds the surrounding text to an answer."""

    name: str
    write: Callable[[str], str]


FORMS = (
    Form("the answer alone", lambda text: text),
    Form("a box", lambda text: f"\\boxed{{{text}}}"),
    Form("an answer tag", lambda text: f"<answer>{text}</answer>"),
    Form("thoughts and an answer tag", lambda text: f"<think>\nLet me see.\n</think>\n<answer>\n{text}\n</answer>"),
    Form("a sentence", lambda text: f"The answer is {text}."),
    Form("an answer line", lambda text: f"Let me see.\n\nAnswer: {text}"),
    Form("hashes", lambda text: f"Let me see.\n#### {text}"),
    Form("a box in dollars", lambda text: f"Final answer: $\\boxed{{{text}}}$"),
    Form("thoughts and a box", lambda text: f"<think>Let me see.</think> <answer>\\boxed{{{text}}}</answer>"),
    Form("a code block", lambda text: f"```python\n{text}\n```"),
    Form("a JSON block", lambda text: f"```json\n{text}\n```"),
    Form("JSON with an answer", lambda text: json.dumps({"answer": text})),
)
"""The forms to try, in this order, if the form of answer that a reward expects is unknown."""


def truth_text(truth: Any) -> str:
    """Return a ground truth as a model would write it."""
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def truth_positions(truth: Any, text: str) -> Iterator[tuple[int, int]]:
    """Yield the positions of a ground truth in a string.

    A number also matches equal numbers. For example, 8.0 matches "8.00".
    """
    if is_number(truth):
        yield from (match.span() for match in _NUMBERS.finditer(text) if _value(match[0]) == _value(truth))
    elif written := truth_text(truth):
        yield from (match.span() for match in re.finditer(re.escape(written), text))


def is_number(truth: Any) -> bool:
    """Return True if a ground truth is a number or a string that contains only a number."""
    if isinstance(truth, bool):
        return False
    return isinstance(truth, int | float) or (isinstance(truth, str) and bool(_NUMBER.match(truth.strip())))


def is_choice(truth: Any) -> bool:
    """Return True if a ground truth is a multiple-choice letter."""
    return isinstance(truth, str) and bool(_SINGLE_LETTER.match(truth.strip()))


def is_tool_call(truth: Any) -> bool:
    """Return True if a ground truth is a tool call or a list of tool calls."""
    calls = _calls(truth)
    return bool(calls) and all(
        isinstance(call, Mapping)
        and (isinstance(call.get("function"), Mapping) or ("name" in call and ("arguments" in call or "args" in call)))
        for call in calls
    )


def _calls(truth: Any) -> list[Any]:
    if isinstance(truth, Mapping) and isinstance(truth.get("tool_calls"), list):
        truth = truth["tool_calls"]
    return truth if isinstance(truth, list) else [truth]


def tool_answer(truth: Any) -> Message:
    """Create an assistant message that contains the tool calls of a ground truth."""
    made = []
    for index, call in enumerate(_calls(truth)):
        inner = call.get("function") if isinstance(call.get("function"), Mapping) else call
        made.append(calling(str(inner.get("name")), inner.get("arguments", inner.get("args", {})), f"call_{index}"))
    return said(None, tool_calls=made)


def wrong_values(truth: Any, chance: random.Random) -> list[Any]:
    """Return clearly wrong values, of the same type as the ground truth if possible."""
    if isinstance(truth, bool):
        return [not truth]
    if is_choice(truth):
        return [letter for letter in "ABCD" if letter != truth.strip()]
    if is_number(truth):
        value = _value(truth)
        wrong = [value + chance.randint(100, 900) * 7 + 3, -(value + 5003), value * 3 + 711]
        return [_like(truth, number) for number in wrong]
    if isinstance(truth, list):
        return [[word] for word in chance.sample(_WORDS, 2)] + [[]]
    if isinstance(truth, Mapping):
        return [{"nothing": "of this"}, {}]
    words = [word for word in _WORDS if word.lower() not in str(truth).lower()]
    return list(chance.sample(words, 3))


def near_values(truth: Any) -> list[Any]:
    """Return wrong values that resemble the ground truth."""
    if isinstance(truth, bool) or is_choice(truth):
        return []
    if is_number(truth):
        value, text = _value(truth), truth_text(truth).strip()
        near = [value + 1, value - 1, value * 10, -value if value else 1]
        near += [value // 10] if isinstance(value, int) and abs(value) >= 10 and value % 10 == 0 else []
        near += [_value(f"{text}7"), _value(f"9{text.lstrip('-')}")]
        return [_like(truth, number) for number in dict.fromkeys(near) if number != value]
    if isinstance(truth, str) and len(truth) >= 3:
        return [*dict.fromkeys((truth[:-1], f"{truth}s", f"not {truth}", f"{truth} or {_WORDS[0]}", truth[1:]))]
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        return [[*truth, _WORDS[0]], truth[:-1]]
    return []


def equal_forms(truth: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and contents of equivalent forms of the answer."""
    text = truth_text(truth).strip()
    if is_number(truth):
        value = _value(truth)
        if isinstance(value, int) and abs(value) >= 1000:
            yield "with thousands separators", f"{value:,}"
        if isinstance(value, int):
            yield "with a decimal point", f"{value}.0"
        yield "with a dollar sign", f"${text}"
    elif isinstance(truth, str) and text:
        if text.swapcase() != text:
            yield "in a different case", text.swapcase()
        yield "in bold", f"**{text}**"
    if text:
        yield "with a full stop", f"{text}."
        yield "with spaces around it", f"  {text}  "


def options(truth: Any, wrong: Sequence[Any]) -> list[str]:
    """Return the possible answers, including the ground truth."""
    if is_choice(truth):
        return list("ABCDEFGHIJ"[: max(4, "ABCDEFGHIJ".index(truth.strip()) + 2)])
    if is_number(truth) and isinstance(value := _value(truth), int):
        return [truth_text(_like(truth, number)) for number in range(value - 12, value + 13)]
    return [*(truth_text(value) for value in wrong), truth_text(truth), *_WORDS[:4]]


def _value(truth: Any) -> int | float:
    if isinstance(truth, int | float):
        return truth
    text = truth.strip().replace(",", "")
    return float(text) if "." in text else int(text)


def _like(truth: Any, number: float) -> Any:
    """Convert a number to the ground truth's type."""
    return str(number) if isinstance(truth, str) else number
