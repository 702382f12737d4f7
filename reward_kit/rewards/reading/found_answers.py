"""Which part of a reply is its final answer: a box, a marked line, or nothing.

1. The last `\\boxed{…}` (also `\\fbox`) that says something. Boxes with only "and", "or" or a comma between them are
   one answer with several values, so that "\\boxed{3} or \\boxed{4}" is not 4.
2. Else the last explicit mark: "#### 42", "the answer is …", "final answer: …", "<answer>…</answer>".
3. Else the whole reply where it is one short line: it may be nothing but the answer.
4. Else, only where the author asks for it, the last number of the reply.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Unmarked = Literal["refuse", "last_number"]
"""What is done with a reply that marks no answer."""

LONGEST_LINE = 200
_BOX = re.compile(r"\\f?boxed\s*(?:(\{)|([0-9]+|[A-Za-z])(?![0-9A-Za-z]))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_GAP = re.compile(
    r"(?:[\s$.:()\[\]\\*,;/&{}]|\b(?:text|mathrm|quad|and|or|either|also)\b|\b[a-z](?:_\{?[0-9]\}?)?\s*=)*",
    re.IGNORECASE,
)
_CONNECTED = re.compile(r"[,;/&]|\b(?:and|or)\b|\\(?:lor|vee)\b", re.IGNORECASE)
_OR = re.compile(r"\bor\b|\\(?:lor|vee)\b", re.IGNORECASE)
_STOP = re.compile(r"[.?!](?=\s)|\n")
_MARK = re.compile(
    r"(?i)####[ \t]*|\b(?:final[ \t]+)?(?:answer|result|solution|option|choice)\b"
    r"(?:[ \t]+(?:to|for|of)\b[^.\n:=]{0,60}?)?[ \t]*(?:\*\*)?[ \t]*"
    r"(?:(?:is|are|equals|was|will be)\b(?:[ \t]+therefore|[ \t]+then)?[ \t]*:?|[:=])[ \t]*(?:\*\*(?=\s))?[ \t]*"
)
_TAG_OPEN, _TAG_CLOSE = "<answer>", "</answer>"
_INLINE = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("**", "**"), ("`", "`"))
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[ \t]+(?:because|since|as|so|which|where|when)\b|\n")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}.,])[-+−]\s?)?(?<![\w.,])[$€£]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+)?%?"
)


class Found(NamedTuple):
    """A final answer: its text, how it was marked, and why there is none where there is none."""

    text: str
    how: Literal["box", "mark", "whole", "last_number", "none"]
    why: str = ""


def find_answer(text: str, unmarked: Unmarked = "refuse") -> Found:
    """The final answer of a reply, as the module says. Linear in the length of `text`."""
    boxed = _boxed(text)
    if boxed is not None:
        return boxed
    marked = _marked(text)
    if marked:
        return Found(marked, "mark")
    short = text.strip()
    if short and len(short) <= LONGEST_LINE and "\n" not in short:
        return Found(short, "whole")
    if unmarked == "last_number" and (number := last_number(text)):
        return Found(number, "last_number")
    return Found("", "none", "the reply marks no final answer" if short else "the reply is empty")


def last_number(text: str) -> str:
    """The last number in `text`, as it is written; "" where there is none."""
    last = ""
    for match in _NUMBER.finditer(text):
        last = match[0]
    return "".join(last.split())


def truth_text(text: str) -> str:
    """The answer in a ground truth: after the last "####", or in the last box of a worked solution; else all of it."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = _boxed(text)
    return boxed.text if boxed is not None and boxed.text else text.strip()


def _boxed(text: str) -> Found | None:
    """The last boxes as one answer; None where nothing is boxed."""
    boxes = list(_boxes(text))
    if boxes and boxes[-1][2] is None:
        return Found("", "none", "the last \\boxed{ is not closed")
    told = [box for box in boxes if box[2] and box[2].strip(" .…")]
    if not told:
        return None
    joined = [told[-1]]
    for box in reversed(told[:-1]):
        gap = text[box[1] : joined[0][0]]
        if len(gap) > LONGEST_LINE or not _joins(gap):
            break
        joined.insert(0, box)
    values = list(dict.fromkeys((box[2] or "").strip() for box in joined))
    return Found(values[0] if len(values) == 1 else " and ".join(values), "box")


def _joins(gap: str) -> bool:
    """Whether what stands between two boxes makes them one answer with several values.

    Within a sentence an "or" does, whatever else it says: a reply that offers a choice has not made it.
    """
    if _OR.search(gap) and not _STOP.search(gap):
        return True
    return _CONNECTED.search(gap) is not None and _GAP.fullmatch(gap) is not None


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """Start, end and content of every outermost box, in order; the content is None where the brace never closes."""
    found: list[tuple[int, int, str | None]] = []
    position = 0
    while match := _BOX.search(text, position):
        if match[2]:
            found.append((match.start(), match.end(), match[2]))
            position = match.end()
            continue
        end = _closing(text, match.end())
        if end is None:
            found.append((match.start(), len(text), None))
            return found
        found.append((match.start(), end + 1, text[match.end() : end]))
        position = end + 1
    return found


def _closing(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` closes."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if not depth:
                return match.start()
    return None


def _marked(text: str) -> str:
    """What follows the last explicit mark, up to the end of its sentence; "" where there is none."""
    closed = text.rfind(_TAG_CLOSE)
    opened = text.rfind(_TAG_OPEN, 0, closed) if closed >= 0 else -1
    position, hashes = -1, False
    for match in _MARK.finditer(text):
        position, hashes = match.end(), match[0].startswith("#")
    if opened >= 0 and opened > position:
        return text[opened + len(_TAG_OPEN) : closed].strip()
    if position < 0:
        return ""
    rest = text[position:].lstrip()[:4_000]
    if hashes:
        return rest.partition("\n")[0].strip()
    return _stated(rest)


def _stated(rest: str) -> str:
    """The answer at the start of `rest`: its inline mathematics or bold text, else the words of its sentence."""
    line = _SENTENCE_END.split(rest, maxsplit=1)[0].strip()
    if line.endswith("**") and line.count("**") == 1:
        line = line[:-2].rstrip()
    for start, end in _INLINE:
        if rest.startswith(start):
            inner, closed, after = rest[len(start) :].partition(end)
            if closed and not _goes_on(after):
                return inner.strip()
            break
    return line


def _goes_on(after: str) -> bool:
    """Whether an answer goes on behind its first formula: "$3$ or $4$", "$5$ cm", "**3**, **4**"."""
    tail = _SENTENCE_END.split(after, maxsplit=1)[0].strip()
    return bool(tail) and tail not in {".", "!", "**", "$"}


def answer_region(text: str) -> str:
    """Where an answer of several lines stands: the last box, `<answer>`, all behind the last mark; else everywhere."""
    boxed = _boxed(text)
    if boxed is not None and boxed.text:
        return boxed.text
    position, closed = -1, text.rfind(_TAG_CLOSE)
    opened = text.rfind(_TAG_OPEN, 0, closed) if closed >= 0 else -1
    for match in _MARK.finditer(text):
        position = match.end()
    if opened >= 0 and opened > position:
        return text[opened + len(_TAG_OPEN) : closed].strip()
    return text[max(position, 0) :].strip()
