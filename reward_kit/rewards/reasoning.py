"""The reward for reasoning in steps that can be seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from reward_kit.models import EvaluateResult, Message
from reward_kit.rewards.reading.replies import Part, last_reply, lines_without_code, word_count
from reward_kit.typed_interface import reward_function

OPENERS = (
    *("first", "firstly", "first of all", "second", "secondly", "third", "thirdly", "fourth", "fifth"),
    *("next", "then", "after that", "finally", "lastly"),
)
"""What opens a step where a comma follows."""

_DECORATION = re.compile(r"[\s>#*_]*")
_BULLET = re.compile(r"[-*+•–](?=[ \t])")
_NUMBER = re.compile(r"(?:\(\d{1,3}\)|\d{1,3}[.)])(?:\*\*|__)?(?=\s|$)")
_STEP = r"step[ \t]{1,3}\d{1,3}\b"
_SENTENCE = r"(?:^[\s>#*_]{0,8}|(?<=[.!?:;,][ \t]))"
_TAG = re.compile(r"</?[A-Za-z]{1,20}>")
_WORDS = re.compile(r"\w+")


@reward_function
def reasoning_steps(
    messages: list[Message],
    assistant_turns: list[int] | None = None,
    *,
    at_least: Annotated[int, Field(ge=1)] = 3,
    min_words: Annotated[int, Field(ge=1)] = 3,
    openers: tuple[str, ...] = OPENERS,
    of: Part = "whole",
) -> EvaluateResult:
    """The number of explicit steps over `at_least`, and 1 from there on.

    A step begins with a number ("1.", "2)", "(3)") or a bullet at the beginning of a line, with "Step 4", or with an
    opener such as "First," at the beginning of a sentence or behind a comma. It counts where it says something, and
    once where it is repeated word for word. It measures form: steps that say nothing true count like others.

    After the reward of this name of Open-R1 (Hugging Face 2025), which counts bare markers, rules and repetitions.

    Args:
        messages: the conversation.
        assistant_turns: the positions of the agent's own messages; left out, every assistant message is one.
        at_least: steps that earn 1.
        min_words: words or numbers that a step has, after its marker.
        openers: phrases, in any case, that open a step before a comma.
        of: the "whole" reply, its "thought", or its "answer". Fenced code has no steps.

    Example:
        ```python
        with_options(reasoning_steps, at_least=5, of="thought")
        ```
    """
    text = _TAG.sub("\n", "\n".join(lines_without_code(last_reply(messages, assistant_turns, of))))
    steps = _steps(text, _inline(openers), min_words)
    said = {tuple(_WORDS.findall(step.casefold())) for step in steps if word_count(step) >= min_words}
    reason = f"{len(said)} different steps with words, of {len(steps)} markers; {at_least} are wanted"
    return EvaluateResult(score=min(1.0, len(said) / at_least), reason=reason)


class _Marker(NamedTuple):
    start: int
    end: int


def _inline(openers: Sequence[str]) -> re.Pattern[str]:
    """What opens a step in a line: "Step 4", or an opener and a comma."""
    phrases = "|".join(re.escape(phrase.strip()) for phrase in openers if phrase.strip())
    opened = rf"|(?:{phrases})[ \t]?[,，、]" if phrases else ""
    return re.compile(rf"{_SENTENCE}(?:{_STEP}[ \t]?[:.)\-–—]?{opened})", re.IGNORECASE)


def _steps(text: str, inline: re.Pattern[str], min_words: int) -> list[str]:
    """What follows each marker: the rest of its line, or, where that says too little, all up to the next marker."""
    markers = _markers(text, inline)
    ends = [*(marker.start for marker in markers), len(text)][1:]
    steps = []
    for marker, end in zip(markers, ends, strict=True):
        whole = text[marker.end : end]
        line = whole.partition("\n")[0]
        steps.append(line if word_count(line) >= min_words else whole)
    return steps


def _markers(text: str, inline: re.Pattern[str]) -> list[_Marker]:
    """Every marker. Markers that follow one another with nothing between, as in "- Step 1:", are one."""
    markers: list[_Marker] = []
    position = 0
    for line in text.split("\n"):
        found = [_Marker(position + start, position + end) for start, end in _in_line(line, inline)]
        for marker in found:
            if markers and markers[-1].start >= position and not text[markers[-1].end : marker.start].strip("*_ \t"):
                markers[-1] = _Marker(markers[-1].start, marker.end)
            else:
                markers.append(marker)
        position += len(line) + 1
    return markers


def _in_line(line: str, inline: re.Pattern[str]) -> list[tuple[int, int]]:
    """Where markers begin and end in a line: at most one at its beginning, and any number in its sentences."""
    if not line or line.isspace():
        return []
    found: list[tuple[int, int]] = []
    begins = len(line) - len(line.lstrip())
    bullet = _BULLET.match(line, begins)
    after = bullet.end() if bullet else begins
    decoration = _DECORATION.match(line, after)
    number = _NUMBER.match(line, decoration.end() if decoration else after)
    if last := number or bullet:
        found.append((begins, last.end()))
        after = last.end()
    rest = line[after:]
    return found + [(after + match.start(), after + match.end()) for match in inline.finditer(rest)]
