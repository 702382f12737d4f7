"""Fenced blocks of a reply, as CommonMark reads them, and which of them is the program."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from typing import Literal, NamedTuple

Choice = Literal["last", "first", "joined"]
"""Which of several blocks is meant: the last one, the first one, or all of them as one text."""


class Block(NamedTuple):
    """A fenced block: its tag in lower case, "" where it has none, and its text."""

    tag: str
    text: str


def fenced_blocks(text: str) -> list[Block]:
    """The blocks of a text, in order. One that is not closed runs to the end. Linear in the length of `text`."""
    blocks: list[Block] = []
    fence, tag, lines = "", "", [""]
    for ended in text.split("\n"):  # other line ends may stand in a program's texts
        line = ended.removesuffix("\r")
        stripped = line.strip()
        if not fence:
            fence, tag = _opening(stripped)
            lines = []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            blocks.append(_block(tag, lines))
            fence = ""
        else:
            lines.append(line)
    return [*blocks, _block(tag, lines)] if fence else blocks


def block_of(text: str, tags: Collection[str], choice: Choice) -> str | None:
    """The text of the block that is meant; None where there is none.

    Blocks with one of `tags` are meant; where no block has one, those without a tag. Blocks of other languages, such as
    a shell session or an example of output, never are.
    """
    blocks = fenced_blocks(text)
    fitting = [block.text for block in blocks if block.tag in tags] or [block.text for block in blocks if not block.tag]
    if not fitting:
        return None
    return "\n".join(fitting) if choice == "joined" else fitting[0 if choice == "first" else -1]


def _opening(line: str) -> tuple[str, str]:
    """The fence that a line opens and its tag; "" where it opens none."""
    for mark in ("`", "~"):
        width = len(line) - len(line.lstrip(mark))
        info = line[width:].strip()
        if width >= 3 and not (mark == "`" and "`" in info):
            word = info.strip("{}. ").split(maxsplit=1)
            return mark * width, word[0].strip("{}.").lower() if word else ""
    return "", ""


def _block(tag: str, lines: list[str]) -> Block:
    return Block(tag, textwrap.dedent("\n".join(lines)) if lines and lines[0][:1] in (" ", "\t") else "\n".join(lines))
