"""A parsed page: its fenced blocks in order, with the notes before and the expected output after each.

How a page is written, so that it runs:

- a block with `title="FILE"` is written to that file, whole;
- `python` without a title is executed; a `text` block right behind it is what it prints;
- `console`: lines after `$ ` are commands (a `\\` at the end, or `> ` at the beginning of the next line, goes on), the
  lines below a command are what it prints;
- `yaml` without a title is a part of a task or a train file; `json` is parsed.

In comments of their own (`<!-- … -->`), right before a block: `not run: WHY`, `exits with N`, `waits for: TEXT`,
`yaml: other`; anywhere: `page: in a clone`, `page: long`, `page: in ENVIRONMENT`, `page: needs a sandbox`,
`model answers: KEY=TEXT; else=TEXT`,
`before this page: COMMANDS`, for bash, which bring about what a reader of this page has already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.MULTILINE)
_NOTES_BEFORE = re.compile(r"(?:<!--[^>]*-->\s*)+\Z")
_NOTE = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_PROGRAMS = ("jq", "curl", "git", "npx", "docker")
_PROMPT, _GOES_ON = "$ ", "> "


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command of one or several lines, and its output; None if the page does not show it."""

    text: str
    expected: str | None


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: the first word behind the fence, or what stands in its braces.
        body: its text, without the indentation of the fence.
        line: of the fence, in the page.
        title: the file that it is; None where it is none.
        notes: the comments right before it, as `words: rest`.
        expected: the `text` block right behind it.
    """

    language: str
    body: str
    line: int
    title: str | None = None
    notes: tuple[str, ...] = ()
    expected: str | None = None

    def note(self, start: str) -> str | None:
        """Return the rest of the note that begins with these words; None without such a note."""
        return next((note.removeprefix(start).lstrip(": ") for note in self.notes if note.startswith(start)), None)


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its path, its blocks and its notes."""

    path: Path
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = field(default=())

    def is_(self, words: str) -> bool:
        """Return whether the page notes `page: WORDS`."""
        return f"page: {words}" in self.notes

    @property
    def before(self) -> str | None:
        """Return the commands that a reader has run before; None if there are none."""
        start = "before this page:"
        return next((note.removeprefix(start) for note in self.notes if note.startswith(start)), None)

    @property
    def environment(self) -> str | None:
        """Return the folder of `.integrations` that the page runs in; None for the current environment."""
        named = [note.removeprefix("page: in ") for note in self.notes if note.startswith("page: in ")]
        return next((name for name in named if name != "a clone"), None)

    @property
    def programs(self) -> set[str]:
        """Return the programs beyond a shell's own that its commands use, and that a machine may lack."""
        texts = [command.text for block in self.blocks if block.language == "console" for command in _typed(block)]
        return {name for name in _PROGRAMS if any(re.search(rf"(?:^|[|;&(]\s*){name}\s", text) for text in texts)}

    @property
    def answers(self) -> dict[str, str]:
        """Return the model's answers: the text for each word of a question, in order."""
        line = next((n.removeprefix("model answers:") for n in self.notes if n.startswith("model answers:")), "")
        pairs = (pair.partition("=") for pair in line.split(";") if pair.strip())
        return {key.strip(): text.strip() for key, _, text in pairs}


def read_page(path: Path) -> Page:
    """Parse a page."""
    text = path.read_text(encoding="utf-8")
    matches = list(_BLOCK.finditer(text))
    blocks: list[Block] = []
    for at, match in enumerate(matches):
        before = text[matches[at - 1].end() if at else 0 : match.start()]
        block = _block(match, before, text.count("\n", 0, match.start()) + 1)
        if block.language == "text" and not block.title and blocks and not before.strip():
            blocks[-1] = _with_expected(blocks[-1], block.body)
        blocks.append(block)
    return Page(path, tuple(blocks), tuple(_NOTE.findall(text)))


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a `console` block.

    Raises:
        ValueError: it begins with something else.
    """
    found: list[tuple[list[str], list[str]]] = []
    for line in block.body.splitlines():
        goes_on = found and not found[-1][1]
        if line.startswith(_PROMPT):
            found.append(([line.removeprefix(_PROMPT)], []))
        elif goes_on and line.startswith(_GOES_ON):
            found[-1][0].append(line.removeprefix(_GOES_ON))
        elif goes_on and found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
        elif found:
            found[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"line {block.line}: a console block begins with a command, `$ …`, and not with {line!r}")
    commands = [Command("\n".join(words), "\n".join(told) if any(told) else None) for words, told in found]
    if block.expected is not None and commands and commands[-1].expected is None:
        commands[-1] = Command(commands[-1].text, block.expected)
    return commands


def _typed(block: Block) -> list[Command]:
    return [] if block.note("not run") is not None else commands_of(block)


def _block(match: re.Match[str], before: str, line: int) -> Block:
    info = match["info"].strip()
    title = _TITLE.search(info)
    indent = len(match["indent"])
    body = "".join(row[indent:] if row.strip() else "\n" for row in match["body"].splitlines(keepends=True))
    noted = _NOTES_BEFORE.search(before)
    language = info if info.startswith("{") else info.split(" ")[0]
    return Block(language, body, line, title[1] if title else None, tuple(_NOTE.findall(noted[0])) if noted else ())


def _with_expected(block: Block, expected: str) -> Block:
    return Block(block.language, block.body, block.line, block.title, block.notes, expected)
