"""Right, wrong and nearly right answers to a ground truth, in the forms in which models write them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reward_kit.models import Message
from reward_kit.reward_checks.rollouts import calling, said

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?\Z")
_NUMBERS = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(\.\d+)?(?!\w)")
_SINGLE_LETTER = re.compile(r"[A-J]\Z")
_WORDS = ("a zebra", "no", "yesterday", "Reykjavik", "green", "seven", "nobody", "a violin")


class Form(NamedTuple):
    """A way to write an answer down: its name, and the text around the answer."""

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
"""In the order in which they are tried on a reward whose form is not known."""


def text_of(truth: Any) -> str:
    """A ground truth as a model would write it."""
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def places_of(truth: Any, text: str) -> Iterator[tuple[int, int]]:
    """Where a ground truth stands in a text; a number wherever one of its value does, as 8.0 in "8.00"."""
    if is_number(truth):
        for found in _NUMBERS.finditer(text):
            if _value(found[0]) == _value(truth):
                yield found.span()
    elif written := text_of(truth):
        yield from (found.span() for found in re.finditer(re.escape(written), text))


def is_number(truth: Any) -> bool:
    """It is a number, or a text that is one."""
    if isinstance(truth, bool):
        return False
    return isinstance(truth, int | float) or (isinstance(truth, str) and bool(_NUMBER.match(truth.strip())))


def is_choice(truth: Any) -> bool:
    """It is the letter of a multiple choice."""
    return isinstance(truth, str) and bool(_SINGLE_LETTER.match(truth.strip()))


def is_tool_call(truth: Any) -> bool:
    """It is a tool call, or a list of them."""
    if isinstance(truth, Mapping) and isinstance(truth.get("tool_calls"), list):
        truth = truth["tool_calls"]
    calls = truth if isinstance(truth, list) else [truth]
    return bool(calls) and all(isinstance(call, Mapping) and _is_call(call) for call in calls)


def _is_call(call: Mapping[str, Any]) -> bool:
    return isinstance(call.get("function"), Mapping) or ("name" in call and ("arguments" in call or "args" in call))


def tool_answer(truth: Any) -> Message:
    """The message that makes the calls of a ground truth."""
    if isinstance(truth, Mapping) and isinstance(truth.get("tool_calls"), list):
        truth = truth["tool_calls"]
    calls = truth if isinstance(truth, list) else [truth]
    made = []
    for index, call in enumerate(calls):
        inner = call.get("function") if isinstance(call.get("function"), Mapping) else call
        made.append(calling(str(inner.get("name")), inner.get("arguments", inner.get("args", {})), f"call_{index}"))
    return said(None, tool_calls=made)


def wrong_values(truth: Any, chance: random.Random) -> list[Any]:
    """Values that are nothing like the ground truth, of its kind where it has one."""
    if isinstance(truth, bool):
        return [not truth]
    if is_choice(truth):
        return [letter for letter in "ABCD" if letter != truth.strip()]
    if is_number(truth):
        value = _value(truth)
        found = [value + chance.randint(100, 900) * 7 + 3, -(value + 5003), value * 3 + 711]
        return [_like(truth, number) for number in found]
    if isinstance(truth, list):
        return [[word] for word in chance.sample(_WORDS, 2)] + [[]]
    if isinstance(truth, Mapping):
        return [{"nothing": "of this"}, {}]
    words = [word for word in _WORDS if word.lower() not in str(truth).lower()]
    return list(chance.sample(words, 3))


def near_values(truth: Any) -> list[Any]:
    """Values that look like the ground truth and are wrong."""
    if isinstance(truth, bool) or is_choice(truth):
        return []
    if is_number(truth):
        value, text = _value(truth), text_of(truth).strip()
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
    """Other ways to write the same answer, each with its name."""
    text = text_of(truth).strip()
    if is_number(truth):
        value = _value(truth)
        if isinstance(value, int) and abs(value) >= 1000:
            yield "with thousands separators", f"{value:,}"
        if isinstance(value, int):
            yield "with a decimal point", f"{value}.0"
        yield "with a dollar sign", f"${text}"
    elif isinstance(truth, str) and text:
        if text.swapcase() != text:
            yield "in other case", text.swapcase()
        yield "in bold", f"**{text}**"
    if text:
        yield "with a full stop", f"{text}."
        yield "with spaces around it", f"  {text}  "


def options(truth: Any, wrong: Sequence[Any]) -> list[str]:
    """The ground truth among others that it could be."""
    if is_choice(truth):
        return list("ABCDEFGHIJ"[: max(4, "ABCDEFGHIJ".index(truth.strip()) + 2)])
    if is_number(truth) and isinstance(value := _value(truth), int):
        return [text_of(_like(truth, number)) for number in range(value - 12, value + 13)]
    return [*(text_of(value) for value in wrong), text_of(truth), *_WORDS[:4]]


def _value(truth: Any) -> int | float:
    if isinstance(truth, int | float):
        return truth
    text = truth.strip().replace(",", "")
    return float(text) if "." in text else int(text)


def _like(truth: Any, number: float) -> Any:
    """A number in the form in which the ground truth is given."""
    return str(number) if isinstance(truth, str) else number
