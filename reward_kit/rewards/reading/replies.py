"""What rewards of form read: the messages that the agent wrote itself, whole, or only their thought or answer.

An example in the prompt is an assistant message too. Where the record says which messages are the agent's, only those
are read, so that no example earns anything.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Literal

from reward_kit.models import Message

Part = Literal["whole", "thought", "answer"]
"""Which part of a reply: all of it, what stands in `<think>` or `reasoning_content`, or what is left without it."""

_BEGINS, _ENDS = "<think>", "</think>"
# Scripts that are written without blanks: a character counts as a word.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def own_messages(messages: Sequence[Message], assistant_turns: Sequence[int] | None) -> list[Message]:
    """The messages that the agent wrote: those at `assistant_turns`, or where that is None all of an assistant."""
    if assistant_turns is None:
        return [message for message in messages if message.role == "assistant"]
    return [messages[position] for position in assistant_turns if 0 <= position < len(messages)]


def last_reply(messages: Sequence[Message], assistant_turns: Sequence[int] | None, part: Part = "whole") -> str:
    """A part of the last message that the agent wrote; "" where it wrote none, or nothing in it."""
    own = own_messages(messages, assistant_turns)
    return part_of(own[-1], part) if own else ""


def part_of(message: Message, part: Part) -> str:
    """A part of a message. What the provider set apart as `reasoning_content` is thought, and comes first."""
    apart, text = message.reasoning_content or "", message.text
    if part == "whole":
        return f"{apart}\n{text}" if apart and text else apart or text
    thought, answer = _split(text)
    if part == "answer":
        return answer
    return f"{apart}\n{thought}" if apart and thought else apart or thought


def word_count(text: str) -> int:
    """How many words have a letter or digit. In scripts without blanks each character counts as one."""
    spaced, characters = _UNSPACED.subn(" ", text)
    return characters + sum(any(char.isalnum() for char in word) for word in spaced.split())


def composed(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """The text in a normal form of Unicode, which takes quadratic time for a letter with a great many marks.

    So marks after the thirtieth on one letter are dropped, where Unicode's Stream-Safe Text Format breaks them apart.
    """
    marks = "".join(re.escape(char) for char in set(text) if unicodedata.combining(char))
    if marks:
        text = re.sub(rf"([{marks}]{{30}})[{marks}]+", r"\1", text)
    return unicodedata.normalize(form, text)


def lines_without_code(text: str) -> Iterator[str]:
    """The lines that stand in no fenced block; a block that does not end hides what follows. Linear in the length."""
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        mark = next((mark for mark in ("```", "~~~") if bare.startswith(mark)), "")
        if fence:
            fence = "" if mark == fence and not bare.strip(mark[0]) else fence
        elif mark and mark not in bare[3:].lstrip(mark[0]):
            fence = mark
        else:
            yield line


def _split(text: str) -> tuple[str, str]:
    """Thought and answer of a text, as `texts.last_answer` parts them: at the last end of a thought."""
    if _ENDS in text:
        thought, _, answer = text.rpartition(_ENDS)
        return thought.strip().removeprefix(_BEGINS).strip(), answer.strip()
    answer, _, thought = text.partition(_BEGINS)
    return thought.strip(), answer.strip()
